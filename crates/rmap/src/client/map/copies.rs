//! What is known of copies in the making and of copies that are being listed.

use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::open::ListStep;
use crate::client::repair::Step;
use crate::client::slab::{Candidate, GrantStep, Phase};
use crate::client::transfer::Transfer;
use crate::units::{SlabNo, Version};

impl Map {
    /// A copy has a page, by being written or by being copied to.
    pub fn copy_has(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, index: usize, version: Version) {
        let state = &mut self.spaces[space].slabs[slab];
        if let Some(repair) = state.repair.as_mut().filter(|repair| repair.peer == peer)
            && let Some(has) = repair.list.get_mut(index)
        {
            *has = (*has).max(version);
        }
        if let Phase::Opening(listings) = &mut state.phase {
            let at_peer = listings.iter_mut().filter(|listing| listing.peer == peer);
            at_peer.filter_map(|listing| listing.list.get_mut(index)).for_each(|has| *has = (*has).max(version));
        }
    }

    /// Slabs that get a copy, by a look at all of them.
    pub fn count_repairs(&self) -> usize {
        let of_space =
            |space: &crate::client::slab::Space| space.slabs.iter().filter(|slab| slab.repair.is_some()).count();
        self.spaces.iter().map(of_space).sum()
    }

    /// The copy in the making of a slab, if there is one, has come to this step.
    pub fn set_step(&mut self, space: SpaceIndex, slab: SlabNo, step: Step) {
        if let Some(repair) = &mut self.spaces[space].slabs[slab].repair {
            repair.step = step;
        }
    }

    /// What is not at the target by now goes through the client.
    pub fn copy_the_rest(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.set_step(space, slab, Step::Copying);
        self.mark(space, slab);
    }

    /// How far the servers are that copy a slab among themselves.
    pub fn transfer_of(&self, space: SpaceIndex, slab: SlabNo) -> Option<Transfer> {
        match self.spaces[space].slabs[slab].repair.as_ref()?.step {
            Step::Transferring(transfer) => Some(transfer),
            _ => None,
        }
    }

    /// The server has forgotten this owner, of whom it had nothing.
    pub fn grant_after_fence(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, grant: Version) {
        self.spaces[space].fenced_at.remove(peer);
        let state = &mut self.spaces[space].slabs[slab];
        if let Phase::Granting(candidates) = &mut state.phase {
            let asked = |c: &&mut Candidate| c.peer == peer && c.grant == grant && c.step == GrantStep::Asked;
            candidates.asked.iter_mut().filter(asked).for_each(|c| c.step = GrantStep::Fencing);
        }
        if let Some(repair) = state.repair.as_mut().filter(|repair| repair.grant == grant) {
            repair.step = Step::Fencing;
        }
    }

    /// What a copy was asked was taken back.
    pub fn list_again(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
        if let Phase::Opening(listings) = &mut self.spaces[space].slabs[slab].phase
            && let Some(listing) = listings.iter_mut().find(|l| l.peer == peer && l.step == ListStep::Asked)
        {
            listing.step = ListStep::Fencing;
            self.tables.give_back(std::mem::take(&mut listing.list));
        }
        self.mark(space, slab);
    }
}
