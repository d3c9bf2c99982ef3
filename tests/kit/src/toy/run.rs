//! Threads that fill and touch the RAM, each over its own part.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;
use pagoda_sys::toy::process;
use pagoda_sys::toy::ram::{PAGE_BYTES, Ram, RamPart};

use super::histogram::LatencyHistogram;
use super::pattern::{Pattern, WrongPage};
use super::workload::Chooser;
use super::{Done, Latency, Limit, Mode, PAGES_PER_MIB, Plan, Stall, monotonic_ns};

/// Without timing of single accesses the clock is read once in so many.
const CLOCK_EVERY_OPS: u64 = 64;
/// Wrong pages that are described one by one; the rest are only counted.
const WRONG_PAGES_SHOWN_MAX: usize = 8;
/// Slices whose average ends a run that is to end at a speed.
pub const STEADY_SLICES: usize = 5;
/// A run reports at most this many slices; later ones are counted in the last.
const SLICES_MAX: usize = 100_000;

/// What the toy knows of its RAM between runs.
#[derive(Debug)]
pub struct State {
    /// Version last written to each page. Outside of the RAM, locked into memory.
    versions: Vec<u32>,
    pattern: Pattern,
    seed: u64,
    runs: u64,
    wrong: Vec<WrongPage>,
}

#[derive(Debug, Default)]
struct ThreadResult {
    ops: u64,
    bad: u64,
    wrong: Vec<WrongPage>,
    latency: LatencyHistogram,
    slices: Vec<u64>,
    longest_ns: u64,
    /// When the longest access was over, by [`monotonic_ns`].
    longest_ended_ns: u64,
}

impl State {
    /// Bookkeeping for so many pages.
    ///
    /// # Errors
    /// The limit on locked memory is too low.
    pub fn new(pages: usize, seed: u64) -> Result<Self> {
        let versions = vec![0; pages];
        if let Err(error) = process::lock_in_memory(&versions) {
            eprintln!("toy: bookkeeping may be paged out itself ({error}); raise `ulimit -l`");
        }
        Ok(Self { versions, pattern: Pattern::new(seed), seed, runs: 0, wrong: Vec::new() })
    }

    /// The first wrong pages of the last run.
    pub fn wrong_pages(&self) -> &[WrongPage] {
        &self.wrong
    }

    /// Writes every page once.
    pub fn fill(&mut self, ram: &mut Ram, threads: usize) {
        let pattern = self.pattern;
        let fill_part = |part: &mut RamPart<'_>| {
            (0..part.pages()).for_each(|page| pattern.fill(part, page));
        };
        if threads == 1 {
            ram.split(1).iter_mut().for_each(fill_part);
            return;
        }
        std::thread::scope(|scope| {
            for mut part in ram.split(threads) {
                scope.spawn(move || fill_part(&mut part));
            }
        });
    }

    /// Runs the plan and reports it.
    pub fn run(&mut self, ram: &mut Ram, threads: usize, plan: Plan) -> Done {
        let pages = ram.pages();
        let pattern = self.pattern;
        let seed = self.seed.wrapping_mul(31).wrapping_add(self.runs);
        let mut versions = self.versions.as_mut_slice();
        let mut workers = Vec::new();
        for (index, part) in ram.split(threads).into_iter().enumerate() {
            let (mine, rest) = std::mem::take(&mut versions).split_at_mut(part.pages());
            versions = rest;
            let chooser = Chooser::new(plan.workload, part.pages(), seed << 8 | index as u64);
            let ns_per_op = plan.pace_ops_per_s.map_or(0.0, |pace| 1e9 * threads as f64 / pace);
            workers.push(Worker { part, versions: mine, pattern, plan, ns_per_op, chooser });
        }
        let (results, elapsed, cpu) = run_workers(workers, plan.limit);
        self.runs += 1;
        self.summarize(results, elapsed, cpu, plan, pages)
    }

    fn summarize(
        &mut self,
        results: Vec<ThreadResult>,
        elapsed: Duration,
        cpu: Duration,
        plan: Plan,
        pages: usize,
    ) -> Done {
        let threads = results.len();
        let mut total = ThreadResult::default();
        let mut stalls = Vec::new();
        for result in results {
            if plan.time_each {
                stalls.push(Stall { us: result.longest_ns as f64 / 1000.0, ended_ns: result.longest_ended_ns });
            }
            total.ops += result.ops;
            total.bad += result.bad;
            total.wrong.extend(result.wrong);
            total.latency.merge(&result.latency);
            if total.slices.len() < result.slices.len() {
                total.slices.resize(result.slices.len(), 0);
            }
            for (sum, ops) in total.slices.iter_mut().zip(&result.slices) {
                *sum += ops;
            }
        }
        total.wrong.truncate(WRONG_PAGES_SHOWN_MAX);
        self.wrong = total.wrong;
        let seconds = elapsed.as_secs_f64();
        let ops_per_s = total.ops as f64 / seconds;
        Done {
            workload: plan.workload.name().to_owned(),
            mode: match plan.mode {
                Mode::Read => "read",
                Mode::ReadWrite => "read-write",
            }
            .to_owned(),
            mib: pages / PAGES_PER_MIB,
            threads,
            seconds,
            ops: total.ops,
            bad_pages: total.bad,
            ops_per_s,
            mib_per_s: ops_per_s * PAGE_BYTES as f64 / f64::from(1 << 20),
            cpu_s: cpu.as_secs_f64(),
            latency: plan.time_each.then(|| Latency::of(&total.latency)),
            slice_ms: plan.slice_ms,
            slices: total.slices,
            stalls,
        }
    }
}

