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

use std::ops::Range as Span;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_abi::attach::{Packet, RANGES_MAX, Range, Ranges};
use pagoda_core::fault::Event;
use pagoda_core::policy::SampleCount;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_sys::pagemap::Pagemap;

use super::Engine;
use super::agent::Asked;
use super::ages::Ages;

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

impl Engine {
    /// Ends the sampling period and begins the next with these pages.
    pub(super) fn start_sample(&mut self, mut pages: Vec<PageIdx>) {
        let total = self.space.chunks().pages().0;
        pages.retain(|page| page.0 < total);
        self.sampling.period += 1;
        self.sampling.pages = pages;
        self.restart_sample();
        self.settle();
        self.publish();
    }

    /// Switches the miss-ratio curve on, anew, or off.
    pub(super) fn watch_curve(&mut self, on: bool) {
        self.machine.watch_curve(on);
        self.stop_ages();
        self.ages = on.then(|| Ages::new(self.space.chunks().pages()));
        self.sampling.curve = None;
    }

    /// The curve as published.
    pub(super) fn current_curve(&mut self) -> Option<Arc<Curve>> {
        if self.sampling.curve.as_ref().is_none_or(|(_, taken)| taken.elapsed() >= CURVE_EVERY) {
            let of_ages = if self.machine.is_armed() { None } else { self.curve_of_ages() };
            let curve = of_ages.or_else(|| self.machine.curve());
            self.sampling.curve = curve.map(|curve| (Arc::new(curve), Instant::now()));
        }
        self.sampling.curve.as_ref().map(|(curve, _)| Arc::clone(curve))
    }

    /// Watches the period's pages from now on: by faults if the VM is armed, else by its page tables.
    pub(super) fn restart_sample(&mut self) {
        self.sampling.round = self.sampling.round.wrapping_add(1);
        self.sampling.peeks.clear();
        if self.machine.is_armed() {
            self.stop_ages();
            self.machine.start_sample(&self.sampling.pages);
            self.events.push_back(Event::Tick);
            return;
        }
        // What is unmapped next may share a huge mapping with what is followed.
        self.look_at_ages();
        self.sampling.peeks = vec![Peek::Asked; self.sampling.pages.len()];
        for first in (0..self.sampling.pages.len()).step_by(RANGES_MAX) {
            let last = (first + RANGES_MAX).min(self.sampling.pages.len());
            let round = self.sampling.round;
            self.sampling.zaps += (last - first) as u64;
            self.zap_pages(Asked::Peek { round, pages: first..last, at: Instant::now() });
        }
    }

    /// Something else than a use has mapped these pages: what is watched of them is unmapped again, and not watched until then.
    pub(super) fn unmap_sample(&mut self, is_mapped: impl Fn(PageIdx) -> bool) {
        let round = self.sampling.round;
        for nth in 0..self.sampling.peeks.len() {
            if self.sampling.peeks[nth] == Peek::Watched && is_mapped(self.sampling.pages[nth]) {
                self.sampling.peeks[nth] = Peek::Asked;
                self.sampling.zaps += 1;
                self.zap_pages(Asked::Peek { round, pages: nth..nth + 1, at: Instant::now() });
            }
        }
    }

    /// Has the agent unmap single pages.
    pub(super) fn zap_pages(&mut self, asked: Asked) {
        let mut ranges = Ranges::default();
        let mut add = |page: PageIdx| {
            let place = self.space.place_page(page);
            ranges.push(Range { addr: place.addr, len: PAGE_SIZE });
        };
        match &asked {
            Asked::Peek { pages, .. } => self.sampling.pages[pages.clone()].iter().for_each(|page| add(*page)),
            Asked::Age { pages, .. } => pages.iter().for_each(|page| add(*page)),
            _ => self.machine.watch_zaps().for_each(add),
        }
        let seq = self.next_seq();
        self.owes(seq, asked);
        self.page_ins_first();
        self.tell_agent(&Packet::Zap { seq, ranges });
    }

    /// Whether what is asked for still matters: an agent that comes back is asked for nothing else.
    pub(super) fn still_wanted(&self, asked: &Asked) -> bool {
        match asked {
            Asked::Peek { round, .. } => *round == self.sampling.round,
            // Another ticket's answer would be ignored anyway.
            Asked::Watch { ticket, .. } => *ticket == self.machine.watch_ticket(),
            Asked::Chunks(_) | Asked::Age { .. } => true,
        }
    }

    pub(super) fn watch_zapped(&mut self, ticket: u32, at: Instant, done: bool) {
        self.sampling.zap_us += at.elapsed().as_micros() as u64;
        self.apply(Event::PagesZapped { ticket, done });
    }

    pub(super) fn peek_zapped(&mut self, round: u32, pages: Span<usize>, at: Instant, done: bool) {
        self.sampling.zap_us += at.elapsed().as_micros() as u64;
        if done && round == self.sampling.round {
            self.sampling.peeks[pages].fill(Peek::Watched);
        }
    }

    /// Looks which pages of an unarmed VM were used, and says what is known of the period's.
    pub(super) fn look_at_sample(&mut self) -> SampleCount {
        if self.machine.is_armed() {
            return self.machine.sample_count();
        }
        for nth in 0..self.sampling.peeks.len() {
            if self.sampling.peeks[nth] != Peek::Watched {
                continue;
            }
            self.sampling.peeks[nth] = match self.is_mapped(self.sampling.pages[nth]) {
                Some(true) => {
                    self.sampling.uses += 1;
                    Peek::Touched
                }
                Some(false) => Peek::Watched,
                // It cannot be told: not watched.
                None => Peek::Asked,
            };
        }
        self.sampling.count()
    }

    /// Whether the VMM has a page-table entry for this page; `None` if it cannot be told.
    pub(super) fn is_mapped(&mut self, page: PageIdx) -> Option<bool> {
        let addr = self.space.place_page(page).addr;
        self.pagemap()?.is_present(addr).ok()
    }

    /// The VMM's page tables.
    pub(super) fn pagemap(&mut self) -> Option<&Pagemap> {
        if self.sampling.pagemap.is_none() {
            self.sampling.pagemap = Pagemap::open(self.follow.pid()).ok();
        }
        self.sampling.pagemap.as_ref()
    }

    /// Adds what the machine does not count.
    pub(super) fn count_sampling(&self, stats: &mut Stats) {
        stats.add(Metric::WatchZaps, self.sampling.zaps);
        stats.add(Metric::WatchedUses, self.sampling.uses);
        stats.add(Metric::WatchZapUs, self.sampling.zap_us);
        let watched = self.sampling.peeks.iter().filter(|peek| **peek == Peek::Watched).count();
        stats.add(Metric::Watched, watched as u64);
    }
}
