//! Parity of what is cold, in a space that is still written.
//!
//! If [`ClientConfig::parity_after`](super::super::ClientConfig::parity_after) is set, the owner makes parity for groups that
//! were not written to for that long. It has the parity leave before the next write (`dissolve.rs`).
//!
//! The order is a keeper's: versions in the ledger, at both copies -> parity granted and filled -> parity in the map -> members
//! drop what they have beyond one copy. Until the map is asked, a write or trim to the group ends the making at once. From then
//! on the group is *frozen*, for this owner and for each that follows: nothing is written to it until a map without its parity
//! was confirmed. So what the ledger and the parity say of a group is right as long as the map says that it has parity. Otherwise
//! it counts for nothing: a later making writes all of the ledger's pages again.
//!
//! Each making begins a new *life* of the parity slab, as giving a slab back does (`../discard.rs`). The epoch of a life is taken
//! when the life before it ends. A place of parity has the greatest of its members' versions, or the epoch if that is greater. So
//! what was on its way to an earlier life is not stored in this one. That holds even if a page was trimmed since, or a slab given
//! back, and the greatest version of today is less than that of then.
//!
//! Others than this owner do not know its epochs. They need not know them, because they take parity in any version that is not
//! less than its members'. A new owner has no earlier lives to fear either, because servers that have granted it anything refuse
//! what earlier owners sent.

use std::time::Duration;

use super::super::peer::PeerSet;
use crate::client::index::{GroupIndex, List, ListIndex, PeerIndex, SpaceIndex};
use crate::units::Time;

/// Groups whose parity is being made at a time: each has a table more in memory, and servers have other things to do.
pub const MAKING_MAX: usize = 2;
/// Groups are looked at so often while one becomes cold, within limits.
const LOOKS: u32 = 8;
const LOOK_MIN: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_secs(10);
/// One slab and its parity are no less than two copies.
pub const HELD_MIN: usize = 2;

/// What its owner does with a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Course {
    #[default]
    Still,
    /// The parity of the group is being made.
    Making,
    /// Has its parity leave, as soon as its slabs have the copies that they need without it.
    Dissolving,
}

/// A group as its owner sees it.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    /// When something was last written to it, or could not be made.
    quiet_since: Time,
    course: Course,
    /// Servers that have no room for what it needs before it is dissolved.
    refused: PeerSet,
}

/// What owners do with the groups of all spaces, and when these are looked at.
#[derive(Debug)]
pub struct Cold {
    /// Of spaces that this client owns.
    groups: List<SpaceIndex, List<GroupIndex, Group>>,
    due: Option<Time>,
    /// The group that is looked at next: so none is left out where there are many.
    next: (SpaceIndex, GroupIndex),
    /// Groups that are being dissolved.
    dissolving: usize,
}

impl Default for Cold {
    fn default() -> Cold {
        Cold { groups: List::default(), due: None, next: (SpaceIndex(0), GroupIndex(0)), dissolving: 0 }
    }
}

impl Cold {
    /// The next space is opened: with so many groups, or none if it has another owner.
    pub fn open(&mut self, groups: usize) {
        self.groups.push((0..groups).map(|_| Group::default()).collect());
    }

    fn get(&self, space: SpaceIndex, group: GroupIndex) -> Option<&Group> {
        self.groups.get(space)?.get(group)
    }

    fn get_mut(&mut self, space: SpaceIndex, group: GroupIndex) -> Option<&mut Group> {
        self.groups.get_mut(space)?.get_mut(group)
    }

    /// When groups are to be looked at next.
    pub fn due(&self) -> Option<Time> {
        self.due
    }

    /// Groups are looked at anew, after another time.
    pub fn reset(&mut self) {
        self.due = None;
    }

    /// Whether it is time to look at groups, which become cold `after` so long.
    pub fn poll(&mut self, now: Time, after: Duration) -> bool {
        let every = (after / LOOKS).clamp(LOOK_MIN, LOOK_MAX);
        let is_due = now >= *self.due.get_or_insert(now + every);
        if is_due {
            self.due = Some(now + every);
        }
        is_due
    }

    /// All groups, and those of them whose parity is being made.
    pub fn count(&self) -> (usize, usize) {
        let groups = || self.groups.iter().flat_map(List::iter);
        (groups().count(), groups().filter(|group| group.course == Course::Making).count())
    }

    /// Groups of a space as of now.
    pub fn groups_of(&self, space: SpaceIndex) -> impl Iterator<Item = GroupIndex> + use<> {
        let groups = self.groups.get(space).map_or(0, List::len);
        (0..groups).map(GroupIndex::from_usize)
    }

    /// The group that is looked at next.
    pub fn next_group(&mut self) -> Option<(SpaceIndex, GroupIndex)> {
        let (mut space, mut group) = self.next;
        for _ in 0..self.groups.len() + 2 {
            if self.get(space, group).is_some() {
                self.next = (space, group.next());
                return Some((space, group));
            }
            let is_space = self.groups.get(space).is_some();
            (space, group) = (if is_space { space.next() } else { SpaceIndex(0) }, GroupIndex(0));
        }
        None
    }

