//! From a target to what is done with one VM now: step by step, by the gentlest means that the state allows.
//!
//! * **Demands fit**: no cap but the operator's, balloon empty.
//! * **Demands do not fit** (`restrained`): a VM may grow to what it can pay for. One above its target keeps what it has
//!   until somebody needs it, but does not grow. Who wants more than its target is told so by its balloon, even while free
//!   memory suffices: a cap alone would make it page against itself, and its own choice of pages is better.
//! * **Memory is to be reclaimed**: the VMs that pay least give it ([`super::controller`] says how much each keeps), by
//!   balloon where there is one that moves, by page-out where not, and by both from the state `hard` on.
//!
//! **The balloon's size** is memory - target: the guest behaves "as if it had been configured with less memory" (ESX section
//! 3.2). Pages in swap are not taken off it. They are the guest's coldest, so it gives them first, and while it may keep both
//! what is in DRAM and what is in swap, it uses both.

use super::plan::{Balloon, Bound, PolicyStatus, Run, Terms, VmActions, VmSample};
use super::settings::{Rates, VmSettings};
use super::state::ReclaimState;
use crate::units::PageCount;

/// A balloon that does not grow for so long is not relied on: ten polls of a driver that looks once a second (ESX section
/// 3.2 "poll the server once per second").
const BALLOON_PATIENCE_MS: u64 = 10_000;
/// It is relied on again after this: the guest may have booted, or found memory.
const BALLOON_RETRY_MS: u64 = 60_000;
/// A balloon has moved if it grew by this, and has arrived when it is this near: a chunk.
const BALLOON_STEP: PageCount = PageCount(256);
/// A balloon is not asked for a change smaller than this part of the VM's memory, and at most [`BALLOON_CHANGE_MAX`]:
/// targets breathe, and each change is work for the guest.
const BALLOON_CHANGE_PART: u64 = 256;
const BALLOON_CHANGE_MAX: PageCount = PageCount(2048);
/// A plan is never made for less than this time: the first one, or one right after another, still moves something.
const ELAPSED_MIN_MS: u64 = 100;
/// Nor for more: after a daemon's pause the steps are as after ten seconds.
const ELAPSED_MAX_MS: u64 = 10_000;

/// What holds for all VMs.
#[derive(Clone, Copy, Debug)]
pub struct Situation {
    /// The host is in this state.
    pub state: ReclaimState,
    /// VMs are held to their targets.
    pub restrained: bool,
    /// Limits of the steps.
    pub rates: Rates,
    /// The clock shows so many milliseconds; any steady clock will do.
    pub now_ms: u64,
    /// So much time has passed since the last plan.
    pub elapsed_ms: u64,
}

impl Situation {
    fn step(&self, per_second: PageCount) -> PageCount {
        let elapsed_ms = self.elapsed_ms.clamp(ELAPSED_MIN_MS, ELAPSED_MAX_MS);
        PageCount((u128::from(per_second.0) * u128::from(elapsed_ms) / 1000).clamp(1, 1 << 40) as u64)
    }
}

/// Whether a balloon does what it is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct BalloonWatch {
    /// The size it was asked for.
    asked: PageCount,
    /// The largest size since it was asked, and when that was reached.
    reached: PageCount,
    reached_ms: u64,
    ignored_until_ms: u64,
}

impl BalloonWatch {
    /// Whether it is not relied on now.
    pub fn is_ignored(&self, now_ms: u64) -> bool {
        now_ms < self.ignored_until_ms
    }

    fn look(&mut self, size: PageCount, now_ms: u64) {
        let arrived = size + BALLOON_STEP >= self.asked;
        if arrived || size >= self.reached + BALLOON_STEP || size < self.reached {
            (self.reached, self.reached_ms) = (size, now_ms);
        } else if now_ms.saturating_sub(self.reached_ms) >= BALLOON_PATIENCE_MS && !self.is_ignored(now_ms) {
            (self.ignored_until_ms, self.reached_ms) = (now_ms + BALLOON_RETRY_MS, now_ms + BALLOON_RETRY_MS);
        }
    }
}

