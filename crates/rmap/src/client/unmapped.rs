//! Requests that wait for the control plane's word on a slab: where its copies are to be, or that one of them counts no more.
//!
//! Nobody waits for that for ever. Who has another place for his pages has writes that could not begin back after
//! [`ClientConfig::map_patience`], as declined. Who has none is told after [`ClientConfig::error_after`] that they failed, and what is
//! asked after that fails at once, or within a second where nothing was asked about the slab yet, until there is an answer: a disk
//! that says nothing is worse than one that says what is wrong. Of
//! what could not begin nothing was sent. A write that every copy has that can, and waits for the map to be rid of the others, fails as
//! one to silent servers does: it stays under way, and is done when the map is changed (see `unanswered.rs`). Later ones to the slab
//! do not begin.
//!
//! [`ClientConfig::map_patience`]: super::ClientConfig::map_patience
//! [`ClientConfig::error_after`]: super::ClientConfig::error_after

use std::time::Duration;

use super::ops::{Kind, Operation, Stage};
use super::peer::PeerSet;
use super::slab::Phase;
use super::{Client, Failure, Question};
use crate::control::ControlRequest;
use crate::units::Time;

/// A question that is asked while older ones have no answer waits for so long: a store that is there answers in milliseconds.
const GRACE: Duration = Duration::from_secs(1);

