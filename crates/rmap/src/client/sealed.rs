//! Spaces that are sealed: many clients read them, nobody writes.
//!
//! What is in a page never changes again, so a reader needs no owner and asks nobody before it reads: a page in the version
//! that the copies list is right for ever, whichever of them has it. Only where the copies are changes. For that the space
//! still has a generation, and whoever took the last one *keeps* the space: it makes copies anew and drops those of servers
//! that are gone, like an owner, and may be any of the readers. A reader that finds too few copies looks at the map again
//! and again; when that does not change for [`KEEP_AFTER`], nobody sees to it, and the reader takes the next generation.
//! Servers then refuse the last one: the others look, read on with the new one, and who kept the space before is a reader again.

mod keep;

use std::time::Duration;

use crate::units::Time;

/// A keeper that lives has made a slab's copy anew by then, even on a slow network. Twice this at most: readers take chances,
/// so that not all of them try at once.
pub const KEEP_AFTER: Duration = Duration::from_secs(10);
/// Where keeping changes hands and nothing is better then, the next try waits longer each time.
const PATIENCE_MAX: Duration = Duration::from_secs(600);
/// Between two looks at a map: at first, and when it has not changed for a while.
pub const LOOK_FIRST: Duration = Duration::from_millis(100);
const LOOK_MAX: Duration = Duration::from_secs(5);

/// What a client may do with a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenure {
    /// Read and write: a space has one owner at a time.
    Owner,
    /// Read, and nothing else. The space is sealed.
    Reader,
    /// Read, and say where the copies are.
    Keeper,
    /// Read what another client writes.
    Follower,
}

impl Tenure {
    /// Who has this tenure says in the map where the copies are.
    pub fn changes_map(self) -> bool {
        matches!(self, Tenure::Owner | Tenure::Keeper)
    }
}

/// A reader waits for somebody to see to a space, or for its turn to do so.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// The map is as it was since then.
    unchanged_since: Time,
    look_at: Time,
    pause: Duration,
    patience: Duration,
    /// The control plane was asked.
    is_looking: bool,
    /// A server has said since then that there is a newer generation, of which the answer may know nothing yet.
    is_early: bool,
}

impl Watch {
    /// As of now, for who is to be patient for so long.
    pub fn new(now: Time, patience: Duration) -> Watch {
        Watch { unchanged_since: now, look_at: now, pause: LOOK_FIRST, patience, is_looking: false, is_early: false }
    }

    /// When the map is to be looked at. Not while it is.
    pub fn due(&self) -> Option<Time> {
        (!self.is_looking).then_some(self.look_at)
    }

    /// The map is being looked at from now on.
    pub fn begin_look(&mut self) {
        self.is_looking = true;
    }

    /// Whether the map is as it was for so long that nobody seems to see to the space.
    pub fn is_over(&self, now: Time) -> bool {
        now.since(self.unchanged_since) >= self.patience
    }

    /// The map is to be looked at now.
    pub fn look_now(&mut self, now: Time) {
        self.look_at = now;
    }

    /// Whether the answer to a look is from before a server said that there is a newer generation, of which it knows nothing. Then the
    /// map is looked at again.
    pub fn is_outrun(&mut self, now: Time, is_newer: bool) -> bool {
        let is_outrun = std::mem::take(&mut self.is_early) && !is_newer;
        if is_outrun {
            (self.is_looking, self.look_at) = (false, now);
        }
        is_outrun
    }

    /// The map was looked at, and all is not well yet: whether it has a newer generation, and whether anything else is new.
    pub fn end_look(&mut self, now: Time, is_newer: bool, has_changed: bool) {
        self.is_looking = false;
        if is_newer {
            self.patience = (self.patience * 2).min(PATIENCE_MAX);
        }
        if has_changed {
            (self.unchanged_since, self.pause) = (now, LOOK_FIRST);
        } else {
            self.pause = (self.pause * 2).min(LOOK_MAX);
        }
        self.look_at = now + self.pause;
    }

    /// The map is to be looked at by then.
    pub fn look_by(&mut self, time: Time) {
        self.look_at = self.look_at.min(time);
    }

    /// What is being looked up is to be looked up again.
    pub fn looks_again(&mut self) {
        self.is_early = self.is_looking;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_looked_at_by_the_first_of_the_times_and_once_at_a_time() {
        let mut watch = Watch::new(Time(5), Duration::from_nanos(10));
        assert_eq!((watch.due(), watch.is_over(Time(14)), watch.is_over(Time(15))), (Some(Time(5)), false, true));
        [9, 3].into_iter().for_each(|time| watch.look_by(Time(time)));
        assert_eq!(watch.due(), Some(Time(3)));
        watch.begin_look();
        assert_eq!(watch.due(), None);
    }
}
