//! The rate at which this disk reads and writes at the same time, with nothing else to do.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_sys::toy::disk::{BalancedLoad, run_balanced};

use super::swap::write_out;
use crate::undo::{Guard, Undo};

/// Reads cover one half and writes the other.
const FILE_BYTES: u64 = 2 << 30;
/// Requests in flight and bytes of each; the best counts. Which it is changes from minute to minute on the disk of a
/// virtual machine (467 to 1353 MiB/s in windows of 2 s, one machine under little load, 2026-11-21).
const LOADS: [(u32, usize); 7] =
    [(64, 256 << 10), (8, 512 << 10), (16, 512 << 10), (32, 512 << 10), (8, 1 << 20), (16, 1 << 20), (32, 1 << 20)];

/// A written file for O_DIRECT; deleted when dropped.
#[derive(Debug)]
pub struct DirectFile {
    path: PathBuf,
    _remove: Guard,
}

impl DirectFile {
    /// Writes the file in `dir`, at its full size.
    ///
    /// # Errors
    /// No space.
    pub fn new(dir: &Path) -> Result<Self> {
        let path = dir.join("bench.direct");
        let remove = Guard::new(Undo::File { path: path.clone() })?;
        write_out(&path, FILE_BYTES)?;
        Ok(Self { path, _remove: remove })
    }

    /// MiB/s each way: as many bytes written as read, at the best of the loads, each for so many seconds.
    ///
    /// # Errors
    /// The file system refuses O_DIRECT; an I/O error.
    pub fn balanced_mib_per_s(&self, seconds: f64) -> Result<f64> {
        let file = self.open()?;
        let mut best = 0.0_f64;
        for (queue_depth, request_bytes) in LOADS {
            let load = BalancedLoad { queue_depth, request_bytes, duration: Duration::from_secs_f64(seconds) };
            let rate = run_balanced(&file, load).context("read and write the disk")?;
            let each_way = rate.read_bytes.min(rate.written_bytes) as f64;
            best = best.max(each_way / f64::from(1 << 20) / rate.elapsed.as_secs_f64());
        }
        Ok(best)
    }

    /// Reads a page now and then, until the probe is asked for the slowest.
    ///
    /// # Errors
    /// The file system refuses O_DIRECT; no thread.
    pub fn probe(&self) -> Result<Probe> {
        let file = self.open()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let body = move || slowest_read(&file, &stopped);
        let thread = std::thread::Builder::new().name("disk-probe".into()).spawn(body).context("start the probe")?;
        Ok(Probe { stop, thread })
    }

    fn open(&self) -> Result<File> {
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).context("O_DIRECT")?;
        let open = File::options().read(true).write(true).custom_flags(direct).open(&self.path);
        open.with_context(|| format!("open {} with O_DIRECT", self.path.display()))
    }
}

/// What the disk does to whoever waits for it, while something else is measured.
#[derive(Debug)]
pub struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Duration>>,
}

impl Probe {
    /// Ends the probe: how long its slowest read took.
    ///
    /// # Errors
    /// A read failed.
    pub fn slowest(self) -> Result<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow::anyhow!("the probe has panicked"))?
    }
}

const PROBE_EVERY: Duration = Duration::from_millis(1);
const PAGE_BYTES: u64 = 4096;

#[repr(align(4096))]
struct Page([u8; PAGE_BYTES as usize]);

fn slowest_read(file: &File, stop: &AtomicBool) -> Result<Duration> {
    let mut page = Page([0; PAGE_BYTES as usize]);
    let mut slowest = Duration::ZERO;
    let pages = FILE_BYTES / PAGE_BYTES;
    // Any walk does that meets no page twice soon: an odd stride visits each page once.
    let mut at = 0;
    while !stop.load(Ordering::Relaxed) {
        at = (at + PROBE_STRIDE) % pages;
        let start = Instant::now();
        file.read_exact_at(&mut page.0, at * PAGE_BYTES).context("read the probe's page")?;
        slowest = slowest.max(start.elapsed());
        std::thread::sleep(PROBE_EVERY);
    }
    Ok(slowest)
}

/// How far the probe goes from one read to the next, in pages.
const PROBE_STRIDE: u64 = 100_003;
