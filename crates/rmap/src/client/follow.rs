//! Spaces that another client writes, read by this one: one writer and many readers.
//!
//! A read returns the last write to its page that was acknowledged before it began, or one that was under way since. For a second it
//! waits rather than return content older than what this client has read there before, as long as the space keeps its owner and the
//! slab one of its copies. The writer knows nothing of its readers, and waits for none of them.
//!
//! # Why a read is right
//!
//! What is acknowledged is at every copy that the map names at that moment, and a copy in the making comes into the map when it has
//! all of that ([`super::pool::Pool::required`]). So a copy that the map named at *any* moment after the read began has what the read has to
//! return, and from then on, whether it stays in the map or not, has nothing older. A read therefore waits for a *look* at the map
//! that was asked for after it began, and then asks a copy of that map, for the page of exactly that grant: a server that was given
//! the slab anew since then refuses. All reads that begin while a look is under way share the next one.
//!
//! No clock and no lease is part of this, and no generation either: a server that does not know the owner of today is right to answer,
//! as long as the map names it.
//!
//! # What is believed of servers
//!
//! The owner's table of versions is not here. A page that is damaged, or of another place, is found by its seal; one older than
//! what was read before, by its version. That there is nothing is taken from a copy when the others have been asked, and none of
//! those that answer has anything. A server that keeps an old page, and lies, is found where another copy is asked as well, and not
//! otherwise. Versions that nothing proves, of trims, are not remembered.

use std::time::Duration;

use super::ops::{Operation, Stage};
use crate::client::index::{GroupIndex, List};
use crate::control::MapEntry;
use crate::units::Time;

/// A read that no copy answers is tried again with the next map, after a pause that grows: at first about what an owner takes to
/// notice that a server is gone.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// What was read before and no copy has any more was never acknowledged: its owner sees to that in less time, or has ended.
pub const SEEN_PATIENCE: Duration = Duration::from_secs(1);

/// The number of a look that no read waits for: it waits for its pause to end.
pub const PAUSED: u64 = u64::MAX;

/// What a reader knows of the map of a space that another client writes.
#[derive(Debug, Default)]
pub struct Following {
    /// Looks that were asked for, and that were answered; one at a time is under way.
    asked: u64,
    answered: u64,
    /// When reads are tried again that no copy answered.
    retry_at: Option<Time>,
    pause: Duration,
    parity: List<GroupIndex, GroupParity>,
}

/// Whether a group has parity: then one of its slabs may have no copy, and not be lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum GroupParity {
    #[default]
    None,
    There,
    Lost,
}

impl Following {
    pub fn new(groups: usize) -> Following {
        Following { parity: (0..groups).map(|_| GroupParity::None).collect(), ..Following::default() }
    }

    /// The number of the last look that was answered.
    pub fn answered(&self) -> u64 {
        self.answered
    }

    /// The number of the look that a read waits for which begins now. `was_sent`: the control plane may have read the map already for the
    /// look that is under way.
    pub fn look_needed(&self, was_sent: impl FnOnce() -> bool) -> u64 {
        if self.asked > self.answered && !was_sent() { self.asked } else { self.asked + 1 }
    }

    /// A look is to be asked for. `false` if one is under way.
    pub fn begin_look(&mut self) -> bool {
        let begins = self.asked == self.answered;
        self.asked += u64::from(begins);
        begins
    }

    /// The look that was under way is answered.
    pub fn end_look(&mut self) {
        self.answered = self.asked;
    }

    /// When reads are tried again that no copy answered.
    pub fn retry_at(&self) -> Option<Time> {
        self.retry_at
    }

    /// Whether it is time for that. They are tried then, and there is no such time any more.
    pub fn begin_retry(&mut self, now: Time) -> bool {
        self.retry_at.take_if(|at| *at <= now).is_some()
    }

    /// Nobody waits to try again.
    pub fn forget_retry(&mut self) {
        self.retry_at = None;
    }

    /// A read is to be tried again after a pause, unless there is a time for that already.
    pub fn pause(&mut self, now: Time) {
        if self.retry_at.is_none() {
            self.pause_anew(now);
        }
    }

    /// The same, whatever time there is.
    pub fn pause_anew(&mut self, now: Time) {
        self.pause = (self.pause * 2).clamp(PAUSE_FIRST, PAUSE_MAX);
        self.retry_at = Some(now + self.pause);
    }

    /// A copy has answered: the next pause is a short one.
    pub fn end_pauses(&mut self) {
        self.pause = Duration::ZERO;
    }

    /// The map has this entry for the parity of a group.
    pub fn note_parity(&mut self, group: GroupIndex, entry: &MapEntry) {
        if let Some(parity) = self.parity.get_mut(group) {
            *parity = match entry {
                MapEntry { lost: true, .. } => GroupParity::Lost,
                entry if entry.replicas.is_empty() => GroupParity::None,
                _ => GroupParity::There,
            };
        }
    }

    /// Whether the map says that a group has parity, and where it is.
    pub fn has_parity(&self, group: GroupIndex) -> bool {
        self.parity.get(group) == Some(&GroupParity::There)
    }

    /// The same of parity that is there, or is lost.
    pub fn had_parity(&self, group: GroupIndex) -> bool {
        self.parity.get(group).is_some_and(|parity| *parity != GroupParity::None)
    }
}

pub fn is_paused(op: &Operation) -> bool {
    op.stage == Stage::Waiting && op.look == PAUSED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_waits_for_a_look_that_begins_after_it() {
        let mut following = Following::new(0);
        assert_eq!(following.look_needed(|| unreachable!("none is under way")), 1);
        assert!(following.begin_look() && !following.begin_look(), "one at a time");
        assert_eq!((following.look_needed(|| false), following.look_needed(|| true)), (1, 2));
        following.end_look();
        assert_eq!((following.answered(), following.look_needed(|| true)), (1, 2));
    }

    #[test]
    fn pauses_grow_until_a_copy_answers() {
        let mut following = Following::new(0);
        (0..2).for_each(|at| following.pause(Time(at)));
        let first = Time(0) + PAUSE_FIRST;
        assert_eq!(following.retry_at(), Some(first), "there is a time already");
        assert!(!following.begin_retry(Time(1)) && following.begin_retry(first) && following.retry_at().is_none());
        (0..8).for_each(|_| following.pause_anew(Time(0)));
        assert_eq!(following.retry_at(), Some(Time(0) + PAUSE_MAX));
        following.end_pauses();
        following.pause_anew(Time(0));
        assert_eq!(following.retry_at(), Some(first));
    }
}