    pub fn course(&self, space: SpaceIndex, group: GroupIndex) -> Course {
        self.get(space, group).map_or(Course::Still, |group| group.course)
    }

    /// Whether nothing was written to a group for so long, and nothing is done with it.
    pub fn is_quiet(&self, now: Time, after: Duration, (space, group): (SpaceIndex, GroupIndex)) -> bool {
        let is_quiet = |group: &Group| group.course == Course::Still && now.since(group.quiet_since) >= after;
        self.get(space, group).is_some_and(is_quiet)
    }

    /// Something was written to a group. What is done with it, if it is this client's.
    pub fn written(&mut self, now: Time, space: SpaceIndex, group: GroupIndex) -> Option<Course> {
        let group = self.get_mut(space, group)?;
        group.quiet_since = now;
        Some(group.course)
    }

    /// Parity of a group is made from now on.
    pub fn begin_making(&mut self, space: SpaceIndex, group: GroupIndex) {
        if let Some(group) = self.get_mut(space, group) {
            group.course = Course::Making;
        }
    }

    /// The parity of a group is not made any more. It counts as quiet from now on.
    pub fn stop_making(&mut self, now: Time, space: SpaceIndex, group: GroupIndex) {
        if let Some(group) = self.get_mut(space, group) {
            debug_assert!(group.course != Course::Dissolving, "only what is being made is stopped");
            *group = Group { quiet_since: now, ..Group::default() };
        }
    }

    /// A group is dissolved from now on. `false` if it is already, or is not this client's.
    pub fn begin_dissolving(&mut self, space: SpaceIndex, group: GroupIndex) -> bool {
        let Some(group) = self.get_mut(space, group).filter(|group| group.course != Course::Dissolving) else {
            return false;
        };
        (group.course, group.refused) = (Course::Dissolving, PeerSet::default());
        self.dissolving += 1;
        true
    }

    pub fn is_any_dissolving(&self) -> bool {
        self.dissolving > 0
    }

    /// The parity of a group is in the map. `true` if this client has just made it.
    pub fn parity_joined(&mut self, space: SpaceIndex, group: GroupIndex) -> bool {
        let Some(group) = self.get_mut(space, group).filter(|group| group.course == Course::Making) else {
            return false;
        };
        group.course = Course::Still;
        true
    }

    /// The parity of a group has left the map. What was done with the group until now; `None` if it is not this client's.
    pub fn parity_left(&mut self, now: Time, space: SpaceIndex, group: GroupIndex) -> Option<Course> {
        let new = Group { quiet_since: now, ..Group::default() };
        let before = std::mem::replace(self.get_mut(space, group)?, new);
        self.dissolving -= usize::from(before.course == Course::Dissolving);
        Some(before.course)
    }

    /// Nothing is done with the groups of a space any more.
    pub fn forget(&mut self, space: SpaceIndex) {
        let groups = self.groups.get_mut(space).into_iter().flat_map(List::iter_mut);
        for group in groups {
            self.dissolving -= usize::from(group.course == Course::Dissolving);
            group.course = Course::Still;
        }
    }

    /// A server has no room for what a group needs.
    pub fn refuse(&mut self, space: SpaceIndex, group: GroupIndex, peer: PeerIndex) {
        if let Some(group) = self.get_mut(space, group) {
            group.refused.insert(peer);
        }
    }

    /// Servers that have no room for what a group needs.
    pub fn refused(&self, space: SpaceIndex, group: GroupIndex) -> PeerSet {
        self.get(space, group).map(|group| group.refused).unwrap_or_default()
    }

    /// They may be asked again.
    pub fn forget_refused(&mut self, space: SpaceIndex, group: GroupIndex) {
        if let Some(group) = self.get_mut(space, group) {
            group.refused = PeerSet::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spaces with these numbers of groups.
    fn cold(spaces: &[usize]) -> Cold {
        let mut cold = Cold::default();
        spaces.iter().for_each(|groups| cold.open(*groups));
        cold
    }

    #[test]
    fn every_group_has_its_turn() {
        let mut cold = cold(&[2, 0, 1]);
        let turns: Vec<_> = (0..4).filter_map(|_| cold.next_group()).map(|(space, group)| (space.0, group.0)).collect();
        assert_eq!(turns, [(0, 0), (0, 1), (2, 0), (0, 0)]);
        assert_eq!(self::cold(&[0, 0]).next_group(), None);
    }

    #[test]
    fn groups_that_are_dissolved_are_counted() {
        let (mut cold, space, group) = (cold(&[1]), SpaceIndex(0), GroupIndex(0));
        assert!(cold.begin_dissolving(space, group) && !cold.begin_dissolving(space, group));
        assert!(cold.is_any_dissolving());
        assert_eq!(cold.parity_left(Time(3), space, group), Some(Course::Dissolving));
        assert!(!cold.is_any_dissolving() && cold.is_quiet(Time(8), Duration::from_nanos(5), (space, group)));
        cold.begin_dissolving(space, group);
        cold.forget(space);
        assert_eq!((cold.is_any_dissolving(), cold.course(space, group)), (false, Course::Still));
        assert!(!cold.begin_dissolving(space, GroupIndex(1)), "there is no such group");
    }
}
