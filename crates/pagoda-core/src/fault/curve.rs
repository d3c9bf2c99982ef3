//! Feeds the miss-ratio curve ([`crate::policy::mrc`]) of an armed VM.
//!
//! Two inputs that exclude each other. Some hundred pages chosen by hash are watched ([`super::watch`]); a use that finds its
//! page in DRAM counts for all pages it stands for, at its distance among the watched ones. Every page that comes from swap
//! counts as itself, at the distance that its ghost tells, whether it was asked for or came along with its chunk: so
//! [`Curve::misses`] is pages read from swap over the time observed.
//!
//! After a use a page is watched again when its turn comes: with a bounded number of uses a second, in one zap each
//! [`TURN_MS`]. Uses of a page in between go unseen, and if pages waited long for their turn, their order would say nothing.
//! So when the queue grows, pages with the largest hash are left out for good; what was counted stays, for each use counts by the
//! rate of its time (SHARDS section 4.2).
//!
//! **Limits.** What moves within a turn is one distance, "small". Replacement is by chunks and approximate: what a cap will
//! do is close to LRU, not LRU. An unarmed VM has no faults: its curve begins when it is armed.

use std::collections::VecDeque;

use crate::bits::PageSet;
use crate::policy::mrc::ghost::{Ghost, Ghosts};
use crate::policy::mrc::{Curve, Mrc};
use crate::units::{ChunkIdx, PageCount, PageIdx};

use super::action::Now;
use super::machine::Machine;
use super::watch::Purpose;

/// Chosen pages at first. A choice: steps of 0.1 % of the memory, as fine as the curve's.
const PAGES_MAX: u64 = 1024;
/// Fewer would make steps of more than 1 % of the memory.
const PAGES_MIN: u64 = 96;
/// What the curve may take of a core.
const CPU_US_PER_S: u64 = 2500;
/// What a use is taken to cost the daemon and the agent: its part of a zap, and its fault. Measured: 23 us in a busy host
/// (bench `sample --quick`, one round, 2026-11-22, 2 CPUs), and room for a slower one.
const USE_US: u64 = 40;
/// Uses a second, and so the fault budget.
const USES_PER_S: u64 = CPU_US_PER_S / USE_US;
/// Pages are watched again in turns of this length: one message to the agent each.
const TURN_MS: u64 = 250;
/// A page that waits longer than this for its turn is used unseen meanwhile: fewer pages are followed then.
const WAIT_MS: u64 = 1000;
/// Pages looked at in one turn when pages are chosen, one hash each: faults wait meanwhile.
const CHOOSE_PAGES: u64 = 1 << 17;
/// Old uses count half after so long: longer than a phase of a program, shorter than a day's course.
const DECAY_MS: u64 = 300_000;
/// Which pages are chosen need not be secret, and is the same after a restart.
const SEED: u64 = 0x70_61_67_6f_64_61;

/// The curve of one VM.
#[derive(Debug)]
pub struct CurveWatch {
    mrc: Mrc,
    ghosts: Ghosts,
    /// Of each page that left while the curve was on.
    left: Vec<Option<Ghost>>,
    /// Pages before this one were looked at.
    chosen_to: u64,
    pages: u64,
    /// Used, in that order, to be watched again.
    again: VecDeque<PageIdx>,
    turn_ms: u64,
    decay_ms: u64,
}

impl CurveWatch {
    fn new(memory: PageCount) -> CurveWatch {
        let mut mrc = Mrc::new(memory, PAGES_MAX as usize, SEED);
        mrc.narrow(PAGES_MAX);
        CurveWatch {
            mrc,
            ghosts: Ghosts::new(memory),
            left: vec![None; memory.0 as usize],
            chosen_to: 0,
            pages: PAGES_MAX,
            again: VecDeque::with_capacity(2 * PAGES_MAX as usize),
            turn_ms: 0,
            decay_ms: 0,
        }
    }

    pub fn bytes(&self) -> usize {
        self.left.capacity() * size_of::<Option<Ghost>>()
    }

