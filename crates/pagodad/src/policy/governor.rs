//! The thread that makes rounds. It waits until one is due, and for a [doorbell](super::doorbell) that calls for an earlier one.

use std::sync::Arc;
use std::time::Duration;

use pagoda_core::policy::round::PERIOD_MIN_MS;

use crate::registry::Registry;

/// Makes rounds for as long as the daemon runs.
pub fn run(registry: &Arc<Registry>) {
    loop {
        super::rounds::make(registry);
        std::thread::sleep(Duration::from_millis(PERIOD_MIN_MS));
        let period_ms = registry.governor.lock().rounds.period_ms();
        registry.governor.doorbell.wait(Duration::from_millis(period_ms.saturating_sub(PERIOD_MIN_MS)));
    }
}
