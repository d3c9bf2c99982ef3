//! Whether what a caller wants can be had of nobody, as all servers that have it have been silent for too long.
//!
//! Nothing is changed here. What becomes of the operations is in `pages/silence.rs`.

use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::open::ListStep;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::read_queue::QueuedRead;
use crate::client::slab::Phase;
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
    pub fn is_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
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
    pub fn others_are_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        !self.sessions.peers.long_silent().is_empty()
            && self.others(space, slab).any(|column| column == Hearing::Silent)
    }

    /// Whether what the ledger says of a slab that is being opened can be had of nobody.
    fn is_table_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.map.unread_tables(space, slab).any(|table| self.is_out_of_reach(space, table))
    }

    /// Whether a write to a slab waits for servers that have been silent for too long: for its own, or for those of another slab
    /// of its group, which has to be whole before it is written to.
    pub fn is_write_out_of_reach(&self, space: SpaceIndex, slab: SlabNo) -> bool {
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

    /// Whether a server can be asked for the page, or it is known without one what became of it.
    pub fn is_answerable(&self, queued: &QueuedRead) -> bool {
        let Some(slab) = self.map.slab_of(queued.page) else { return true };
        let state = &self.map.spaces[queued.space].slabs[slab];
        let open = matches!(state.phase, Phase::Open | Phase::Followed);
        let silent = if open && self.map.is_grouped(queued.space, slab) {
            !self.has_source(queued.space, slab)
        } else {
            let copies = self.sound_copies(queued.space, slab);
            !copies.is_empty() && copies.iter().all(|peer| self.sessions.peers[peer].is_down())
        };
        let fails = self.map.spaces[queued.space].is_taken || self.is_out_of_reach(queued.space, slab);
        fails || !open || !silent
    }
}
