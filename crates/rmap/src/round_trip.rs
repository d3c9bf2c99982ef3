//! How long a peer takes to answer, and when an answer is late.

use std::time::Duration;

/// TCP's minimum of 200 ms is what makes incast cost 90 % of the throughput (Vasudevan et al., SIGCOMM 2009).
pub const RTO_MIN: Duration = Duration::from_millis(1);

/// Longer waits would find a server dead that only lost a few datagrams.
pub const RTO_MAX: Duration = Duration::from_millis(8);

const RTO_FIRST: Duration = Duration::from_millis(4);

/// Smoothed round trip and its variation (RFC 6298, in its proportions).
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundTrip {
    smoothed: Option<Duration>,
    variation: Duration,
}

impl RoundTrip {
    pub fn sample(&mut self, took: Duration) {
        match self.smoothed {
            None => (self.smoothed, self.variation) = (Some(took), took / 2),
            Some(smoothed) => {
                self.variation = (self.variation * 3 + smoothed.abs_diff(took)) / 4;
                self.smoothed = Some((smoothed * 7 + took) / 8);
            }
        }
    }

    pub fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or(RTO_FIRST)
    }

    fn bound(&self) -> Option<Duration> {
        self.smoothed.map(|smoothed| smoothed + self.variation * 4)
    }

    /// What takes so long is late. RFC 6298, 2.3: a steady round trip has next to no variation, and one that is a little longer is no
    /// loss.
    pub fn late(&self) -> Duration {
        self.smoothed.map_or(RTO_FIRST, |smoothed| smoothed + (self.variation * 4).max(RTO_MIN))
    }

    /// When it is asked again.
    pub fn timeout(&self) -> Duration {
        self.late().clamp(RTO_MIN, RTO_MAX)
    }

    /// When a read is asked of a second copy too: at three times what nearly all take.
    pub fn hedge(&self) -> Duration {
        const HEDGE_MIN: Duration = Duration::from_micros(200);
        self.bound().map_or(RTO_FIRST, |bound| (bound * 3).clamp(HEDGE_MIN, RTO_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_follow_the_round_trip_within_bounds() {
        let mut trip = RoundTrip::default();
        assert_eq!(trip.timeout(), RTO_FIRST);
        for (took_us, times, low_us, high_us) in
            [(20, 50, 1010, 1020), (3000, 50, 3900, 4000), (90_000, 50, 8000, 8000)]
        {
            (0..times).for_each(|_| trip.sample(Duration::from_micros(took_us)));
            let range = Duration::from_micros(low_us)..=Duration::from_micros(high_us);
            assert!(range.contains(&trip.timeout()), "{:?} after {took_us} us", trip.timeout());
        }
    }
}
