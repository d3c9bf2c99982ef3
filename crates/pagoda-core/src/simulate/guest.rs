//! A guest as numbers: how many of its pages are of which kind, step by step.
//!
//! Pages are not told apart one by one; a day of a hundred VMs would have 10^13 accesses. What the policy sees of a guest
//! are counts, and counts are what is simulated:
//!
//! | | in DRAM | not in DRAM |
//! |---|---|---|
//! | the working set | `active_in` | `active_out` (swap) |
//! | content not in use: cache, idle programs | `idle_in` | `idle_out` (swap) |
//! | touched, but zero: free memory of the guest | `zero_in` | `zero_out` (a hole) |
//! | never touched, or given back | | `untouched` |
//! | in the balloon | | `balloon` |
//!
//! Replacement is nearly right: one page in twenty that leaves is taken from the working set. A working set grows into zero
//! pages first, then into untouched ones, then into the guest's own cache.

use super::scenario::{Boot, Phase, VmScript};
use crate::chance::{Chance, mix};
use crate::policy::SampleCount;
use crate::units::{PageCount, PageIdx};

/// One page in so many that leave DRAM was in use after all: the chunk queues take chunks, in which hot and cold mix.
const MISJUDGED: u64 = 20;

/// Each page of a guest counts under one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    pub active_in: PageCount,
    pub active_out: PageCount,
    pub idle_in: PageCount,
    pub idle_out: PageCount,
    pub zero_in: PageCount,
    pub zero_out: PageCount,
    pub untouched: PageCount,
    pub balloon: PageCount,
}

impl Kinds {
    /// Counts the pages in DRAM.
    pub fn resident(&self) -> PageCount {
        self.active_in + self.idle_in + self.zero_in
    }

    /// Pages whose content is in swap alone.
    pub fn swapped(&self) -> PageCount {
        self.active_out + self.idle_out
    }

    /// Counts the working set, in DRAM and in swap.
    pub fn active(&self) -> PageCount {
        self.active_in + self.active_out
    }

    /// Counts all pages, which is the guest's memory.
    pub fn all(&self) -> PageCount {
        self.resident() + self.swapped() + self.zero_out + self.untouched + self.balloon
    }
}

/// The totals say what happened in the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Pages read from swap.
    pub pages_in: u64,
    /// Pages written to swap.
    pub pages_out: u64,
    /// Zero pages that left without a write, by page-out or by the search for them.
    pub zero_dropped: u64,
    /// Seconds of work done, a second without a fault being one.
    pub work_s: f64,
    /// Milliseconds in which it had work to do.
    pub busy_ms: u64,
    /// The policy kept it stopped for so many milliseconds.
    pub blocked_ms: u64,
    /// Milliseconds in which the guest had less memory than its working set, so that it had to swap by itself.
    pub short_ms: u64,
}

/// A guest is its counts of pages, and what it does with them.
#[derive(Clone, Debug)]
pub struct Guest {
    pub kinds: Kinds,
    pub totals: Totals,
    boot: Boot,
    booted: PageCount,
    /// Positions of the sampled pages in an order in which the working set comes first, ascending.
    sample: Vec<u64>,
    /// Different pages touched since the sample was drawn.
    reach: u64,
    chance: Chance,
    /// The part of a fault that its touches have made since the last whole one.
    faults_due: f64,
    /// Work of the last step, 0 to 1.
    pub speed: f64,
}

/// A part of virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The step begins at this time.
    pub from_ms: u64,
    /// How long it takes, a second at most.
    pub ms: u64,
}

impl Step {
    /// Gives the time at which the step ends.
    pub fn end_ms(&self) -> u64 {
        self.from_ms + self.ms
    }

    /// What `per_second` makes of this step. The parts of a second sum up to the whole.
    pub fn part(&self, per_second: PageCount) -> PageCount {
        let until = |ms: u64| u128::from(per_second.0) * u128::from(ms) / 1000;
        PageCount((until(self.end_ms()) - until(self.from_ms)) as u64)
    }

    fn seconds(&self) -> f64 {
        self.ms as f64 / 1000.0
    }
}

/// What a guest may take in a step.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The limits hold in this step.
    pub step: Step,
    /// Pages in DRAM the engine lets it have.
    pub limit: PageCount,
    /// Free pages of the host.
    pub free: PageCount,
    /// Reads from swap in a second.
    pub page_in: PageCount,
    /// Writes to swap in a second.
    pub page_out: PageCount,
    /// Each fault takes so many microseconds.
    pub fault_us: u64,
}

/// Moves as much of `wanted` as there is; how much that was.
fn shift(from: &mut PageCount, to: &mut PageCount, wanted: PageCount) -> PageCount {
    let moved = wanted.min(*from);
    *from -= moved;
    *to += moved;
    moved
}

/// `part / whole` of `pages`, rounded to the nearest.
fn share(pages: PageCount, part: PageCount, whole: PageCount) -> PageCount {
    if whole == PageCount::ZERO {
        return PageCount::ZERO;
    }
    let nearest = (u128::from(pages.0) * u128::from(part.0) + u128::from(whole.0 / 2)) / u128::from(whole.0);
    PageCount(nearest as u64)
}

