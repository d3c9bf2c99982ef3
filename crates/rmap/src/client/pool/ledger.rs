//! Which parts of the ledger can be read or written now, and which are at both of their copies.

use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::parity::layout::LEDGER_COPIES;
use crate::client::pool::Pool;
use crate::client::sealed::Tenure;
use crate::client::slab::{Phase, Space};
use crate::units::{PageNo, SlabNo};

impl Pool {
    /// Whether what the ledger says of a group is at both of its copies: with one, a server could take it along with a member.
    pub fn is_ledger_kept(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        self.map.ledger_slabs(space, group).all(|slab| self.is_kept(space, slab))
    }

    /// The same of one slab of the ledger.
    fn is_kept(&self, space: SpaceIndex, ledger: SlabNo) -> bool {
        self.map.spaces[space].slabs.get(ledger).is_some_and(|state| {
            let good = self.sessions.peers_of(&state.entry).minus(state.failed);
            matches!(state.phase, Phase::Open) && good.len() >= LEDGER_COPIES
        })
    }

    /// A slab of the ledger was looked at. If both of its copies are there, and nothing is moved, groups that waited for that go on.
    pub fn ledger_was_looked_at(&mut self, space: SpaceIndex, ledger: SlabNo) {
        let Space { tenure, layout, slabs, .. } = &self.map.spaces[space];
        let (layout, is_still) = (*layout, slabs[ledger].repair.is_none());
        // An owner looks at all of its groups again and again.
        if *tenure == Tenure::Keeper && layout.is_ledger(ledger) && is_still && self.is_kept(space, ledger) {
            layout.groups_in(ledger).for_each(|group| self.map.mark_group(space, layout.parity(group)));
        }
    }

    /// Whether what becomes of a page of the ledger is known soon: from a server that answers, or without one.
    pub fn is_at_hand(&self, space: SpaceIndex, page: PageNo) -> bool {
        self.map.slab_of(page).is_none_or(|slab| self.is_slab_at_hand(space, slab))
    }

    /// The same of any page of a slab.
    pub fn is_slab_at_hand(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.map.spaces[space];
        match &state.slabs[slab].phase {
            _ if state.is_taken => true,
            // The map that is being looked up decides.
            _ if state.is_stale => false,
            Phase::Opening(_) | Phase::Followed => false,
            Phase::Open => self.copies_to_read(space, slab).iter().any(|peer| self.sessions.peers[peer].is_up()),
            // Lost, or without content so far: a read has its answer, and a write goes to whoever takes the slab.
            Phase::Vacant | Phase::Granting(_) | Phase::Leaving | Phase::Lost => true,
        }
    }
}
