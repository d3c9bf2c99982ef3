//! Slabs in which no page has content any more go back to their servers by themselves.
//!
//! The owner counts the pages with content of each open slab. One that has none is looked at a while later: who trims and writes
//! again at once pays nothing. What is given back then, and how, is `discard.rs`.

use std::collections::VecDeque;
use std::time::Duration;

use super::Client;
use super::sealed::Tenure;
use super::slab::Phase;
use crate::control::ControlRequest;
use crate::units::{Time, Version};

/// A slab that was empty for so long is not about to be written again by whoever emptied it.
pub const GIVE_BACK_AFTER: Duration = Duration::from_secs(1);
/// Slabs that may be leaving the map at a time: should the control plane be away, writes to these wait for it.
const LEAVING_MAX: usize = 8;
/// A control plane that has not answered for so long may be away: nothing is given back before it answers.
pub const MAP_SILENT: Duration = Duration::from_millis(100);
/// How soon it is looked again whether there is an answer: 800 slabs a second at most, where each look finds room for eight.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Slabs without content, as they became so, and when each is to be looked at.
#[derive(Debug, Default)]
pub struct Vacating {
    queue: VecDeque<(Time, usize, usize)>,
    not_before: Time,
}

impl Vacating {
    /// For so many slabs.
    pub fn make_room(&mut self, slabs: usize) {
        self.queue.reserve(slabs.saturating_sub(self.queue.len()));
    }

    /// When the first one is to be looked at.
    pub fn due(&self) -> Option<Time> {
        self.queue.front().map(|(due, ..)| self.not_before.max(*due))
    }
}

impl Client {
    /// All copies in sync have another version of a page.
    pub(super) fn set_version(&mut self, space: usize, slab: usize, index: usize, version: Version) {
        let state = &mut self.spaces[space].slabs[slab];
        let before = std::mem::replace(&mut state.versions[index], version);
        let content = state.content + usize::from(version.has_content());
        state.content = content.saturating_sub(before.has_content().into());
        if before.has_content() {
            self.note_empty(space, slab);
        }
    }

    /// An owner's slab is open now.
    pub(super) fn count_content(&mut self, space: usize, slab: usize) {
        let state = &mut self.spaces[space].slabs[slab];
        state.content = state.versions.iter().filter(|version| version.has_content()).count();
        self.note_empty(space, slab);
    }

    fn note_empty(&mut self, space: usize, slab: usize) {
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
    pub(super) fn vacate(&mut self, now: Time) {
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
    fn can_be_told(&self, space: usize, slab: usize) -> bool {
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
