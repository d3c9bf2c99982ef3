//! Memory in which the host and the guest hold what is delivered: all of it that is not the guest's program's own.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::client::Digest;
use super::machine::{Machine, Product};

/// How long it waits between two looks at the memory.
const LOOK: Duration = Duration::from_millis(10);
/// What `/proc/PID/fd` calls the file of one file of an outbox.
const MEMFD: &str = "/memfd:pagoda-outbox";
/// `stat` counts in these.
const BLOCK_BYTES: u64 = 512;

/// The most that was held at once.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    pub bytes: f64,
}

/// Where the host holds it.
enum Held {
    /// In files of a process, by its pid.
    Outbox(u32),
    /// In a tmpfs, which is the host's page cache.
    Tmpfs(std::path::PathBuf),
}

impl Peak {
    /// Delivers something, and looks meanwhile at the host's memory for it, and at its end, before it is removed, at the guest's page
    /// cache.
    ///
    /// # Errors
    /// It does not arrive; this way holds nothing at the host.
    pub fn of(machine: &mut Machine<'_>, product: Product<'_>, expected: &Digest) -> Result<Peak> {
        let held = match &machine.shared {
            Some(shared) => Held::Tmpfs(shared.directory.clone()),
            None => Held::Outbox(machine.outbox_pid()?),
        };
        let before = cached(machine)?;
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut most = 0;
                while !is_over.load(Ordering::Relaxed) {
                    most = most.max(held.bytes()?);
                    std::thread::sleep(LOOK);
                }
                anyhow::Ok(most)
            });
            let mut in_guest = 0;
            let delivered = machine.deliver(product, expected, |machine| {
                in_guest = cached(machine)?.saturating_sub(before);
                Ok(())
            });
            is_over.store(true, Ordering::Relaxed);
            let most = watcher.join().map_err(|_| anyhow!("the watcher has panicked"))??;
            delivered?;
            Ok(Peak { bytes: (most + in_guest) as f64 })
        })
    }
}

impl Held {
    fn bytes(&self) -> Result<u64> {
        match self {
            Self::Outbox(pid) => memfd_bytes(*pid),
            Self::Tmpfs(path) => tmpfs_bytes(path),
        }
    }
}

fn memfd_bytes(pid: u32) -> Result<u64> {
    let directory = format!("/proc/{pid}/fd");
    let mut bytes = 0;
    for entry in fs::read_dir(&directory).with_context(|| format!("list {directory}"))? {
        let path = entry?.path();
        // One that is closed at this moment has nothing.
        let is_file = fs::read_link(&path).is_ok_and(|to| to.to_string_lossy().starts_with(MEMFD));
        if is_file && let Ok(stat) = fs::metadata(&path) {
            bytes += stat.blocks() * BLOCK_BYTES;
        }
    }
    Ok(bytes)
}

fn tmpfs_bytes(path: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(path).context("look at the tmpfs")?;
    Ok((stat.f_blocks - stat.f_bfree) * stat.f_frsize)
}

/// The guest's page cache.
fn cached(machine: &mut Machine<'_>) -> Result<u64> {
    let line = machine.ask("grep ^Cached: /proc/meminfo")?;
    let kib = line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("no page cache in {line:?}"))? << 10)
}
