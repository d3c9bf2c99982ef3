//! The queue of the model, job by job: Poisson arrivals, sizes drawn from the jobs that were seen, one at a time, blocking
//! by the fluid of [`super::fluid`]. It gives what no closed form gives for a finite space: percentiles, and how the
//! windows differ.
//!
//! Chance is drawn once, from a fixed seed, and used for every size: two sizes differ by the space alone, so a larger
//! space is never slower.

use std::time::Duration;

use crate::chance::Chance;

use super::fluid::{JobSize, serve};
use super::slo::{Slo, WINDOWS_AIM, quantile};
use super::units::RESPONSE_MAX_S;

/// Jobs of the stream: some 800 windows of a dozen each. The part of them above a limit is then known to about a
/// hundredth.
pub const JOBS: usize = 10_000;
const SEED: u64 = 26;

/// What the model needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    pub arrivals_per_s: f64,
    /// Sizes are drawn from these jobs, of which there is at least one.
    pub jobs: Vec<JobSize>,
    /// The network takes so many bytes a second.
    pub drain: f64,
    /// The length of a window.
    pub window: Duration,
    pub arrivals: Arrivals,
    /// Of a closed queue: so many run at a time, each with its part of the space and of what drains. At least 1.
    pub parallel: f64,
}

/// When jobs come, and from when on they are answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// They arrive whether others have ended or not, and are answered from then on (an open queue).
    Told,
    /// The same, but nobody says when: they wait for each other in the guest, and are answered from their start on.
    Hidden,
    /// Each begins so long after the end of one before (a closed queue). Never empty.
    Follow(Vec<f64>),
}

impl Inputs {
    /// Whether a response is the job itself, without what it waited for before.
    pub fn is_from_start(&self) -> bool {
        self.arrivals != Arrivals::Told
    }

    /// What drains of one job, bytes a second.
    pub fn drain_of_one(&self) -> f64 {
        self.drain / self.parallel
    }
}

/// What the model says of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Responses {
    pub mean_s: f64,
    /// The SLO's statistic of all jobs.
    pub statistic_s: f64,
    /// What [`WINDOWS_AIM`] of the windows do not exceed.
    pub window_s: f64,
    /// The part of windows above the SLO.
    pub windows_above: f64,
}

/// The stream holds the draws of chance that serve every size.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Gaps between arrivals, of mean 1.
    gaps: Vec<f64>,
    /// Which job, as a part of those that were seen.
    picks: Vec<f64>,
}

impl Default for Stream {
    fn default() -> Stream {
        Stream::new()
    }
}

/// A number of [0, 1).
pub fn unit(chance: &mut Chance) -> f64 {
    (chance.draw() >> 11) as f64 / (1u64 << 53) as f64
}

/// A draw of the exponential distribution of mean 1.
pub fn exponential(chance: &mut Chance) -> f64 {
    -(1.0 - unit(chance)).ln()
}

/// One of `values` by a draw of [0, 1).
fn picked<T: Copy>(values: &[T], draw: f64) -> T {
    values[((draw * values.len() as f64) as usize).min(values.len() - 1)]
}

impl Stream {
    /// The draws, the same each time.
    pub fn new() -> Stream {
        let mut chance = Chance::new(SEED);
        let mut gaps: Vec<f64> = (0..JOBS).map(|_| exponential(&mut chance)).collect();
        // So many draws would be off by a hundredth; the rate is not to be.
        let mean = gaps.iter().sum::<f64>() / JOBS as f64;
        gaps.iter_mut().for_each(|gap| *gap /= mean);
        let picks = (0..JOBS).map(|_| unit(&mut chance)).collect();
        Stream { gaps, picks }
    }

    /// What jobs of `inputs` would see with this much space.
    ///
    /// # Panics
    /// `inputs` has no jobs.
    pub fn responses(&self, inputs: &Inputs, space: f64, slo: &Slo) -> Responses {
        assert!(!inputs.jobs.is_empty(), "a stream of no jobs");
        if inputs.drain <= 0.0 || inputs.arrivals_per_s <= 0.0 {
            return Responses::without_end(inputs);
        }
        let window_s = inputs.window.as_secs_f64();
        let (space, drain) = (space / inputs.parallel, inputs.drain_of_one());
        let (mut arrived_s, mut free_s, mut backlog) = (0.0, 0.0, 0.0);
        let mut windows = Windows::new(*slo);
        let mut all = Vec::with_capacity(JOBS);
        let mut window_ends_s = window_s;
        // The other draws in reverse: which pause is drawn says nothing of which job.
        for ((gap, pick), other) in self.gaps.iter().zip(&self.picks).zip(self.picks.iter().rev()) {
            arrived_s = match &inputs.arrivals {
                Arrivals::Follow(thinks_s) => free_s + picked(thinks_s, *other),
                Arrivals::Told | Arrivals::Hidden => arrived_s + gap / inputs.arrivals_per_s,
            };
            let job = picked(&inputs.jobs, *pick);
            let starts_s = f64::max(arrived_s, free_s);
            let left = f64::max(backlog - drain * (starts_s - free_s), 0.0);
            let served = serve(job, left, space, drain);
            (free_s, backlog) = (starts_s + served.service_s, served.backlog);
            if free_s >= window_ends_s {
                windows.close();
                window_ends_s += ((free_s - window_ends_s) / window_s).floor().mul_add(window_s, window_s);
            }
            let response_s = free_s - if inputs.is_from_start() { starts_s } else { arrived_s };
            windows.current.push(response_s);
            all.push(response_s);
        }
        windows.close();
        let mean_s = all.iter().sum::<f64>() / all.len() as f64;
        let statistic_s = slo.statistic.of(&mut all).unwrap_or(RESPONSE_MAX_S);
        windows.summary(mean_s, statistic_s)
    }
}

impl Responses {
    fn without_end(inputs: &Inputs) -> Responses {
        let idle = inputs.arrivals_per_s <= 0.0;
        let value = if idle { 0.0 } else { RESPONSE_MAX_S };
        Responses { mean_s: value, statistic_s: value, window_s: value, windows_above: f64::from(u8::from(!idle)) }
    }
}

/// The SLO's statistic, window by window.
struct Windows {
    slo: Slo,
    current: Vec<f64>,
    closed: Vec<f64>,
}

impl Windows {
    fn new(slo: Slo) -> Windows {
        Windows { slo, current: Vec::new(), closed: Vec::new() }
    }

    fn close(&mut self) {
        self.closed.extend(self.slo.statistic.of(&mut self.current));
        self.current.clear();
    }

    fn summary(mut self, mean_s: f64, statistic_s: f64) -> Responses {
        let above = self.closed.iter().filter(|value| **value > self.slo.limit_s()).count();
        let windows_above = above as f64 / self.closed.len().max(1) as f64;
        Responses { mean_s, statistic_s, window_s: quantile(&mut self.closed, WINDOWS_AIM), windows_above }
    }
}
