//! Latencies in logarithmic buckets: 32 to an octave, so a percentile is at most 3 % off.

/// log2 of the buckets in an octave.
const OCTAVE_BITS: u32 = 5;
const PER_OCTAVE: u64 = 1 << OCTAVE_BITS;
const BUCKETS: usize = (64 - OCTAVE_BITS as usize + 1) * PER_OCTAVE as usize;

/// Counts of durations in nanoseconds.
#[derive(Debug, Clone)]
pub struct LatencyHistogram {
    counts: Vec<u64>,
    total: u64,
    max_ns: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0, max_ns: 0 }
    }
}

impl LatencyHistogram {
    /// Counts one duration.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket_of(ns)] += 1;
        self.total += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds another histogram's counts.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The duration that `fraction` of all are not above, in microseconds; 0 when empty.
    #[must_use]
    pub fn percentile_us(&self, fraction: f64) -> f64 {
        let wanted = ((self.total as f64 * fraction).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return (middle_of(bucket) as f64).min(self.max_ns as f64) / 1000.0;
            }
        }
        0.0
    }

    /// The longest duration, in microseconds.
    #[must_use]
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1000.0
    }
}

fn bucket_of(ns: u64) -> usize {
    if ns < PER_OCTAVE {
        return ns as usize;
    }
    let octave = u64::from(ns.ilog2() - OCTAVE_BITS);
    // The bits below the highest one pick the bucket in its octave.
    ((octave + 1) * PER_OCTAVE + (ns >> octave) - PER_OCTAVE) as usize
}

fn middle_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < PER_OCTAVE {
        return bucket;
    }
    let octave = bucket / PER_OCTAVE - 1;
    let low = (bucket % PER_OCTAVE + PER_OCTAVE) << octave;
    low + (1_u64 << octave) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_within_three_percent_of_its_bucket() {
        for ns in (0..200).chain([1_000, 12_345, 999_999, 1 << 33, u64::MAX / 2]) {
            let middle = middle_of(bucket_of(ns));
            assert!(middle.abs_diff(ns) as f64 <= ns as f64 * 0.032, "{ns} -> {middle}");
        }
        assert!(bucket_of(u64::MAX) < BUCKETS);
    }

    #[test]
    fn percentiles_of_a_ramp() {
        let mut histogram = LatencyHistogram::default();
        (1..=1000).for_each(|us| histogram.record(us * 1000));
        for (fraction, expected_us) in [(0.5, 500.0), (0.99, 990.0), (0.999, 999.0)] {
            let got = histogram.percentile_us(fraction);
            assert!((got - expected_us).abs() < expected_us * 0.032, "{fraction}: {got}");
        }
        assert_eq!(histogram.max_us(), 1000.0);
        assert_eq!(LatencyHistogram::default().percentile_us(0.5), 0.0);
    }
}
