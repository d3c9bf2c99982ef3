//! One simulated VM: jobs that compute and write, a space that fills, a network that drains it.

use std::collections::VecDeque;
use std::time::Duration;

use crate::chance::Chance;
use crate::outbox::backpressure::{Answer, Limits, Request, SpaceView, decide};
use crate::outbox::profile::{Counters, Job};
use crate::outbox::stream::exponential;
use crate::units::Bytes;

use super::scenario::Load;

/// The unit of virtual time.
pub const STEP_MS: u64 = 10;
/// What a job writes at once: the largest request of virtio-fs.
const WRITE: u64 = 1 << 20;

/// A job that waits for its turn or runs.
#[derive(Clone, Copy, Debug)]
struct Running {
    job: Job,
    /// Milliseconds that it will really compute.
    compute_ms: f64,
    computed_ms: f64,
    written: u64,
    /// Since when its present write waits.
    waits_since_ms: Option<u64>,
}

/// The plant is one simulated VM with its space, its jobs and its network.
#[derive(Debug)]
pub struct Plant {
    chance: Chance,
    limits: Limits,
    now_ms: u64,
    next_arrival_ms: f64,
    queue: VecDeque<Running>,
    used: u64,
    /// Part of a byte that the network has sent of the next one.
    sent_part: f64,
    counters: Counters,
    ended: Vec<Job>,
    /// Writes that got "no space".
    pub refused: u64,
}

impl Plant {
    /// An idle VM whose chance is `seed`.
    pub fn new(seed: u64, limits: Limits) -> Plant {
        Plant {
            chance: Chance::new(seed),
            limits,
            now_ms: 0,
            next_arrival_ms: -1.0,
            queue: VecDeque::new(),
            used: 0,
            sent_part: 0.0,
            counters: Counters::default(),
            ended: Vec::new(),
            refused: 0,
        }
    }

    /// Gives the counts since the start, as the profiler takes them.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What the space holds.
    pub fn used(&self) -> Bytes {
        Bytes(self.used)
    }

    /// The jobs that ended since the last call.
    pub fn take_ended(&mut self) -> Vec<Job> {
        std::mem::take(&mut self.ended)
    }

    /// Lives until `until_ms` with a space of `budget`.
    pub fn live(&mut self, until_ms: u64, load: &Load, budget: Bytes) {
        while self.now_ms < until_ms {
            self.now_ms += STEP_MS;
            self.arrive(load);
            self.send(load);
            self.compute(budget);
        }
    }

    fn arrive(&mut self, load: &Load) {
        if self.next_arrival_ms < 0.0 {
            self.next_arrival_ms = 1000.0 * exponential(&mut self.chance) / load.arrivals_per_s;
        }
        while self.next_arrival_ms <= self.now_ms as f64 {
            let compute_ms = 1000.0 * load.compute_s * erlang(&mut self.chance, load.erlang);
            let output = load.output.0 as f64 * erlang(&mut self.chance, load.erlang);
            let job = Job {
                arrived_ms: self.now_ms,
                began_ms: 0,
                ended_ms: 0,
                compute: Duration::from_micros((compute_ms * 1000.0) as u64),
                blocked: Duration::ZERO,
                output: Bytes(output as u64),
                backlog: Bytes::ZERO,
            };
            let compute_ms = compute_ms * load.interference;
            self.queue.push_back(Running { job, compute_ms, computed_ms: 0.0, written: 0, waits_since_ms: None });
            self.counters.arrivals += 1;
            self.next_arrival_ms += 1000.0 * exponential(&mut self.chance) / load.arrivals_per_s;
        }
    }

    fn send(&mut self, load: &Load) {
        if self.used == 0 {
            self.sent_part = 0.0;
            return;
        }
        let can = load.drain.0 as f64 * STEP_MS as f64 / 1000.0 + self.sent_part;
        let sent = (can as u64).min(self.used);
        self.sent_part = can.fract();
        self.used -= sent;
        self.counters.acknowledged += Bytes(sent);
        self.counters.sending += Duration::from_millis(STEP_MS);
    }

    /// The first of the queue goes on for a step.
    fn compute(&mut self, budget: Bytes) {
        let Some(first) = self.queue.front_mut() else { return };
        if first.job.began_ms == 0 {
            // A job that arrives in this step may begin in it: the step before is over.
            (first.job.began_ms, first.job.backlog) = (self.now_ms, Bytes(self.used));
        }
        let job = &mut first.job;
        if first.waits_since_ms.is_none() {
            first.computed_ms = (first.computed_ms + STEP_MS as f64).min(first.compute_ms);
        }
        let is_done = first.computed_ms >= first.compute_ms;
        let produced = (job.output.0 as f64 * first.computed_ms / first.compute_ms) as u64;
        let due = if is_done { job.output.0 } else { produced / WRITE * WRITE };
        while first.written < due {
            let new = (due - first.written).min(WRITE);
            let since_ms = *first.waits_since_ms.get_or_insert(self.now_ms);
            let view = SpaceView { budget, used: Bytes(self.used), ahead: Bytes::ZERO, waiting: 0 };
            let waited = Duration::from_millis(self.now_ms - since_ms);
            match decide(Request::Write { new: Bytes(new), waited, is_interrupted: false }, &view, &self.limits) {
                Answer::Proceed => {
                    assert!(self.used + new <= budget.0, "the space is overdrawn");
                    (self.used, first.written) = (self.used + new, first.written + new);
                    self.counters.produced += Bytes(new);
                    first.waits_since_ms = None;
                }
                Answer::Wait(_) => {
                    job.blocked += Duration::from_millis(STEP_MS);
                    self.counters.blocked += Duration::from_millis(STEP_MS);
                    return;
                }
                Answer::NoSpace(_) | Answer::Interrupted => {
                    self.refused += 1;
                    self.queue.pop_front();
                    return;
                }
            }
        }
        if is_done {
            job.ended_ms = self.now_ms + STEP_MS;
            let ended = *job;
            self.queue.pop_front();
            self.ended.push(ended);
        }
    }
}

/// A draw of mean 1 whose coefficient of variation is 1 / sqrt(k).
fn erlang(chance: &mut Chance, k: u32) -> f64 {
    (0..k).map(|_| exponential(chance)).sum::<f64>() / f64::from(k)
}
