//! The start-up self-test: every userfaultfd operation Pagoda uses, on the running kernel, with a thread that faults.
//!
//! A wrong ioctl number or a kernel that accepts an operation and does something else would show as a guest that hangs or
//! reads zeros. So each mode really runs: a thread touches a page, the fault must arrive as expected, the operation
//! resolves it, and the thread must come back with the right content. The pages are a memfd's, mapped twice: by the thread
//! (registered) and by the "daemon" (a view), as with a VM.

use std::ptr;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::ram::{LargeFolios, RamError, RamFile, RamView};
use crate::uffd::{self, Fault, Permission, Protect, Resolved, Uffd, UffdError};
use crate::{Errno, PAGE_SIZE};

/// One page for each case, and a spare.
const PAGES: usize = 8;
/// Ample for a thread to fault or to come back on a loaded host.
const PATIENCE: Duration = Duration::from_secs(10);
const PAGE: u64 = PAGE_SIZE as u64;

/// What the running kernel offers beyond what is required.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// How userfaultfds are allowed.
    pub permission: Permission,
    /// Pages can be mapped write-protected in one step (`UFFDIO_CONTINUE_MODE_WP`, Linux 6.4).
    pub continue_protected: bool,
}

/// Why the host cannot run Pagoda.
#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    /// No userfaultfd to be had.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// No RAM file to be had.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// A mode does not work.
    #[error(
        "self-test of {mode} failed: {what}. This kernel's userfaultfd cannot carry Pagoda: use another kernel, and report this with `uname -r`"
    )]
    Mode {
        /// The self-test tried this operation.
        mode: &'static str,
        /// This happened instead of what was expected.
        what: String,
    },
}

/// Runs all cases; takes some milliseconds.
///
/// # Errors
/// [`SelfTestError`] for the first case that fails. A thread may then be left behind, asleep in its fault, until the process
/// ends.
pub fn selftest() -> Result<Report, SelfTestError> {
    let permission = uffd::permission();
    let bench = Bench::new()?;
    bench.missing_and_copy()?;
    bench.missing_and_zeropage()?;
    bench.minor_and_continue()?;
    bench.write_protect()?;
    bench.wake()?;
    bench.refusals()?;
    let continue_protected = bench.continue_protected()?;
    Ok(Report { permission, continue_protected })
}

struct Bench {
    file: RamFile,
    view: RamView,
    uffd: Uffd,
    guest: Guest,
}

/// The mapping whose faults are handled. Never unmapped: after a failure a thread may still sleep in it.
#[derive(Clone, Copy)]
struct Guest {
    addr: usize,
}

/// A thread that touches one byte, and what it read there.
struct Touch {
    mode: &'static str,
    done: Receiver<u8>,
}

impl Guest {
    fn map(file: &RamFile) -> Result<Guest, SelfTestError> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only.
        let addr =
            unsafe { rustix::mm::mmap(ptr::null_mut(), PAGES * PAGE_SIZE, prot, MapFlags::SHARED, file.as_fd(), 0) };
        let addr = addr.map_err(|source| fail("mapping", source))?;
        Ok(Guest { addr: addr.expose_provenance() })
    }

    fn at(self, page: usize) -> u64 {
        (self.addr + page * PAGE_SIZE) as u64
    }

    fn pointer(self, page: usize) -> *mut u8 {
        assert!(page < PAGES, "self-test has {PAGES} pages");
        ptr::with_exposed_provenance_mut(self.addr + page * PAGE_SIZE)
    }

    /// Reads the first byte of a page, or with `write` replaces it first.
    fn touch(self, mode: &'static str, page: usize, write: Option<u8>) -> Touch {
        let (sender, done) = mpsc::channel();
        thread::spawn(move || {
            let byte = self.pointer(page);
            // SAFETY: volatile access needs a valid, aligned pointer: the mapping of PAGES pages is never unmapped, and
            // `pointer` checked the page. Other threads reach the same memory only by volatile accesses and the kernel.
            let value = unsafe {
                if let Some(value) = write {
                    byte.write_volatile(value);
                }
                byte.read_volatile()
            };
            // Nobody listens after a failure.
            let _ = sender.send(value);
        });
        Touch { mode, done }
    }

    fn zap(self, mode: &'static str, page: usize) -> Result<(), SelfTestError> {
        // SAFETY: MADV_DONTNEED needs memory whose content may go back to the file's: the mapping is shared, so nothing is
        // lost, and no reference into it exists.
        unsafe { rustix::mm::madvise(self.pointer(page).cast(), PAGE_SIZE, Advice::LinuxDontNeed) }
            .map_err(|errno| fail(mode, errno))
    }
}

