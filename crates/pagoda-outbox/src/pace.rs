//! How fast bytes may be sent: a token bucket, in the form of a schedule.
//!
//! Whoever wants to send reserves the bytes and is told from when on they may go. Reservations are served in the order in which
//! they were made, so nobody starves. In any span of time, what may go is at most what the rate allows for the span and for
//! [`BURST`], and one reservation more.

use std::num::NonZeroU64;
use std::time::Duration;

/// Time that was not used is made up for by at most so much: the sender need not wake on time, and nobody gets much at once.
pub const BURST: Duration = Duration::from_millis(50);
/// The time that one reservation should be worth at most.
const TURN: Duration = Duration::from_millis(50);
/// A reservation is not asked to be smaller, or each packet would cost a wake-up.
const TURN_BYTES_MIN: u64 = 16 << 10;
const NANOS_PER_SECOND: u128 = 1_000_000_000;

#[derive(Debug, Clone)]
pub struct Pace {
    bytes_per_second: NonZeroU64,
    /// When everything that was reserved has been sent at the rate.
    paid: Duration,
}

impl Pace {
    pub fn new(bytes_per_second: NonZeroU64) -> Pace {
        Pace { bytes_per_second, paid: Duration::ZERO }
    }

    /// Reserves so many bytes, and says from when on they may be sent: `now` or later. Times count from any beginning.
    pub fn reserve(&mut self, now: Duration, bytes: u64) -> Duration {
        let begin = self.paid.max(now.saturating_sub(BURST));
        // Rounded up: the rate is never exceeded.
        let nanos = (u128::from(bytes) * NANOS_PER_SECOND).div_ceil(u128::from(self.bytes_per_second.get()));
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.paid = begin.saturating_add(cost);
        begin.max(now)
    }

    /// The most that should be reserved at once, so that others have their turn.
    pub fn turn_bytes(&self) -> u64 {
        let bytes = u128::from(self.bytes_per_second.get()) * TURN.as_nanos() / NANOS_PER_SECOND;
        u64::try_from(bytes).unwrap_or(u64::MAX).max(TURN_BYTES_MIN)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pace(bytes_per_second: u64) -> Pace {
        Pace::new(NonZeroU64::new(bytes_per_second).unwrap())
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn reservations_follow_one_another() {
        let mut pace = pace(1_000_000);
        let begin = ms(10_000);
        assert_eq!(pace.reserve(begin, 50_000), begin, "the burst");
        assert_eq!(pace.reserve(begin, 100_000), begin, "what was reserved is paid by now");
        assert_eq!(pace.reserve(begin, 1), begin + ms(100));
        assert_eq!(
            pace.reserve(begin + ms(500), 0),
            begin + ms(500),
            "time that was not used is lost but for the burst"
        );
        assert_eq!(pace.reserve(begin + ms(500), 150_000), begin + ms(500));
        assert_eq!(pace.reserve(begin + ms(500), 1), begin + ms(600));
    }

    #[test]
    fn turns() {
        assert_eq!(pace(125_000_000).turn_bytes(), 6_250_000);
        assert_eq!(pace(1).turn_bytes(), TURN_BYTES_MIN);
        assert_eq!(pace(u64::MAX).turn_bytes(), u64::MAX / 20);
        assert_eq!(pace(1).reserve(ms(1), u64::MAX), ms(1));
        assert_eq!(pace(1).reserve(Duration::MAX, u64::MAX), Duration::MAX);
    }

    proptest! {
        #[test]
        fn no_span_has_more_than_the_rate_and_all_of_it_is_used(
            rate in 1_u64..10_000_000_000,
            asks in prop::collection::vec((0_u64..200_000_000, 0_u64..2_000_000), 1..80),
        ) {
            let mut pace = pace(rate);
            let (mut now, mut sent) = (Duration::ZERO, Vec::new());
            for (pause_nanos, bytes) in asks {
                now += Duration::from_nanos(pause_nanos);
                let at = pace.reserve(now, bytes);
                prop_assert!(at >= now);
                sent.push((now, at, bytes));
            }
            let seconds = |span: Duration| span.as_secs_f64();
            prop_assert!(sent.is_sorted_by_key(|(_, at, _)| *at), "in the order of asking");
            for first in 0..sent.len() {
                let mut bytes = 0;
                for last in first..sent.len() {
                    // The last one is the one reservation more.
                    let allowed = rate as f64 * seconds(sent[last].1 - sent[first].1 + BURST);
                    prop_assert!(bytes as f64 <= allowed * 1.000_001 + 1.0, "{bytes} bytes, {allowed} allowed");
                    bytes += sent[last].2;
                }
            }
            // Who waits, waits only because that much was reserved before.
            let mut busy_since = Duration::ZERO;
            let mut bytes = 0;
            for (asked, at, more) in sent {
                if at == asked {
                    (busy_since, bytes) = (asked, 0);
                } else {
                    let needed = bytes as f64 / rate as f64;
                    prop_assert!(seconds(at - busy_since) <= needed * 1.000_001 + 1e-6, "{at:?} {busy_since:?} {needed}");
                }
                bytes += more;
            }
        }
    }
}
