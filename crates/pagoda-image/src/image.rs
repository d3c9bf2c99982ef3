//! Reads an image. Every page that it hands out has been compared with its checksum.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, CHUNK_PAGES, CHUNK_SIZE, ChunkCount, ChunkIdx, PAGE_SIZE, PageIdx};
use xxhash_rust::xxh3::Xxh3;

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{BlockIdx, Entry, entry_offset, sum_of};
use crate::files::{For, open_file};
use crate::id::ImageId;
use crate::ledger::{open_image, read_manifest};
use crate::lengths::Lengths;
use crate::manifest::{Manifest, Stage};
use crate::map;
use crate::part::{STATE_MAGIC, no_state};

const PAGE: usize = PAGE_SIZE as usize;
/// Bytes of the state that are read at once.
const STATE_PIECE: usize = 1 << 20;

/// What an image has of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: the VM still has it.
    Missing,
    /// Zeros.
    Zero,
    /// A copy.
    Block,
}

/// What an image has of a chunk. Pages in neither set were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkContent {
    /// The VM still has them.
    pub missing: PageSet,
    /// All zero.
    pub zero: PageSet,
}

/// An image whose manifest is whole and whose files have their lengths.
#[derive(Debug)]
pub struct Image {
    disk: Arc<dyn Disk>,
    manifest: Manifest,
    state: File,
    map: File,
    pages: File,
    /// `pages` past the page cache, if its file system can do that.
    direct: Option<File>,
    blocks: u64,
}

impl Image {
    pub(crate) fn open(disk: Arc<dyn Disk>, images: &OwnedFd, id: ImageId) -> Result<Image, ImageError> {
        let dir = open_image(images, id)?;
        let manifest = read_manifest(&dir, id)?;
        if manifest.stage == Stage::Lost {
            return Err(ImageError::Lost { why: manifest.why.unwrap_or_default() });
        }
        let open = |file: ImageFile| {
            open_file(dir.as_fd(), file.name(), For::Reading).map_err(ImageError::io(file, 0)).map(|(opened, _)| opened)
        };
        let (state, map, pages) = (open(ImageFile::State)?, open(ImageFile::Map)?, open(ImageFile::Pages)?);
        let lengths = Lengths::of(&map, &pages, Some(&state))?;
        lengths.check(&manifest)?;
        let direct = open_file(dir.as_fd(), ImageFile::Pages.name(), For::DirectReading).ok().map(|(file, _)| file);
        Ok(Image { disk, manifest, state, map, pages, direct, blocks: lengths.pages.pages_floor().0 })
    }

    /// What it is of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Chunks of the VM.
    pub fn chunks(&self) -> ChunkCount {
        self.manifest.pages().chunks_ceil()
    }

    /// What it has of a chunk, by its map alone.
    ///
    /// # Errors
    /// An entry is damaged, or cannot be read: where.
    pub fn look_at(&self, chunk: ChunkIdx) -> Result<ChunkContent, ImageError> {
        self.entries_of(chunk).map(|(_, found)| found)
    }

    /// Reads a page into `content`, [`PAGE_SIZE`] bytes; zeros if the page is missing.
    ///
    /// # Errors
    /// It is damaged, or cannot be read: where.
    pub fn read_page(&self, page: PageIdx, content: &mut [u8]) -> Result<Content, ImageError> {
        assert_eq!(content.len(), PAGE, "one page");
        assert!(page.0 < self.manifest.pages().0, "a page of the VM");
        let bits = map::read_entry(&*self.disk, &self.map, page)?;
        match map::decode(page, bits, self.blocks)? {
            Entry::Block { block, sum } => {
                self.read_run(block, content, page)?;
                check_sum(page, block, sum, content)?;
                Ok(Content::Block)
            }
            entry => {
                content.fill(0);
                Ok(if entry == Entry::Zero { Content::Zero } else { Content::Missing })
            }
        }
    }

    /// Reads a chunk into `content`, [`CHUNK_SIZE`] bytes, consecutive blocks with one call; zeros where the page is missing.
    ///
    /// # Errors
    /// A page is damaged, or cannot be read: which and where. `content` is not to be used then.
    pub fn read_chunk(&self, chunk: ChunkIdx, content: &mut [u8]) -> Result<ChunkContent, ImageError> {
        assert_eq!(content.len() as u64, CHUNK_SIZE, "one chunk");
        let (entries, found) = self.entries_of(chunk)?;
        content.fill(0);
        let mut index = 0;
        while index < entries.len() {
            let Entry::Block { block, .. } = entries[index] else {
                index += 1;
                continue;
            };
            let len = consecutive(block, &entries[index..]);
            let bytes = &mut content[index * PAGE..(index + len) * PAGE];
            self.read_run(block, bytes, chunk.page(index as u8))?;
            index += len;
        }
        let (pages, _) = content.as_chunks::<PAGE>();
        for ((index, entry), page) in (0..=u8::MAX).zip(entries).zip(pages) {
            if let Entry::Block { block, sum } = entry {
                check_sum(chunk.page(index), block, sum, page)?;
            }
        }
        Ok(found)
    }