impl Guest {
    /// A guest that was just switched on.
    pub fn new(script: &VmScript, seed: u64) -> Guest {
        Guest {
            kinds: Kinds { untouched: script.settings.memory, ..Kinds::default() },
            totals: Totals::default(),
            boot: script.boot,
            booted: PageCount::ZERO,
            sample: Vec::new(),
            reach: 0,
            chance: Chance::new(seed),
            faults_due: 0.0,
            speed: 1.0,
        }
    }

    /// Pages were chosen to be watched.
    pub fn watch(&mut self, pages: &[PageIdx]) {
        // Which pages a guest uses changes over time, and they are strewn over its memory: a new order for each sample.
        let order = self.chance.draw();
        let memory = self.kinds.all().0;
        let position = |page: &PageIdx| ((u128::from(mix(page.0 ^ order)) * u128::from(memory)) >> 64) as u64;
        self.sample = pages.iter().map(position).collect();
        self.sample.sort_unstable();
        self.reach = 0;
    }

    /// Counts how many of the watched pages were touched.
    pub fn sample_count(&self) -> SampleCount {
        let touched = self.sample.partition_point(|position| *position < self.reach);
        SampleCount { watched: self.sample.len() as u32, touched: touched as u32 }
    }

    /// It still touches what its boot touches.
    pub fn is_booting(&self) -> bool {
        self.booted < self.boot.touches
    }

    /// A step in which the guest runs.
    pub fn run(&mut self, phase: Option<Phase>, reports_free: bool, limits: &Limits) {
        let mut room = limits.free;
        if self.is_booting() {
            self.boot_on(&mut room, limits);
            self.speed = 0.0;
            return;
        }
        let Some(phase) = phase else {
            self.speed = 1.0;
            return;
        };
        self.resize(phase.active, reports_free, &mut room, limits);
        if let Some(touched) = phase.touched {
            self.hold(touched, &mut room, limits);
        }
        self.work(&phase, &mut room, limits);
    }

    /// Makes room for more pages in DRAM, at the cost of its own where the limit is reached. How many there is room for.
    fn room(&mut self, wanted: PageCount, room: PageCount, limits: &Limits) -> PageCount {
        let over = (self.kinds.resident() + wanted).saturating_sub(limits.limit);
        if over > PageCount::ZERO {
            self.page_out(over.min(limits.step.part(limits.page_out)));
        }
        wanted.min(limits.limit.saturating_sub(self.kinds.resident())).min(room)
    }

    fn boot_on(&mut self, room: &mut PageCount, limits: &Limits) {
        let wanted = limits.step.part(self.boot.rate).min(self.boot.touches - self.booted);
        let wanted = wanted.min(self.kinds.untouched + self.kinds.zero_out);
        let granted = self.room(wanted, *room, limits);
        let fresh = shift(&mut self.kinds.untouched, &mut self.kinds.zero_in, granted);
        shift(&mut self.kinds.zero_out, &mut self.kinds.zero_in, granted - fresh);
        *room -= granted.min(*room);
        self.reach += granted.0;
        // A balloon that took untouched memory leaves less to touch.
        let none_left = self.kinds.untouched + self.kinds.zero_out == PageCount::ZERO;
        self.booted = if none_left { self.boot.touches } else { self.booted + granted };
    }

    /// The working set becomes as large as the phase wants, as far as there is memory for it.
    fn resize(&mut self, wanted: PageCount, reports_free: bool, room: &mut PageCount, limits: &Limits) {
        let active = self.kinds.active();
        if active > wanted {
            let drop = active - wanted;
            let from_out = share(drop, self.kinds.active_out, active).min(self.kinds.active_out);
            let kinds = &mut self.kinds;
            if reports_free {
                shift(&mut kinds.active_out, &mut kinds.untouched, from_out);
                shift(&mut kinds.active_in, &mut kinds.untouched, drop - from_out);
            } else {
                shift(&mut kinds.active_out, &mut kinds.idle_out, from_out);
                shift(&mut kinds.active_in, &mut kinds.idle_in, drop - from_out);
            }
            return;
        }
        let mut missing = wanted - active;
        missing -= shift(&mut self.kinds.zero_in, &mut self.kinds.active_in, missing);
        let nowhere = missing.min(self.kinds.zero_out + self.kinds.untouched);
        if nowhere > PageCount::ZERO {
            let granted = self.room(nowhere, *room, limits);
            let again = shift(&mut self.kinds.zero_out, &mut self.kinds.active_in, granted);
            shift(&mut self.kinds.untouched, &mut self.kinds.active_in, granted - again);
            *room -= granted.min(*room);
            // What is nowhere but not granted is waited for.
            missing -= nowhere;
        }
        missing -= shift(&mut self.kinds.idle_in, &mut self.kinds.active_in, missing);
        shift(&mut self.kinds.idle_out, &mut self.kinds.active_out, missing);
    }