/// What to do with one VM that shall keep `kept` of its pages in DRAM for now.
pub fn plan_vm(
    situation: &Situation,
    settings: &VmSettings,
    sample: &VmSample,
    terms: &Terms,
    kept: PageCount,
    watch: &mut BalloonWatch,
) -> (VmActions, PolicyStatus) {
    if sample.pinned {
        let actions = VmActions { balloon: None, page_out_cap: settings.memory, run: Run::Run };
        return (actions, PolicyStatus::Pinned);
    }
    let allowed = situation.state.allowed();
    // Rounding aside, nobody is asked for more than what is above its target.
    let kept = kept.max(terms.target);
    let take = kept < sample.resident;
    let balloon = match sample.balloon {
        Balloon::Absent => {
            *watch = BalloonWatch::default();
            None
        }
        Balloon::Inflated(size) => {
            watch.look(size, situation.now_ms);
            let keeps = match terms.bound {
                Bound::Ceiling if !take => terms.allowance,
                _ => kept,
            };
            let may_grow = take || terms.bound != Bound::Ceiling;
            let asked = balloon_size(situation, settings, size, watch.asked, keeps, may_grow);
            // While memory is taken from the VM its balloon does not shrink.
            let asked = if take { asked.max(size) } else { steady(settings.memory, watch.asked, asked) };
            watch.asked = asked;
            Some(asked)
        }
    };
    let helps = match sample.balloon {
        Balloon::Absent => false,
        Balloon::Inflated(size) => {
            !watch.is_ignored(situation.now_ms) && size + BALLOON_STEP < settings.balloon_max.of_floor(settings.memory)
        }
    };
    // Nothing is taken in the state high but what a VM lacks at its limit; the means are those of the state soft.
    let by_force = allowed.page_out || !helps;
    let above = sample.resident.max(terms.allowance);
    let page_out_cap = match (take && by_force, situation.restrained) {
        (true, _) if situation.state == ReclaimState::Low => kept,
        (true, _) => kept.max(sample.resident.saturating_sub(situation.step(situation.rates.page_out))),
        (false, true) => above,
        (false, false) => settings.memory,
    };
    let page_out_cap = page_out_cap.min(settings.cap);
    // A chunk above its target is an accident of page-out's unit, not a VM that lives beyond its means.
    let run = match allowed.block && sample.resident > terms.target + BALLOON_STEP {
        true => Run::Block,
        false => Run::Run,
    };
    let held = balloon.is_some_and(|size| size > PageCount::ZERO) || page_out_cap < settings.cap;
    let status = match run {
        Run::Block => PolicyStatus::Blocked,
        Run::Run if held && terms.target < terms.ceiling => PolicyStatus::Squeezed,
        Run::Run => PolicyStatus::AtEase,
    };
    (VmActions { balloon, page_out_cap, run }, status)
}

/// `next`, unless that is nearly what was asked for before: a balloon is emptied altogether or left alone.
fn steady(memory: PageCount, before: PageCount, next: PageCount) -> PageCount {
    let least = PageCount(memory.0 / BALLOON_CHANGE_PART).clamp(BALLOON_STEP, BALLOON_CHANGE_MAX);
    let is_near = before.0.abs_diff(next.0) < least.0;
    if is_near && before > PageCount::ZERO && next > PageCount::ZERO { before } else { next }
}

