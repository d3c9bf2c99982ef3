//! How fast is sent: rates that several pushes may share.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use pagoda_outbox::Pace;

/// A rate. Clones share it.
#[derive(Debug, Clone)]
pub struct Limiter {
    began: Instant,
    pace: Arc<Mutex<Pace>>,
}

impl Limiter {
    pub fn new(bytes_per_second: NonZeroU64) -> Limiter {
        Limiter { began: Instant::now(), pace: Arc::new(Mutex::new(Pace::new(bytes_per_second))) }
    }

    fn turn_bytes(&self) -> u64 {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).turn_bytes()
    }

    /// When so many bytes may be sent.
    fn reserve(&self, bytes: u64) -> Instant {
        let now = self.began.elapsed();
        let at = self.pace.lock().unwrap_or_else(PoisonError::into_inner).reserve(now, bytes);
        self.began.checked_add(at).unwrap_or(self.began)
    }
}

/// The most that should be sent at once under all of `limiters`.
pub fn turn_bytes(limiters: &[Limiter]) -> u64 {
    limiters.iter().map(Limiter::turn_bytes).fold(u64::MAX, u64::min)
}

/// Until so many bytes may be sent. One rate after the other: who waits for its own takes nothing of what others share.
pub async fn wait_turn(limiters: &[Limiter], bytes: u64) {
    for limiter in limiters {
        tokio::time::sleep_until(limiter.reserve(bytes).into()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn what_is_sent_is_paid_to_each_rate() {
        let rate = |bytes| Limiter::new(NonZeroU64::new(bytes).unwrap());
        let (own, shared) = (rate(1_000_000), rate(1_000_000_000));
        let limiters = [own.clone(), shared.clone()];
        assert_eq!(turn_bytes(&limiters), 50_000);
        assert_eq!(turn_bytes(&[]), u64::MAX);
        // In debt for a second from here, so the first may go at once and the next one not.
        wait_turn(&limiters, 1_000_000).await;
        assert!(own.reserve(0) >= own.began + Duration::from_millis(950));
        assert!(shared.reserve(0) < own.reserve(0));
    }
}