    /// The VM was armed: nothing is hidden, nothing has left.
    pub fn restart(&mut self) {
        self.left.fill(None);
        self.again.clear();
        self.chosen_to = 0;
    }

    /// The next pages to watch: as many as the budget allows after `ms` milliseconds.
    fn turn(&mut self, ms: u64, out: &mut Vec<PageIdx>) {
        let budget = (USES_PER_S * ms).div_ceil(1000) as usize;
        let take = budget.min(self.again.len());
        out.extend(self.again.drain(..take).filter(|page| self.mrc.watches(*page)));
        let memory = self.left.len() as u64;
        let to = (self.chosen_to + CHOOSE_PAGES).min(memory);
        out.extend((self.chosen_to..to).map(PageIdx).filter(|page| self.mrc.watches(*page)));
        self.chosen_to = to;
        if self.again.len() as u64 > USES_PER_S * WAIT_MS / 1000 && self.pages > PAGES_MIN {
            self.pages = (self.pages * 3 / 4).max(PAGES_MIN);
            self.mrc.narrow(self.pages);
            let mrc = &self.mrc;
            self.again.retain(|page| mrc.watches(*page));
        }
    }
}

impl Machine {
    /// Switches the miss-ratio curve on, anew, or off. Allocates 8 bytes a page.
    pub fn watch_curve(&mut self, on: bool) {
        self.watch.drop_all(Purpose::Curve);
        self.curve = on.then(|| Box::new(CurveWatch::new(self.config.chunks.pages())));
    }

    /// The curve so far; `None` while it is off, or nothing was seen.
    pub fn curve(&self) -> Option<Curve> {
        let curve = self.curve.as_ref()?.mrc.curve();
        (curve.accesses() > 0.0).then_some(curve)
    }

    /// A watched page of the curve was used.
    pub(super) fn note_curve_use(&mut self, page: PageIdx) {
        let in_swap = self.chunk(page.chunk()).swapped().contains(page.index_in_chunk());
        let Some(curve) = &mut self.curve else { return };
        if !in_swap {
            curve.mrc.sampled(page);
        }
        // Else it counts when it arrives.
        if curve.mrc.watches(page) {
            curve.again.push_back(page);
        }
    }

    /// Pages left DRAM for swap.
    pub(super) fn note_left(&mut self, chunk: ChunkIdx, pages: PageSet) {
        let Some(curve) = &mut self.curve else { return };
        for page in pages.iter().map(|index| chunk.page(index)) {
            let ghost = curve.ghosts.evict();
            // One that was given back meanwhile.
            if let Some(old) = curve.left[page.0 as usize].replace(ghost) {
                curve.ghosts.forget(old);
            }
        }
    }

    /// Pages came from swap. Those of a chunk left together: the first one's distance is that of all.
    pub(super) fn note_came(&mut self, chunk: ChunkIdx, pages: PageSet) {
        let Some(curve) = &mut self.curve else { return };
        let resident = PageCount(self.resident);
        let mut distance = None;
        for page in pages.iter().map(|index| chunk.page(index)) {
            let Some(ghost) = curve.left[page.0 as usize].take() else { continue };
            let distance = *distance.get_or_insert_with(|| curve.ghosts.distance(ghost, resident));
            curve.ghosts.forget(ghost);
            curve.mrc.refault(page, distance);
        }
    }

    pub(super) fn tick_curve(&mut self, now: Now) {
        let Some(curve) = &mut self.curve else { return };
        let waited = now.ms.saturating_sub(curve.turn_ms);
        if waited < TURN_MS {
            return;
        }
        curve.turn_ms = now.ms;
        if now.ms.saturating_sub(curve.decay_ms) >= DECAY_MS {
            if curve.decay_ms > 0 {
                curve.mrc.decay();
            }
            curve.decay_ms = now.ms.max(1);
        }
        let mut pages = Vec::new();
        curve.turn(waited.min(WAIT_MS), &mut pages);
        self.watch.add(pages, Purpose::Curve);
    }
}
