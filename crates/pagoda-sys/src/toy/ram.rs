//! The RAM of a toy VMM: one mapping, split among its threads, read and written a word at a time.
//!
//! The mapping goes through libc's `mmap64`, because that is the symbol the shim interposes;
//! a raw system call would pass it by.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// Bytes in a page of the toy VMM.
pub const PAGE_BYTES: usize = 4096;
/// 64-bit words in a page.
pub const WORDS_PER_PAGE: usize = PAGE_BYTES / 8;
/// A huge mapping needs an address at this boundary (x86-64 and AArch64 with 4 KiB pages).
const HUGE_ALIGN_BYTES: usize = 2 << 20;

/// Where the RAM comes from.
#[derive(Debug, Clone, Copy)]
pub enum RamSource<'fd> {
    /// A file mapped shared, all of it, as QEMU maps its RAM file.
    File(BorrowedFd<'fd>),
    /// Private anonymous memory of so many bytes.
    Anonymous(usize),
    /// A memfd of so many bytes, mapped shared.
    Shmem(usize),
}

/// Whether the mapping asks for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// `MADV_HUGEPAGE`: huge pages are asked for, as QEMU does on its RAM.
    Advise,
    /// `MADV_NOHUGEPAGE`: the kernel takes single pages.
    Refuse,
}

/// What may be done to a range of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Drop the page-table entries; for anonymous memory the contents too.
    Drop,
    /// Reclaim the pages now.
    PageOut,
}

/// An exclusively owned mapping of RAM.
#[derive(Debug)]
pub struct Ram {
    base: *mut u64,
    bytes: usize,
    reserved: *mut libc::c_void,
    reserved_bytes: usize,
    memfd: Option<OwnedFd>,
}

// SAFETY: `Ram` owns its mapping as a `Box<[u64]>` would; the raw pointers are what stops the
// automatic implementation. Access needs `&mut self` through `split`.
unsafe impl Send for Ram {}
// SAFETY: with `&Ram` only `advise` and sizes are reachable; `advise` is a system call the kernel
// serialises, and it is never called while parts exist (they borrow `Ram` mutably).
unsafe impl Sync for Ram {}

