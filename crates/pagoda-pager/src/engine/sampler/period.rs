//! Periods of samples: begins them, looks at their pages, counts.

use std::ops::Range as Span;
use std::sync::Arc;
use std::time::Instant;

use pagoda_abi::attach::{RANGES_MAX, Range, Ranges};
use pagoda_core::policy::SampleCount;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_sys::pagemap::Pagemap;

use super::ages::Ages;
use super::{CURVE_EVERY, Context, Peek, Sampler};
use crate::engine::broken::Broken;
use crate::engine::link::agent::Asked;
use crate::engine::paging::Paging;

impl Sampler {
    /// Ends the sampling period and begins the next with these pages. Those outside the VM are ignored.
    pub fn start_sample(&mut self, mut pages: Vec<PageIdx>, context: &mut Context<'_>) -> Result<(), Broken> {
        let total = context.paging.space().chunks().pages().0;
        pages.retain(|page| page.0 < total);
        self.period += 1;
        self.pages = pages;
        self.restart_sample(context)
    }

    /// Switches the miss-ratio curve on, anew, or off.
    pub fn watch_curve(&mut self, on: bool, context: &mut Context<'_>) {
        context.paging.watch_curve(on);
        self.stop_ages(context);
        self.ages = on.then(|| Ages::new(context.paging.space().chunks().pages()));
        self.curve = None;
    }

    /// The miss-ratio curve that the status shows, which is made anew from time to time.
    pub fn current_curve(&mut self, paging: &Paging) -> Option<Arc<Curve>> {
        if self.curve.as_ref().is_none_or(|(_, taken)| taken.elapsed() >= CURVE_EVERY) {
            let of_ages = if paging.machine().is_armed() { None } else { self.curve_of_ages(paging) };
            let curve = of_ages.or_else(|| paging.machine().curve());
            self.curve = curve.map(|curve| (Arc::new(curve), Instant::now()));
        }
        self.curve.as_ref().map(|(curve, _)| Arc::clone(curve))
    }

    /// Watches the period's pages from now on: by faults if the VM is armed, else by its page tables.
    pub fn restart_sample(&mut self, context: &mut Context<'_>) -> Result<(), Broken> {
        self.round = self.round.wrapping_add(1);
        self.peeks.clear();
        if context.paging.machine().is_armed() {
            self.stop_ages(context);
            context.paging.start_sample(&self.pages);
            return Ok(());
        }
        // What is unmapped next may share a huge mapping with what is followed.
        self.look_at_ages(context.paging);
        self.peeks = vec![Peek::Asked; self.pages.len()];
        for first in (0..self.pages.len()).step_by(RANGES_MAX) {
            let last = (first + RANGES_MAX).min(self.pages.len());
            let round = self.round;
            self.zaps += (last - first) as u64;
            self.zap_pages(Asked::Peek { round, pages: first..last, at: Instant::now() }, context)?;
        }
        Ok(())
    }

    /// Something else than a use has mapped these pages: what is watched of them is unmapped again, and not watched
    /// until then.
    pub(super) fn unmap_sample(
        &mut self,
        is_mapped: impl Fn(PageIdx) -> bool,
        context: &mut Context<'_>,
    ) -> Result<(), Broken> {
        let round = self.round;
        for nth in 0..self.peeks.len() {
            if self.peeks[nth] == Peek::Watched && is_mapped(self.pages[nth]) {
                self.peeks[nth] = Peek::Asked;
                self.zaps += 1;
                self.zap_pages(Asked::Peek { round, pages: nth..nth + 1, at: Instant::now() }, context)?;
            }
        }
        Ok(())
    }

    /// Has the agent unmap single pages. Page-ins are submitted before.
    pub fn zap_pages(&self, asked: Asked, context: &mut Context<'_>) -> Result<(), Broken> {
        let Context { paging, agent, ring } = context;
        let mut ranges = Ranges::default();
        let mut add = |page: PageIdx| {
            let location = paging.space().locate_page(page);
            ranges.push(Range { addr: location.addr, len: PAGE_SIZE });
        };
        match &asked {
            Asked::Peek { pages, .. } => self.pages[pages.clone()].iter().for_each(|page| add(*page)),
            Asked::Age { pages, .. } => pages.iter().for_each(|page| add(*page)),
            _ => paging.machine().watch_zaps().for_each(add),
        }
        paging.submit_page_ins(ring)?;
        agent.zap(ring, ranges, asked);
        Ok(())
    }

    /// Whether what is asked for still matters: an agent that comes back is asked for nothing else.
    pub fn still_wants(&self, asked: &Asked, paging: &Paging) -> bool {
        match asked {
            Asked::Peek { round, .. } => *round == self.round,
            // Another ticket's answer would be ignored anyway.
            Asked::Watch { ticket, .. } => *ticket == paging.machine().watch_ticket(),
            Asked::Chunks(_) | Asked::Age { .. } => true,
        }
    }

    /// The agent has answered a zap of single pages that was asked for then.
    pub fn note_zap(&mut self, asked_at: Instant) {
        self.zap_us += asked_at.elapsed().as_micros() as u64;
    }

    /// It has unmapped these of the period's pages, if it is `done`.
    pub fn complete_peek(&mut self, round: u32, pages: Span<usize>, done: bool) {
        if done && round == self.round {
            self.peeks[pages].fill(Peek::Watched);
        }
    }

    /// Looks which pages of an unarmed VM were used, and says what is known of the period's.
    pub fn look_at_sample(&mut self, paging: &Paging) -> SampleCount {
        if paging.machine().is_armed() {
            return paging.machine().sample_count();
        }
        for nth in 0..self.peeks.len() {
            if self.peeks[nth] != Peek::Watched {
                continue;
            }
            self.peeks[nth] = match self.is_mapped(self.pages[nth], paging) {
                Some(true) => {
                    self.uses += 1;
                    Peek::Touched
                }
                Some(false) => Peek::Watched,
                // It cannot be told: not watched.
                None => Peek::Asked,
            };
        }
        self.count()
    }

    /// Whether the VMM has a page-table entry for this page; `None` if it cannot be told.
    pub(super) fn is_mapped(&mut self, page: PageIdx, paging: &Paging) -> Option<bool> {
        let addr = paging.space().locate_page(page).addr;
        self.pagemap()?.is_present(addr).ok()
    }

    /// The VMM's page tables.
    pub(super) fn pagemap(&mut self) -> Option<&Pagemap> {
        if self.pagemap.is_none() {
            self.pagemap = Pagemap::open(self.pid).ok();
        }
        self.pagemap.as_ref()
    }
}
