//! Reads an image, and what it has in those that it refers to ([`crate::chain`]). Every page that it hands out has been compared
//! with its checksum.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, CHUNK_PAGES, CHUNK_SIZE, ChunkCount, ChunkIdx, PAGE_SIZE, PageIdx};
use xxhash_rust::xxh3::Xxh3;

use crate::chain::{Chain, Entries};
use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{BlockIdx, Entry, entry_offset};
use crate::id::ImageId;
use crate::layer::{Blocks, Way, check_sum};
use crate::manifest::Manifest;
use crate::part::{STATE_MAGIC, no_state};

const PAGE: usize = PAGE_SIZE as usize;
/// Bytes of the state that are read at once.
const STATE_PIECE: usize = 1 << 20;

/// What an image has of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: the VM still has it.
    Missing,
    /// The page was all zero, so there is no copy of it.
    Zero,
    /// A copy, which was read into the caller's buffer.
    Block,
}

/// What an image has of a chunk. Pages in neither set were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkContent {
    /// The VM still has them.
    pub missing: PageSet,
    /// The pages that are all zero.
    pub zero: PageSet,
}

/// An image whose manifest is whole and whose files have their lengths, and so are those of the images that it refers to.
#[derive(Debug)]
pub struct Image {
    disk: Arc<dyn Disk>,
    chain: Chain,
}

impl Image {
    pub(crate) fn open(disk: Arc<dyn Disk>, images: &OwnedFd, id: ImageId) -> Result<Image, ImageError> {
        let chain = Chain::open(&disk, images, id)?;
        Ok(Image { disk, chain })
    }

