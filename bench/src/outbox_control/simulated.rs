//! The same in simulation: the standard scenario (bandwidth drop, load step, hidden interference) and a
//! harsher one, against the best fixed size for one who knows each phase beforehand, and a PI controller.
//!
//! No guest takes part: jobs and networks are simulated. Each round has seeds of its own; they are printed.

use std::time::Instant;

use anyhow::{Context, Result};
use pagoda_core::outbox::control::{Reason, SelfTuning};
use pagoda_core::outbox::pi::Pi;
use pagoda_core::outbox::simulate::judge::{
    Tally, best_static, long_run_mean_s, predicted_and_measured_s, said_after, settled_after, tally,
};
use pagoda_core::outbox::simulate::scenario::{BASE, Load, PI_IN_HINDSIGHT, harsh, mean_slo, standard};
use pagoda_core::outbox::simulate::{PeriodRecord, Phase, Scenario, Tenant, run as simulate, run_pool};
use pagoda_core::outbox::slo::{Slo, Statistic};
use pagoda_core::outbox::units::Rate;
use pagoda_core::policy::Shares;
use pagoda_core::units::Bytes;
use testkit::results::report::{Bar, NO_VALUE, Report, median};

use super::{ERROR_MAX, MEMORY_MAX, SAID_AFTER_MAX, WINDOWS_ABOVE_MAX};
use crate::{Setup, svg};

/// Seeds of a round. The first of all is one that no constant was chosen with.
const SEEDS: u64 = 8;
const FIRST_SEED: u64 = 100;
/// How many periods a phase of the load has.
const PERIODS: usize = 60;
const PERIODS_HARSH: usize = 30;
/// After which a prediction is judged.
const PERIODS_PREDICTED: usize = 10;
const MB: f64 = 1e6;

/// All runs of one round.
struct Round {
    ours: Vec<Vec<PeriodRecord>>,
    pi: Vec<Vec<PeriodRecord>>,
    estimate_ms: f64,
}

/// Adds the rows of the simulation, and returns their plot as SVG.
///
/// # Errors
/// No fixed size keeps the SLO where one has to.
pub fn run(setup: &Setup, report: &mut Report) -> Result<String> {
    let before = report.figures.len();
    let scenario = standard(mean_slo(), PERIODS);
    let best: Vec<Option<Bytes>> =
        scenario.phases.iter().map(|phase| best_static(phase.load, scenario.settings.slo, 17)).collect();
    let rounds: Vec<Round> = (0..setup.rounds as u64).map(|round| run_round(&scenario, round)).collect();
    println!(
        "simulated; seeds {FIRST_SEED} to {}, {SEEDS} a round, {PERIODS} periods a phase",
        FIRST_SEED + SEEDS * setup.rounds as u64 - 1
    );
    for (nth, phase) in scenario.phases.iter().enumerate() {
        add_phase(report, &rounds, &scenario, nth, phase.name, best[nth]);
    }
    add_whole(report, &rounds, &scenario, &best)?;
    infeasible(setup, report);
    predictions(setup, report);
    two_vms(setup, report)?;
    let ms: Vec<f64> = rounds.iter().map(|round| round.estimate_ms).collect();
    report.single("time of a period: simulation and estimate", "ms", &ms, Bar::None);
    for figure in &mut report.figures[before..] {
        figure.name = format!("simulated: {}", figure.name);
    }
    Ok(plot(&rounds[0], &scenario, &best))
}

fn seeds(round: u64) -> std::ops::Range<u64> {
    let first = FIRST_SEED + round * SEEDS;
    first..first + SEEDS
}

fn run_round(scenario: &Scenario, round: u64) -> Round {
    let start = Instant::now();
    let ours: Vec<_> =
        seeds(round).map(|seed| simulate(scenario, seed, &mut SelfTuning::new(scenario.settings))).collect();
    let estimate_ms = start.elapsed().as_secs_f64() * 1000.0 / (SEEDS as usize * scenario.periods()) as f64;
    let pi = |seed| simulate(scenario, seed, &mut Pi::new(scenario.settings, PI_IN_HINDSIGHT));
    Round { ours, pi: seeds(round).map(pi).collect(), estimate_ms }
}

fn sum(runs: &[Vec<PeriodRecord>], phase: usize, slo: &Slo) -> Tally {
    runs.iter().map(|records| tally(records, phase, slo)).fold(Tally::default(), Tally::with)
}

fn settled(runs: &[Vec<PeriodRecord>], phase: usize, best: Bytes) -> f64 {
    let periods: Vec<f64> = runs.iter().map(|records| settled_after(records, phase, best) as f64).collect();
    median(&periods).unwrap_or(NO_VALUE)
}

