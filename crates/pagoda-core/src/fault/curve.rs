//! Feeds the miss-ratio curve ([`crate::policy::mrc`]) of an armed VM.
//!
//! Some hundred pages chosen by hash are watched ([`super::watch`]), wherever they are: a use counts for all pages its page
//! stands for, at its distance among the watched ones. At first nobody knows when a page was used before; it is taken to be
//! when the curve began, so a young curve is too low, and fades quickly.
//!
//! After a use a page is watched again when its turn comes: with a bounded number of uses a second, in one zap each
//! [`TURN_MS`]. Uses of a page in between go unseen, and if pages waited long for their turn, their order would say nothing.
//! So when the queue grows, pages with the largest hash are left out for good; what was counted stays, for each use counts by the
//! rate of its time (SHARDS section 4.2).
//!
//! What is published is what this pager makes of those distances: chunks leave whole, and some room is kept free below the
//! cap ([`crate::policy::mrc::Curve::of_chunks`]).
//!
//! **Limits.** What moves within a turn is one distance, "small". An unarmed VM has no faults: until it is armed its curve
//! comes from ages ([`crate::policy::mrc::footprint`]).

use std::collections::VecDeque;

use crate::policy::mrc::{Curve, Mrc};
use crate::units::{PageCount, PageIdx};

use super::action::Now;
use super::machine::Machine;
use super::reclaim::headroom_at;
use super::watch::Purpose;

/// Chosen pages at first. A choice: steps of 0.1 % of the memory, as fine as the curve's.
const PAGES_MAX: u64 = 1024;
/// Fewer would make steps of more than 1 % of the memory.
const PAGES_MIN: u64 = 96;
/// What the curve may take of a core: with the sample of the working set, all watching stays below 0.5 %.
const CPU_US_PER_S: u64 = 4000;
/// What a use is taken to cost the daemon and the agent: its part of a zap, and its fault. Measured: 23 us in a busy host
/// (bench `sample --quick`, one round, 2026-11-22, 2 CPUs), and room for a slower one.
const USE_US: u64 = 40;
/// Uses a second, and so the fault budget.
const USES_PER_S: u64 = CPU_US_PER_S / USE_US;
/// Pages are watched again in turns of this length: one message to the agent each.
const TURN_MS: u64 = 250;
/// A page that waits longer than this for its turn is used unseen meanwhile. If such a queue does not shrink within this
/// time either, fewer pages are followed: when watching begins, what is used every second comes all at once.
const WAIT_MS: u64 = 1000;
/// Pages looked at in one turn when pages are chosen, one hash each: faults wait meanwhile.
const CHOOSE_PAGES: u64 = 1 << 17;
/// Old uses count half after so long: longer than a phase of a program, shorter than a day's course.
const DECAY_MS: u64 = 300_000;
/// A curve that is younger fades each time its age has doubled from here on.
const YOUNG_MS: u64 = 8000;
/// Which pages are chosen need not be secret, and is the same after a restart.
const SEED: u64 = 0x70_61_67_6f_64_61;

/// The curve of one VM.
#[derive(Debug)]
pub struct CurveWatch {
    mrc: Mrc,
    memory: u64,
    /// Pages before this one were looked at.
    chosen_to: u64,
    /// Pages that are watched in turn.
    chosen: Vec<PageIdx>,
    pages: u64,
    /// Used, in that order, to be watched again.
    again: VecDeque<PageIdx>,
    turn_ms: u64,
    /// The queue was last compared with its length so long ago, and was so long.
    compared: (u64, usize),
    began_ms: u64,
    /// When it fades next; 0 before its first turn.
    decay_ms: u64,
    /// Pages read from swap: while narrow headroom was kept, and while wide.
    read: [f64; 2],
    observed_s: f64,
}

impl CurveWatch {
    fn new(memory: PageCount) -> CurveWatch {
        // Chance may choose some more than wanted.
        let mut mrc = Mrc::new(memory, 2 * PAGES_MAX as usize, SEED);
        mrc.narrow(PAGES_MAX);
        CurveWatch {
            mrc,
            memory: memory.0,
            chosen_to: 0,
            chosen: Vec::with_capacity(2 * PAGES_MAX as usize),
            pages: PAGES_MAX,
            again: VecDeque::with_capacity(2 * PAGES_MAX as usize),
            turn_ms: 0,
            compared: (0, 0),
            began_ms: 0,
            decay_ms: 0,
            read: [0.0; 2],
            observed_s: 0.0,
        }
    }

    /// The VM was armed: nothing is hidden.
    pub fn restart(&mut self) {
        self.again.clear();
        self.chosen.clear();
        self.chosen_to = 0;
    }

