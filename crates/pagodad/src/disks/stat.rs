//! What the kernel says of a file: statx(2), which tells when a file was made.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags};

use crate::record::FileId;

/// What is to be known of a file, as the kernel says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub id: FileId,
    pub is_file: bool,
    /// The length of its content in bytes.
    pub bytes: u64,
    /// The bytes that it takes on its disk.
    pub allocated_bytes: u64,
    /// The time of its last change, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// How many names it has.
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    /// The bits of chmod(2).
    pub mode: u32,
}

/// What `stx_blocks` counts, whatever the file system has.
const BLOCK: u64 = 512;

impl Stat {
    /// What the kernel says of what a path leads to, through links.
    pub fn of_path(path: &Path) -> rustix::io::Result<Stat> {
        statx(CWD, path, AtFlags::empty())
    }

    /// Of a name in a directory; a link is not followed.
    pub fn of_name(dir: impl AsFd, name: &str) -> rustix::io::Result<Stat> {
        statx(dir, Path::new(name), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// What the kernel says of an open file.
    pub fn of_open(file: impl AsFd) -> rustix::io::Result<Stat> {
        statx(file, Path::new(""), AtFlags::EMPTY_PATH)
    }
}

fn statx(dir: impl AsFd, path: &Path, flags: AtFlags) -> rustix::io::Result<Stat> {
    let found: Statx = rustix::fs::statx(dir, path, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
    let ns = |time: rustix::fs::StatxTimestamp| {
        time.tv_sec.saturating_mul(1_000_000_000).saturating_add(i64::from(time.tv_nsec))
    };
    let kind = FileType::from_raw_mode(u32::from(found.stx_mode));
    let has_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
    let id = FileId {
        dev: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
        ino: found.stx_ino,
        born_ns: has_birth.then(|| ns(found.stx_btime)),
    };
    Ok(Stat {
        id,
        is_file: kind == FileType::RegularFile,
        bytes: found.stx_size,
        allocated_bytes: found.stx_blocks.saturating_mul(BLOCK),
        mtime_ns: ns(found.stx_mtime),
        links: found.stx_nlink,
        uid: found.stx_uid,
        gid: found.stx_gid,
        mode: u32::from(found.stx_mode) & 0o7777,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn it_says_what_stat_says() {
        let path = std::env::temp_dir().join(format!("pagodad-stat-{}", std::process::id()));
        std::fs::write(&path, b"content").unwrap();
        let (found, said) = (Stat::of_path(&path).unwrap(), std::fs::metadata(&path).unwrap());
        assert_eq!((found.id.dev, found.id.ino, found.bytes), (said.dev(), said.ino(), said.size()));
        assert_eq!(
            (found.mtime_ns, found.allocated_bytes),
            (said.mtime() * 1_000_000_000 + said.mtime_nsec(), 512 * said.blocks())
        );
        assert_eq!((found.links, found.mode, found.is_file), (1, said.mode() & 0o7777, true));
        let born =
            said.created().ok().map(|born| born.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as i64);
        assert_eq!(found.id.born_ns, born);
        assert_eq!(Stat::of_open(std::fs::File::open(&path).unwrap()).unwrap(), found);
        std::fs::remove_file(&path).unwrap();
    }
}
