//! All that is done to files of images, so that tests can record it, fail it and stop it in between.

use std::fmt;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, Mode, OFlags};

/// A name is relative to an open directory, which stays the same one when it is renamed.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Makes a directory for its owner alone.
    ///
    /// # Errors
    /// Those of mkdirat(2).
    fn make_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()>;
    /// Makes a file for its owner alone, open for reading and writing.
    ///
    /// # Errors
    /// Those of openat(2); there is one of this name.
    fn make_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<File>;
    /// Writes all of `bytes`. It is in the page cache when this returns: the death of this process takes nothing of it back.
    ///
    /// # Errors
    /// Those of pwrite(2). Any part may have been written.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Reads from `offset` on until `bytes` is full.
    ///
    /// # Errors
    /// Those of pread(2); the file ends before that.
    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()>;
    /// Fills these pieces, one behind the other.
    ///
    /// # Errors
    /// Those of preadv(2); the file ends before that.
    fn read_pieces_at(&self, file: &File, pieces: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()>;
    /// Gives what is named `from` the name `to`; a file of that name is gone then.
    ///
    /// # Errors
    /// Those of renameat(2); all is as before then.
    fn rename(&self, dir: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()>;
    /// Removes the name of a file from the directory.
    ///
    /// # Errors
    /// Those of unlinkat(2).
    fn remove_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()>;
    /// Removes an empty directory.
    ///
    /// # Errors
    /// Those of unlinkat(2).
    fn remove_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()>;
    /// What was written to the file outlives the host from now on.
    ///
    /// # Errors
    /// Those of fsync(2). What was written before may be lost, and a second call need not say so.
    fn sync_file(&self, file: &File) -> io::Result<()>;
    /// The names in the directory outlive the host from now on.
    ///
    /// # Errors
    /// Those of fsync(2).
    fn sync_dir(&self, dir: BorrowedFd<'_>) -> io::Result<()>;
}

/// Whether what is written outlives the host when it has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Synced {
    No,
    Yes,
}

/// Makes a file with this content under the first name, and then gives it the second one. What had that is gone then, and not
/// before.
pub(crate) fn replace(
    disk: &dyn Disk,
    dir: BorrowedFd<'_>,
    (new, name): (&str, &str),
    bytes: &[u8],
    sync: Synced,
) -> io::Result<()> {
    match disk.remove_file(dir, new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = disk.make_file(dir, new)?;
    disk.write_at(&file, bytes, 0)?;
    if sync == Synced::Yes {
        disk.sync_file(&file)?;
    }
    disk.rename(dir, new, name)?;
    if sync == Synced::Yes {
        disk.sync_dir(dir)?;
    }
    Ok(())
}

/// The disks of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinuxDisk;

impl Disk for LinuxDisk {
    fn make_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        Ok(rustix::fs::mkdirat(dir, name, Mode::RWXU)?)
    }

    fn make_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<File> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        file.read_exact_at(bytes, offset)
    }

    fn read_pieces_at(&self, file: &File, mut pieces: &mut [IoSliceMut<'_>], mut offset: u64) -> io::Result<()> {
        while !pieces.is_empty() {
            let len = match rustix::io::preadv(file, pieces, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => len,
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            IoSliceMut::advance_slices(&mut pieces, len);
            offset += len as u64;
        }
        Ok(())
    }

    fn rename(&self, dir: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(dir, from, dir, to)?)
    }

    fn remove_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(dir, name, AtFlags::empty())?)
    }

    fn remove_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR)?)
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_dir(&self, dir: BorrowedFd<'_>) -> io::Result<()> {
        Ok(rustix::fs::fsync(dir.as_fd())?)
    }
}
