//! Direct reads of a patterned disk into buffers that are then left alone for a while: what a host that evicts
//! pages under a running DMA gets wrong. The reads bypass the guest's page cache, so the device writes straight
//! into the buffers.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_guest::pattern::Pattern;
use pagoda_guest::rng::Rng;
use pagoda_guest::{DISK_VERSION, PAGE_SIZE, PAGES_PER_MIB};
use rustix::fs::OFlags;

use crate::enough::End;
use crate::params::{DiskParams, Limit};
use crate::report::Report;

pub const DEVICE: &str = "vda";
/// Unit of sizes in /sys/class/block, whatever the disk.
pub const SECTOR_BYTES: u64 = 512;
const BLOCK_BYTES: usize = 1 << 20;
const PAGES_PER_BLOCK: u64 = PAGES_PER_MIB as u64;

/// How long a thread whose buffers all rest waits before it looks again.
const REST_POLL: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub struct Disk {
    file: File,
    blocks: u64,
    pattern: Pattern,
    params: DiskParams,
}

/// When a reader of the disk ends.
#[derive(Debug, Clone, Copy)]
pub enum Until<'a> {
    /// A time, or as many reads as the disk has blocks, so many times.
    Limit(Limit),
    Set(&'a AtomicBool),
}

impl Disk {
    pub fn open(params: DiskParams) -> Result<Self> {
        let sectors_file = format!("/sys/class/block/{DEVICE}/size");
        let sectors: u64 = fs::read_to_string(&sectors_file)
            .with_context(|| format!("no disk /dev/{DEVICE}: give the VM a virtio-blk disk"))?
            .trim()
            .parse()
            .with_context(|| format!("read {sectors_file}"))?;
        let blocks = sectors * SECTOR_BYTES / BLOCK_BYTES as u64;
        ensure!(blocks > 1, "disk /dev/{DEVICE} is smaller than 2 MiB");
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::DIRECT.bits().cast_signed())
            .open(format!("/dev/{DEVICE}"))
            .with_context(|| format!("open /dev/{DEVICE} for direct reads"))?;
        Ok(Self { file, blocks, pattern: Pattern::new(params.seed), params })
    }

    pub fn read_and_check(&self, until: Until<'_>, report: &Report) -> Result<()> {
        let start = Instant::now();
        let bad_before = report.bad_pages();
        let counters = Counters::default();
        let threads = self.params.threads;
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..threads)
                .map(|index| {
                    let buffers = self.params.buffers / threads + usize::from(index < self.params.buffers % threads);
                    let reader = Reader::new(self, buffers, index as u64);
                    let counters = &counters;
                    scope.spawn(move || reader.run(until, start, counters, report))
                })
                .collect();
            // A panic ends the whole guest (panic = "abort"), so joining cannot fail.
            readers.into_iter().try_for_each(|reader| reader.join().expect("disk reader"))
        })
        .with_context(|| format!("read /dev/{DEVICE}"))?;
        report.line(format_args!(
            "done phase=disk pages={} ops={} bad={} us={}",
            counters.pages_checked.into_inner(),
            counters.reads.into_inner(),
            report.bad_pages() - bad_before,
            start.elapsed().as_micros(),
        ));
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    pages_checked: AtomicU64,
}

/// A thread's buffers; each thread has one read in flight.
struct Reader<'a> {
    disk: &'a Disk,
    buffers: Vec<Buffer>,
    rng: Rng,
}

/// A block's worth of memory that devices can write to directly.
pub struct Buffer {
    bytes: Vec<u8>,
    aligned_start: usize,
    /// The block it was last filled with.
    block: Option<u64>,
    rests_until: Instant,
}

impl Buffer {
    pub fn new(now: Instant) -> Self {
        let bytes = vec![0; BLOCK_BYTES + PAGE_SIZE];
        let aligned_start = bytes.as_ptr().align_offset(PAGE_SIZE);
        Self { bytes, aligned_start, block: None, rests_until: now }
    }

    pub fn content(&mut self) -> &mut [u8] {
        &mut self.bytes[self.aligned_start..][..BLOCK_BYTES]
    }
}

impl<'a> Reader<'a> {
    fn new(disk: &'a Disk, buffers: usize, index: u64) -> Self {
        let now = Instant::now();
        let buffers = (0..buffers).map(|_| Buffer::new(now)).collect();
        Self { disk, buffers, rng: Rng::new(index) }
    }

    fn run(mut self, until: Until<'_>, start: Instant, counters: &Counters, report: &Report) -> io::Result<()> {
        let mut is_over: Box<dyn FnMut(u64) -> bool> = match until {
            Until::Set(flag) => Box::new(|_| flag.load(Ordering::Relaxed)),
            Until::Limit(limit) => {
                let mut end = End::new(limit, start, self.disk.blocks);
                Box::new(move |reads| end.is_reached(reads))
            }
        };
        while !is_over(counters.reads.load(Ordering::Relaxed)) {
            let now = Instant::now();
            let first = self.rng.below(self.buffers.len() as u64) as usize;
            let count = self.buffers.len();
            let ready = (0..count).map(|step| (first + step) % count).find(|i| self.buffers[*i].rests_until <= now);
            match ready {
                Some(index) => self.reuse(index, counters, report)?,
                None => std::thread::sleep(REST_POLL),
            }
        }
        for index in 0..self.buffers.len() {
            self.check(index, counters, report);
        }
        Ok(())
    }

    /// Checks what a buffer held, reads another block into it, and leaves it alone.
    fn reuse(&mut self, index: usize, counters: &Counters, report: &Report) -> io::Result<()> {
        self.check(index, counters, report);
        let block = self.rng.below(self.disk.blocks);
        let buffer = &mut self.buffers[index];
        self.disk.file.read_exact_at(buffer.content(), block * BLOCK_BYTES as u64)?;
        buffer.block = Some(block);
        counters.reads.fetch_add(1, Ordering::Relaxed);
        // Half are looked at now and half only later, half rest and half do not: pages that the device wrote and
        // nobody touched are the dangerous ones, but the others must be right too.
        if self.rng.percent(50) {
            self.check(index, counters, report);
        }
        let rest_ms =
            if self.rng.percent(50) { self.rng.below(self.disk.params.rest_max.as_millis() as u64 + 1) } else { 0 };
        self.buffers[index].rests_until = Instant::now() + Duration::from_millis(rest_ms);
        Ok(())
    }

    fn check(&mut self, index: usize, counters: &Counters, report: &Report) {
        let pattern = &self.disk.pattern;
        let buffer = &mut self.buffers[index];
        let Some(block) = buffer.block else { return };
        for (page, bytes) in (block * PAGES_PER_BLOCK..).zip(buffer.content().chunks_exact_mut(PAGE_SIZE)) {
            let content = pattern.content(page, DISK_VERSION);
            if let Some(mismatch) = content.check_bytes(bytes) {
                report.bad_page("disk", page, DISK_VERSION, pattern, mismatch);
                // Set right, so that one loss counts once.
                content.fill_bytes(bytes);
            }
        }
        counters.pages_checked.fetch_add(PAGES_PER_BLOCK, Ordering::Relaxed);
    }
}
