//! The model against the simulated VM, which does not know it; then the feedback, and what is said when nothing helps.

use std::time::Duration;

use super::*;
use crate::chance::Chance;
use crate::outbox::profile::Counters;
use crate::outbox::simulate::judge::{long_run_mean_s, predicted_and_measured_s};
use crate::outbox::simulate::run;
use crate::outbox::simulate::run::Static;
use crate::outbox::simulate::scenario::{BASE, Load, PERIOD_S, Phase, Scenario, mean_slo, settings, standard};
use crate::outbox::slo::{Slo, Statistic};
use crate::outbox::stream::exponential;

const MB: u64 = 1_000_000;

fn drop() -> Load {
    Load { drain: Rate(28 * MB), ..BASE }
}

/// What a load looks like to the model, if everything is known.
fn known(load: &Load) -> Inputs {
    let mut chance = Chance::new(99);
    let mut draw = || (0..load.erlang).map(|_| exponential(&mut chance)).sum::<f64>() / f64::from(load.erlang);
    let compute_s = load.compute_s * load.interference;
    let jobs = (0..4000).map(|_| JobSize { compute_s: compute_s * draw(), output: load.output.0 as f64 * draw() });
    Inputs {
        arrivals_per_s: load.arrivals_per_s,
        jobs: jobs.collect(),
        drain: load.drain.0 as f64,
        window: Duration::from_secs(PERIOD_S),
        arrivals: Arrivals::Told,
        parallel: 1.0,
    }
}

#[test]
fn the_model_says_what_the_simulated_vm_does() {
    let stream = Stream::new();
    for (load, sizes, tolerance) in [
        (BASE, [20, 50, 150, 1000], 0.05),
        (drop(), [50, 150, 300, 1000], 0.08),
        (Load { arrivals_per_s: 0.22, ..drop() }, [150, 300, 600, 1000], 0.10),
    ] {
        for size in sizes {
            let model = stream.responses(&known(&load), (size * MB) as f64, &mean_slo());
            let naive = long_run_mean_s(load, Bytes(size * MB), 5);
            let off = model.mean_s / naive - 1.0;
            assert!(off.abs() < tolerance, "{size} MB: {} for {naive}, {load:?}", model.mean_s);
        }
    }
}

#[test]
fn the_closed_form_is_right_at_both_ends() {
    for load in [BASE, Load { arrivals_per_s: 0.1, ..drop() }] {
        let inputs = known(&load);
        let end = interval(&inputs, &Curve::new(vec![(Bytes(1), 1.0)]), 1.0);
        // A space of two writes is the least that the simulated VM can use.
        let none_s = long_run_mean_s(load, Bytes(2 << 20), 6);
        let endless_s = long_run_mean_s(load, Bytes(100_000 * MB), 6);
        assert!((end.none_s / none_s - 1.0).abs() < 0.05, "{} {none_s}", end.none_s);
        assert!((end.endless_s / endless_s - 1.0).abs() < 0.05, "{} {endless_s}", end.endless_s);
    }
}

#[test]
fn a_larger_space_is_never_slower() {
    let stream = Stream::new();
    for load in [BASE, drop(), Load { arrivals_per_s: 0.3, ..drop() }] {
        let inputs = known(&load);
        let mut before = f64::INFINITY;
        for size in (0..40).map(|nth| nth * 25 * MB) {
            let mean_s = stream.responses(&inputs, size as f64, &mean_slo()).mean_s;
            assert!(mean_s <= before * (1.0 + 1e-12), "{size}: {mean_s} after {before}");
            before = mean_s;
        }
    }
}

#[test]
fn after_ten_periods_the_prediction_is_near() {
    // The bar is a tenth. Nearer to overload it is missed (docs/outbox-control-figures.md): 120 jobs say too little of their rate.
    for (load, size, error_max) in [(BASE, 100 * MB, 0.10), (drop(), 400 * MB, 0.20)] {
        let truth = long_run_mean_s(load, Bytes(size), 7);
        let errors = |pick: fn((f64, f64), f64) -> f64| {
            let pairs = (1..=30).filter_map(|seed| predicted_and_measured_s(load, Bytes(size), 10, seed));
            let mut errors: Vec<f64> = pairs.map(|pair| pick(pair, truth).abs()).collect();
            assert_eq!(errors.len(), 30);
            errors.sort_by(f64::total_cmp);
            errors[14]
        };
        let of_truth = errors(|(predicted, _), truth| predicted / truth - 1.0);
        let of_jobs = errors(|(predicted, measured), _| predicted / measured - 1.0);
        assert!(of_truth <= error_max, "against the long run: {of_truth:.3}, against these jobs: {of_jobs:.3}");
    }
}

