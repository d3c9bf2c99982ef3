//! Finds slabs without content and gives them back.

use super::{LEAVING_MAX, LOOK_AGAIN, MAP_SILENT};
use crate::client::Client;
use crate::client::index::SpaceIndex;
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::control::ControlRequest;
use crate::units::{SlabNo, Time, Version};

impl Client {
    /// All copies in sync have another version of a page.
    pub(in crate::client) fn set_version(&mut self, space: SpaceIndex, slab: SlabNo, index: usize, version: Version) {
        let state = &mut self.spaces[space].slabs[slab];
        let before = std::mem::replace(&mut state.versions[index], version);
        let content = state.content + usize::from(version.has_content());
        state.content = content.saturating_sub(before.has_content().into());
        if before.has_content() {
            self.note_empty(space, slab);
        }
    }

    /// An owner's slab is open now.
    pub(in crate::client) fn count_content(&mut self, space: SpaceIndex, slab: SlabNo) {
        let state = &mut self.spaces[space].slabs[slab];
        state.content = state.versions.iter().filter(|version| version.has_content()).count();
        self.note_empty(space, slab);
    }

    fn note_empty(&mut self, space: SpaceIndex, slab: SlabNo) {
        let Some(after) = self.config.give_back_after else { return };
        let owned = self.spaces[space].tenure == Tenure::Owner;
        let state = &mut self.spaces[space].slabs[slab];
        if !owned || state.content > 0 {
            return;
        }
        state.empty_since = self.now;
        if !std::mem::replace(&mut state.is_vacating, true) {
            self.vacating.queue.push_back((self.now + after, space, slab));
        }
    }

    /// Gives slabs back that have been without content for long enough.
    pub(in crate::client) fn vacate(&mut self, now: Time) {
        let Some(after) = self.config.give_back_after else { return };
        while self.vacating.due().is_some_and(|due| due <= now) {
            let is_silent = self.control_silent_for(now).is_some_and(|silent| silent >= MAP_SILENT);
            if is_silent || self.questions.len() >= LEAVING_MAX {
                self.vacating.not_before = now + LOOK_AGAIN;
                return;
            }
            let Some((_, space, slab)) = self.vacating.queue.pop_front() else { return };
            let is_taken = self.spaces[space].is_taken;
            let state = &mut self.spaces[space].slabs[slab];
            state.is_vacating = false;
            let is_open = matches!(state.phase, Phase::Open);
            // It is looked at again when its group has no parity any more.
            if is_taken || state.content > 0 || !is_open || self.is_in_frozen(space, slab) {
                continue;
            }
            let state = &self.spaces[space].slabs[slab];
            let ripe = state.empty_since + after;
            // The number says when to look, the versions what there is.
            if ripe <= now && state.versions.iter().any(|version| version.has_content()) {
                debug_assert!(false, "a slab with content was counted as empty");
                continue;
            }
            if ripe <= now && self.can_be_told(space, slab) && self.begin_discard(space, slab) {
                continue;
            }
            // Emptied again since, or something is under way there, or a server of it is away.
            let due = if ripe > now { ripe } else { now + after.max(LOOK_AGAIN) };
            self.spaces[space].slabs[slab].is_vacating = true;
            self.vacating.queue.push_back((due, space, slab));
        }
    }

    /// Whether all servers of a slab will hear that it is theirs again. One that is away would keep it, should this owner end
    /// before that is back.
    fn can_be_told(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let mut copies = self.peers_of(&self.spaces[space].slabs[slab].entry).iter();
        copies.all(|peer| self.peers[peer].is_up() && self.peers[peer].returns.is_empty())
    }

    /// Nothing more is given back by itself: this client is about to end.
    pub fn stop_giving_back(&mut self) {
        self.config.give_back_after = None;
    }

    /// Whether slabs are on their way back to servers that answer: nobody else knows of them.
    pub fn is_giving_back(&self) -> bool {
        let leaves = |request: &ControlRequest| matches!(request, ControlRequest::Change(change) if change.entry.empty);
        self.questions.iter().any(|question| leaves(&question.request)) || self.is_returning()
    }
}
