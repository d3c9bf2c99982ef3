//! The pages that a miss-ratio curve follows, and what was seen of them. See `fault/curve.rs`.

use std::collections::VecDeque;

use crate::policy::mrc::Mrc;
use crate::units::{PageCount, PageIdx};

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
pub const TURN_MS: u64 = 250;
/// A page that waits longer than this for its turn is used unseen meanwhile. If such a queue does not shrink within this
/// time either, fewer pages are followed: when watching begins, what is used every second comes all at once.
pub const WAIT_MS: u64 = 1000;
/// Pages looked at in one turn when pages are chosen, one hash each: faults wait meanwhile.
const CHOOSE_PAGES: u64 = 1 << 17;
/// Old uses count half after so long: longer than a phase of a program, shorter than a day's course.
pub const DECAY_MS: u64 = 300_000;
/// A curve that is younger fades each time its age has doubled from here on.
pub const YOUNG_MS: u64 = 8000;
/// Which pages are chosen need not be secret, and is the same after a restart.
const SEED: u64 = 0x70_61_67_6f_64_61;

/// The curve of one VM.
#[derive(Debug)]
pub struct CurveWatch {
    pub mrc: Mrc,
    memory: u64,
    /// Pages before this one were looked at.
    chosen_to: u64,
    /// Pages that are watched in turn.
    chosen: Vec<PageIdx>,
    pages: u64,
    /// Used, in that order, to be watched again.
    pub again: VecDeque<PageIdx>,
    pub turn_ms: u64,
    /// The queue was last compared with its length so long ago, and was so long.
    compared: (u64, usize),
    pub began_ms: u64,
    /// When it fades next; 0 before its first turn.
    pub decay_ms: u64,
    /// Pages read from swap: while narrow headroom was kept, and while wide.
    pub read: [f64; 2],
    pub observed_s: f64,
}

impl CurveWatch {
    /// Begins with no page chosen and no use seen.
    pub fn new(memory: PageCount) -> CurveWatch {
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
    pub fn turn(&mut self, ms: u64, out: &mut Vec<PageIdx>) {
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
    pub fn choose(&mut self, out: &mut Vec<PageIdx>) {
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
