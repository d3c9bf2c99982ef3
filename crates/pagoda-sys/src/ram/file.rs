//! The sealed memfd that is a VM's RAM, and which of its pages exist.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, Gid, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, Uid};

use crate::{Errno, PAGE_SIZE};

/// `f_type` of tmpfs and of memfds (linux/magic.h).
pub(crate) const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Why a RAM file could not be made, taken over or mapped.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The peer handed over some other file.
    #[error("file handed over as RAM is {what}")]
    NotRam {
        /// What is wrong with it.
        what: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// The text says what was tried.
        what: &'static str,
        /// It failed with this error.
        source: Errno,
    },
}

pub(super) fn os(what: &'static str) -> impl FnOnce(Errno) -> RamError {
    move |source| RamError::Os { what, source }
}

/// A RAM file is a sealed memfd, so its length never changes.
#[derive(Debug)]
pub struct RamFile {
    fd: OwnedFd,
    len: u64,
    inode: (u64, u64),
}

impl AsFd for RamFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl RamFile {
    /// Makes a RAM file of `len` bytes, all holes, that only `owner` may open through `/proc/PID/fd`.
    ///
    /// # Errors
    /// EMFILE, ENOMEM, EPERM if this process may not give files away.
    pub fn create(name: &str, len: u64, owner: u32) -> Result<RamFile, RamError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(os("create RAM file"))?;
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(os("set mode of RAM file"))?;
        rustix::fs::fchown(&fd, Some(Uid::from_raw(owner)), None::<Gid>)
            .map_err(os("give RAM file to the VM's user"))?;
        rustix::fs::ftruncate(&fd, len).map_err(os("set size of RAM file"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(os("seal RAM file"))?;
        RamFile::from_fd(fd, len)
    }

    /// Takes over a RAM file that an earlier daemon made.
    ///
    /// # Errors
    /// [`RamError::NotRam`] unless it is a memfd of that size whose size is sealed.
    pub fn from_fd(fd: OwnedFd, expected_len: u64) -> Result<RamFile, RamError> {
        let not_ram = |what: String| Err(RamError::NotRam { what });
        let kind = rustix::fs::fstatfs(&fd).map_err(os("statfs RAM file"))?.f_type as u64;
        if kind != TMPFS_MAGIC {
            return not_ram(format!("not in memory (file system type {kind:#x})"));
        }
        let stat = rustix::fs::fstat(&fd).map_err(os("stat RAM file"))?;
        if stat.st_size as u64 != expected_len {
            return not_ram(format!("{} bytes long, {expected_len} expected", stat.st_size));
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(os("read seals of RAM file"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return not_ram("not sealed against shrinking".to_owned());
        }
        Ok(RamFile { fd, len: expected_len, inode: (stat.st_dev, stat.st_ino) })
    }

    /// A descriptor that keeps the file alive and is good for nothing else (`O_PATH`, open(2)): for a peer that has to hold
    /// what it may not see. Whoever may open a file of this mode and owner can go on from it: [`RamFile::reopen`].
    ///
    /// # Errors
    /// EMFILE.
    pub fn keepsake(&self) -> Result<OwnedFd, Errno> {
        rustix::fs::open(self_path(self.fd.as_fd()), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
    }

    /// The file that a [`RamFile::keepsake`] kept.
    ///
    /// # Errors
    /// As [`RamFile::from_fd`]; EACCES when the file is somebody else's.
    pub fn reopen(keepsake: BorrowedFd<'_>, expected_len: u64) -> Result<RamFile, RamError> {
        // Before it is opened: opening some other kind of file might wait, or do something.
        let stat = rustix::fs::fstat(keepsake).map_err(os("stat kept file"))?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
            return Err(RamError::NotRam { what: "not a regular file".to_owned() });
        }
        let fd = rustix::fs::open(self_path(keepsake), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(os("open kept file"))?;
        RamFile::from_fd(fd, expected_len)
    }

    /// Another descriptor of the same file.
    ///
    /// # Errors
    /// EMFILE.
    pub fn duplicate(&self) -> Result<RamFile, Errno> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0)?;
        Ok(RamFile { fd, len: self.len, inode: self.inode })
    }

    /// Writes into the file: holes become pages. Not while an engine serves it, which knows of every page.
    ///
    /// # Errors
    /// The error of pwrite(2); EIO if nothing is written.
    pub fn write(&self, offset: u64, content: &[u8]) -> Result<(), Errno> {
        write_all(self.fd.as_fd(), offset, content)
    }

    /// Lends the descriptor, so that it can be passed on.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Gives the length of the file in bytes.
    #[allow(clippy::len_without_is_empty)] // a RAM file is never empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Device and inode: how a mapping of the file is known in `/proc/PID/maps`.
    pub fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// Bytes of DRAM (and of the kernel's own swap) the file holds.
    ///
    /// # Errors
    /// The error of fstat(2).
    pub fn allocated(&self) -> Result<u64, Errno> {
        // st_blocks counts 512-byte units whatever the block size (stat(3type)).
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks as u64 * 512)
    }

    /// Frees the pages of a range: every mapping loses them at once, and the next access is a MISSING fault. A part of
    /// a large folio that is pinned is zeroed instead and stays data: where that matters ask [`RamFile::next_data`].
    ///
    /// # Errors
    /// The error of fallocate(2).
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        rustix::fs::fallocate(&self.fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
    }

    /// Offset of the first existing byte at or behind `offset`; `None` when only a hole follows.
    ///
    /// # Errors
    /// The error of lseek(2).
    pub fn next_data(&self, offset: u64) -> Result<Option<u64>, Errno> {
        seek(&self.fd, SeekFrom::Data(offset))
    }

    /// Offset of the first byte of a hole at or behind `offset`; the file's end counts as one.
    ///
    /// # Errors
    /// The error of lseek(2).
    pub fn next_hole(&self, offset: u64) -> Result<u64, Errno> {
        Ok(seek(&self.fd, SeekFrom::Hole(offset))?.unwrap_or(self.len))
    }

    /// The existing ranges in ascending order, in bytes. While the guest runs the answer is already old.
    pub fn data_runs(&self) -> DataRuns<'_> {
        DataRuns { fd: self.fd.as_fd(), len: self.len, next: 0 }
    }
}

