//! The thread that makes rounds. It waits until one is due, and for a doorbell that calls for an earlier one.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pagoda_core::policy::round::PERIOD_MIN_MS;

use crate::registry::Registry;

/// Wakes the thread.
#[derive(Debug, Default)]
pub struct Doorbell {
    is_rung: Mutex<bool>,
    rung: Condvar,
}

impl Doorbell {
    /// The next round comes at once.
    pub fn ring(&self) {
        *self.is_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rung.notify_all();
    }

    fn wait(&self, max: Duration) {
        let is_rung = self.is_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rung.wait_timeout_while(is_rung, max, |is_rung| !*is_rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

/// Makes rounds for as long as the daemon runs.
pub fn run(registry: &Arc<Registry>) {
    loop {
        super::rounds::make(registry);
        std::thread::sleep(Duration::from_millis(PERIOD_MIN_MS));
        let period_ms = registry.governor.lock().rounds.period_ms();
        registry.governor.doorbell.wait(Duration::from_millis(period_ms.saturating_sub(PERIOD_MIN_MS)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let doorbell = Doorbell::default();
        doorbell.ring();
        // Hangs if it is lost.
        doorbell.wait(Duration::from_secs(3600));
        doorbell.wait(Duration::from_millis(1));
    }
}
