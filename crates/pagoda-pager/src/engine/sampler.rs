//! What is measured of one VM for the memory policy: sampled pages, the miss-ratio curve, and when it is near its limit.
//!
//! An armed VM's pages are watched by the machine (`pagoda_core::fault`): each use is a fault. An unarmed VM has no
//! faults of ours, and must run as if we were not there: its pages are unmapped by the agent, one by one, and looked for in
//! `/proc/PID/pagemap` from time to time. What is seen there, and how exactly:
//!
//! * Mapped by 4 KiB entries (small folios, or large ones in pieces): the one entry goes. Neighbours keep theirs, so they do
//!   not fault, and what the kernel maps around a fault it maps around the sampled page's own. Exact, but for a page whose
//!   neighbours were never used: their first use may map it.
//! * Mapped huge: the kernel drops the 2 MiB entry and puts it back, huge, at the first use of any part of it
//!   (`__split_huge_pmd` of a file mapping only clears it). The page then stands for its 2 MiB: nothing is split, and the
//!   price is one fault for each sampled page and period. A working set that uses little of each huge page is overestimated.
//!
//! When the VM is armed or disarmed in a period, the period begins anew with the same pages: nothing is counted twice.
//!
//! While the agent is away nothing is watched, and the estimate stays as it was.

mod ages;
mod period;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::fault::headroom_max;
use pagoda_core::policy::SampleCount;
use pagoda_core::policy::growth::NearLimit;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::PageIdx;
use pagoda_sys::pagemap::Pagemap;
use pagoda_sys::ring::Ring;

use super::link::agent::Agent;
use super::paging::Paging;
use ages::Ages;

/// How old a published curve may be: it changes slowly, and each is a copy.
const CURVE_EVERY: Duration = Duration::from_secs(10);

/// What became of a sampled page of an unarmed VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peek {
    /// It is not known to be unmapped.
    Asked,
    Watched,
    Touched,
}

/// The owners through which pages are unmapped and watched.
pub struct Context<'a> {
    pub paging: &'a mut Paging,
    pub agent: &'a mut Agent,
    pub ring: &'a mut Ring,
}

/// Measures one VM: its sampled pages, its miss-ratio curve, and its growth.
#[derive(Debug)]
pub struct Sampler {
    /// The VMM's process id, whose page tables are read.
    pid: u32,
    pages: Vec<PageIdx>,
    period: u64,
    /// What became of the pages of an unarmed VM: one for each of `pages`.
    peeks: Vec<Peek>,
    /// Counts what `peeks` was begun for: an answer to an earlier zap says nothing about it.
    round: u32,
    pagemap: Option<Pagemap>,
    /// The ages' ([`ages`]) are counted here, too.
    zaps: u64,
    uses: u64,
    zap_us: u64,
    /// The curve, and when it was taken.
    curve: Option<(Arc<Curve>, Instant)>,
    /// `None` unless miss-ratio curves are watched.
    ages: Option<Ages>,
    near_limit: NearLimit,
}

impl Sampler {
    /// Of the VM of this process. Nothing is sampled to begin with.
    pub fn new(pid: u32) -> Sampler {
        Sampler {
            pid,
            pages: Vec::new(),
            period: 0,
            peeks: Vec::new(),
            round: 0,
            pagemap: None,
            zaps: 0,
            uses: 0,
            zap_us: 0,
            curve: None,
            ages: None,
            near_limit: NearLimit::default(),
        }
    }

    /// Sampling periods that have begun since the engine started.
    pub fn period(&self) -> u64 {
        self.period
    }

    /// Whether the VM is about to have all it may, which is said once for each limit: it may be raised before the VM
    /// has to page.
    pub fn is_newly_near_limit(&mut self, paging: &Paging) -> bool {
        let growth = paging.machine().growth();
        growth.is_some_and(|(resident, limit)| self.near_limit.look(resident, limit, headroom_max(limit)))
    }

    fn count(&self) -> SampleCount {
        let watched = self.peeks.iter().filter(|peek| **peek != Peek::Asked).count() as u32;
        let touched = self.peeks.iter().filter(|peek| **peek == Peek::Touched).count() as u32;
        SampleCount { watched, touched }
    }

    /// Adds what the machine does not count.
    pub fn add_to(&self, stats: &mut Stats) {
        stats.add(Metric::WatchZaps, self.zaps);
        stats.add(Metric::WatchedUses, self.uses);
        stats.add(Metric::WatchZapUs, self.zap_us);
        let watched = self.peeks.iter().filter(|peek| **peek == Peek::Watched).count();
        stats.add(Metric::Watched, watched as u64);
    }
}
