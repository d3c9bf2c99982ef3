//! How promises were kept in a simulation, against the best that was possible for one who knows the phase beforehand.

use crate::outbox::control::{Decision, SelfTuning, Sizer};
use crate::outbox::profile::Profiler;
use crate::outbox::slo::{Slo, WINDOWS_KEPT};
use crate::units::Bytes;

use super::run::{PeriodRecord, Static, run};
use super::scenario::{Load, Phase, Scenario, mean_slo, standard};

/// A space is large enough from this part of the best fixed size on.
const ENOUGH: f64 = 0.8;
/// Periods in a row for which it has to stay so.
const SETTLED_PERIODS: usize = 5;
/// Steps of the search for the best fixed size: the interval is halved each time, to 2 %.
const SEARCH_STEPS: u32 = 8;
/// Periods of one such run: the part of windows above is known to less than a hundredth.
const SEARCH_PERIODS: usize = 3000;

/// What a phase of one or several runs was like.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    pub windows: usize,
    pub above: usize,
    pub jobs: usize,
    pub responses_s: f64,
    pub space_sum: f64,
    pub periods: usize,
    pub refused: u64,
}

impl Tally {
    /// The part of windows above the SLO.
    pub fn windows_above(&self) -> f64 {
        self.above as f64 / self.windows.max(1) as f64
    }

    /// All jobs' mean response.
    pub fn mean_s(&self) -> f64 {
        self.responses_s / self.jobs.max(1) as f64
    }

    /// The mean space, in bytes.
    pub fn space(&self) -> f64 {
        self.space_sum / self.periods.max(1) as f64
    }

    /// Adds both up, as if they were of one run.
    pub fn with(self, other: Tally) -> Tally {
        Tally {
            windows: self.windows + other.windows,
            above: self.above + other.above,
            jobs: self.jobs + other.jobs,
            responses_s: self.responses_s + other.responses_s,
            space_sum: self.space_sum + other.space_sum,
            periods: self.periods + other.periods,
            refused: self.refused + other.refused,
        }
    }
}

/// The periods of one phase.
pub fn tally(records: &[PeriodRecord], phase: usize, slo: &Slo) -> Tally {
    let mut tally = Tally::default();
    for record in records.iter().filter(|record| record.phase == phase) {
        tally.periods += 1;
        tally.space_sum += record.space.0 as f64;
        tally.jobs += record.responses.len();
        tally.responses_s += record.responses.iter().sum::<f64>();
        tally.refused += record.refused;
        if let Some(value) = record.statistic(slo.statistic) {
            tally.windows += 1;
            tally.above += usize::from(value > slo.limit_s());
        }
    }
    tally
}

/// The smallest fixed size with which a load keeps the SLO in nine of ten windows; `None` if the largest does not.
pub fn best_static(load: Load, slo: Slo, seed: u64) -> Option<Bytes> {
    let all = standard(slo, 1);
    let phases = vec![Phase { name: "fixed", periods: SEARCH_PERIODS, load }];
    let above = |start: Bytes| {
        let records = run(&Scenario { start, phases: phases.clone(), ..all }, seed, &mut Static);
        tally(&records, 0, &slo).windows_above()
    };
    let keeps = |size: Bytes| above(size) <= 1.0 - WINDOWS_KEPT;
    let (mut low, mut high) = (all.settings.min.0 as f64, all.settings.max.0 as f64);
    if !keeps(all.settings.max) {
        return None;
    }
    for _ in 0..SEARCH_STEPS {
        let middle = (low * high).sqrt();
        if keeps(Bytes(middle as u64)) { high = middle } else { low = middle }
    }
    Some(Bytes(high as u64))
}

/// The period of a phase, from 1, from which on its space is enough and stays so; one after the last if it never does.
pub fn settled_after(records: &[PeriodRecord], phase: usize, best: Bytes) -> usize {
    let enough = |record: &PeriodRecord| record.space.0 as f64 >= ENOUGH * best.0 as f64;
    let records: Vec<&PeriodRecord> = records.iter().filter(|record| record.phase == phase).collect();
    let settled = records.windows(SETTLED_PERIODS).position(|window| window.iter().all(|record| enough(record)));
    settled.unwrap_or(records.len()) + 1
}

/// The period of a phase, from 1, in which a decision is the first that `says` accepts; `None` if none is.
pub fn said_after(records: &[PeriodRecord], phase: usize, says: impl Fn(&PeriodRecord) -> bool) -> Option<usize> {
    records.iter().filter(|record| record.phase == phase).position(says).map(|period| period + 1)
}

/// The mean response time of a load with a fixed size, over a long time.
pub fn long_run_mean_s(load: Load, start: Bytes, seed: u64) -> f64 {
    let phases = vec![Phase { name: "fixed", periods: SEARCH_PERIODS, load }];
    let scenario = Scenario { start, phases, ..standard(mean_slo(), 1) };
    tally(&run(&scenario, seed, &mut Static), 0, &scenario.settings.slo).mean_s()
}

/// What the estimator predicts for a load with a fixed size after so many periods, and what these periods' jobs had.
pub fn predicted_and_measured_s(load: Load, start: Bytes, periods: usize, seed: u64) -> Option<(f64, f64)> {
    let phases = vec![Phase { name: "fixed", periods, load }];
    let scenario = Scenario { start, phases, ..standard(mean_slo(), 1) };
    let mut watching = Watching(SelfTuning::new(scenario.settings));
    let records = run(&scenario, seed, &mut watching);
    let estimate = records.last()?.decision.estimate.as_ref()?;
    Some((estimate.now.mean_s, tally(&records, 0, &scenario.settings.slo).mean_s()))
}

/// It estimates as the controller does, and leaves the size as it is.
struct Watching(SelfTuning);

impl Sizer for Watching {
    fn size(&mut self, profile: &Profiler, space: Bytes) -> Decision {
        Decision { space, ..self.0.size(profile, space) }
    }
}
