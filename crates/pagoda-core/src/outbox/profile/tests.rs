//! Tables of windows, counts that go back, changes of behaviour, and hostile jobs.

use super::*;
use crate::chance::Chance;
use crate::outbox::stream::exponential;
use proptest::prelude::*;

const MINUTE_MS: u64 = 60_000;
const SPACE: Bytes = Bytes(64_000_000);

fn job(arrived_ms: u64, began_ms: u64, ended_ms: u64) -> Job {
    let (compute, blocked) = (Duration::from_millis(1000), Duration::from_millis(500));
    Job { arrived_ms, began_ms, ended_ms, compute, blocked, output: Bytes(1000), backlog: Bytes::ZERO }
}

fn counters(megabytes: u64, sending_s: u64, blocked_s: u64, arrivals: u64) -> Counters {
    Counters {
        produced: Bytes(megabytes * 1_000_000),
        acknowledged: Bytes(megabytes * 1_000_000),
        sending: Duration::from_secs(sending_s),
        blocked: Duration::from_secs(blocked_s),
        arrivals,
    }
}

#[test]
fn windows_are_sums_of_periods() {
    let mut profile = Profiler::new(0, Counters::default());
    profile.close_period(MINUTE_MS, SPACE, counters(600, 30, 6, 12), &[job(0, 0, 2000), job(1000, 2000, 5000)]);
    profile.close_period(2 * MINUTE_MS, SPACE, counters(1800, 60, 6, 18), &[job(60_000, 60_000, 70_000)]);
    let both = profile.window(10);
    assert_eq!((both.length, both.arrivals, both.jobs), (Duration::from_secs(120), 18, 3));
    assert_eq!((both.arrivals_per_s, both.goodput, both.blocked_share), (0.15, Rate(15_000_000), 0.05));
    assert_eq!(
        (both.produced, both.response_mean_s, both.response_p90_s),
        (Bytes(1_800_000_000), Some(16.0 / 3.0), Some(10.0))
    );
    let last = profile.window(1);
    assert_eq!((last.arrivals_per_s, last.blocked_share, last.response_mean_s), (0.1, 0.0, Some(10.0)));
    // 40 MB/s while it had something to send, not 20 over all the time.
    assert_eq!(profile.drain(), Some(Rate(40_000_000)));
    assert_eq!(job(1000, 2000, 5000).busy_s(), 2.5);
}

#[test]
fn jobs_follow_each_other_in_lanes() {
    let of = |times: &[(u64, u64)]| {
        let mut profile = Profiler::new(0, Counters::default());
        let jobs: Vec<Job> = times.iter().map(|&(began, ended)| job(began, began, ended)).collect();
        profile.close_period(MINUTE_MS, SPACE, Counters::default(), &jobs);
        (profile.thinks_s(), profile.parallel())
    };
    assert_eq!(of(&[]), (vec![], 1.0));
    assert_eq!(of(&[(0, 2000), (3000, 4000), (4000, 5000)]), (vec![1.0, 0.0], 1.0));
    // Two at a time, in the order in which they ended.
    assert_eq!(of(&[(0, 1000), (0, 2000), (2000, 3000), (2500, 4000)]), (vec![0.0, 1.5], 5500.0 / 4000.0));
    assert_eq!(of(&[(0, 1000), (0, 1000), (2000, 3000), (2000, 3000)]), (vec![1.0, 1.0], 2.0));
    // A long one overlaps all others.
    assert_eq!(of(&[(1000, 2000), (3000, 4000), (0, 9000)]), (vec![1.0], 11.0 / 9.0));
}

