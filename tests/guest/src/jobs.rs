//! Jobs that a guest does and the host knows: when each arrives, how long it computes and what it writes. Both sides draw them
//! from the same seed.

use crate::rng::{GOLDEN, Rng, mix};

/// The bits of [`file_number`]: what is left to [`crate::stream::Stream`] counts the pages of a file.
const FILE_NUMBER_BITS: u32 = 34;

/// What jobs are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Arrivals in 1000 s, of a Poisson process.
    pub arrivals_per_ks: u64,
    /// Mean time for which a job computes.
    pub compute_us: u64,
    /// Mean number of bytes that a job writes.
    pub output_bytes: u64,
    /// Stages of the Erlang distribution of both: 9 for a coefficient of variation of 1/3.
    pub stages: u32,
}

/// One job, before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// After the first moment of the plan.
    pub arrives_us: u64,
    pub compute_us: u64,
    pub output_bytes: u64,
}

/// All jobs of a load, without end. Two loads with one seed have the same draws.
#[derive(Debug, Clone)]
pub struct Plan {
    load: Load,
    rng: Rng,
    arrives_us: f64,
}

impl Plan {
    pub fn new(load: Load, seed: u64) -> Plan {
        Plan { load, rng: Rng::new(seed), arrives_us: 0.0 }
    }

    /// A draw of the exponential distribution of mean 1.
    fn exponential(&mut self) -> f64 {
        -(1.0 - self.rng.unit()).ln()
    }

    /// A draw of mean 1.
    fn erlang(&mut self) -> f64 {
        let stages = self.load.stages.max(1);
        (0..stages).map(|_| self.exponential()).sum::<f64>() / f64::from(stages)
    }
}

impl Iterator for Plan {
    type Item = Planned;

    fn next(&mut self) -> Option<Planned> {
        self.arrives_us += self.exponential() * 1e9 / self.load.arrivals_per_ks.max(1) as f64;
        let compute_us = self.erlang() * self.load.compute_us as f64;
        let output_bytes = self.erlang() * self.load.output_bytes as f64;
        Some(Planned {
            arrives_us: self.arrives_us as u64,
            compute_us: compute_us as u64,
            // An empty file would be no job.
            output_bytes: (output_bytes as u64).max(1),
        })
    }
}

/// The number of the stream that the job's file has as its content.
pub fn file_number(seed: u64, job: u64) -> u64 {
    mix(seed.wrapping_add(job.wrapping_mul(GOLDEN))) >> (u64::BITS - FILE_NUMBER_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load { arrivals_per_ks: 4000, compute_us: 110_000, output_bytes: 5_000_000, stages: 9 };

    #[test]
    fn a_plan_has_its_means_and_two_loads_have_the_same_draws() {
        let count = 20_000;
        let jobs: Vec<Planned> = Plan::new(LOAD, 7).take(count).collect();
        let mean = |of: fn(&Planned) -> u64| jobs.iter().map(of).sum::<u64>() as f64 / count as f64;
        let is_near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.02;
        assert!(is_near(mean(|job| job.compute_us), 110_000.0) && is_near(mean(|job| job.output_bytes), 5e6));
        let last = jobs.last().expect("a job").arrives_us;
        assert!(is_near(last as f64 / count as f64, 250_000.0), "{last}");
        let slower = Load { compute_us: 220_000, ..LOAD };
        for (job, other) in jobs.iter().zip(Plan::new(slower, 7)) {
            assert_eq!((job.arrives_us, job.output_bytes), (other.arrives_us, other.output_bytes));
            assert!(other.compute_us.abs_diff(2 * job.compute_us) <= 1);
        }
    }

    #[test]
    fn files_have_numbers_of_their_own() {
        let mut numbers: Vec<u64> = (0..10_000).map(|job| file_number(3, job)).collect();
        assert!(numbers.iter().all(|number| *number < 1 << FILE_NUMBER_BITS));
        numbers.sort_unstable();
        numbers.dedup();
        assert!(numbers.len() > 9_990, "two of 10,000 draws of 34 bits are rarely the same");
    }
}