/// What is known of how the map's keeper answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct MapWatch {
    /// Somebody may wait for the map to be changed.
    pub is_wanted: bool,
    /// When it was last looked who has waited for too long.
    looked_at: Time,
    /// When there was last an answer.
    pub heard_at: Time,
}

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
        match self.slab_late_at(now, space, slab, patience) {
            Some(at) if at <= now => self.end_unmapped(now, space, slab),
            Some(at) if self.config.map_patience.is_some() => self.look_at(at, space, slab),
            _ => self.map_watch.is_wanted = true,
        }
    }

    /// Whether the control plane seems to be silent, and nothing is asked of it for writes that have another place to go.
    pub(super) fn declines_unasked(&self, now: Time) -> bool {
        let late_at = self.config.map_patience.and_then(|patience| self.map_late_at(now, patience));
        late_at.is_some_and(|at| at <= now)
    }

    /// When the control plane will have been silent for too long, as it seems now. Not because of a question that it cannot answer,
    /// as long as it answers others.
    fn map_late_at(&self, now: Time, patience: Duration) -> Option<Time> {
        let asked = self.questions.iter().map(|question| asked_at(question, now)).min()?;
        Some(asked.max(self.map_watch.heard_at) + patience)
    }

    /// When a question will have waited for too long. One that is asked of a control plane that seems to be silent shows soon
    /// whether it is.
    fn late_at(&self, now: Time, question: &Question, patience: Duration) -> Time {
        let asked = asked_at(question, now);
        // Who has another place for his pages uses that.
        let grace = if self.config.map_patience.is_some() { Duration::ZERO } else { GRACE };
        let soon = self.map_late_at(now, patience).map(|late| late.max(asked + grace));
        soon.map_or(asked + patience, |soon| soon.min(asked + patience))
    }

    /// When a slab will have waited for too long: for the answer about it, or about others if it is not asked about.
    fn slab_late_at(&self, now: Time, space: usize, slab: usize, patience: Duration) -> Option<Time> {
        let about_it = |question: &&Question| {
            let change = match &question.request {
                ControlRequest::Change(change) => Some(change),
                _ => None,
            };
            question.space == space && change.is_some_and(|change| change.slab.0 as usize == slab)
        };
        let own = self.questions.iter().find(about_it).map(|question| self.late_at(now, question, patience));
        own.or_else(|| self.map_late_at(now, patience))
    }

    /// When those who wait for the map are to be looked at.
    pub(super) fn map_due(&self, now: Time) -> Option<Time> {
        let patience = self.config.error_after.filter(|_| self.map_watch.is_wanted)?;
        let each = self.questions.iter().map(|question| self.late_at(now, question, patience));
        each.chain(self.map_late_at(now, patience)).filter(|at| *at > self.map_watch.looked_at).min()
    }

    /// Has those looked at that wait for the map for too long, and for anything else.
    pub(super) fn watch_map(&mut self, now: Time) {
        if self.map_due(now).is_some_and(|at| at <= now) {
            (self.map_watch.is_wanted, self.map_watch.looked_at) = (false, now);
            self.mark_unanswered(|_| true);
        }
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

    /// Whether a change of the map is under way for a slab, or for what says which versions it has.
    pub(super) fn waits_for_map(&self, space: usize, slab: usize) -> bool {
        let is_pending = |slab: usize| self.spaces[space].slabs[slab].pending.is_some();
        is_pending(slab) || self.unread_tables(space, slab).any(is_pending)
    }

    /// Whether that takes too long.
    fn is_map_overdue(&self, now: Time, space: usize, slab: usize) -> bool {
        let Some(patience) = self.config.error_after else { return false };
        let is_late = |slab: usize| {
            self.spaces[space].slabs[slab].pending.is_some()
                && self.slab_late_at(now, space, slab, patience).is_some_and(|at| at <= now)
        };
        is_late(slab) || self.unread_tables(space, slab).any(is_late)
    }

    /// Copies that must have a write and cannot take it.
    fn missing(&self, space: usize, slab: usize, required: PeerSet) -> PeerSet {
        let failed = self.spaces[space].slabs[slab].failed;
        required.iter().filter(|peer| failed.has(*peer) || self.peers[*peer].is_down()).collect()
    }

    /// Whether a write to an open slab could not end before the map is changed, and that takes too long.
    pub(super) fn is_left_to_late_map(&self, space: usize, slab: usize) -> bool {
        let is_pending = self.config.error_after.is_some() && self.spaces[space].slabs[slab].pending.is_some();
        is_pending
            && !self.missing(space, slab, self.required(space, slab)).is_empty()
            && self.is_map_overdue(self.now, space, slab)
    }

    /// Of a slab whose change of the map is under way: what cannot end without it fails, when that takes too long.
    pub(super) fn tend_unmapped(&mut self, now: Time, space: usize, slab: usize) {
        if self.config.error_after.is_none() || !self.ops.may_be_any_of(space, slab) || !self.waits_for_map(space, slab)
        {
            return;
        }
        // Others may have waited for less long.
        self.map_watch.is_wanted = true;
        if self.is_map_overdue(now, space, slab) {
            let ended = match self.spaces[space].slabs[slab].phase {
                Phase::Open => self.end_late(space, slab),
                // Writes are declined after another time.
                _ if self.config.map_patience.is_some() => {
                    self.fail_waiting(space, slab, |_, op| op.kind == Kind::Read, Failure::Silent)
                }
                _ => self.fail_waiting(space, slab, |_, _| true, Failure::Silent),
            };
            self.stats.unmapped += ended as u64;
        }
    }

    /// The same of an open slab: how many requests fail.
    fn end_late(&mut self, space: usize, slab: usize) -> usize {
        let required = self.required(space, slab);
        let missing = self.missing(space, slab, required);
        let is_gone = missing == required && !self.is_grouped(space, slab);
        let is_left = |client: &Client, op: usize| {
            let operation = client.ops.peek(op);
            match operation.kind {
                Kind::Read => is_gone && !client.is_answer_coming(op),
                Kind::Write { .. } => !operation.is_told && required.minus(operation.acked).is_subset_of(missing),
            }
        };
        let begun = |op: &Operation| op.stage == Stage::Active && !op.is_own && op.space == space;
        let mut active = self.ops.select(|op| begun(op) && self.slab_of(op.page) == Some(slab));
        active.retain(|op| is_left(self, *op));
        let mut ended = 0;
        for op in active {
            if self.ops.peek(op).kind == Kind::Read {
                self.fail_op(op, Failure::Silent);
                ended += 1;
            } else {
                self.tell_of_silence(op);
                ended += usize::from(self.ops.peek(op).is_told);
            }
        }
        // Behind one that is not done before the map is changed; others get their turn.
        let is_behind_told = |client: &Client, op: &Operation| {
            let writer = client.ops.busy.get(&Client::busy_key(space, op.page));
            op.kind != Kind::Read && writer.is_some_and(|writer| client.ops.peek(*writer).is_told)
        };
        ended + self.fail_waiting(space, slab, is_behind_told, Failure::Silent)
    }
}

fn asked_at(question: &Question, now: Time) -> Time {
    question.first_asked.unwrap_or(now)
}