    /// The directory that has its files.
    pub(crate) fn dir(&self) -> &OwnedFd {
        &self.chain.own().dir
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// What it is of.
    pub fn manifest(&self) -> &Manifest {
        &self.chain.own().manifest
    }

    /// The manifests of the images that it refers to: its parent's, that one's parent's, and so on.
    pub fn parents(&self) -> impl Iterator<Item = &Manifest> {
        self.chain.parents().map(|layer| &layer.manifest)
    }

    /// Whether a VM can be made of it, in this life of the host.
    ///
    /// # Errors
    /// Why not, for its user.
    pub fn check_usable(&self, boot_id: &str) -> Result<(), String> {
        self.manifest().check_usable(boot_id)?;
        self.parents().try_for_each(|parent| {
            parent.check_usable(boot_id).map_err(|why| format!("the snapshot {} that it refers to: {why}", parent.name))
        })
    }

    /// Chunks of the VM.
    pub fn chunks(&self) -> ChunkCount {
        self.manifest().pages().chunks_ceil()
    }

    /// What it has of a chunk, by its map alone.
    ///
    /// # Errors
    /// An entry is damaged, or cannot be read: where.
    pub fn look_at(&self, chunk: ChunkIdx) -> Result<ChunkContent, ImageError> {
        self.entries_of(chunk, PageSet::FULL).map(|(_, found)| found)
    }

    /// Where the page's block is: which image of the chain has it, and at which place in that one's file. Blocks that follow one
    /// another there are read with one call. `None`: it has none.
    ///
    /// # Errors
    /// An entry is damaged, or cannot be read: where.
    pub fn place_of(&self, page: PageIdx) -> Result<Option<(u8, BlockIdx)>, ImageError> {
        Ok(match self.chain.entry(page)? {
            (level, Entry::Block { block, .. }) => Some((level, block)),
            _ => None,
        })
    }

    /// Reads a page into `content`, [`PAGE_SIZE`] bytes; zeros if the page is missing.
    ///
    /// # Errors
    /// It is damaged, or cannot be read: where.
    pub fn read_page(&self, page: PageIdx, content: &mut [u8]) -> Result<Content, ImageError> {
        assert_eq!(content.len(), PAGE, "one page");
        assert!(page.0 < self.manifest().pages().0, "a page of the VM");
        let (level, entry) = self.chain.entry(page)?;
        match entry {
            Entry::Block { block, sum } => {
                let read = self.chain.layer(level).read_block(page, (block, sum), content);
                read.map_err(|error| self.chain.at(level, error))?;
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
        let (entries, found) = self.entries_of(chunk, PageSet::FULL)?;
        content.fill(0);
        let mut pages = Vec::with_capacity(CHUNK_PAGES as usize);
        for ((index, (level, entry)), content) in (0..=u8::MAX).zip(entries).zip(content.chunks_exact_mut(PAGE)) {
            if let Entry::Block { block, sum } = entry {
                pages.push(Placed { page: chunk.page(index), level, block, sum, content });
            }
        }
        self.read_placed(pages, Way::Cached)?;
        Ok(found)
    }

    /// Reads the blocks of pages of a chunk into `content`, one behind the other in the order of the pages, consecutive blocks
    /// with one call: past the page cache, if that is possible and `content` begins at a page of memory. What an image has
    /// does not change, so any number of readers may do this at a time.
    ///
    /// # Errors
    /// A page has no block, is damaged, or cannot be read: one of them, and where. `content` is not to be used then.
    pub fn read_blocks(&self, chunk: ChunkIdx, pages: PageSet, content: &mut [u8]) -> Result<(), ImageError> {
        assert_eq!(content.len(), usize::from(pages.count()) * PAGE, "as many pages");
        let (entries, _) = self.entries_of(chunk, pages)?;
        let mut placed = Vec::with_capacity(usize::from(pages.count()));
        for (index, content) in pages.iter().zip(content.chunks_exact_mut(PAGE)) {
            let (page, entry) = (chunk.page(index), entries[usize::from(index)]);
            let (level, Entry::Block { block, sum }) = entry else { return Err(no_block(page).into()) };
            placed.push(Placed { page, level, block, sum, content });
        }
        self.read_placed(placed, Way::Direct)
    }

    /// Reads pages where they are: the blocks that follow each other in one of the images with one call, whatever the order of
    /// their pages. The pages of a chunk that an image of a chain has are mostly such blocks.
    fn read_placed(&self, mut pages: Vec<Placed<'_>>, way: Way) -> Result<(), ImageError> {
        pages.sort_unstable_by_key(|page| (page.level, page.block));
        for run in pages.chunk_by_mut(|one, next| one.level == next.level && one.block.0 + 1 == next.block.0) {
            let (level, first, page) = (run[0].level, run[0].block, run[0].page);
            let mut pieces: Vec<_> = run.iter_mut().map(|page| IoSliceMut::new(page.content)).collect();
            let read = self.chain.layer(level).read_blocks(Blocks { first, page, pieces: &mut pieces }, way);
            read.map_err(|error| self.chain.at(level, error))?;
        }
        pages.iter().try_for_each(|Placed { page, level, block, sum, content }| {
            check_sum(*page, (*block, *sum), content).map_err(|error| self.chain.at(*level, error))
        })
    }

    /// The pages of a chunk that have a block, and the checksums of their content, in order.
    ///
    /// # Errors
    /// A page is missing, or an entry is damaged: where.
    pub(crate) fn sums_of(&self, chunk: ChunkIdx) -> Result<(PageSet, Vec<u32>), ImageError> {
        let (entries, found) = self.entries_of(chunk, PageSet::FULL)?;
        if let Some(index) = found.missing.first_set() {
            let page = chunk.page(index);
            return Err(Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), "the page is missing").into());
        }
        let sums = entries.iter().filter_map(|(_, entry)| match entry {
            Entry::Block { sum, .. } => Some(*sum),
            _ => None,
        });
        Ok((PageSet::FULL - found.zero, sums.collect()))
    }

    /// Reads bytes of QEMU's state.
    ///
    /// # Errors
    /// The disk's; it ends before that.
    pub(crate) fn read_state(&self, content: &mut [u8], offset: u64) -> Result<(), ImageError> {
        let read = self.disk.read_at(&self.chain.own().state, content, offset);
        read.map_err(ImageError::io(ImageFile::State, offset))
    }

    /// QEMU's state, from its beginning, with its length. It is not compared with anything: see [`Image::check_state`].
    ///
    /// # Errors
    /// The disk's.
    pub fn state(&self) -> Result<(File, Bytes), ImageError> {
        let file = self.chain.own().state.try_clone().map_err(ImageError::io(ImageFile::State, 0))?;
        Ok((file, Bytes(self.manifest().state.bytes)))
    }

    /// Compares the state with its checksum.
    ///
    /// # Errors
    /// It is damaged, or cannot be read.
    pub fn check_state(&self) -> Result<(), ImageError> {
        let len = self.manifest().state.bytes;
        let mut sum = Xxh3::new();
        let mut piece = vec![0; STATE_PIECE.min(len as usize)];
        for offset in (0..len).step_by(STATE_PIECE) {
            let bytes = &mut piece[..(len - offset).min(STATE_PIECE as u64) as usize];
            let failed = ImageError::io(ImageFile::State, offset);
            self.disk.read_at(&self.chain.own().state, bytes, offset).map_err(failed)?;
            if offset == 0 && !bytes.starts_with(STATE_MAGIC) {
                return Err(no_state(0).into());
            }
            sum.update(bytes);
        }
        if sum.digest() != self.manifest().state.xxh3 {
            let what = format!("its {len} bytes do not match their checksum");
            return Err(Damage::of_file(ImageFile::State, Bytes::ZERO, what).into());
        }
        Ok(())
    }

    /// Where it has each page of a chunk, and in which image of its chain that is.
    pub(crate) fn places_of(&self, chunk: ChunkIdx) -> Result<[(ImageId, Entry); CHUNK_PAGES as usize], ImageError> {
        let entries = self.chain.entries(chunk, PageSet::FULL)?;
        Ok(entries.map(|(level, entry)| (self.chain.layer(level).manifest.id, entry)))
    }

    /// Where these pages of a chunk are; of others it says that they are missing.
    fn entries_of(&self, chunk: ChunkIdx, pages: PageSet) -> Result<(Entries, ChunkContent), ImageError> {
        let mut found = ChunkContent::default();
        let entries = self.chain.entries(chunk, pages)?;
        for index in pages.iter() {
            match entries[usize::from(index)].1 {
                Entry::Missing => found.missing.set(index),
                Entry::Zero => found.zero.set(index),
                Entry::Block { .. } | Entry::Parent { .. } => {}
            }
        }
        Ok((entries, found))
    }
}

/// A page that is to be read: from which image of the chain, and where to.
struct Placed<'a> {
    page: PageIdx,
    level: u8,
    block: BlockIdx,
    sum: u32,
    content: &'a mut [u8],
}

fn no_block(page: PageIdx) -> Damage {
    Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), "the page should have a block, and has none")
}
