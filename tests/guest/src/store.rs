//! A file with the pattern of its pages, written through the page cache and read back past it: what a file system on a
//! disk under test must keep.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_guest::pattern::Pattern;
use pagoda_guest::{DISK_VERSION, PAGE_SIZE, PAGES_PER_MIB};
use rustix::fs::OFlags;

use crate::disk::Buffer;
use crate::report::Report;

const BLOCK_BYTES: usize = 1 << 20;

/// Writes a new file, up to its last byte being on the disk.
pub fn write(path: &str, mib: usize, seed: u64, report: &Report) -> Result<()> {
    let start = Instant::now();
    let file = File::create(path).with_context(|| format!("create {path}"))?;
    let pattern = Pattern::new(seed);
    let mut block = vec![0; BLOCK_BYTES];
    for number in 0..mib as u64 {
        for (page, bytes) in pages_of(number).zip(block.chunks_exact_mut(PAGE_SIZE)) {
            pattern.content(page, DISK_VERSION).fill_bytes(bytes);
        }
        file.write_all_at(&block, number * BLOCK_BYTES as u64).with_context(|| format!("write {path}"))?;
        report.line(format_args!("progress phase=store mib={} of={mib} bad={}", number + 1, report.bad_pages()));
    }
    file.sync_all().with_context(|| format!("sync {path}"))?;
    let us = start.elapsed().as_micros();
    report.line(format_args!("done phase=store pages={} bad=0 us={us}", mib * PAGES_PER_MIB));
    Ok(())
}

/// Reads all of a file that was written so, past the page cache, and counts the pages that are wrong.
pub fn check(path: &str, seed: u64, report: &Report) -> Result<()> {
    let (start, bad_before) = (Instant::now(), report.bad_pages());
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path);
    let file = file.with_context(|| format!("open {path} for direct reads"))?;
    let blocks = file.metadata().with_context(|| format!("look at {path}"))?.len() / BLOCK_BYTES as u64;
    ensure!(blocks > 0, "{path} has less than 1 MiB");
    let pattern = Pattern::new(seed);
    let mut block = Buffer::new(start);
    for number in 0..blocks {
        file.read_exact_at(block.content(), number * BLOCK_BYTES as u64).with_context(|| format!("read {path}"))?;
        for (page, bytes) in pages_of(number).zip(block.content().chunks_exact(PAGE_SIZE)) {
            if let Some(mismatch) = pattern.content(page, DISK_VERSION).check_bytes(bytes) {
                report.bad_page("file", page, DISK_VERSION, &pattern, mismatch);
            }
        }
    }
    let (pages, bad) = (blocks * PAGES_PER_MIB as u64, report.bad_pages() - bad_before);
    report.line(format_args!("done phase=check pages={pages} bad={bad} us={}", start.elapsed().as_micros()));
    Ok(())
}

fn pages_of(block: u64) -> std::ops::Range<u64> {
    block * PAGES_PER_MIB as u64..(block + 1) * PAGES_PER_MIB as u64
}
