//! The standard scenario and its bars, harsher ones, shared pools, and random ones whose promises must hold in every period.

use super::judge::{Tally, best_static, long_run_mean_s, said_after, settled_after, tally};
use super::run::Static;
use super::scenario::{BASE, Load, PI_IN_HINDSIGHT, harsh, mean_slo, standard};
use super::*;
use crate::outbox::control::{Decision, Reason, SelfTuning, Sizer};
use crate::outbox::estimate::Verdict;
use crate::outbox::pi::Pi;
use crate::outbox::profile::{Counters, Job, Profiler};
use crate::outbox::slo::{Slo, Statistic};
use crate::outbox::units::Rate;
use crate::policy::Shares;
use crate::units::Bytes;
use proptest::prelude::*;
use std::time::Duration;

const MB: u64 = 1_000_000;
const SEEDS: std::ops::RangeInclusive<u64> = 1..=5;
const SEEDS_FEW: std::ops::RangeInclusive<u64> = 1..=2;
/// The bar is 0.10, and `cargo xtask bench outbox-control` holds it to that with many seeds. With these few, chance alone
/// moves the part of 300 windows by 0.03.
const WINDOWS_ABOVE_MAX: f64 = 0.13;
const MEMORY_MAX: f64 = 1.25;
const SAID_AFTER_MAX: usize = 5;

fn ours(scenario: &Scenario, seed: u64) -> Vec<PeriodRecord> {
    run(scenario, seed, &mut SelfTuning::new(scenario.settings))
}

fn tallies(runs: &[Vec<PeriodRecord>], scenario: &Scenario) -> Vec<Tally> {
    let of =
        |phase| runs.iter().map(|run| tally(run, phase, &scenario.settings.slo)).fold(Tally::default(), Tally::with);
    (0..scenario.phases.len()).map(of).collect()
}

fn median(mut values: Vec<usize>) -> usize {
    values.sort_unstable();
    values[values.len() / 2]
}

#[test]
fn fixed_sizes_are_as_slow_as_in_the_earlier_simulation() {
    let scenario = standard(mean_slo(), 1);
    for (size, expected) in
        [(50, [3.78, 6.62, 8.97, 9.87]), (200, [3.20, 4.30, 5.93, 6.55]), (800, [3.15, 3.16, 3.53, 4.11])]
    {
        for (phase, expected) in scenario.phases.iter().zip(expected) {
            let mean_s = long_run_mean_s(phase.load, Bytes(size * MB), 3);
            let off = mean_s / expected - 1.0;
            assert!(off.abs() < 0.13, "{size} MB, {}: {mean_s:.2} s, expected {expected}", phase.name);
        }
    }
}

#[test]
fn the_slo_is_kept_where_memory_can_keep_it() {
    let scenario = standard(mean_slo(), 60);
    let runs: Vec<_> = SEEDS.map(|seed| ours(&scenario, seed)).collect();
    let peers: Vec<_> =
        SEEDS.map(|seed| run(&scenario, seed, &mut Pi::new(scenario.settings, PI_IN_HINDSIGHT))).collect();
    let best: Vec<Option<Bytes>> =
        scenario.phases.iter().map(|phase| best_static(phase.load, scenario.settings.slo, 17)).collect();
    assert!(best[..3].iter().all(Option::is_some) && best[3].is_none(), "{best:?}");
    let (ours, theirs) = (tallies(&runs, &scenario), tallies(&peers, &scenario));
    for (nth, phase) in scenario.phases.iter().enumerate() {
        let of = |tally: &Tally| {
            format!("{:.3} above, mean {:.2} s, {:.0} MB", tally.windows_above(), tally.mean_s(), tally.space() / 1e6)
        };
        println!("{}: ours {}; PI {}; best fixed {:?}", phase.name, of(&ours[nth]), of(&theirs[nth]), best[nth]);
    }
    let largest = best.iter().flatten().max().unwrap().0 as f64;
    for (nth, best) in best.iter().enumerate() {
        let Some(best) = *best else { continue };
        let settled =
            |runs: &[Vec<PeriodRecord>]| median(runs.iter().map(|run| settled_after(run, nth, best)).collect());
        println!("settled after {} periods, PI {}", settled(&runs), settled(&peers));
        assert!(ours[nth].windows_above() <= WINDOWS_ABOVE_MAX, "{:?}", ours[nth]);
        assert!(settled(&runs) <= settled(&peers), "{nth}");
    }
    let space = ours.iter().map(Tally::space).sum::<f64>() / ours.len() as f64;
    println!("{:.0} MB in all, the best fixed size {:.0}", space / 1e6, largest / 1e6);
    assert!(space <= MEMORY_MAX * largest);
    assert!(ours.iter().all(|tally| tally.refused == 0));
    // In the last phase even all memory leaves more than a tenth of the windows above.
    let said = |run: &Vec<PeriodRecord>| {
        said_after(run, 3, |record| matches!(record.decision.reason, Reason::Marginal | Reason::Infeasible))
    };
    assert!(runs.iter().all(|run| said(run).is_some_and(|after| after <= SAID_AFTER_MAX)));
}

