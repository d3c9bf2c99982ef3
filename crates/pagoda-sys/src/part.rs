//! A part of a file in memory, as a range of addresses that stands for it.
//!
//! Code that only knows bytes can so carry a part of a file to somebody who sends it by sendfile(2), without a copy of it: the
//! sender recognises the range by its address ([`FilePart::offset_of`]). Nothing is read by that, and no page is mapped. Code
//! that copies the range all the same copies the right bytes.
//!
//! Whoever maps a part sees to it that the file keeps these bytes until the part is dropped. If it does not, and somebody reads
//! the range: a byte that changes is read as the one or the other, and a page behind the file's end kills the process (SIGBUS).

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

use crate::{Errno, PAGE_SIZE};

#[derive(Debug)]
pub struct FilePart {
    file: Arc<File>,
    /// Where the part begins in the file.
    offset: u64,
    length: usize,
    /// The mapping, which begins at a page.
    mapping: *mut u8,
    /// Bytes of the mapping before the part.
    skipped: usize,
}

// SAFETY: `FilePart` is a mapping that it alone unmaps, through which nobody can write.
unsafe impl Send for FilePart {}
// SAFETY: as above.
unsafe impl Sync for FilePart {}

impl FilePart {
    /// Maps `length` bytes of a file from `offset` on. See the module's head for what the caller sees to.
    ///
    /// # Errors
    /// EINVAL: there is no byte in it, or it goes beyond what a file has. ENOMEM: there are too many mappings.
    pub fn map(file: Arc<File>, offset: u64, length: usize) -> Result<FilePart, Errno> {
        let skipped = (offset % PAGE_SIZE as u64) as usize;
        let is_in_range = offset.checked_add(length as u64).is_some_and(|end| i64::try_from(end).is_ok());
        if length == 0 || !is_in_range {
            return Err(Errno::INVAL);
        }
        // SAFETY: mmap(2) without MAP_FIXED chooses a range that nobody has; `length` is bounded, so the sum does not overflow.
        let mapping = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                skipped + length,
                ProtFlags::READ,
                MapFlags::SHARED,
                &*file,
                offset - skipped as u64,
            )
        }?;
        Ok(FilePart { file, offset, length, mapping: mapping.cast(), skipped })
    }

    /// The file that it is a part of.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where in the file bytes are that are some of this part, by their address alone. `None`: they are others.
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let within = bytes.as_ptr().addr().checked_sub(self.mapping.addr() + self.skipped)?;
        let is_part = within < self.length && bytes.len() <= self.length - within;
        is_part.then_some(self.offset + within as u64)
    }
}

impl AsRef<[u8]> for FilePart {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping has `skipped + length` bytes, can be read, and lives as long as `self`, which the slice borrows.
        // Nobody writes through it. That the file does not change these bytes is what the caller of `map` sees to; any value
        // of a byte is valid.
        unsafe { std::slice::from_raw_parts(self.mapping.add(self.skipped), self.length) }
    }
}

impl Drop for FilePart {
    fn drop(&mut self) {
        // SAFETY: munmap(2) needs a range that nobody uses any more: it was mapped by `map` with this length, and slices of it
        // borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.mapping.cast(), self.skipped + self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;

    use super::*;

    fn file(bytes: &[u8]) -> Arc<File> {
        let file = File::from(rustix::fs::memfd_create("part", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(bytes, 0).unwrap();
        Arc::new(file)
    }

    #[test]
    fn a_part_has_the_files_bytes_and_is_known_by_its_address() {
        let content: Vec<u8> = (0..3 * PAGE_SIZE).map(|at| (at / 7) as u8).collect();
        let file = file(&content);
        for (offset, length) in
            [(0, 1), (0, PAGE_SIZE), (5, 10), (PAGE_SIZE - 1, 2), (PAGE_SIZE + 9, 2 * PAGE_SIZE - 9)]
        {
            let part = FilePart::map(Arc::clone(&file), offset as u64, length).unwrap();
            let bytes = part.as_ref();
            assert!(bytes == &content[offset..offset + length], "{offset}, {length}");
            assert_eq!(part.offset_of(bytes), Some(offset as u64));
            assert_eq!(part.offset_of(&bytes[length - 1..]), Some((offset + length - 1) as u64));
            assert_eq!(part.offset_of(&bytes[length..]), None, "nothing of it");
            assert_eq!(part.offset_of(&content), None);
        }
    }

    #[test]
    fn what_is_no_part() {
        let file = file(b"abc");
        for (offset, length) in [(0, 0), (u64::MAX, 1), (i64::MAX as u64, 1), (0, usize::MAX)] {
            assert_eq!(
                FilePart::map(Arc::clone(&file), offset, length).unwrap_err(),
                Errno::INVAL,
                "{offset}, {length}"
            );
        }
    }

    #[test]
    fn a_hole_that_is_mapped_takes_no_memory() {
        let file = file(b"");
        file.set_len(1 << 30).unwrap();
        let part = FilePart::map(Arc::clone(&file), 4096, 1 << 29).unwrap();
        assert_eq!(part.offset_of(&part.as_ref()[8..9]), Some(4104));
        assert_eq!(rustix::fs::fstat(part.file()).unwrap().st_blocks, 0);
    }
}
