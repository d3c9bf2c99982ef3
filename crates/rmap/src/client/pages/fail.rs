//! Ends operations that cannot be done, with the reason.

use crate::client::Failure;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::units::{SlabNo, Time};

impl Pages {
    /// Ends operations of a space, or of one slab, that cannot be done.
    pub(in crate::client) fn fail_ops(
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
    pub(in crate::client) fn fail_op(
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
}

impl Pages {
    /// The same of a read.
    pub(in crate::client) fn fail_read(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex, failure: Failure) {
        if matches!(self.ops.peek(op).stage, Stage::Waiting | Stage::Active) {
            self.ops.finish(op, Err(failure));
        }
        self.drop_exchanges(pool, parity, op);
    }

    /// No server took the slab: those of its writes that had begun by then are the caller's again. How many they are.
    pub(in crate::client) fn decline_ops(
        &mut self,
        pool: &Pool,
        space: SpaceIndex,
        slab: SlabNo,
        began_by: Time,
    ) -> usize {
        let mut waiting = self.waiting_for(pool, space, slab);
        waiting.retain(|op| self.ops.get(*op).since <= began_by);
        waiting.iter().for_each(|op| self.ops.finish(*op, Err(Failure::Declined)));
        waiting.len()
    }
}
