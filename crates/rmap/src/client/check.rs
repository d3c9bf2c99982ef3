//! Finds out whether a server has the very copy that the map means.
//!
//! A client may hear late that a server has begun a new life. Its map may be from after that. What it knew of the server's copies
//! before says nothing of the copies in the map then. Where slabs have one copy each, taking such a copy for gone would lose it.
//!
//! So each server is asked, slab by slab, and says the grant of what it has. Where there is no parity, this is done by listing
//! its versions again.

use super::Client;
use super::exchange::{Request, Role};
use super::sealed::Tenure;
use super::slab::Phase;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::pool::Pool;
use crate::units::{Class, SlabNo, Version};
use crate::wire::message::{Op, Status};

impl Client {
    /// A server said which grant it has of a slab.
    pub(super) fn check_answered(
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
    pub(super) fn check_again(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) -> bool {
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
}

impl Pool {
    /// Asks for a copy that nothing is known of yet.
    pub(super) fn check_copy(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
        let state = &self.map.spaces[space].slabs[slab];
        let is_known = state.checked.has(peer) || state.checking.has(peer) || state.failed.has(peer);
        if is_known || !self.sessions.peers[peer].is_up() {
            return;
        }
        let (role, op, class, page) = (Role::Check, Op::Versions, Class::Demand, self.map.first_page(slab));
        if self.ask(Request { role, peer, op, class, space, page, version: Version::NEVER }) {
            self.map.spaces[space].slabs[slab].checking.insert(peer);
        }
    }
}
