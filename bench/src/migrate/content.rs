//! What the guest's memory holds, as a compressor sees it. A reader of the figures has to know: content that compresses well helps
//! who compresses, and random bytes hide it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

const PAGE: usize = 4096;
/// One page in so many is looked at, a number that is coprime to all periods of memory.
const EVERY: u64 = 31;

/// Of the pages that were looked at.
#[derive(Debug, Clone, Copy, Default)]
pub struct Content {
    pub zero: f64,
    /// By how much LZ4 makes the others smaller, page by page.
    pub lz4: f64,
}

/// Memory of a QEMU.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    start: u64,
    end: u64,
    /// Its own memory: all that is not the guest's.
    pub own_bytes: u64,
}

impl Memory {
    /// Looks at a process: the guest's memory is the mapping of which most is resident.
    ///
    /// # Errors
    /// It has gone.
    pub fn of(pid: u32) -> Result<Memory> {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps")).context("read QEMU's mappings")?;
        let (mut largest, mut all_kib, mut range) = ((0, 0, 0), 0, (0, 0));
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let first = words.next().unwrap_or_default();
            if let Some((start, end)) = first.split_once('-') {
                if let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) {
                    range = (start, end);
                }
            } else if first == "Anonymous:" {
                let kib = words.next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
                all_kib += kib;
                if kib > largest.0 {
                    largest = (kib, range.0, range.1);
                }
            }
        }
        let (guest_kib, start, end) = largest;
        Ok(Memory { start, end, own_bytes: (all_kib - guest_kib) * 1024 })
    }

    /// # Errors
    /// It cannot be read.
    pub fn content(&self, pid: u32) -> Result<Content> {
        let file = File::open(format!("/proc/{pid}/mem")).context("open QEMU's memory")?;
        let (mut page, mut pages, mut zero, mut compressed) = (vec![0; PAGE], 0_u64, 0_u64, 0_u64);
        for at in (self.start..self.end).step_by(PAGE * EVERY as usize) {
            file.read_exact_at(&mut page, at).context("read QEMU's memory")?;
            pages += 1;
            if page.iter().all(|byte| *byte == 0) {
                zero += 1;
            } else {
                compressed += lz4_flex::block::compress(&page).len().min(PAGE) as u64;
            }
        }
        let filled = (pages - zero) as f64 * PAGE as f64;
        Ok(Content { zero: zero as f64 / pages.max(1) as f64, lz4: filled / (compressed.max(1) as f64) })
    }
}
