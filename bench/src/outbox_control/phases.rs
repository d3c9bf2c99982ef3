//! The course: guests through the standard scenario's phases at the same time, and one through phases that no size keeps.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_core::outbox::control::{Decision, Reason, Sizer};
use pagoda_core::outbox::pi::{Gains, Pi};
use pagoda_core::outbox::profile::{Counters, Job as Timed, Profiler};
use pagoda_core::outbox::settings::SpaceSettings;
use pagoda_core::outbox::simulate::PeriodRecord;
use pagoda_core::outbox::simulate::judge::{Tally, said_after, settled_after, tally};
use pagoda_core::outbox::slo::Slo;
use pagoda_core::units::Bytes;
use testkit::results::report::{Bar, NO_VALUE, Report, median};

use super::client::Manner;
use super::course::{BEGIN_MIB, MAX_MIB, MIN_MIB, SLO, Step, harsh, standard};
use super::drive::{self, Live, Plans, Progress, Track};
use super::lab::{Lab, PERIOD, Tenant};
use super::pair::{self, Pair};
use super::{ERROR_MAX, MEMORY_MAX, SAID_AFTER_MAX, WINDOWS_ABOVE_MAX};
use crate::balloon::guest::Start;
use crate::{Setup, svg};

/// Periods of a phase.
const PERIODS: usize = 30;
const PERIODS_QUICK: usize = 12;
/// After which a prediction is judged.
const PERIODS_PREDICTED: usize = 10;
/// The fixed sizes, in MiB.
const FIXED_MIB: &[u64] = &[1, 2, 3, 4, 6, 9];
const FIXED_MIB_QUICK: &[u64] = &[1, 4, 9];
/// Of the most that a VM may have: no more is kept where no size keeps the SLO.
const HOARDED_MAX: f64 = 0.25;
const MB: f64 = 1e6;
const SEED: u64 = 2600;
/// Names of the guests with a size of their own; the others are called after their sizes.
const AUTO: &str = "size-auto";
const PI: &str = "size-pi";
const HARSH: &str = "size-harsh";

/// The baseline, tuned in hindsight for this course: of 80 settings that were tried in a simulation of it, the one with the least
/// memory that has at most a tenth of the windows above the SLO in each feasible phase. Its steps are those of the simulated one, scaled.
const PI_IN_HINDSIGHT: Gains =
    Gains { setpoint: 0.78, integral: 15e6, proportional: 5e6, up_max: Bytes(1_000_000), down_max: Bytes(500_000) };

/// All guests of one round, period by period.
pub struct Round {
    auto: Vec<PeriodRecord>,
    pi: Vec<PeriodRecord>,
    harsh: Vec<PeriodRecord>,
    /// By size, the smallest first.
    fixed: Vec<(Bytes, Vec<PeriodRecord>, Track)>,
    pair: Option<Pair>,
}

/// Adds the rows, and returns their plot as SVG.
///
/// # Errors
/// A guest fails; wrong bytes were delivered.
pub fn run(setup: &Setup, start: &Start<'_>, report: &mut Report) -> Result<String> {
    let periods = if setup.quick { PERIODS_QUICK } else { PERIODS };
    let slo: Slo = SLO.parse().context("the SLO")?;
    let (steps, harsh_steps) = (standard(periods), harsh(periods));
    let mut rounds = Vec::new();
    for round in 0..setup.rounds as u64 {
        eprintln!("outbox-control: course, round {} of {}", round + 1, setup.rounds);
        rounds.push(one(setup, start, &slo, (&steps, &harsh_steps), SEED + 100 * round)?);
    }
    let before = report.figures.len();
    for (nth, step) in steps.iter().enumerate() {
        add_phase(report, &rounds, &slo, nth, step.name);
    }
    add_whole(report, &rounds, &slo, steps.len());
    add_harsh(report, &rounds, &slo, &harsh_steps);
    if periods > PERIODS_PREDICTED {
        add_predictions(report, &rounds, &steps);
    }
    pair::add(report, rounds.iter().filter_map(|round| round.pair.as_ref()));
    let of = format!("{}, periods of {} s, {periods} a phase, {SLO}", start.accelerator, PERIOD.as_secs());
    for figure in &mut report.figures[before..] {
        figure.name = format!("guests: {}", figure.name);
    }
    println!("guests: {of}");
    Ok(plot(&rounds[0], &slo, steps.len()))
}

