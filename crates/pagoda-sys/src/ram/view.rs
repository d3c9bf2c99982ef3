//! The daemon's own mapping of a RAM file.
//!
//! It is placed so that file offsets and addresses agree modulo 1 MiB but not modulo 2 MiB: a hole that is filled
//! through it can get a folio of one chunk, never one of two chunks, which would have to be split at every punch
//! (measured). The guest changes the memory at any time, so it is only reached through raw pointers and never as a
//! slice.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::file::{RamError, RamFile, os};
use crate::{Errno, PAGE_SIZE};

const CHUNK: usize = pagoda_abi::CHUNK_SIZE;
/// The folio that must not come: twice a chunk.
const HUGE: usize = 2 * CHUNK;
/// Words compared at a time by `is_zero`: one cache line.
const STEP: usize = 8;
const PAGE_WORDS: usize = PAGE_SIZE / size_of::<u64>();

/// Whether the kernel may fill holes with folios larger than a page, where its settings say "advise".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LargeFolios {
    /// `MADV_HUGEPAGE`: the kernel may take folios of up to one chunk.
    Advise,
    /// `MADV_NOHUGEPAGE`: the kernel takes single pages.
    Never,
}

/// The address range; unmapped when the last view and the last I/O into it are gone.
#[derive(Debug)]
struct Mapping {
    addr: *mut u8,
    len: usize,
}

// SAFETY: `Mapping` is an address range that it alone unmaps. Its bytes are only touched through raw pointers, as
// memory that others (the guest) change at any time.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method hands out a reference into the memory.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: munmap(2) needs a range that nobody uses any more: this owner is the last, as views and I/O targets
        // hold it by `Arc`, and no reference into it exists.
        let _ = unsafe { rustix::mm::munmap(self.addr.cast(), self.len) };
    }
}

/// The daemon's mapping of one RAM file. Cloning is cheap and shares the mapping.
#[derive(Clone, Debug)]
pub struct RamView {
    mapping: Arc<Mapping>,
}

/// A range of RAM for the kernel to read from or write to; it keeps the mapping alive for as long as the I/O runs.
#[derive(Clone, Debug)]
pub struct IoTarget {
    mapping: Arc<Mapping>,
    offset: usize,
    len: u32,
}

impl IoTarget {
    /// Where the range starts in this process.
    pub(crate) fn addr(&self) -> *mut u8 {
        self.mapping.addr.wrapping_add(self.offset)
    }

    /// Gives the length of the range in bytes.
    #[allow(clippy::len_without_is_empty)] // `io_target` refuses empty ranges
    pub fn len(&self) -> u32 {
        self.len
    }
}

impl RamFile {
    /// Maps the whole file into the daemon. See [`RamView`].
    ///
    /// # Errors
    /// ENOMEM; EAGAIN when locked memory is limited.
    pub fn map(&self, large: LargeFolios) -> Result<RamView, RamError> {
        RamView::map(self, large)
    }

    /// For each page from `from_page` on whether it is in DRAM: bit 0 of its byte in `out`, by mincore(2), which looks
    /// at the page cache whether or not the view has the page mapped.
    ///
    /// A page the kernel itself swapped out reads as absent, though its content exists: only [`RamFile::next_data`]
    /// decides what exists.
    ///
    /// # Errors
    /// EINVAL if the pages are not in the file; EAGAIN.
    pub fn resident(&self, view: &RamView, from_page: u64, out: &mut [u8]) -> Result<(), Errno> {
        view.mincore(from_page, out)
    }
}

