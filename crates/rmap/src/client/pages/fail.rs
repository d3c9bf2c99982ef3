//! Ends operations that cannot be done, with the reason.

use crate::client::Failure;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::units::{SlabNo, Time};

impl Pages {
    /// Ends operations of a space, or of one slab, that cannot be done.
    pub fn fail_ops(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: Option<SlabNo>,
        failure: Failure,
    ) {
        let size = pool.map.size;
        let fits = |page| slab.is_none_or(|slab| size.slab(page).is_some_and(|s| s == slab));
        for op in self.ops.select(|o| o.space == space && fits(o.page)) {
            self.fail_op(pool, redundancy, parity, op, failure);
        }
    }

    /// Ends an operation that cannot be done.
    pub fn fail_op(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        failure: Failure,
    ) {
        let Operation { stage, kind, .. } = *self.ops.peek(op);
        match kind {
            Kind::Read => return self.fail_read(pool, parity, op, failure),
            Kind::Write { .. } if matches!(stage, Stage::Waiting | Stage::Active) => {
                self.end_write(pool, redundancy, parity, op, Err(failure))
            }
            Kind::Write { .. } => {}
        }
        self.drop_exchanges(pool, parity, op);
    }

    /// The same of a read.
    pub fn fail_read(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex, failure: Failure) {
        if matches!(self.ops.peek(op).stage, Stage::Waiting | Stage::Active) {
            self.ops.finish(op, Err(failure));
        }
        self.drop_exchanges(pool, parity, op);
    }

    /// No server took the slab: those of its writes that had begun by then are the caller's again. How many they are.
    pub fn decline_ops(&mut self, pool: &Pool, space: SpaceIndex, slab: SlabNo, began_by: Time) -> usize {
        let mut waiting = self.waiting_for(pool, space, slab);
        waiting.retain(|op| self.ops.get(*op).since <= began_by);
        waiting.iter().for_each(|op| self.ops.finish(*op, Err(Failure::Declined)));
        waiting.len()
    }

    /// No server has room, as each said when it was last heard of, which may be a while ago. A write is declined if all of them have
    /// answered something that was sent after it began; until then they are asked.
    pub fn decline_full(&mut self, pool: &mut Pool, now: Time, space: SpaceIndex, slab: SlabNo) {
        let up: PeerSet = pool.sessions.peers.indices().filter(|peer| pool.sessions.peers[*peer].is_up()).collect();
        let said_at = up.iter().map(|peer| pool.sessions.peers[peer].lived_at()).min();
        self.decline_ops(pool, space, slab, said_at.unwrap_or(now));
        let latest = self.waiting_for(pool, space, slab).into_iter().map(|op| self.ops.get(op).since).max();
        if let Some(began) = latest {
            let unheard: PeerSet = up.iter().filter(|peer| pool.sessions.peers[*peer].lived_at() < began).collect();
            unheard.iter().for_each(|peer| pool.sessions.peers[peer].ask_for_room(now, began));
        }
    }
}