fn one(
    setup: &Setup,
    start: &Start<'_>,
    slo: &Slo,
    (steps, harsh_steps): (&[Step], &[Step]),
    seed: u64,
) -> Result<Round> {
    let lab = Lab::start(setup)?;
    let sizes_mib = if setup.quick { FIXED_MIB_QUICK } else { FIXED_MIB };
    let mut tenants = boot(&lab, sizes_mib, start)?;
    let mut all = vec![steps.to_vec(); tenants.len()];
    all[2] = harsh_steps.to_vec();
    let plans = Plans { steps: &all, label: "course", seed, manner: Manner::Steady };
    let mut led = Led::new(slo);
    let tracks = drive::run(&lab, &mut tenants, &plans, |lives| led.step(&lab, &lives[1]))?;
    let mut records = Vec::new();
    for ((track, steps), tenant) in tracks.iter().zip(&all).zip(&tenants) {
        records.push(records_of(track, steps).with_context(|| tenant.name.clone())?);
    }
    show(&tenants, &tracks, &records, slo, steps);
    let fixed = records.split_off(3).into_iter().zip(tracks.into_iter().skip(3)).zip(sizes_mib);
    let fixed: Vec<_> = fixed.map(|((records, track), mib)| (Bytes::from_mib(*mib), records, track)).collect();
    let [auto, pi, harsh] = <[_; 3]>::try_from(records).ok().context("three guests")?;
    let mut rest = tenants.split_off(1);
    let other = rest.remove(0);
    for tenant in rest {
        lab.end(tenant)?;
    }
    tenants.push(other);
    let kept = |slo: &Slo| best_fixed(&fixed, 1, slo);
    let pair = pair::measure(&lab, tenants, kept, steps[0].periods, seed + 50)?;
    Ok(Round { auto, pi, harsh, fixed, pair: Some(pair) })
}

fn boot(lab: &Lab, sizes_mib: &[u64], start: &Start<'_>) -> Result<Vec<Tenant>> {
    let begin = format!("{BEGIN_MIB}M");
    let follows = ["--outbox", "auto", "--outbox-slo", SLO].map(str::to_owned).to_vec();
    let by_hand = ["--outbox", &begin].map(str::to_owned).to_vec();
    let mut wanted =
        vec![(AUTO.to_owned(), follows.clone()), (PI.to_owned(), by_hand), (HARSH.to_owned(), follows.clone())];
    wanted.extend(sizes_mib.iter().map(|mib| (format!("size-{mib}"), follows.clone())));
    let tenants = lab.boot(&wanted, start)?;
    let [min, max] = [MIN_MIB, MAX_MIB].map(|mib| format!("{mib}M"));
    for name in [AUTO, HARSH] {
        // An outbox that follows an SLO begins with 64 MiB: here with what the scenario begins with.
        lab.pagoda(&["outbox", "set", name, "--space", &begin])?;
        lab.pagoda(&["outbox", "set", name, "--space", "auto", "--slo", SLO, "--min", &min, "--max", &max])?;
    }
    for mib in sizes_mib {
        // It cannot change, and is explained all the same.
        let (name, size) = (format!("size-{mib}"), format!("{mib}M"));
        lab.pagoda(&["outbox", "set", &name, "--space", "auto", "--min", &size, "--max", &size])?;
    }
    Ok(tenants)
}

/// The baseline, which sizes its guest's outbox by hand.
struct Led {
    pi: Pi,
    epoch: Instant,
    looked: Instant,
    space: Bytes,
}

impl Led {
    fn new(slo: &Slo) -> Led {
        let settings =
            SpaceSettings { slo: *slo, min: Bytes::from_mib(MIN_MIB), max: Bytes::from_mib(MAX_MIB), window: PERIOD };
        let now = Instant::now();
        Led { pi: Pi::new(settings, PI_IN_HINDSIGHT), epoch: now, looked: now, space: Bytes::from_mib(BEGIN_MIB) }
    }

    /// The end of one of its periods.
    fn step(&mut self, lab: &Lab, live: &Live) -> Result<()> {
        let now = Instant::now();
        let ms = |at: Instant| at.saturating_duration_since(self.epoch).as_millis() as u64;
        let jobs: Vec<Timed> = live.ended_between(self.looked, now).iter().map(|job| timed(job, ms(now))).collect();
        let mut profile = Profiler::new(ms(self.looked), Counters::default());
        profile.close_period(ms(now).max(ms(self.looked) + 1), self.space, Counters::default(), &jobs);
        self.looked = now;
        let Decision { space, .. } = self.pi.size(&profile, self.space);
        if space != self.space {
            self.space = space;
            // In whole KiB, as sizes are written.
            let size = format!("{}K", (space.0 >> 10).max(MIN_MIB << 10));
            lab.pagoda(&["outbox", "set", PI, "--space", &size])?;
        }
        Ok(())
    }
}

