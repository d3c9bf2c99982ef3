//! What a reader of a sealed space does about copies that are missing: it watches the map, and asks to keep the space if nobody else
//! sees to it (`sealed.rs`).

use std::time::Duration;

use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::sealed::{LOOK_FIRST, Tenure, Watch};
use crate::client::slab::Slab;
use crate::control::ControlRequest;
use crate::units::{SlabNo, Time};

impl Pool {
    /// A reader's copies are not as they should be.
    pub fn begin_watch(&mut self, space: SpaceIndex) {
        if self.map.spaces[space].watch.is_some() {
            return;
        }
        let patience = self.config.keep_after.max(Duration::from_millis(1));
        let chance = self.entropy.next_u64() % patience.as_millis() as u64;
        self.map.watch(space, Watch::new(self.now, patience + Duration::from_millis(chance)));
    }

    /// Looks at the maps that it is time for.
    pub fn watch_sealed(&mut self, parity: &Parity, now: Time) {
        self.map.forget_watched();
        for at in 0.. {
            let Some(space) = self.map.watched_at(at) else { return };
            let Some(watch) = self.map.spaces[space].watch else { continue };
            if watch.due().is_none_or(|due| now < due) {
                continue;
            }
            let state = &self.map.spaces[space];
            let (id, generation) = (state.id, state.generation);
            let nobody = watch.is_over(now) && !state.is_stale;
            let is_asked = state.wants_parity && !state.is_stale;
            let keeps = is_asked || nobody && self.can_improve(parity, space);
            let request = if state.tenure == Tenure::Reader && keeps {
                ControlRequest::Keep { space: id, generation }
            } else {
                ControlRequest::Look { space: id }
            };
            self.map.spaces[space].watch.iter_mut().for_each(Watch::begin_look);
            self.map.ask_control(space, request);
        }
    }

    /// A reader's part of what an owner does for an open slab: it sees what is missing.
    pub fn look_after(&mut self, parity: &Parity, space: SpaceIndex, slab: SlabNo) {
        if !self.is_slab_short(parity, space, slab) {
            return;
        }
        self.begin_watch(space);
        let nobody = self.sound_copies(space, slab).iter().all(|peer| self.sessions.peers[peer].is_down());
        let soon = self.now + LOOK_FIRST;
        if let Some(watch) = self.map.spaces[space].watch.as_mut().filter(|_| nobody) {
            watch.look_by(soon);
        }
    }

    /// The same where this client is one.
    pub fn look_after_if_reader(&mut self, parity: &Parity, space: SpaceIndex, slab: SlabNo) {
        if self.map.spaces[space].tenure == Tenure::Reader {
            self.look_after(parity, space, slab);
        }
    }

    /// Whether any slab of a space has too few copies at servers that answer.
    pub fn is_short(&self, parity: &Parity, space: SpaceIndex) -> bool {
        self.map.spaces[space].slabs.indices().any(|slab| self.is_slab_short(parity, space, slab))
    }

    fn is_slab_short(&self, parity: &Parity, space: SpaceIndex, slab: SlabNo) -> bool {
        let entry = &self.map.spaces[space].slabs[slab].entry;
        let copies = self.sound_copies(space, slab);
        let good = |peer: PeerIndex| !self.sessions.peers[peer].is_down() && !self.sessions.peers[peer].wants_relief();
        // What is lost may be so because the space is being removed: that is worth to be known.
        entry.lost
            || !entry.replicas.is_empty()
                && copies.iter().filter(|peer| good(*peer)).count() < parity.wanted_copies(self, space, slab)
    }

    /// Whether a keeper could do something: make a copy of what is left, or say that nothing is. Not one that does not know
    /// all servers of the map: what is missing to it may be there.
    fn can_improve(&self, parity: &Parity, space: SpaceIndex) -> bool {
        let mut replicas = self.map.spaces[space].slabs.iter().flat_map(|slab| &slab.entry.replicas);
        if replicas.any(|replica| self.sessions.peers.of(replica.server).is_none()) {
            return false;
        }
        self.map.spaces[space].slabs.indices().filter(|slab| self.is_slab_short(parity, space, *slab)).any(|slab| {
            let Slab { entry, failed, behind, .. } = &self.map.spaces[space].slabs[slab];
            if self.map.is_grouped(space, slab) {
                return self.can_improve_column(space, slab);
            }
            if entry.lost {
                return false;
            }
            let copies = self.sessions.peers_of(entry);
            let wanted = parity.wanted_copies(self, space, slab);
            let left = self.sound_copies(space, slab);
            let up = left.iter().filter(|peer| !self.sessions.peers[*peer].is_down()).count();
            let takes = |peer: &PeerIndex| {
                let server = &self.sessions.peers[*peer];
                !copies.has(*peer)
                    && server.can_lend()
                    && (!server.has_overflow_disk() || self.config.uses_overflow_disk)
            };
            let room = self.sessions.peers.indices().any(|peer| takes(&peer));
            // A copy that is bad where it is may be made anew in the same slot.
            let again = failed.iter().any(|peer| self.sessions.peers[peer].can_lend());
            let again = again || behind.iter().any(|peer| self.sessions.peers[peer].is_up());
            left.is_empty() || (up > 0 && up <= wanted && (room || again))
        })
    }
}