/// The rows of one phase of the standard scenario.
fn add_phase(
    report: &mut Report,
    rounds: &[Round],
    scenario: &Scenario,
    phase: usize,
    name: &str,
    best: Option<Bytes>,
) {
    let slo = &scenario.settings.slo;
    let of = |pick: &dyn Fn(&Round) -> f64| rounds.iter().map(pick).collect::<Vec<f64>>();
    let above = |runs: &[Vec<PeriodRecord>]| sum(runs, phase, slo).windows_above() * 100.0;
    let space = |runs: &[Vec<PeriodRecord>]| sum(runs, phase, slo).space() / MB;
    let bar = if best.is_some() { Bar::AtMost(WINDOWS_ABOVE_MAX) } else { Bar::None };
    report.single(&format!("{name}: windows above the SLO"), "%", &of(&|round| above(&round.ours)), bar);
    if best.is_none() {
        let all = Bytes(u64::MAX >> 8);
        let mean_s = long_run_mean_s(scenario.phases[phase].load, all, 17);
        report.note(format!("no fixed size keeps it; the mean with endless memory is {mean_s:.2} s"));
    }
    report.peer_only(&format!("{name}: the same, PI in hindsight"), "%", &of(&|round| above(&round.pi)));
    let means = of(&|round| sum(&round.ours, phase, slo).mean_s());
    let of_pi = of(&|round| sum(&round.pi, phase, slo).mean_s());
    report.pair(&format!("{name}: mean response, against PI"), "s", &means, &of_pi, Bar::None);
    let spaces = of(&|round| space(&round.ours));
    report.pair(&format!("{name}: space, against PI"), "MB", &spaces, &of(&|round| space(&round.pi)), Bar::None);
    let Some(best) = best else { return };
    let fixed = vec![best.0 as f64 / MB; rounds.len()];
    report.pair(
        &format!("{name}: space, against the best fixed for this phase"),
        "MB",
        &spaces,
        &fixed,
        Bar::AtMost(MEMORY_MAX),
    );
    let ours = of(&|round| settled(&round.ours, phase, best));
    let peer = of(&|round| settled(&round.pi, phase, best));
    report.pair(&format!("{name}: periods until settled, against PI"), "", &ours, &peer, Bar::AtMost(1.0));
}

/// One fixed size for the whole scenario has to keep its hardest feasible phase.
fn add_whole(report: &mut Report, rounds: &[Round], scenario: &Scenario, best: &[Option<Bytes>]) -> Result<()> {
    let largest = best.iter().flatten().max().context("no fixed size keeps the SLO in any phase")?;
    let space = |runs: &[Vec<PeriodRecord>]| {
        let tallies = (0..scenario.phases.len()).map(|phase| sum(runs, phase, &scenario.settings.slo));
        tallies.fold(Tally::default(), Tally::with).space() / MB
    };
    let ours: Vec<f64> = rounds.iter().map(|round| space(&round.ours)).collect();
    let fixed = vec![largest.0 as f64 / MB; rounds.len()];
    report.pair("whole scenario: space, against the best fixed", "MB", &ours, &fixed, Bar::AtMost(MEMORY_MAX));
    let said = |records: &Vec<PeriodRecord>| {
        let says = |record: &PeriodRecord| matches!(record.decision.reason, Reason::Marginal | Reason::Infeasible);
        said_after(records, scenario.phases.len() - 1, says).map_or(f64::INFINITY, |periods| periods as f64)
    };
    let worst: Vec<f64> = rounds.iter().map(|round| round.ours.iter().map(said).fold(0.0, f64::max)).collect();
    let name = "interference: periods until it is said that memory alone does not do, slowest seed";
    report.single(name, "", &worst, Bar::AtMost(SAID_AFTER_MAX));
    Ok(())
}

/// The harsh scenario: what no memory can keep.
fn infeasible(setup: &Setup, report: &mut Report) {
    let scenario = harsh(mean_slo(), PERIODS_HARSH);
    for phase in [1, 3] {
        let name = scenario.phases[phase].name;
        let [mut said, mut ours, mut pi] = [const { Vec::new() }; 3];
        for round in 0..setup.rounds as u64 {
            let mut slowest = 0.0;
            let (mut own, mut peer) = (Tally::default(), Tally::default());
            for seed in seeds(round) {
                let records = simulate(&scenario, seed, &mut SelfTuning::new(scenario.settings));
                let says = |record: &PeriodRecord| record.decision.reason == Reason::Infeasible;
                let after = said_after(&records, phase, says).map_or(f64::INFINITY, |periods| periods as f64);
                slowest = f64::max(slowest, after);
                own = own.with(tally(&records, phase, &scenario.settings.slo));
                let records = simulate(&scenario, seed, &mut Pi::new(scenario.settings, PI_IN_HINDSIGHT));
                peer = peer.with(tally(&records, phase, &scenario.settings.slo));
            }
            said.push(slowest);
            ours.push(own.space() / MB);
            pi.push(peer.space() / MB);
        }
        let row = format!("{name}: periods until infeasible is said, slowest seed");
        report.single(&row, "", &said, Bar::AtMost(SAID_AFTER_MAX));
        report.pair(&format!("{name}: space, against PI"), "MB", &ours, &pi, Bar::None);
    }
}