/// A job as the controller knows it: what it took is all that matters here.
fn timed(job: &drive::Job, now_ms: u64) -> Timed {
    let began_ms = now_ms.saturating_sub((job.took_s() * 1000.0).round() as u64);
    Timed {
        arrived_ms: began_ms,
        began_ms,
        ended_ms: now_ms,
        compute: Duration::ZERO,
        blocked: Duration::ZERO,
        output: Bytes(job.bytes),
        backlog: Bytes::ZERO,
    }
}

/// What happened in each window of each step.
pub fn records_of(track: &Track, steps: &[Step]) -> Result<Vec<PeriodRecord>> {
    let mut records = Vec::new();
    for (phase, (progress, step)) in track.steps.iter().zip(steps).enumerate() {
        for window in 0..step.periods {
            records.push(record(track, phase, progress, window).with_context(|| step.name)?);
        }
    }
    Ok(records)
}

fn record(track: &Track, phase: usize, progress: &Progress, window: usize) -> Result<PeriodRecord> {
    let begun = progress.begun.context("a step that never began")?;
    let length_s = PERIOD.as_secs_f64();
    let (from_s, to_s) = (window as f64 * length_s, (window + 1) as f64 * length_s);
    let jobs = progress.jobs.iter().filter(|job| from_s < job.ended_s && job.ended_s <= to_s);
    let responses: Vec<f64> = jobs.map(drive::Job::took_s).collect();
    let to = begun + Duration::from_secs_f64(to_s);
    let seen = track.samples.iter().rfind(|sample| sample.at <= to).or_else(|| track.samples.first());
    let seen = seen.context("nobody has looked at its outbox")?;
    let reason = match seen.verdict.as_deref() {
        Some("infeasible") => Reason::Infeasible,
        Some("marginal") => Reason::Marginal,
        Some(_) => Reason::Enough,
        None => Reason::NotKnown,
    };
    let space = Bytes(seen.space);
    let decision = Decision { space, reason, estimate: None };
    Ok(PeriodRecord { phase, space, responses, decision, refused: 0 })
}

/// The smallest fixed size that keeps the SLO in a phase.
fn best_fixed(fixed: &[(Bytes, Vec<PeriodRecord>, Track)], phase: usize, slo: &Slo) -> Option<Bytes> {
    let keeps = |records: &[PeriodRecord]| tally(records, phase, slo).windows_above() * 100.0 <= WINDOWS_ABOVE_MAX;
    // One that keeps it by chance while larger ones do not is not it.
    let kept = fixed.iter().rev().take_while(|(_, records, _)| keeps(records));
    kept.last().map(|(size, ..)| *size)
}

fn show(tenants: &[Tenant], tracks: &[Track], records: &[Vec<PeriodRecord>], slo: &Slo, steps: &[Step]) {
    for ((tenant, track), records) in tenants.iter().zip(tracks).zip(records) {
        let of = |(phase, step): (usize, &Step)| {
            let Tally { jobs, windows, above, .. } = tally(records, phase, slo);
            let arrived: f64 = track.steps[phase].jobs.iter().map(|job| job.ended_s - job.arrived_s).sum();
            let whole = tally(records, phase, slo);
            format!(
                "{}: {jobs} jobs, mean {:.0} ms ({:.0} from their arrival), {above} of {windows} windows above, {:.1} MB",
                step.name,
                whole.mean_s() * 1e3,
                arrived * 1e3 / track.steps[phase].jobs.len().max(1) as f64,
                whole.space() / MB
            )
        };
        let all: Vec<String> = steps.iter().enumerate().map(of).collect();
        eprintln!("outbox-control: {}: {}; {} bytes were right", tenant.name, all.join("; "), track.taken.bytes);
        let spaces: Vec<String> = records.iter().map(|record| format!("{:.1}", record.space.0 as f64 / MB)).collect();
        eprintln!("outbox-control: {}: MB by period: {}", tenant.name, spaces.join(" "));
    }
}

