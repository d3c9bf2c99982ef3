//! Which copies a slab has, and which of them may be asked, written to or dropped, by how their servers answer.

use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::slab::{Doubt, Phase, Space};
use crate::control::{MapEntry, Replica};
use crate::units::{SlabNo, Time};

impl Pool {
    /// Which copies must have a write before it is acknowledged: those of the map as it is, and as it may already be.
    pub fn required(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let slab = &self.map.spaces[space].slabs[slab];
        let pending = slab.pending.as_ref().map(|pending| self.sessions.peers_of(&pending.entry)).unwrap_or_default();
        self.sessions.peers_of(&slab.entry).union(pending)
    }

    /// Copies that must have a write and cannot take it.
    pub fn missing(&self, space: SpaceIndex, slab: SlabNo, required: PeerSet) -> PeerSet {
        let failed = self.map.spaces[space].slabs[slab].failed;
        required.iter().filter(|peer| failed.has(*peer) || self.sessions.peers[*peer].is_down()).collect()
    }

    /// Copies of a slab that nothing speaks against.
    pub fn sound_copies(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let state = &self.map.spaces[space].slabs[slab];
        self.sessions.peers_of(&state.entry).minus(state.failed).minus(state.behind)
    }

    /// Copies that may be asked for a page, whether their servers answer or not.
    pub fn copies_to_read(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let Space { unknown_at, refusing, .. } = &self.map.spaces[space];
        self.sound_copies(space, slab).minus(*unknown_at).minus(*refusing)
    }

    /// Copies of a slab that can be asked: those that are not known to be worthless, at servers that know this reader.
    pub fn copies_to_ask(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let Space { slabs, fenced_at, refusing, .. } = &self.map.spaces[space];
        self.sessions.peers_of(&slabs[slab].entry).minus(slabs[slab].failed).minus(*refusing).intersection(*fenced_at)
    }

    /// Copies of a slab at servers that answer.
    pub fn copies_here(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        self.copies_to_ask(space, slab).iter().filter(|peer| !self.sessions.peers[*peer].is_down()).collect()
    }

    /// Copies of a slab that may be read, at servers that are not silent.
    pub fn copies_up(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        self.copies_to_read(space, slab).iter().filter(|peer| !self.sessions.peers[*peer].is_down()).collect()
    }

    /// The nearest copy of a slab whose pages are known, at a server that answers.
    pub fn nearest(&self, space: SpaceIndex, slab: SlabNo) -> Option<PeerIndex> {
        let open = matches!(self.map.spaces[space].slabs[slab].phase, Phase::Open);
        let up = self.copies_to_ask(space, slab).iter().filter(|peer| open && !self.sessions.peers[*peer].is_down());
        up.min_by_key(|peer| self.sessions.peers[*peer].round_trip())
    }

    /// Whether a slab has copies, and these servers have all of them.
    pub fn is_each_copy_of(&self, space: SpaceIndex, slab: SlabNo, set: PeerSet) -> bool {
        let replicas = &self.map.spaces[space].slabs[slab].entry.replicas;
        let has = |replica: &Replica| self.sessions.peers.of(replica.server).is_some_and(|peer| set.has(peer));
        !replicas.is_empty() && replicas.iter().all(has)
    }

    /// What the map says of a slab with these of its copies; lost, without any.
    pub fn entry_of(&self, space: SpaceIndex, slab: SlabNo, keep: PeerSet) -> MapEntry {
        if keep.is_empty() {
            return MapEntry::lost();
        }
        let replicas = &self.map.spaces[space].slabs[slab].entry.replicas;
        let stays = |replica: &&Replica| self.sessions.peers.of(replica.server).is_some_and(|peer| keep.has(peer));
        MapEntry::of(replicas.iter().filter(stays).copied())
    }

    /// Whether copies may be dropped for the sake of those that stay: one of these must have lived after that was wanted.
    /// Until then it may be dead and nobody has noticed; what is left of its pages then is what was about to be dropped,
    /// at a server that may only be slow. So those that stay are asked. Their answer brings the slab up again, as does
    /// their silence.
    pub fn may_leave(
        &mut self,
        now: Time,
        (space, slab): (SpaceIndex, SlabNo),
        doubt: Option<Doubt>,
        leaving: PeerSet,
        stay: PeerSet,
    ) -> bool {
        let since = doubt.filter(|doubt| doubt.leaving == leaving).map_or(now, |doubt| doubt.since);
        if leaving.is_empty() || stay.iter().any(|peer| self.sessions.peers[peer].lived_at() >= since) {
            return true;
        }
        self.map.spaces[space].slabs[slab].doubt = Some(Doubt { leaving, since });
        for peer_idx in stay.iter() {
            self.sessions.peers[peer_idx].doubt(now, since);
        }
        false
    }

    /// Whether all servers of a slab will hear that it is theirs again. One that is away would keep it, should this owner end
    /// before that is back.
    pub fn can_notify_all(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let mut copies = self.sessions.peers_of(&self.map.spaces[space].slabs[slab].entry).iter();
        copies.all(|peer| self.sessions.peers[peer].is_up() && self.sessions.returns[peer].len() == 0)
    }

    /// The nearest server that keeps its pages on a disk: the one on this machine, if there is one. A slab there is one that
    /// can be written, no more.
    pub fn overflow_disk(&mut self, taken: PeerSet) -> Option<PeerIndex> {
        if !self.config.uses_overflow_disk {
            return None;
        }
        let open = |peer: &PeerIndex| {
            !taken.has(*peer) && self.sessions.peers[*peer].can_lend() && self.sessions.peers[*peer].has_overflow_disk()
        };
        let all = self.sessions.peers.indices().filter(open);
        let pick = all.min_by_key(|peer| self.sessions.peers[*peer].round_trip())?;
        self.sessions.peers[pick].take_slab();
        Some(pick)
    }
}
