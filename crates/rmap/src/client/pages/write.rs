//! Writes and trims: each goes to every copy, and ends when all that count have it.
//!
//! One write to a page is under way at a time, in the order in which callers asked. A write to a group with parity waits until the
//! parity has left, and a write of any kind ends the making of parity. So these methods borrow [`Redundancy`] and [`Parity`], too.

use crate::client::exchange::{Exchange, Request, Role};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::client::{Failure, Fault, ops};
use crate::units::{Page, SlabNo, Version};
use crate::wire::message::{Op as Wire, Status};

impl Pages {
    /// What a write is to write, which is put where it is sealed.
    pub fn store_write(&mut self, pool: &mut Pool, op: OpIndex, version: Version, content: impl FnOnce(&mut Page)) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        self.ops.get(op).version = version;
        content(self.ops.content(op));
        pool.map.spaces[space].key.seal(page, version, self.ops.room(op));
    }

    /// Begins a waiting operation if it can begin now.
    pub fn try_op(&mut self, pool: &mut Pool, redundancy: &mut Redundancy, parity: &mut Parity, op: OpIndex) {
        match self.ops.peek(op).kind {
            _ if self.ops.peek(op).stage != Stage::Waiting => {}
            Kind::Read => self.try_read(pool, parity, op),
            Kind::Write { .. } => self.try_write(pool, redundancy, parity, op),
        }
    }

    /// Begins a write if it can begin now; else it waits for its slab, its group or another write to its page.
    pub fn try_write(&mut self, pool: &mut Pool, redundancy: &mut Redundancy, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        if pool.map.spaces[space].is_taken {
            return self.ops.finish(op, Err(Failure::Fenced));
        }
        let Some(number) = pool.map.slab_of(page) else { return };
        let is_lost = matches!(pool.map.spaces[space].slabs[number].phase, Phase::Lost);
        let waits = !is_lost && parity.waits_for_group(pool, self, redundancy, op, number);
        if !is_lost && pool.is_write_out_of_reach(space, number) && !self.ops.peek(op).is_own {
            return self.ops.finish(op, Err(Failure::Silent));
        }
        if waits {
            return;
        }
        match pool.map.spaces[space].slabs[number].phase {
            Phase::Lost => self.ops.finish(op, Err(Failure::Lost)),
            Phase::Vacant => pool.map.mark(space, number),
            Phase::Granting(_) | Phase::Leaving if pool.ends_unmapped() => pool.map.mark(space, number),
            Phase::Opening(_) if pool.map.waits_for_map(space, number) => pool.map.mark(space, number),
            Phase::Granting(_) | Phase::Opening(_) | Phase::Leaving | Phase::Followed => {}
            Phase::Open => {
                if pool.is_left_to_late_map(space, number) && !self.ops.peek(op).is_own {
                    pool.stats.unmapped += 1;
                    return self.ops.finish(op, Err(Failure::Silent));
                }
                // One write to a page at a time, in the order in which they came.
                if self.ops.begin_write(op) {
                    self.ops.activate(op);
                    self.send_write(pool, op);
                } else if pool.map.waits_for_map(space, number) {
                    pool.map.mark(space, number);
                }
            }
        }
    }

    /// To every copy that has not been sent it.
    pub fn send_write(&mut self, pool: &mut Pool, op: OpIndex) {
        let Operation { space, page, class, version, sent, kind, is_reported, .. } = *self.ops.peek(op);
        let Some(number) = pool.map.slab_of(page) else { return };
        let mirror = pool.map.spaces[space].slabs[number].repair.as_ref().and_then(|repair| repair.mirror());
        let mut targets = pool.required(space, number).union(mirror.into_iter().collect()).minus(sent);
        if is_reported {
            // What asks for long takes no exchange from others; and who has lost the slab is not asked until the map says so, too.
            let failed = pool.map.spaces[space].slabs[number].failed;
            targets = targets.minus(failed).iter().filter(|peer| !pool.sessions.peers[*peer].is_down()).collect();
        }
        let wire = if kind == (Kind::Write { trim: true }) { Wire::Trim } else { Wire::Write };
        for peer in targets.iter() {
            let request = Request { role: Role::Write { op }, peer, op: wire, class, space, page, version };
            if pool.ask(request) {
                self.ops.get(op).sent.insert(peer);
                self.ops.get(op).exchanges += 1;
            }
        }
    }

    /// A copy has a write, or cannot take it.
    pub fn write_answered(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        exchange: &Exchange,
        status: Status,
    ) {
        let Exchange { peer, space, page, version, .. } = *exchange;
        let Some(slab) = pool.map.slab_of(page) else { return };
        if status == Status::Ok {
            self.ops.get(op).acked.insert(peer);
            let index = pool.map.size.index(page);
            pool.map.copy_has(space, slab, peer, index, version);
            self.check_write(pool, redundancy, parity, op);
            self.op_exchange_ended(op);
            let joining = pool.map.spaces[space].slabs[slab].repair.as_ref().is_some_and(|repair| repair.peer == peer);
            if joining {
                pool.map.mark(space, slab);
            }
        } else {
            self.op_exchange_ended(op);
            redundancy.copy_lost(pool, self, parity, space, slab, peer);
        }
    }

    /// A copy has the write, or the set of copies changed: is it done?
    pub fn check_write(&mut self, pool: &mut Pool, redundancy: &mut Redundancy, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, version, sent, acked, stage, is_reported, .. } = *self.ops.peek(op);
        let Some(number) = pool.map.slab_of(page) else { return };
        let required = pool.required(space, number);
        let repair = pool.map.spaces[space].slabs[number].repair.as_ref();
        let joining = repair.and_then(|repair| repair.catches_up()).filter(|peer| sent.has(*peer));
        let wanted = required.union(joining.into_iter().collect());
        let enough = wanted.is_subset_of(acked) || (pool.has(Fault::AcksEarly) && !acked.is_empty());
        if stage == Stage::Active && !enough && !is_reported && pool.map.waits_for_map(space, number) {
            pool.map.mark(space, number);
        }
        if stage != Stage::Active || required.is_empty() || !enough {
            return;
        }
        let index = pool.map.size.index(page);
        redundancy.set_version(pool, space, number, index, version);
        parity.note_change(pool, self, redundancy, space, number);
        self.end_write(pool, redundancy, parity, op, Ok(()));
        if pool.map.spaces[space].slabs[number].repair.is_some() {
            pool.map.mark(space, number);
        }
    }

    /// A write ends, and the next one to its page gets its turn.
    pub fn end_write(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        result: Result<(), Failure>,
    ) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        self.ops.end_write(op);
        self.ops.finish(op, result);
        if self.ops.any_waiting() {
            for next in self.ops.select(|o| o.stage == Stage::Waiting && o.space == space && o.page == page) {
                self.try_op(pool, redundancy, parity, next);
            }
        }
    }

    /// Operations of a slab that wait for it.
    pub fn wake_ops(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        for op in self.waiting_for(pool, space, slab) {
            self.try_op(pool, redundancy, parity, op);
        }
    }

    /// The set of copies changed: writes may be done or have to go elsewhere, reads too.
    pub fn map_settled(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let size = pool.map.size;
        let of_slab = |page| size.slab(page).is_some_and(|s| s == slab);
        for op in self.ops.select(|o| o.stage == Stage::Active && o.space == space && of_slab(o.page)) {
            match self.ops.peek(op).kind {
                Kind::Read if !self.is_answer_coming(pool, parity, op) => self.ask_for_page(pool, parity, op),
                Kind::Read => {}
                Kind::Write { .. } => {
                    self.send_write(pool, op);
                    self.check_write(pool, redundancy, parity, op);
                }
            }
        }
        self.wake_ops(pool, redundancy, parity, space, slab);
    }

    /// A copy is gone: should there be another one at the same server, it has nothing of what this one had.
    pub fn unsend_writes(&mut self, pool: &Pool, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
        let size = pool.map.size;
        let of_slab = |page| size.slab(page).is_some_and(|s| s == slab);
        self.ops.unsend(peer, |op| op.space == space && of_slab(op.page));
    }

    /// Writes that the new copy does not get: they began before it.
    pub fn has_unmirrored(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) -> bool {
        let size = pool.map.size;
        self.ops.any(|op| {
            op.stage == Stage::Active
                && matches!(op.kind, Kind::Write { .. })
                && op.space == space
                && size.slab(op.page) == Some(slab)
                && !op.sent.has(peer)
        })
    }

    /// Slabs that wait for any server to come.
    pub fn mark_vacant_wanted(&mut self, pool: &mut Pool) {
        let waiting = self.ops.select(|op| op.stage == ops::Stage::Waiting);
        for op in waiting {
            let (space, page) = (self.ops.get(op).space, self.ops.get(op).page);
            if let Some(slab) = pool.map.slab_of(page) {
                pool.map.mark(space, slab);
            }
        }
    }
}
