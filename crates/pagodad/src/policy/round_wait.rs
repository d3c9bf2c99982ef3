//! How long rounds of the policy wait for locks. A round needs the registry, and so do commands: one that held it while it
//! waits for a disk would hold up the memory of all VMs.

use std::time::{Duration, Instant};

use pagoda_api::RoundWait;
use pagoda_pager::latency::Histogram;

/// The waits of all rounds since the daemon started.
#[derive(Debug, Default)]
pub struct RoundWaits {
    waits: Histogram,
    longest: Duration,
}

impl RoundWaits {
    /// Counts the wait of one round.
    pub fn record(&mut self, waited: Duration) {
        self.waits.record(waited);
        self.longest = self.longest.max(waited);
    }

    /// The waits as the API shows them.
    pub fn describe(&self) -> RoundWait {
        let us = |duration: Duration| duration.as_secs_f64() * 1e6;
        RoundWait {
            rounds: self.waits.count(),
            p50_us: us(self.waits.quantile(0.5).min(self.longest)),
            p99_us: us(self.waits.quantile(0.99).min(self.longest)),
            max_us: us(self.longest),
        }
    }
}

/// Adds to `waited` the time that `lock` takes.
pub fn timed<T>(waited: &mut Duration, lock: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let guard = lock();
    *waited += began.elapsed();
    guard
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use super::*;

    #[test]
    fn the_longest_wait_is_exact_and_quantiles_are_no_longer() {
        let mut waits = RoundWaits::default();
        assert_eq!(waits.describe(), RoundWait::default());
        (0..99).for_each(|_| waits.record(Duration::from_micros(3)));
        waits.record(Duration::from_micros(7001));
        let seen = waits.describe();
        assert_eq!((seen.rounds, seen.max_us), (100, 7001.0));
        assert!((3.0..4.0).contains(&seen.p50_us) && seen.p99_us <= seen.p50_us, "{seen:?}");
    }

    #[test]
    fn a_lock_that_is_held_is_waited_for() {
        let (lock, mut waited) = (Mutex::new(()), Duration::ZERO);
        let held = lock.lock().unwrap();
        let (began, start) = mpsc::channel();
        std::thread::scope(|scope| {
            let round = scope.spawn(|| {
                timed(&mut waited, || {
                    began.send(Instant::now()).unwrap();
                    drop(lock.lock());
                });
            });
            let start = start.recv().unwrap();
            // Held until the clock has moved on.
            while start.elapsed() < Duration::from_millis(2) {
                std::thread::yield_now();
            }
            drop(held);
            round.join().unwrap();
        });
        assert!(waited >= Duration::from_millis(2), "{waited:?}");
    }
}