impl Touch {
    fn finished(&self, expected: u8) -> Result<(), SelfTestError> {
        match self.done.recv_timeout(PATIENCE) {
            Ok(value) if value == expected => Ok(()),
            Ok(value) => Err(fail(self.mode, format!("read {value:#04x} instead of {expected:#04x}"))),
            Err(RecvTimeoutError::Timeout) => Err(fail(self.mode, "the faulting thread was not woken")),
            Err(RecvTimeoutError::Disconnected) => Err(fail(self.mode, "the faulting thread died")),
        }
    }
}

fn fail(mode: &'static str, what: impl ToString) -> SelfTestError {
    SelfTestError::Mode { mode, what: what.to_string() }
}

fn all(mode: &'static str, resolved: Resolved) -> Result<(), SelfTestError> {
    match resolved {
        Resolved::All => Ok(()),
        Resolved::Partial { errno, .. } => Err(fail(mode, errno)),
    }
}

impl Bench {
    fn new() -> Result<Bench, SelfTestError> {
        let owner = rustix::process::geteuid().as_raw();
        let file = RamFile::create("pagoda-selftest", (PAGES * PAGE_SIZE) as u64, owner)?;
        let view = file.map(LargeFolios::Never)?;
        let uffd = Uffd::from_fd(uffd::create()?)?;
        uffd.enable()?;
        // A second daemon's call must be accepted too.
        uffd.enable()?;
        let guest = Guest::map(&file)?;
        uffd.register(guest.at(0), (PAGES * PAGE_SIZE) as u64).map_err(|errno| fail("UFFDIO_REGISTER", errno))?;
        Ok(Bench { file, view, uffd, guest })
    }

