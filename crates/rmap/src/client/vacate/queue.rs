//! Slabs without content, in line.

use std::time::Duration;

use super::content::Content;
use super::{LEAVING_MAX, LOOK_AGAIN, MAP_SILENT, Vacating};
use crate::client::context::Context;
use crate::client::index::SpaceIndex;
use crate::units::{SlabNo, Time};

impl Vacating {
    /// For so many slabs.
    pub fn make_room(&mut self, slabs: usize) {
        self.queue.reserve(slabs.saturating_sub(self.queue.len()));
    }

    /// When the first one is to be looked at.
    pub fn due(&self) -> Option<Time> {
        self.queue.front().map(|(due, ..)| self.not_before.max(*due))
    }

    /// A slab has no content any more, and goes back if that stays so for long enough.
    pub fn became_empty(
        &mut self,
        now: Time,
        after: Duration,
        (space, slab): (SpaceIndex, SlabNo),
        content: &mut Content,
    ) {
        if content.became_empty(now) {
            self.queue.push_back((now + after, space, slab));
        }
    }

    /// The next slab that is to be looked at by now: it leaves the line. None while the control plane seems to be away.
    pub fn poll(&mut self, now: Time, context: &Context<'_>) -> Option<(SpaceIndex, SlabNo)> {
        self.due().filter(|due| *due <= now)?;
        let is_silent = context.pool.map.questions.silent_for(now).is_some_and(|silent| silent >= MAP_SILENT);
        if is_silent || context.pool.map.questions.len() >= LEAVING_MAX {
            self.not_before = now + LOOK_AGAIN;
            return None;
        }
        self.queue.pop_front().map(|(_, space, slab)| (space, slab))
    }

    /// A slab that [`Vacating::poll`] returned could not go back: it was empty for too short, something is under way there, or a
    /// server of it is away.
    pub fn put_back(&mut self, now: Time, after: Duration, (space, slab): (SpaceIndex, SlabNo), content: &mut Content) {
        let ripe = content.empty_for_at(after);
        let due = if ripe > now { ripe } else { now + after.max(LOOK_AGAIN) };
        content.queued();
        self.queue.push_back((due, space, slab));
    }
}
