//! A memory cgroup with a limit: version 1 where the host mounts it, else version 2.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::bench::undo::{Guard, Undo};

const V1_ROOT: &str = "/sys/fs/cgroup/memory";
const V2_ROOT: &str = "/sys/fs/cgroup";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// A memory cgroup of our own. Removed when dropped, which must come after its processes' end.
#[derive(Debug)]
pub struct MemoryCgroup {
    path: PathBuf,
    version: Version,
    _remove: Guard,
}

impl MemoryCgroup {
    /// Makes one with a limit in bytes.
    ///
    /// # Errors
    /// Not root, or no memory controller.
    pub fn new(name: &str, limit_bytes: u64) -> Result<Self> {
        let (root, version) = if Path::new(V1_ROOT).join("memory.limit_in_bytes").exists() {
            (V1_ROOT, Version::V1)
        } else if controllers(V2_ROOT).contains("memory") {
            (V2_ROOT, Version::V2)
        } else {
            bail!("no memory cgroup controller is mounted: boot with it, or mount cgroup2");
        };
        if version == Version::V2 {
            write(Path::new(V2_ROOT), "cgroup.subtree_control", "+memory")?;
        }
        let path = Path::new(root).join(name);
        let remove = Guard::new(Undo::Cgroup { path: path.clone() })?;
        fs::create_dir(&path).with_context(|| format!("make the cgroup {} (root is needed)", path.display()))?;
        let cgroup = Self { path, version, _remove: remove };
        cgroup.set_limit(limit_bytes)?;
        if version == Version::V1 {
            // Swapping is allowed in full even where the host's default swappiness is 0.
            write(&cgroup.path, "memory.swappiness", "60")?;
        }
        Ok(cgroup)
    }

    /// Changes the limit.
    ///
    /// # Errors
    /// The kernel cannot reclaim down to it.
    pub fn set_limit(&self, limit_bytes: u64) -> Result<()> {
        let file = match self.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        write(&self.path, file, &limit_bytes.to_string())
    }

    /// The file into which a process writes its pid to join.
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Moves a process in; memory it has already stays where it was charged.
    ///
    /// # Errors
    /// The process is gone.
    pub fn add(&self, pid: u32) -> Result<()> {
        write(&self.path, "cgroup.procs", &pid.to_string())
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
            let _ = match self.version {
                Version::V1 => fs::write(self.path.join("memory.force_empty"), "0"),
                Version::V2 => fs::write(self.path.join("memory.reclaim"), usage.to_string()),
            };
        }
        self.usage_bytes()
    }

    /// Bytes charged now.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn usage_bytes(&self) -> Result<u64> {
        let file = match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        let text = fs::read_to_string(self.path.join(file)).context("read the cgroup's usage")?;
        text.trim().parse().context("read the cgroup's usage")
    }
}

fn controllers(root: &str) -> String {
    fs::read_to_string(Path::new(root).join("cgroup.controllers")).unwrap_or_default()
}

fn write(dir: &Path, file: &str, value: &str) -> Result<()> {
    let path = dir.join(file);
    fs::write(&path, value).with_context(|| format!("write {value} to {}", path.display()))
}
