//! When a push is tried again: pauses that double, up to a limit, and differ between files. Pure: chance is an argument.

use std::time::Duration;

/// The pauses between attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pauses {
    /// After the first failure. Each further one doubles it.
    pub first: Duration,
    /// No pause is longer.
    pub longest: Duration,
}

impl Default for Pauses {
    fn default() -> Pauses {
        Pauses { first: Duration::from_millis(500), longest: Duration::from_secs(60) }
    }
}

/// Failures since something was acknowledged.
#[derive(Debug, Clone, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Something was acknowledged, so the server works.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// How long to wait after another failure: between a half and all of the pause, by `chance`, so that files that failed together do
    /// not come back together.
    pub fn pause(&mut self, pauses: Pauses, chance: u32) -> Duration {
        // Above 2^20 every pause has long been the longest.
        let doubled = 1_u32 << self.failures.min(20);
        self.failures = self.failures.saturating_add(1);
        let whole = pauses.first.saturating_mul(doubled).min(pauses.longest);
        let half = whole / 2;
        let part = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX);
        let more = u128::from(part) * u128::from(chance) / u128::from(u32::MAX);
        whole - half + Duration::from_nanos(u64::try_from(more).unwrap_or(u64::MAX)).min(half)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAUSES: Pauses = Pauses { first: Duration::from_secs(1), longest: Duration::from_secs(10) };

    fn pauses(chance: u32, count: usize) -> Vec<u128> {
        let mut backoff = Backoff::default();
        (0..count).map(|_| backoff.pause(PAUSES, chance).as_millis()).collect()
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        assert_eq!(pauses(u32::MAX, 6), [1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(pauses(0, 6), [500, 1000, 2000, 4000, 5000, 5000]);
        let mut backoff = Backoff::default();
        backoff.pause(PAUSES, 0);
        backoff.pause(PAUSES, 0);
        backoff.reset();
        assert_eq!(backoff.pause(PAUSES, u32::MAX), PAUSES.first);
    }

    proptest! {
        #[test]
        fn no_pause_is_shorter_than_half_or_longer_than_allowed(
            first_ms in 1_u64..100_000,
            longest_ms in 1_u64..10_000_000,
            chances in prop::collection::vec(any::<u32>(), 1..100),
        ) {
            let pauses = Pauses { first: Duration::from_millis(first_ms), longest: Duration::from_millis(longest_ms) };
            let mut backoff = Backoff::default();
            let mut whole = pauses.first.min(pauses.longest);
            for chance in chances {
                let pause = backoff.pause(pauses, chance);
                prop_assert!(pause >= whole / 2 && pause <= whole, "{pause:?} of {whole:?}");
                whole = whole.saturating_mul(2).min(pauses.longest);
            }
        }
    }
}
