//! A VM's private swap file: sparse, page for page as long as its RAM, read and written by direct I/O.
//!
//! What is in DRAM alone is a hole here (an unwritten extent if space is reserved), so after a crash the file itself says
//! which pages it has: [`SwapFile::data_extents`]. The I/O goes through [`crate::ring`]; this module opens, checks, locks
//! and punches.
//!
//! **The lock.** One daemon at a time may write. A daemon that is killed leaves its I/O in flight to the kernel, and
//! that I/O still holds the open file description; so flock(2) falls only with the last of it, and whoever then gets the
//! lock knows that no old write can land any more. Hence the bounded wait in [`SwapFile::open`].

mod buffer;
mod extents;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom, StatxFlags};

pub use self::buffer::DirectBuffer;
use crate::{Errno, PAGE_SIZE};

/// How long the previous daemon's I/O may take to end. A healthy disk needs milliseconds; Linux's SCSI layer gives a command up
/// after 30 s (its default timeout).
pub const LOCK_WAIT: Duration = Duration::from_secs(35);
/// Between two tries for the lock: service after a restart shall be there in under 200 ms.
const LOCK_POLL: Duration = Duration::from_millis(2);

/// Whether the space is allocated up front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// Space is taken as pages go out, and given back as they come in.
    No,
    /// All space is taken now, as unwritten extents that read as holes: swap cannot run full.
    Yes,
}

/// Why a swap file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The file system has no direct I/O.
    #[error("{}: the file system cannot do direct I/O: put the swap directory on ext4 or XFS", path.display())]
    NoDirectIo {
        /// The swap file is at this path.
        path: PathBuf,
    },
    /// Direct I/O in larger blocks than a page.
    #[error("{}: direct I/O needs blocks of {align} bytes, Pagoda's pages have {PAGE_SIZE}: put the swap directory on a disk with blocks of {PAGE_SIZE} bytes or less", path.display())]
    Alignment {
        /// The swap file is at this path.
        path: PathBuf,
        /// What the disk asks for.
        align: u32,
    },
    /// The file system cannot give space back.
    #[error("{}: the file system cannot make holes in files: put the swap directory on ext4 or XFS", path.display())]
    NoHoles {
        /// The swap file is at this path.
        path: PathBuf,
    },
    /// The file system is memory.
    #[error("{}: this is a file system in memory: put the swap directory on a disk", path.display())]
    InMemory {
        /// The swap file is at this path.
        path: PathBuf,
    },
    /// Not enough space to reserve.
    #[error("{}: {needed} bytes of swap are to be reserved and {free} are free: free some, use another swap directory, or do not reserve", path.display())]
    NoSpace {
        /// The swap file is at this path.
        path: PathBuf,
        /// So many bytes are to be reserved.
        needed: u64,
        /// So many bytes are free.
        free: u64,
    },
    /// Held by another process, or by I/O that does not end.
    #[error("{}: in use for more than {} s: another pagodad has it, or the disk does not complete its I/O", path.display(), LOCK_WAIT.as_secs())]
    Locked {
        /// The swap file is at this path.
        path: PathBuf,
    },
    /// A file of another length.
    #[error("{}: {found} bytes long, {expected} expected: not this VM's swap file", path.display())]
    Length {
        /// The swap file is at this path.
        path: PathBuf,
        /// The file has so many bytes.
        found: u64,
        /// The VM's RAM has so many bytes.
        expected: u64,
    },
    /// A system call failed.
    #[error("{what} {}: {source}", path.display())]
    Os {
        /// The text says what was tried.
        what: &'static str,
        /// The swap file is at this path.
        path: PathBuf,
        /// It failed with this error.
        source: io::Error,
    },
}

/// A page of memory where direct I/O wants it.
#[derive(Debug)]
#[repr(align(4096))]
pub struct AlignedPage([u8; crate::PAGE_SIZE]);

impl AlignedPage {
    /// Gives the content of the page.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// An open, locked swap file.
#[derive(Debug)]
pub struct SwapFile {
    fd: OwnedFd,
    path: PathBuf,
    len: u64,
    reserve: Reserve,
}

impl AsFd for SwapFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl SwapFile {
    /// Makes a swap file for `len` bytes of RAM, readable by its owner alone, and checks that the file system can do what
    /// is needed. Leaves nothing behind if it fails.
    ///
    /// # Errors
    /// A [`SwapError`] that says what to do; `AlreadyExists` within [`SwapError::Os`].
    pub fn create(path: &Path, len: u64, reserve: Reserve) -> Result<SwapFile, SwapError> {
        let fd = open_file(path, OFlags::CREATE | OFlags::EXCL)?;
        let swap = SwapFile { fd, path: path.to_owned(), len, reserve };
        swap.prepare().inspect_err(|_| {
            let _ = std::fs::remove_file(path);
        })?;
        Ok(swap)
    }

