//! What is remembered of a disk: a small file, and a lock that its exporter holds.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rmap::client::{SPACE_SLABS_MAX, SpaceSpec};
use rmap::crypto::Entropy;
use rmap::servers::parse_key;
use rmap::units::{PAGE_SIZE, SLAB_PAGES, SpaceId};
use rmap_io::SystemEntropy;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::error::{NoSuchDisk, UsageError};
use crate::store;

/// Largest disk: the slabs that a space may have.
pub const SIZE_MAX: u64 = SPACE_SLABS_MAX as u64 * SLAB_PAGES as u64 * PAGE_SIZE as u64;
const NAME_MAX: usize = 64;
/// In etcd VMs' remote tiers are beside disks, under names that no disk can have.
const TIER_PREFIX: &str = ".far-";

/// What a VM's remote tier is called in etcd.
pub fn tier_name(space: SpaceId) -> String {
    format!("{TIER_PREFIX}{:016x}", space.0)
}

/// A disk. Its key is what makes its pages readable.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Hexadecimal; the space of the pool.
    pub space: String,
    pub size_bytes: u64,
    pub copies: usize,
    /// Of the size, what servers keep room for.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub reserve_bytes: u64,
    /// The pool of etcd that keeps it; without one, the registry of this machine does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    key: String,
}

fn is_nothing(bytes: &u64) -> bool {
    *bytes == 0
}

impl std::fmt::Debug for Disk {
    // The key stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Disk { space, size_bytes, copies, reserve_bytes, cluster, key: _ } = self;
        let mut text = f.debug_struct("Disk");
        text.field("space", space).field("size_bytes", size_bytes).field("copies", copies);
        text.field("reserve_bytes", reserve_bytes).field("cluster", cluster);
        text.finish_non_exhaustive()
    }
}

impl Disk {
    pub fn new(size_bytes: u64, copies: usize) -> Result<Disk, UsageError> {
        if size_bytes == 0 || !size_bytes.is_multiple_of(PAGE_SIZE as u64) || size_bytes > SIZE_MAX {
            let most = SIZE_MAX >> 40;
            return Err(UsageError(format!(
                "a disk of {size_bytes} bytes: give a multiple of {PAGE_SIZE}, at most {most}T"
            )));
        }
        let space = format!("{:016x}", SystemEntropy::default().next_u64());
        let key = store::hex(&store::random_key());
        Ok(Disk { space, size_bytes, copies, reserve_bytes: 0, cluster: None, key })
    }

    /// One that servers keep so much room for.
    ///
    /// # Errors
    /// It is more than the disk can hold.
    pub fn reserving(mut self, reserve_bytes: u64) -> Result<Disk, UsageError> {
        if reserve_bytes > self.size_bytes {
            let size = self.size_bytes;
            return Err(UsageError(format!(
                "{reserve_bytes} bytes reserved for a disk of {size}: give no more than its size"
            )));
        }
        self.reserve_bytes = reserve_bytes;
        Ok(self)
    }

    /// What is reserved, in slabs.
    pub fn reserve(&self) -> usize {
        self.reserve_bytes.div_ceil(SLAB_PAGES as u64 * PAGE_SIZE as u64) as usize
    }

    /// etcd keeps it, in this pool under this number.
    pub fn keep_in(&mut self, cluster: Option<String>, space: SpaceId) {
        (self.cluster, self.space) = (cluster, format!("{:016x}", space.0));
    }

    pub fn pages(&self) -> u64 {
        self.size_bytes / PAGE_SIZE as u64
    }

    /// The disk as the client of its owner opens it.
    pub fn spec(&self) -> Result<SpaceSpec> {
        Ok(SpaceSpec {
            id: self.space()?,
            pages: self.pages(),
            copies: self.copies,
            reserve: self.reserve(),
            key: self.key()?,
        })
    }

    pub fn space(&self) -> Result<SpaceId> {
        Ok(SpaceId(u64::from_str_radix(&self.space, 16).context("the disk's space is not hexadecimal")?))
    }

    fn key(&self) -> Result<[u8; rmap::crypto::KEY_SIZE]> {
        Ok(parse_key(&self.key).context("the disk's key is not 64 hexadecimal digits")?.0)
    }
}

