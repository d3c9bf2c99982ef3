//! Blocks of a disk that are written again and again with direct I/O, each time with another content, and compared with what memory
//! remembers of them: a disk that is not of the same moment as memory is noticed.
//!
//! The disk is all zeros at first. Each thread has blocks of its own and one request in flight.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_guest::PAGE_SIZE;
use pagoda_guest::pattern::Pattern;
use pagoda_guest::rng::Rng;
use rustix::fs::OFlags;

use crate::disk::DEVICE;
use crate::enough::End;
use crate::params::RunParams;
use crate::report::Report;

/// Blocks of one page: 16 MiB, so that some are written once and others often.
const BLOCKS: u64 = 4096;
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

pub fn run(run: RunParams, disk_seed: u64, seed: u64, report: &Report) -> Result<()> {
    let path = format!("/dev/{DEVICE}");
    let direct = OFlags::DIRECT.bits().cast_signed();
    let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(&path);
    let file = file.with_context(|| format!("open {path}: give the VM a virtio-blk disk"))?;
    let (start, bad_before, ops) = (Instant::now(), report.bad_pages(), AtomicU64::new(0));
    let threads = run.threads.max(1) as u64;
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..threads)
            .map(|index| {
                let writer = Writer::new(&file, disk_seed, seed.wrapping_add(index), index, threads);
                let ops = &ops;
                scope.spawn(move || writer.run(run, start, ops, report))
            })
            .collect();
        // A panic ends the whole guest (panic = "abort"), so joining cannot fail.
        writers.into_iter().try_for_each(|writer| writer.join().expect("writer"))
    })
    .with_context(|| format!("write blocks of {path}"))?;
    report.line(format_args!(
        "done phase=blocks pages={BLOCKS} ops={} bad={} us={}",
        ops.into_inner(),
        report.bad_pages() - bad_before,
        start.elapsed().as_micros(),
    ));
    Ok(())
}

struct Writer<'a> {
    file: &'a File,
    pattern: Pattern,
    rng: Rng,
    /// Its first block, and how far it is to the next one.
    first: u64,
    step: u64,
    /// What its blocks hold; 0 before the first write.
    versions: Vec<u32>,
    buffer: Vec<u8>,
    aligned_start: usize,
}

impl<'a> Writer<'a> {
    fn new(file: &'a File, disk_seed: u64, seed: u64, first: u64, step: u64) -> Self {
        let buffer = vec![0; 2 * PAGE_SIZE];
        let aligned_start = buffer.as_ptr().align_offset(PAGE_SIZE);
        let versions = vec![0; (BLOCKS - first).div_ceil(step) as usize];
        Self {
            file,
            pattern: Pattern::new(disk_seed),
            rng: Rng::new(seed),
            first,
            step,
            versions,
            buffer,
            aligned_start,
        }
    }

    fn run(mut self, run: RunParams, start: Instant, ops: &AtomicU64, report: &Report) -> io::Result<()> {
        let mut end = End::new(run.limit, start, BLOCKS);
        let mut said = None;
        while !end.is_reached(ops.load(Ordering::Relaxed)) {
            let index = self.rng.below(self.versions.len() as u64) as usize;
            self.check(index, report)?;
            if self.rng.percent(run.write_percent) {
                self.write(index)?;
            }
            let done = ops.fetch_add(1, Ordering::Relaxed) + 1;
            if self.first == 0 && said.is_none_or(|said: Instant| said.elapsed() >= PROGRESS_EVERY) {
                said = Some(Instant::now());
                report.line(format_args!("progress phase=blocks ops={done} bad={}", report.bad_pages()));
            }
        }
        (0..self.versions.len()).try_for_each(|index| self.check(index, report))
    }

    fn block(&self, index: usize) -> u64 {
        self.first + index as u64 * self.step
    }

    fn page(&mut self) -> &mut [u8] {
        &mut self.buffer[self.aligned_start..][..PAGE_SIZE]
    }

    fn check(&mut self, index: usize, report: &Report) -> io::Result<()> {
        let (block, version, file) = (self.block(index), self.versions[index], self.file);
        file.read_exact_at(self.page(), block * PAGE_SIZE as u64)?;
        if let Some(mismatch) = self.pattern.content(block, version).check_bytes(self.page()) {
            report.bad_page("disk", block, version, &self.pattern, mismatch);
        }
        Ok(())
    }

    /// The content after the last one. It counts when the disk has said that it is there.
    fn write(&mut self, index: usize) -> io::Result<()> {
        let (block, version, file) = (self.block(index), self.versions[index] + 1, self.file);
        self.pattern.content(block, version).fill_bytes(self.page());
        file.write_all_at(self.page(), block * PAGE_SIZE as u64)?;
        self.versions[index] = version;
        Ok(())
    }
}
