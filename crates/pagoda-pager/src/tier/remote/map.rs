//! Which pages of a VM the remote tier has: a bit for each, in a file beside the VM's record.
//!
//! The file is 32 bytes a chunk: 256 bits, as four little-endian words. It is written through to the kernel at every change, so
//! it is whole after the daemon's death; it need not survive the host's, which takes the VM along. All its blocks are allocated
//! when it is made, so no change fails for want of space.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_PAGES, ChunkCount, ChunkIdx};
use rmap::units::SlabSize;

/// Bytes of a chunk's bits.
const ENTRY: usize = 32;

/// See the module.
#[derive(Debug)]
pub struct RemoteMap {
    file: File,
    chunks: Vec<PageSet>,
    /// Pages in each slab of the pool.
    slabs: Vec<u32>,
    count: u64,
}

impl RemoteMap {
    /// Makes the file of a new VM, readable by its owner alone; what was there is gone.
    ///
    /// # Errors
    /// The file cannot be made or filled.
    pub fn create(path: &Path, chunks: ChunkCount) -> io::Result<RemoteMap> {
        let file = OpenOptions::new().create(true).truncate(true).read(true).write(true).mode(0o600).open(path)?;
        // Written and not only reserved: a block that was never written may need space for metadata later.
        file.write_all_at(&vec![0; chunks.0 as usize * ENTRY], 0)?;
        file.sync_all()?;
        Ok(RemoteMap::of_chunks(file, vec![PageSet::EMPTY; chunks.0 as usize]))
    }

    /// Opens the file of a VM that runs.
    ///
    /// # Errors
    /// It is not there, or not of this length.
    pub fn open(path: &Path, chunks: ChunkCount) -> io::Result<RemoteMap> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut bytes = vec![0; chunks.0 as usize * ENTRY];
        let (found, expected) = (file.metadata()?.len(), bytes.len() as u64);
        if found != expected {
            let text = format!("{found} bytes long, {expected} expected: not this VM's");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        file.read_exact_at(&mut bytes, 0)?;
        Ok(RemoteMap::of_chunks(file, bytes.chunks_exact(ENTRY).map(decode).collect()))
    }

    fn of_chunks(file: File, chunks: Vec<PageSet>) -> RemoteMap {
        let pages = |slab: &[PageSet]| slab.iter().map(|pages| u32::from(pages.count())).sum();
        let slabs: Vec<u32> = chunks.chunks(slab_chunks()).map(pages).collect();
        let count = slabs.iter().map(|pages| u64::from(*pages)).sum();
        RemoteMap { file, chunks, slabs, count }
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
        self.chunks.len() as u32
    }

    /// Pages of a chunk that the pool has.
    pub fn of(&self, chunk: ChunkIdx) -> PageSet {
        self.chunks[chunk.as_usize()]
    }

    /// Pages that the pool has.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The pool has these pages of the chunk, and no others. Nothing is changed here if the file could not be.
    ///
    /// # Errors
    /// The error of pwrite(2).
    pub fn set(&mut self, chunk: ChunkIdx, pages: PageSet) -> io::Result<()> {
        let before = self.of(chunk);
        if before != pages {
            self.file.write_all_at(&encode(pages), (chunk.as_usize() * ENTRY) as u64)?;
            self.chunks[chunk.as_usize()] = pages;
            self.count = self.count - u64::from(before.count()) + u64::from(pages.count());
            let slab = &mut self.slabs[RemoteMap::slab_of(chunk)];
            *slab = *slab - u32::from(before.count()) + u32::from(pages.count());
        }
        Ok(())
    }

    /// The pool has no page any more that counts.
    ///
    /// # Errors
    /// The error of pwrite(2); some chunks may be done.
    pub fn clear(&mut self) -> io::Result<()> {
        (0..self.chunks.len() as u32).try_for_each(|chunk| self.set(ChunkIdx(chunk), PageSet::EMPTY))
    }
}

/// Chunks in a slab of the pool: 64.
fn slab_chunks() -> usize {
    SlabSize::default().pages() / CHUNK_PAGES as usize
}

fn encode(pages: PageSet) -> [u8; ENTRY] {
    let mut bytes = [0; ENTRY];
    for (field, word) in bytes.chunks_exact_mut(8).zip(pages.words()) {
        field.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn decode(bytes: &[u8]) -> PageSet {
    let mut words = [0; ENTRY / 8];
    for (word, field) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut eight = [0; 8];
        eight.copy_from_slice(field);
        *word = u64::from_le_bytes(eight);
    }
    PageSet::from_words(words)
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
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
