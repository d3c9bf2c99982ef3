//! userfaultfd: the page faults of a VM, and what answers them.
//!
//! A [`Uffd`] is one of a VM's userfaultfds; the shim made it and keeps a duplicate, so closing ours loses nothing. All
//! addresses are the VMM's. Methods take `&self` and may be called by several threads: the kernel serialises.
//!
//! When the VMM is gone every operation answers ESRCH ([`Resolved::gone`], [`gone`]); that is how its end is noticed
//! between two looks at its pidfd, and no error. When the kernel refuses an operation the guest's thread sleeps on: the
//! caller decides what else resolves the fault.

mod error;
pub(crate) mod kernel;
mod open;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

use crate::{Errno, PAGE_SIZE};
pub use error::UffdError;
use kernel::{UffdMsg, UffdioApi, UffdioCopy, UffdioFill, UffdioRange, UffdioRegister, UffdioWriteprotect};
pub use open::{Permission, create, open_device, permission};

/// Messages taken by one read(2): 2 KiB of stack; more vCPUs than this rarely fault at the same moment.
pub const FAULTS_PER_READ: usize = 64;
/// How often EAGAIN without progress is tried again. The kernel gives it while the VMM's address space is being changed
/// (fork, mremap): microseconds. Past this the fault is left for its next message.
const RETRIES_MAX: u32 = 64;

/// Each feature Pagoda needs, by its name in linux/userfaultfd.h and the kernel that brought it.
const FEATURES: [(u64, &str, &str); 5] = [
    (kernel::FEATURE_MISSING_SHMEM, "MISSING_SHMEM", "4.11"),
    (kernel::FEATURE_THREAD_ID, "THREAD_ID", "4.14"),
    (kernel::FEATURE_PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP", "5.7"),
    (kernel::FEATURE_MINOR_SHMEM, "MINOR_SHMEM", "5.14"),
    (kernel::FEATURE_WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM", "5.19"),
];

/// Whether pages become readable only: the first write then raises a write-protect fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protect {
    /// The pages become writable.
    No,
    /// The pages become write-protected.
    Yes,
}

/// One page fault. It may be stale by the time it is read: the page table decides, not the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// Address in the VMM, of the page's first byte.
    pub addr: u64,
    /// The thread wanted to write.
    pub write: bool,
    /// The thread wanted to write to a write-protected page.
    pub wp: bool,
    /// The page is in the RAM file, only not mapped.
    pub minor: bool,
    /// Thread that faulted; 0 if it cannot be told.
    pub tid: u32,
}

/// What one read(2) brought.
#[derive(Clone, Copy, Default)]
struct Got {
    faults: usize,
    messages: usize,
}

/// How far an operation over a range got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// It got to the end of the range.
    All,
    /// The first `bytes` are done and their faulters awake; the page behind them was refused with `errno`.
    Partial {
        /// So many bytes are done.
        bytes: u64,
        /// The kernel refused the next page with this error.
        errno: Errno,
    },
}

impl Resolved {
    /// Of an operation that is done as a whole or not at all.
    pub fn of(result: Result<(), Errno>) -> Resolved {
        match result {
            Ok(()) => Resolved::All,
            Err(errno) => Resolved::Partial { bytes: 0, errno },
        }
    }

    /// Says whether the whole range is done.
    pub fn is_all(self) -> bool {
        self == Resolved::All
    }

    /// Bytes done out of `len`.
    pub fn bytes(self, len: u64) -> u64 {
        match self {
            Resolved::All => len,
            Resolved::Partial { bytes, .. } => bytes,
        }
    }

    /// Why it stopped, if it did.
    pub fn errno(self) -> Option<Errno> {
        match self {
            Resolved::All => None,
            Resolved::Partial { errno, .. } => Some(errno),
        }
    }

    /// EEXIST: there is a page already. After `copy` or `zeropage`: in the file, use `cont`; after `cont`: it is mapped.
    pub fn exists(self) -> bool {
        self.errno() == Some(Errno::EXIST)
    }

    /// EFAULT after `cont`: the RAM file has a hole there.
    pub fn hole(self) -> bool {
        self.errno() == Some(Errno::FAULT)
    }

    /// EAGAIN: the VMM is changing its address space for longer than the retries lasted.
    pub fn busy(self) -> bool {
        self.errno() == Some(Errno::AGAIN)
    }

