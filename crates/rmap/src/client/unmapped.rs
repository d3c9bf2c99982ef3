//! Requests that wait for the control plane's word on a slab: where its copies are to be, or that one of them counts no more.
//!
//! Nobody waits for that for ever. Who has another place for his pages has writes that could not begin back after
//! [`ClientConfig::map_patience`], as declined. Who has none is told after [`ClientConfig::error_after`] that they failed, and what is
//! asked after that fails at once, or within a second where nothing was asked about the slab yet, until there is an answer: a disk
//! that says nothing is worse than one that says what is wrong. (A read of a group with parity that has lost two members does wait
//! until the map says so.)
//!
//! Of what could not begin nothing was sent. A write that every copy has that can, and waits for the map to be rid of the others, fails
//! as one to silent servers does: it stays under way, and is done when the map is changed (see `unanswered.rs`). Later ones to a slab
//! that has such a copy do not begin.
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
/// So many questions are asked in that time about slabs that nobody has, to see whether there are answers; and so many may be open.
/// Each takes slabs from servers.
const TRIALS_MAX: usize = 4;
const TRIALS_OPEN_MAX: usize = 64;

/// What is known of how the map's keeper answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct MapWatch {
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
        self.wait_for_answers(now, space, slab, None, |_, asked| asked == slab);
    }

    /// The same, for answers about its group. What it needs first is had from servers: until something was asked, what waits has its
    /// own time to show whether there are answers.
    pub(super) fn wait_for_map_of_group(&mut self, now: Time, space: usize, slab: usize) {
        let layout = self.spaces[space].layout;
        let group = layout.group(slab);
        let waiting = self.waiting_for(space, slab);
        let writes = waiting.iter().map(|op| self.ops.peek(*op)).filter(|op| op.kind != Kind::Read && !op.is_own);
        let since = writes.map(|op| op.since).min();
        self.wait_for_answers(now, space, slab, since, |client, asked| {
            client.spaces[space].layout.group(asked) == group
        });
    }

    fn wait_for_answers(
        &mut self,
        now: Time,
        space: usize,
        slab: usize,
        since: Option<Time>,
        about: impl Fn(&Client, usize) -> bool,
    ) {
        let Some((patience, _)) = self.unmapped_end() else { return };
        let Some(at) = self.answer_late_at(now, patience, space, since, |asked| about(self, asked)) else { return };
        // Other times are those of questions, and looked at anyway ([`Client::map_due`]).
        let is_own_time = since.is_some_and(|since| at == since + self.grace());
        if at <= now {
            self.end_unmapped(now, space, slab);
        } else if self.config.map_patience.is_some() || is_own_time {
            self.look_at(at, space, slab);
        }
    }

    /// Whether writes to a slab that nobody has end without a question. Who has another place for them does not ask a control plane
    /// that seems to be silent; others try now and then.
    pub(super) fn ends_unasked(&self, now: Time) -> bool {
        let Some((patience, failure)) = self.unmapped_end() else { return false };
        let is_late = self.map_late_at(now, patience).is_some_and(|at| at <= now);
        let is_young = |question: &&Question| now.since(asked_at(question, now)) < GRACE;
        let tries = || self.questions.iter().filter(is_young).count() < TRIALS_MAX;
        is_late && (failure == Failure::Declined || self.questions.len() >= TRIALS_OPEN_MAX || !tries())
    }

    /// When the control plane will have been silent for too long, as it seems now. What it was asked before its last answer it can
    /// maybe not answer; that says nothing of the rest.
    fn map_late_at(&self, now: Time, patience: Duration) -> Option<Time> {
        let asked = self.questions.iter().map(|question| asked_at(question, now));
        asked.filter(|at| *at >= self.map_watch.heard_at).min().map(|at| at + patience)
    }

    /// When a question will have waited for too long, if the control plane as a whole has at `map_late`. One that is asked of a
    /// control plane that seems to be silent shows soon whether it is.
    fn late_at(&self, asked: Time, patience: Duration, map_late: Option<Time>) -> Time {
        let soon = map_late.map_or(asked + patience, |late| late.max(asked + self.grace()));
        soon.min(asked + patience)
    }

    fn grace(&self) -> Duration {
        // Who has another place for his pages uses that.
        if self.config.map_patience.is_some() { Duration::ZERO } else { GRACE }
    }

    /// When the answer about some slabs will have been waited for for too long: the first of them, or any answer if none of them is
    /// asked about, and not before what waits `since` then has shown whether there is one.
    fn answer_late_at(
        &self,
        now: Time,
        patience: Duration,
        space: usize,
        since: Option<Time>,
        about: impl Fn(usize) -> bool,
    ) -> Option<Time> {
        let map_late = self.map_late_at(now, patience);
        let fits = |question: &&Question| match &question.request {
            ControlRequest::Change(change) => question.space == space && about(change.slab.0 as usize),
            _ => false,
        };
        let asked = self.questions.iter().filter(fits).map(|question| asked_at(question, now)).min();
        let unasked = map_late.map(|late| since.map_or(late, |since| late.max(since + self.grace())));
        asked.map(|asked| self.late_at(asked, patience, map_late)).or(unasked)
    }

    /// When those who wait for the map are to be looked at.
    pub(super) fn map_due(&self, now: Time) -> Option<Time> {
        let patience = self.config.error_after.filter(|_| !self.questions.is_empty())?;
        let map_late = self.map_late_at(now, patience);
        let each = self.questions.iter().map(|question| self.late_at(asked_at(question, now), patience, map_late));
        each.chain(map_late).filter(|at| *at > self.map_watch.looked_at).min()
    }

    /// Has those looked at that wait for the map for too long, and for anything else.
    pub(super) fn watch_map(&mut self, now: Time) {
        if self.map_due(now).is_some_and(|at| at <= now) {
            self.map_watch.looked_at = now;
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
                && self.answer_late_at(now, patience, space, None, |asked| asked == slab).is_some_and(|at| at <= now)
        };
        is_late(slab) || self.unread_tables(space, slab).any(is_late)
    }

    /// Whether the map of a space that another client writes has been asked for for too long.
    pub(super) fn is_look_overdue(&self, space: usize) -> bool {
        self.is_question_overdue(space, |request| matches!(request, ControlRequest::Look { .. }))
    }

    /// Whether something about a space has been asked for too long.
    pub(super) fn is_question_overdue(&self, space: usize, fits: impl Fn(&ControlRequest) -> bool) -> bool {
        let Some(patience) = self.config.error_after else { return false };
        let fits = |question: &&Question| question.space == space && fits(&question.request);
        let asked = self.questions.iter().find(fits).and_then(|question| question.first_asked);
        asked.is_some_and(|asked| self.late_at(asked, patience, self.map_late_at(self.now, patience)) <= self.now)
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
        // A copy in the making that catches up is waited for as long as it answers; without it a write is done that all others have.
        let joining = self.spaces[space].slabs[slab].repair.as_ref().and_then(|repair| repair.catches_up());
        let is_joining_dead = joining.is_some_and(|peer| self.peers[peer].is_down());
        for op in active {
            let Operation { kind, acked, .. } = *self.ops.peek(op);
            if kind == Kind::Read {
                self.fail_op(op, Failure::Silent);
                ended += 1;
            } else if !required.is_subset_of(acked) {
                self.tell_of_silence(op);
                ended += usize::from(self.ops.peek(op).is_told);
            } else if let Some(peer) = joining.filter(|_| is_joining_dead) {
                self.ops.get(op).sent.remove(peer);
                self.check_write(op);
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