    /// The fault that the next message must be.
    fn expect(&self, mode: &'static str, page: usize, write: bool, wp: bool, minor: bool) -> Result<(), SelfTestError> {
        let deadline = Instant::now() + PATIENCE;
        let mut faults = [Fault::default(); 1];
        while self.uffd.read(&mut faults).map_err(|error| fail(mode, error))? == 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: 0 };
            let mut polled = [PollFd::new(&self.uffd, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&timeout)) {
                Ok(0) => return Err(fail(mode, "no fault arrived")),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(fail(mode, errno)),
            }
        }
        let expected = Fault { addr: self.guest.at(page), write, wp, minor, tid: faults[0].tid };
        if faults[0] == expected { Ok(()) } else { Err(fail(mode, format!("{:?} instead of {expected:?}", faults[0]))) }
    }

    fn missing_and_copy(&self) -> Result<(), SelfTestError> {
        let mode = "MISSING and UFFDIO_COPY";
        let touch = self.guest.touch(mode, 0, None);
        self.expect(mode, 0, false, false, false)?;
        all(mode, self.uffd.copy(self.guest.at(0), &[0x5A; PAGE_SIZE], Protect::No))?;
        touch.finished(0x5A)
    }

    fn missing_and_zeropage(&self) -> Result<(), SelfTestError> {
        let mode = "MISSING and UFFDIO_ZEROPAGE";
        let touch = self.guest.touch(mode, 1, None);
        self.expect(mode, 1, false, false, false)?;
        all(mode, self.uffd.zeropage(self.guest.at(1), PAGE))?;
        touch.finished(0)
    }

    fn minor_and_continue(&self) -> Result<(), SelfTestError> {
        let mode = "MINOR and UFFDIO_CONTINUE";
        self.view.write_page(2, &[0x77; PAGE_SIZE]);
        let touch = self.guest.touch(mode, 2, None);
        self.expect(mode, 2, false, false, true)?;
        all(mode, self.uffd.cont(self.guest.at(2), PAGE, Protect::No))?;
        touch.finished(0x77)?;
        // And again after a zap, which must keep the content.
        self.guest.zap(mode, 2)?;
        let touch = self.guest.touch(mode, 2, Some(0x78));
        self.expect(mode, 2, true, false, true)?;
        all(mode, self.uffd.cont(self.guest.at(2), PAGE, Protect::No))?;
        touch.finished(0x78)
    }

    fn write_protect(&self) -> Result<(), SelfTestError> {
        let mode = "UFFDIO_WRITEPROTECT";
        all(mode, self.uffd.copy(self.guest.at(3), &[0x11; PAGE_SIZE], Protect::No))?;
        self.uffd.protect(self.guest.at(3), PAGE).map_err(|errno| fail(mode, errno))?;
        let touch = self.guest.touch(mode, 3, Some(0x22));
        self.expect(mode, 3, true, true, false)?;
        self.uffd.unprotect(self.guest.at(3), PAGE).map_err(|errno| fail(mode, errno))?;
        touch.finished(0x22)?;
        all(mode, self.uffd.copy(self.guest.at(4), &[0x33; PAGE_SIZE], Protect::Yes))?;
        let touch = self.guest.touch(mode, 4, Some(0x44));
        self.expect(mode, 4, true, true, false)?;
        self.uffd.unprotect(self.guest.at(4), PAGE).map_err(|errno| fail(mode, errno))?;
        touch.finished(0x44)
    }

    /// A waiter is woken without being served, faults again, and its page has been punched meanwhile: page-out's order.
    fn wake(&self) -> Result<(), SelfTestError> {
        let mode = "UFFDIO_WAKE after a punch";
        self.uffd.protect(self.guest.at(0), PAGE).map_err(|errno| fail(mode, errno))?;
        let touch = self.guest.touch(mode, 0, Some(0x66));
        self.expect(mode, 0, true, true, false)?;
        self.file.punch(0, PAGE).map_err(|errno| fail(mode, errno))?;
        self.uffd.wake(self.guest.at(0), PAGE).map_err(|errno| fail(mode, errno))?;
        self.expect(mode, 0, true, false, false)?;
        all(mode, self.uffd.copy(self.guest.at(0), &[0x55; PAGE_SIZE], Protect::No))?;
        touch.finished(0x66)
    }

    /// The refusals the engine tells apart.
    fn refusals(&self) -> Result<(), SelfTestError> {
        let mode = "refusal of wrong operations";
        let hole = self.uffd.cont(self.guest.at(5), PAGE, Protect::No);
        let mapped = self.uffd.cont(self.guest.at(0), PAGE, Protect::No);
        let cached = self.uffd.copy(self.guest.at(0), &[0; PAGE_SIZE], Protect::No);
        if hole.hole() && mapped.exists() && cached.exists() {
            return Ok(());
        }
        Err(fail(
            mode,
            format!("CONTINUE of a hole {hole:?}, of a mapped page {mapped:?}, COPY over a page {cached:?}"),
        ))
    }

    fn continue_protected(&self) -> Result<bool, SelfTestError> {
        let mode = "UFFDIO_CONTINUE_MODE_WP";
        self.view.write_page(6, &[0x12; PAGE_SIZE]);
        let resolved = self.uffd.cont(self.guest.at(6), PAGE, Protect::Yes);
        if resolved.errno() == Some(Errno::INVAL) {
            return Ok(false);
        }
        all(mode, resolved)?;
        let touch = self.guest.touch(mode, 6, Some(0x13));
        self.expect(mode, 6, true, true, false)?;
        self.uffd.unprotect(self.guest.at(6), PAGE).map_err(|errno| fail(mode, errno))?;
        touch.finished(0x13)?;
        Ok(true)
    }
}