fn profile_of(load: Load, start: Bytes, periods: usize) -> (Estimator, Option<Estimate>) {
    struct Keep(Estimator, Option<Estimate>);
    impl crate::outbox::control::Sizer for Keep {
        fn size(&mut self, profile: &Profiler, space: Bytes) -> crate::outbox::control::Decision {
            self.1 = self.0.update(profile, space);
            Static.size(profile, space)
        }
    }
    let scenario = Scenario { start, phases: vec![Phase { name: "one", periods, load }], ..standard(mean_slo(), 1) };
    let mut keep = Keep(Estimator::new(scenario.settings, Source::Open), None);
    run(&scenario, 11, &mut keep);
    (keep.0, keep.1)
}

#[test]
fn hidden_interference_is_learnt() {
    for interference in [0.8, 1.0, 1.25, 2.0] {
        let (_, estimate) = profile_of(Load { interference, arrivals_per_s: 0.1, ..BASE }, Bytes(100 * MB), 10);
        let terms = estimate.unwrap().terms;
        assert!((terms.compute_factor / interference - 1.0).abs() < 0.03, "{interference}: {terms:?}");
        assert!(terms.response_factor == 1.0, "what one factor explains is not corrected twice");
    }
}

/// Jobs that take longer than the model can say: each waits for something else before it begins.
#[test]
fn what_the_model_leaves_out_is_corrected() {
    let mut estimator = Estimator::new(settings(mean_slo()), Source::Open);
    let mut profile = Profiler::new(0, Counters::default());
    let mut counters = Counters::default();
    let mut last = None;
    for period in 0..30u64 {
        let at = |job: u64| period * 60_000 + job * 20_000;
        let job = |nth: u64| Job {
            arrived_ms: at(nth),
            began_ms: at(nth),
            ended_ms: at(nth) + 2600 + nth * 100,
            compute: Duration::from_millis(2000),
            // Reported as a wait for room, which the model knows there was none of.
            blocked: Duration::from_millis(600 + nth * 100),
            output: Bytes(10 * MB),
            backlog: Bytes::ZERO,
        };
        counters.arrivals += 3;
        counters.acknowledged += Bytes(30 * MB);
        counters.sending += Duration::from_secs(1);
        profile.close_period((period + 1) * 60_000, Bytes(64 * MB), counters, &[job(0), job(1), job(2)]);
        last = estimator.update(&profile, Bytes(64 * MB));
    }
    let estimate = last.unwrap();
    assert!((estimate.terms.response_factor - 1.35).abs() < 0.02, "{:?}", estimate.terms);
    assert!(estimate.error.is_some());
}

#[test]
fn unknown_computing_times_are_what_did_not_wait() {
    let mut profile = Profiler::new(0, Counters::default());
    let job = |nth: u64| Job {
        arrived_ms: nth * 5000,
        began_ms: nth * 5000,
        ended_ms: nth * 5000 + 2000,
        compute: Duration::ZERO,
        blocked: Duration::from_millis(500),
        output: Bytes(10 * MB),
        backlog: Bytes::ZERO,
    };
    let jobs: Vec<Job> = (0..12).map(job).collect();
    let (acknowledged, sending) = (Bytes(120 * MB), Duration::from_secs(3));
    let counters = Counters { acknowledged, sending, arrivals: 12, ..Counters::default() };
    profile.close_period(60_000, Bytes(64 * MB), counters, &jobs);
    let terms = Estimator::new(settings(mean_slo()), Source::Open).update(&profile, Bytes(64 * MB)).unwrap().terms;
    assert!((terms.compute_mean_s - 1.5).abs() < 1e-9 && terms.compute_factor == 1.0, "{terms:?}");
}

#[test]
fn too_little_is_said_to_be_too_little() {
    let (_, estimate) = profile_of(Load { arrivals_per_s: 0.01, ..BASE }, Bytes(100 * MB), 5);
    assert_eq!(estimate, None);
    let mut estimator = Estimator::new(settings(mean_slo()), Source::Open);
    assert_eq!(estimator.update(&Profiler::new(0, Counters::default()), Bytes(1)), None);
}

