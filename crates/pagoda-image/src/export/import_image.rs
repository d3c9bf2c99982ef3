//! Makes an image of an exported file. All of it is checked before anything can be seen: what is made is `ID.part` until then.
//!
//! The order: header and manifest -> the caller looks whether there is room -> state and pages, as they come, into `ID.part` ->
//! the end marker matches -> everything is on the disk -> the manifest is -> `ID.part` is renamed to `ID`, and that is on the
//! disk. A daemon that dies anywhere leaves a whole image or a leftover that the next one removes.

use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkIdx, PAGE_SIZE, PageCount};

use super::reader::{FileError, Piece, Reader, Totals};
use crate::damage::{ImageError, ImageFile};
use crate::entry::{BlockIdx, ENTRY_SIZE, Entry, entry_offset};
use crate::id::ImageId;
use crate::ledger::Ledger;
use crate::manifest::{Import, Manifest};
use crate::store::Store;

/// Bytes that are written before they are waited for: so the end of an import does not wait for all of them at once.
const SYNC_EVERY: Bytes = Bytes::from_mib(64);

/// Why no image was made of a file. Nothing is left of it.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file, or where it comes from.
    #[error(transparent)]
    File(#[from] FileError),
    /// The directory of images.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// The image that an import has made, and what its file had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    pub manifest: Manifest,
    pub totals: Totals,
}

/// A file whose header and manifest have been read.
#[derive(Debug)]
pub struct Importing<R> {
    reader: Reader<R>,
}

/// An image that is being made. Dropped, nothing is left of it.
#[derive(Debug)]
struct Unfinished<'a> {
    store: &'a Store,
    ledger: Arc<Ledger>,
    is_done: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            // What cannot be removed now is removed when a daemon starts.
            let _ = self.store.remove(self.ledger.id());
        }
    }
}

impl<R: Read> Importing<R> {
    /// # Errors
    /// The header or the manifest is not right.
    pub fn open(input: R) -> Result<Importing<R>, ImportError> {
        Ok(Importing { reader: Reader::open(input)? })
    }

    /// What the file has, by its own word.
    pub fn manifest(&self) -> &Manifest {
        self.reader.manifest()
    }

    /// Pages that it has content for, by its own word. It brings no more.
    pub fn blocks(&self) -> PageCount {
        self.reader.blocks()
    }

    /// Makes the image, by this name. It outlives the host when this returns, and waits to be accepted.
    ///
    /// # Errors
    /// The file is not right or ends early; the disk's. Nothing is left.
    pub fn make(mut self, store: &Store, id: ImageId, (vm, name): (&str, &str)) -> Result<Imported, ImportError> {
        let manifest = Manifest {
            id,
            vm: vm.to_owned(),
            name: name.to_owned(),
            imported: Some(Import::Waiting),
            ..self.manifest().clone()
        };
        let (_, prepared) = store.create(id, manifest.pages()).inspect_err(|_| drop(store.remove(id)))?;
        let mut unfinished = Unfinished { store, ledger: Arc::clone(prepared.ledger()), is_done: false };
        let totals = fill(&mut self.reader, &unfinished.ledger)?;
        unfinished.ledger.finish_import(manifest.clone())?;
        unfinished.is_done = true;
        Ok(Imported { manifest, totals })
    }
}

/// Writes state, blocks and map as they come.
fn fill(reader: &mut Reader<impl Read>, ledger: &Ledger) -> Result<Totals, ImportError> {
    let state = ledger.make_state()?;
    let (mut state_len, mut filler) = (0, Filler { ledger, blocks: 0, synced: Bytes::ZERO });
    loop {
        match reader.next_piece()? {
            Piece::State(bytes) => {
                let written = ledger.disk.write_at(state, bytes, state_len);
                written.map_err(ImageError::io(ImageFile::State, state_len))?;
                state_len += bytes.len() as u64;
            }
            Piece::Chunk { chunk, pages, sums, content } => filler.chunk(chunk, pages, sums, content)?,
            Piece::Zeros { first, count } => {
                (first.0..first.0 + count.0).try_for_each(|chunk| filler.map(ChunkIdx(chunk), PageSet::EMPTY, &[]))?;
            }
            Piece::End(totals) => return Ok(totals),
        }
    }
}

/// Appends blocks, and writes the entries of a chunk behind them.
struct Filler<'a> {
    ledger: &'a Ledger,
    blocks: u64,
    synced: Bytes,
}

impl Filler<'_> {
    fn chunk(&mut self, chunk: ChunkIdx, pages: PageSet, sums: &[u32], content: &[u8]) -> Result<(), ImageError> {
        let (ledger, offset) = (self.ledger, self.blocks * PAGE_SIZE);
        let failed = ImageError::io(ImageFile::Pages, offset);
        ledger.disk.write_at(&ledger.pages, content, offset).map_err(failed)?;
        self.map(chunk, pages, sums)?;
        self.blocks += sums.len() as u64;
        let written = PageCount(self.blocks).bytes();
        if written.saturating_sub(self.synced) >= SYNC_EVERY {
            ledger.disk.sync_file(&ledger.pages).map_err(ImageError::io(ImageFile::Pages, 0))?;
            self.synced = written;
        }
        Ok(())
    }

    /// The entries of a chunk whose blocks are the next ones.
    fn map(&self, chunk: ChunkIdx, pages: PageSet, sums: &[u32]) -> Result<(), ImageError> {
        let mut bytes = [0; CHUNK_PAGES as usize * ENTRY_SIZE];
        let (places, _) = bytes.as_chunks_mut::<ENTRY_SIZE>();
        let mut blocks = (self.blocks as u32..).map(BlockIdx).zip(sums);
        for (index, place) in (0..=u8::MAX).zip(places) {
            let entry = match pages.contains(index).then(|| blocks.next()).flatten() {
                Some((block, sum)) => Entry::Block { block, sum: *sum },
                None => Entry::Zero,
            };
            *place = entry.encode().to_le_bytes();
        }
        let offset = entry_offset(chunk.first_page());
        let written = self.ledger.disk.write_at(&self.ledger.map, &bytes, offset);
        written.map_err(ImageError::io(ImageFile::Map, offset))
    }
}

impl Ledger {
    /// The file for QEMU's state of an image that has none yet.
    fn make_state(&self) -> Result<&std::fs::File, ImageError> {
        let made = self.disk.make_file(self.dir.as_fd(), ImageFile::State.name());
        let made = made.map_err(ImageError::io(ImageFile::State, 0))?;
        Ok(self.state.get_or_init(|| made))
    }
}