impl Ram {
    /// Maps the RAM at a 2 MiB boundary.
    ///
    /// # Errors
    /// The system call's error; `InvalidInput` for an empty file or a size that is not whole pages.
    pub fn map(source: RamSource<'_>, huge: HugePages) -> io::Result<Ram> {
        let mut memfd = None;
        let (bytes, raw_fd) = match source {
            RamSource::Anonymous(bytes) => (bytes, None),
            RamSource::File(fd) => (file_bytes(fd.as_raw_fd())?, Some(fd.as_raw_fd())),
            RamSource::Shmem(bytes) => {
                let fd = new_memfd(bytes)?;
                let raw = fd.as_raw_fd();
                memfd = Some(fd);
                (bytes, Some(raw))
            }
        };
        if bytes == 0 || bytes % PAGE_BYTES != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("RAM of {bytes} bytes is not a whole number of pages"),
            ));
        }
        let reserved_bytes = bytes + HUGE_ALIGN_BYTES;
        // SAFETY: mmap with a null hint and no MAP_FIXED cannot touch an existing mapping;
        // length is positive, the fd is unused for anonymous memory.
        let reserved = unsafe {
            libc::mmap64(
                ptr::null_mut(),
                reserved_bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base_address = (reserved as usize).next_multiple_of(HUGE_ALIGN_BYTES);
        let flags = libc::MAP_FIXED
            | match raw_fd {
                Some(_) => libc::MAP_SHARED,
                None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            };
        // SAFETY: MAP_FIXED replaces only pages inside the reservation made above, which nothing
        // else uses: base is at most HUGE_ALIGN_BYTES - 1 after its start and the reservation is
        // HUGE_ALIGN_BYTES longer than `bytes`. The fd is open for the duration of the call.
        let mapped = unsafe {
            libc::mmap64(
                base_address as *mut libc::c_void,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                raw_fd.unwrap_or(-1),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: unmaps exactly the reservation, to which no reference exists.
            unsafe { libc::munmap(reserved, reserved_bytes) };
            return Err(error);
        }
        let ram = Ram { base: mapped.cast(), bytes, reserved, reserved_bytes, memfd };
        let advice = match huge {
            HugePages::Advise => libc::MADV_HUGEPAGE,
            HugePages::Refuse => libc::MADV_NOHUGEPAGE,
        };
        // A kernel without transparent huge pages refuses with EINVAL and loses nothing.
        let _ = ram.madvise(0, ram.pages(), advice);
        Ok(ram)
    }

    /// Gives the number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.bytes / PAGE_BYTES
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// The memfd behind shmem RAM.
    #[must_use]
    pub fn memfd(&self) -> Option<&OwnedFd> {
        self.memfd.as_ref()
    }

    /// Advises the kernel about pages `first .. first + count`.
    ///
    /// # Errors
    /// The system call's error, `InvalidInput` out of range.
    pub fn advise(&mut self, first: usize, count: usize, advice: Advice) -> io::Result<()> {
        let advice = match advice {
            Advice::Drop => libc::MADV_DONTNEED,
            Advice::PageOut => libc::MADV_PAGEOUT,
        };
        self.madvise(first, count, advice)
    }

    fn madvise(&self, first: usize, count: usize, advice: libc::c_int) -> io::Result<()> {
        let in_range = first.checked_add(count).is_some_and(|end| end <= self.pages());
        if !in_range {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the range is inside our own mapping (checked above). The advices used change
        // contents at most as a store by the owner would (MADV_DONTNEED: zeros or the file's
        // data), which is what `Advice::Drop` promises; no Rust reference into the RAM exists.
        let rc =
            unsafe { libc::madvise(self.base.cast::<u8>().add(first * PAGE_BYTES).cast(), count * PAGE_BYTES, advice) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Splits the RAM into `parts` runs of pages, as even as possible, one for each thread.
    ///
    /// # Panics
    /// When `parts` is zero or greater than the number of pages.
    #[must_use]
    pub fn split(&mut self, parts: usize) -> Vec<RamPart<'_>> {
        assert!(parts > 0 && parts <= self.pages(), "{parts} parts of {} pages", self.pages());
        (0..parts)
            .map(|index| {
                let first = self.pages() * index / parts;
                let end = self.pages() * (index + 1) / parts;
                RamPart {
                    // SAFETY: `first` is less than the number of pages, so it stays in the mapping.
                    base: unsafe { self.base.add(first * WORDS_PER_PAGE) },
                    first_page: first,
                    pages: end - first,
                    owner: PhantomData,
                }
            })
            .collect()
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `map` reserved; parts borrow `self`, so none is alive.
        unsafe { libc::munmap(self.reserved, self.reserved_bytes) };
    }
}

/// A run of pages that one thread owns.
#[derive(Debug)]
pub struct RamPart<'ram> {
    base: *mut u64,
    first_page: usize,
    pages: usize,
    owner: PhantomData<&'ram mut Ram>,
}

// SAFETY: a part is an exclusive borrow of its pages (`split` makes disjoint ones).
unsafe impl Send for RamPart<'_> {}

impl RamPart<'_> {
    /// The first page's number in the whole RAM.
    #[must_use]
    pub fn first_page(&self) -> usize {
        self.first_page
    }

    /// Number of pages in this part.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Reads a word of a page (`page` counts from the start of this part).
    ///
    /// # Panics
    /// Out of range.
    #[inline]
    #[must_use]
    pub fn load(&self, page: usize, word: usize) -> u64 {
        assert!(page < self.pages && word < WORDS_PER_PAGE);
        // SAFETY: in range of the mapping (asserted), aligned (word index of a u64 pointer),
        // initialised (fresh pages read as zeros). Volatile, because the pager exchanges the
        // page behind the compiler's back.
        unsafe { self.base.add(page * WORDS_PER_PAGE + word).read_volatile() }
    }

    /// Writes a word of a page.
    ///
    /// # Panics
    /// Out of range.
    #[inline]
    pub fn store(&mut self, page: usize, word: usize, value: u64) {
        assert!(page < self.pages && word < WORDS_PER_PAGE);
        // SAFETY: as in `load`, and `&mut self` is exclusive for these pages.
        unsafe { self.base.add(page * WORDS_PER_PAGE + word).write_volatile(value) }
    }
}

fn file_bytes(fd: i32) -> io::Result<usize> {
    // SAFETY: an all-zero `stat64` is a valid value of that plain C structure.
    let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is writable and of the right type; a bad fd gives EBADF.
    if unsafe { libc::fstat64(fd, &mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    usize::try_from(stat.st_size).map_err(io::Error::other)
}

fn new_memfd(bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated literal.
    let raw = unsafe { libc::memfd_create(c"toy-ram".as_ptr(), libc::MFD_CLOEXEC) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `raw` was just returned to us, nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    let len = i64::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: a plain system call on an fd we own.
    if unsafe { libc::ftruncate64(fd.as_raw_fd(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_cover_the_ram() {
        let mut ram = Ram::map(RamSource::Anonymous(10 * PAGE_BYTES), HugePages::Refuse).unwrap();
        assert_eq!(ram.address() as usize % HUGE_ALIGN_BYTES, 0);
        for parts in [1, 3, 10] {
            let split = ram.split(parts);
            let mut next = 0;
            for mut part in split {
                assert_eq!(part.first_page(), next);
                next += part.pages();
                let page = part.pages() - 1;
                let value = part.load(page, 511);
                part.store(page, 511, value + 1);
            }
            assert_eq!(next, 10);
        }
        // The last page ends a part in each of the three rounds.
        assert_eq!(ram.split(1)[0].load(9, 511), 3);
    }

    #[test]
    fn shared_file_keeps_contents_when_entries_are_dropped() {
        let mut ram = Ram::map(RamSource::Shmem(4 * PAGE_BYTES), HugePages::Refuse).unwrap();
        ram.split(1)[0].store(2, 7, 99);
        ram.advise(0, 4, Advice::Drop).unwrap();
        assert_eq!(ram.split(1)[0].load(2, 7), 99);
        assert!(ram.advise(1, 4, Advice::Drop).is_err());
    }

    #[test]
    fn odd_sizes_are_refused() {
        for bytes in [0, 100, PAGE_BYTES + 1] {
            assert!(Ram::map(RamSource::Anonymous(bytes), HugePages::Refuse).is_err());
        }
    }
}