    /// ENOMEM or ENOSPC: the host has no page to give.
    pub fn no_memory(self) -> bool {
        matches!(self.errno(), Some(Errno::NOMEM | Errno::NOSPC))
    }

    /// The VMM, or its mapping, is no more.
    pub fn gone(self) -> bool {
        self.errno().is_some_and(gone)
    }
}

/// Whether `errno` of a userfaultfd operation says that the VMM (ESRCH) or its registered mapping (ENOENT) is no more.
pub fn gone(errno: Errno) -> bool {
    matches!(errno, Errno::SRCH | Errno::NOENT)
}

/// One userfaultfd. See the module.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    ignored: AtomicU64,
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Uffd {
    /// Takes over a userfaultfd, from [`create`] or a peer, and makes it nonblocking.
    ///
    /// # Errors
    /// [`UffdError::NotUffd`] for any other file: a peer is not trusted to have sent the right one.
    pub fn from_fd(fd: OwnedFd) -> Result<Uffd, UffdError> {
        let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
            .map_or_else(|_| "unknown".to_owned(), |link| link.to_string_lossy().into_owned());
        if kind != "anon_inode:[userfaultfd]" {
            return Err(UffdError::NotUffd { kind });
        }
        let os = |what| move |source| UffdError::Os { what, source };
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(os("read flags of userfaultfd"))?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(os("make userfaultfd nonblocking"))?;
        Ok(Uffd { fd, ignored: AtomicU64::new(0) })
    }

    /// Lends the descriptor, so that it can be polled.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Events read that were neither page faults nor moves. Pagoda asks for none, so a number here is the shim's mistake.
    pub fn ignored(&self) -> u64 {
        self.ignored.load(Ordering::Relaxed)
    }

    /// Agrees with the kernel on version and features. A userfaultfd can do so once in its life, so one that an earlier
    /// daemon enabled is left as it is.
    ///
    /// # Errors
    /// [`UffdError::Features`] on an old kernel; the userfaultfd is then of no use.
    pub fn enable(&self) -> Result<(), UffdError> {
        self.enable_with(0)
    }

    /// The same where ranges will be moved: they stay registered. Whoever moves one waits until [`Uffd::read`] has been called.
    ///
    /// # Errors
    /// As [`Uffd::enable`].
    pub fn enable_with_moves(&self) -> Result<(), UffdError> {
        self.enable_with(kernel::FEATURE_EVENT_REMAP)
    }

    fn enable_with(&self, more: u64) -> Result<(), UffdError> {
        if self.is_enabled()? {
            return Ok(());
        }
        let wanted = more | FEATURES.iter().fold(0, |bits, (bit, ..)| bits | bit);
        let mut api = UffdioApi { api: kernel::API, features: wanted, ioctls: 0 };
        match self.ioctl(kernel::UFFDIO_API, &mut api) {
            Ok(()) => Ok(()),
            // The same error as for a bit unknown to the kernel: ask which it knows.
            Err(Errno::INVAL) => {
                let mut any = UffdioApi { api: kernel::API, ..UffdioApi::default() };
                self.ioctl(kernel::UFFDIO_API, &mut any)
                    .map_err(|source| UffdError::Os { what: "UFFDIO_API", source })?;
                Err(UffdError::Features { missing: name_missing(any.features) })
            }
            Err(source) => Err(UffdError::Os { what: "UFFDIO_API", source }),
        }
    }

    /// poll(2) on a nonblocking userfaultfd gives POLLERR exactly as long as it is not enabled.
    fn is_enabled(&self) -> Result<bool, UffdError> {
        let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&now))
            .map_err(|source| UffdError::Os { what: "poll userfaultfd", source })?;
        Ok(!polled[0].revents().contains(PollFlags::ERR))
    }

    /// Starts to report the faults of a range: absent pages, unmapped pages and writes to protected ones.
    ///
    /// # Errors
    /// EINVAL if the range is not one shmem mapping; EBUSY if another userfaultfd has it; ENOMEM; ESRCH.
    pub fn register(&self, addr: u64, len: u64) -> Result<(), Errno> {
        let mode = kernel::REGISTER_MISSING | kernel::REGISTER_WP | kernel::REGISTER_MINOR;
        let mut register = UffdioRegister { range: UffdioRange { start: addr, len }, mode, ioctls: 0 };
        self.ioctl(kernel::UFFDIO_REGISTER, &mut register)
    }

    /// The same for a range that maps a template privately: its pages are mapped without a report, and what is reported are
    /// writes, once they are protected, and pages that the template lacks.
    ///
    /// # Errors
    /// As [`Uffd::register`].
    pub fn register_private(&self, addr: u64, len: u64) -> Result<(), Errno> {
        let mode = kernel::REGISTER_MISSING | kernel::REGISTER_WP;
        let mut register = UffdioRegister { range: UffdioRange { start: addr, len }, mode, ioctls: 0 };
        self.ioctl(kernel::UFFDIO_REGISTER, &mut register)
    }

    /// Leaves the faults of a range to the kernel again, and wakes who waits there.
    ///
    /// # Errors
    /// EINVAL if the range is not mapped; ESRCH.
    pub fn unregister(&self, addr: u64, len: u64) -> Result<(), Errno> {
        self.ioctl(kernel::UFFDIO_UNREGISTER, &mut UffdioRange { start: addr, len })
    }

    /// Reads the faults that wait, at most [`FAULTS_PER_READ`] and at most what fits; 0 when none does.
    ///
    /// # Errors
    /// The error of read(2); EINVAL if the userfaultfd is not enabled.
    pub fn read(&self, out: &mut [Fault]) -> std::io::Result<usize> {
        let mut count = 0;
        // Other messages than faults leave room: more faults may wait behind them, and nobody is told of those again.
        while count < out.len() {
            let (got, asked) = self.read_some(&mut out[count..])?;
            count += got.faults;
            if got.messages < asked {
                break;
            }
        }
        Ok(count)
    }

    /// One read(2): what came, and how many messages it could have been.
    fn read_some(&self, out: &mut [Fault]) -> std::io::Result<(Got, usize)> {
        let mut messages = [UffdMsg::default(); FAULTS_PER_READ];
        let asked = out.len().min(FAULTS_PER_READ);
        let wanted = asked * size_of::<UffdMsg>();
        // SAFETY: read(2) needs `wanted` writable bytes at the pointer: `messages` has at least as many, and any bytes
        // are a valid `UffdMsg`, which has only integers.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), wanted) };
        if got < 0 {
            return match crate::errno() {
                Errno::AGAIN | Errno::INTR => Ok((Got::default(), asked)),
                errno => Err(errno.into()),
            };
        }
        let came = got as usize / size_of::<UffdMsg>();
        let mut count = 0;
        for message in &messages[..came] {
            if message.event == kernel::EVENT_REMAP {
                continue;
            }
            if message.event != kernel::EVENT_PAGEFAULT {
                self.ignored.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            out[count] = Fault {
                addr: message.address & !(PAGE_SIZE as u64 - 1),
                write: message.flags & kernel::FAULT_WRITE != 0,
                wp: message.flags & kernel::FAULT_WP != 0,
                minor: message.flags & kernel::FAULT_MINOR != 0,
                tid: message.ptid,
            };
            count += 1;
        }
        Ok((Got { faults: count, messages: came }, asked))
    }

    /// Fills absent pages from `src`, maps them and wakes who waits. EEXIST where the RAM file has a page.
    pub fn copy(&self, addr: u64, src: &[u8], protect: Protect) -> Resolved {
        let mode = if protect == Protect::Yes { kernel::COPY_WP } else { 0 };
        self.advance(src.len() as u64, |done| {
            let from = &src[done as usize..];
            let mut copy =
                UffdioCopy { dst: addr + done, src: from.as_ptr() as u64, len: from.len() as u64, mode, copy: 0 };
            let result = self.ioctl(kernel::UFFDIO_COPY, &mut copy);
            (copy.copy, result)
        })
    }

    /// Fills absent pages with zeros (it allocates them: shmem has no zero page), maps them and wakes who waits.
    pub fn zeropage(&self, addr: u64, len: u64) -> Resolved {
        self.fill(kernel::UFFDIO_ZEROPAGE, addr, len, 0)
    }

    /// Maps pages that the RAM file has, and wakes who waits. EFAULT at a hole, EEXIST at a page that is mapped;
    /// nothing behind either is done. [`Protect::Yes`] needs Linux 6.4, before it EINVAL.
    pub fn cont(&self, addr: u64, len: u64, protect: Protect) -> Resolved {
        let mode = if protect == Protect::Yes { kernel::CONTINUE_WP } else { 0 };
        self.fill(kernel::UFFDIO_CONTINUE, addr, len, mode)
    }

    /// [`Uffd::cont`] that steps over pages already mapped, and wakes who waits for one of those.
    pub fn cont_over(&self, addr: u64, len: u64, protect: Protect) -> Resolved {
        let (mut done, mut skipped) = (0, false);
        let end = loop {
            match self.cont(addr + done, len - done, protect) {
                Resolved::All => break Resolved::All,
                Resolved::Partial { bytes, errno: Errno::EXIST } => {
                    done += bytes + PAGE_SIZE as u64;
                    skipped = true;
                    if done >= len {
                        break Resolved::All;
                    }
                }
                Resolved::Partial { bytes, errno } => break Resolved::Partial { bytes: done + bytes, errno },
            }
        };
        match (skipped.then(|| self.wake(addr, len)), end) {
            (Some(Err(errno)), Resolved::All) => Resolved::Partial { bytes: 0, errno },
            (_, end) => end,
        }
    }

    /// Write-protects a range. Also marks absent page-table entries; a later [`Uffd::cont`] or [`Uffd::copy`] with
    /// [`Protect::No`] drops the mark.
    ///
    /// # Errors
    /// ENOENT or ESRCH: see [`gone`]. EAGAIN: the VMM is changing its address space; nothing is promised, try later.
    pub fn protect(&self, addr: u64, len: u64) -> Result<(), Errno> {
        self.writeprotect(addr, len, kernel::WRITEPROTECT_WP)
    }

    /// Lifts the write-protection and wakes who waits to write.
    ///
    /// # Errors
    /// As [`Uffd::protect`].
    pub fn unprotect(&self, addr: u64, len: u64) -> Result<(), Errno> {
        self.writeprotect(addr, len, 0)
    }

    /// Lets everybody who waits in the range try again.
    ///
    /// # Errors
    /// EINVAL for a range that is not whole pages.
    pub fn wake(&self, addr: u64, len: u64) -> Result<(), Errno> {
        self.ioctl(kernel::UFFDIO_WAKE, &mut UffdioRange { start: addr, len })
    }

    fn writeprotect(&self, addr: u64, len: u64, mode: u64) -> Result<(), Errno> {
        let mut request = UffdioWriteprotect { range: UffdioRange { start: addr, len }, mode };
        let mut result = Err(Errno::AGAIN);
        for _ in 0..RETRIES_MAX {
            result = self.ioctl(kernel::UFFDIO_WRITEPROTECT, &mut request);
            if result != Err(Errno::AGAIN) {
                break;
            }
            std::thread::yield_now();
        }
        result
    }

    fn fill(&self, request: u64, addr: u64, len: u64, mode: u64) -> Resolved {
        self.advance(len, |done| {
            let mut fill = UffdioFill { range: UffdioRange { start: addr + done, len: len - done }, mode, done: 0 };
            let result = self.ioctl(request, &mut fill);
            (fill.done, result)
        })
    }

    /// Repeats `step` behind what it did, as the kernel stops early with EAGAIN and a count.
    fn advance(&self, len: u64, step: impl Fn(u64) -> (i64, Result<(), Errno>)) -> Resolved {
        let (mut done, mut idle) = (0, 0);
        loop {
            let (count, result) = step(done);
            let Err(errno) = result else { return Resolved::All };
            // The kernel writes the count, or the negated error when there was no progress.
            let progress = u64::try_from(count).unwrap_or(0);
            done += progress;
            if done >= len {
                return Resolved::All;
            }
            if errno != Errno::AGAIN {
                return Resolved::Partial { bytes: done, errno };
            }
            if progress == 0 {
                idle += 1;
                if idle == RETRIES_MAX {
                    return Resolved::Partial { bytes: done, errno };
                }
                std::thread::yield_now();
            }
        }
    }

    fn ioctl<T>(&self, request: u64, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: ioctl(2) needs a pointer to the structure `request` names, writable for as many bytes as are encoded
        // in it: this is private, each caller passes the one structure of its request, whose size is asserted in
        // `kernel`. Where the structure holds an address of ours (`UffdioCopy::src`), the caller took it from a slice
        // that lives through the call. The addresses to be changed are of the process that registered them.
        let rc = unsafe { libc::ioctl(self.fd.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
        if rc < 0 { Err(crate::errno()) } else { Ok(()) }
    }
}

fn name_missing(features: u64) -> String {
    let absent = FEATURES.iter().filter(|(bit, ..)| features & bit == 0);
    absent.map(|(_, name, since)| format!("UFFD_FEATURE_{name} (Linux {since})")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
