//! Decides when slabs are looked at because servers have said that their load has changed.

use std::time::Duration;

use crate::units::Time;

/// How short of memory servers are concerns all slabs, and each reply says it. After a change they are looked at at once, and then no
/// more often than this: 16 TiB of slabs take 20 ms, and a server may say something else in each reply.
const LOAD_EVERY: Duration = Duration::from_millis(100);

/// Changes of what servers say of their load.
#[derive(Debug, Default)]
pub struct LoadWatch {
    looked_at: Option<Time>,
    /// There was a change that nobody has looked at.
    pub(super) due: Option<Time>,
}

impl LoadWatch {
    pub(super) fn changed(&mut self, now: Time) {
        let next = self.looked_at.map_or(now, |at| now.max(at + LOAD_EVERY));
        self.due.get_or_insert(next);
    }

    pub(super) fn is_due(&mut self, now: Time) -> bool {
        let is_due = self.due.take_if(|at| *at <= now).is_some();
        if is_due {
            self.looked_at = Some(now);
        }
        is_due
    }
}
