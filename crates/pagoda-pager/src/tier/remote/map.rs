//! Which pages of a VM the remote tier has ([`PageMap`]), and how many in each slab of the pool.

use std::io;
use std::path::Path;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_PAGES, ChunkCount, ChunkIdx};
use rmap::units::SlabSize;

use crate::tier::page_map::PageMap;

/// The file has no head.
const HEAD: &[u8] = &[];

/// The pages that the remote tier has, counted by slab.
#[derive(Debug)]
pub struct RemoteMap {
    pages: PageMap,
    /// Pages in each slab of the pool.
    slabs: Vec<u32>,
}

impl RemoteMap {
    /// Makes the file of a new VM, readable by its owner alone; what was there is gone.
    ///
    /// # Errors
    /// The file cannot be made or filled.
    pub fn create(path: &Path, chunks: ChunkCount) -> io::Result<RemoteMap> {
        Ok(RemoteMap::of_pages(PageMap::create(path, HEAD, vec![PageSet::EMPTY; chunks.as_usize()])?))
    }

    /// Opens the file of a VM that runs.
    ///
    /// # Errors
    /// It is not there, or not of this length.
    pub fn open(path: &Path, chunks: ChunkCount) -> io::Result<RemoteMap> {
        Ok(RemoteMap::of_pages(PageMap::open(path, HEAD, chunks)?))
    }

    fn of_pages(pages: PageMap) -> RemoteMap {
        let count = |slab: &[PageSet]| slab.iter().map(|pages| u32::from(pages.count())).sum();
        let slabs = pages.chunks().chunks(slab_chunks()).map(count).collect();
        RemoteMap { pages, slabs }
    }

    /// Which slab of the pool the pages of a chunk are in.
    pub fn slab_of(chunk: ChunkIdx) -> usize {
        chunk.as_usize() / slab_chunks()
    }

    /// Pages in each slab of the pool.
    pub fn slabs(&self) -> &[u32] {
        &self.slabs
    }

    /// Chunks of the VM.
    pub fn chunks(&self) -> u32 {
        self.pages.chunks().len() as u32
    }

    /// Pages of a chunk that the pool has.
    pub fn of(&self, chunk: ChunkIdx) -> PageSet {
        self.pages.of(chunk)
    }

    /// Pages that the pool has.
    pub fn count(&self) -> u64 {
        self.pages.count()
    }

    /// The pool has these pages of the chunk, and no others. Nothing is changed here if the file could not be.
    ///
    /// # Errors
    /// The error of pwrite(2).
    pub fn set(&mut self, chunk: ChunkIdx, pages: PageSet) -> io::Result<()> {
        let before = self.of(chunk);
        self.pages.set(chunk, pages)?;
        let slab = &mut self.slabs[RemoteMap::slab_of(chunk)];
        *slab = *slab - u32::from(before.count()) + u32::from(pages.count());
        Ok(())
    }

    /// The pool has these pages of these chunks, and no others.
    ///
    /// # Errors
    /// A chunk that the VM does not have; the error of pwrite(2): some chunks may be done.
    pub fn replace(&mut self, pages: &[(ChunkIdx, PageSet)]) -> io::Result<()> {
        if pages.iter().any(|(chunk, _)| chunk.0 >= self.chunks()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "pages that the VM does not have"));
        }
        self.clear()?;
        pages.iter().try_for_each(|(chunk, pages)| self.set(*chunk, *pages))
    }

    /// The pool has no page any more that counts.
    ///
    /// # Errors
    /// The error of pwrite(2); some chunks may be done.
    pub fn clear(&mut self) -> io::Result<()> {
        (0..self.chunks()).try_for_each(|chunk| self.set(ChunkIdx(chunk), PageSet::EMPTY))
    }
}

/// Chunks in a slab of the pool: 64.
fn slab_chunks() -> usize {
    SlabSize::default().pages() / CHUNK_PAGES as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_there_for_the_next_daemon() {
        let dir = std::env::temp_dir().join(format!("pagoda-remote-map-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("vm.far");
        let chunks = ChunkCount(3);
        let some = PageSet::range(3, 70) | PageSet::single(255);
        let mut map = RemoteMap::create(&path, chunks).unwrap();
        map.set(ChunkIdx(2), PageSet::FULL).unwrap();
        map.set(ChunkIdx(1), some).unwrap();
        map.set(ChunkIdx(2), PageSet::single(9)).unwrap();
        assert_eq!(map.count(), 72);
        // The first is not closed: the daemon was killed.
        let mut next = RemoteMap::open(&path, chunks).unwrap();
        assert_eq!([0, 1, 2].map(|chunk| next.of(ChunkIdx(chunk))), [PageSet::EMPTY, some, PageSet::single(9)]);
        assert_eq!(next.count(), 72);
        assert_eq!(next.slabs(), [72]);
        assert_eq!(std::fs::read(&path).unwrap()[64..96], PageSet::single(9).words().map(u64::to_le_bytes).concat());
        next.clear().unwrap();
        assert_eq!(next.slabs(), [0]);
        assert_eq!(RemoteMap::open(&path, chunks).unwrap().count(), 0);
        assert!(RemoteMap::open(&path, ChunkCount(2)).is_err(), "another VM's");
        let mut large = RemoteMap::create(&path, ChunkCount(129)).unwrap();
        large.set(ChunkIdx(63), PageSet::single(0)).unwrap();
        large.set(ChunkIdx(128), PageSet::FULL).unwrap();
        assert_eq!(large.slabs(), [1, 0, 256]);
        large.set(ChunkIdx(128), PageSet::range(4, 4)).unwrap();
        assert_eq!(
            (RemoteMap::open(&path, ChunkCount(129)).unwrap().slabs(), large.slabs()),
            (&[1, 0, 4][..], &[1, 0, 4][..])
        );
        let pages = [(ChunkIdx(2), PageSet::range(7, 3)), (ChunkIdx(65), PageSet::FULL)];
        large.replace(&pages).unwrap();
        assert_eq!((large.count(), large.slabs()), (259, &[3, 256, 0][..]));
        assert!(large.replace(&[(ChunkIdx(129), PageSet::FULL)]).is_err());
        let next = RemoteMap::open(&path, ChunkCount(129)).unwrap();
        assert_eq!((next.of(ChunkIdx(2)), next.of(ChunkIdx(128))), (PageSet::range(7, 3), PageSet::EMPTY));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
