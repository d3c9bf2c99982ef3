//! The least a userfaultfd can cost: one faulting thread, one handler that blocks in `read`,
//! resolves and reads again. Nothing of Pagoda's engine takes part, so that the benches can say
//! what Pagoda adds.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::ram::{PAGE_BYTES, Ram};

// include/uapi/linux/userfaultfd.h; ioctl numbers are of the asm-generic layout (x86-64, AArch64).
const USERFAULTFD_IOC_NEW: u64 = 0x0000_aa00;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_COPY: u64 = 0xc028_aa03;
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;
const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;
const UFFDIO_CONTINUE: u64 = 0xc020_aa07;
const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const UFFD_FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const REGISTER_MODE_MISSING: u64 = 1;
const REGISTER_MODE_WP: u64 = 1 << 1;
const REGISTER_MODE_MINOR: u64 = 1 << 2;
/// A chunk of Pagoda's pager has so many bytes.
pub const CHUNK_BYTES: u64 = 1 << 20;
const MESSAGE_BYTES: usize = 32;
const EVENT_PAGEFAULT: u8 = 0x12;
/// `arg.pagefault.address` in `struct uffd_msg`: 8 bytes of header, 8 of flags.
const MESSAGE_ADDRESS_AT: usize = 16;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_zeropage` and `struct uffdio_continue` have the same layout.
#[repr(C)]
struct Resolve {
    start: u64,
    len: u64,
    mode: u64,
    result: i64,
}

#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    result: i64,
}

#[repr(C)]
struct Protect {
    start: u64,
    len: u64,
    mode: u64,
}

const WRITEPROTECT_MODE_WP: u64 = 1;

const _: () = assert!(size_of::<Api>() == 24);
const _: () = assert!(size_of::<Protect>() == 24);
const _: () = assert!(size_of::<Register>() == 32);
const _: () = assert!(size_of::<Resolve>() == 32);
const _: () = assert!(size_of::<Copy>() == 40);

/// How the handler resolves a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// MISSING, answered with a zero page.
    ZeroPage,
    /// MISSING, answered with a copy of 4 KiB.
    Copy,
    /// MINOR: the page is in the page cache and only gets mapped.
    Continue,
    /// MINOR: all pages of the aligned chunk around the fault get mapped.
    ContinueChunk,
    /// A write to a protected page: 4 KiB are copied, and the page is protected no more.
    CopyAndUnprotect,
}

impl Resolution {
    /// The range that one answer covers.
    fn bytes(self) -> u64 {
        match self {
            Self::ZeroPage | Self::Copy | Self::Continue | Self::CopyAndUnprotect => PAGE_BYTES as u64,
            Self::ContinueChunk => CHUNK_BYTES,
        }
    }
}

/// A userfaultfd registered over all of a [`Ram`].
#[derive(Debug)]
pub struct FaultLoop {
    fd: OwnedFd,
}

impl FaultLoop {
    /// Registers the whole RAM for the faults that `resolution` answers.
    ///
    /// # Errors
    /// No permission for userfaultfd, or the kernel lacks the mode.
    pub fn register(ram: &Ram, resolution: Resolution) -> io::Result<Self> {
        let fd = open_userfaultfd()?;
        let features = match resolution {
            Resolution::CopyAndUnprotect => UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
            _ => UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM,
        };
        let mut api = Api { api: UFFD_API, features, ioctls: 0 };
        ioctl(&fd, UFFDIO_API, &mut api)?;
        let mode = match resolution {
            Resolution::Continue | Resolution::ContinueChunk => REGISTER_MODE_MINOR,
            Resolution::ZeroPage | Resolution::Copy => REGISTER_MODE_MISSING,
            Resolution::CopyAndUnprotect => REGISTER_MODE_WP,
        };
        let len = (ram.pages() * PAGE_BYTES) as u64;
        let mut register = Register { start: ram.address(), len, mode, ioctls: 0 };
        ioctl(&fd, UFFDIO_REGISTER, &mut register)?;
        if resolution == Resolution::CopyAndUnprotect {
            ioctl(&fd, UFFDIO_WRITEPROTECT, &mut Protect { start: ram.address(), len, mode: WRITEPROTECT_MODE_WP })?;
        }
        Ok(Self { fd })
    }

    /// The fd, to hand to a handler in another process.
    #[must_use]
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// A second handle for a handler thread.
    ///
    /// # Errors
    /// Out of fds.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// A loop over an fd that another process registered and handed over.
    #[must_use]
    pub fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Serves faults one at a time until the page at address `stop_at` has been served.
    ///
    /// # Errors
    /// Reading or resolving failed; the faulting thread then stays where it is.
    pub fn serve(&self, resolution: Resolution, stop_at: u64) -> io::Result<()> {
        let mut messages = File::from(self.fd.try_clone()?);
        let mut message = [0_u8; MESSAGE_BYTES];
        let source = SourcePage([0x5a; PAGE_BYTES]);
        let mut taken = SourcePage([0; PAGE_BYTES]);
        loop {
            match messages.read(&mut message) {
                Ok(MESSAGE_BYTES) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
                Ok(_) => return Err(io::Error::other("short userfaultfd message")),
            }
            if message[0] != EVENT_PAGEFAULT {
                continue;
            }
            let mut address = [0_u8; 8];
            address.copy_from_slice(&message[MESSAGE_ADDRESS_AT..MESSAGE_ADDRESS_AT + 8]);
            let len = resolution.bytes();
            let start = u64::from_ne_bytes(address) & !(len - 1);
            match resolution {
                Resolution::ZeroPage => {
                    let mut resolve = Resolve { start, len, mode: 0, result: 0 };
                    ioctl(&self.fd, UFFDIO_ZEROPAGE, &mut resolve)?;
                }
                Resolution::Continue | Resolution::ContinueChunk => {
                    let mut resolve = Resolve { start, len, mode: 0, result: 0 };
                    ioctl(&self.fd, UFFDIO_CONTINUE, &mut resolve)?;
                }
                Resolution::Copy => {
                    let src = source.0.as_ptr() as u64;
                    let mut copy = Copy { dst: start, src, len, mode: 0, result: 0 };
                    ioctl(&self.fd, UFFDIO_COPY, &mut copy)?;
                }
                Resolution::CopyAndUnprotect => {
                    // The page itself is another process's; what is copied instead is as large.
                    std::hint::black_box(&mut taken).0.copy_from_slice(&std::hint::black_box(&source).0);
                    ioctl(&self.fd, UFFDIO_WRITEPROTECT, &mut Protect { start, len, mode: 0 })?;
                }
            }
            if (start..start + len).contains(&stop_at) {
                return Ok(());
            }
        }
    }
}

#[repr(align(4096))]
struct SourcePage([u8; PAGE_BYTES]);

fn open_userfaultfd() -> io::Result<OwnedFd> {
    let raw = match File::open("/dev/userfaultfd") {
        // SAFETY: the argument of USERFAULTFD_IOC_NEW is a plain flags word, no memory.
        Ok(device) => unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, libc::O_CLOEXEC) },
        Err(_) => {
            // SAFETY: userfaultfd(2) takes a flags word and touches no memory.
            let rc = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
            i32::try_from(rc).unwrap_or(-1)
        }
    };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this fd to us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

fn ioctl<T>(fd: &OwnedFd, request: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: every caller passes the structure that belongs to the request (sizes asserted
    // above), alive and writable for the call. COPY reads one page from a live `SourcePage`, and
    // the resolving requests only fill pages that are registered and absent: no page a Rust
    // reference covers, since `Ram` hands out none.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