/// Iterator over the existing ranges of a sparse file.
#[derive(Debug)]
pub struct DataRuns<'a> {
    fd: BorrowedFd<'a>,
    len: u64,
    next: u64,
}

impl<'a> DataRuns<'a> {
    pub(crate) fn new(fd: BorrowedFd<'a>, len: u64) -> Self {
        DataRuns { fd, len, next: 0 }
    }

    fn step(&mut self) -> Result<Option<Range<u64>>, Errno> {
        if self.next >= self.len {
            return Ok(None);
        }
        let Some(start) = seek(self.fd, SeekFrom::Data(self.next))? else { return Ok(None) };
        let end = seek(self.fd, SeekFrom::Hole(start))?.unwrap_or(self.len).min(self.len);
        // Punched between the two questions: nothing there any more.
        self.next = end.max(start + PAGE_SIZE as u64);
        Ok(Some(start..end.max(start)))
    }
}

impl Iterator for DataRuns<'_> {
    type Item = Result<Range<u64>, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.step() {
                Ok(Some(run)) if run.is_empty() => {}
                Ok(run) => return run.map(Ok),
                Err(errno) => {
                    self.next = self.len;
                    return Some(Err(errno));
                }
            }
        }
    }
}

/// All of it, in as many calls as it takes.
fn write_all(fd: BorrowedFd<'_>, mut offset: u64, mut content: &[u8]) -> Result<(), Errno> {
    while !content.is_empty() {
        match rustix::io::pwrite(fd, content, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                content = &content[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn self_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd))
}

/// lseek(2) for data or holes; `None` for ENXIO, that is none up to the end.
fn seek(fd: impl AsFd, to: SeekFrom) -> Result<Option<u64>, Errno> {
    match rustix::fs::seek(fd, to) {
        Ok(offset) => Ok(Some(offset)),
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno),
    }
}
