//! How long the control plane's word is waited for, and what is late by now.
//!
//! The rules are those of `unmapped.rs`. Nothing is changed here. What becomes of the operations is in `pages/late.rs`.

use std::time::Duration;

use crate::client::Failure;
use crate::client::index::SpaceIndex;
use crate::client::peer::Reach;
use crate::client::pool::Pool;
use crate::client::questions::{Patience, Question};
use crate::client::unmapped::{GRACE, TRIALS_MAX, TRIALS_OPEN_MAX};
use crate::control::ControlRequest;
use crate::units::{SlabNo, Time};

impl Pool {
    /// How long writes wait that could not begin, and how they end then.
    pub fn unmapped_end(&self) -> Option<(Duration, Failure)> {
        let declined = self.config.map_patience.map(|patience| (patience, Failure::Declined));
        declined.or(self.config.error_after.map(|patience| (patience, Failure::Silent)))
    }

    /// Whether writes that could not begin are to be looked at for the time they have waited.
    pub fn ends_unmapped(&self) -> bool {
        self.unmapped_end().is_some()
    }

    /// Whether writes to a slab that nobody has end without a question. Who has another place for them does not ask a control plane
    /// that seems to be silent; others try now and then.
    pub fn ends_unasked(&self, now: Time) -> bool {
        let Some((patience, failure)) = self.unmapped_end() else { return false };
        let is_late = self.map.questions.all_late_at(now, patience).is_some_and(|at| at <= now);
        let tries = || self.map.questions.younger_than(now, GRACE) < TRIALS_MAX;
        is_late && (failure == Failure::Declined || self.map.questions.len() >= TRIALS_OPEN_MAX || !tries())
    }

    /// How long a question is waited for that is asked while older ones have no answer.
    pub fn grace(&self) -> Duration {
        // Who has another place for his pages uses that.
        if self.config.map_patience.is_some() { Duration::ZERO } else { GRACE }
    }

    /// How long an answer is waited for by those who fail then.
    pub fn patience(&self) -> Option<Patience> {
        self.config.error_after.map(|at_most| Patience { at_most, grace: self.grace() })
    }

    /// When the answer about some slabs will have been waited for for too long: the first of them, or any answer if none of them is
    /// asked about, and not before what waits `since` then has shown whether there is one.
    pub fn answer_late_at(
        &self,
        now: Time,
        patience: Duration,
        space: SpaceIndex,
        since: Option<Time>,
        about: impl Fn(SlabNo) -> bool,
    ) -> Option<Time> {
        let all_late = self.map.questions.all_late_at(now, patience);
        let fits = |question: &Question| match &question.request {
            ControlRequest::Change(change) => question.space == space && about(change.slab),
            _ => false,
        };
        let asked = self.map.questions.first_asked(now, fits);
        let unasked = all_late.map(|late| since.map_or(late, |since| late.max(since + self.grace())));
        let patience = Patience { at_most: patience, grace: self.grace() };
        asked.map(|asked| patience.late_at(asked, all_late)).or(unasked)
    }

    /// When those who wait for the map are to be looked at.
    pub fn overdue_at(&self, now: Time) -> Option<Time> {
        self.map.questions.overdue_at(now, self.patience()?)
    }

    /// Whether that takes too long.
    pub fn is_map_overdue(&self, now: Time, space: SpaceIndex, slab: SlabNo) -> bool {
        let Some(patience) = self.config.error_after else { return false };
        let is_late = |slab: SlabNo| {
            self.map.spaces[space].slabs[slab].pending.is_some()
                && self.answer_late_at(now, patience, space, None, |asked| asked == slab).is_some_and(|at| at <= now)
        };
        is_late(slab) || self.map.unread_tables(space, slab).any(is_late)
    }

    /// Whether the map of a space that another client writes has been asked for for too long.
    pub fn is_look_overdue(&self, space: SpaceIndex) -> bool {
        self.is_question_overdue(space, |request| matches!(request, ControlRequest::Look { .. }))
    }

    /// Whether something about a space has been asked for too long.
    pub fn is_question_overdue(&self, space: SpaceIndex, fits: impl Fn(&ControlRequest) -> bool) -> bool {
        self.patience().is_some_and(|patience| self.map.questions.is_overdue(self.now, patience, space, fits))
    }

    /// Whether a write to an open slab could not end before the map is changed, and that takes too long.
    pub fn is_left_to_late_map(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let is_pending = self.config.error_after.is_some() && self.map.spaces[space].slabs[slab].pending.is_some();
        is_pending
            && !self.missing(space, slab, self.required(space, slab)).is_empty()
            && self.is_map_overdue(self.now, space, slab)
    }

    /// Until when a server that fell silent may still come back and have room: a pause is no refusal. One that never answered
    /// may not know this node at all.
    pub fn patience_ends(&self, now: Time) -> Option<Time> {
        let ends = self.sessions.peers.iter().filter_map(|peer| match peer.reach() {
            Reach::Down { since } if peer.epoch().is_some() => Some(since + self.config.grant_patience),
            _ => None,
        });
        ends.filter(|at| now < *at).max()
    }
}
