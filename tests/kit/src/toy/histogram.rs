//! Latencies, by the crate `hdrhistogram`: a percentile is at most 1 % off.

use hdrhistogram::Histogram;

/// An hour. Longer ones count as this long, except for [`LatencyHistogram::max_us`].
const LONGEST_NS: u64 = 3600 * 1_000_000_000;
/// Decimal digits that a percentile has right.
const DIGITS: u8 = 2;

/// Counts of durations in nanoseconds.
#[derive(Debug, Clone)]
pub struct LatencyHistogram {
    counts: Histogram<u64>,
    /// The crate knows the longest by its bucket only.
    max_ns: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        let counts = Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("bounds and digits that it takes");
        Self { counts, max_ns: 0 }
    }
}

impl LatencyHistogram {
    /// Counts one duration, in nanoseconds.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.counts.saturating_record(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds another histogram's counts.
    pub fn merge(&mut self, other: &Self) {
        self.counts.add(&other.counts).expect("all have the same bounds");
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The duration that `fraction` of all are not above, in microseconds; 0 when empty.
    #[must_use]
    pub fn percentile_us(&self, fraction: f64) -> f64 {
        self.counts.value_at_quantile(fraction).min(self.max_ns) as f64 / 1000.0
    }

    /// The longest duration, in microseconds.
    #[must_use]
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_percentile_is_within_a_hundredth() {
        for ns in (1..200).chain([1_000, 12_345, 999_999, 1 << 33]) {
            let mut histogram = LatencyHistogram::default();
            // The longest limits what is answered; it must not be the only one.
            histogram.record(ns);
            histogram.record(LONGEST_NS);
            let got = histogram.percentile_us(0.5) * 1000.0;
            assert!((got - ns as f64).abs() <= ns as f64 * 0.01, "{ns} -> {got}");
        }
    }

    #[test]
    fn what_is_too_long_counts_as_the_longest() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(u64::MAX);
        histogram.record(0);
        assert_eq!(histogram.max_us(), u64::MAX as f64 / 1000.0);
        assert!(histogram.percentile_us(1.0) * 1000.0 >= LONGEST_NS as f64);
    }

    #[test]
    fn percentiles_of_a_ramp() {
        let mut histogram = LatencyHistogram::default();
        (1..=1000).for_each(|us| histogram.record(us * 1000));
        for (fraction, expected_us) in [(0.5, 500.0), (0.99, 990.0), (0.999, 999.0)] {
            let got = histogram.percentile_us(fraction);
            assert!((got - expected_us).abs() < expected_us * 0.01, "{fraction}: {got}");
        }
        assert_eq!(histogram.max_us(), 1000.0);
        assert_eq!(LatencyHistogram::default().percentile_us(0.5), 0.0);
    }
}
