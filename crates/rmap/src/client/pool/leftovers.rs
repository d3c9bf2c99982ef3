//! Asks servers what earlier owners left, and gives it back (`../leftovers.rs`).

use crate::client::exchange::{Request, Role};
use crate::client::index::{ListIndex, PeerIndex, SpaceIndex};
use crate::client::leftovers::{AT_A_TIME, Look};
use crate::client::pool::Pool;
use crate::control::Replica;
use crate::units::{Class, Generation, PageNo, SLABS_MAX, SlabNo, Version};
use crate::wire::message::{HELD_END, HELD_SIZE, Op, Status};

impl Pool {
    /// Whether this client may ask a server what earlier owners left there, and the server answers.
    pub fn may_look(&self, space: SpaceIndex, peer: PeerIndex) -> bool {
        let state = &self.map.spaces[space];
        let owns = state.tenure.changes_map() && !state.is_taken && !state.is_stale;
        owns && state.generation > Generation(1) && self.sessions.peers[peer].is_up()
    }

    /// Whether a server is still to be asked that, and may be.
    pub fn is_to_be_looked_at(&self, space: SpaceIndex, peer: PeerIndex) -> bool {
        self.may_look(space, peer) && !self.map.spaces[space].looked_at.has(peer)
    }

    /// A server answers that did not, or has begun a new life.
    pub fn look_for_leftovers_at(&mut self, peer: PeerIndex) {
        for space in self.map.spaces.indices() {
            self.look_for_leftovers(space, peer);
        }
    }

    /// A space has a new owner or keeper, which is this client.
    pub fn look_for_leftovers_of(&mut self, space: SpaceIndex) {
        for peer in self.sessions.peers.indices() {
            self.look_for_leftovers(space, peer);
        }
    }

    fn look_for_leftovers(&mut self, space: SpaceIndex, peer: PeerIndex) {
        if self.is_to_be_looked_at(space, peer) {
            self.map.leftovers.add(space, peer);
        }
    }

    /// A question was taken back: it is asked anew, from the beginning.
    pub fn look_for_leftovers_again(&mut self, space: SpaceIndex, peer: PeerIndex) {
        self.map.spaces[space].looked_at.remove(peer);
        self.look_for_leftovers(space, peer);
    }

    /// Asks what is still to be asked, some at a time.
    pub fn send_looks(&mut self) {
        for _ in 0..self.map.leftovers.len() {
            // Who opens a space has more urgent things to ask.
            if self.sessions.exchanges.of_spaces() >= AT_A_TIME {
                return;
            }
            let Some(look) = self.map.leftovers.next() else { return };
            let Look { space, peer, .. } = look;
            if !self.may_look(space, peer) {
                // It is looked at from the beginning when it answers.
                self.map.spaces[space].looked_at.remove(peer);
                continue;
            }
            let knows = self.fence(space, peer);
            if knows && self.ask_what_is_held(look) {
                self.map.spaces[space].looked_at.insert(peer);
            } else if knows || !self.map.spaces[space].fencing.has(peer) {
                self.map.leftovers.put_back(look);
            }
            // Else it is asked when it was told.
        }
    }

    fn ask_what_is_held(&mut self, Look { space, peer, from }: Look) -> bool {
        let has_room = self.sessions.returns[peer].has_room();
        let (role, op, class) = (Role::Held, Op::Held, Class::Rebuild);
        has_room
            && self.ask(Request { role, peer, op, class, space, page: PageNo(0), version: Version::from_bits(from) })
    }

    /// A server said what it has of a space, or a part of that.
    pub fn held_answered(
        &mut self,
        space: SpaceIndex,
        peer: PeerIndex,
        from: Version,
        (status, next): (Status, Version),
        payload: &[u8],
    ) {
        let (from, next, slabs) = (from.bits(), next.bits(), (payload.len() / HELD_SIZE) as u64);
        if matches!(status, Status::NotFenced | Status::UnknownSlab) && !self.map.spaces[space].notified_again.has(peer)
        {
            self.map.spaces[space].notified_again.insert(peer);
            self.map.spaces[space].fenced_at.remove(peer);
            return self.look_for_leftovers_again(space, peer);
        }
        // Else there would be no end to what it says.
        let is_right = next == HELD_END || next > from && next - from >= slabs && next <= SLABS_MAX as u64;
        if status != Status::Ok || !is_right || !payload.len().is_multiple_of(HELD_SIZE) {
            return;
        }
        for entry in payload.chunks_exact(HELD_SIZE) {
            let mut words = entry.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
            let (Some(slab), Some(grant)) = (words.next(), words.next()) else { continue };
            if let Ok(slab) = u32::try_from(slab) {
                self.give_leftover_back(space, peer, SlabNo(slab), Version::from_bits(grant));
            }
        }
        if next != HELD_END {
            self.map.leftovers.put_back(Look { space, peer, from: next });
        }
    }

    fn give_leftover_back(&mut self, space: SpaceIndex, peer: PeerIndex, slab: SlabNo, grant: Version) {
        let state = &self.map.spaces[space];
        let total = state.layout.total().max(state.slabs.len());
        let replica = Replica { server: self.sessions.peers[peer].info().id, grant };
        let is_of_map = |slab: SlabNo| state.slabs.get(slab).is_some_and(|slab| slab.entry.replicas.contains(&replica));
        let is_own = grant >= Version::new(state.generation, 0, false);
        if slab.to_usize() >= total || is_own || is_of_map(slab) {
            return;
        }
        self.stats.leftovers += 1;
        self.sessions.release(space, slab, peer, grant);
    }
}
