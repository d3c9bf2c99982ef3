//! How long operations take, by powers of two of a microsecond.

use std::time::Duration;

/// Up to 1 us, 2 us, 4 us, ... 8.4 s, and longer.
pub const LATENCY_BUCKETS: usize = 25;

/// Durations counted by length. A few hundred bytes whatever is recorded, and no allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    buckets: [u64; LATENCY_BUCKETS],
    sum_ns: u64,
}

impl Latency {
    pub fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let us = ns.div_ceil(1000).max(1);
        let bucket = us.next_power_of_two().trailing_zeros() as usize;
        self.buckets[bucket.min(LATENCY_BUCKETS - 1)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Of all that was recorded.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// What this part of all durations was not longer than, to the next power of two: 8.4 s stand for longer ones, and zero for
    /// nothing recorded.
    pub fn quantile(&self, part: f64) -> Duration {
        let wanted = ((self.count() as f64 * part).ceil() as u64).max(1);
        let mut seen = 0;
        let reached = |count: &u64| {
            seen += count;
            seen >= wanted
        };
        let bucket = self.buckets.iter().position(reached);
        bucket.map_or(Duration::ZERO, |at| Duration::from_micros(1 << at.min(LATENCY_BUCKETS - 2)))
    }

    /// The longest duration of each bucket, and how many are in it and in no one before; `None` for the last.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let longest = |at: usize| (at + 1 < LATENCY_BUCKETS).then(|| Duration::from_micros(1 << at));
        self.buckets.iter().enumerate().map(move |(at, count)| (longest(at), *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_go_to_the_bucket_that_ends_after_them() {
        let mut latency = Latency::default();
        let cases = [
            (0, 0),
            (1, 0),
            (1000, 0),
            (1001, 1),
            (2000, 1),
            (2001, 2),
            (70_000, 7),
            (8_388_608_000, 23),
            (8_388_609_000, 24),
            (u64::MAX, 24),
        ];
        for (ns, bucket) in cases {
            let before = latency;
            latency.record(Duration::from_nanos(ns));
            let counted = latency.buckets().zip(before.buckets()).position(|(now, before)| now != before);
            assert_eq!(counted, Some(bucket), "{ns} ns");
            let (longest, _) = latency.buckets().nth(bucket).unwrap();
            assert!(longest.is_none_or(|longest| Duration::from_nanos(ns) <= longest));
        }
        assert_eq!((latency.count(), latency.sum()), (cases.len() as u64, Duration::from_nanos(u64::MAX)));
        assert_eq!(latency.buckets().last(), Some((None, 2)));
    }

    #[test]
    fn quantiles_are_the_ends_of_their_buckets() {
        let mut latency = Latency::default();
        assert_eq!(latency.quantile(0.5), Duration::ZERO);
        (0..98).for_each(|_| latency.record(Duration::from_micros(70)));
        latency.record(Duration::from_millis(3));
        latency.record(Duration::MAX);
        let us = |part| latency.quantile(part).as_micros();
        assert_eq!([0.0, 0.5, 0.98, 0.99, 1.0].map(us), [128, 128, 128, 4096, 1 << 23]);
    }
}
