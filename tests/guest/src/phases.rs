//! Phases: orders in which pages are read, checked and rewritten.

use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::bail;
use pagoda_guest::PAGES_PER_MIB;
use pagoda_guest::rng::{Rng, Zipf};

use crate::enough::End;
use crate::memory::{Memory, Part};
use crate::params::{Limit, RunParams};
use crate::report::Report;

const PROGRESS_PERIOD: Duration = Duration::from_secs(1);

/// Operations between two looks at the clock, which costs a system call where there is no fast clock (TCG).
const OPS_PER_BATCH: u64 = 64;

/// The hot set: this share of the pages gets this share of the operations, in percent.
const HOT_PAGES_PERCENT: u64 = 10;
const HOT_OPS_PERCENT: u32 = 90;

/// YCSB's exponent, the usual one for stores.
const ZIPF_EXPONENT: f64 = 0.99;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Writes every page once.
    Fill,
    Seq,
    Random,
    Hot,
    Zipf,
    /// A hot set that moves with every pass.
    ShiftingHot,
    /// Checks every word of every page once.
    Verify,
}

const NAMES: [(Phase, &str); 7] = [
    (Phase::Fill, "fill"),
    (Phase::Seq, "seq"),
    (Phase::Random, "random"),
    (Phase::Hot, "hot"),
    (Phase::Zipf, "zipf"),
    (Phase::ShiftingHot, "phase-change"),
    (Phase::Verify, "verify"),
];

impl Phase {
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(phase, _)| *phase == self).map_or("?", |(_, name)| name)
    }

    /// Whether the phase is one look at each page, whatever limit is set.
    fn is_one_sweep(self) -> bool {
        matches!(self, Self::Fill | Self::Verify)
    }
}

impl FromStr for Phase {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match NAMES.iter().find(|(_, known)| *known == name) {
            Some((phase, _)) => Ok(*phase),
            None => bail!("unknown work {name:?}; tests/guest/README.md lists what there is"),
        }
    }
}

/// Runs `phase` over all of `memory`, with progress once a second, and reports its end.
pub fn run(phase: Phase, memory: &mut Memory, run: RunParams, seed: u64, report: &Report) {
    let start = Instant::now();
    let pages = memory.pages() as u64;
    let bad_before = report.bad_pages();
    let limit = if phase.is_one_sweep() { Limit::Passes(1) } else { run.limit };
    let ops = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (alive, all_ended) = channel::<()>();
        for (index, part) in memory.parts(run.threads).into_iter().enumerate() {
            let alive = alive.clone();
            let ops = &ops;
            let rng = Rng::new(seed.wrapping_add(index as u64));
            scope.spawn(move || {
                let _alive = alive;
                Worker { phase, part, write_percent: run.write_percent, rng }.run(limit, start, ops, report);
            });
        }
        drop(alive);
        // The workers' ends of the channel close when the last of them is done.
        while let Err(RecvTimeoutError::Timeout) = all_ended.recv_timeout(PROGRESS_PERIOD) {
            let done = ops.load(Ordering::Relaxed);
            report.line(format_args!(
                "progress phase={} pass={} mib={} of={} ops={done} bad={}",
                phase.name(),
                done / pages + 1,
                done % pages / PAGES_PER_MIB as u64,
                pages / PAGES_PER_MIB as u64,
                report.bad_pages(),
            ));
        }
    });
    report.line(format_args!(
        "done phase={} pages={pages} ops={} bad={} us={}",
        phase.name(),
        ops.into_inner(),
        report.bad_pages() - bad_before,
        start.elapsed().as_micros(),
    ));
}

struct Worker<'a> {
    phase: Phase,
    part: Part<'a>,
    write_percent: u32,
    rng: Rng,
}

impl Worker<'_> {
    fn run(mut self, limit: Limit, start: Instant, ops: &AtomicU64, report: &Report) {
        let pages = self.part.pages() as u64;
        let mut order = Order::new(self.phase, pages, &mut self.rng);
        let mut end = End::new(limit, start, pages);
        let mut done = 0;
        while !end.is_reached(done) {
            let batch = match limit {
                Limit::Passes(passes) => (passes * pages - done).min(OPS_PER_BATCH),
                Limit::Time(_) => OPS_PER_BATCH,
            };
            for _ in 0..batch {
                let page = order.next(&mut self.rng) as usize;
                self.operate(page, report);
            }
            done += batch;
            ops.fetch_add(batch, Ordering::Relaxed);
        }
    }

    fn operate(&mut self, page: usize, report: &Report) {
        match self.phase {
            Phase::Fill => self.part.write(page),
            Phase::Verify => self.part.check_all_words(page, report),
            _ => {
                self.part.check(page, self.rng.next_u64(), report);
                if self.rng.percent(self.write_percent) {
                    self.part.write(page);
                }
            }
        }
    }
}