/// The next size of a balloon so that the guest has `keeps`: in steps upward; downward at once, for nobody waits for that.
fn balloon_size(
    situation: &Situation,
    settings: &VmSettings,
    size: PageCount,
    asked: PageCount,
    keeps: PageCount,
    may_grow: bool,
) -> PageCount {
    if !situation.restrained {
        return PageCount::ZERO;
    }
    let most = settings.balloon_max.of_floor(settings.memory);
    let wanted = settings.memory.saturating_sub(keeps).min(most);
    match wanted > size {
        true if may_grow => wanted.min(size + situation.step(situation.rates.balloon)),
        true => wanted.min(asked.max(size)),
        false => wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::super::allocate::{Claim, price};
    use super::super::plan::{CeilingReason, MinReason, VmId};
    use super::super::settings::{RATES_DEFAULT, SHARES_DEFAULT, TAX_DEFAULT};
    use super::super::working_set::{Estimator, SampleCount};
    use super::*;

    const MEMORY: u64 = 100_000;

    fn situation(state: ReclaimState) -> Situation {
        let rates = Rates { page_out: PageCount(5_000), balloon: PageCount(2_000) };
        Situation { state, restrained: true, rates, now_ms: 1_000, elapsed_ms: 1_000 }
    }

    fn sample(resident: u64, swapped: u64, balloon: Balloon) -> VmSample {
        VmSample {
            id: VmId(1),
            resident: PageCount(resident),
            swapped: PageCount(swapped),
            shared: PageCount::ZERO,
            is_at_limit: false,
            balloon,
            sample: SampleCount::default(),
            pinned: false,
        }
    }

    fn terms(target: u64) -> Terms {
        let settings = VmSettings::new(PageCount(MEMORY));
        let all = settings.memory;
        let claim = Claim { shares: SHARES_DEFAULT, min: PageCount::ZERO, ceiling: all, working_set: all };
        Terms {
            memory: all,
            shares: SHARES_DEFAULT,
            shares_total: 2000,
            tax: TAX_DEFAULT,
            entitlement: PageCount(target),
            estimate: Estimator::new(all, settings.sampling).estimate(),
            in_use: all,
            min: PageCount::ZERO,
            min_reason: MinReason::Min,
            ceiling: all,
            ceiling_reason: CeilingReason::Memory,
            limit: all,
            price: price(&claim, TAX_DEFAULT, PageCount(target)),
            target: PageCount(target),
            lent: PageCount::ZERO,
            allowance: PageCount(target),
            bound: Bound::Price,
            state: ReclaimState::Soft,
        }
    }

    fn planned(situation: &Situation, sample: &VmSample, target: u64, kept: u64) -> (VmActions, PolicyStatus) {
        let settings = VmSettings::new(PageCount(MEMORY));
        plan_vm(situation, &settings, sample, &terms(target), PageCount(kept), &mut BalloonWatch::default())
    }

    #[test]
    fn each_state_uses_its_means() {
        use ReclaimState::*;
        let absent = Balloon::Absent;
        let check = |state, balloon, kept, expected: (Option<u64>, u64, Run)| {
            let (actions, _) = planned(&situation(state), &sample(80_000, 0, balloon), 60_000, kept);
            let got = (actions.balloon.map(|size| size.0), actions.page_out_cap.0, actions.run);
            assert_eq!(got, expected, "{state}, {balloon:?}, {kept}");
        };
        let empty = Balloon::Inflated(PageCount(0));
        // High: what is above the target stays, but does not grow: the balloon takes only what is not in DRAM.
        check(High, empty, 80_000, (Some(2_000), 80_000, Run::Run));
        check(High, Balloon::Inflated(PageCount(19_000)), 80_000, (Some(20_000), 80_000, Run::Run));
        // Soft: by balloon in steps of 2000; by page-out in steps of 5000 where there is none.
        check(Soft, empty, 70_000, (Some(2_000), 80_000, Run::Run));
        check(Soft, Balloon::Inflated(PageCount(29_000)), 70_000, (Some(30_000), 80_000, Run::Run));
        check(Soft, absent, 70_000, (None, 75_000, Run::Run));
        check(Soft, absent, 79_000, (None, 79_000, Run::Run));
        // A balloon at its limit of 65 % helps no more.
        check(Soft, Balloon::Inflated(PageCount(65_000)), 70_000, (Some(65_000), 75_000, Run::Run));
        check(Hard, empty, 70_000, (Some(2_000), 75_000, Run::Run));
        // In the state low it goes at once, and the VM is blocked.
        check(Low, absent, 61_000, (None, 61_000, Run::Block));
        // The cap never falls below the target.
        check(Low, absent, 10_000, (None, 60_000, Run::Block));
    }

    #[test]
    fn a_vm_below_its_target_may_grow_to_it() {
        for state in super::super::state::STATES {
            let (actions, _) =
                planned(&situation(state), &sample(40_000, 0, Balloon::Inflated(PageCount(50_000))), 60_000, 40_000);
            assert_eq!(
                actions,
                VmActions { balloon: Some(PageCount(40_000)), page_out_cap: PageCount(60_000), run: Run::Run }
            );
        }
        let free = Situation { restrained: false, ..situation(ReclaimState::High) };
        let (actions, status) =
            planned(&free, &sample(40_000, 0, Balloon::Inflated(PageCount(50_000))), 60_000, 40_000);
        assert_eq!((actions.balloon, actions.page_out_cap.0), (Some(PageCount::ZERO), MEMORY));
        assert_eq!(status, PolicyStatus::AtEase);
    }

    #[test]
    fn a_guest_shall_have_its_target_and_nothing_in_swap() {
        let (actions, _) = planned(
            &situation(ReclaimState::Soft),
            &sample(50_000, 40_000, Balloon::Inflated(PageCount(9_500))),
            30_000,
            49_000,
        );
        assert_eq!(actions.balloon, Some(PageCount(11_500)), "a step toward 100000 - 49000");
    }

    #[test]
    fn a_balloon_that_does_not_move_is_replaced_by_page_out() {
        let settings = VmSettings::new(PageCount(MEMORY));
        let mut watch = BalloonWatch::default();
        let mut caps = Vec::new();
        for second in 0..90 {
            let now = Situation { now_ms: second * 1000, rates: RATES_DEFAULT, ..situation(ReclaimState::Soft) };
            let stuck = sample(80_000, 0, Balloon::Inflated(PageCount(1_000)));
            let (actions, _) = plan_vm(&now, &settings, &stuck, &terms(60_000), PageCount(70_000), &mut watch);
            caps.push(actions.page_out_cap.0);
        }
        let paged: Vec<usize> = (0..90).filter(|&second| caps[second] < 80_000).collect();
        let (first, last) = (paged[0], paged[paged.len() - 1]);
        assert!((10..13).contains(&first), "{first}");
        assert!(
            (first + 55..first + 75).contains(&(first + paged.len())),
            "for a minute, then it is relied on again: {last}"
        );
    }

    #[test]
    fn a_pinned_vm_is_left_alone() {
        let pinned = VmSample { pinned: true, ..sample(80_000, 0, Balloon::Inflated(PageCount(5))) };
        let (actions, status) = planned(&situation(ReclaimState::Low), &pinned, 60_000, 10);
        assert_eq!(actions, VmActions { balloon: None, page_out_cap: PageCount(MEMORY), run: Run::Run });
        assert_eq!(status, PolicyStatus::Pinned);
    }
}
