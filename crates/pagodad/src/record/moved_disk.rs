//! A disk of a VM whose newest content is not in the file that its user names.
//!
//! QEMU opens a file again by the name that it opened it with. So while it lives, no file that it has open loses its name, and
//! what a snapshot of a disk puts on top has a name of its own. Once QEMU has ended, the newest file gets the user's name
//! ([`crate::disks`]). The record says so before QEMU is given that file.

use pagoda_image::is_file_name;
use serde::{Deserialize, Serialize};

/// Overlays that one QEMU was given for one disk.
const TOPS_MAX: usize = 64;
/// All of these of one VM, as JSON in its record, in bytes.
pub const MOVED_BYTES_MAX: usize = 64 << 10;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedDisk {
    /// The disk, as an absolute path.
    pub file: String,
    /// What has this name until QEMU has ended; [`FileId::NONE`]: nothing has.
    pub was: FileId,
    /// Overlays in the same directory, the newest last.
    pub tops: Vec<TopFile>,
}

/// An overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopFile {
    /// Its name in the directory.
    pub name: String,
    /// QEMU's node of it.
    pub node: String,
    pub id: FileId,
    /// What it was put on, once that is known to have happened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<Below>,
}

/// A file that nobody writes any more. If somebody has done so all the same, as QEMU's `block-commit` does, nobody knows which file has
/// the newest content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Below {
    pub id: FileId,
    /// When it was written last, in nanoseconds since 1970.
    pub mtime_ns: i64,
}

/// A file, whatever its name: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileId {
    pub dev: u64,
    pub ino: u64,
}

impl FileId {
    /// There is none.
    pub const NONE: FileId = FileId { dev: 0, ino: 0 };
}

impl MovedDisk {
    /// The file with the newest content.
    pub fn newest(&self) -> Option<&TopFile> {
        self.tops.last()
    }

    /// Whether this is any of its files.
    pub fn has(&self, id: FileId) -> bool {
        self.was == id || self.tops.iter().any(|top| top.id == id)
    }
}

/// Whether a record can have these.
pub(super) fn are_right(disks: &[MovedDisk]) -> bool {
    let is_right = |disk: &MovedDisk| {
        disk.file.starts_with('/')
            && (1..=TOPS_MAX).contains(&disk.tops.len())
            && disk.tops.iter().all(|top| is_file_name(&top.name))
    };
    disks.iter().all(is_right) && serde_json::to_string_pretty(disks).is_ok_and(|json| json.len() <= MOVED_BYTES_MAX)
}
