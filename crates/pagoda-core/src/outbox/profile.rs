//! The profiler of one VM: what its jobs and its transmitter do, from samples, over windows.
//!
//! The file server and the transmitter count since they started ([`Counters`]); once a period the daemon hands the counts
//! and the jobs that ended to [`Profiler::close_period`]. Nothing runs in the guest. Counts that go back are those of a
//! process that was started again: that period says nothing of rates, and is not taken for one without traffic. Jobs whose
//! times cannot be are counted and left out.
//!
//! Periods are kept while they are of one behaviour: when arrivals, outputs or computing times of the last few differ from
//! those before by more than chance explains, the ones before are forgotten.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::units::{Bytes, SPACE_SIZE_MAX};

use super::slo::Statistic;
use super::units::Rate;

/// Periods that are kept: half an hour of one minute each. Twice as many halve the error of a rate that does not
/// change, and are half an hour late for one that creeps.
pub const PERIODS_MAX: usize = 30;
/// The last ones, which are compared with those before.
pub const PERIODS_RECENT: usize = 4;
/// Fewer before them say too little.
const PERIODS_BEFORE_MIN: usize = 4;
/// Standard errors between the recent and the others that are no chance: once in 2000 comparisons they are.
const CHANGED: f64 = 3.5;
/// Jobs of a period that are looked at one by one. The others count as arrivals.
pub const JOBS_MAX: usize = 512;
/// Of the drain of the periods before, that a new one is off when it stands for itself.
const DRAIN_STEP: f64 = 0.15;
/// A job that begins so soon after the end of another has waited for it: a guest begins the next one of a queue within a part of a job's
/// time, and needs this at least.
const QUEUED_GAP_MIN_MS: f64 = 10.0;
const QUEUED_GAP_PART: f64 = 0.05;
/// Of the jobs that find another one running where they arrive by chance, so many have to be seen to wait.
const QUEUED_PART: f64 = 0.6;
/// A guest that is busy for so much of its time need not have a queue: it may begin a job when another has ended.
const ALWAYS_BUSY: f64 = 0.95;
/// More at a time is no queue in which one waits for the other.
const ONE_AT_A_TIME: f64 = 1.05;
/// Fewer pauses say nothing.
const PAUSES_MIN: usize = 10;
/// So long the transmitter has to have had work in a period, so that its speed can be told.
const SENDING_MIN: Duration = Duration::from_millis(100);

/// Counts since the server's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes that jobs wrote.
    pub produced: Bytes,
    /// Bytes that readers have acknowledged.
    pub acknowledged: Bytes,
    /// Time in which the transmitter had something to send.
    pub sending: Duration,
    /// Time in which at least one writer waited for room.
    pub blocked: Duration,
    /// Jobs that were submitted.
    pub arrivals: u64,
}

impl Counters {
    fn since(&self, before: &Counters) -> Option<Counters> {
        Some(Counters {
            produced: Bytes(self.produced.0.checked_sub(before.produced.0)?),
            acknowledged: Bytes(self.acknowledged.0.checked_sub(before.acknowledged.0)?),
            sending: self.sending.checked_sub(before.sending)?,
            blocked: self.blocked.checked_sub(before.blocked)?,
            arrivals: self.arrivals.checked_sub(before.arrivals)?,
        })
    }
}

/// A job that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Submitted, begun (its file created), ended (closed, or renamed to publish it).
    pub arrived_ms: u64,
    pub began_ms: u64,
    pub ended_ms: u64,
    /// What is known of its computing time, 0 if nothing is; what else passes while it does not wait, the estimator learns.
    pub compute: Duration,
    /// Its writers waited for room for so long.
    pub blocked: Duration,
    pub output: Bytes,
    /// What the space held when it began.
    pub backlog: Bytes,
}

impl Job {
    fn is_sane(&self, now_ms: u64) -> bool {
        let ordered = self.arrived_ms <= self.began_ms && self.began_ms <= self.ended_ms && self.ended_ms <= now_ms;
        ordered && self.output <= SPACE_SIZE_MAX && self.backlog <= SPACE_SIZE_MAX
    }

    /// From its arrival to its end.
    pub fn response_s(&self) -> f64 {
        (self.ended_ms - self.arrived_ms) as f64 / 1000.0
    }

    /// From its start to its end, without its waits.
    pub fn busy_s(&self) -> f64 {
        ((self.ended_ms - self.began_ms) as f64 / 1000.0 - self.blocked.as_secs_f64()).max(0.0)
    }
}

/// A period holds what was measured in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Period {
    pub length: Duration,
    /// The space that the VM had.
    pub space: Bytes,
    /// What the counters grew by; `None` if they were started again.
    pub counted: Option<Counters>,
    pub jobs: Vec<Job>,
}

