//! The baseline: a proportional-integral controller on the measured response time, without a model.
//!
//! It is hard to beat (docs/outbox-control-figures.md). It moves the space by the error of the last window and by how
//! that error changed (velocity form, so that a limit cannot wind it up). It knows no feasible interval: where the SLO
//! is out of reach, it takes all it may have.

use crate::units::Bytes;

use super::control::{Decision, Reason, Sizer};
use super::profile::{Job, Profiler};
use super::settings::SpaceSettings;

/// How the baseline is tuned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gains {
    /// Of the SLO's limit: what it steers to. Below 1, because half of the windows are above what is steered to.
    pub setpoint: f64,
    /// Bytes for each second of error, and of change of the error.
    pub integral: f64,
    pub proportional: f64,
    /// Most in one period, up and down.
    pub up_max: Bytes,
    pub down_max: Bytes,
}

/// The controller remembers only the error of the last window that had jobs.
#[derive(Clone, Debug)]
pub struct Pi {
    settings: SpaceSettings,
    gains: Gains,
    error_before_s: Option<f64>,
}

impl Pi {
    /// Begins without an error of a window before.
    pub fn new(settings: SpaceSettings, gains: Gains) -> Pi {
        Pi { settings, gains, error_before_s: None }
    }
}

impl Sizer for Pi {
    fn size(&mut self, profile: &Profiler, space: Bytes) -> Decision {
        let slo = &self.settings.slo;
        let jobs = profile.periods().next_back().map_or(&[][..], |period| &period.jobs);
        let mut responses: Vec<f64> = jobs.iter().map(Job::response_s).collect();
        let Some(measured_s) = slo.statistic.of(&mut responses) else {
            return Decision { space, reason: Reason::NotKnown, estimate: None };
        };
        let error_s = measured_s - slo.limit_s() * self.gains.setpoint;
        let change_s = self.error_before_s.map_or(0.0, |before| error_s - before);
        self.error_before_s = Some(error_s);
        let wanted = self.gains.integral * error_s + self.gains.proportional * change_s;
        let moved = wanted.clamp(-(self.gains.down_max.0 as f64), self.gains.up_max.0 as f64);
        let next = Bytes((space.0 as f64 + moved).max(0.0) as u64);
        let space = next.clamp(self.settings.min, self.settings.max);
        Decision { space, reason: Reason::Feedback, estimate: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::profile::Counters;
    use crate::outbox::simulate::scenario::{PI_IN_HINDSIGHT, mean_slo, settings};
    use std::time::Duration;

    #[test]
    fn the_baseline_follows_the_error_within_its_limits() {
        let gains = Gains { setpoint: 0.5, integral: 10e6, proportional: 0.0, ..PI_IN_HINDSIGHT };
        let mut pi = Pi::new(settings(mean_slo()), gains);
        let mut check = |response_ms: u64, space: u64, expected: u64| {
            let job = Job {
                arrived_ms: 0,
                began_ms: 0,
                ended_ms: response_ms,
                compute: Duration::from_secs(1),
                blocked: Duration::ZERO,
                output: Bytes(1),
                backlog: Bytes::ZERO,
            };
            let mut profile = Profiler::new(0, Counters::default());
            profile.close_period(100_000, Bytes(space), Counters::default(), &[job]);
            let decision = pi.size(&profile, Bytes(space * 1_000_000));
            assert_eq!(decision.space, Bytes(expected * 1_000_000), "{response_ms} ms with {space} MB");
        };
        check(2300, 100, 100);
        check(3300, 100, 110);
        check(1300, 100, 90);
        check(50_000, 100, 180);
        check(1, 5, 4);
        check(50_000, 1190, 1200);
        let idle = Profiler::new(0, Counters::default());
        assert_eq!(pi.size(&idle, Bytes(7)).reason, Reason::NotKnown);
    }
}
