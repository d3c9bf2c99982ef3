//! The directory of a disk, by a descriptor: whoever moves directories about meanwhile changes nothing.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::stat::Stat;
use crate::record::{FileId, Noted};

/// An open directory, and the path by which it was opened.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    pub path: PathBuf,
}

/// A path as directory and name.
///
/// # Errors
/// It has none.
pub fn split(file: &Path) -> Result<(&Path, &str)> {
    let name = file.file_name().and_then(|name| name.to_str());
    let (dir, name) = file.parent().zip(name).with_context(|| format!("{} names no file", file.display()))?;
    Ok((dir, name))
}

impl Dir {
    pub fn open(path: &Path) -> Result<Dir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty());
        let fd = fd.with_context(|| format!("open the directory {}", path.display()))?;
        Ok(Dir { fd, path: path.to_owned() })
    }

    /// A file by its name. A link is not followed, and refused as all that is no regular file is. `None`: there is none.
    pub fn stat(&self, name: &str) -> Result<Option<Stat>> {
        match Stat::of_name(&self.fd, name) {
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("look at {}", self.join(name).display())),
            Ok(stat) if stat.is_file => Ok(Some(stat)),
            Ok(_) => bail!("{} is no regular file", self.join(name).display()),
        }
    }

    pub fn id(&self, name: &str) -> Result<Option<FileId>> {
        Ok(self.stat(name)?.map(|stat| stat.id))
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Makes an empty file of the caller's. Nothing has the name.
    ///
    /// # Errors
    /// Something has; it cannot be made.
    pub fn create(&self, name: &str) -> Result<(File, FileId)> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = self.join(name);
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR);
        let fd = fd.with_context(|| format!("make {}", path.display()))?;
        let id = Stat::of_open(&fd).with_context(|| format!("look at {}", path.display()))?.id;
        Ok((fd.into(), id))
    }

    /// Bytes that its file system has room for, and which file system it is.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn room(&self) -> Result<(u64, u64)> {
        let look = || format!("look for room in {}", self.path.display());
        let found = rustix::fs::fstatvfs(&self.fd).with_context(look)?;
        let device = Stat::of_open(&self.fd).with_context(look)?.id.dev;
        Ok((found.f_bavail.saturating_mul(found.f_frsize), device))
    }

    /// Gives a file a second name, which is new.
    pub fn link(&self, name: &str, new: &str) -> rustix::io::Result<()> {
        rustix::fs::linkat(&self.fd, name, &self.fd, new, AtFlags::empty())
    }

    pub fn rename(&self, name: &str, new: &str) -> rustix::io::Result<()> {
        rustix::fs::renameat(&self.fd, name, &self.fd, new)
    }

    /// Removes a name, if it is still that of this file.
    pub fn unlink(&self, name: &str, file: impl Into<Noted>) {
        let file = file.into();
        let is_it = matches!(self.id(name), Ok(Some(found)) if file.is(found));
        if is_it && let Err(error) = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            tracing::warn!("remove {}: {error}", self.join(name).display());
        }
    }

    /// Opens a regular file, which has to be this one.
    pub fn open_file(&self, name: &str, file: impl Into<Noted>) -> Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = self.join(name);
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty());
        let fd = fd.with_context(|| format!("open {}", path.display()))?;
        let found = Stat::of_open(&fd).with_context(|| format!("look at {}", path.display()))?.id;
        ensure!(file.into().is(found), "{} is another file by now", path.display());
        Ok(fd.into())
    }

    /// Names outlive the host from now on.
    pub fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.fd).with_context(|| format!("write the directory {} to the disk", self.path.display()))
    }
}
