//! Where a tier keeps each page, for a tier whose blocks are not at their pages' own offsets: a number for each page, in a file.
//!
//! The file is 8 bytes a page, little-endian; 0 says that the tier has no block of the page. A change is written through to the
//! kernel before the call returns, so the file is whole after the daemon's death. It need not survive the host's, which takes the
//! VM along. The whole file is written when it is made, so no change fails for want of space.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_PAGES, ChunkCount, ChunkIdx, PageIdx};

/// Bytes of an entry.
const ENTRY: usize = 8;

/// The number of each page's block, in memory as in the file.
#[derive(Debug)]
pub struct BlockMap {
    file: File,
    blocks: Vec<u64>,
    held: Vec<PageSet>,
    count: u64,
}

impl BlockMap {
    /// Makes the file of a new VM, readable by its owner alone; what was there is gone.
    ///
    /// # Errors
    /// The file cannot be made or filled.
    pub fn create(path: &Path, chunks: ChunkCount) -> io::Result<BlockMap> {
        let file = OpenOptions::new().create(true).truncate(true).read(true).write(true).mode(0o600).open(path)?;
        let pages = chunks.0 as usize * CHUNK_PAGES as usize;
        file.write_all_at(&vec![0; pages * ENTRY], 0)?;
        Ok(BlockMap::of(file, vec![0; pages]))
    }

    /// Opens the file of a VM that runs.
    ///
    /// # Errors
    /// It is not there, or not of this length.
    pub fn open(path: &Path, chunks: ChunkCount) -> io::Result<BlockMap> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut bytes = vec![0; chunks.0 as usize * CHUNK_PAGES as usize * ENTRY];
        let (found, expected) = (file.metadata()?.len(), bytes.len() as u64);
        if found != expected {
            let text = format!("{found} bytes long, {expected} expected: not this VM's");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        file.read_exact_at(&mut bytes, 0)?;
        let (entries, _) = bytes.as_chunks::<ENTRY>();
        Ok(BlockMap::of(file, entries.iter().map(|entry| u64::from_le_bytes(*entry)).collect()))
    }

    fn of(file: File, blocks: Vec<u64>) -> BlockMap {
        let of_chunk = |chunk: &[u64]| {
            (0..=u8::MAX).zip(chunk).filter(|(_, block)| **block != 0).map(|(index, _)| index).collect()
        };
        let held: Vec<PageSet> = blocks.chunks(CHUNK_PAGES as usize).map(of_chunk).collect();
        let count = held.iter().map(|pages: &PageSet| u64::from(pages.count())).sum();
        BlockMap { file, blocks, held, count }
    }

    /// The block of a page.
    pub fn get(&self, page: PageIdx) -> Option<NonZeroU64> {
        NonZeroU64::new(*self.blocks.get(page.0 as usize)?)
    }

    /// The pages of a chunk that have a block.
    pub fn pages_of(&self, chunk: ChunkIdx) -> PageSet {
        self.held[chunk.as_usize()]
    }

    /// Chunks of the VM.
    pub fn chunks(&self) -> u32 {
        self.held.len() as u32
    }

    /// Pages that have a block.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// All blocks, by page.
    pub fn blocks(&self) -> impl Iterator<Item = (PageIdx, NonZeroU64)> {
        (0..).map(PageIdx).zip(&self.blocks).filter_map(|(page, block)| Some((page, NonZeroU64::new(*block)?)))
    }

    /// The page has this block from now on, or none; what it had before. Nothing is changed here if the file could not be.
    ///
    /// # Errors
    /// The error of pwrite(2).
    pub fn set(&mut self, page: PageIdx, block: Option<NonZeroU64>) -> io::Result<Option<NonZeroU64>> {
        let number = block.map_or(0, NonZeroU64::get);
        let before = self.get(page);
        if before != block {
            self.file.write_all_at(&number.to_le_bytes(), page.0 * ENTRY as u64)?;
            self.blocks[page.0 as usize] = number;
            let held = &mut self.held[page.chunk().as_usize()];
            match block {
                Some(_) => held.set(page.index_in_chunk()),
                None => held.clear(page.index_in_chunk()),
            }
            self.count = self.count + u64::from(block.is_some()) - u64::from(before.is_some());
        }
        Ok(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_there_for_the_next_daemon() {
        let dir = std::env::temp_dir().join(format!("pagoda-block-map-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("vm.blocks");
        let (one, two) = (NonZeroU64::new(1), NonZeroU64::new(u64::MAX));
        let mut map = BlockMap::create(&path, ChunkCount(2)).unwrap();
        assert_eq!(map.set(PageIdx(255), one).unwrap(), None);
        assert_eq!(map.set(PageIdx(256), two).unwrap(), None);
        assert_eq!(map.set(PageIdx(255), two).unwrap(), one);
        // The first is not closed: the daemon was killed.
        let mut next = BlockMap::open(&path, ChunkCount(2)).unwrap();
        assert_eq!(next.blocks().collect::<Vec<_>>(), [(PageIdx(255), two.unwrap()), (PageIdx(256), two.unwrap())]);
        assert_eq!([0, 1].map(|chunk| next.pages_of(ChunkIdx(chunk))), [PageSet::single(255), PageSet::single(0)]);
        assert_eq!((next.count(), next.set(PageIdx(255), None).unwrap()), (2, two));
        assert_eq!((next.count(), next.pages_of(ChunkIdx(0))), (1, PageSet::EMPTY));
        assert_eq!(BlockMap::open(&path, ChunkCount(2)).unwrap().count(), 1);
        assert!(BlockMap::open(&path, ChunkCount(1)).is_err(), "another VM's");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
