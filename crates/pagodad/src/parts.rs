//! Parts of the daemon that VMs can do without: each may fail alone, is tried again, and is said in `health`. Paging goes on.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// First pause before a part is tried again, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// What does not work at this moment, by part.
#[derive(Debug, Default)]
pub struct Parts(Mutex<BTreeMap<&'static str, String>>);

impl Parts {
    /// A part does not work, and why. It is logged when it is new.
    pub fn failed(&self, part: &'static str, why: &str) {
        let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(part, why.to_owned());
        if before.as_deref() != Some(why) {
            tracing::warn!("{part}: {why}");
        }
    }

    /// It works, again or at last.
    pub fn works(&self, part: &'static str) {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(part).is_some() {
            tracing::info!("{part}: it works again");
        }
    }

    /// A line for each part that does not work.
    pub fn problems(&self) -> Vec<String> {
        let parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.iter().map(|(part, why)| format!("{part}: {why}")).collect()
    }
}

/// Pauses between attempts, each twice as long as the one before.
pub fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(PAUSE_MIN), |pause| Some((*pause * 2).min(PAUSE_MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_said_until_it_works() {
        let parts = Parts::default();
        parts.failed("metrics", "taken");
        parts.failed("control socket", "no room");
        parts.failed("metrics", "not of this host");
        assert_eq!(parts.problems(), ["control socket: no room", "metrics: not of this host"]);
        parts.works("metrics");
        parts.works("metrics");
        assert_eq!(parts.problems(), ["control socket: no room"]);
    }

    #[test]
    fn pauses_grow_up_to_a_limit() {
        let pauses: Vec<_> = pauses().take(10).collect();
        assert_eq!((pauses[0], pauses[1], pauses[9]), (PAUSE_MIN, 2 * PAUSE_MIN, PAUSE_MAX));
    }
}
