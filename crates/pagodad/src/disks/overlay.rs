//! Making an overlay beside a disk, and the names of such files.

use anyhow::{Context, Result, ensure};
use pagoda_image::ImageId;
use rustix::fs::{Gid, Mode, Uid};

use super::dir::Dir;
use super::limits::NAME_MAX;
use super::qemu_img::QemuImg;
use super::stat::Stat;
use crate::record::{FileId, TopFile};

/// What an overlay's name has between the disk's name and the snapshot.
pub const TOP: &str = ".pagoda-top-";
/// Digits of an id in the names of files and nodes: QEMU's names of nodes have at most 31 characters.
const TAG_DIGITS: usize = 16;

/// What tells the files of a snapshot or a restore from all others.
pub fn tag(id: ImageId) -> String {
    id.to_string().chars().take(TAG_DIGITS).collect()
}

/// The layer of the disk `name`.
pub fn layer_name(name: &str, tag: &str) -> String {
    format!("{name}.pagoda-{tag}")
}

/// Makes an empty overlay for the disk `name`, with owner and mode of the file `like`, on the disk when this returns. Its
/// directory is not. The caller acts as the user.
///
/// # Errors
/// No room, no permission; nothing is left.
pub fn make(img: &QemuImg, dir: &Dir, new: &New<'_>) -> Result<TopFile> {
    let top = format!("{}{TOP}{}", new.name, new.tag);
    ensure!(top.len() <= NAME_MAX, "the name {} is too long for an overlay's beside it", new.name);
    ensure!(dir.stat(&top)?.is_none(), "{} is there already", dir.join(&top).display());
    let path = dir.join(&top);
    let made = img.create(&path, new.backing, new.bytes).and_then(|()| finish(dir, &top, new.like));
    match made {
        Ok(id) => Ok(TopFile { node: format!("pagoda-{}-{}", new.tag, new.index), name: top, id, below: None }),
        Err(error) => {
            // With that name it is what was just made, or a part of it.
            if let Ok(Some(id)) = dir.id(&top) {
                dir.unlink(&top, id);
            }
            Err(error).with_context(|| format!("make {}", path.display()))
        }
    }
}

/// What is to be made.
#[derive(Clone, Copy, Debug)]
pub struct New<'a> {
    /// The disk's name in its directory.
    pub name: &'a str,
    pub tag: &'a str,
    /// Which of the VM's disks this is.
    pub index: usize,
    /// The file below, by its name in the directory.
    pub backing: &'a str,
    pub bytes: u64,
    pub like: &'a Stat,
}

fn finish(dir: &Dir, top: &str, like: &Stat) -> Result<FileId> {
    let id = dir.id(top)?.with_context(|| format!("{top} is gone again"))?;
    let file = dir.open_file(top, id)?;
    let made = Stat::of_open(&file).context("look at it")?;
    if (made.uid, made.gid) != (like.uid, like.gid) {
        let (uid, gid) = (Uid::from_raw(like.uid), Gid::from_raw(like.gid));
        rustix::fs::fchown(&file, Some(uid), Some(gid)).context("give it the owner that the disk has")?;
    }
    rustix::fs::fchmod(&file, Mode::from_raw_mode(like.mode & 0o777)).context("give it the mode that the disk has")?;
    file.sync_all().context("write it to the disk")?;
    Ok(made.id)
}
