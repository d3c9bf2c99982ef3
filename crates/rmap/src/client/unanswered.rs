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
//! [`ClientConfig::error_after`]: super::ClientConfig::error_after

use super::ledger::Table;
use super::open::ListStep;
use super::ops::{Kind, Operation, Stage};
use super::peer::PeerSet;
use super::slab::Phase;
use super::{Failure, Fault};
use crate::client::index::{GroupIndex, OpIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::units::SlabNo;

/// Whether somebody who may have a slab is heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hearing {
    Heard,
    /// All of those who may have it have been silent for too long.
    Silent,
    /// No copy of the slab is left that could be read.
    Gone,
}

impl Pages {
    /// Of a slab that is being looked at: what nobody answers fails, and what has failed is sent to who answers again.
    pub(super) fn maintain_unanswered(
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
    pub(super) fn report_silence(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
    ) {
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

impl Pages {
    /// A server has been silent for too long. What waits is looked at.
    pub(super) fn stays_silent(&self, pool: &mut Pool) {
        self.mark_unanswered(pool, |_| true);
        self.mark_queued(pool);
    }

    /// Writes that could not be told before. `true` if slabs have to be looked at again.
    pub(super) fn report_more(&mut self, pool: &mut Pool) -> bool {
        let can = self.ops.can_tell_more();
        if can {
            self.mark_unanswered(pool, |op| op.kind != Kind::Read);
        }
        can
    }

    pub(super) fn mark_unanswered(&self, pool: &mut Pool, fits: impl Fn(&Operation) -> bool) {
        let waits = |op: &Operation| matches!(op.stage, Stage::Waiting | Stage::Active) && fits(op);
        for op in self.ops.select(waits) {
            let Operation { space, page, .. } = *self.ops.peek(op);
            let Some(slab) = pool.map.slab_of(page) else { continue };
            pool.map.mark(space, slab);
            pool.map.mark_group(space, slab);
        }
    }
}

impl Pool {
    /// Copies of a slab that may have what they should.
    fn copies_left(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let state = &self.map.spaces[space].slabs[slab];
        let bad: PeerSet = match &state.phase {
            Phase::Opening(listings) => {
                listings.iter().filter(|listing| listing.step == ListStep::Bad).map(|listing| listing.peer).collect()
            }
            _ => PeerSet::default(),
        };
        self.sound_copies(space, slab).minus(bad)
    }

    /// Where a slab stands, as far as silence is concerned.
    fn hearing(&self, space: SpaceIndex, slab: SlabNo) -> Hearing {
        let copies = self.copies_left(space, slab);
        if copies.is_empty() {
            Hearing::Gone
        } else if copies.is_subset_of(self.sessions.peers.long_silent()) {
            Hearing::Silent
        } else {
            Hearing::Heard
        }
    }

    /// The same for one of a group with parity, of which nothing can be read as long as the ledger has not said what it has.
    fn hearing_of_column(&self, space: SpaceIndex, slab: SlabNo) -> Hearing {
        match self.hearing(space, slab) {
            // As where what the ledger says of it is damaged: its copies are of no use.
            _ if matches!(self.map.spaces[space].slabs[slab].phase, Phase::Lost) => Hearing::Gone,
            Hearing::Heard if self.is_table_out_of_reach(space, slab) => Hearing::Silent,
            hearing => hearing,
        }
    }

    /// Whether only servers that have been silent for too long could tell what a slab has: of a group with parity, those of two slabs,
    /// or those of the ledger.
    pub(super) fn is_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.map.spaces[space];
        if self.sessions.peers.long_silent().is_empty() || state.is_taken || state.is_stale {
            return false;
        }
        let by_itself = match state.slabs[slab].phase {
            // Without a ledger, it is its copy that has to say what it has.
            Phase::Opening(_) => state.slabs[slab].table == Table::Gone || !self.map.is_grouped(space, slab),
            Phase::Open => !self.map.is_grouped(space, slab),
            Phase::Followed => true,
            _ => return false,
        };
        match self.hearing(space, slab) {
            hearing if by_itself => hearing == Hearing::Silent,
            _ if self.is_table_out_of_reach(space, slab) => true,
            Hearing::Heard => false,
            Hearing::Silent => self.others(space, slab).any(|column| column != Hearing::Heard),
            Hearing::Gone => self.others_are_out_of_reach(space, slab),
        }
    }

    fn others(&self, space: SpaceIndex, slab: SlabNo) -> impl Iterator<Item = Hearing> {
        self.map.other_columns(space, slab).map(move |column| self.hearing_of_column(space, column))
    }

    /// Whether it is for silence that a page of the slab cannot be put together from others.
    pub(super) fn others_are_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        !self.sessions.peers.long_silent().is_empty()
            && self.others(space, slab).any(|column| column == Hearing::Silent)
    }

    /// Whether what the ledger says of a slab that is being opened can be had of nobody.
    fn is_table_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.map.unread_tables(space, slab).any(|table| self.is_out_of_reach(space, table))
    }

    /// Whether a write to a slab waits for servers that have been silent for too long: for its own, or for those of another slab
    /// of its group, which has to be whole before it is written to.
    pub(super) fn is_write_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let layout = self.map.spaces[space].layout;
        // Single pages of one that cannot be made anew can be put together all the same.
        let stuck =
            |slab: SlabNo| self.map.spaces[space].slabs[slab].is_stuck && self.hearing(space, slab) == Hearing::Silent;
        let waits = |member: SlabNo| stuck(member) || self.is_out_of_reach(space, member);
        let held_up = |group: GroupIndex| layout.members(group).any(waits);
        !self.sessions.peers.long_silent().is_empty()
            && (self.is_out_of_reach(space, slab)
                || self.map.is_in_frozen(space, slab) && layout.group(slab).is_some_and(held_up))
    }
}

impl Map {
    /// Slabs of the ledger that have to say which versions a slab has before it can be opened.
    pub(super) fn unread_tables(&self, space: SpaceIndex, slab: SlabNo) -> impl Iterator<Item = SlabNo> {
        let state = &self.spaces[space];
        let layout = state.layout;
        let is_member = layout.group(slab).is_some() && !layout.is_parity(slab);
        let is_unread =
            is_member && matches!(state.slabs[slab].phase, Phase::Opening(_)) && !self.knows_versions(space, slab);
        let parts = if is_unread { layout.table_pages } else { 0 };
        let tables = (0..parts).filter_map(move |part| self.slab_of(layout.table_page(slab, part)));
        tables.filter(|table| state.slabs.get(*table).is_some())
    }
}
