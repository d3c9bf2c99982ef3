//! Writes that wait for the control plane's word on a slab: where its copies are to be, or that one of them counts no more.
//!
//! Nobody waits for that for ever. Who has another place for his pages has them back after [`ClientConfig::map_patience`], as declined.
//! Who has none is told after [`ClientConfig::error_after`] that they failed, and what is asked after that fails at once, until there is
//! an answer: a disk that says nothing is worse than one that says what is wrong. Of what could not begin nothing was sent. A write
//! that every copy has that answers, and waits for the map to be rid of the others, fails as one to silent servers does: it stays
//! under way, and is done when the map is changed (see `unanswered.rs`).
//!
//! [`ClientConfig::map_patience`]: super::ClientConfig::map_patience
//! [`ClientConfig::error_after`]: super::ClientConfig::error_after

use std::time::Duration;

use super::ops::{Kind, Operation, Stage};
use super::slab::Phase;
use super::{Client, Failure};
use crate::units::Time;

impl Client {
    /// How long writes wait that could not begin, and how they end then.
    fn unmapped_end(&self) -> Option<(Duration, Failure)> {
        let declined = self.config.map_patience.map(|patience| (patience, Failure::Declined));
        declined.or(self.config.error_after.map(|patience| (patience, Failure::Silent)))
    }

    /// Whether writes that could not begin are to be looked at for the time they have waited.
    pub(super) fn ends_unmapped(&self) -> bool {
        self.unmapped_end().is_some()
    }

    /// The slab's writes go nowhere before the control plane has answered.
    pub(super) fn wait_for_map(&mut self, now: Time, space: usize, slab: usize) {
        let Some((patience, _)) = self.unmapped_end() else { return };
        match self.map_late_at(now, patience) {
            Some(at) if at <= now => self.end_unmapped(now, space, slab),
            Some(at) if self.config.map_patience.is_some() => self.look_at(at, space, slab),
            _ => self.map_is_watched = true,
        }
    }

    /// When writes that wait for the map are to be looked at, if there may be any.
    pub(super) fn map_due(&self, now: Time) -> Option<Time> {
        self.config.error_after.filter(|_| self.map_is_watched).and_then(|patience| self.map_late_at(now, patience))
    }

    /// Has those looked at that wait for the map for too long, and for anything else.
    pub(super) fn watch_map(&mut self, now: Time) {
        if self.map_due(now).is_some_and(|at| at <= now) {
            self.map_is_watched = false;
            self.mark_unanswered(|_| true);
        }
    }

    pub(super) fn map_is_late(&self, now: Time) -> bool {
        let late_at = self.unmapped_end().and_then(|(patience, _)| self.map_late_at(now, patience));
        late_at.is_some_and(|at| at <= now)
    }

    /// When the control plane will have been silent for too long, as it seems now.
    fn map_late_at(&self, now: Time, patience: Duration) -> Option<Time> {
        let asked = self.questions.iter().map(|question| question.first_asked.unwrap_or(now)).min()?;
        Some(asked + patience)
    }

    pub(super) fn end_unmapped(&mut self, now: Time, space: usize, slab: usize) {
        let Some((_, failure)) = self.unmapped_end() else { return };
        let ended = match failure {
            Failure::Declined => self.decline_ops(space, slab, now),
            failure => self.fail_waiting(space, slab, |_, op| op.kind != Kind::Read, failure),
        };
        self.stats.unmapped += ended as u64;
    }

    /// Ends what callers wait for, of what has not begun. The client's own can wait.
    fn fail_waiting(
        &mut self,
        space: usize,
        slab: usize,
        fits: impl Fn(&Client, &Operation) -> bool,
        failure: Failure,
    ) -> usize {
        let mut waiting = self.waiting_for(space, slab);
        waiting.retain(|op| !self.ops.peek(*op).is_own && fits(self, self.ops.peek(*op)));
        waiting.iter().for_each(|op| self.fail_op(*op, failure));
        waiting.len()
    }

    /// Of a slab whose change of the map is under way: what cannot end without it fails, when that takes too long.
    pub(super) fn tend_unmapped(&mut self, now: Time, space: usize, slab: usize) {
        let Some(patience) = self.config.error_after else { return };
        if !self.waits_for_map(space, slab) || !self.ops.may_be_any_of(space, slab) {
            return;
        }
        if self.map_late_at(now, patience).is_none_or(|at| now < at) {
            self.map_is_watched = true;
            return;
        }
        let required = self.required(space, slab);
        let is_left_to_the_map = |client: &Client, op: &Operation| {
            let missing = required.minus(op.acked);
            !op.is_told && !missing.is_empty() && missing.iter().all(|peer| client.peers[peer].is_down())
        };
        let is_of_slab = |op: &Operation| op.space == space && self.slab_of(op.page) == Some(slab);
        let writes = self.ops.select(|op| {
            op.stage == Stage::Active
                && op.kind != Kind::Read
                && !op.is_own
                && is_of_slab(op)
                && is_left_to_the_map(self, op)
        });
        for op in writes {
            self.tell_of_silence(op);
            self.stats.unmapped += u64::from(self.ops.peek(op).is_told);
        }
        let is_open = matches!(self.spaces[space].slabs[slab].phase, Phase::Open);
        let is_behind_told = |client: &Client, op: &Operation| {
            let writer = client.ops.busy.get(&Client::busy_key(space, op.page));
            writer.is_some_and(|writer| client.ops.peek(*writer).is_told)
        };
        let is_held_up = |client: &Client, op: &Operation| !is_open || is_behind_told(client, op);
        let ended = self.fail_waiting(space, slab, is_held_up, Failure::Silent);
        self.stats.unmapped += ended as u64;
    }

    /// Whether a change of the map is under way for a slab.
    pub(super) fn waits_for_map(&self, space: usize, slab: usize) -> bool {
        self.spaces[space].slabs[slab].pending.is_some()
    }
}