/// The estimator with a fixed size, after ten periods.
fn predictions(setup: &Setup, report: &mut Report) {
    for (name, load, size) in [("base", BASE, Bytes(100_000_000)), ("bandwidth drop", dropped(), Bytes(400_000_000))] {
        let truth = long_run_mean_s(load, size, 17);
        let (mut of_run, mut of_jobs) = (Vec::new(), Vec::new());
        for round in 0..setup.rounds as u64 {
            let pairs = seeds(round).filter_map(|seed| predicted_and_measured_s(load, size, PERIODS_PREDICTED, seed));
            for (predicted, measured) in pairs {
                of_run.push((predicted / truth - 1.0).abs() * 100.0);
                of_jobs.push((predicted / measured - 1.0).abs() * 100.0);
            }
        }
        let row =
            format!("{name}: error of the predicted mean after {PERIODS_PREDICTED} periods, against the long run");
        report.single(&row, "%", &of_run, Bar::AtMost(ERROR_MAX));
        let within = of_run.iter().filter(|error| **error <= ERROR_MAX).count() * 100 / of_run.len().max(1);
        report.note(format!("within {ERROR_MAX:.0} % with {within} % of the seeds"));
        report.single(&format!("{name}: the same, against these periods' jobs"), "%", &of_jobs, Bar::None);
    }
}

fn dropped() -> Load {
    Load { drain: Rate(28_000_000), ..BASE }
}

/// Two VMs with different SLOs and weights on a pool too small for both fixed sizes.
fn two_vms(setup: &Setup, report: &mut Report) -> Result<()> {
    let slo = |ms| Slo { statistic: Statistic::Mean, limit: std::time::Duration::from_millis(ms) };
    let slos = [slo(4600), slo(6000)];
    let weights = [Shares::new(2000)?, Shares::new(1000)?];
    let scenarios = slos.map(|slo| {
        let phases = vec![Phase { name: "both", periods: PERIODS, load: dropped() }];
        Scenario { phases, ..standard(slo, 1) }
    });
    let need = best_static(dropped(), slos[0], 17).context("no fixed size keeps the heavier VM's SLO")?;
    let other = best_static(dropped(), slos[1], 17).context("no fixed size keeps the lighter VM's SLO")?;
    let pool = Bytes(need.0 + other.0 / 2);
    let [mut heavy, mut light] = [const { Vec::new() }; 2];
    for round in 0..setup.rounds as u64 {
        let mut both = [Tally::default(); 2];
        for seed in seeds(round) {
            let tenant = |nth: usize| {
                let scenario = &scenarios[nth];
                Tenant { scenario, weight: weights[nth], sizer: Box::new(SelfTuning::new(scenario.settings)) }
            };
            let made = run_pool(vec![tenant(0), tenant(1)], |_| pool, seed);
            for (nth, records) in made.records.iter().enumerate() {
                both[nth] = both[nth].with(tally(records, 0, &slos[nth]));
            }
        }
        heavy.push(both[0].windows_above() * 100.0);
        light.push(both[1].windows_above() * 100.0);
    }
    let row = "two VMs, pool too small: windows above, the VM of twice the weight";
    report.single(row, "%", &heavy, Bar::AtMost(WINDOWS_ABOVE_MAX));
    report.note(format!("{pool} for VMs that need {need} and {other}"));
    report.single("two VMs, pool too small: windows above, the lighter VM", "%", &light, Bar::None);
    Ok(())
}

fn plot(round: &Round, scenario: &Scenario, best: &[Option<Bytes>]) -> String {
    let line = |records: &[PeriodRecord]| {
        let points = records.iter().enumerate();
        points.map(|(nth, record)| [nth as f64, record.space.0 as f64 / MB]).collect::<Vec<[f64; 2]>>()
    };
    let fixed = (0..scenario.periods()).filter_map(|period| {
        let size = best[scenario.phase_at(period)]?;
        Some([period as f64, size.0 as f64 / MB])
    });
    svg::line_chart(&svg::LineChart {
        title: "Space of an outbox by its SLO (simulated)".to_owned(),
        x_label: "period of a minute".to_owned(),
        y_label: "MB".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series: vec![
            ("Pagoda".to_owned(), line(&round.ours[0])),
            ("PI in hindsight".to_owned(), line(&round.pi[0])),
            ("best fixed, where one keeps the SLO".to_owned(), fixed.collect()),
        ],
    })
}
