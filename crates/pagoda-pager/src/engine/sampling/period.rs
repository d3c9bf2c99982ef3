//! Periods of samples: begins them, looks at their pages, counts.

use std::ops::Range as Span;
use std::sync::Arc;
use std::time::Instant;

use pagoda_abi::attach::{RANGES_MAX, Range, Ranges};
use pagoda_core::fault::Event;
use pagoda_core::policy::SampleCount;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_sys::pagemap::Pagemap;

use super::{CURVE_EVERY, Peek};
use crate::engine::Engine;
use crate::engine::ages::Ages;
use crate::engine::link::agent::Asked;

impl Engine {
    /// Ends the sampling period and begins the next with these pages.
    pub(in crate::engine) fn start_sample(&mut self, mut pages: Vec<PageIdx>) {
        let total = self.paging.space().chunks().pages().0;
        pages.retain(|page| page.0 < total);
        self.sampling.period += 1;
        self.sampling.pages = pages;
        self.restart_sample();
        self.settle();
        self.publish();
    }

    /// Switches the miss-ratio curve on, anew, or off.
    pub(in crate::engine) fn watch_curve(&mut self, on: bool) {
        self.paging.watch_curve(on);
        self.stop_ages();
        self.ages = on.then(|| Ages::new(self.paging.space().chunks().pages()));
        self.sampling.curve = None;
    }

    /// The curve as published.
    pub(in crate::engine) fn current_curve(&mut self) -> Option<Arc<Curve>> {
        if self.sampling.curve.as_ref().is_none_or(|(_, taken)| taken.elapsed() >= CURVE_EVERY) {
            let of_ages = if self.paging.machine().is_armed() { None } else { self.curve_of_ages() };
            let curve = of_ages.or_else(|| self.paging.machine().curve());
            self.sampling.curve = curve.map(|curve| (Arc::new(curve), Instant::now()));
        }
        self.sampling.curve.as_ref().map(|(curve, _)| Arc::clone(curve))
    }

    /// Watches the period's pages from now on: by faults if the VM is armed, else by its page tables.
    pub(in crate::engine) fn restart_sample(&mut self) {
        self.sampling.round = self.sampling.round.wrapping_add(1);
        self.sampling.peeks.clear();
        if self.paging.machine().is_armed() {
            self.stop_ages();
            self.paging.start_sample(&self.sampling.pages);
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
    pub(in crate::engine) fn unmap_sample(&mut self, is_mapped: impl Fn(PageIdx) -> bool) {
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
    pub(in crate::engine) fn zap_pages(&mut self, asked: Asked) {
        let mut ranges = Ranges::default();
        let mut add = |page: PageIdx| {
            let place = self.paging.space().place_page(page);
            ranges.push(Range { addr: place.addr, len: PAGE_SIZE });
        };
        match &asked {
            Asked::Peek { pages, .. } => self.sampling.pages[pages.clone()].iter().for_each(|page| add(*page)),
            Asked::Age { pages, .. } => pages.iter().for_each(|page| add(*page)),
            _ => self.paging.machine().watch_zaps().for_each(add),
        }
        self.page_ins_first();
        self.link.agent.zap(&mut self.ring, ranges, asked);
    }

    /// Whether what is asked for still matters: an agent that comes back is asked for nothing else.
    pub(in crate::engine) fn still_wanted(&self, asked: &Asked) -> bool {
        match asked {
            Asked::Peek { round, .. } => *round == self.sampling.round,
            // Another ticket's answer would be ignored anyway.
            Asked::Watch { ticket, .. } => *ticket == self.paging.machine().watch_ticket(),
            Asked::Chunks(_) | Asked::Age { .. } => true,
        }
    }

    pub(in crate::engine) fn watch_zapped(&mut self, ticket: u32, at: Instant, done: bool) {
        self.sampling.zap_us += at.elapsed().as_micros() as u64;
        self.apply(Event::PagesZapped { ticket, done });
    }

    pub(in crate::engine) fn peek_zapped(&mut self, round: u32, pages: Span<usize>, at: Instant, done: bool) {
        self.sampling.zap_us += at.elapsed().as_micros() as u64;
        if done && round == self.sampling.round {
            self.sampling.peeks[pages].fill(Peek::Watched);
        }
    }

    /// Looks which pages of an unarmed VM were used, and says what is known of the period's.
    pub(in crate::engine) fn look_at_sample(&mut self) -> SampleCount {
        if self.paging.machine().is_armed() {
            return self.paging.machine().sample_count();
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
    pub(in crate::engine) fn is_mapped(&mut self, page: PageIdx) -> Option<bool> {
        let addr = self.paging.space().place_page(page).addr;
        self.pagemap()?.is_present(addr).ok()
    }

    /// The VMM's page tables.
    pub(in crate::engine) fn pagemap(&mut self) -> Option<&Pagemap> {
        if self.sampling.pagemap.is_none() {
            self.sampling.pagemap = Pagemap::open(self.follow.pid()).ok();
        }
        self.sampling.pagemap.as_ref()
    }

    /// Adds what the machine does not count.
    pub(in crate::engine) fn count_sampling(&self, stats: &mut Stats) {
        stats.add(Metric::WatchZaps, self.sampling.zaps);
        stats.add(Metric::WatchedUses, self.sampling.uses);
        stats.add(Metric::WatchZapUs, self.sampling.zap_us);
        let watched = self.sampling.peeks.iter().filter(|peek| **peek == Peek::Watched).count();
        stats.add(Metric::Watched, watched as u64);
    }
}
