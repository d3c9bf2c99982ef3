//! Histograms of fault latency: four steps of the same width an octave, so an answer is at most 25 % above the truth.

use std::time::Duration;

/// Buckets of an octave, all of the same width.
const STEPS: u64 = 4;
/// From 0 ns to 2^40 ns, 18 minutes: longer is counted there.
const BUCKETS: usize = 40 * STEPS as usize;

/// How many durations fell into each bucket.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: [u64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: [0; BUCKETS] }
    }
}

impl Histogram {
    /// Counts one duration in its bucket.
    pub fn record(&mut self, duration: Duration) {
        let ns = duration.as_nanos().min(u128::from(u64::MAX)) as u64;
        self.counts[bucket(ns)] += 1;
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The duration that `part` (0 to 1) of them do not exceed; the upper bound of its bucket. Zero if there are none.
    pub fn quantile(&self, part: f64) -> Duration {
        let rank = (self.count() as f64 * part).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_nanos(upper(index));
            }
        }
        Duration::ZERO
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(STEPS);
    let octave = u64::from(ns.ilog2());
    let step = (ns >> (octave - STEPS.ilog2() as u64)) - STEPS;
    ((octave * STEPS + step) as usize).min(BUCKETS - 1)
}

fn upper(index: usize) -> u64 {
    let (octave, step) = (index as u64 / STEPS, index as u64 % STEPS);
    if octave < u64::from(STEPS.ilog2()) {
        return STEPS;
    }
    ((STEPS + step + 1) << (octave - u64::from(STEPS.ilog2()))) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_at_most_a_step_too_high() {
        for ns in [5_u64, 100, 999, 1_000, 4_711, 1_000_000, 123_456_789] {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_nanos(ns));
            let answer = histogram.quantile(0.5).as_nanos() as u64;
            assert!(answer >= ns && answer as f64 <= ns as f64 * 1.26, "{ns} -> {answer}");
        }
    }

    #[test]
    fn quantiles_split_the_counts() {
        let mut histogram = Histogram::default();
        for us in 1..=100 {
            histogram.record(Duration::from_micros(us));
        }
        assert_eq!(histogram.count(), 100);
        let p50 = histogram.quantile(0.5).as_nanos() as f64 / 1e3;
        let p99 = histogram.quantile(0.99).as_nanos() as f64 / 1e3;
        assert!((50.0..64.0).contains(&p50) && (99.0..125.0).contains(&p99), "{p50} {p99}");
        assert_eq!(Histogram::default().quantile(0.5), Duration::ZERO);
    }
}
