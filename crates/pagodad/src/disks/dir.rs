//! The directory of a disk, by a descriptor: whoever moves directories about meanwhile changes nothing.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use pagoda_image::{DiskFile, Manifest};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::user::User;
use crate::record::FileId;

/// See the module.
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

pub fn id_of(stat: &Stat) -> FileId {
    FileId { dev: stat.st_dev, ino: stat.st_ino }
}

/// The time of its last change, in nanoseconds since 1970.
pub fn mtime_ns(stat: &Stat) -> i64 {
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec as i64)
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
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("look at {}", self.join(name).display())),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => Ok(Some(stat)),
            Ok(_) => bail!("{} is no regular file", self.join(name).display()),
        }
    }

    pub fn id(&self, name: &str) -> Result<Option<FileId>> {
        Ok(self.stat(name)?.as_ref().map(id_of))
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Gives a file a second name, which is new.
    pub fn link(&self, name: &str, new: &str) -> rustix::io::Result<()> {
        rustix::fs::linkat(&self.fd, name, &self.fd, new, AtFlags::empty())
    }

    pub fn rename(&self, name: &str, new: &str) -> rustix::io::Result<()> {
        rustix::fs::renameat(&self.fd, name, &self.fd, new)
    }

    /// Removes a name, if it is still that of this file.
    pub fn unlink(&self, name: &str, id: FileId) {
        let is_it = matches!(self.id(name), Ok(Some(found)) if found == id);
        if is_it && let Err(error) = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            tracing::warn!("remove {}: {error}", self.join(name).display());
        }
    }

    /// Opens a regular file, which has to be this one.
    pub fn open_file(&self, name: &str, id: FileId) -> Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = self.join(name);
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty());
        let fd = fd.with_context(|| format!("open {}", path.display()))?;
        let found = id_of(&rustix::fs::fstat(&fd).with_context(|| format!("look at {}", path.display()))?);
        ensure!(found == id, "{} is another file by now", path.display());
        Ok(fd.into())
    }

    /// Names outlive the host from now on.
    pub fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.fd).with_context(|| format!("write the directory {} to the disk", self.path.display()))
    }
}

/// Has the layers of a snapshot outlive the host.
///
/// # Errors
/// The disk's; a layer is not there.
pub fn sync_layers(manifest: &Manifest) -> Result<()> {
    let of_layers: Vec<&DiskFile> = manifest.disks.iter().filter(|disk| disk.layer.is_some()).collect();
    if of_layers.is_empty() {
        return Ok(());
    }
    let sync = || of_layers.iter().try_for_each(|disk| sync_layer(disk));
    User::of(&manifest.launch).act(sync)
}

fn sync_layer(disk: &DiskFile) -> Result<()> {
    let Some(layer) = &disk.layer else { return Ok(()) };
    let dir = Dir::open(split(Path::new(&disk.file))?.0)?;
    let file = dir.open_file(layer, FileId { dev: disk.dev, ino: disk.ino })?;
    file.sync_all().with_context(|| format!("write {} to the disk", dir.join(layer).display()))?;
    dir.sync()
}
