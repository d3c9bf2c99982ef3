//! Whether the other host can be reached, and when something is sent again.

use std::time::Duration;

use super::types::RETRY_EVERY;
use crate::units::Moment;

#[derive(Clone, Debug)]
pub(super) struct Link {
    up: bool,
    /// Since when it is as it is.
    since: Moment,
    repeat_at: Moment,
}

impl Link {
    pub const fn new(up: bool, now: Moment) -> Link {
        Link { up, since: now, repeat_at: now }
    }

    /// A connection is there, perhaps a later one: all that was not answered is due again.
    pub fn set(&mut self, up: bool, now: Moment) {
        (self.up, self.since, self.repeat_at) = (up, now, now);
    }

    pub fn was_down_for(&self, span: Duration, now: Moment) -> bool {
        !self.up && now.since(self.since) >= span
    }

    /// Whether something that repeats is due. If so, it is next due later.
    pub fn take_turn(&mut self, now: Moment) -> bool {
        let is_due = self.up && self.repeat_at <= now;
        if is_due {
            self.repeat_at = now + RETRY_EVERY;
        }
        is_due
    }

    /// Something is due at once.
    pub fn hurry(&mut self, now: Moment) {
        self.repeat_at = now;
    }
}
