//! Reads of a group that has parity: from the slab's own copy, or put together from the others.

use crate::client::Failure;
use crate::client::exchange::{Exchange, Role};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::stripe::{Job, Purpose};
use crate::client::pool::Pool;
use crate::units::SlabNo;

impl Pages {
    /// Asks for a page of a group that has parity: its own copy, if that can be asked, else those that it can be put together
    /// from. Where neither can be, the read waits for a server or for another map.
    pub fn ask_group(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex, slab: SlabNo) {
        let Operation { space, sent, is_bad_itself, exchanges, .. } = *self.ops.peek(op);
        let copies = pool.copies_to_ask(space, slab);
        let near = |peer: &PeerIndex| (sent.has(*peer), pool.sessions.peers[*peer].round_trip());
        let up = copies.iter().filter(|peer| !is_bad_itself && !pool.sessions.peers[*peer].is_down()).min_by_key(near);
        if let Some(peer) = up {
            return self.ask_copy(pool, op, peer);
        }
        if self.read_degraded(pool, parity, op) {
            return;
        }
        if !is_bad_itself {
            if !self.queue_read(pool, parity, op) {
                self.ops.activate(op);
            }
            return;
        }
        let is_gone = |column: SlabNo| {
            let state = &pool.map.spaces[space].slabs[column];
            pool.sessions.peers_of(&state.entry).minus(state.failed).is_empty()
        };
        if exchanges == 0 && pool.map.other_columns(space, slab).any(is_gone) {
            self.finish_read(pool, parity, op, Err(Failure::Corrupt));
        } else if exchanges == 0 && pool.others_are_out_of_reach(space, slab) {
            self.finish_read(pool, parity, op, Err(Failure::Silent));
        }
    }

    /// Something has changed: reads that wait may have somebody to ask.
    pub fn retry_reads(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex, slab: SlabNo) {
        let size = pool.map.size;
        let waits = |op: &Operation| op.stage == Stage::Active && op.kind == Kind::Read && op.exchanges == 0;
        for op in self.ops.select(|op| waits(op) && op.space == space && size.slab(op.page) == Some(slab)) {
            if !parity.stripes.is_waiting(op) {
                self.ask_for_page(pool, parity, op);
            }
        }
    }

    /// Reads a page whose own copy cannot be asked, or is bad. `false` if not all of the others can be read now.
    fn read_degraded(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) -> bool {
        let (space, page, class, version) = {
            let op = self.ops.peek(op);
            (op.space, op.page, op.class, op.version)
        };
        let (Some(slab), index) = (pool.map.slab_of(page), pool.map.size.index(page)) else { return false };
        if !pool.can_reconstruct(space, slab) {
            return false;
        }
        self.ops.activate(op);
        // Of a read that was asked elsewhere before: the page may have been written meanwhile, and others have to fit what it is now.
        let version = version.max(pool.map.spaces[space].slabs[slab].version(index));
        if !version.has_content() {
            self.finish_read(pool, parity, op, Ok(false));
            return true;
        }
        self.ops.get(op).version = version;
        if parity.stripes.of_read(op).is_some() {
            return true;
        }
        let free = parity.stripes.free_for_read();
        let begun = free.zip(pool.sources(space, slab, index)).is_some_and(|(stripe, sources)| {
            let job = Job { purpose: Purpose::Read { op }, space, slab, index, version };
            parity.begin_stripe(pool, stripe, job, &sources, class)
        });
        if begun {
            self.ops.get(op).exchanges += 1;
        } else {
            parity.stripes.wait(op);
        }
        true
    }

    /// Reads that can be put together now.
    pub fn begin_waiting_stripes(&mut self, pool: &mut Pool, parity: &mut Parity) {
        for _ in 0..parity.stripes.waiting() {
            let Some(op) = parity.stripes.next_waiting() else { return };
            let about = *self.ops.peek(op);
            let waits = about.stage == Stage::Active && about.kind == Kind::Read;
            if waits && !self.is_answer_coming(pool, parity, op) {
                self.ask_for_page(pool, parity, op);
            }
        }
    }

    /// Whether a read has asked somebody who answers. What a silent server was asked does not come, though it may be under way for long.
    pub fn is_answer_coming(&self, pool: &Pool, parity: &Parity, op: OpIndex) -> bool {
        let asks = |e: &Exchange| e.role == Role::Read { op } && !pool.sessions.peers[e.peer].is_down();
        self.ops.peek(op).exchanges > 0
            && (pool.sessions.exchanges.find(asks).is_some() || parity.stripes.of_read(op).is_some())
    }

    /// No answer is wanted any more to a read.
    pub fn drop_stripe(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        if let Some(stripe) = parity.stripes.of_read(op)
            && parity.end_stripe(pool, stripe).is_some()
        {
            self.op_exchange_ended(op);
        }
    }
}
