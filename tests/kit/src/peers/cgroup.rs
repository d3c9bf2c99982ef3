//! Control groups with a limit, on memory or on a disk: version 1 where the host mounts it, else version 2.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::undo::{Guard, Undo};

/// Of version 2, and what version 1's are below.
const ROOT: &str = "/sys/fs/cgroup";
/// Which controllers version 2's groups have.
const FOR_GROUPS: &str = "cgroup.subtree_control";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// One of our own. Removed when dropped, which must come after its processes' end.
#[derive(Debug)]
struct Cgroup {
    path: PathBuf,
    version: Version,
    // Fields are dropped in this order: the group goes before its controller is turned off.
    _remove: Guard,
    /// Where version 2 did not have this controller for groups before.
    _disable: Option<Guard>,
}

impl Cgroup {
    /// `v1` is the controller's name and a file of its groups in version 1, `v2` its name in version 2.
    fn make(name: &str, v1: (&str, &str), v2: &str) -> Result<Cgroup> {
        let v1_root = Path::new(ROOT).join(v1.0);
        let (root, version) = if v1_root.join(v1.1).exists() {
            (v1_root, Version::V1)
        } else if has_controller("cgroup.controllers", v2) {
            (PathBuf::from(ROOT), Version::V2)
        } else {
            bail!("no {v2} cgroup controller is mounted: boot with it, or mount cgroup2");
        };
        let mut disable = None;
        if version == Version::V2 && !has_controller(FOR_GROUPS, v2) {
            disable = Some(Guard::new(Undo::Setting { path: root.join(FOR_GROUPS), value: format!("-{v2}") })?);
            write(&root, FOR_GROUPS, &format!("+{v2}"))?;
        }
        let path = root.join(name);
        let remove = Guard::new(Undo::Cgroup { path: path.clone() })?;
        fs::create_dir(&path).with_context(|| format!("make the cgroup {} (root is needed)", path.display()))?;
        Ok(Cgroup { path, version, _remove: remove, _disable: disable })
    }

    fn add(&self, pid: u32) -> Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        write(&self.path, file, value)
    }
}

/// One whose processes read and write a disk only so fast.
#[derive(Debug)]
pub struct DiskCgroup {
    cgroup: Cgroup,
}

impl DiskCgroup {
    /// Limits the disk that `dir` is on, in bytes a second.
    ///
    /// # Errors
    /// Not root, no such controller, or a directory that is on no one disk (btrfs, tmpfs).
    pub fn new(name: &str, dir: &Path, (read, write): (u64, u64)) -> Result<DiskCgroup> {
        let disk = disk_of(dir)?;
        let cgroup = Cgroup::make(name, ("blkio", "blkio.throttle.io_serviced"), "io")?;
        match cgroup.version {
            Version::V1 => {
                cgroup.write("blkio.throttle.read_bps_device", &format!("{disk} {read}"))?;
                cgroup.write("blkio.throttle.write_bps_device", &format!("{disk} {write}"))?;
            }
            Version::V2 => cgroup.write("io.max", &format!("{disk} rbps={read} wbps={write}"))?,
        }
        Ok(DiskCgroup { cgroup })
    }

    /// Moves a process in.
    ///
    /// # Errors
    /// It is gone.
    pub fn add(&self, pid: u32) -> Result<()> {
        self.cgroup.add(pid)
    }
}

/// Number of the disk that a directory's file system is on, as the kernel writes it: of the whole disk, where it is on a part.
fn disk_of(dir: &Path) -> Result<String> {
    let device = fs::metadata(dir).with_context(|| format!("look at {}", dir.display()))?.dev();
    let about = PathBuf::from(format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device)));
    let about = about.canonicalize().with_context(|| format!("{} is on no one disk", dir.display()))?;
    let disk = if about.join("partition").exists() { about.parent().unwrap_or(&about) } else { &about };
    let number =
        fs::read_to_string(disk.join("dev")).with_context(|| format!("read the number of {}", disk.display()))?;
    Ok(number.trim().to_owned())
}

/// A memory cgroup. What its processes have there before they join stays where it was charged.
#[derive(Debug)]
pub struct MemoryCgroup {
    cgroup: Cgroup,
}

impl MemoryCgroup {
    /// Makes one with a limit in bytes.
    ///
    /// # Errors
    /// Not root, or no memory controller.
    pub fn new(name: &str, limit_bytes: u64) -> Result<Self> {
        let cgroup = Cgroup::make(name, ("memory", "memory.limit_in_bytes"), "memory")?;
        let memory = Self { cgroup };
        memory.set_limit(limit_bytes)?;
        if memory.cgroup.version == Version::V1 {
            // Swapping is allowed in full even where the host's default swappiness is 0.
            memory.cgroup.write("memory.swappiness", "60")?;
        }
        Ok(memory)
    }

    /// Changes the limit of the group's memory, in bytes.
    ///
    /// # Errors
    /// The kernel cannot reclaim down to it.
    pub fn set_limit(&self, limit_bytes: u64) -> Result<()> {
        let file = match self.cgroup.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        self.cgroup.write(file, &limit_bytes.to_string())
    }

    /// The file into which a process writes its pid to join.
    pub fn procs(&self) -> PathBuf {
        self.cgroup.path.join("cgroup.procs")
    }

    /// Moves a process in; memory it has already stays where it was charged.
    ///
    /// # Errors
    /// The process is gone.
    pub fn add(&self, pid: u32) -> Result<()> {
        self.cgroup.add(pid)
    }

    /// Has the kernel reclaim until less than `left_bytes` is charged or nothing moves any more;
    /// gives what is left.
    ///
    /// # Errors
    /// The usage cannot be read.
    pub fn reclaim_down_to(&self, left_bytes: u64) -> Result<u64> {
        // Reclaim gives up after some rounds without progress, so it is asked again.
        const ATTEMPTS_MAX: u32 = 40;
        for _ in 0..ATTEMPTS_MAX {
            let usage = self.usage_bytes()?;
            if usage <= left_bytes {
                return Ok(usage);
            }
            // Both files report "not all of it" as an error; the usage tells how far it came.
            let _ = match self.cgroup.version {
                Version::V1 => fs::write(self.cgroup.path.join("memory.force_empty"), "0"),
                Version::V2 => fs::write(self.cgroup.path.join("memory.reclaim"), usage.to_string()),
            };
        }
        self.usage_bytes()
    }

    /// Bytes that are charged to the group now.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn usage_bytes(&self) -> Result<u64> {
        let file = match self.cgroup.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        let text = fs::read_to_string(self.cgroup.path.join(file)).context("read the cgroup's usage")?;
        text.trim().parse().context("read the cgroup's usage")
    }
}

/// Whether a file of version 2's root names a controller.
fn has_controller(file: &str, name: &str) -> bool {
    let names = fs::read_to_string(Path::new(ROOT).join(file)).unwrap_or_default();
    names.split_whitespace().any(|word| word == name)
}

fn write(dir: &Path, file: &str, value: &str) -> Result<()> {
    let path = dir.join(file);
    fs::write(&path, value).with_context(|| format!("write {value} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_whole_or_none() {
        // Where the root is on a disk at all: not in a container with overlayfs.
        if let Ok(disk) = disk_of(Path::new("/")) {
            let about = Path::new("/sys/dev/block").join(disk);
            assert!(about.exists() && !about.join("partition").exists(), "{}", about.display());
        }
        assert!(disk_of(Path::new("/proc")).is_err());
    }
}
