//! A table of 32-bit words in a RAM file, mapped by the daemon: it outlives the daemon as the file does.

use std::ops::Deref;
use std::ptr;
use std::sync::atomic::AtomicU32;

use rustix::mm::{MapFlags, ProtFlags};

use super::file::{RamError, RamFile, os};
use crate::Errno;

/// A RAM file as atomic words. Reading a hole makes a page of it, so a table as sparse as its use needs
/// [`RamFile::data_runs`] to look where there is something.
#[derive(Debug)]
pub struct WordTable {
    file: RamFile,
    words: *const AtomicU32,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, and atomics may be used by any thread.
unsafe impl Send for WordTable {}
// SAFETY: as above: only `&[AtomicU32]` is handed out.
unsafe impl Sync for WordTable {}

impl WordTable {
    /// Maps all of a file.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn map(file: RamFile) -> Result<WordTable, RamError> {
        let bytes = usize::try_from(file.len()).map_err(|_| os("map table")(Errno::OVERFLOW))?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only.
        let addr = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, prot, MapFlags::SHARED, file.as_fd(), 0) };
        let words = addr.map_err(os("map table"))?.cast_const().cast();
        Ok(WordTable { file, words, len: bytes / size_of::<AtomicU32>() })
    }

    /// Gives the file that holds the table.
    pub fn file(&self) -> &RamFile {
        &self.file
    }
}

impl Deref for WordTable {
    type Target = [AtomicU32];

    fn deref(&self) -> &[AtomicU32] {
        // SAFETY: a slice needs `len` aligned, mapped, valid values that only change inside atomics: the mapping is
        // page-aligned and covers the whole file, which cannot shrink (`RamFile` is sealed) and is unmapped only by `drop`;
        // every bit pattern is a valid integer.
        unsafe { std::slice::from_raw_parts(self.words, self.len) }
    }
}

impl Drop for WordTable {
    fn drop(&mut self) {
        // SAFETY: munmap(2) needs memory nobody uses: references into it borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.words.cast_mut().cast(), self.len * size_of::<AtomicU32>()) };
    }
}