#[test]
fn what_no_memory_can_keep_is_said_and_not_hoarded_for() {
    let scenario = harsh(mean_slo(), 30);
    for seed in SEEDS_FEW {
        let records = ours(&scenario, seed);
        for phase in [1, 3] {
            let said = said_after(&records, phase, |record| record.decision.reason == Reason::Infeasible);
            assert!(said.is_some_and(|after| after <= SAID_AFTER_MAX), "seed {seed}, phase {phase}: {said:?}");
            let late: Vec<_> = records.iter().filter(|record| record.phase == phase).skip(SAID_AFTER_MAX + 5).collect();
            let most = late.iter().map(|record| record.space).max().unwrap();
            assert!(most <= Bytes(150 * MB), "seed {seed}, phase {phase}: {most}");
            let help =
                late.iter().filter_map(|record| record.decision.estimate.as_ref()).map(|estimate| estimate.verdict);
            let wrong = help.filter(|verdict| match verdict {
                Verdict::Infeasible(help) => help.is_overloaded != (phase == 1),
                _ => false,
            });
            assert_eq!(wrong.count(), 0, "seed {seed}, phase {phase}");
        }
        for phase in [0, 2, 4] {
            let late = records.iter().filter(|record| record.phase == phase).skip(15);
            let wrong = late.filter(|record| record.decision.reason == Reason::Infeasible).count();
            assert!(wrong <= 3, "seed {seed}, phase {phase}: {wrong} of 15 periods");
        }
    }
}

/// What the daemon has of the same jobs: not when they arrived nor what they computed, and a response is the job itself.
struct FromStart {
    tuning: SelfTuning,
    profile: Profiler,
    now_ms: u64,
    counters: Counters,
    means_s: Vec<Option<f64>>,
}

impl Sizer for FromStart {
    fn size(&mut self, profile: &Profiler, space: Bytes) -> Decision {
        let period = profile.periods().next_back().unwrap();
        let counted = period.counted.unwrap();
        self.now_ms += period.length.as_millis() as u64;
        self.counters.arrivals += counted.arrivals;
        self.counters.acknowledged += counted.acknowledged;
        self.counters.sending += counted.sending;
        let from_start = |job: &Job| Job { arrived_ms: job.began_ms, compute: Duration::ZERO, ..*job };
        let jobs: Vec<Job> = period.jobs.iter().map(from_start).collect();
        self.means_s.push(Statistic::Mean.of(&mut jobs.iter().map(Job::response_s).collect::<Vec<f64>>()));
        self.profile.close_period(self.now_ms, period.space, self.counters, &jobs);
        self.tuning.size(&self.profile, space)
    }
}

/// With pauses drawn one by one, as of a guest that makes them on purpose, jobs that queue up are left out, and more windows are above
/// the SLO than may be.
#[test]
fn jobs_that_queue_in_the_guest_keep_their_slo_though_nobody_says_when_they_arrive() {
    let slo = Slo { statistic: Statistic::Mean, limit: Duration::from_millis(3000) };
    let scenario = standard(slo, 60);
    let (mut above, mut windows) = ([0_usize; 3], [0_usize; 3]);
    for seed in SEEDS {
        let mut sizer = FromStart {
            tuning: SelfTuning::closed(scenario.settings),
            profile: Profiler::new(0, Counters::default()),
            now_ms: 0,
            counters: Counters::default(),
            means_s: Vec::new(),
        };
        run(&scenario, seed, &mut sizer);
        for phase in 0..3 {
            let means_s = sizer.means_s[phase * 60..(phase + 1) * 60].iter().flatten();
            windows[phase] += means_s.clone().count();
            above[phase] += means_s.filter(|mean_s| **mean_s > slo.limit_s()).count();
        }
    }
    let parts: Vec<f64> = above.iter().zip(&windows).map(|(above, all)| *above as f64 / *all as f64).collect();
    println!("{parts:.3?} above");
    assert!(parts.iter().all(|part| *part <= WINDOWS_ABOVE_MAX), "{parts:?}");
}

#[test]
fn a_percentile_is_kept_as_well() {
    let slo = Slo { statistic: Statistic::Percentile(900), limit: std::time::Duration::from_secs(8) };
    let scenario = Scenario { phases: standard(slo, 60).phases[..2].to_vec(), ..standard(slo, 60) };
    let runs: Vec<_> = SEEDS_FEW.map(|seed| ours(&scenario, seed)).collect();
    for (phase, tally) in scenario.phases.iter().zip(tallies(&runs, &scenario)) {
        let best = best_static(phase.load, slo, 17);
        println!(
            "{}: {:.3} above, {:.0} MB, best fixed {best:?}",
            phase.name,
            tally.windows_above(),
            tally.space() / 1e6
        );
        assert!(tally.windows_above() <= 0.15, "{tally:?}");
        assert!(best.is_some_and(|best| tally.space() < 2.0 * best.0 as f64), "{best:?}");
    }
}