/// Jobs of 2 to 3 s: each begins when it arrives and the one before has ended, or a pause after that.
fn jobs_of(mean_gap_s: f64, pause_s: Option<f64>) -> Profiler {
    let (mut chance, mut profile) = (Chance::new(4), Profiler::new(0, Counters::default()));
    let (mut arrives_s, mut free_s) = (0.0, 0.0);
    let ms = |s: f64| (s * 1000.0) as u64;
    let jobs: Vec<Job> = (0..300)
        .map(|_| {
            arrives_s += mean_gap_s * exponential(&mut chance);
            let begins_s = pause_s.map_or(f64::max(arrives_s, free_s), |pause_s| free_s + pause_s);
            free_s = begins_s + 2.0 + chance.below(1000) as f64 / 1000.0;
            job(ms(begins_s), ms(begins_s), ms(free_s))
        })
        .collect();
    profile.close_period(ms(free_s) + 1, SPACE, Counters::default(), &jobs);
    profile
}

#[test]
fn jobs_that_arrive_by_chance_queue() {
    for mean_gap_s in [20.0, 6.0, 4.0, 3.0] {
        assert!(jobs_of(mean_gap_s, None).is_queue(), "one in {mean_gap_s} s");
    }
    // Faster than they are done: nobody can tell that from a guest that does one after the other.
    assert!(!jobs_of(1.0, None).is_queue() && !jobs_of(1.0, Some(0.0)).is_queue());
    assert!(!jobs_of(1.0, Some(0.5)).is_queue() && !jobs_of(1.0, Some(3.0)).is_queue(), "pauses are no arrivals");
    let mut lanes = Profiler::new(0, Counters::default());
    let two: Vec<Job> = (0..40).map(|nth| job(nth / 2 * 3000, nth / 2 * 3000, nth / 2 * 3000 + 2000)).collect();
    lanes.close_period(2 * MINUTE_MS, SPACE, Counters::default(), &two);
    assert!(!lanes.is_queue() && !Profiler::new(0, Counters::default()).is_queue());
}

#[test]
fn a_drain_is_that_of_times_with_something_to_send() {
    let mut profile = Profiler::new(0, Counters::default());
    let mut total = Counters::default();
    let mut period = |nth: u64, megabytes: u64, sending_ms: u64| {
        total.acknowledged += Bytes(megabytes * 1_000_000);
        total.sending += Duration::from_millis(sending_ms);
        profile.close_period(nth * MINUTE_MS, SPACE, total, &[]);
        profile.drain().map(|rate| rate.0 / 100_000)
    };
    assert_eq!(period(1, 0, 0), None);
    assert_eq!(period(2, 400, 10_000), Some(400));
    // Too little to tell: what was known stays.
    assert_eq!(period(3, 1, 99), Some(400));
    // Noise is smoothed, a step is followed at once.
    assert_eq!(period(4, 440, 10_000), Some(412));
    assert_eq!(period(5, 280, 10_000), Some(280));
}

#[test]
fn a_server_that_starts_again_is_not_one_without_traffic() {
    let mut profile = Profiler::new(0, Counters::default());
    profile.close_period(MINUTE_MS, SPACE, counters(600, 30, 0, 12), &[]);
    profile.close_period(2 * MINUTE_MS, SPACE, counters(100, 5, 0, 2), &[]);
    profile.close_period(3 * MINUTE_MS, SPACE, counters(700, 35, 0, 14), &[]);
    let window = profile.window(10);
    assert_eq!((window.arrivals, window.length), (24, Duration::from_secs(120)));
    assert_eq!(profile.drain(), Some(Rate(20_000_000)));
    // Two ends at the same time are one.
    profile.close_period(3 * MINUTE_MS, SPACE, counters(700, 35, 0, 14), &[]);
    assert_eq!(profile.periods().count(), 3);
}

