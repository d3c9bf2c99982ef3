//! Which pages of a VM a tier has: a bit for each, in a file beside the VM's record.
//!
//! The file is a head, which says whose it is, and 32 bytes a chunk: 256 bits, as four little-endian words. It is written through
//! to the kernel at every change, so it is whole after the daemon's death; it need not survive the host's, which takes the VM
//! along. All its blocks are allocated when it is made, so no change fails for want of space.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{ChunkCount, ChunkIdx};

/// Bytes of a chunk's bits.
const ENTRY: usize = 32;

/// A tier's set of pages, in memory as in its file.
#[derive(Debug)]
pub struct PageMap {
    file: File,
    /// Where the bits start in the file.
    start: u64,
    chunks: Vec<PageSet>,
    count: u64,
}

impl PageMap {
    /// Makes the file of a new VM, readable by its owner alone; what was there is gone. Whoever still has that open changes
    /// nothing of the new one.
    ///
    /// # Errors
    /// The file cannot be made or filled.
    pub fn create(path: &Path, head: &[u8], chunks: Vec<PageSet>) -> io::Result<PageMap> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = OpenOptions::new().create_new(true).read(true).write(true).mode(0o600).open(path)?;
        // Written and not only reserved: a block that was never written may need space for metadata later.
        file.write_all_at(&[head, &encode_all(&chunks)].concat(), 0)?;
        file.sync_all()?;
        Ok(PageMap::of_chunks(file, head, chunks))
    }

    /// Opens the file of a VM that runs.
    ///
    /// # Errors
    /// It is not there, not of this length, or has another head.
    pub fn open(path: &Path, head: &[u8], chunks: ChunkCount) -> io::Result<PageMap> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut bytes = vec![0; head.len() + chunks.as_usize() * ENTRY];
        let (found, expected) = (file.metadata()?.len(), bytes.len() as u64);
        if found != expected {
            return Err(invalid(format!("{found} bytes long, {expected} expected: not this VM's")));
        }
        file.read_exact_at(&mut bytes, 0)?;
        let (found, bits) = bytes.split_at(head.len());
        if found != head {
            return Err(invalid("it begins otherwise than expected: not this VM's, or of another snapshot".to_owned()));
        }
        Ok(PageMap::of_chunks(file, head, bits.chunks_exact(ENTRY).map(decode).collect()))
    }

    fn of_chunks(file: File, head: &[u8], chunks: Vec<PageSet>) -> PageMap {
        let count = chunks.iter().map(|pages| u64::from(pages.count())).sum();
        PageMap { file, start: head.len() as u64, chunks, count }
    }

    /// The pages of all chunks.
    pub fn chunks(&self) -> &[PageSet] {
        &self.chunks
    }

    /// Pages of a chunk that the tier has.
    pub fn of(&self, chunk: ChunkIdx) -> PageSet {
        self.chunks[chunk.as_usize()]
    }

    /// Pages that the tier has.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The tier has these pages of the chunk, and no others. Nothing is changed here if the file could not be.
    ///
    /// # Errors
    /// The error of pwrite(2).
    pub fn set(&mut self, chunk: ChunkIdx, pages: PageSet) -> io::Result<()> {
        let before = self.of(chunk);
        if before != pages {
            self.file.write_all_at(&encode(pages), self.start + (chunk.as_usize() * ENTRY) as u64)?;
            self.chunks[chunk.as_usize()] = pages;
            self.count = self.count - u64::from(before.count()) + u64::from(pages.count());
        }
        Ok(())
    }

    /// The tier has these pages, of all chunks, and no others: one write, however many there are. If it fails the file may have some of
    /// it; nothing is changed here.
    ///
    /// # Errors
    /// The error of pwrite(2).
    ///
    /// # Panics
    /// If they are of another number of chunks.
    pub fn set_all(&mut self, chunks: Vec<PageSet>) -> io::Result<()> {
        assert_eq!(chunks.len(), self.chunks.len(), "the chunks of another VM");
        self.file.write_all_at(&encode_all(&chunks), self.start)?;
        self.count = chunks.iter().map(|pages| u64::from(pages.count())).sum();
        self.chunks = chunks;
        Ok(())
    }
}

fn encode_all(chunks: &[PageSet]) -> Vec<u8> {
    chunks.iter().flat_map(|pages| encode(*pages)).collect()
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
        for head in [&b""[..], b"the head of a file"] {
            let dir = std::env::temp_dir().join(format!("pagoda-page-map-{}-{}", head.len(), std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            let path = dir.join("vm.map");
            let some = PageSet::range(3, 70) | PageSet::single(255);
            let mut map = PageMap::create(&path, head, vec![PageSet::EMPTY, PageSet::EMPTY, PageSet::FULL]).unwrap();
            map.set(ChunkIdx(1), some).unwrap();
            map.set(ChunkIdx(2), PageSet::single(9)).unwrap();
            assert_eq!(map.count(), 72);
            // The first is not closed: the daemon was killed.
            let mut next = PageMap::open(&path, head, ChunkCount(3)).unwrap();
            assert_eq!(next.chunks(), [PageSet::EMPTY, some, PageSet::single(9)]);
            assert_eq!(next.count(), 72);
            next.set(ChunkIdx(1), PageSet::EMPTY).unwrap();
            assert_eq!(PageMap::open(&path, head, ChunkCount(3)).unwrap().count(), 1);
            assert!(PageMap::open(&path, head, ChunkCount(2)).is_err(), "another VM's");
            std::fs::remove_dir_all(&dir).unwrap();
        }
    }

    #[test]
    fn who_still_has_the_file_of_the_vm_before_changes_nothing_of_the_new_one() {
        let path = std::env::temp_dir().join(format!("pagoda-page-map-again-{}", std::process::id()));
        let mut old = PageMap::create(&path, b"", vec![PageSet::FULL; 2]).unwrap();
        let new = PageMap::create(&path, b"", vec![PageSet::FULL; 2]).unwrap();
        old.set(ChunkIdx(0), PageSet::EMPTY).unwrap();
        assert_eq!(PageMap::open(&path, b"", ChunkCount(2)).unwrap().chunks(), new.chunks());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_with_another_head_is_refused() {
        let path = std::env::temp_dir().join(format!("pagoda-page-map-head-{}", std::process::id()));
        PageMap::create(&path, b"one", vec![PageSet::FULL]).unwrap();
        assert!(PageMap::open(&path, b"one", ChunkCount(1)).is_ok());
        for head in [&b"two"[..], b"", b"ones"] {
            assert!(PageMap::open(&path, head, ChunkCount(1)).is_err(), "{head:?}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