    /// Content that is not in use becomes so much that the guest holds `touched` pages in all.
    fn hold(&mut self, touched: PageCount, room: &mut PageCount, limits: &Limits) {
        let held = self.kinds.resident() + self.kinds.swapped();
        if held < touched {
            let wanted = (touched - held).min(self.kinds.zero_out + self.kinds.untouched);
            let granted = self.room(wanted, *room, limits);
            let again = shift(&mut self.kinds.zero_out, &mut self.kinds.idle_in, granted);
            shift(&mut self.kinds.untouched, &mut self.kinds.idle_in, granted - again);
            *room -= granted.min(*room);
            return;
        }
        let mut freed = held - touched;
        let kinds = &mut self.kinds;
        for kind in [&mut kinds.zero_in, &mut kinds.idle_out, &mut kinds.idle_in] {
            freed -= shift(kind, &mut kinds.untouched, freed);
        }
    }

    /// Touches the working set, and brings in what is out.
    fn work(&mut self, phase: &Phase, room: &mut PageCount, limits: &Limits) {
        if phase.active == PageCount::ZERO {
            self.speed = 1.0;
            return;
        }
        let (active, wanted) = (self.kinds.active(), phase.active);
        if active < wanted {
            self.totals.short_ms += limits.step.ms;
        }
        let (rate, seconds) = (phase.rate.0 as f64, limits.step.seconds());
        let miss = 1.0 - self.kinds.active_in.0 as f64 / wanted.0 as f64;
        let fault_s = limits.fault_us as f64 / 1e6;
        self.speed = 1.0 / (1.0 + rate * miss * fault_s);
        self.totals.work_s += self.speed * seconds;
        self.totals.busy_ms += limits.step.ms;

        let touches = rate * self.speed * seconds;
        // Different pages among so many touches at random, as 1 - e^-x of all.
        let left = active.0.saturating_sub(self.reach) as f64;
        self.reach += (left * (1.0 - (-touches / active.0.max(1) as f64).exp())).round() as u64;
        // What is less than a fault in a step is one in the end.
        self.faults_due += touches * self.kinds.active_out.0 as f64 / active.0.max(1) as f64;
        let faults = PageCount(self.faults_due as u64);
        self.faults_due -= faults.0 as f64;
        let faults = faults.min(self.kinds.active_out).min(limits.step.part(limits.page_in));
        let granted = self.room(faults, *room, limits);
        shift(&mut self.kinds.active_out, &mut self.kinds.active_in, granted);
        *room -= granted.min(*room);
        self.totals.pages_in += granted.0;
    }

    /// So many pages leave DRAM, as far as there are any.
    pub fn page_out(&mut self, wanted: PageCount) {
        let kinds = &mut self.kinds;
        let wanted = wanted.min(kinds.resident());
        let cold = kinds.idle_in + kinds.zero_in;
        let misjudged = PageCount(wanted.0 / MISJUDGED).min(kinds.active_in);
        let from_cold = (wanted - misjudged).min(cold);
        let zero = share(from_cold, kinds.zero_in, cold).min(kinds.zero_in);
        let zero = zero.max(from_cold.saturating_sub(kinds.idle_in));
        shift(&mut kinds.zero_in, &mut kinds.zero_out, zero);
        shift(&mut kinds.idle_in, &mut kinds.idle_out, from_cold - zero);
        shift(&mut kinds.active_in, &mut kinds.active_out, wanted - from_cold);
        self.totals.zero_dropped += zero.0;
        self.totals.pages_out += (wanted - zero).0;
    }

    /// Zero pages are found and become holes.
    pub fn share_zeros(&mut self, wanted: PageCount) {
        let found = shift(&mut self.kinds.zero_in, &mut self.kinds.zero_out, wanted);
        self.totals.zero_dropped += found.0;
    }

    /// The balloon moves toward `size`, by at most `step`. The guest gives what it does not use first, then its cache,
    /// the coldest of it first, which is in swap already, then what it swaps by itself.
    pub fn balloon_to(&mut self, size: PageCount, step: PageCount) {
        let kinds = &mut self.kinds;
        if size <= kinds.balloon {
            let back = (kinds.balloon - size).min(step);
            shift(&mut kinds.balloon, &mut kinds.untouched, back);
            return;
        }
        let mut wanted = (size - kinds.balloon).min(step);
        let unused = kinds.untouched + kinds.zero_in + kinds.zero_out;
        let from_unused = wanted.min(unused);
        let zero_in = share(from_unused, kinds.zero_in, unused).min(kinds.zero_in);
        wanted -= shift(&mut kinds.zero_in, &mut kinds.balloon, zero_in);
        let rest = from_unused - zero_in;
        let zero_out = shift(&mut kinds.zero_out, &mut kinds.balloon, rest);
        let untouched = shift(&mut kinds.untouched, &mut kinds.balloon, rest - zero_out);
        wanted -= zero_out + untouched;
        for kind in
            [&mut kinds.zero_in, &mut kinds.idle_out, &mut kinds.idle_in, &mut kinds.active_out, &mut kinds.active_in]
        {
            wanted -= shift(kind, &mut kinds.balloon, wanted);
        }
    }
}
