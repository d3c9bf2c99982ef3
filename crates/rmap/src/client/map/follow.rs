//! What a reader knows of the map of a space that another client writes (`follow.rs`): looks that are asked for and answered, and
//! which groups have parity.

use crate::client::follow::Following;
use crate::client::index::SpaceIndex;
use crate::client::map::Map;
use crate::client::questions::Question;
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::control::{ControlRequest, MapEntry};
use crate::units::{SlabNo, Time};

impl Map {
    /// Whether another client writes a space that this one only reads.
    pub fn is_followed(&self, space: SpaceIndex) -> bool {
        self.spaces[space].tenure == Tenure::Follower
    }

    /// The slabs of a space that another client writes.
    pub fn begin_follow(&mut self, space: SpaceIndex, map: &[(SlabNo, MapEntry)]) {
        let state = &mut self.spaces[space];
        state.following = Following::new(state.layout.groups);
        for slab in &mut state.slabs {
            slab.phase = Phase::Followed;
        }
        self.note_parity(space, map);
    }

    /// The look that a read waits for that begins now.
    pub fn look_needed(&self, space: SpaceIndex) -> u64 {
        let of_space = |request: &ControlRequest| matches!(request, ControlRequest::Look { .. });
        let is_sent =
            |question: &Question| question.space == space && of_space(&question.request) && question.is_sent();
        // One that is still here has seen nothing yet.
        self.spaces[space].following.look_needed(|| self.questions.iter().any(is_sent))
    }

    /// Asks for the map, if nobody has.
    pub fn look_at_map(&mut self, space: SpaceIndex) {
        if self.spaces[space].following.begin_look() {
            let id = self.spaces[space].id;
            self.ask_control(space, ControlRequest::Look { space: id });
        }
    }

    /// Takes in which groups have parity by what the control plane says.
    pub fn note_parity(&mut self, space: SpaceIndex, map: &[(SlabNo, MapEntry)]) {
        let state = &mut self.spaces[space];
        for (slab, entry) in map {
            if let Some(group) = state.layout.group(*slab).filter(|_| state.layout.is_parity(*slab)) {
                state.following.note_parity(group, entry);
            }
        }
    }

    /// Whether a slab that has no copy is put together from others by whoever keeps the space.
    pub fn may_come_back(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.spaces[space];
        let Some(group) = state.layout.group(slab) else { return false };
        let lost = state.layout.members(group).filter(|member| state.slabs[*member].entry.lost).count();
        lost <= 1 && state.following.has_parity(group)
    }

    /// Whether the map says that the slab's group has parity.
    pub fn is_followed_group(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.spaces[space];
        self.is_followed(space) && state.layout.group(slab).is_some_and(|group| state.following.had_parity(group))
    }

    /// When reads are to be tried again.
    pub fn follow_due(&self) -> Option<Time> {
        self.spaces.iter().filter_map(|space| space.following.retry_at()).min()
    }
}