/// Runs each worker on a thread of its own; a single one right here, because a second thread,
/// even an idle one on another CPU, makes the kernel's page-out send TLB flushes to that CPU.
fn run_workers(mut workers: Vec<Worker<'_>>, limit: Limit) -> (Vec<ThreadResult>, Duration, Duration) {
    let threads = workers.len();
    if threads == 1 {
        let (start, cpu) = (Instant::now(), process::cpu_time());
        let results = workers.drain(..).map(|worker| worker.run(limit)).collect();
        return (results, start.elapsed(), process::cpu_time() - cpu);
    }
    let barrier = &Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let handles: Vec<_> = workers
            .into_iter()
            .enumerate()
            .map(|(index, worker)| {
                let share = share_of(limit, index, threads);
                scope.spawn(move || {
                    barrier.wait();
                    worker.run(share)
                })
            })
            .collect();
        let cpu = process::cpu_time();
        barrier.wait();
        let start = Instant::now();
        // A worker that panics has printed why; its accesses are not counted.
        let results = handles.into_iter().map(|handle| handle.join().unwrap_or_default()).collect();
        (results, start.elapsed(), process::cpu_time() - cpu)
    })
}

/// A thread's share of the limit.
fn share_of(limit: Limit, index: usize, threads: usize) -> Limit {
    match limit {
        Limit::Seconds(_) => limit,
        Limit::Ops(ops) => {
            let (index, threads) = (index as u64, threads as u64);
            Limit::Ops(ops / threads + u64::from(index < ops % threads))
        }
    }
}

struct Worker<'run> {
    part: RamPart<'run>,
    versions: &'run mut [u32],
    pattern: Pattern,
    plan: Plan,
    /// What an access takes at least; 0: as long as it takes.
    ns_per_op: f64,
    chooser: Chooser,
}

