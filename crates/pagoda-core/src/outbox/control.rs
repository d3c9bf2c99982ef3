//! The space of one VM, period by period, from its SLO and what was measured.

use crate::units::Bytes;

use super::estimate::{Estimate, Estimator, Source, Verdict};
use super::profile::Profiler;
use super::settings::SpaceSettings;

/// Of the present size, below which a change is not worth a resize.
const DEADBAND: f64 = 0.05;
/// Of the way that is gone in a period, because each estimate has some noise.
const GAIN: f64 = 0.5;
/// A need of so many times what the VM has is no noise: the whole way is gone at once, because writers wait.
const URGENT: f64 = 1.5;
/// Periods in a row for which an SLO has to be out of reach before it is said: one may be a burst.
pub const INFEASIBLE_AFTER: u32 = 2;

/// Why a VM's space becomes what it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Too few jobs have ended, or nothing was sent.
    NotKnown,
    /// It has what its SLO needs.
    Enough,
    Grows,
    /// Step by step, towards what the SLO needs.
    Shrinks,
    /// It gets what is nearly as good as all memory, for chance alone breaks the SLO in more windows than it may.
    Marginal,
    /// It keeps no more than what is still of use.
    Infeasible,
    /// By the feedback of the baseline alone.
    Feedback,
    /// The size was set by hand, and stays.
    Fixed,
}

/// A decision says what space one VM should have, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What the VM should have from now on; the orchestrator may give less.
    pub space: Bytes,
    pub reason: Reason,
    /// What it was based on.
    pub estimate: Option<Estimate>,
}

/// What sizes a space: once a period, after the profile was brought up to date.
pub trait Sizer {
    /// The next size for a VM that has `space`.
    fn size(&mut self, profile: &Profiler, space: Bytes) -> Decision;
}

/// It finds the size by the queueing model and by feedback.
#[derive(Clone, Debug)]
pub struct SelfTuning {
    settings: SpaceSettings,
    estimator: Estimator,
    infeasible_periods: u32,
}

impl SelfTuning {
    /// Knows nothing yet. Jobs arrive whether others have ended or not.
    pub fn new(settings: SpaceSettings) -> SelfTuning {
        SelfTuning { settings, estimator: Estimator::new(settings, Source::Open), infeasible_periods: 0 }
    }

    /// The same where nobody says when jobs arrive.
    pub fn closed(settings: SpaceSettings) -> SelfTuning {
        SelfTuning { estimator: Estimator::new(settings, Source::Closed), ..SelfTuning::new(settings) }
    }

    /// Other settings, from the next period on.
    pub fn set(&mut self, settings: SpaceSettings) {
        self.settings = settings;
        self.estimator.set(settings);
    }
}

impl Sizer for SelfTuning {
    fn size(&mut self, profile: &Profiler, space: Bytes) -> Decision {
        let clamp = |size: Bytes| size.clamp(self.settings.min, self.settings.max);
        let Some(estimate) = self.estimator.update(profile, space) else {
            return Decision { space: clamp(space), reason: Reason::NotKnown, estimate: None };
        };
        let is_infeasible = matches!(estimate.verdict, Verdict::Infeasible(_));
        self.infeasible_periods = if is_infeasible { self.infeasible_periods + 1 } else { 0 };
        // A single period may be wrong: nothing is taken for it.
        if is_infeasible && self.infeasible_periods < INFEASIBLE_AFTER {
            return Decision { space: clamp(space), reason: Reason::NotKnown, estimate: Some(estimate) };
        }
        let next = clamp(step(space, clamp(estimate.needed)));
        let reason = match estimate.verdict {
            Verdict::Infeasible(_) => Reason::Infeasible,
            Verdict::Marginal { .. } => Reason::Marginal,
            Verdict::Kept if next > space => Reason::Grows,
            Verdict::Kept if next < space => Reason::Shrinks,
            Verdict::Kept => Reason::Enough,
        };
        Decision { space: next, reason, estimate: Some(estimate) }
    }
}

/// From what a VM has towards what it needs.
fn step(has: Bytes, needs: Bytes) -> Bytes {
    let (has_f, needs_f) = (has.0 as f64, needs.0 as f64);
    if (needs_f - has_f).abs() <= DEADBAND * has_f {
        return has;
    }
    let gain = if needs_f > URGENT * has_f { 1.0 } else { GAIN };
    Bytes((has_f + gain * (needs_f - has_f)).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::profile::{Counters, Job};
    use crate::outbox::simulate::scenario::{mean_slo, settings};
    use std::time::Duration;

    #[test]
    fn a_need_is_approached() {
        let check =
            |has, needs, expected| assert_eq!(step(Bytes(has), Bytes(needs)), Bytes(expected), "{has} to {needs}");
        check(1000, 1050, 1000);
        check(1000, 950, 1000);
        check(1000, 1200, 1100);
        check(1000, 1501, 1501);
        check(1000, 200, 600);
        check(0, 10, 10);
        check(0, 0, 0);
    }

    /// Periods of 20 jobs of 1 s that arrive together: a network that takes `drain` bytes a second from then on.
    fn drive(control: &mut SelfTuning, drains: &[u64]) -> Vec<Decision> {
        let (mut profile, mut counters) = (Profiler::new(0, Counters::default()), Counters::default());
        let mut space = Bytes(64_000_000);
        let period = |(nth, drain): (usize, &u64)| {
            let start_ms = nth as u64 * 60_000;
            let job = |nth: u64| Job {
                arrived_ms: start_ms + nth * 3000,
                began_ms: start_ms + nth * 3000,
                ended_ms: start_ms + nth * 3000 + 1000,
                compute: Duration::from_secs(1),
                blocked: Duration::ZERO,
                output: Bytes(20_000_000),
                backlog: Bytes::ZERO,
            };
            counters.arrivals += 20;
            counters.acknowledged += Bytes(drain * 10);
            counters.sending += Duration::from_secs(10);
            let jobs: Vec<Job> = (0..20).map(job).collect();
            profile.close_period(start_ms + 60_000, space, counters, &jobs);
            let decision = control.size(&profile, space);
            space = decision.space;
            decision
        };
        drains.iter().enumerate().map(period).collect()
    }

    #[test]
    fn a_burst_is_not_called_infeasible_and_limits_are_kept() {
        let mut control = SelfTuning::new(settings(mean_slo()));
        let (fast, slow) = (40_000_000, 5_000_000);
        let decisions = drive(&mut control, &[fast, fast, slow, fast, slow, slow, slow]);
        let reasons: Vec<bool> = decisions.iter().map(|decision| decision.reason == Reason::Infeasible).collect();
        assert_eq!(reasons, [false, false, false, false, false, true, true]);
        assert_eq!(decisions[2].space, decisions[1].space, "nothing is taken for one period");
        let settings = settings(mean_slo());
        assert!(decisions.iter().all(|decision| settings.min <= decision.space && decision.space <= settings.max));
        assert!(decisions[6].space < decisions[5].space, "no memory is kept for what it does not help");
        // Limits that are set later hold from the next period on.
        let narrow = SpaceSettings { min: Bytes(300_000_000), max: Bytes(400_000_000), ..settings };
        control.set(narrow);
        assert_eq!(drive(&mut control, &[fast])[0].space, narrow.min);
    }
}
