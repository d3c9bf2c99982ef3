//! Sampled pages of one VM, and the time of its miss-ratio curve.
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

mod period;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::policy::SampleCount;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::units::PageIdx;
use pagoda_sys::pagemap::Pagemap;

/// How old a published curve may be: it changes slowly, and each is a copy.
const CURVE_EVERY: Duration = Duration::from_secs(10);

/// What became of a sampled page of an unarmed VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peek {
    /// Not known to be unmapped.
    Asked,
    Watched,
    Touched,
}

/// What is sampled.
#[derive(Debug, Default)]
pub struct Sampling {
    pages: Vec<PageIdx>,
    period: u64,
    /// Of an unarmed VM: one for each of `pages`.
    peeks: Vec<Peek>,
    /// Counts what `peeks` was begun for: an answer to an earlier zap says nothing about it.
    round: u32,
    pagemap: Option<Pagemap>,
    /// The ages' (`super::ages`) are counted here, too.
    pub(super) zaps: u64,
    pub(super) uses: u64,
    pub(super) zap_us: u64,
    /// The curve, and when it was taken.
    curve: Option<(Arc<Curve>, Instant)>,
}

impl Sampling {
    /// Periods begun.
    pub fn period(&self) -> u64 {
        self.period
    }

    fn count(&self) -> SampleCount {
        let watched = self.peeks.iter().filter(|peek| **peek != Peek::Asked).count() as u32;
        let touched = self.peeks.iter().filter(|peek| **peek == Peek::Touched).count() as u32;
        SampleCount { watched, touched }
    }
}
