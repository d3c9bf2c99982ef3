//! Reads an image, and what it has in those that it refers to ([`crate::chain`]). Every page that it hands out has been compared with its checksum.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, CHUNK_SIZE, ChunkCount, ChunkIdx, PAGE_SIZE, PageIdx};
use xxhash_rust::xxh3::Xxh3;

use crate::chain::Chain;
use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::Entry;
use crate::id::ImageId;
use crate::layer::check_sum;
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
        let mut found = ChunkContent::default();
        let entries = self.chain.entries(chunk)?;
        for (index, (_, entry)) in (0..=u8::MAX).zip(&entries) {
            match entry {
                Entry::Missing => found.missing.set(index),
                Entry::Zero => found.zero.set(index),
                Entry::Block { .. } | Entry::Parent { .. } => {}
            }
        }
        content.fill(0);
        let mut index = 0;
        while index < entries.len() {
            let (level, Entry::Block { block, .. }) = entries[index] else {
                index += 1;
                continue;
            };
            let follows = |(at, (of, entry)): (u32, &(u8, Entry))| matches!(entry, Entry::Block { block: next, .. } if *of == level && next.0 == block.0 + at);
            let len = (0..).zip(&entries[index..]).take_while(|pair| follows(*pair)).count();
            let bytes = &mut content[index * PAGE..(index + len) * PAGE];
            let read = self.chain.layer(level).read_blocks(block, bytes, chunk.page(index as u8));
            read.map_err(|error| self.chain.at(level, error))?;
            index += len;
        }
        let (pages, _) = content.as_chunks::<PAGE>();
        for ((index, (level, entry)), page) in (0..=u8::MAX).zip(entries).zip(pages) {
            if let Entry::Block { block, sum } = entry {
                let checked = check_sum(chunk.page(index), (block, sum), page);
                checked.map_err(|error| self.chain.at(level, error))?;
            }
        }
        Ok(found)
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
}