/// The rows of one phase.
fn add_phase(report: &mut Report, rounds: &[Round], slo: &Slo, phase: usize, name: &str) {
    let of = |pick: &dyn Fn(&Round) -> f64| rounds.iter().map(pick).collect::<Vec<f64>>();
    let above = |records: &[PeriodRecord]| tally(records, phase, slo).windows_above() * 100.0;
    let space = |records: &[PeriodRecord]| tally(records, phase, slo).space() / MB;
    let best: Vec<Option<Bytes>> = rounds.iter().map(|round| best_fixed(&round.fixed, phase, slo)).collect();
    let is_feasible = best.iter().any(Option::is_some);
    let bar = if is_feasible { Bar::AtMost(WINDOWS_ABOVE_MAX) } else { Bar::None };
    report.single(&format!("{name}: windows above the SLO"), "%", &of(&|round| above(&round.auto)), bar);
    let fixed = |nth: usize| {
        let shares = of(&|round| above(&round.fixed[nth].1));
        format!("{} {:.0} %", rounds[0].fixed[nth].0, median(&shares).unwrap_or(NO_VALUE))
    };
    let all: Vec<String> = (0..rounds[0].fixed.len()).map(fixed).collect();
    report.note(format!("of fixed sizes: {}", all.join(", ")));
    report.peer_only(&format!("{name}: the same, PI in hindsight"), "%", &of(&|round| above(&round.pi)));
    let means = of(&|round| tally(&round.auto, phase, slo).mean_s() * 1e3);
    let of_pi = of(&|round| tally(&round.pi, phase, slo).mean_s() * 1e3);
    report.pair(&format!("{name}: mean response, against PI"), "ms", &means, &of_pi, Bar::None);
    let spaces = of(&|round| space(&round.auto));
    report.pair(&format!("{name}: space, against PI"), "MB", &spaces, &of(&|round| space(&round.pi)), Bar::None);
    if !is_feasible {
        report.note("no fixed size keeps the SLO".to_owned());
        return;
    }
    let fixed: Vec<f64> = best.iter().map(|best| best.map_or(NO_VALUE, |best| best.0 as f64 / MB)).collect();
    let row = format!("{name}: space, against the best of the fixed sizes");
    report.pair(&row, "MB", &spaces, &fixed, Bar::AtMost(MEMORY_MAX));
    let settled = |records: &[PeriodRecord], best: Option<Bytes>| {
        best.map_or(NO_VALUE, |best| settled_after(records, phase, best) as f64)
    };
    let ours: Vec<f64> = rounds.iter().zip(&best).map(|(round, best)| settled(&round.auto, *best)).collect();
    let peer: Vec<f64> = rounds.iter().zip(&best).map(|(round, best)| settled(&round.pi, *best)).collect();
    report.pair(&format!("{name}: periods until settled, against PI"), "", &ours, &peer, Bar::AtMost(1.0));
}

/// One fixed size for the whole course has to keep its hardest feasible phase.
fn add_whole(report: &mut Report, rounds: &[Round], slo: &Slo, phases: usize) {
    let space = |records: &[PeriodRecord]| {
        let tallies = (0..phases).map(|phase| tally(records, phase, slo));
        tallies.fold(Tally::default(), Tally::with).space() / MB
    };
    let largest = |round: &Round| {
        let best = (0..phases).filter_map(|phase| best_fixed(&round.fixed, phase, slo)).max();
        best.map_or(NO_VALUE, |best| best.0 as f64 / MB)
    };
    let ours: Vec<f64> = rounds.iter().map(|round| space(&round.auto)).collect();
    let fixed: Vec<f64> = rounds.iter().map(largest).collect();
    let row = "whole course: space, against the best of the fixed sizes";
    report.pair(row, "MB", &ours, &fixed, Bar::AtMost(MEMORY_MAX));
}

/// What no size can keep.
fn add_harsh(report: &mut Report, rounds: &[Round], slo: &Slo, steps: &[Step]) {
    let max = Bytes::from_mib(MAX_MIB).0 as f64 / MB;
    for phase in [1, 3] {
        let name = steps[phase].name;
        let says = |record: &PeriodRecord| record.decision.reason == Reason::Infeasible;
        let said =
            |round: &Round| said_after(&round.harsh, phase, says).map_or(f64::INFINITY, |periods| periods as f64);
        let said: Vec<f64> = rounds.iter().map(said).collect();
        report.single(&format!("{name}: periods until infeasible is said"), "", &said, Bar::AtMost(SAID_AFTER_MAX));
        let spaces: Vec<f64> = rounds.iter().map(|round| tally(&round.harsh, phase, slo).space() / MB).collect();
        let most = vec![max; rounds.len()];
        let row = format!("{name}: space, against what it may have");
        report.pair(&row, "MB", &spaces, &most, Bar::AtMost(HOARDED_MAX));
        let last = |round: &Round| round.harsh.iter().rfind(|record| record.phase == phase).map(|record| record.space);
        let last: Vec<f64> = rounds.iter().filter_map(last).map(|space| space.0 as f64 / MB).collect();
        report.note(format!("{:.1} MB at its end", median(&last).unwrap_or(NO_VALUE)));
    }
}