impl Worker<'_> {
    fn run(mut self, limit: Limit) -> ThreadResult {
        let mut result = ThreadResult::default();
        let start = Instant::now();
        let mut now_ns = 0_u64;
        let (end_ns, end_ops) = match limit {
            Limit::Seconds(seconds) => ((seconds * 1e9) as u64, u64::MAX),
            Limit::Ops(ops) => (u64::MAX, ops),
        };
        let slice_ns = self.plan.slice_ms.map(|ms| ms * 1_000_000);
        let mut uncounted = 0;
        while now_ns < end_ns && result.ops < end_ops {
            let ops = result.ops;
            let page = self.chooser.next(|| {
                let by_ops = ops as f64 / end_ops as f64;
                by_ops.max(now_ns as f64 / end_ns as f64)
            });
            self.touch(page, &mut result);
            result.ops += 1;
            uncounted += 1;
            if self.plan.time_each {
                let after = elapsed_ns(start);
                result.latency.record(after - now_ns);
                if after - now_ns > result.longest_ns {
                    result.longest_ns = after - now_ns;
                    result.longest_ended_ns = monotonic_ns();
                }
                now_ns = after;
            } else if result.ops % CLOCK_EVERY_OPS == 0 {
                now_ns = elapsed_ns(start);
            } else {
                continue;
            }
            let due_ns = (result.ops as f64 * self.ns_per_op) as u64;
            if due_ns > now_ns {
                std::thread::sleep(Duration::from_nanos(due_ns - now_ns));
                now_ns = elapsed_ns(start);
            }
            if let Some(slice_ns) = slice_ns {
                let slice = ((now_ns / slice_ns) as usize).min(SLICES_MAX - 1);
                if result.slices.len() <= slice {
                    if self.is_at_speed(&result.slices) {
                        break;
                    }
                    result.slices.resize(slice + 1, 0);
                }
                result.slices[slice] += uncounted;
                uncounted = 0;
            }
        }
        result
    }

    /// The slices so far end as fast as the plan wants to see.
    fn is_at_speed(&self, slices: &[u64]) -> bool {
        let (Some(ops_per_s), Some(slice_ms)) = (self.plan.stop_at_ops_per_s, self.plan.slice_ms) else { return false };
        let wanted = ops_per_s * slice_ms as f64 / 1000.0 * STEADY_SLICES as f64;
        let last = slices.len().checked_sub(STEADY_SLICES).map(|first| slices[first..].iter().sum::<u64>());
        last.is_some_and(|ops| ops as f64 >= wanted)
    }

    #[inline]
    fn touch(&mut self, page: usize, result: &mut ThreadResult) {
        let version = self.versions[page];
        if let Err(wrong) = self.pattern.check(&self.part, page, version, result.ops) {
            result.bad += 1;
            if result.wrong.len() < WRONG_PAGES_SHOWN_MAX {
                result.wrong.push(wrong);
            }
        }
        if self.plan.mode == Mode::ReadWrite {
            let version = version.wrapping_add(1);
            self.pattern.write(&mut self.part, page, version);
            self.versions[page] = version;
        }
    }
}

fn elapsed_ns(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::workload::Workload;
    use super::*;
    use pagoda_sys::toy::ram::{HugePages, RamSource};

    fn plan(workload: Workload, ops: u64) -> Plan {
        Plan {
            workload,
            mode: Mode::ReadWrite,
            limit: Limit::Ops(ops),
            slice_ms: Some(1),
            stop_at_ops_per_s: None,
            pace_ops_per_s: None,
            time_each: workload != Workload::Seq,
        }
    }

    #[test]
    fn every_workload_verifies_and_a_damaged_page_is_counted() {
        let pages = 512;
        let source = RamSource::Anonymous(pages * PAGE_BYTES);
        let mut ram = Ram::map(source, HugePages::Refuse).unwrap();
        let mut state = State::new(pages, 9).unwrap();
        state.fill(&mut ram, 3);
        for workload in [Workload::Seq, Workload::Random, Workload::Zipf, Workload::Phase, Workload::Mixed] {
            let done = state.run(&mut ram, 3, plan(workload, 5000));
            assert_eq!((done.ops, done.bad_pages), (5000, 0), "{workload:?}");
            assert_eq!(done.latency.is_some(), workload != Workload::Seq);
        }
        ram.split(1)[0].store(77, 511, 0);
        let done = state.run(&mut ram, 2, plan(Workload::Seq, pages as u64));
        assert_eq!(done.bad_pages, 1);
        assert_eq!(state.wrong_pages().len(), 1);
        let done = state.run(&mut ram, 2, plan(Workload::Seq, pages as u64));
        assert_eq!(done.bad_pages, 0, "it was written anew");
    }

    #[test]
    fn a_run_ends_when_it_is_fast_enough() {
        let source = RamSource::Anonymous(16 * PAGE_BYTES);
        let mut ram = Ram::map(source, HugePages::Refuse).unwrap();
        let mut state = State::new(16, 1).unwrap();
        state.fill(&mut ram, 1);
        let plan = Plan { limit: Limit::Seconds(3600.0), stop_at_ops_per_s: Some(1.0), ..plan(Workload::Random, 1) };
        let done = state.run(&mut ram, 1, plan);
        assert!(done.slices.len() >= STEADY_SLICES && done.seconds < 3600.0);
        assert!(done.stalls.len() == 1 && done.stalls[0].ended_ns <= monotonic_ns());
    }

    #[test]
    fn shares_add_up() {
        let total: u64 = (0..7)
            .map(|index| match share_of(Limit::Ops(100), index, 7) {
                Limit::Ops(ops) => ops,
                Limit::Seconds(_) => 0,
            })
            .sum();
        assert_eq!(total, 100);
    }
}