#[test]
fn where_memory_helps_and_what_would_help_else() {
    let of = |load: Load| profile_of(load, Bytes(200 * MB), 30).1.unwrap();
    // A job that computes longer than its output takes to send needs no memory: it never waits.
    let idle = of(Load { output: Bytes(MB), ..BASE });
    assert_eq!((idle.interval.sizes, idle.verdict), (None, Verdict::Kept));
    assert_eq!(idle.needed, settings(mean_slo()).min);
    let helped = of(Load { ..drop() });
    let (from, to) = helped.interval.sizes.unwrap();
    assert!(from < helped.needed && helped.needed < to && to < Bytes(1200 * MB), "{helped:?}");
    assert_eq!(helped.verdict, Verdict::Kept);
    // Overload: 20 MB/s into 16.
    let slow = of(Load { drain: Rate(16 * MB), ..BASE });
    let Verdict::Infeasible(help) = slow.verdict else { panic!("{slow:?}") };
    let (bandwidth, speed) = (help.bandwidth.unwrap(), help.compute_speed);
    assert!(help.is_overloaded && (Rate(18 * MB)..Rate(32 * MB)).contains(&bandwidth), "{help:?}");
    assert_eq!((speed, slow.needed), (None, settings(mean_slo()).min));
    // A guest that computes for too long: no bandwidth makes it faster.
    let busy = of(Load { interference: 1.8, ..BASE });
    let Verdict::Infeasible(help) = busy.verdict else { panic!("{busy:?}") };
    assert!(
        !help.is_overloaded && help.bandwidth.is_none() && help.compute_speed.is_some_and(|s| (1.1..1.8).contains(&s)),
        "{help:?}"
    );
    // With what it proposes, the SLO is kept.
    let mended = long_run_mean_s(Load { drain: bandwidth, ..BASE }, settings(mean_slo()).max, 3);
    assert!(mended < 4.6 * 1.1, "{mended}");
}

/// A guest that does `lanes` jobs at a time, each after the other with a pause of a second. A job computes for half a second and
/// writes 20 MB; 10 MB a second drain for each lane. Two periods of a minute with this space.
fn one_after_the_other(space: u64, lanes: u64) -> Profiler {
    let mut profile = Profiler::new(0, Counters::default());
    let (mut counters, mut at_s, mut backlog) = (Counters::default(), 0.0, 0.0);
    let (share, drain) = ((space / lanes) as f64, 10e6);
    for period in 1..=2u64 {
        let mut jobs = Vec::new();
        while at_s < period as f64 * 60.0 - 4.0 {
            let served = serve(JobSize { compute_s: 0.5, output: 20e6 }, backlog, share, drain);
            let ms = |s: f64| (s * 1000.0).round() as u64;
            let job = Job {
                arrived_ms: ms(at_s),
                began_ms: ms(at_s),
                ended_ms: ms(at_s + served.service_s),
                compute: Duration::ZERO,
                blocked: Duration::from_secs_f64(served.service_s - 0.5),
                output: Bytes(20_000_000),
                backlog: Bytes(backlog as u64 * lanes),
            };
            jobs.extend((0..lanes).map(|_| job));
            at_s += served.service_s + 1.0;
            backlog = (served.backlog - drain).max(0.0);
        }
        counters.arrivals += jobs.len() as u64;
        counters.acknowledged += Bytes(lanes * 400 * MB);
        counters.sending += Duration::from_secs(40);
        profile.close_period(period * 60_000, Bytes(space), counters, &jobs);
    }
    profile
}

/// Where each job begins after the one before, nobody queues: the response is the job itself, and a guest that is always busy
/// is not overloaded.
#[test]
fn jobs_that_follow_each_other_do_not_queue() {
    for lanes in [1, 3] {
        let space = 2 * MB * lanes;
        let profile = one_after_the_other(space, lanes);
        assert!((profile.parallel() / lanes as f64 - 1.0).abs() < 1e-9);
        let of = |limit_ms| {
            let slo = Slo { statistic: Statistic::Mean, limit: Duration::from_millis(limit_ms) };
            let settings = SpaceSettings { slo, max: Bytes(200 * MB), ..settings(slo) };
            Estimator::new(SpaceSettings { min: Bytes(MB), ..settings }, Source::Closed)
                .update(&profile, Bytes(space))
                .unwrap()
        };
        // (0 + 20 - B) / 10 seconds up to a space of 10 MB, which drains in a pause; 1 s from there on.
        let kept = of(1200);
        assert!((kept.now.mean_s - 1.8).abs() < 0.02, "{lanes}: {kept:?}");
        assert_eq!(kept.verdict, Verdict::Kept);
        assert!((kept.needed.0 as f64 / (8e6 * lanes as f64) - 1.0).abs() < 0.15, "{lanes}: {}", kept.needed);
        let Verdict::Infeasible(help) = of(700).verdict else { panic!("no space makes it faster than 1 s") };
        // 20 MB in 1.7 s.
        let needed = 20e6 / 1.7 * lanes as f64;
        assert!(help.is_overloaded && (help.bandwidth.unwrap().0 as f64 / needed - 1.0).abs() < 0.02, "{help:?}");
        let infeasible = of(700).needed;
        assert!(infeasible.0 > 5 * MB * lanes, "space is still of use: {infeasible}");
    }
}
