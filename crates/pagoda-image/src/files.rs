//! Opens directories and files that may be anybody's: no link is followed, no device or pipe waited for, and nothing is used
//! that another user owns or may write.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, Stat};

/// What the opened file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum For {
    Reading,
    /// Past the page cache: not every file system can.
    DirectReading,
    Writing,
}

/// Opens a directory below another.
pub(crate) fn open_dir(dir: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(dir, name, flags, Mode::empty())?;
    check_owner(&rustix::fs::fstat(&opened)?)?;
    Ok(opened)
}

/// Opens a file; its length.
pub(crate) fn open_file(dir: BorrowedFd<'_>, name: &str, used: For) -> io::Result<(File, u64)> {
    let access = match used {
        For::Reading => OFlags::RDONLY,
        For::DirectReading => OFlags::RDONLY | OFlags::DIRECT,
        For::Writing => OFlags::RDWR,
    };
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file: File = rustix::fs::openat(dir, name, flags, Mode::empty())?.into();
    let stat = rustix::fs::fstat(file.as_fd())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(invalid("no regular file"));
    }
    if stat.st_nlink != 1 {
        return Err(invalid("it has a second name, by which it may be written"));
    }
    check_owner(&stat)?;
    Ok((file, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// Reads a small file; one byte more than `max` if it is longer than that.
pub(crate) fn read_small(dir: BorrowedFd<'_>, name: &str, max: usize) -> io::Result<Vec<u8>> {
    let (file, _) = open_file(dir, name, For::Reading)?;
    let mut bytes = Vec::new();
    file.take(max as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Nobody but this process's user may have written it.
pub(crate) fn check_owner(stat: &Stat) -> io::Result<()> {
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(invalid("it belongs to another user"));
    }
    if Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
        return Err(invalid("others may write it"));
    }
    Ok(())
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
