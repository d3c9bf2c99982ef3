//! Asks the copies of a slab that another owner left which versions they have, and takes in what they list (`../open.rs`).

use crate::client::exchange::Answer;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::open::{ListStep, Listing};
use crate::client::pool::Pool;
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::units::{PageNo, SlabNo, Version};
use crate::wire::message::{Status, VERSIONS_MAX};

impl Pool {
    /// Asks the copies of a slab that is being opened, as far as they can be asked. What each has come to, which the caller gives back
    /// to the slab; `None` while nothing is to be decided. `is_copied`: pages of the slab are on their way from one copy to another.
    pub fn list_copies(&mut self, space: SpaceIndex, slab: SlabNo, is_copied: bool) -> Option<Vec<Listing>> {
        let state = &mut self.map.spaces[space].slabs[slab];
        if state.pending.is_some() {
            return None;
        }
        let Phase::Opening(mut listings) = std::mem::replace(&mut state.phase, Phase::Vacant) else { return None };
        state.make_table(&mut self.map.tables);
        let replicas = state.entry.replicas.clone();
        let present = |listing: &Listing| replicas.iter().any(|r| r.grant == listing.grant);
        if !listings.iter().all(present) {
            // A copy left. A page on its way from it to another may have arrived or not: ask once that is over.
            if is_copied {
                state.phase = Phase::Opening(listings);
                return None;
            }
            listings.clear();
        }
        for replica in &replicas {
            if let Some(peer) = self.sessions.peers.of(replica.server)
                && !listings.iter().any(|listing| listing.peer == peer)
            {
                listings.push(Listing { peer, grant: replica.grant, step: ListStep::Fencing, list: Vec::new() });
            }
        }
        for listing in &mut listings {
            if self.map.spaces[space].slabs[slab].failed.has(listing.peer) {
                listing.step = ListStep::Bad;
            }
            let refuses = self.map.spaces[space].refusing.has(listing.peer);
            listing.step = match listing.step {
                ListStep::Fencing if refuses => ListStep::Refused,
                ListStep::Refused if !refuses => ListStep::Fencing,
                step => step,
            };
            if listing.step == ListStep::Fencing
                && self.sessions.peers[listing.peer].is_up()
                && self.fence(space, listing.peer)
                && self.ask_versions(space, slab, listing.peer, 0)
            {
                listing.step = ListStep::Asked;
            }
        }
        Some(listings)
    }

    /// A copy told the versions of some of its pages.
    pub fn versions_answered(
        &mut self,
        space: SpaceIndex,
        page: PageNo,
        peer: PeerIndex,
        Answer { status, version: grant, payload }: Answer<'_>,
    ) {
        let Some(slab) = self.map.slab_of(page) else { return };
        self.map.mark(space, slab);
        let (size, generation) = (self.map.size, self.map.spaces[space].generation);
        // A reader is no owner: the keeper of today may have written the ledger.
        let by_keeper =
            self.map.spaces[space].tenure == Tenure::Reader && self.map.spaces[space].layout.is_ledger(slab);
        let first_own = Version::new(generation, if by_keeper { Version::SEQUENCE_MAX } else { 0 }, true);
        let Phase::Opening(listings) = &mut self.map.spaces[space].slabs[slab].phase else { return };
        let Some(listing) = listings.iter_mut().find(|l| l.peer == peer && l.step == ListStep::Asked) else { return };
        let index = size.index(page);
        if index != listing.list.len() {
            return;
        }
        let due = VERSIONS_MAX.min(size.pages() - index);
        if status != Status::Ok || grant != listing.grant || payload.len() != due * 8 {
            listing.step = ListStep::Bad;
            return;
        }
        if listing.list.is_empty() {
            listing.list = self.map.tables.take_empty();
        }
        for word in payload.chunks_exact(8) {
            let mut bits = [0; 8];
            bits.copy_from_slice(word);
            listing.list.push(Version::from_bits(u64::from_le_bytes(bits)));
        }
        let next = listing.list.len();
        if next >= size.pages() {
            // Nobody but this owner writes versions of its generation, and it has written nothing here but what it has taken over.
            let made_up = listing.list.iter().any(|version| *version >= first_own);
            listing.step = if made_up { ListStep::Bad } else { ListStep::Done };
        } else if !self.ask_versions(space, slab, peer, next) {
            self.map.list_again(space, slab, peer);
        }
    }
}
