//! The disk without anything else: as many bytes as a move reads from swap or writes there, by direct I/O.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use testkit::peers::swap::write_out;
use testkit::undo::{Guard, Undo};

const BLOCK_BYTES: usize = 1 << 20;
const PAGE: usize = 4096;
/// Blocks in flight: with more this project's disks are not faster.
const THREADS: u64 = 4;

/// A file of its own, every block of which is written.
pub struct BareDisk {
    path: PathBuf,
    bytes: u64,
    _remove: Guard,
}

impl BareDisk {
    /// # Errors
    /// No room.
    pub fn new(dir: &Path, bytes: u64) -> Result<BareDisk> {
        let path = dir.join(format!("migrate-disk-{}", std::process::id()));
        let remove = Guard::new(Undo::File { path: path.clone() })?;
        let bytes = bytes.next_multiple_of(BLOCK_BYTES as u64 * THREADS);
        write_out(&path, bytes)?;
        Ok(BareDisk { path, bytes, _remove: remove })
    }

    /// Milliseconds of reading so many bytes, in order.
    ///
    /// # Errors
    /// The disk fails.
    pub fn read_ms(&self, bytes: u64) -> Result<f64> {
        self.all(bytes, |file, block, at| file.read_exact_at(block, at))
    }

    /// The same of writing.
    ///
    /// # Errors
    /// The disk fails.
    pub fn write_ms(&self, bytes: u64) -> Result<f64> {
        self.all(bytes, |file, block, at| file.write_all_at(block, at))
    }

    fn all(&self, bytes: u64, act: fn(&File, &mut [u8], u64) -> std::io::Result<()>) -> Result<f64> {
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).context("O_DIRECT")?;
        let open = File::options().read(true).write(true).custom_flags(direct).open(&self.path);
        let file = open.with_context(|| format!("open {} with O_DIRECT", self.path.display()))?;
        let blocks = bytes.min(self.bytes).div_ceil(BLOCK_BYTES as u64);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let threads = (0..THREADS).map(|first| {
                let file = &file;
                scope.spawn(move || {
                    // O_DIRECT wants a buffer at a page's boundary.
                    let mut buffer = vec![0x5a; BLOCK_BYTES + PAGE];
                    let start = buffer.as_ptr().align_offset(PAGE);
                    let block = &mut buffer[start..][..BLOCK_BYTES];
                    (first..blocks).step_by(THREADS as usize).try_for_each(|number| {
                        act(file, block, number * BLOCK_BYTES as u64).context("read or write past the page cache")
                    })
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
        })?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }
}
