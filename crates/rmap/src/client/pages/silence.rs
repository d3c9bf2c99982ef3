//! Operations that nobody answers: every server that has their page has been silent for too long.
//!
//! Silence says nothing of what a server has. It may be this client whose network is away. So the map is not changed for it, and
//! a slab whose servers are silent stays what it is. Operations that wait for them fail after [`ClientConfig::error_after`]. What
//! is asked after that fails at once, until one of the servers is heard again.
//!
//! # What makes a failed write right
//!
//! Some copies may have the write by then, and a datagram that is still on its way may bring it to another. So the write fails
//! for its caller only. It stays the one write to its page that is under way, in its version. It is sent again when a server is
//! back. It ends like any other write: when every copy in sync has it, or when the slab is lost. A later write to the page comes
//! after it. Until then a read is right with or without it.
//!
//! Meanwhile the failed write takes no slot from others. Some slots are kept for such writes, and one of these replaces its own.
//!
//! [`ClientConfig::error_after`]: crate::client::ClientConfig::error_after

use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::{Failure, Fault};
use crate::units::SlabNo;

impl Pages {
    /// A server has been silent for too long. What waits is looked at.
    pub fn stays_silent(&self, pool: &mut Pool) {
        self.mark_unanswered(pool, |_| true);
        self.mark_queued(pool);
    }

    /// Writes that could not be told before. `true` if slabs have to be looked at again.
    pub fn report_more(&mut self, pool: &mut Pool) -> bool {
        let can = self.ops.can_tell_more();
        if can {
            self.mark_unanswered(pool, |op| op.kind != Kind::Read);
        }
        can
    }

    /// Has the slabs looked at whose operations fit and did not end, with their groups.
    pub fn mark_unanswered(&self, pool: &mut Pool, fits: impl Fn(&Operation) -> bool) {
        let waits = |op: &Operation| matches!(op.stage, Stage::Waiting | Stage::Active) && fits(op);
        for op in self.ops.select(waits) {
            let Operation { space, page, .. } = *self.ops.peek(op);
            let Some(slab) = pool.map.slab_of(page) else { continue };
            pool.map.mark(space, slab);
            pool.map.mark_group(space, slab);
        }
    }

    /// Of a slab that is being looked at: what nobody answers fails, and what has failed is sent to who answers again.
    pub fn maintain_unanswered(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        if pool.map.spaces[space].layout.is_ledger(slab) && pool.is_out_of_reach(space, slab) {
            // Whatever it says something of is.
            self.mark_unanswered(pool, |op| op.space == space && !op.is_own);
            self.mark_queued(pool);
        }
        if !self.ops.may_be_any_of(space, slab) {
            return;
        }
        let size = pool.map.size;
        let of_slab = |op: &Operation| op.space == space && size.slab(op.page) == Some(slab);
        if pool.is_write_out_of_reach(space, slab) {
            let reads = pool.is_out_of_reach(space, slab);
            for op in self.ops.select(|op| of_slab(op) && !op.is_own) {
                match (self.ops.peek(op).stage, self.ops.peek(op).kind) {
                    (Stage::Waiting, Kind::Write { .. }) => self.fail_op(pool, redundancy, parity, op, Failure::Silent),
                    (Stage::Active, Kind::Write { .. }) if reads => self.report_silence(pool, redundancy, parity, op),
                    (Stage::Waiting | Stage::Active, Kind::Read)
                        if reads && !self.is_answer_coming(pool, parity, op) =>
                    {
                        self.fail_op(pool, redundancy, parity, op, Failure::Silent);
                    }
                    _ => {}
                }
            }
        } else if self.ops.any_reported() {
            for op in self.ops.select(|op| of_slab(op) && op.is_reported && op.stage == Stage::Active) {
                self.send_write(pool, op);
                self.check_write(pool, redundancy, parity, op);
            }
        }
    }

    /// A write fails, and stays under way. It asks nobody now: exchanges are of a limited number.
    pub fn report_silence(&mut self, pool: &mut Pool, redundancy: &mut Redundancy, parity: &mut Parity, op: OpIndex) {
        if pool.has(Fault::ForgetsUnanswered) {
            return self.fail_op(pool, redundancy, parity, op, Failure::Silent);
        }
        if self.ops.peek(op).is_reported || self.ops.report(op) {
            self.drop_exchanges(pool, parity, op);
            let operation = self.ops.get(op);
            operation.sent = operation.acked;
        }
    }
}
