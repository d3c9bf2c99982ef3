//! What the guests do: the standard scenario and the infeasible phases of the simulation, scaled in time.

use pagoda_core::outbox::simulate::scenario::{self, BASE, Load as Simulated, Phase, mean_slo};
use pagoda_core::outbox::units::Rate;
use pagoda_guest::jobs::Load;

/// All times are so many times shorter than the scenario's.
pub const SCALE: u64 = 20;
/// Networks are so many times slower, so that ten guests under TCG need less than one CPU for what they write. Outputs and spaces are
/// smaller by the product of both.
pub const RATE_SCALE: u64 = 4;
/// The SLO: on the time from a job's start to its end, for the daemon is not told when jobs arrive. The scenario's 4.6 s are
/// from the arrival on.
pub const SLO: &str = "mean 150ms";
/// The least and the most that an outbox may have, in MiB: less than 1 cannot be, and the most has twelve outputs.
pub const MIN_MIB: u64 = 1;
pub const MAX_MIB: u64 = 15;
/// What it has before anything is known: 64 MB of the scenario would be less.
pub const BEGIN_MIB: u64 = 1;

/// A time of one load.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub name: &'static str,
    pub load: Load,
    /// Bytes a second that the client's link takes.
    pub rate: u64,
    pub periods: usize,
}

/// So many periods of a load of the simulation. Its interference is in the computing time: nobody tells the daemon of it.
pub fn step(name: &'static str, load: Simulated, periods: usize) -> Step {
    let of_guest = Load {
        arrivals_per_ks: (load.arrivals_per_s * 1000.0 * SCALE as f64).round() as u64,
        compute_us: (load.compute_s * load.interference * 1e6 / SCALE as f64).round() as u64,
        output_bytes: load.output.0 / SCALE / RATE_SCALE,
        stages: load.erlang,
    };
    Step { name, load: of_guest, rate: load.drain.0 / RATE_SCALE, periods }
}

fn steps_of(phases: &[Phase], periods: usize) -> Vec<Step> {
    phases.iter().map(|phase| step(phase.name, phase.load, periods)).collect()
}

/// The steps of the standard scenario, with so many periods a phase.
pub fn standard(periods: usize) -> Vec<Step> {
    steps_of(&scenario::standard(mean_slo(), periods).phases, periods)
}

/// As long, with phases that no size can keep.
pub fn harsh(periods: usize) -> Vec<Step> {
    let all = scenario::harsh(mean_slo(), periods);
    steps_of(&all.phases[..4], periods)
}

/// The bandwidth drop alone.
pub fn dropped(name: &'static str, periods: usize) -> Step {
    step(name, Simulated { drain: Rate(28_000_000), ..BASE }, periods)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scenario_is_scaled_in_time_alone() {
        let steps = standard(30);
        let names: Vec<&str> = steps.iter().map(|step| step.name).collect();
        assert_eq!(names, ["base", "bandwidth drop", "load step", "interference"]);
        let Step { load, rate, periods, .. } = steps[3];
        assert_eq!((load.arrivals_per_ks, load.compute_us, load.output_bytes), (4400, 125_000, 1_250_000));
        assert_eq!((rate, periods, steps[0].rate), (7_000_000, 30, 10_000_000));
        // What jobs write, of what the network takes, is the scenario's.
        let written = |step: &Step| step.load.arrivals_per_ks * step.load.output_bytes / 1000;
        assert_eq!((written(&steps[0]), written(&steps[2])), (5_000_000, 5_500_000));
        assert_eq!((harsh(30)[1].name, harsh(30)[1].rate), ("network too slow", 4_000_000));
        assert_eq!(harsh(30)[3].load.compute_us, 180_000);
    }
}
