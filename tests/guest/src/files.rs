//! A file server's work: whole files of a set larger than memory are read and rewritten through the page cache, some
//! more often than others, as in the paper's dbench runs. How fast that goes is a matter of how much the guest's kernel
//! can keep.
//!
//! The set lies on the first virtio-blk disk without a file system in between: file N is its Nth extent. It carries the
//! pattern of test disks, which every read is checked against and every write repeats.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_guest::pattern::Pattern;
use pagoda_guest::rng::{Rng, Zipf};
use pagoda_guest::{DISK_VERSION, PAGE_SIZE};

use crate::disk::{DEVICE, SECTOR_BYTES};
use crate::enough::End;
use crate::params::RunParams;
use crate::phases::coprime_step;
use crate::report::Report;

/// A file: what Linux reads ahead in one request.
const FILE_BYTES: usize = 128 << 10;
const PAGES_PER_FILE: u64 = (FILE_BYTES / PAGE_SIZE) as u64;
/// YCSB's exponent: some files are read much more often than others, none never.
const ZIPF_EXPONENT: f64 = 0.99;

/// The file set. The kernel forgets the pages of a disk that nobody has open, so it stays open between steps.
#[derive(Debug)]
pub struct Files {
    file: File,
    files: u64,
}

/// Reads and rewrites files until the limit: a time, or as many files as there are, so many times.
pub fn run(set: &Files, run: RunParams, disk_seed: u64, seed: u64, report: &Report) -> Result<()> {
    let Files { file, files } = set;
    let files = *files;
    let start = Instant::now();
    let bad_before = report.bad_pages();
    let ops = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..run.threads)
            .map(|index| {
                let client = Client {
                    file,
                    files,
                    pattern: Pattern::new(disk_seed),
                    zipf: Zipf::new(files, ZIPF_EXPONENT),
                    step: coprime_step(files),
                    rng: Rng::new(seed.wrapping_add(index as u64)),
                    buffer: vec![0; FILE_BYTES],
                };
                let ops = &ops;
                scope.spawn(move || client.run(run, start, ops, report))
            })
            .collect();
        // A panic ends the whole guest (panic = "abort"), so joining cannot fail.
        clients.into_iter().try_for_each(|client| client.join().expect("client"))
    })
    .with_context(|| format!("use the files on /dev/{DEVICE}"))?;
    let ops = ops.into_inner();
    report.line(format_args!(
        "done phase=files files={files} ops={ops} bytes={} bad={} us={}",
        ops * FILE_BYTES as u64,
        report.bad_pages() - bad_before,
        start.elapsed().as_micros(),
    ));
    Ok(())
}

pub fn open() -> Result<Files> {
    let sectors_file = format!("/sys/class/block/{DEVICE}/size");
    let sectors: u64 = fs::read_to_string(&sectors_file)
        .with_context(|| format!("no disk /dev/{DEVICE}: give the VM a virtio-blk disk"))?
        .trim()
        .parse()
        .with_context(|| format!("read {sectors_file}"))?;
    let files = sectors * SECTOR_BYTES / FILE_BYTES as u64;
    ensure!(files > 1, "disk /dev/{DEVICE} is smaller than two files of {FILE_BYTES} bytes");
    let path = format!("/dev/{DEVICE}");
    let file = OpenOptions::new().read(true).write(true).open(&path).with_context(|| format!("open {path}"))?;
    Ok(Files { file, files })
}

struct Client<'a> {
    file: &'a File,
    files: u64,
    pattern: Pattern,
    zipf: Zipf,
    step: u64,
    rng: Rng,
    buffer: Vec<u8>,
}

impl Client<'_> {
    fn run(mut self, run: RunParams, start: Instant, ops: &AtomicU64, report: &Report) -> io::Result<()> {
        let mut end = End::new(run.limit, start, self.files);
        while !end.is_reached(ops.load(Ordering::Relaxed)) {
            // Neighbours in popularity are not neighbours on the disk.
            let rank = self.zipf.rank(&mut self.rng);
            let number = (u128::from(rank) * u128::from(self.step) % u128::from(self.files)) as u64;
            self.read(number, report)?;
            if self.rng.percent(run.write_percent) {
                self.file.write_all_at(&self.buffer, number * FILE_BYTES as u64)?;
            }
            ops.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn read(&mut self, number: u64, report: &Report) -> io::Result<()> {
        self.file.read_exact_at(&mut self.buffer, number * FILE_BYTES as u64)?;
        // One page of a file: checking all of them would measure the check.
        let index = self.rng.below(PAGES_PER_FILE);
        let page = number * PAGES_PER_FILE + index;
        let content = self.pattern.content(page, DISK_VERSION);
        let bytes = &mut self.buffer[index as usize * PAGE_SIZE..][..PAGE_SIZE];
        if let Some(mismatch) = content.check_bytes(bytes) {
            report.bad_page("disk", page, DISK_VERSION, &self.pattern, mismatch);
            // Set right, so that a rewrite does not spread it.
            content.fill_bytes(bytes);
        }
        Ok(())
    }
}