#[test]
fn jobs_that_cannot_be_are_left_out() {
    let mut profile = Profiler::new(0, Counters::default());
    let bad = [
        job(2000, 1000, 3000),
        job(0, 3000, 2999),
        job(0, 0, MINUTE_MS + 1),
        Job { output: Bytes(u64::MAX), ..job(0, 0, 1) },
        Job { backlog: Bytes(u64::MAX), ..job(0, 0, 1) },
    ];
    profile.close_period(MINUTE_MS, SPACE, Counters::default(), &bad);
    assert_eq!((profile.jobs().count(), profile.rejected()), (0, bad.len() as u64));
    let many = vec![job(0, 0, 1000); 2 * JOBS_MAX];
    profile.close_period(2 * MINUTE_MS, SPACE, Counters::default(), &many);
    assert_eq!(profile.jobs().count(), JOBS_MAX);
}

/// Periods of a Poisson process; `output` of each job, and milliseconds of computing.
fn feed(
    profile: &mut Profiler,
    chance: &mut Chance,
    total: &mut Counters,
    periods: std::ops::Range<u64>,
    rate: f64,
    output: u64,
) {
    for nth in periods {
        let (mut at_s, mut jobs) = (exponential(chance) / rate, Vec::new());
        while at_s < 60.0 {
            let began_ms = nth * MINUTE_MS + (at_s * 1000.0) as u64;
            let length = 500 + chance.below(1000);
            let output = Bytes(output / 2 + chance.below(output));
            jobs.push(Job { output, blocked: Duration::ZERO, ..job(began_ms, began_ms, began_ms + length) });
            at_s += exponential(chance) / rate;
        }
        total.arrivals += jobs.len() as u64;
        jobs.retain(|job| job.ended_ms <= (nth + 1) * MINUTE_MS);
        profile.close_period((nth + 1) * MINUTE_MS, SPACE, *total, &jobs);
    }
}

#[test]
fn steady_jobs_are_kept_and_changed_ones_forget_what_was_before() {
    let mut changes = 0;
    for seed in 0..20 {
        let (mut profile, mut chance, mut total) =
            (Profiler::new(0, Counters::default()), Chance::new(seed), Counters::default());
        feed(&mut profile, &mut chance, &mut total, 0..60, 0.2, 1_000_000);
        changes += profile.changes();
    }
    assert!(changes <= 12, "{changes} changes were seen in 1200 periods without one");
    for (rate, output) in [(0.4, 1_000_000), (0.08, 1_000_000), (0.2, 2_000_000)] {
        let (mut profile, mut chance, mut total) =
            (Profiler::new(0, Counters::default()), Chance::new(7), Counters::default());
        feed(&mut profile, &mut chance, &mut total, 0..30, 0.2, 1_000_000);
        let before = profile.changes();
        feed(&mut profile, &mut chance, &mut total, 30..35, rate, output);
        assert!(profile.changes() > before, "{rate} {output}");
        let window = profile.window(usize::MAX);
        assert!((window.arrivals_per_s / rate - 1.0).abs() < 0.4, "{rate}: {window:?}");
    }
}

proptest! {
    /// Whatever a server says, nothing breaks and no share leaves its range.
    #[test]
    fn any_counts_make_a_profile(
        rows in prop::collection::vec((0u64..3, any::<u32>(), any::<u32>(), any::<u64>(), any::<u32>(), any::<u64>()), 1..60),
    ) {
        let mut profile = Profiler::new(0, Counters::default());
        let mut now_ms = 0;
        for (step, produced, acknowledged, sending_ms, blocked_ms, arrivals) in rows {
            now_ms += step * 1000;
            let counters = Counters {
                produced: Bytes(u64::from(produced)),
                acknowledged: Bytes(u64::from(acknowledged)),
                sending: Duration::from_millis(sending_ms),
                blocked: Duration::from_millis(u64::from(blocked_ms)),
                arrivals: arrivals >> 8,
            };
            let jobs = [job(arrivals % 10_000, sending_ms % 10_000, now_ms)];
            profile.close_period(now_ms, SPACE, counters, &jobs);
            let window = profile.window(usize::MAX);
            prop_assert!((0.0..=1.0).contains(&window.blocked_share) && window.arrivals_per_s.is_finite());
            prop_assert!(profile.periods().count() <= PERIODS_MAX);
        }
    }
}
