//! Looks for equal pages, and shares them: a VM's part in its share group. What shared pages do to faults is in
//! `engine/paging`.

mod scan;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::budget::Budget;
use pagoda_core::fault::{Found, OpId, Sharing};
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::{ChunkIdx, PAGE_SIZE};

use crate::share::frames::Content;

/// Processor time that looking for equal pages may take of one core, for all VMs of the daemon together.
const SCAN_PER_MILLE: u32 = 30;
/// As much as may be spent at once: faults of the VM wait meanwhile.
const SCAN_BURST: Duration = Duration::from_millis(2);
/// Pages taken back at a time by a VM whose part of its frames is too large.
const TAKE_BACK_MAX: usize = 256;

/// Pages looked at in one go, some 100 us: faults wait meanwhile.
const LOOK_PAGES: usize = 64;

const ZEROS: Content = [0; PAGE_SIZE as usize];

/// VMs that look for equal pages without pressure: they divide the time.
static SCANNERS: AtomicU32 = AtomicU32::new(0);

/// A VM's part in sharing.
#[derive(Debug)]
pub struct Sharer {
    budget: Budget,
    started: Instant,
    cpu: Duration,
    collisions: u64,
    /// Pages copied back when the VM's part was counted last, and the most between two counts: others' parts grow
    /// meanwhile, and nobody has been charged for it yet.
    copied_back: u64,
    burst: u64,
    /// This VM is one of the [`SCANNERS`].
    scans: bool,
    /// Chunks that leave, the first of them first.
    looks: VecDeque<Looking>,
}

/// A look at pages of a chunk that goes on.
#[derive(Debug)]
struct Looking {
    op: OpId,
    chunk: ChunkIdx,
    /// Pages that were not looked at yet.
    rest: PageSet,
    /// Pages that have been looked at.
    seen: PageSet,
    found: Found,
}

impl Drop for Sharer {
    fn drop(&mut self) {
        if self.scans {
            SCANNERS.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Sharer {
    /// `is_member`: the VM is in a share group.
    pub fn new(is_member: bool, sharing: Sharing) -> Sharer {
        let scans = is_member && sharing == Sharing::Scan;
        if scans {
            SCANNERS.fetch_add(1, Ordering::Relaxed);
        }
        let budget = Budget::new(SCAN_BURST.as_nanos() as u64);
        Sharer {
            budget,
            started: Instant::now(),
            cpu: Duration::ZERO,
            collisions: 0,
            copied_back: 0,
            burst: 0,
            scans,
            looks: VecDeque::new(),
        }
    }

    pub fn add_to(&self, stats: &mut Stats) {
        stats.set(Metric::ShareCpu, self.cpu.as_micros() as u64);
        stats.set(Metric::ShareCollisions, self.collisions);
        stats.set(Metric::ShareBurst, self.burst);
    }

    /// Thousandths of a core that are this VM's.
    fn per_mille(&self) -> u32 {
        (SCAN_PER_MILLE / SCANNERS.load(Ordering::Relaxed).max(1)).max(1)
    }

    fn note_copied_back(&mut self, copied_back: u64) {
        self.burst = self.burst.max(copied_back - self.copied_back);
        self.copied_back = copied_back;
    }

    /// Pages of chunks that leave are to be looked at.
    pub fn has_looks(&self) -> bool {
        !self.looks.is_empty()
    }

    fn earn(&mut self) {
        let now = self.started.elapsed().as_nanos() as u64;
        self.budget.earn(now, self.per_mille());
    }
}