    /// Reads the blocks of pages of a chunk into `content`, one behind the other in the order of the pages, consecutive blocks
    /// with one call: past the page cache, if that is possible and `content` begins at a page of memory. An image does not
    /// change, so any number of readers may do this at a time.
    ///
    /// # Errors
    /// A page has no block, is damaged, or cannot be read: one of them, and where. `content` is not to be used then.
    pub fn read_blocks(&self, chunk: ChunkIdx, pages: PageSet, content: &mut [u8]) -> Result<(), ImageError> {
        assert_eq!(content.len(), usize::from(pages.count()) * PAGE, "as many pages");
        let (all, _) = self.entries_of(chunk)?;
        let mut entries = [Entry::Missing; CHUNK_PAGES as usize];
        let entries = &mut entries[..usize::from(pages.count())];
        for (entry, index) in entries.iter_mut().zip(pages.iter()) {
            *entry = all[usize::from(index)];
        }
        let (mut done, mut rest) = (0, pages.iter());
        while let Some(index) = rest.next() {
            let page = chunk.page(index);
            let Entry::Block { block, .. } = entries[done] else { return Err(no_block(page).into()) };
            let len = consecutive(block, &entries[done..]);
            self.read_directly(block, &mut content[done * PAGE..(done + len) * PAGE], page)?;
            done += len;
            rest.by_ref().take(len - 1).for_each(|_| ());
        }
        let (content, _) = content.as_chunks::<PAGE>();
        for ((index, entry), content) in pages.iter().zip(&*entries).zip(content) {
            if let Entry::Block { block, sum } = *entry {
                check_sum(chunk.page(index), block, sum, content)?;
            }
        }
        Ok(())
    }

    /// QEMU's state, from its beginning, with its length. It is not compared with anything: see [`Image::check_state`].
    ///
    /// # Errors
    /// The disk's.
    pub fn state(&self) -> Result<(File, Bytes), ImageError> {
        let file = self.state.try_clone().map_err(ImageError::io(ImageFile::State, 0))?;
        Ok((file, Bytes(self.manifest.state.bytes)))
    }

    /// Compares the state with its checksum.
    ///
    /// # Errors
    /// It is damaged, or cannot be read.
    pub fn check_state(&self) -> Result<(), ImageError> {
        let len = self.manifest.state.bytes;
        let mut sum = Xxh3::new();
        let mut piece = vec![0; STATE_PIECE.min(len as usize)];
        for offset in (0..len).step_by(STATE_PIECE) {
            let bytes = &mut piece[..(len - offset).min(STATE_PIECE as u64) as usize];
            let failed = ImageError::io(ImageFile::State, offset);
            self.disk.read_at(&self.state, bytes, offset).map_err(failed)?;
            if offset == 0 && !bytes.starts_with(STATE_MAGIC) {
                return Err(no_state(0).into());
            }
            sum.update(bytes);
        }
        if sum.digest() != self.manifest.state.xxh3 {
            let what = format!("its {len} bytes do not match their checksum");
            return Err(Damage::of_file(ImageFile::State, Bytes::ZERO, what).into());
        }
        Ok(())
    }

    fn entries_of(&self, chunk: ChunkIdx) -> Result<([Entry; CHUNK_PAGES as usize], ChunkContent), ImageError> {
        let mut found = ChunkContent::default();
        let mut entries = [Entry::Missing; CHUNK_PAGES as usize];
        for (index, bits) in (0..=u8::MAX).zip(map::read_chunk(&*self.disk, &self.map, chunk)?) {
            let entry = map::decode(chunk.page(index), bits, self.blocks)?;
            match entry {
                Entry::Missing => found.missing.set(index),
                Entry::Zero => found.zero.set(index),
                Entry::Block { .. } => {}
            }
            entries[usize::from(index)] = entry;
        }
        Ok((entries, found))
    }

    /// Consecutive blocks, whose first is that of `page`, past the page cache if possible.
    fn read_directly(&self, first: BlockIdx, content: &mut [u8], page: PageIdx) -> Result<(), ImageError> {
        let is_aligned = content.as_ptr().addr().is_multiple_of(PAGE);
        if let Some(direct) = self.direct.as_ref().filter(|_| is_aligned)
            && self.disk.read_at(direct, content, first.offset().0).is_ok()
        {
            return Ok(());
        }
        // Its disk may want larger blocks than pages; and an error is told by this read as well.
        self.read_run(first, content, page)
    }

    /// Consecutive blocks, whose first is that of `page`.
    fn read_run(&self, first: BlockIdx, content: &mut [u8], page: PageIdx) -> Result<(), ImageError> {
        let offset = first.offset();
        let read = self.disk.read_at(&self.pages, content, offset.0);
        read.map_err(|error| Damage::of_page(ImageFile::Pages, page, offset, error.to_string()).into())
    }
}

/// How many of these entries, from the first on, are blocks behind each other. The first is this block.
fn consecutive(block: BlockIdx, entries: &[Entry]) -> usize {
    let follows =
        |(at, entry): (u32, &Entry)| matches!(entry, Entry::Block { block: next, .. } if next.0 == block.0 + at);
    (0..).zip(entries).take_while(|pair| follows(*pair)).count()
}

fn no_block(page: PageIdx) -> Damage {
    Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), "the page should have a block, and has none")
}

fn check_sum(page: PageIdx, block: BlockIdx, sum: u32, content: &[u8]) -> Result<(), ImageError> {
    if sum_of(page, content) == sum {
        return Ok(());
    }
    Err(Damage::of_page(ImageFile::Pages, page, block.offset(), "the content does not match its checksum").into())
}
