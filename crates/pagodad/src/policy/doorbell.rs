//! What calls for a round before the next is due.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Wakes the policy's thread before its next round is due.
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

    pub(super) fn wait(&self, max: Duration) {
        let is_rung = self.is_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rung.wait_timeout_while(is_rung, max, |is_rung| !*is_rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
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