fn disks(dir: &Path) -> PathBuf {
    dir.join("disks")
}

fn path(dir: &Path, name: &str) -> PathBuf {
    disks(dir).join(format!("{name}.toml"))
}

/// Names are parts of paths and of NBD's addresses.
fn check_name(name: &str) -> Result<(), UsageError> {
    if name.starts_with(TIER_PREFIX) {
        return Err(UsageError(format!(
            "{name:?} is no name of a disk: what begins with {TIER_PREFIX} are VMs' remote tiers, which end with their VMs"
        )));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > NAME_MAX || name.starts_with(['.', '-']) || !name.chars().all(plain) {
        return Err(UsageError(format!(
            "{name:?} is no name of a disk: 1 to {NAME_MAX} letters, digits, `-`, `_` and `.`, no `.` or `-` in front"
        )));
    }
    Ok(())
}

/// Whether a disk may have this name here.
pub fn check_free(dir: &Path, name: &str) -> Result<()> {
    check_name(name)?;
    ensure!(!path(dir, name).exists(), "there is a disk {name} already: give another name, or `pagoda disk rm {name}`");
    Ok(())
}

pub fn create(dir: &Path, name: &str, disk: &Disk) -> Result<()> {
    check_free(dir, name)?;
    store::make_dir(&disks(dir))?;
    let text = toml::to_string(disk).context("write the disk's record")?;
    ensure!(store::create_secret(&path(dir, name), &text)?, "another command has just made a disk {name}");
    Ok(())
}

pub fn read(dir: &Path, name: &str) -> Result<Disk> {
    check_name(name)?;
    let path = path(dir, name);
    let text = store::read_secret(&path)?.ok_or_else(|| NoSuchDisk(name.to_owned()))?;
    let disk: Disk = toml::from_str(&text).with_context(|| format!("read {}", path.display()))?;
    // The file may have been edited: the size decides where the disk ends.
    let checked = Disk::new(disk.size_bytes, disk.copies).and_then(|new| new.reserving(disk.reserve_bytes));
    checked.with_context(|| format!("read {}", path.display()))?;
    Ok(disk)
}

/// Forgets a disk; its lock is held.
pub fn remove(dir: &Path, name: &str) -> Result<()> {
    let path = path(dir, name);
    std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    let lock = path.with_extension("lock");
    std::fs::remove_file(&lock).with_context(|| format!("remove {}", lock.display()))
}

/// Names of all disks, in order.
pub fn names(dir: &Path) -> Result<Vec<String>> {
    let dir = disks(dir);
    let entries = match std::fs::read_dir(&dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("list {}", dir.display()))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.with_context(|| format!("list {}", dir.display()))?.file_name();
        let name = name.to_str().and_then(|name| name.strip_suffix(".toml"));
        names.extend(name.filter(|name| check_name(name).is_ok()).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// The right to export a disk on this machine; ends with the process.
pub fn lock_file(dir: &Path, name: &str) -> Result<File> {
    let path = path(dir, name).with_extension("lock");
    let open = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    open.with_context(|| format!("open {}", path.display()))
}

/// Takes the lock together with others that only read, if nobody has it alone.
pub fn try_lock_shared(file: &File) -> Result<bool> {
    lock(file, FlockOperation::NonBlockingLockShared)
}

/// Takes the lock if nobody has it.
pub fn try_lock(file: &File) -> Result<bool> {
    lock(file, FlockOperation::NonBlockingLockExclusive)
}

fn lock(file: &File, how: FlockOperation) -> Result<bool> {
    match flock(file, how) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error).context("lock the disk"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_are_checked() {
        for name in ["a", "scratch-1", "db.old", "A_b"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", ".a", "-a", "a/b", "a b", "..", "\u{e4}", &"a".repeat(65)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        let tier = tier_name(SpaceId(0xab));
        assert_eq!(tier, ".far-00000000000000ab");
        let refused = check_name(&tier).unwrap_err().to_string();
        assert!(refused.contains("remote tiers"), "{refused}");
        for size in [0, 1, 4095, 4097, SIZE_MAX + 4096] {
            assert!(Disk::new(size, 1).is_err(), "{size}");
        }
        for size in [4096, SIZE_MAX] {
            assert!(Disk::new(size, 1).is_ok(), "{size}");
        }
    }
}
