//! Guest disks with the pattern that guests verify, and a way to stall them.

use std::fs::{self, File};
use std::io::BufWriter;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagoda_guest::DISK_SEED_DEFAULT;
use pagoda_guest::pattern::write_disk_pattern;
use rustix::fs::{FlockOperation, flock};

use crate::{MIB, programs, wait};

/// Larger than what a guest keeps of it.
const DISK_MIB: u64 = 256;

/// The pattern disk, made once. Guests only read it.
///
/// # Errors
/// It cannot be written.
pub fn pattern_disk() -> Result<PathBuf> {
    let dir = programs::work_dir()?;
    let path = dir.join("pattern.img");
    let lock = File::create(dir.join("pattern.lock")).context("open the lock of the pattern disk")?;
    flock(&lock, FlockOperation::LockExclusive).context("lock the pattern disk")?;
    if !path.exists() {
        let part = path.with_extension("part");
        let file = File::create(&part).context("make the pattern disk")?;
        let mut writer = BufWriter::with_capacity(1 << 20, &file);
        write_disk_pattern(&mut writer, DISK_MIB * MIB, DISK_SEED_DEFAULT).context("write the pattern disk")?;
        drop(writer);
        // Direct reads of dirty pages would write them first.
        file.sync_all().context("write the pattern disk")?;
        fs::rename(&part, &path).context("name the pattern disk")?;
    }
    Ok(path)
}

/// Disk reads of the processes in a cgroup (v1, blkio) can be held up.
#[derive(Debug)]
pub struct Throttle {
    cgroup: PathBuf,
}

/// One byte a second is as good as none: a request of 4 KiB takes an hour.
const STALLED_BYTES_PER_S: u64 = 1;

impl Throttle {
    /// Makes a cgroup whose reads can be throttled.
    ///
    /// # Errors
    /// No blkio controller (v1), or no permission.
    pub fn make(name: &str) -> Result<Self> {
        let parent = Path::new("/sys/fs/cgroup/blkio");
        ensure!(
            parent.join("blkio.throttle.read_bps_device").exists() || parent.join("cgroup.procs").exists(),
            "{} is not there: mount the blkio controller of cgroup v1",
            parent.display()
        );
        let cgroup = parent.join(name);
        fs::create_dir(&cgroup).with_context(|| format!("make {}", cgroup.display()))?;
        let throttle = Self { cgroup };
        ensure!(throttle.setting().exists(), "this kernel cannot throttle (CONFIG_BLK_DEV_THROTTLING)");
        Ok(throttle)
    }

    /// Moves a process with all its threads into the cgroup.
    ///
    /// # Errors
    /// It is gone.
    pub fn add(&self, pid: u32) -> Result<()> {
        fs::write(self.cgroup.join("cgroup.procs"), pid.to_string()).context("move the VMM into the cgroup")
    }

    /// Holds up reads from the disk that `file` is on.
    ///
    /// # Errors
    /// It is not on a disk of its own number (overlayfs, btrfs).
    pub fn stall_reads(&self, file: &Path) -> Result<()> {
        self.set(file, STALLED_BYTES_PER_S)
    }

    /// Slows reads down, so that each holds its pages for long.
    ///
    /// # Errors
    /// As `stall_reads`.
    pub fn slow_reads(&self, file: &Path, bytes_per_s: u64) -> Result<()> {
        self.set(file, bytes_per_s)
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// As `stall_reads`.
    pub fn release(&self, file: &Path) -> Result<()> {
        self.set(file, 0)
    }

    fn set(&self, file: &Path, bytes_per_s: u64) -> Result<()> {
        let dev = fs::metadata(file).with_context(|| format!("look at {}", file.display()))?.dev();
        let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
        let line = format!("{major}:{minor} {bytes_per_s}");
        fs::write(self.setting(), &line).with_context(|| format!("throttle {line}"))
    }

    fn setting(&self) -> PathBuf {
        self.cgroup.join("blkio.throttle.read_bps_device")
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let gone =
            wait::until("the cgroup is empty", wait::HANG, || Ok(fs::remove_dir(&self.cgroup).is_ok().then_some(())));
        if let Err(error) = gone {
            eprintln!("remove {}: {error:#}", self.cgroup.display());
        }
    }
}