/// What passed in a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    pub length: Duration,
    pub arrivals: u64,
    pub arrivals_per_s: f64,
    /// Jobs that ended, of those that were looked at.
    pub jobs: u64,
    pub produced: Bytes,
    /// What readers acknowledged, over all the time.
    pub goodput: Rate,
    /// The part of the time in which a writer waited.
    pub blocked_share: f64,
    pub response_mean_s: Option<f64>,
    pub response_p90_s: Option<f64>,
}

/// The profile of one VM.
#[derive(Clone, Debug, Default)]
pub struct Profiler {
    periods: VecDeque<Period>,
    counters: Option<Counters>,
    closed_ms: u64,
    drain: Option<f64>,
    rejected: u64,
    changes: u64,
}

impl Profiler {
    /// Starts at `now_ms` with what is counted until then.
    pub fn new(now_ms: u64, counters: Counters) -> Profiler {
        Profiler { counters: Some(counters), closed_ms: now_ms, ..Profiler::default() }
    }

    /// A period ends. `jobs` ended in it, in this order.
    pub fn close_period(&mut self, now_ms: u64, space: Bytes, counters: Counters, jobs: &[Job]) {
        let length = Duration::from_millis(now_ms.saturating_sub(self.closed_ms));
        if length.is_zero() {
            return;
        }
        let sane: Vec<Job> = jobs.iter().filter(|job| job.is_sane(now_ms)).copied().take(JOBS_MAX).collect();
        self.rejected += jobs.iter().filter(|job| !job.is_sane(now_ms)).count() as u64;
        let counted = self.counters.and_then(|before| counters.since(&before));
        (self.counters, self.closed_ms) = (Some(counters), now_ms);
        self.learn_drain(counted);
        self.periods.push_back(Period { length, space, counted, jobs: sane });
        if self.periods.len() > PERIODS_MAX {
            self.periods.pop_front();
        }
        if self.has_changed() {
            self.changes += 1;
            self.periods.drain(..self.periods.len() - PERIODS_RECENT);
        }
    }

    /// How fast the space drains while there is something in it: known from the times in which there was.
    fn learn_drain(&mut self, counted: Option<Counters>) {
        let Some(counted) = counted else { return };
        if counted.sending < SENDING_MIN {
            return;
        }
        let now = counted.acknowledged.0 as f64 / counted.sending.as_secs_f64();
        self.drain = Some(match self.drain {
            Some(before) if (now / before - 1.0).abs() < DRAIN_STEP => before + (now - before) * 0.3,
            _ => now,
        });
    }

    /// Whether the recent periods are of another behaviour than those before.
    fn has_changed(&self) -> bool {
        let Some(split) = self.periods.len().checked_sub(PERIODS_RECENT) else { return false };
        if split < PERIODS_BEFORE_MIN {
            return false;
        }
        let (before, recent): (Vec<_>, Vec<_>) =
            (self.periods.range(..split).collect(), self.periods.range(split..).collect());
        let differ = |pick: fn(&Job) -> f64| {
            let side = |periods: &[&Period]| Sums::of(periods.iter().flat_map(|period| &period.jobs).map(pick));
            side(&before).differs(&side(&recent))
        };
        arrivals_differ(&before, &recent) || differ(Job::busy_s) || differ(|job| job.output.0 as f64)
    }

    /// The periods that are of one behaviour, the newest last.
    pub fn periods(&self) -> impl DoubleEndedIterator<Item = &Period> + Clone {
        self.periods.iter()
    }

