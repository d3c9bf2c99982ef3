//! The kernel's swap: on a file on the same disk as ours, or on zram.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use pagoda_sys::toy::process;

use super::cgroup::MemoryCgroup;
use crate::stepped::{SteppedToy, toy_command};
use crate::undo::{Guard, Undo};

const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
const ZRAM: &str = "/sys/block/zram0";
/// The limit covers the process, its page tables and its bookkeeping too, which ours does not
/// count; this much on top makes up for it.
pub const LIMIT_SLACK_BYTES: u64 = 4 << 20;

/// Swap that is on while this lives.
#[derive(Debug)]
pub struct Swap {
    // Fields are dropped in order: swapoff, then the file or the zram device.
    _off: Guard,
    _backing: Vec<Guard>,
}

impl Swap {
    /// A swap file of so many bytes in `dir`, every block written before.
    ///
    /// # Errors
    /// No space, not root, no `mkswap`.
    pub fn on_file(dir: &Path, bytes: u64) -> Result<Self> {
        let path = dir.join("bench.swapfile");
        let remove = Guard::new(Undo::File { path: path.clone() })?;
        write_out(&path, bytes)?;
        Self::start(path, vec![remove])
    }

    /// A zram device of so many bytes.
    ///
    /// # Errors
    /// No zram, in use already, not root.
    pub fn on_zram(bytes: u64) -> Result<Self> {
        if !Path::new(ZRAM).exists() {
            // Ignored: the check below says what is missing.
            let _ = Command::new("modprobe").arg("zram").status();
        }
        let disksize = Path::new(ZRAM).join("disksize");
        let size = fs::read_to_string(&disksize).context("look for zram (modprobe zram)")?;
        if size.trim() != "0" {
            bail!("{ZRAM} is in use: reset it first");
        }
        let reset = Undo::Setting { path: Path::new(ZRAM).join("reset"), value: "1".to_owned() };
        let reset = Guard::new(reset)?;
        fs::write(&disksize, bytes.to_string()).context("set the zram device's size")?;
        Self::start(PathBuf::from("/dev/zram0"), vec![reset])
    }

    fn start(path: PathBuf, backing: Vec<Guard>) -> Result<Self> {
        let made = Command::new("mkswap").arg(&path).output().context("run mkswap")?;
        if !made.status.success() {
            bail!("mkswap {}: {}", path.display(), String::from_utf8_lossy(&made.stderr).trim());
        }
        let off = Guard::new(Undo::SwapOff { path: path.clone() })?;
        process::swap_on(&path).with_context(|| format!("swapon {}", path.display()))?;
        Ok(Self { _off: off, _backing: backing })
    }
}

/// Sets how many pages (as a power of two) the kernel swaps in at once.
///
/// # Errors
/// Not root.
pub fn set_page_cluster(value: u32) -> Result<Guard> {
    Guard::setting(Path::new(PAGE_CLUSTER), &value.to_string())
}

/// The value in force.
///
/// # Errors
/// The setting cannot be read.
pub fn page_cluster() -> Result<u32> {
    let text = fs::read_to_string(PAGE_CLUSTER).context("read page-cluster")?;
    text.trim().parse().context("read page-cluster")
}

/// A toy VMM in a memory cgroup: what a VM without Pagoda has.
#[derive(Debug)]
pub struct LimitedToy {
    // Dropped in order: the process must be gone before its cgroup.
    /// The toy VMM, whose process is in the cgroup.
    pub toy: SteppedToy,
    /// The cgroup that limits its memory.
    pub cgroup: MemoryCgroup,
}

impl LimitedToy {
    /// Starts and limits it; it has not mapped its RAM yet.
    ///
    /// # Errors
    /// Not root, no memory controller.
    pub fn start(options: &[&str], dram_mib: u64) -> Result<Self> {
        let name = format!("pagoda-bench-{}", std::process::id());
        let cgroup = MemoryCgroup::new(&name, (dram_mib << 20) + LIMIT_SLACK_BYTES)?;
        let toy = SteppedToy::start(&toy_command(options)?)?;
        cgroup.add(toy.pid())?;
        Ok(Self { toy, cgroup })
    }
}

/// Writes a file of so many bytes in full, so that neither holes nor unwritten extents help or
/// hinder what is measured on it.
///
/// # Errors
/// No space.
pub fn write_out(path: &Path, bytes: u64) -> Result<()> {
    const BLOCK_BYTES: usize = 4 << 20;
    let show = path.display();
    let mut file =
        File::options().create(true).truncate(true).write(true).open(path).with_context(|| format!("make {show}"))?;
    rustix::fs::fchmod(&file, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .with_context(|| format!("protect {show}"))?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
        .with_context(|| format!("reserve {bytes} bytes for {show}"))?;
    let block = vec![0xa5_u8; BLOCK_BYTES];
    let mut left = bytes;
    while left > 0 {
        let now = left.min(BLOCK_BYTES as u64);
        file.write_all(&block[..now as usize]).with_context(|| format!("write {show}"))?;
        left -= now;
    }
    file.sync_all().with_context(|| format!("sync {show}"))?;
    // Its pages in the page cache would be memory pressure of their own.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    Ok(())
}
