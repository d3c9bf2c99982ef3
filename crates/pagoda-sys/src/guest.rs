//! A "guest" for tests: it maps a RAM file as a VMM does, and touches it as a vCPU does.

use std::ptr;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::ram::RamFile;
use crate::{Errno, PAGE_SIZE};

const HUGE: usize = 2 << 20;
const PAGE_WORDS: usize = PAGE_SIZE / size_of::<u64>();

/// A mapping of a RAM file at a 2 MiB boundary. Never unmapped, so that its threads are always safe.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    addr: usize,
    len: usize,
}

impl Guest {
    /// Maps all of the file.
    ///
    /// # Panics
    /// There is no room for it.
    pub fn map(file: &RamFile) -> Guest {
        let len = file.len() as usize;
        let (none, private) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only.
        let room = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len + HUGE, none, private) };
        let room = room.expect("room for RAM");
        let addr = room.wrapping_byte_add(room.addr().next_multiple_of(HUGE) - room.addr());
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: MAP_FIXED replaces a part of the reservation just made, which holds nothing.
        let addr = unsafe { rustix::mm::mmap(addr, len, prot, flags, file.as_fd(), 0) }.expect("map RAM");
        Guest { addr: addr.expose_provenance(), len }
    }

    /// Bytes of its RAM.
    #[allow(clippy::len_without_is_empty)] // a RAM file is never empty
    pub fn len(self) -> u64 {
        self.len as u64
    }

    /// Address of a page.
    pub fn at(self, page: u64) -> u64 {
        (self.addr + page as usize * PAGE_SIZE) as u64
    }

    fn pointer(self, page: u64) -> *mut u8 {
        assert!((page as usize) < self.len / PAGE_SIZE);
        ptr::with_exposed_provenance_mut(self.at(page) as usize)
    }

    /// Reads the first byte of a page.
    pub fn read(self, page: u64) -> u8 {
        // SAFETY: a volatile read needs a mapped address: `pointer` checked it, and the mapping is never undone.
        unsafe { self.pointer(page).read_volatile() }
    }

    /// Writes the first byte of a page.
    pub fn write(self, page: u64, value: u8) {
        // SAFETY: as in `read`; nobody holds a reference into the mapping.
        unsafe { self.pointer(page).write_volatile(value) }
    }

    /// Reads a word of a page.
    pub fn load(self, page: u64, word: usize) -> u64 {
        assert!(word < PAGE_WORDS);
        // SAFETY: as in `read`: the word lies in the page, and is aligned.
        unsafe { self.pointer(page).cast::<u64>().add(word).read_volatile() }
    }

    /// Writes a word of a page.
    pub fn store(self, page: u64, word: usize, value: u64) {
        assert!(word < PAGE_WORDS);
        // SAFETY: as in `write`: the word lies in the page, and is aligned.
        unsafe { self.pointer(page).cast::<u64>().add(word).write_volatile(value) }
    }

    /// Reads in a thread that may have to wait for its fault.
    pub fn read_aside(self, page: u64) -> Receiver<u8> {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(self.read(page)));
        receiver
    }

    /// Writes in a thread that may have to wait for its fault.
    pub fn write_aside(self, page: u64, value: u8) -> Receiver<u8> {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            self.write(page, value);
            sender.send(value)
        });
        receiver
    }

    /// Unmaps the pages at an address of it; what they hold stays in the file.
    ///
    /// # Errors
    /// The error of madvise(2); EINVAL for a range that is not its own.
    pub fn zap(self, addr: u64, len: u64) -> Result<(), Errno> {
        let own = self.at(0)..self.at(0) + self.len();
        if !own.contains(&addr) || len > own.end - addr {
            return Err(Errno::INVAL);
        }
        let start = ptr::with_exposed_provenance_mut::<u8>(addr as usize);
        // SAFETY: MADV_DONTNEED keeps the content of a shared mapping, and nobody holds a reference into it.
        unsafe { rustix::mm::madvise(start.cast(), len as usize, Advice::LinuxDontNeed) }
    }

    /// Advises the kernel about all of it.
    #[cfg(test)]
    pub(crate) fn advise(self, advice: Advice) {
        // SAFETY: all advice used by tests keeps the content of a shared mapping, and nobody holds a reference into it.
        unsafe { rustix::mm::madvise(self.pointer(0).cast(), self.len, advice) }.unwrap();
    }
}
