//! Operations that wait for the control plane's word, and end when that takes too long (`../unmapped.rs`).

use crate::client::Failure;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Ops, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::units::{SlabNo, Time};

impl Pages {
    /// The slab's writes go nowhere before the control plane has answered.
    pub fn wait_for_map(
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
    pub fn wait_for_map_of_group(
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
        // Other times are those of questions, and looked at anyway ([`Pool::overdue_at`]).
        let is_own_time = since.is_some_and(|since| at == since + pool.grace());
        if at <= now {
            self.end_unmapped(pool, redundancy, parity, now, space, slab);
        } else if pool.config.map_patience.is_some() || is_own_time {
            pool.map.mark_at(at, space, slab);
        }
    }

    /// Has those looked at that wait for the map for too long, and for anything else.
    pub fn poll_overdue(&self, pool: &mut Pool, now: Time) {
        if pool.patience().is_some_and(|patience| pool.map.questions.poll_overdue(now, patience)) {
            self.mark_unanswered(pool, |_| true);
        }
    }

    /// Ends the writes of a slab that could not begin, as declined or failed.
    pub fn end_unmapped(
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
    pub fn maintain_unmapped(
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
