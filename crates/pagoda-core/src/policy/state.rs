//! Reclamation states (ESX section 6.3): how short memory is, and what may be done about it.
//!
//! | state | entered when free memory is | share | balloon | page out | block VMs above target |
//! |---|---|---|---|---|---|
//! | high | above 6 % | in the background | | | |
//! | soft | below 4 % | first | yes | where ballooning is not possible | |
//! | hard | below 2 % | first | yes | yes | |
//! | low | below 1 % | first | yes | yes, as fast as possible | yes |
//!
//! A worse state is entered when free memory falls below its threshold, a better one when it exceeds the better one's
//! threshold by the hysteresis. So between two thresholds the state stays what it was.

use std::fmt;

use super::settings::Thresholds;
use crate::units::PageCount;

/// From the best to the worst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReclaimState {
    /// Free memory is sufficient.
    #[default]
    High,
    /// Reclaim with the guests' help.
    Soft,
    /// Reclaim by page-out from anybody, without the guests' help.
    Hard,
    /// As `Hard`, and nobody above its target runs.
    Low,
}

/// From the best to the worst.
pub const STATES: [ReclaimState; 4] = [ReclaimState::High, ReclaimState::Soft, ReclaimState::Hard, ReclaimState::Low];

/// What a state allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Look for pages to share before anything is taken; in `High` it is background work only.
    pub share_first: bool,
    /// Page out anybody. Those whom no balloon helps against are in any state from which memory is taken.
    pub page_out: bool,
    /// Block VMs above their targets.
    pub block: bool,
}

/// Thresholds in pages of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// `free >= leave[state]` ends the state for the next better one.
    leave: [PageCount; 4],
    /// `free < enter[state]` begins the state.
    enter: [PageCount; 4],
}

impl Levels {
    /// Converts the thresholds into pages of this pool.
    pub fn of(pool: PageCount, thresholds: &Thresholds) -> Levels {
        let Thresholds { high, soft, hard, low, hysteresis } = *thresholds;
        let exceeded = |threshold: super::settings::PerMille| {
            (threshold.of_ceil(pool) + hysteresis.of_ceil(pool)).max(PageCount(1))
        };
        // `High` is never left upward and never entered by a fall.
        let leave = [PageCount::ZERO, exceeded(high), exceeded(soft), exceeded(hard)];
        // Nothing free is the worst state even of a pool that shrank to nothing.
        let low = low.of_floor(pool).max(PageCount(1));
        let enter = [PageCount::ZERO, soft.of_floor(pool), hard.of_floor(pool), low];
        Levels { leave, enter }
    }
}

impl ReclaimState {
    /// The state after a look at free memory.
    pub fn next(self, free: PageCount, levels: &Levels) -> ReclaimState {
        let worst = STATES.into_iter().rev().find(|state| free < levels.enter[*state as usize]);
        if let Some(worse) = worst.filter(|worse| *worse > self) {
            return worse;
        }
        let mut state = self;
        while state > ReclaimState::High && free >= levels.leave[state as usize] {
            state = STATES[state as usize - 1];
        }
        state
    }

    /// Says what may be done in this state.
    pub const fn allowed(self) -> Allowed {
        let worse_than_high = !matches!(self, ReclaimState::High);
        let forced = matches!(self, ReclaimState::Hard | ReclaimState::Low);
        Allowed { share_first: worse_than_high, page_out: forced, block: matches!(self, ReclaimState::Low) }
    }

    /// Gives the word that the paper has for the state.
    pub const fn name(self) -> &'static str {
        match self {
            ReclaimState::High => "high",
            ReclaimState::Soft => "soft",
            ReclaimState::Hard => "hard",
            ReclaimState::Low => "low",
        }
    }
}

impl fmt::Display for ReclaimState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::ReclaimState::*;
    use super::*;
    use crate::policy::settings::THRESHOLDS_DEFAULT;

    /// Of a pool of 1000 pages: enter below 40, 20, 10; leave from 65, 45, 25 on.
    fn next(state: ReclaimState, free: u64) -> ReclaimState {
        state.next(PageCount(free), &Levels::of(PageCount(1000), &THRESHOLDS_DEFAULT))
    }

    #[test]
    fn the_papers_transitions() {
        let check =
            |from: ReclaimState, free: u64, to: ReclaimState| assert_eq!(next(from, free), to, "{from} at {free}");
        check(High, 1000, High);
        check(High, 50, High);
        check(High, 40, High);
        check(High, 39, Soft);
        check(High, 19, Hard);
        check(High, 0, Low);
        check(Soft, 40, Soft);
        check(Soft, 64, Soft);
        check(Soft, 65, High);
        check(Soft, 9, Low);
        check(Hard, 44, Hard);
        check(Hard, 45, Soft);
        check(Hard, 65, High);
        check(Low, 10, Low);
        check(Low, 24, Low);
        check(Low, 25, Hard);
        check(Low, 1000, High);
    }

    #[test]
    fn worse_states_allow_more() {
        let count = |state: ReclaimState| {
            let Allowed { share_first, page_out, block } = state.allowed();
            [share_first, page_out, block].into_iter().filter(|allowed| *allowed).count()
        };
        assert_eq!(STATES.map(count), [0, 1, 2, 3]);
    }

    proptest! {
        #[test]
        fn more_free_memory_is_never_worse(pool in 1..1u64 << 36, a in 0..=1000u64, b in 0..=1000u64, from in 0..4usize) {
            let levels = Levels::of(PageCount(pool), &THRESHOLDS_DEFAULT);
            let at = |part: u64| STATES[from].next(PageCount((u128::from(pool) * u128::from(part) / 4000) as u64), &levels);
            prop_assert!(at(a.max(b)) <= at(a.min(b)));
        }

        #[test]
        fn a_second_look_changes_nothing(pool in 1..1u64 << 30, free in 0..1u64 << 30, from in 0..4usize) {
            let levels = Levels::of(PageCount(pool), &THRESHOLDS_DEFAULT);
            let once = STATES[from].next(PageCount(free), &levels);
            prop_assert_eq!(once.next(PageCount(free), &levels), once);
        }
    }
}
