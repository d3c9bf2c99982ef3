//! What the policy remembers of one VM.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pagoda_core::policy::VmId;
use pagoda_core::policy::follow_up::{Comparison, Deviation, FollowUp};
use pagoda_core::policy::round::VmRound;
use pagoda_core::units::PageCount;

/// Page-ins are counted over at least so long.
const RATE_PERIOD: Duration = Duration::from_secs(4);

/// What is under way to stop a VM or to let it run again ([`super::block`]).
#[derive(Debug, Clone, Default)]
pub struct Block {
    /// A thread speaks to its monitor, which may take as long as a fault.
    pub(super) is_busy: Arc<AtomicBool>,
    /// When it was stopped, by this daemon.
    pub since: Option<Instant>,
}

impl Block {
    /// The VM is being stopped or released now.
    pub fn is_under_way(&self) -> bool {
        self.is_busy.load(Ordering::Acquire)
    }
}

/// What the policy remembers of a VM, beside its settings.
#[derive(Debug)]
pub struct Governed {
    pub id: VmId,
    /// What rounds remember of it.
    pub round: VmRound,
    /// When its overhead was measured.
    pub(super) measured: Option<Instant>,
    /// Page-ins at some moment, and the rate before it.
    page_ins: (u64, Instant),
    pub page_ins_per_s: f64,
    pub block: Block,
    follow_up: FollowUp,
    /// What of the last plans has not come true.
    pub deviations: Vec<Deviation>,
}

impl Governed {
    pub fn new(id: VmId) -> Governed {
        Governed {
            id,
            round: VmRound::default(),
            measured: None,
            page_ins: (0, Instant::now()),
            page_ins_per_s: 0.0,
            block: Block::default(),
            follow_up: FollowUp::default(),
            deviations: Vec::new(),
        }
    }

    /// Compares what the VM has with what the rounds before wanted of it.
    pub(super) fn compare(&mut self, now_ms: u64, comparison: &Comparison) {
        self.deviations = self.follow_up.compare(now_ms, comparison);
    }

    /// A new engine has begun with this limit. It has sampled nothing, and counts from zero.
    pub fn attached(&mut self, limit: PageCount) {
        self.round.attached(limit);
        self.page_ins = (0, Instant::now());
    }

    pub(super) fn note_page_ins(&mut self, count: u64) {
        let (before, at) = self.page_ins;
        let elapsed = at.elapsed();
        if elapsed >= RATE_PERIOD || count < before {
            self.page_ins_per_s = count.saturating_sub(before) as f64 / elapsed.as_secs_f64().max(1e-3);
            self.page_ins = (count, Instant::now());
        }
    }
}
