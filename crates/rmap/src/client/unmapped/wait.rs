//! Lets requests wait for the control plane, and ends those that waited too long.

use std::time::Duration;

use super::{GRACE, TRIALS_MAX, TRIALS_OPEN_MAX};
use crate::client::Failure;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::ops::{Kind, Operation, Ops, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::questions::{Patience, Question};
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::control::ControlRequest;
use crate::units::{SlabNo, Time};

impl Pages {
    /// The slab's writes go nowhere before the control plane has answered.
    pub(in crate::client) fn wait_for_map(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        self.wait_for_answers(pool, redundancy, parity, (space, slab), None, |asked| asked == slab);
    }

    /// The same, for answers about its group. What it needs first is had from servers: until something was asked, what waits has its
    /// own time to show whether there are answers.
    pub(in crate::client) fn wait_for_map_of_group(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let layout = pool.map.spaces[space].layout;
        let group = layout.group(slab);
        let waiting = self.waiting_for(pool, space, slab);
        let writes = waiting.iter().map(|op| self.ops.peek(*op)).filter(|op| op.kind != Kind::Read && !op.is_own);
        let since = writes.map(|op| op.since).min();
        self.wait_for_answers(pool, redundancy, parity, (space, slab), since, |asked| layout.group(asked) == group);
    }

    fn wait_for_answers(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        (space, slab): (SpaceIndex, SlabNo),
        since: Option<Time>,
        about: impl Fn(SlabNo) -> bool,
    ) {
        let now = pool.now;
        let Some((patience, _)) = pool.unmapped_end() else { return };
        let Some(at) = pool.answer_late_at(now, patience, space, since, about) else { return };
        // Other times are those of questions, and looked at anyway ([`Client::overdue_at`]).
        let is_own_time = since.is_some_and(|since| at == since + pool.grace());
        if at <= now {
            self.end_unmapped(pool, redundancy, parity, now, space, slab);
        } else if pool.config.map_patience.is_some() || is_own_time {
            pool.map.mark_at(at, space, slab);
        }
    }

    pub(in crate::client) fn end_unmapped(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        now: Time,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let Some((_, failure)) = pool.unmapped_end() else { return };
        let ended = match failure {
            Failure::Declined => self.decline_ops(pool, space, slab, now),
            failure => {
                self.fail_waiting(pool, redundancy, parity, (space, slab), |_, op| op.kind != Kind::Read, failure)
            }
        };
        pool.stats.unmapped += ended as u64;
    }

    /// Ends what callers wait for, of what has not begun. The client's own can wait.
    fn fail_waiting(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        (space, slab): (SpaceIndex, SlabNo),
        fits: impl Fn(&Ops, &Operation) -> bool,
        failure: Failure,
    ) -> usize {
        let mut waiting = self.waiting_for(pool, space, slab);
        waiting.retain(|op| !self.ops.peek(*op).is_own && fits(&self.ops, self.ops.peek(*op)));
        waiting.iter().for_each(|op| self.fail_op(pool, redundancy, parity, *op, failure));
        waiting.len()
    }

    /// Of a slab whose change of the map is under way: what cannot end without it fails, when that takes too long.
    pub(in crate::client) fn maintain_unmapped(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        now: Time,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        if pool.config.error_after.is_none()
            || !self.ops.may_be_any_of(space, slab)
            || !pool.map.waits_for_map(space, slab)
        {
            return;
        }
        if pool.is_map_overdue(now, space, slab) {
            let ended = match pool.map.spaces[space].slabs[slab].phase {
                Phase::Open => self.end_late(pool, redundancy, parity, space, slab),
                // Writes are declined after another time.
                _ if pool.config.map_patience.is_some() => self.fail_waiting(
                    pool,
                    redundancy,
                    parity,
                    (space, slab),
                    |_, op| op.kind == Kind::Read,
                    Failure::Silent,
                ),
                _ => self.fail_waiting(pool, redundancy, parity, (space, slab), |_, _| true, Failure::Silent),
            };
            pool.stats.unmapped += ended as u64;
        }
    }

    /// The same of an open slab: how many requests fail.
    fn end_late(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) -> usize {
        let required = pool.required(space, slab);
        let missing = pool.missing(space, slab, required);
        let is_gone = missing == required && !pool.map.is_grouped(space, slab);
        let is_left = |op: OpIndex| {
            let operation = self.ops.peek(op);
            match operation.kind {
                Kind::Read => is_gone && !self.is_answer_coming(pool, parity, op),
                Kind::Write { .. } => !operation.is_reported && required.minus(operation.acked).is_subset_of(missing),
            }
        };
        let begun = |op: &Operation| op.stage == Stage::Active && !op.is_own && op.space == space;
        let mut active = self.ops.select(|op| begun(op) && pool.map.slab_of(op.page) == Some(slab));
        active.retain(|op| is_left(*op));
        let mut ended = 0;
        // A copy in the making that catches up is waited for as long as it answers; without it a write is done that all others have.
        let joining = pool.map.spaces[space].slabs[slab].repair.as_ref().and_then(|repair| repair.catches_up());
        let is_joining_dead = joining.is_some_and(|peer| pool.sessions.peers[peer].is_down());
        for op in active {
            let Operation { kind, acked, .. } = *self.ops.peek(op);
            if kind == Kind::Read {
                self.fail_op(pool, redundancy, parity, op, Failure::Silent);
                ended += 1;
            } else if !required.is_subset_of(acked) {
                self.report_silence(pool, redundancy, parity, op);
                ended += usize::from(self.ops.peek(op).is_reported);
            } else if let Some(peer) = joining.filter(|_| is_joining_dead) {
                self.ops.get(op).sent.remove(peer);
                self.check_write(pool, redundancy, parity, op);
            }
        }
        // Behind one that is not done before the map is changed; others get their turn.
        let is_behind_reported = |ops: &Ops, op: &Operation| {
            let writer = ops.writer(space, op.page);
            op.kind != Kind::Read && writer.is_some_and(|writer| ops.peek(writer).is_reported)
        };
        ended + self.fail_waiting(pool, redundancy, parity, (space, slab), is_behind_reported, Failure::Silent)
    }
}

impl Pages {
    /// Has those looked at that wait for the map for too long, and for anything else.
    pub(in crate::client) fn poll_overdue(&self, pool: &mut Pool, now: Time) {
        if pool.patience().is_some_and(|patience| pool.map.questions.poll_overdue(now, patience)) {
            self.mark_unanswered(pool, |_| true);
        }
    }
}

impl Pool {
    /// How long writes wait that could not begin, and how they end then.
    fn unmapped_end(&self) -> Option<(Duration, Failure)> {
        let declined = self.config.map_patience.map(|patience| (patience, Failure::Declined));
        declined.or(self.config.error_after.map(|patience| (patience, Failure::Silent)))
    }

    /// Whether writes that could not begin are to be looked at for the time they have waited.
    pub(in crate::client) fn ends_unmapped(&self) -> bool {
        self.unmapped_end().is_some()
    }

    /// Whether writes to a slab that nobody has end without a question. Who has another place for them does not ask a control plane
    /// that seems to be silent; others try now and then.
    pub(in crate::client) fn ends_unasked(&self, now: Time) -> bool {
        let Some((patience, failure)) = self.unmapped_end() else { return false };
        let is_late = self.map.questions.all_late_at(now, patience).is_some_and(|at| at <= now);
        let tries = || self.map.questions.younger_than(now, GRACE) < TRIALS_MAX;
        is_late && (failure == Failure::Declined || self.map.questions.len() >= TRIALS_OPEN_MAX || !tries())
    }

    fn grace(&self) -> Duration {
        // Who has another place for his pages uses that.
        if self.config.map_patience.is_some() { Duration::ZERO } else { GRACE }
    }

    /// How long an answer is waited for by those who fail then.
    fn patience(&self) -> Option<Patience> {
        self.config.error_after.map(|at_most| Patience { at_most, grace: self.grace() })
    }

    /// When the answer about some slabs will have been waited for for too long: the first of them, or any answer if none of them is
    /// asked about, and not before what waits `since` then has shown whether there is one.
    fn answer_late_at(
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
    pub(in crate::client) fn overdue_at(&self, now: Time) -> Option<Time> {
        self.map.questions.overdue_at(now, self.patience()?)
    }

    /// Whether that takes too long.
    fn is_map_overdue(&self, now: Time, space: SpaceIndex, slab: SlabNo) -> bool {
        let Some(patience) = self.config.error_after else { return false };
        let is_late = |slab: SlabNo| {
            self.map.spaces[space].slabs[slab].pending.is_some()
                && self.answer_late_at(now, patience, space, None, |asked| asked == slab).is_some_and(|at| at <= now)
        };
        is_late(slab) || self.map.unread_tables(space, slab).any(is_late)
    }

    /// Whether the map of a space that another client writes has been asked for for too long.
    pub(in crate::client) fn is_look_overdue(&self, space: SpaceIndex) -> bool {
        self.is_question_overdue(space, |request| matches!(request, ControlRequest::Look { .. }))
    }

    /// Whether something about a space has been asked for too long.
    pub(in crate::client) fn is_question_overdue(
        &self,
        space: SpaceIndex,
        fits: impl Fn(&ControlRequest) -> bool,
    ) -> bool {
        self.patience().is_some_and(|patience| self.map.questions.is_overdue(self.now, patience, space, fits))
    }

    /// Copies that must have a write and cannot take it.
    fn missing(&self, space: SpaceIndex, slab: SlabNo, required: PeerSet) -> PeerSet {
        let failed = self.map.spaces[space].slabs[slab].failed;
        required.iter().filter(|peer| failed.has(*peer) || self.sessions.peers[*peer].is_down()).collect()
    }

    /// Whether a write to an open slab could not end before the map is changed, and that takes too long.
    pub(in crate::client) fn is_left_to_late_map(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let is_pending = self.config.error_after.is_some() && self.map.spaces[space].slabs[slab].pending.is_some();
        is_pending
            && !self.missing(space, slab, self.required(space, slab)).is_empty()
            && self.is_map_overdue(self.now, space, slab)
    }
}

impl Map {
    /// Whether a change of the map is under way for a slab, or for what says which versions it has.
    pub(in crate::client) fn waits_for_map(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let is_pending = |slab: SlabNo| self.spaces[space].slabs[slab].pending.is_some();
        is_pending(slab) || self.unread_tables(space, slab).any(is_pending)
    }
}