fn tenant(scenario: &Scenario, weight: u32) -> Tenant<'_> {
    Tenant { scenario, weight: Shares::new(weight).unwrap(), sizer: Box::new(SelfTuning::new(scenario.settings)) }
}

#[test]
fn of_two_on_a_small_pool_the_lighter_one_misses_alone() {
    let load = Load { drain: Rate(28 * MB), ..BASE };
    let slos = [4600, 6000].map(|ms| Slo { statistic: Statistic::Mean, limit: std::time::Duration::from_millis(ms) });
    let scenarios =
        slos.map(|slo| Scenario { phases: vec![Phase { name: "both", periods: 80, load }], ..standard(slo, 1) });
    let best = slos.map(|slo| best_static(load, slo, 17).unwrap());
    let pool = Bytes(best[0].0 + 80 * MB);
    assert!(pool < best[0] + best[1]);
    let mut both = [Tally::default(); 2];
    for seed in SEEDS_FEW {
        let tenants = vec![tenant(&scenarios[0], 2000), tenant(&scenarios[1], 1000)];
        let made = run_pool(tenants, |_| pool, seed);
        for (nth, records) in made.records.iter().enumerate() {
            both[nth] = both[nth].with(tally(records, 0, &slos[nth]));
        }
    }
    println!(
        "{:.3} and {:.3} above, {:.0} and {:.0} MB of {pool}, best fixed {best:?}",
        both[0].windows_above(),
        both[1].windows_above(),
        both[0].space() / 1e6,
        both[1].space() / 1e6
    );
    let above = both.map(|tally| tally.windows_above());
    assert!(above[0] <= 0.15 && above[1] > 0.2, "{above:?}");
}

#[test]
fn the_same_seed_is_the_same_run() {
    let scenario = standard(mean_slo(), 4);
    assert_eq!(ours(&scenario, 3), ours(&scenario, 3));
    assert_ne!(ours(&scenario, 3), ours(&scenario, 4));
    assert_eq!(run(&scenario, 3, &mut Static)[9].space, scenario.start);
}

prop_compose! {
    fn any_load()(
        arrivals_per_s in 0.01f64..0.6,
        compute_s in 0.2f64..4.0,
        output in 1u64..300,
        drain in 4u64..120,
        interference in 0.9f64..2.0,
    ) -> Load {
        let (output, drain) = (Bytes(output * MB), Rate(drain * MB));
        Load { arrivals_per_s, compute_s, output, drain, interference, ..BASE }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    /// Several VMs of any load on a pool that comes and goes. A failing case prints its seed and its loads.
    #[test]
    fn a_pool_is_never_overdrawn_and_nobody_starves(
        loads in prop::collection::vec((any_load(), any_load(), 1u32..4000), 1..4),
        pools in prop::collection::vec(20u64..2000, 1..4),
        seed in any::<u64>(),
    ) {
        let phase = |load| Phase { name: "any", periods: 8, load };
        let scenarios: Vec<Scenario> = loads
            .iter()
            .map(|(first, second, _)| Scenario { phases: vec![phase(*first), phase(*second)], ..standard(mean_slo(), 1) })
            .collect();
        let tenants = scenarios.iter().zip(&loads).map(|(scenario, (.., weight))| tenant(scenario, *weight)).collect();
        let pool = |period: usize| Bytes(pools[period / 4 % pools.len()] * MB);
        let made = run_pool(tenants, pool, seed);
        for (period, division) in made.divisions.iter().enumerate() {
            let sum: Bytes = division.allotments.iter().map(|allotment| allotment.space).sum();
            prop_assert!(sum <= pool(period), "period {period}: {division:?}");
            prop_assert!(division.allotments.iter().all(|allotment| allotment.space > Bytes::ZERO));
        }
        // Spaces before the first division are what they start with.
        let starts: Bytes = scenarios.iter().map(|scenario| scenario.start).sum();
        let largest = pools.iter().max().copied().unwrap_or(0) * MB;
        let mins: Bytes = scenarios.iter().map(|scenario| scenario.settings.min).sum();
        prop_assert!(made.held_max <= starts.max(Bytes(largest)) + mins, "{} held", made.held_max);
        // A VM with a network ends jobs, whatever the others do.
        for (records, (first, ..)) in made.records.iter().zip(&loads) {
            let ended: usize = records.iter().map(|record| record.responses.len()).sum();
            prop_assert!(ended > 0 || first.arrivals_per_s < 0.02, "{first:?}");
        }
    }
}
