//! Finds out whether a server has the very copy that the map means.
//!
//! A client may hear late that a server has begun a new life. Its map may be from after that. What it knew of the server's copies
//! before says nothing of the copies in the map then. Where slabs have one copy each, taking such a copy for gone would lose it.
//!
//! So each server is asked, slab by slab, and says the grant of what it has. Where there is no parity, this is done by listing
//! its versions again.

use crate::client::Client;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::sealed::Tenure;
use crate::client::slab::{Phase, Space};
use crate::units::{SlabNo, Version};
use crate::wire::message::Status;

impl Client {
    /// A server said which grant it has of a slab.
    pub(in crate::client) fn check_answered(
        &mut self,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
        (status, grant): (Status, Version),
    ) {
        let server = self.pool.sessions.peers[peer].info().id;
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        state.checking.remove(peer);
        let means = |replica: &crate::control::Replica| replica.server == server && replica.grant == grant;
        if status == Status::Ok && state.entry.replicas.iter().any(means) {
            // There is a copy again: what it would have been put together from does not matter.
            state.is_stuck = false;
            state.checked.insert(peer);
            return self.pool.map.mark_group(space, slab);
        }
        self.redundancy.copy_lost(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, peer);
    }

    /// A server has begun a new life. `true` where it is asked what it has of a slab now.
    fn check_again(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) -> bool {
        let (tenure, state) = (self.pool.map.spaces[space].tenure, &self.pool.map.spaces[space].slabs[slab]);
        let is_copy = self.pool.sessions.peers_of(&state.entry).has(peer) && !state.failed.has(peer);
        let changes = state.pending.is_some() || state.repair.is_some() || self.redundancy.copies.any_of(space, slab);
        // What a keeper or owner has opened it has heard of, in the life that is over.
        let is_new = tenure == Tenure::Reader || matches!(state.phase, Phase::Opening(_));
        // Where parity is about to leave, nobody would ask any more.
        if self.pool.map.is_grouped(space, slab) && !self.pool.map.is_parting(space, slab) {
            let is_target = state.repair.as_ref().is_some_and(|repair| repair.peer == peer);
            if is_copy && !is_target {
                self.pool.map.spaces[space].slabs[slab].checked.remove(peer);
                self.pool.map.mark_group(space, slab);
                return true;
            }
        } else if is_copy && is_new && !changes {
            let entry = state.entry.clone();
            self.reopen(space, slab, entry);
            return true;
        }
        false
    }

    /// Whatever a server had is gone.
    pub(in crate::client) fn content_lost(&mut self, peer: PeerIndex) {
        self.pool.map.leftovers.forget(|_, of| of == peer);
        for space in self.pool.map.spaces.indices() {
            let state = &mut self.pool.map.spaces[space];
            let Space { fenced_at, fencing, unknown_at, notified_again, looked_at, disbelieved, .. } = state;
            let known = [fenced_at, fencing, unknown_at, notified_again, looked_at, disbelieved];
            known.into_iter().for_each(|set| set.remove(peer));
            [&mut state.accused, &mut state.refusing].into_iter().for_each(|set| set.remove(peer));
            if self.pool.map.is_followed(space) {
                // The grant says which life of a slab is meant, and the map may be of the server's new one.
                continue;
            }
            for slab in self.pool.map.spaces[space].slabs.indices() {
                if !self.check_again(space, slab, peer) {
                    self.redundancy.copy_lost(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, peer);
                }
            }
        }
    }
}
