//! The host's memory: that of the VMs, and that of other programs.

use crate::policy::host::HostMemory;
use crate::policy::round::{Elastic, HostReport};
use crate::units::{Bytes, PageCount};

/// The host has so much more than the pool, as a part of it: other programs run short of nothing until a scenario says so.
const BESIDE_PART: u64 = 8;
/// The host is short when less than this part of its memory is available.
const SHORT_PART: u64 = 32;

/// The host of a scenario.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    total: PageCount,
    /// What others than VMs use.
    others: PageCount,
}

impl Host {
    /// A host with room for a pool.
    pub(super) fn new(pool: PageCount) -> Host {
        Host { total: pool + PageCount(pool.0 / BESIDE_PART), others: PageCount::ZERO }
    }

    /// Other programs take what is beyond `spare` for VMs, or give it back.
    pub(super) fn spare(&mut self, spare: PageCount) {
        self.others = self.total.saturating_sub(spare + self.min());
    }

    fn min(&self) -> PageCount {
        PageCount(self.total.0 / SHORT_PART)
    }

    /// What nobody uses while VMs use `used`.
    pub(super) fn free(&self, used: PageCount) -> PageCount {
        self.total.saturating_sub(self.others + used)
    }

    /// What the daemon would measure.
    pub(super) fn report(&self, now_ms: u64, used: PageCount) -> HostReport {
        let memory = HostMemory { total: self.total.bytes(), available: self.free(used).bytes(), stalled: None };
        HostReport {
            now_ms,
            memory,
            available_min: Some(Bytes(self.min().bytes().0)),
            templates: PageCount::ZERO,
            outboxes: PageCount::ZERO,
            outboxes_held: PageCount::ZERO,
            elastic: Elastic::default(),
        }
    }
}