/// Which page is next, of `pages`.
struct Order {
    pages: u64,
    ops: u64,
    kind: OrderKind,
}

enum OrderKind {
    Sequential,
    Uniform,
    Hot {
        start: u64,
        moves: bool,
    },
    /// `step` has no common factor with the pages, so it scatters the ranks without collisions.
    Zipf {
        zipf: Zipf,
        step: u64,
    },
}

impl Order {
    fn new(phase: Phase, pages: u64, rng: &mut Rng) -> Self {
        let kind = match phase {
            Phase::Fill | Phase::Seq | Phase::Verify => OrderKind::Sequential,
            Phase::Random => OrderKind::Uniform,
            Phase::Hot | Phase::ShiftingHot => {
                OrderKind::Hot { start: rng.below(pages), moves: phase == Phase::ShiftingHot }
            }
            Phase::Zipf => OrderKind::Zipf { zipf: Zipf::new(pages, ZIPF_EXPONENT), step: coprime_step(pages) },
        };
        Self { pages, ops: 0, kind }
    }

    fn next(&mut self, rng: &mut Rng) -> u64 {
        let pages = self.pages;
        let pass_begins = self.ops > 0 && self.ops.is_multiple_of(pages);
        let page = match &mut self.kind {
            OrderKind::Sequential => self.ops % pages,
            OrderKind::Uniform => rng.below(pages),
            OrderKind::Hot { start, moves } => {
                if *moves && pass_begins {
                    *start = rng.below(pages);
                }
                if rng.percent(HOT_OPS_PERCENT) {
                    let hot_pages = (pages * HOT_PAGES_PERCENT / 100).max(1);
                    (*start + rng.below(hot_pages)) % pages
                } else {
                    rng.below(pages)
                }
            }
            OrderKind::Zipf { zipf, step } => {
                (u128::from(zipf.rank(rng)) * u128::from(*step) % u128::from(pages)) as u64
            }
        };
        self.ops += 1;
        page
    }
}

/// About 0.618 of `pages`, which spreads consecutive multiples most evenly, with no common factor.
pub fn coprime_step(pages: u64) -> u64 {
    let greatest_common_divisor = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let near = (pages as f64 * 0.618) as u64;
    (near.max(1)..).find(|step| greatest_common_divisor(*step, pages) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(phase: Phase, pages: u64, ops: u64) -> Vec<u64> {
        let mut rng = Rng::new(3);
        let mut order = Order::new(phase, pages, &mut rng);
        let mut counts = vec![0; pages as usize];
        for _ in 0..ops {
            counts[order.next(&mut rng) as usize] += 1;
        }
        counts
    }

    #[test]
    fn sweeps_visit_every_page_once_a_pass() {
        for phase in [Phase::Fill, Phase::Seq, Phase::Verify] {
            assert_eq!(counts(phase, 100, 300), vec![3; 100]);
        }
    }

    #[test]
    fn the_hot_set_gets_its_share() {
        let mut counts = counts(Phase::Hot, 1000, 100_000);
        counts.sort_unstable();
        let hot: u64 = counts[900..].iter().sum();
        // 90 % and a tenth of the rest.
        assert!((90_000..92_500).contains(&hot), "{hot}");
    }

    #[test]
    fn a_phase_change_moves_the_hot_set() {
        let mut rng = Rng::new(3);
        let mut order = Order::new(Phase::ShiftingHot, 1000, &mut rng);
        let mut hottest_of_pass = || {
            let mut counts = vec![0; 1000];
            (0..1000).for_each(|_| counts[order.next(&mut rng) as usize] += 1);
            (0..10).max_by_key(|tenth| counts[tenth * 100..][..100].iter().sum::<u64>())
        };
        let passes: Vec<_> = (0..5).map(|_| hottest_of_pass()).collect();
        assert!(passes.iter().any(|tenth| *tenth != passes[0]), "{passes:?}");
    }

    #[test]
    fn steps_scatter_without_collisions() {
        for pages in [1, 2, 3, 100, 256, 997, 4096] {
            let step = coprime_step(pages);
            let mut pages_of_ranks: Vec<_> = (0..pages).map(|rank| rank * step % pages).collect();
            pages_of_ranks.sort_unstable();
            assert_eq!(pages_of_ranks, (0..pages).collect::<Vec<_>>());
        }
    }

    #[test]
    fn names_and_phases_agree() {
        for (phase, name) in NAMES {
            assert_eq!((phase.name(), name.parse::<Phase>().ok()), (name, Some(phase)));
        }
    }
}
