//! When a round is due: a thread that a timer, events and engines wake.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pagoda_core::policy::ReclaimState;

use crate::registry::Registry;

/// Between two rounds while memory is short, or VMs are held.
const PERIOD_SHORT: Duration = Duration::from_secs(1);
/// The same while all is well: what the policy knows is at most so old.
const PERIOD_AT_EASE: Duration = Duration::from_secs(5);
/// Whatever happens, rounds are so far apart: a round costs a status of every VM.
const PERIOD_MIN: Duration = Duration::from_millis(100);

/// Wakes the thread.
#[derive(Debug, Default)]
pub struct Bell {
    is_rung: Mutex<bool>,
    rung: Condvar,
}

impl Bell {
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
        std::thread::sleep(PERIOD_MIN);
        registry.governor.bell.wait(period(registry).saturating_sub(PERIOD_MIN));
    }
}

fn period(registry: &Registry) -> Duration {
    let brain = registry.governor.lock();
    let Some(last) = &brain.last else { return PERIOD_AT_EASE };
    let is_calm = last.plan.state == ReclaimState::High && !last.plan.restrained && !brain.growth.is_held();
    if is_calm { PERIOD_AT_EASE } else { PERIOD_SHORT }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_rung_before_is_heard() {
        let bell = Bell::default();
        bell.ring();
        // Hangs if it is not.
        bell.wait(Duration::from_secs(3600));
        bell.wait(Duration::from_millis(1));
    }
}