    /// All jobs of these periods.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.periods.iter().flat_map(|period| &period.jobs)
    }

    /// Of each job that others ended before: the time since the last of these ends that no other job has followed yet.
    pub fn thinks_s(&self) -> Vec<f64> {
        // Ends that nobody has followed, with how many there are of each time.
        let mut ends: BTreeMap<u64, u32> = BTreeMap::new();
        let mut thinks = Vec::new();
        for job in self.in_order() {
            if let Some((&end, _)) = ends.range(..=job.began_ms).next_back() {
                thinks.push((job.began_ms - end) as f64 / 1000.0);
                match ends.get_mut(&end) {
                    Some(left) if *left > 1 => *left -= 1,
                    _ => drop(ends.remove(&end)),
                }
            }
            *ends.entry(job.ended_ms).or_default() += 1;
        }
        thinks
    }

    /// How many jobs ran at a time while any did: 1 or more.
    pub fn parallel(&self) -> f64 {
        let (mut all_ms, mut busy_ms, mut end_ms) = (0, 0, 0);
        for job in self.in_order() {
            all_ms += job.ended_ms - job.began_ms;
            busy_ms += job.ended_ms.saturating_sub(end_ms.max(job.began_ms));
            end_ms = end_ms.max(job.ended_ms);
        }
        if busy_ms == 0 { 1.0 } else { (all_ms as f64 / busy_ms as f64).max(1.0) }
    }

    /// Whether jobs wait for each other: they run one at a time, the guest is idle at times, and as many begin right after another as would
    /// if they arrived by chance. Of jobs that arrive by chance as many find another one running as the guest is busy, as a part of its time
    /// (Wolff: Poisson arrivals see time averages, 1982). Of a guest that makes a pause after each job, next to none do.
    pub fn is_queue(&self) -> bool {
        let jobs = self.in_order();
        let Some((first, later)) = jobs.split_first().filter(|(_, later)| later.len() >= PAUSES_MIN) else {
            return false;
        };
        let busy_ms: u64 = jobs.iter().map(|job| job.ended_ms - job.began_ms).sum();
        let gap_ms = (QUEUED_GAP_PART * busy_ms as f64 / jobs.len() as f64).max(QUEUED_GAP_MIN_MS) as u64;
        let (mut end_ms, mut queued) = (first.ended_ms, 0);
        for job in later {
            // A job's last request may come after the next one's first.
            queued += usize::from(job.began_ms.saturating_sub(end_ms) <= gap_ms);
            end_ms = end_ms.max(job.ended_ms);
        }
        let busy = busy_ms as f64 / (end_ms - first.began_ms).max(1) as f64;
        let is_one_at_a_time = self.parallel() <= ONE_AT_A_TIME;
        is_one_at_a_time && busy < ALWAYS_BUSY && queued as f64 >= QUEUED_PART * busy * later.len() as f64
    }

    /// Jobs in the order in which they began.
    fn in_order(&self) -> Vec<&Job> {
        let mut jobs: Vec<&Job> = self.jobs().collect();
        jobs.sort_by_key(|job| job.began_ms);
        jobs
    }

    /// How fast the space drains.
    pub fn drain(&self) -> Option<Rate> {
        self.drain.map(Rate::from_model)
    }

    /// Jobs that were left out, for their times cannot be.
    pub fn rejected(&self) -> u64 {
        self.rejected
    }

    /// How often the behaviour has changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The last periods together, at most `count` of them.
    pub fn window(&self, count: usize) -> Window {
        let periods = || self.periods.iter().rev().take(count);
        let counted = || periods().filter_map(|period| Some((period, period.counted.as_ref()?)));
        let length: Duration = counted().map(|(period, _)| period.length).sum();
        let length_s = length.as_secs_f64();
        let over = |value: f64| if length_s > 0.0 { value / length_s } else { 0.0 };
        let arrivals: u64 = counted().map(|(_, counted)| counted.arrivals).sum();
        let acknowledged: Bytes = counted().map(|(_, counted)| counted.acknowledged).sum();
        let blocked: Duration = counted().map(|(_, counted)| counted.blocked).sum();
        let mut responses: Vec<f64> = periods().flat_map(|period| &period.jobs).map(Job::response_s).collect();
        Window {
            length,
            arrivals,
            arrivals_per_s: over(arrivals as f64),
            jobs: responses.len() as u64,
            produced: counted().map(|(_, counted)| counted.produced).sum(),
            goodput: Rate::over(acknowledged, length).unwrap_or_default(),
            blocked_share: over(blocked.as_secs_f64()).min(1.0),
            response_mean_s: Statistic::Mean.of(&mut responses),
            response_p90_s: Statistic::Percentile(900).of(&mut responses),
        }
    }
}

fn arrivals_differ(before: &[&Period], recent: &[&Period]) -> bool {
    let count = |periods: &[&Period]| {
        let counted = periods.iter().filter_map(|period| Some((period.length, period.counted?.arrivals)));
        counted.fold((0.0, 0.0), |(s, count), (length, arrivals)| (s + length.as_secs_f64(), count + arrivals as f64))
    };
    let ((before_s, before), (recent_s, recent)) = (count(before), count(recent));
    if before_s == 0.0 || recent_s == 0.0 || before + recent == 0.0 {
        return false;
    }
    // Both are Poisson of one rate, if nothing has changed.
    let rate = (before + recent) / (before_s + recent_s);
    let error = (rate / before_s + rate / recent_s).sqrt();
    (recent / recent_s - before / before_s).abs() > CHANGED * error
}

/// Count, mean and variance of the mean.
struct Sums {
    count: f64,
    mean: f64,
    error_square: f64,
}

impl Sums {
    fn of(values: impl Iterator<Item = f64>) -> Sums {
        let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
        for value in values {
            (count, sum, squares) = (count + 1.0, sum + value, squares + value * value);
        }
        let mean = sum / f64::max(count, 1.0);
        let variance = (squares / f64::max(count, 1.0) - mean * mean).max(0.0);
        Sums { count, mean, error_square: variance / f64::max(count, 1.0) }
    }

    fn differs(&self, other: &Sums) -> bool {
        const JOBS_MIN: f64 = 10.0;
        let error = (self.error_square + other.error_square).sqrt();
        let distance = (self.mean - other.mean).abs();
        // Jobs that are all alike have no error; a thousandth is rounding of clocks.
        let is_large = distance > CHANGED * error && distance > 1e-3 * self.mean.abs();
        self.count >= JOBS_MIN && other.count >= JOBS_MIN && is_large
    }
}

#[cfg(test)]
mod tests;
