//! A disk of a VM whose newest content is not in the file that its user names.
//!
//! QEMU opens a file again by the name that it opened it with. So while it lives, no file that it has open loses its name, and
//! what a snapshot of a disk puts on top has a name of its own. Once QEMU has ended, the newest file gets the user's name
//! ([`crate::disks`]). The record says so before QEMU is given that file.

use pagoda_image::is_file_name;
use serde::{Deserialize, Serialize};

use super::file_id::{FileId, Noted};
use crate::boot::Life;

/// The longest `boot_id` that is taken: its digits and dashes.
const BOOT_ID_MAX: usize = 64;
/// The most overlays that one QEMU is given for one disk.
const TOPS_MAX: usize = 64;
/// The most bytes that all of these of one VM take in its record, as JSON.
pub const MOVED_BYTES_MAX: usize = 64 << 10;

/// One such disk, and the files that have its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedDisk {
    /// The disk, as an absolute path.
    pub file: String,
    /// What has this name until QEMU has ended; [`FileId::NONE`]: nothing has.
    pub was: FileId,
    /// Overlays in the same directory, the newest last.
    pub tops: Vec<TopFile>,
    /// The life of the host in which all this was noted (`boot_id`). Records of before do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
}

/// An overlay that QEMU was given on top of the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopFile {
    /// The overlay's name in the disk's directory.
    pub name: String,
    /// QEMU's name of the overlay's node.
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

impl MovedDisk {
    /// A disk with what is seen of its files now.
    pub fn new(file: String, was: FileId, tops: Vec<TopFile>) -> MovedDisk {
        MovedDisk { file, was, tops, boot_id: crate::boot::id().ok().map(str::to_owned) }
    }

    /// One of the disk's files, as it was noted.
    pub fn noted(&self, id: FileId) -> Noted {
        id.noted(Life::of(self.boot_id.as_deref()))
    }

    /// The file with the newest content.
    pub fn newest(&self) -> Option<&TopFile> {
        self.tops.last()
    }

    /// Whether its newest content has the disk's name already. `named`: what has that name now.
    pub fn is_settled(&self, named: FileId) -> bool {
        self.newest().is_some_and(|top| self.noted(top.id).is(named))
    }

    /// Whether this is, or may be, any of its files.
    pub fn may_have(&self, found: FileId) -> bool {
        let of_tops = self.tops.iter().map(|top| top.id);
        std::iter::once(self.was).chain(of_tops).any(|id| self.noted(id).may_be(found))
    }
}

/// Whether a record can have these.
pub(super) fn are_right(disks: &[MovedDisk]) -> bool {
    let is_right = |disk: &MovedDisk| {
        disk.file.starts_with('/')
            && (1..=TOPS_MAX).contains(&disk.tops.len())
            && disk.tops.iter().all(|top| is_file_name(&top.name))
            && disk.boot_id.as_ref().is_none_or(|id| id.len() <= BOOT_ID_MAX)
    };
    disks.iter().all(is_right) && serde_json::to_string_pretty(disks).is_ok_and(|json| json.len() <= MOVED_BYTES_MAX)
}
