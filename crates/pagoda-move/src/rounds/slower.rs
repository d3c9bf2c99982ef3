//! How far a guest's writers are slowed, for a move that has not ended in its time.
//!
//! Each round decides. After a round that has left hardly less than the one before, writers wait a step longer. They wait two
//! steps longer if what is left is far too much for the promised downtime, because the first rounds are the longest. After a
//! round that has left half, they wait a step less, unless that round was slower itself: that alone may halve what is written.
//! The delays double, so a step less undoes no more than such a round has brought.

use std::time::Duration;

use pagoda_core::units::PageCount;

use super::settings::{Hopeless, PROGRESS_PART, STALL_ROUNDS};
use super::slowing::Slowing;
use crate::units::Moment;

/// Writers may be slowed for as long as the move was given, and for so long if that was less: a round takes seconds on a slow link,
/// and each step takes a round.
pub const SLOW_TIME_MIN: Duration = Duration::from_secs(60);

/// How long writers are slowed at most, from the end of the first round behind the time limit on.
pub fn slow_time_max(time_max: Duration) -> Duration {
    time_max.max(SLOW_TIME_MIN)
}

/// Decides after each round how long writers wait in the next one.
#[derive(Clone, Debug, Default)]
pub(super) struct Slower {
    step: Slowing,
    /// Since when there is no time left but this.
    since: Option<Moment>,
    /// Until when writers may be slowed, also in the middle of a long round.
    until: Option<Moment>,
    before: Option<PageCount>,
    /// The round that is under way is slower than the one before.
    is_slower: bool,
    /// Rounds one after the other that have left hardly less, although no step is longer.
    stuck: u32,
}

impl Slower {
    /// The step that was decided last.
    pub const fn step(&self) -> Slowing {
        self.step
    }

    /// How writers are slowed now.
    pub fn slowing(&self, now: Moment) -> Slowing {
        if self.until.is_some_and(|until| now >= until) { Slowing::NONE } else { self.step }
    }

    /// The link is gone: writers wait for nothing. The time goes on.
    pub fn stop(&mut self) {
        *self = Slower { since: self.since, until: self.until, ..Slower::default() };
    }

    /// A round has left so much. How the next one is to be. `is_far`: what is left takes many times the promised downtime.
    ///
    /// # Errors
    /// It is of no use.
    pub fn end_round(
        &mut self,
        now: Moment,
        left: PageCount,
        is_far: bool,
        time_max: Duration,
    ) -> Result<Slowing, Hopeless> {
        let since = *self.since.get_or_insert(now);
        self.until = Some(since + slow_time_max(time_max));
        let slowed = now.since(since);
        if slowed >= slow_time_max(time_max) {
            return Err(Hopeless::SlowTimeOver { slowed });
        }
        let before = self.before.replace(left).unwrap_or(left);
        let (last, is_hardly_less) = (self.step, left.0 >= before.0 - before.0 / PROGRESS_PART);
        match () {
            () if is_hardly_less && is_far => self.step = last.more().more(),
            () if is_hardly_less => self.step = last.more(),
            () if left.0 <= before.0 / 2 && !self.is_slower => self.step = last.less(),
            () => {}
        }
        self.is_slower = self.step > last;
        self.stuck = if is_hardly_less && last == Slowing::MOST { self.stuck + 1 } else { 0 };
        if self.stuck >= STALL_ROUNDS { Err(Hopeless::CannotSlow) } else { Ok(self.step) }
    }
}

#[cfg(test)]
mod tests;