    /// The next pages to watch: as many as the budget allows after `ms` milliseconds.
    fn turn(&mut self, ms: u64, out: &mut Vec<PageIdx>) {
        let budget = (USES_PER_S * ms).div_ceil(1000) as usize;
        let take = budget.min(self.again.len());
        out.extend(self.again.drain(..take).filter(|page| self.mrc.watches(*page)));
        let (since, before) = (self.compared.0 + ms, self.compared.1);
        if since < WAIT_MS {
            self.compared.0 = since;
            return;
        }
        self.compared = (0, self.again.len());
        if self.again.len() as u64 > USES_PER_S * WAIT_MS / 1000 && self.again.len() >= before {
            self.follow_less();
        }
    }

    fn follow_less(&mut self) {
        self.pages = (self.pages * 7 / 8).max(PAGES_MIN);
        self.mrc.narrow(self.pages);
        let mrc = &self.mrc;
        self.again.retain(|page| mrc.watches(*page));
        self.chosen.retain(|page| mrc.watches(*page));
        self.count_chosen();
    }

    /// Chooses pages of the next part of the memory, until all was looked at.
    fn choose(&mut self, out: &mut Vec<PageIdx>) {
        if self.chosen_to == self.memory {
            return;
        }
        let to = (self.chosen_to + CHOOSE_PAGES).min(self.memory);
        let first = self.chosen.len();
        self.chosen.extend((self.chosen_to..to).map(PageIdx).filter(|page| self.mrc.watches(*page)));
        out.extend(&self.chosen[first..]);
        self.chosen_to = to;
        self.count_chosen();
    }

    fn count_chosen(&mut self) {
        if self.chosen_to == self.memory {
            self.mrc.set_watched(self.chosen.len());
        }
    }
}

impl Machine {
    /// Switches the miss-ratio curve on, anew, or off.
    pub fn watch_curve(&mut self, on: bool) {
        self.watch.drop_all(Purpose::Curve);
        self.curve = on.then(|| Box::new(CurveWatch::new(self.config.chunks.pages())));
    }

    /// What each cap would have meant so far, in pages read from swap; `None` while it is off, or nothing was seen.
    pub fn curve(&self) -> Option<Curve> {
        let watch = self.curve.as_ref()?;
        let curve = watch.mrc.curve();
        let wide = watch.read[1] / (watch.read[0] + watch.read[1]).max(1.0);
        (curve.accesses() > 0.0).then(|| self.by_caps(&curve, wide).over(watch.observed_s))
    }

    /// The same while the VM is not armed, from its curve under LRU.
    pub fn curve_of(&self, lru: &Curve) -> Curve {
        self.by_caps(lru, 0.0)
    }

    /// What this pager makes of a curve under LRU, with the wide headroom kept for so much of the time.
    fn by_caps(&self, lru: &Curve, wide: f64) -> Curve {
        let memory = self.config.chunks.pages();
        lru.of_chunks(|cap| match cap >= memory {
            true => 0.0,
            false => headroom_at(cap.0, true) as f64 * wide + headroom_at(cap.0, false) as f64 * (1.0 - wide),
        })
    }

    /// A watched page of the curve was used.
    pub(super) fn note_curve_use(&mut self, page: PageIdx) {
        let c = self.chunk(page.chunk());
        let has_content = (c.ram | c.swap | c.shared).contains(page.index_in_chunk());
        let Some(curve) = &mut self.curve else { return };
        if has_content {
            curve.mrc.used_again(page);
        } else {
            // The guest had given it back, or never used it.
            curve.mrc.forget(page);
            curve.mrc.sampled(page);
        }
        if curve.mrc.watches(page) {
            curve.again.push_back(page);
        }
    }

    /// Pages came from swap.
    pub(super) fn note_read(&mut self, pages: u16) {
        let wide = usize::from(self.wide);
        if let Some(curve) = &mut self.curve {
            curve.read[wide] += f64::from(pages);
        }
    }

    pub(super) fn tick_curve(&mut self, now: Now) {
        let Some(curve) = &mut self.curve else { return };
        let waited = now.ms.saturating_sub(curve.turn_ms);
        if waited < TURN_MS {
            return;
        }
        curve.turn_ms = now.ms;
        if curve.decay_ms == 0 {
            (curve.began_ms, curve.decay_ms) = (now.ms, now.ms + YOUNG_MS);
        } else if now.ms >= curve.decay_ms {
            curve.mrc.decay();
            curve.read = curve.read.map(|pages| pages / 2.0);
            curve.observed_s /= 2.0;
            curve.decay_ms = now.ms + (now.ms - curve.began_ms).clamp(YOUNG_MS, DECAY_MS);
        }
        curve.observed_s += waited.min(WAIT_MS) as f64 / 1000.0;
        let mut pages = Vec::new();
        curve.turn(waited.min(WAIT_MS), &mut pages);
        curve.choose(&mut pages);
        self.watch.add(pages, Purpose::Curve);
    }
}
