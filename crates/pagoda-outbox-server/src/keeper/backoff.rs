//! How soon a process is followed by the next one.

use std::time::Duration;

/// A process that has served for so long is followed at once. The pause after one that has not doubles each time.
const HEALTHY: Duration = Duration::from_secs(10);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The pause before the latest start; zero if there was none.
#[derive(Debug, Default)]
pub struct Backoff(Duration);

impl Backoff {
    /// The pause after a process that has served for so long.
    pub fn after(&mut self, served: Duration) -> Duration {
        self.0 = match served {
            served if served >= HEALTHY => Duration::ZERO,
            _ => (self.0 * 2).clamp(PAUSE_MIN, PAUSE_MAX),
        };
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_one_has_served() {
        let mut backoff = Backoff::default();
        let mut after = |seconds| backoff.after(Duration::from_secs(seconds)).as_millis();
        assert_eq!([after(0), after(9), after(0)], [50, 100, 200]);
        assert_eq!((0..10).map(|_| after(1)).last(), Some(5000));
        assert_eq!([after(10), after(1)], [0, 50]);
    }
}