/// What the estimator said of the mean for each fixed size, against what the jobs of the whole phase took.
fn add_predictions(report: &mut Report, rounds: &[Round], steps: &[Step]) {
    for (phase, step) in steps.iter().enumerate().take(2) {
        let errors: Vec<f64> = rounds
            .iter()
            .flat_map(|round| round.fixed.iter().filter_map(|(.., track)| prediction_error(track, phase)))
            .collect();
        let name = step.name;
        let row = format!("{name}: error of the predicted mean after {PERIODS_PREDICTED} periods");
        report.single(&row, "%", &errors, Bar::AtMost(ERROR_MAX));
        let within = errors.iter().filter(|error| **error <= ERROR_MAX).count();
        report.note(format!("within {ERROR_MAX:.0} % in {within} of {} guests of fixed sizes", errors.len()));
    }
}

fn prediction_error(track: &Track, phase: usize) -> Option<f64> {
    let progress = &track.steps[phase];
    let due = progress.begun? + PERIOD * PERIODS_PREDICTED as u32;
    let sample = track.samples.iter().find(|sample| sample.at >= due)?;
    let jobs = progress.jobs.len().max(1) as f64;
    let measured_s = progress.jobs.iter().map(drive::Job::took_s).sum::<f64>() / jobs;
    Some((sample.predicted_s? / measured_s - 1.0).abs() * 100.0)
}

fn plot(round: &Round, slo: &Slo, phases: usize) -> String {
    let line = |records: &[PeriodRecord]| {
        let points = records.iter().enumerate();
        points.map(|(nth, record)| [nth as f64, record.space.0 as f64 / MB]).collect::<Vec<[f64; 2]>>()
    };
    let best: Vec<Option<Bytes>> = (0..phases).map(|phase| best_fixed(&round.fixed, phase, slo)).collect();
    let fixed = round.auto.iter().enumerate().filter_map(|(period, record)| {
        let size = best[record.phase]?;
        Some([period as f64, size.0 as f64 / MB])
    });
    svg::line_chart(&svg::LineChart {
        title: "Space of an outbox by its SLO (guests)".to_owned(),
        x_label: format!("period of {} s", PERIOD.as_secs()),
        y_label: "MB".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series: vec![
            ("Pagoda".to_owned(), line(&round.auto)),
            ("PI in hindsight".to_owned(), line(&round.pi)),
            ("best of the fixed sizes, where one keeps the SLO".to_owned(), fixed.collect()),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox_control::drive::{Job, Sample};

    #[test]
    fn windows_have_the_jobs_that_ended_in_them_and_what_was_seen_by_then() {
        let begun = Instant::now();
        let job = |began_s: f64, ended_s: f64| Job { arrived_s: 0.0, began_s, ended_s, bytes: 1 };
        let jobs = vec![job(0.5, 1.0), job(2.9, 3.0), job(2.95, 3.5), job(5.9, 6.1)];
        let progress = Progress { begun: Some(begun), jobs, ..Progress::default() };
        let sample = |s: f64, space, verdict: Option<&str>| Sample {
            at: begun + Duration::from_secs_f64(s),
            space,
            verdict: verdict.map(str::to_owned),
            predicted_s: None,
        };
        let samples = vec![sample(2.0, 5, None), sample(5.0, 6, Some("infeasible"))];
        let track = Track { steps: vec![progress], samples, ..Track::default() };
        let mut steps = standard(2);
        steps.truncate(1);
        let records = records_of(&track, &steps).unwrap();
        let seen: Vec<_> = records.iter().map(|record| (record.space.0, record.responses.len())).collect();
        assert_eq!(seen, [(5, 2), (6, 1)]);
        assert_eq!((records[0].decision.reason, records[1].decision.reason), (Reason::NotKnown, Reason::Infeasible));
    }
}