    /// Opens the swap file of a VM that runs, once the last I/O of the previous daemon has ended.
    ///
    /// # Errors
    /// [`SwapError::Locked`] after [`LOCK_WAIT`]; [`SwapError::Length`].
    pub fn open(path: &Path, len: u64, reserve: Reserve) -> Result<SwapFile, SwapError> {
        let fd = open_file(path, OFlags::empty())?;
        let swap = SwapFile { fd, path: path.to_owned(), len, reserve };
        swap.lock(LOCK_WAIT)?;
        let found = rustix::fs::fstat(&swap.fd).map_err(swap.os("stat"))?.st_size as u64;
        if found != len {
            return Err(SwapError::Length { path: path.to_owned(), found, expected: len });
        }
        swap.check_alignment()?;
        Ok(swap)
    }

    /// Another descriptor of the same file. The lock falls with the last of them.
    ///
    /// # Errors
    /// EMFILE.
    pub fn duplicate(&self) -> Result<SwapFile, Errno> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0)?;
        Ok(SwapFile { fd, path: self.path.clone(), len: self.len, reserve: self.reserve })
    }

    /// Lends the descriptor, as [`crate::ring::Ring::add_file`] wants it.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Length in bytes: that of the VM's RAM.
    #[allow(clippy::len_without_is_empty)] // a swap file is never empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Gives the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a range a hole: it has no data any more. Reserved space stays reserved. ext4 and XFS let the direct I/O in
    /// flight on the file end first and hold new ones back meanwhile: not for the thread that answers faults.
    ///
    /// # Errors
    /// The error of fallocate(2).
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let mode = match self.reserve {
            Reserve::No => FallocateFlags::PUNCH_HOLE,
            Reserve::Yes => FallocateFlags::ZERO_RANGE,
        };
        rustix::fs::fallocate(&self.fd, mode | FallocateFlags::KEEP_SIZE, offset, len)
    }

    /// Bytes on the disk, reserved ones included.
    ///
    /// # Errors
    /// The error of fstat(2).
    pub fn allocated(&self) -> Result<u64, Errno> {
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks as u64 * 512)
    }

    /// Reads one page and waits for it: for the rare repair, not for the page path.
    ///
    /// # Errors
    /// The error of pread(2); EIO for a short read.
    pub fn read_page(&self, page: u64) -> Result<Box<AlignedPage>, Errno> {
        let mut content = Box::new(AlignedPage([0; crate::PAGE_SIZE]));
        match rustix::io::pread(&self.fd, &mut content.0, page * crate::PAGE_SIZE as u64)? {
            crate::PAGE_SIZE => Ok(content),
            _ => Err(Errno::IO),
        }
    }

    /// Writes whole pages by direct I/O, from a [`DirectBuffer`], and waits for it: for a VM that does not run yet.
    ///
    /// # Errors
    /// The error of pwrite(2); EIO if nothing is written.
    pub fn write_pages(&self, page: u64, mut pages: &[u8]) -> Result<(), Errno> {
        assert!(pages.len().is_multiple_of(PAGE_SIZE), "whole pages");
        let mut offset = page * PAGE_SIZE as u64;
        while !pages.is_empty() {
            match rustix::io::pwrite(&self.fd, pages, offset) {
                Ok(0) => return Err(Errno::IO),
                Ok(written) => {
                    pages = &pages[written..];
                    offset += written as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Calls `found` with offset and length of each range that has data, in ascending order.
    ///
    /// # Errors
    /// The error of FIEMAP or lseek(2).
    pub fn data_extents(&self, found: &mut impl FnMut(u64, u64)) -> Result<(), Errno> {
        extents::data_extents(self.fd.as_fd(), self.len, found)
    }

    /// Deletes the file.
    ///
    /// # Errors
    /// The error of unlink(2).
    pub fn remove(self) -> Result<(), SwapError> {
        std::fs::remove_file(&self.path).map_err(|source| self.os_io("remove")(source))
    }

    fn prepare(&self) -> Result<(), SwapError> {
        self.lock(LOCK_WAIT)?;
        // Some umasks take even the owner's bits; the mode is set, not only asked for.
        rustix::fs::fchmod(&self.fd, Mode::RUSR | Mode::WUSR).map_err(self.os("set mode of"))?;
        self.check_alignment()?;
        rustix::fs::ftruncate(&self.fd, self.len).map_err(self.os("set size of"))?;
        self.check_io()?;
        self.check_holes()?;
        if self.reserve == Reserve::Yes {
            self.reserve_space()?;
        }
        Ok(())
    }

    fn lock(&self, wait: Duration) -> Result<(), SwapError> {
        let start = Instant::now();
        loop {
            match rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(()),
                Err(Errno::WOULDBLOCK) if start.elapsed() < wait => std::thread::sleep(LOCK_POLL),
                Err(Errno::WOULDBLOCK) => return Err(SwapError::Locked { path: self.path.clone() }),
                Err(errno) => return Err(self.os("lock")(errno)),
            }
        }
    }

    fn check_alignment(&self) -> Result<(), SwapError> {
        let kind = rustix::fs::fstatfs(&self.fd).map_err(self.os("statfs"))?.f_type as u64;
        if kind == crate::ram::TMPFS_MAGIC || kind == RAMFS_MAGIC {
            return Err(SwapError::InMemory { path: self.path.clone() });
        }
        let stat = match rustix::fs::statx(&self.fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
            Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => stat,
            // A file system that does not say: the probe write tells.
            _ => return Ok(()),
        };
        match stat.stx_dio_offset_align.max(stat.stx_dio_mem_align) {
            0 => Err(SwapError::NoDirectIo { path: self.path.clone() }),
            align if align as usize > PAGE_SIZE => Err(SwapError::Alignment { path: self.path.clone(), align }),
            _ => Ok(()),
        }
    }

    /// Writes and reads one page by direct I/O. The file is new: nothing is overwritten.
    fn check_io(&self) -> Result<(), SwapError> {
        let refused = |errno| match errno {
            Errno::INVAL | Errno::OPNOTSUPP => SwapError::NoDirectIo { path: self.path.clone() },
            errno => self.os("probe")(errno),
        };
        let mut page = AlignedPage([0xA5; PAGE_SIZE]);
        rustix::io::pwrite(&self.fd, &page.0, 0).map_err(refused)?;
        rustix::io::pread(&self.fd, &mut page.0[..], 0).map_err(refused)?;
        Ok(())
    }

    /// Punches the probe page and looks whether a hole is there.
    fn check_holes(&self) -> Result<(), SwapError> {
        let none = || SwapError::NoHoles { path: self.path.clone() };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.fd, flags, 0, self.len) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Err(none()),
            Err(errno) => return Err(self.os("punch")(errno)),
        }
        // A file system without holes calls everything data.
        match rustix::fs::seek(&self.fd, SeekFrom::Data(0)) {
            Err(Errno::NXIO) => Ok(()),
            _ => Err(none()),
        }
    }

    fn reserve_space(&self) -> Result<(), SwapError> {
        let parent = self.path.parent().unwrap_or(Path::new("."));
        let free = fs_free(parent).map_err(self.os_io("statfs directory of"))?;
        let short = || SwapError::NoSpace { path: self.path.clone(), needed: self.len, free };
        if free < self.len {
            return Err(short());
        }
        match rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, 0, self.len) {
            Ok(()) => Ok(()),
            Err(Errno::NOSPC | Errno::DQUOT) => Err(short()),
            Err(errno) => Err(self.os("reserve space for")(errno)),
        }
    }

    fn os(&self, what: &'static str) -> impl FnOnce(Errno) -> SwapError + '_ {
        move |errno| self.os_io(what)(errno.into())
    }

    fn os_io(&self, what: &'static str) -> impl FnOnce(io::Error) -> SwapError + '_ {
        move |source| SwapError::Os { what, path: self.path.clone(), source }
    }
}

/// Bytes an unprivileged user can still write to the file system of `dir`.
///
/// # Errors
/// The error of statvfs(3).
pub fn fs_free(dir: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail * stat.f_frsize)
}

/// `f_type` of ramfs (linux/magic.h).
const RAMFS_MAGIC: u64 = 0x8584_58f6;

fn open_file(path: &Path, extra: OFlags) -> Result<OwnedFd, SwapError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT | OFlags::NOFOLLOW | extra;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| {
        if errno == Errno::INVAL {
            // open(2): the file system does not support O_DIRECT. It has made the file all the same.
            if extra.contains(OFlags::CREATE) {
                let _ = std::fs::remove_file(path);
            }
            return SwapError::NoDirectIo { path: path.to_owned() };
        }
        SwapError::Os { what: "open", path: path.to_owned(), source: errno.into() }
    })
}

#[cfg(test)]
mod tests;
