//! What the control plane is asked about the map, and what waits for its answers.

use std::time::Duration;

use crate::client::index::SpaceIndex;
use crate::client::map::Map;
use crate::client::sealed::{Tenure, Watch};
use crate::client::slab::Pending;
use crate::client::vacate::MAP_SILENT;
use crate::control::{Change, ControlRequest, MapEntry};
use crate::units::{SlabNo, Time, Version};

/// A server that refuses is asked again after so long. No honest one refuses for good.
const REFUSED_FOR: Duration = Duration::from_secs(5);

impl Map {
    /// Asks the control plane for another set of copies. Only one change of a slab is under way at a time.
    pub fn propose(&mut self, space: SpaceIndex, slab: SlabNo, entry: MapEntry) {
        let state = &mut self.spaces[space];
        debug_assert!(state.tenure.changes_map(), "readers change no map");
        let entry = MapEntry { revision: state.slabs[slab].entry.revision + 1, ..entry };
        let (id, generation) = (state.id, state.generation);
        let change = Change { space: id, generation, slab, entry: entry.clone() };
        state.slabs[slab].pending = Some(Pending { entry });
        self.ask_control(space, ControlRequest::Change(change));
    }

    /// Asks the control plane something about a space, until it is answered.
    pub fn ask_control(&mut self, space: SpaceIndex, request: ControlRequest) {
        self.questions.ask(space, request);
    }

    /// Whether a change of the map is under way for a slab, or for what says which versions it has.
    pub fn waits_for_map(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let is_pending = |slab: SlabNo| self.spaces[space].slabs[slab].pending.is_some();
        is_pending(slab) || self.unread_tables(space, slab).any(is_pending)
    }

    /// A group waits for the map's word once that was asked for, and so do its writes.
    pub fn is_map_silent(&self, now: Time) -> bool {
        self.questions.silent_for(now).is_some_and(|silent| silent >= MAP_SILENT)
    }

    /// The map knows of no newer generation than those have heard of who said so.
    pub fn refuse_accused(&mut self, now: Time, space: SpaceIndex) {
        let state = &mut self.spaces[space];
        let accused = std::mem::take(&mut state.accused);
        if !accused.is_empty() {
            state.refusing = state.refusing.union(accused);
            state.refused_until = now + REFUSED_FOR;
            self.mark_at(now + REFUSED_FOR, space, SlabNo(0));
        }
    }

    /// A space is watched from now on.
    pub fn watch(&mut self, space: SpaceIndex, watch: Watch) {
        self.spaces[space].watch = Some(watch);
        if !self.watched.contains(&space) {
            self.watched.push(space);
        }
    }

    /// Spaces that are as they should be are watched no more.
    pub fn forget_watched(&mut self) {
        self.watched.retain(|space| self.spaces[*space].watch.is_some());
    }

    /// The one at this position of those that are watched, if there is one.
    pub fn watched_at(&self, at: usize) -> Option<SpaceIndex> {
        self.watched.get(at).copied()
    }

    /// When a map is to be looked at next.
    pub fn watch_due(&self) -> Option<Time> {
        let watches = self.watched.iter().filter_map(|space| self.spaces[*space].watch);
        watches.filter_map(|watch| watch.due()).min()
    }

    /// Whether a server answered for another copy than the one in this reader's map: one that left since, and came again in the same
    /// generation, and is being made. What is sealed and known to be written is never unwritten.
    pub fn is_another_copy(&self, space: SpaceIndex, version: Version) -> bool {
        self.spaces[space].tenure == Tenure::Reader && version == Version::NEVER
    }
}
