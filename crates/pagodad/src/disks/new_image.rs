//! A disk's image that is made anew for content which comes from elsewhere.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagoda_api::types::Launch;
use serde::{Deserialize, Serialize};

use super::dir::{Dir, split};
use super::limits::{DISKS_MAX, NAME_MAX};
use super::qemu_img::QemuImg;
use super::user::User;
use crate::record::FileId;

/// Bytes that the guest may see of one disk: what a file system gives to a file, and more than anybody copies.
const BYTES_MAX: u64 = 1 << 46;
/// Bytes of a sector, in which QEMU counts disks.
const SECTOR: u64 = 512;
/// The sizes of clusters that qcow2 can have, in bytes.
const CLUSTER_MIN: u64 = 512;
const CLUSTER_MAX: u64 = 2 << 20;

/// The formats that there can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Qcow2,
    Raw,
}

impl Format {
    /// QEMU's driver of the format.
    pub const fn driver(self) -> &'static str {
        match self {
            Format::Qcow2 => "qcow2",
            Format::Raw => "raw",
        }
    }

    pub fn of(driver: &str) -> Option<Format> {
        [Format::Qcow2, Format::Raw].into_iter().find(|format| format.driver() == driver)
    }
}

/// What is to be known of an image to make it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewImage {
    /// Where the image is made: an absolute path.
    pub file: String,
    pub format: Format,
    /// What the guest takes for the size of the disk.
    pub bytes: u64,
    /// The size of a qcow2 file's clusters, in bytes; `None` for a raw file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<u64>,
    /// What it takes on the disk when it is full of what is to come, bytes.
    pub room: u64,
}

impl NewImage {
    /// That there can be such a one. It may come from another host.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        let path = Path::new(&self.file);
        let is_plain = path.is_absolute() && !path.components().any(|part| part == std::path::Component::ParentDir);
        let is_readable = !self.file.chars().any(char::is_control) && !self.file.ends_with('/');
        if !is_plain || !is_readable || split(path).is_err() {
            return Err("a disk's path is not absolute, or not one of a file".to_owned());
        }
        let is_cluster = |of: u64| (CLUSTER_MIN..=CLUSTER_MAX).contains(&of) && of.is_power_of_two();
        let is_right = match (self.format, self.cluster) {
            (Format::Qcow2, Some(cluster)) => is_cluster(cluster),
            (Format::Raw, None) => true,
            _ => false,
        };
        let is_size = (SECTOR..=BYTES_MAX).contains(&self.bytes) && self.bytes.is_multiple_of(SECTOR);
        match is_right && is_size && self.room <= 2 * BYTES_MAX {
            true => Ok(()),
            false => Err(format!("the disk {} has a size that no disk has", self.file)),
        }
    }

    /// The same of all disks of a VM.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub fn check_all(images: &[NewImage]) -> Result<(), String> {
        if images.len() > DISKS_MAX {
            return Err(format!("it has {} disks to be copied, and {DISKS_MAX} can be", images.len()));
        }
        images.iter().try_for_each(NewImage::check)?;
        let is_twice = |(at, image): (usize, &NewImage)| images[..at].iter().any(|other| other.file == image.file);
        match images.iter().enumerate().any(is_twice) {
            true => Err("it names a disk twice".to_owned()),
            false => Ok(()),
        }
    }

    /// Directory and name.
    ///
    /// # Errors
    /// It has none.
    pub fn place(&self) -> Result<(&Path, &str)> {
        split(Path::new(&self.file))
    }

    /// Makes it under another name in its directory, which is new. The caller acts as the VM's user, whose file it is.
    ///
    /// # Errors
    /// There is something with this name; it cannot be written. What was made is there still.
    pub fn make(&self, dir: &Dir, name: &str, launch: &Launch) -> Result<FileId> {
        ensure!(name.len() <= NAME_MAX, "{} is too long for a name", dir.join(name).display());
        let (file, id) = dir.create(name)?;
        match self.format {
            Format::Raw => file.set_len(self.bytes).with_context(|| format!("size {}", dir.join(name).display()))?,
            Format::Qcow2 => {
                let img = QemuImg::new(&launch.program, User::of(launch))?;
                img.create_alone(&dir.join(name), self.bytes, self.cluster.context("the clusters of a qcow2 file")?)?;
            }
        }
        ensure!(dir.id(name)? == Some(id), "{} is another file by now", dir.join(name).display());
        file.sync_all().with_context(|| format!("write {} to the disk", dir.join(name).display()))?;
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> NewImage {
        NewImage { file: "/srv/a.qcow2".into(), format: Format::Qcow2, bytes: 1 << 30, cluster: Some(65536), room: 1 }
    }

    #[test]
    fn what_no_disk_has_is_refused() {
        image().check().unwrap();
        let raw = NewImage { format: Format::Raw, cluster: None, ..image() };
        raw.check().unwrap();
        for wrong in [
            NewImage { file: "a.qcow2".into(), ..image() },
            NewImage { file: "/srv/../etc/a".into(), ..image() },
            NewImage { file: "/srv/a\n".into(), ..image() },
            NewImage { file: "/srv/a/".into(), ..image() },
            NewImage { file: "/".into(), ..image() },
            NewImage { bytes: 0, ..image() },
            NewImage { bytes: 513, ..image() },
            NewImage { bytes: 1 << 60, ..image() },
            NewImage { room: u64::MAX, ..image() },
            NewImage { cluster: None, ..image() },
            NewImage { cluster: Some(65535), ..image() },
            NewImage { cluster: Some(1 << 30), ..image() },
            NewImage { format: Format::Raw, ..image() },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        NewImage::check_all(&[image(), NewImage { file: "/srv/b".into(), ..image() }]).unwrap();
        assert!(NewImage::check_all(&[image(), image()]).unwrap_err().contains("twice"));
        let many: Vec<NewImage> = (0..17).map(|no| NewImage { file: format!("/srv/{no}"), ..image() }).collect();
        assert!(NewImage::check_all(&many).is_err());
    }

    #[test]
    fn both_formats_are_made_and_nothing_is_replaced() {
        let path = std::env::temp_dir().join(format!("pagodad-new-image-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let dir = Dir::open(&path).unwrap();
        let User { uid, gid } = User::own();
        let launch = Launch { program: "/usr/bin/qemu-system-x86_64".into(), uid, gid, ..Launch::default() };
        let raw = NewImage { format: Format::Raw, cluster: None, bytes: 1 << 20, ..image() };
        let id = raw.make(&dir, "raw", &launch).unwrap();
        assert_eq!((dir.id("raw").unwrap(), std::fs::metadata(path.join("raw")).unwrap().len()), (Some(id), 1 << 20));
        assert!(raw.make(&dir, "raw", &launch).is_err(), "it is there");
        if QemuImg::new(&launch.program, User::own()).is_ok() {
            let id = image().make(&dir, "qcow2", &launch).unwrap();
            let chain = QemuImg::new(&launch.program, User::own()).unwrap().chain(&path.join("qcow2")).unwrap();
            assert_eq!(chain[0]["virtual-size"], 1 << 30);
            assert_eq!(dir.id("qcow2").unwrap(), Some(id));
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}
