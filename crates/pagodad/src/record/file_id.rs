//! The identity of a file, whatever its name.
//!
//! A name may be another file's by now, so a file that was noted is known again by its inode. That is not enough: an inode's number is
//! used again, and the same number is used by each file system. What tells the rest is the device's number, which a host may give
//! anew when it starts (btrfs, NFS, disks that come later), and the time at which the file was made, which not every file
//! system keeps. What is not known to be the same file is not taken for it.

use serde::{Deserialize, Serialize};

use crate::boot::Life;

/// A file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    pub dev: u64,
    pub ino: u64,
    /// When it was made, in nanoseconds since 1970, if the file system tells. No write changes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub born_ns: Option<i64>,
}

impl FileId {
    /// What stands for a file that is not there.
    pub const NONE: FileId = FileId { dev: 0, ino: 0, born_ns: None };

    /// The file, with the life of the host in which it was noted.
    pub fn noted(self, when: Life) -> Noted {
        Noted { id: self, when }
    }
}

/// A file as it was noted.
#[derive(Clone, Copy, Debug)]
pub struct Noted {
    id: FileId,
    when: Life,
}

impl From<FileId> for Noted {
    /// A file that was looked at just now.
    fn from(id: FileId) -> Noted {
        id.noted(Life::This)
    }
}

/// How a file that is there compares with one that was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Same {
    Yes,
    No,
    /// The device has another number since, and nobody knows when the file was made.
    Unknown,
}

impl Noted {
    /// Whether `found`, which was looked at just now, is this file.
    pub fn compare(self, found: FileId) -> Same {
        let Noted { id, when } = self;
        if [id, found].contains(&FileId::NONE) || id.ino != found.ino {
            return Same::No;
        }
        let was_born = id.born_ns.zip(found.born_ns).map(|(noted, found)| noted == found);
        match (was_born, id.dev == found.dev, when) {
            (Some(false), ..) => Same::No,
            (_, true, _) => Same::Yes,
            (_, false, Life::This) => Same::No,
            (Some(true), false, Life::Earlier) => Same::Yes,
            (_, false, _) => Same::Unknown,
        }
    }

    /// Whether it is known to be this file.
    pub fn is(self, found: FileId) -> bool {
        self.compare(found) == Same::Yes
    }

    /// Whether it is not known to be another one.
    pub fn may_be(self, found: FileId) -> bool {
        self.compare(found) != Same::No
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_again_by_facts() {
        let id = |dev, ino, born_ns| FileId { dev, ino, born_ns };
        let check = |noted: FileId, when, found, expected| {
            assert_eq!(noted.noted(when).compare(found), expected, "{noted:?} of {when:?} life, {found:?}");
        };
        use Life::{Earlier, This, Unknown};
        let file = id(1, 2, Some(3));
        for when in [This, Earlier, Unknown] {
            check(file, when, file, Same::Yes);
            check(file, when, id(1, 9, Some(3)), Same::No);
            // An inode that is used again.
            check(file, when, id(1, 2, Some(4)), Same::No);
            check(file, when, id(7, 2, Some(4)), Same::No);
            // Records of before say nothing of births.
            check(id(1, 2, None), when, file, Same::Yes);
            check(file, when, id(1, 2, None), Same::Yes);
            check(FileId::NONE, when, FileId::NONE, Same::No);
        }
        // The device has another number.
        let moved = id(7, 2, Some(3));
        check(file, Earlier, moved, Same::Yes);
        check(file, This, moved, Same::No);
        check(file, Unknown, moved, Same::Unknown);
        check(id(1, 2, None), Earlier, moved, Same::Unknown);
        check(id(1, 2, None), This, moved, Same::No);
    }
}
