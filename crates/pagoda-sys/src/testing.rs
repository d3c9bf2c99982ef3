//! What the tests of several modules need: a "guest" that maps a RAM file and touches it, and folio settings that are put
//! back.

use std::path::PathBuf;
use std::ptr;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::PAGE_SIZE;
use crate::host::{FolioSize, ShmemHuge};
use crate::ram::RamFile;
use crate::uffd::{self, Fault, Uffd};

/// A deadline for what happens at once on a working system.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const PAGE: u64 = PAGE_SIZE as u64;
const HUGE: usize = 2 << 20;

pub fn ram(name: &str, len: u64) -> RamFile {
    RamFile::create(name, len, rustix::process::geteuid().as_raw()).unwrap()
}

/// A path of its own on a disk (hier(7): /var/tmp outlives a reboot, so it is none in memory).
pub fn disk_path(name: &str) -> PathBuf {
    let path = PathBuf::from(format!("/var/tmp/pagoda-sys-test-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

/// A mapping of a RAM file at a 2 MiB boundary, as a VMM has it. Never unmapped, so that its threads are always safe.
#[derive(Clone, Copy)]
pub struct Guest {
    addr: usize,
    len: usize,
}

impl Guest {
    pub fn map(file: &RamFile) -> Guest {
        let len = file.len() as usize;
        let (none, private) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only.
        let room = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len + HUGE, none, private) }.unwrap();
        let addr = room.wrapping_byte_add(room.addr().next_multiple_of(HUGE) - room.addr());
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: MAP_FIXED replaces a part of the reservation just made, which holds nothing.
        let addr = unsafe { rustix::mm::mmap(addr, len, prot, flags, file.as_fd(), 0) }.unwrap();
        Guest { addr: addr.expose_provenance(), len }
    }

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

    pub fn advise(self, advice: Advice) {
        // SAFETY: all advice used by tests keeps the content of a shared mapping, and nobody holds a reference into it.
        unsafe { rustix::mm::madvise(self.pointer(0).cast(), self.len, advice) }.unwrap();
    }
}

/// A userfaultfd of this process over all of `guest`.
pub fn armed(guest: Guest) -> Uffd {
    let uffd = Uffd::from_fd(uffd::create().unwrap()).unwrap();
    uffd.enable().unwrap();
    uffd.register(guest.at(0), guest.len as u64).unwrap();
    uffd
}

/// Waits for one fault.
pub fn next_fault(uffd: &Uffd) -> Fault {
    let mut faults = [Fault::default()];
    let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    while uffd.read(&mut faults).unwrap() == 0 {
        let mut polled = [PollFd::new(uffd, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(1), "no fault came");
    }
    faults[0]
}

/// The host's folio settings, changed for one test at a time and put back.
pub struct FolioSettings {
    before: [(FolioSize, Option<ShmemHuge>); 2],
    _alone: MutexGuard<'static, ()>,
}

static FOLIO_SETTINGS: Mutex<()> = Mutex::new(());

impl FolioSettings {
    /// Sets both sizes as far as this kernel and our rights allow; tests ask [`FolioSize::on_advice`] what they got.
    pub fn set(setting: ShmemHuge) -> FolioSettings {
        let alone = FOLIO_SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
        let before = [FolioSize::Chunk, FolioSize::Huge].map(|size| (size, size.setting()));
        for (size, _) in before {
            let _ = size.set(setting);
        }
        FolioSettings { before, _alone: alone }
    }
}

impl Drop for FolioSettings {
    fn drop(&mut self) {
        for (size, setting) in self.before {
            if let Some(setting) = setting {
                let _ = size.set(setting);
            }
        }
    }
}
