//! One image of a chain, opened for reading: its manifest, where its pages are, and its own blocks.
//!
//! The files of a filled image change in one way only: it may take over what its parent has ([`crate::Store::detach`]). Then
//! blocks are added, and entries that said "the parent's" say where the same content is in the image itself. So a reader finds
//! the same content meanwhile by either entry. It may only meet blocks that were not there when it opened the files.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{BlockIdx, Entry, sum_of};
use crate::files::{For, open_file};
use crate::id::ImageId;
use crate::ledger::{blocks_of, open_image, read_manifest};
use crate::lengths::Lengths;
use crate::manifest::{Manifest, Stage};
use crate::map::{ChunkEntries, Tables};

/// The open files of one image of a chain, and its manifest.
#[derive(Debug)]
pub(crate) struct Layer {
    disk: Arc<dyn Disk>,
    pub(crate) dir: OwnedFd,
    pub(crate) manifest: Manifest,
    pub(crate) state: File,
    map: File,
    pages: File,
    /// `pages` past the page cache, if its file system can do that.
    direct: Option<File>,
    marks: Option<File>,
    /// Blocks of `pages`, as they were counted last.
    blocks: AtomicU64,
}

/// Consecutive blocks, and where their content is to be.
pub(crate) struct Blocks<'a, 'b> {
    pub(crate) first: BlockIdx,
    /// That of the first block, for messages.
    pub(crate) page: PageIdx,
    pub(crate) pieces: &'a mut [IoSliceMut<'b>],
}

/// How blocks are read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Cached,
    /// Past the page cache, if that is possible.
    Direct,
}

impl Layer {
    pub(crate) fn open(disk: Arc<dyn Disk>, images: &OwnedFd, id: ImageId) -> Result<Layer, ImageError> {
        let dir = open_image(images, id)?;
        let manifest = read_manifest(&dir, id)?;
        if manifest.stage == Stage::Lost {
            return Err(ImageError::Lost { why: manifest.why.unwrap_or_default() });
        }
        let open = |file: ImageFile| {
            open_file(dir.as_fd(), file.name(), For::Reading).map_err(ImageError::io(file, 0)).map(|(opened, _)| opened)
        };
        let (state, map, pages) = (open(ImageFile::State)?, open(ImageFile::Map)?, open(ImageFile::Pages)?);
        let marks = manifest.parent.map(|_| open(ImageFile::Inherited)).transpose()?;
        let lengths = Lengths::of(&map, &pages, Some(&state), marks.as_ref())?;
        lengths.check(&manifest)?;
        let blocks = AtomicU64::new(lengths.pages.pages_floor().0);
        let direct = open_file(dir.as_fd(), ImageFile::Pages.name(), For::DirectReading).ok().map(|(file, _)| file);
        Ok(Layer { disk, dir, manifest, state, map, pages, direct, marks, blocks })
    }

    /// The entries of a chunk, or nothing if all its pages are the parent's.
    pub(crate) fn chunk(&self, chunk: ChunkIdx) -> Result<Option<Box<ChunkEntries>>, ImageError> {
        self.look(|tables| match tables.is_marked(chunk)? {
            true => Ok(None),
            false => tables.chunk_of_map(chunk).map(|entries| Some(Box::new(entries))),
        })
    }

    /// The entry of a page, in a chunk that is not marked.
    pub(crate) fn entry(&self, page: PageIdx) -> Result<Entry, ImageError> {
        self.look(|tables| tables.entry_of_map(page))
    }

    /// Looks again if `pages` is longer than it was: what an entry says may be of a block behind that.
    fn look<T>(&self, look: impl Fn(&Tables<'_>) -> Result<T, ImageError>) -> Result<T, ImageError> {
        let look = |blocks| {
            let (disk, id, marks) = (&*self.disk, self.manifest.id, self.marks.as_ref());
            look(&Tables { disk, id, map: &self.map, marks, blocks })
        };
        let before = self.blocks.load(Ordering::Relaxed);
        let found = look(before);
        if found.is_ok() {
            return found;
        }
        let blocks = blocks_of(&self.pages)?;
        self.blocks.store(blocks, Ordering::Relaxed);
        if blocks == before { found } else { look(blocks) }
    }

    /// Reads consecutive blocks into pieces of whole pages, one behind the other. The first block is that of `page`.
    pub(crate) fn read_blocks(&self, run: Blocks<'_, '_>, way: Way) -> Result<(), ImageError> {
        let offset = run.first.offset();
        let is_aligned = |piece: &IoSliceMut<'_>| piece.as_ptr().addr().is_multiple_of(PAGE_SIZE as usize);
        let read = |file: &File, pieces: &mut [IoSliceMut<'_>]| {
            // What is left of the pieces when they were read in part is not what they were.
            let mut pieces: Vec<_> = pieces.iter_mut().map(|piece| IoSliceMut::new(piece)).collect();
            self.disk.read_pieces_at(file, &mut pieces, offset.0)
        };
        if let Some(direct) = self.direct.as_ref().filter(|_| way == Way::Direct && run.pieces.iter().all(is_aligned))
            && read(direct, run.pieces).is_ok()
        {
            return Ok(());
        }
        // Its disk may want larger blocks than pages; and an error is told by this read as well.
        read(&self.pages, run.pieces)
            .map_err(|error| Damage::of_page(ImageFile::Pages, run.page, offset, error.to_string()).into())
    }

    /// Reads a block, and compares it with its checksum.
    pub(crate) fn read_block(
        &self,
        page: PageIdx,
        entry: (BlockIdx, u32),
        content: &mut [u8],
    ) -> Result<(), ImageError> {
        let read = self.disk.read_at(&self.pages, content, entry.0.offset().0);
        read.map_err(|error| Damage::of_page(ImageFile::Pages, page, entry.0.offset(), error.to_string()))?;
        check_sum(page, entry, content)
    }
}

/// Compares a block's content with its entry's checksum.
pub(crate) fn check_sum(page: PageIdx, (block, sum): (BlockIdx, u32), content: &[u8]) -> Result<(), ImageError> {
    if sum_of(page, content) == sum {
        return Ok(());
    }
    Err(Damage::of_page(ImageFile::Pages, page, block.offset(), "the content does not match its checksum").into())
}
