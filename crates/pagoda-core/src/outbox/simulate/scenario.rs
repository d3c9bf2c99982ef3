//! Scenarios: what a VM's jobs and its network are, phase by phase.
//!
//! The standard scenario: an SLO of 4.6 s, and in turn a base load, a drop of the bandwidth from 40 to 28 MB/s, a step of the
//! load from 0.20 to 0.22 jobs a second, and a step of interference that the samples hide from 1.10 to 1.25. Of an
//! earlier simulation of it, in another program, only the results are known. Computing times of 2.0 s and outputs of 100 MB
//! on average, both with a coefficient of variation of 1/3, give its mean response times for three fixed sizes within 13 %
//! (`tests.rs`).

use std::time::Duration;

use crate::outbox::pi::Gains;
use crate::outbox::settings::SpaceSettings;
use crate::outbox::slo::{Slo, Statistic};
use crate::outbox::units::Rate;
use crate::units::Bytes;

/// A control period, and the window in which the SLO is judged.
pub const PERIOD_S: u64 = 60;

/// The baseline, tuned in hindsight for this scenario: of 18 settings that were tried, the one with the least memory that
/// keeps the SLO in every feasible phase. The limits of its steps are those of the earlier simulation.
pub const PI_IN_HINDSIGHT: Gains = Gains {
    setpoint: 0.62,
    integral: 15e6,
    proportional: 20e6,
    up_max: Bytes(80_000_000),
    down_max: Bytes(40_000_000),
};

/// What jobs and network are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    pub arrivals_per_s: f64,
    pub compute_s: f64,
    pub output: Bytes,
    /// Stages of the Erlang distribution of both: 9 for a coefficient of variation of 1/3.
    pub erlang: u32,
    /// What the network takes.
    pub drain: Rate,
    /// Computing takes so many times what the samples say.
    pub interference: f64,
}

/// The standard scenario begins with this load.
pub const BASE: Load = Load {
    arrivals_per_s: 0.20,
    compute_s: 2.0,
    output: Bytes(100_000_000),
    erlang: 9,
    drain: Rate(40_000_000),
    interference: 1.10,
};

/// A time of one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    pub name: &'static str,
    pub periods: usize,
    pub load: Load,
}

/// One VM through its phases.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    pub settings: SpaceSettings,
    /// The size before anything is known.
    pub start: Bytes,
    pub phases: Vec<Phase>,
}

/// The settings of a VM with this SLO. A space has room for a few writes at least, and for twelve outputs at most.
pub fn settings(slo: Slo) -> SpaceSettings {
    let max = Bytes(1_200_000_000);
    SpaceSettings { slo, min: Bytes(4_000_000), max, window: Duration::from_secs(PERIOD_S) }
}

/// The mean within 4.6 s.
pub fn mean_slo() -> Slo {
    Slo { statistic: Statistic::Mean, limit: Duration::from_millis(4600) }
}

/// The standard scenario, each phase `periods` long.
pub fn standard(slo: Slo, periods: usize) -> Scenario {
    let phase = |name, load| Phase { name, periods, load };
    let drop = Load { drain: Rate(28_000_000), ..BASE };
    let step = Load { arrivals_per_s: 0.22, ..drop };
    let hidden = Load { interference: 1.25, ..step };
    Scenario {
        settings: settings(slo),
        start: Bytes(64_000_000),
        phases: vec![
            phase("base", BASE),
            phase("bandwidth drop", drop),
            phase("load step", step),
            phase("interference", hidden),
        ],
    }
}

/// Harsher steps, out of reach of any memory, and back: a network slower than the jobs write; jobs that compute for so long
/// that even an endless space does not keep the SLO.
pub fn harsh(slo: Slo, periods: usize) -> Scenario {
    let phase = |name, load| Phase { name, periods, load };
    Scenario {
        phases: vec![
            phase("base", BASE),
            phase("network too slow", Load { drain: Rate(16_000_000), ..BASE }),
            phase("base again", BASE),
            phase("guest too slow", Load { interference: 1.8, ..BASE }),
            phase("base at last", BASE),
        ],
        ..standard(slo, periods)
    }
}

impl Scenario {
    /// The phase of a period; the last one after the end.
    ///
    /// # Panics
    /// The scenario has no phase.
    pub fn phase_at(&self, period: usize) -> usize {
        let mut end = 0;
        for (nth, phase) in self.phases.iter().enumerate() {
            end += phase.periods;
            if period < end {
                return nth;
            }
        }
        self.phases.len().checked_sub(1).expect("a scenario with phases")
    }

    /// Counts the periods of all phases.
    pub fn periods(&self) -> usize {
        self.phases.iter().map(|phase| phase.periods).sum()
    }
}