impl RamView {
    fn map(file: &RamFile, large: LargeFolios) -> Result<RamView, RamError> {
        let len = usize::try_from(file.len()).map_err(|_| os("map RAM file")(Errno::OVERFLOW))?;
        // Room to move the start by up to 2 MiB and 1 MiB more.
        let room = len + HUGE + CHUNK;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only, so it disturbs no memory of ours.
        let reserved = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags) };
        let reserved: *mut u8 = reserved.map_err(os("reserve addresses for RAM"))?.cast();
        let odd = (reserved.addr() & !(HUGE - 1)) + CHUNK;
        let start = if odd >= reserved.addr() { odd } else { odd + HUGE };
        let before = start - reserved.addr();
        let addr = reserved.wrapping_add(before);
        // From here on the whole reservation has an owner that unmaps it.
        let whole = Mapping { addr: reserved, len: room };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: MAP_FIXED replaces what is mapped at `addr`: the reservation above, in which the range lies (`before`
        // is under HUGE) and which holds nothing.
        unsafe { rustix::mm::mmap(addr.cast(), len, prot, MapFlags::SHARED | MapFlags::FIXED, file.as_fd(), 0) }
            .map_err(os("map RAM file"))?;
        std::mem::forget(whole);
        let mapping = Mapping { addr, len };
        for (edge, edge_len) in [(reserved, before), (addr.wrapping_add(len), room - before - len)] {
            if edge_len > 0 {
                // SAFETY: munmap(2) of what is left of the reservation on either side: it holds nothing.
                unsafe { rustix::mm::munmap(edge.cast(), edge_len) }.map_err(os("unmap reservation"))?;
            }
        }
        let view = RamView { mapping: Arc::new(mapping) };
        let folios = match large {
            LargeFolios::Advise => Advice::LinuxHugepage,
            LargeFolios::Never => Advice::LinuxNoHugepage,
        };
        match view.advise(0..len, folios) {
            // EINVAL: a kernel without huge pages at all.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(source) => return Err(os("advise folio size")(source)),
        }
        view.advise(0..len, Advice::LinuxDontFork).map_err(os("keep RAM out of forks"))?;
        view.advise(0..len, Advice::LinuxDontDump).map_err(os("keep RAM out of core dumps"))?;
        // A daemon that locks its memory (`process::lock_memory`) must not lock the VM's: a locked range can be neither
        // zapped nor left sparse.
        // SAFETY: munlock(2) needs a mapped range: it is ours, and its content does not change.
        unsafe { rustix::mm::munlock(addr.cast(), len) }.map_err(os("unlock RAM"))?;
        Ok(view)
    }

    /// Gives the length of the mapped file in bytes.
    #[allow(clippy::len_without_is_empty)] // a RAM file is never empty
    pub fn len(&self) -> u64 {
        self.mapping.len as u64
    }

    /// Whether all bytes of the pages are zero. Reads only existing pages well: one that is a hole is allocated, so the
    /// caller makes sure that there is none. The guest may write meanwhile; the answer then is of some moment between.
    pub fn is_zero(&self, pages: Range<u64>) -> bool {
        let words = self.words(&pages);
        let total = (pages.end - pages.start) as usize * PAGE_WORDS;
        let mut at = 0;
        while at < total {
            let mut any = 0;
            for i in at..at + STEP {
                // SAFETY: `words` checked that the whole pages lie in the mapping, which lives as long as `self`; `i` is
                // below `total`, a multiple of STEP. The address is 8-byte aligned, and `AtomicU64` may be read while
                // others write.
                any |= unsafe { (*words.add(i)).load(Ordering::Relaxed) };
            }
            if any != 0 {
                return false;
            }
            at += STEP;
        }
        true
    }

    /// Overwrites a page, allocating it if it is a hole.
    ///
    /// # Panics
    /// If `content` is not one page.
    pub fn write_page(&self, page: u64, content: &[u8]) {
        assert_eq!(content.len(), PAGE_SIZE, "a page is {PAGE_SIZE} bytes");
        let to = self.at(&(page..page + 1));
        // SAFETY: both sides hold PAGE_SIZE bytes: `at` checked the mapping, the assertion the slice. They cannot overlap,
        // as no reference into the mapping exists. Others may write the same bytes: they are never read as Rust values.
        unsafe { ptr::copy_nonoverlapping(content.as_ptr(), to, PAGE_SIZE) };
    }

    /// Copies a page out; of a hole it would make a page, so the caller makes sure that it exists.
    ///
    /// # Panics
    /// If `out` is not one page.
    pub fn read_page(&self, page: u64, out: &mut [u8]) {
        assert_eq!(out.len(), PAGE_SIZE, "a page is {PAGE_SIZE} bytes");
        let from = self.at(&(page..page + 1));
        // SAFETY: as in `write_page`, in the other direction; whatever mixture of old and new bytes arrives is valid u8.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), PAGE_SIZE) };
    }

    /// Drops the view's own page-table entries of the pages; the pages stay. A punch is cheaper afterwards.
    ///
    /// # Errors
    /// The error of madvise(2).
    pub fn zap(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.advise(self.bytes(&pages), Advice::LinuxDontNeed)
    }

    /// Makes the pages exist, zeroed where they did not.
    ///
    /// # Errors
    /// ENOMEM when the host has no memory (EFAULT or EHWPOISON from the kernel's side are passed on).
    pub fn populate(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.advise(self.bytes(&pages), Advice::LinuxPopulateWrite)
    }

    /// Brings the pages to where they can be read. A page that the machine lost (a memory error, or a read error of the host's own
    /// swap) is an error here; whoever touched it through the mapping would be killed by SIGBUS.
    ///
    /// # Errors
    /// EHWPOISON or EFAULT for a page that is lost; ENOMEM.
    pub fn make_readable(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.advise(self.bytes(&pages), Advice::LinuxPopulateRead)
    }

    /// A range for [`crate::ring::Ring`] to read into or write from.
    ///
    /// # Panics
    /// If the range is empty or not in the file: the page table is broken then.
    pub fn io_target(&self, offset: u64, len: u32) -> IoTarget {
        let end = offset.checked_add(u64::from(len)).expect("range of RAM overflows");
        assert!(len > 0 && end <= self.len(), "range {offset:#x}..{end:#x} is not in RAM of {:#x} bytes", self.len());
        IoTarget { mapping: Arc::clone(&self.mapping), offset: offset as usize, len }
    }

    /// Asks mincore(2) for [`RamFile::resident`].
    fn mincore(&self, from_page: u64, out: &mut [u8]) -> Result<(), Errno> {
        let pages = from_page..from_page + out.len() as u64;
        let bytes = self.bytes(&pages);
        let addr = self.mapping.addr.wrapping_add(bytes.start);
        // SAFETY: mincore(2) needs a mapped range (checked by `bytes`) and one writable byte a page of it: `out` is that long.
        let rc = unsafe { libc::mincore(addr.cast(), bytes.len(), out.as_mut_ptr()) };
        if rc < 0 { Err(crate::errno()) } else { Ok(()) }
    }

    fn advise(&self, bytes: Range<usize>, advice: Advice) -> Result<(), Errno> {
        let addr = self.mapping.addr.wrapping_add(bytes.start);
        // SAFETY: madvise(2) may change what reads return: the range is inside our mapping, no reference into it exists,
        // and all advice used here leaves the content of a shared file mapping alone.
        unsafe { rustix::mm::madvise(addr.cast(), bytes.len(), advice) }
    }

    /// The bytes of `pages`, checked against the mapping.
    fn bytes(&self, pages: &Range<u64>) -> Range<usize> {
        let count = (self.mapping.len / PAGE_SIZE) as u64;
        assert!(pages.start <= pages.end && pages.end <= count, "pages {pages:?} are not in RAM of {count} pages");
        pages.start as usize * PAGE_SIZE..pages.end as usize * PAGE_SIZE
    }

    fn at(&self, pages: &Range<u64>) -> *mut u8 {
        self.mapping.addr.wrapping_add(self.bytes(pages).start)
    }

    fn words(&self, pages: &Range<u64>) -> *const AtomicU64 {
        self.at(pages).cast_const().cast()
    }

    /// Where the view starts, for tests of its placement.
    #[cfg(test)]
    pub(super) fn addr(&self) -> usize {
        self.mapping.addr.addr()
    }
}
