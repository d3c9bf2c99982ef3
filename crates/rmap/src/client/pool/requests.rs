//! What servers are told and asked about a slab or a space: who owns it, for a copy, which copy they have, to let another server in,
//! to take a slab back.
//!
//! Each of these makes one request. It fails if too much is asked already; then the slab is looked at again when there is room.

use crate::client::exchange::{Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::pool::Pool;
use crate::client::returns::Return;
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::message::Op;

impl Pool {
    /// Makes sure that a server knows this owner. `true` if it does. One that does not answer is told when it does.
    pub fn fence(&mut self, space: SpaceIndex, peer: PeerIndex) -> bool {
        let state = &mut self.map.spaces[space];
        if state.fenced_at.has(peer) {
            return true;
        }
        if !state.fencing.has(peer) && !state.refusing.has(peer) && self.sessions.peers[peer].is_up() {
            let owner = if state.tenure.changes_map() { state.owner } else { 0 };
            let (page, version) = (PageNo(0), Version::from_bits(owner));
            let role = Role::Fence;
            let request = Request { role, peer, op: Op::Fence, class: Class::Demand, space, page, version };
            if self.ask(request) {
                self.map.spaces[space].fencing.insert(peer);
            }
        }
        false
    }

    /// A server knows this owner from now on. Until then one before it might have been lent something there.
    pub fn was_let_in(&mut self, space: SpaceIndex, peer: PeerIndex) {
        self.map.spaces[space].fenced_at.insert(peer);
        self.map.spaces[space].disbelieved.remove(peer);
        self.map.leftovers.forget(|of, at| (of, at) == (space, peer));
        self.look_for_leftovers_again(space, peer);
    }

    /// Servers that said not to know this reader, and could not be told at once.
    pub fn notify_who_asked(&mut self, space: SpaceIndex) {
        for peer in self.map.spaces[space].unknown_at.iter() {
            self.fence(space, peer);
        }
    }

    /// Asks the copies of a slab in the map that nothing is known of yet.
    pub fn check_copies(&mut self, space: SpaceIndex, slab: SlabNo) {
        let copies = self.sessions.peers_of(&self.map.spaces[space].slabs[slab].entry);
        for peer in copies.iter() {
            if self.fence(space, peer) {
                self.check_copy(space, slab, peer);
            }
        }
    }

    /// Asks for a copy that nothing is known of yet.
    fn check_copy(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
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

    /// Asks a server for a slab, as this grant of it.
    pub fn grant(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, grant: Version) -> bool {
        let page = self.map.first_page(slab);
        let request =
            Request { role: Role::Grant, peer, op: Op::Grant, class: Class::Demand, space, page, version: grant };
        self.ask(request)
    }

    /// Asks a copy which versions its pages have, from this one on.
    pub fn ask_versions(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, index: usize) -> bool {
        let page = self.map.size.page(slab, index);
        let (role, version) = (Role::Versions, Version::NEVER);
        self.ask(Request { role, peer, op: Op::Versions, class: Class::Demand, space, page, version })
    }

    /// Tells the target who may fill the slab.
    pub fn admit(&mut self, space: SpaceIndex, slab: SlabNo, source: Option<PeerIndex>) -> bool {
        let Some(repair) = &self.map.spaces[space].slabs[slab].repair else { return false };
        let (peer, version) = (repair.peer, repair.grant);
        let (role, op, page) = (Role::Admit { source }, Op::Admit, self.map.first_page(slab));
        self.ask(Request { role, peer, op, class: Class::Demand, space, page, version })
    }

    /// Has the source begin, or asks it how far it is.
    pub fn order(&mut self, space: SpaceIndex, slab: SlabNo, source: PeerIndex) -> bool {
        let id = self.sessions.peers[source].info().id;
        let replicas = &self.map.spaces[space].slabs[slab].entry.replicas;
        let Some(version) = replicas.iter().find(|replica| replica.server == id).map(|replica| replica.grant) else {
            return false;
        };
        let (role, op, page) = (Role::Order, Op::Copy, self.map.first_page(slab));
        self.ask(Request { role, peer: source, op, class: Class::Demand, space, page, version })
    }

    /// Nothing is wanted of a source any more.
    pub fn cancel_order(&mut self, space: SpaceIndex, slab: SlabNo) {
        let page = self.map.first_page(slab);
        let ours = self.sessions.exchanges.find(|e| e.role == Role::Order && e.space == space && e.page == page);
        if let Some(order) = ours {
            self.sessions.end_exchange(order.id);
        }
    }

    /// Tells servers that answer what is theirs again.
    pub fn send_returns(&mut self) {
        for peer in self.sessions.peers.indices() {
            for _ in 0..self.sessions.returns[peer].len() {
                let next = self.sessions.returns[peer].next().filter(|_| self.sessions.peers[peer].is_up());
                let Some(Return { space, slab, grant }) = next else { break };
                if self.map.spaces[space].is_stale {
                    // It is not known yet whether this client may speak for it.
                    self.sessions.returns[peer].put_off();
                    continue;
                }
                let may_speak = !self.map.spaces[space].is_taken;
                if may_speak {
                    if !self.fence(space, peer) {
                        break;
                    }
                    let (role, op, page) = (Role::Release, Op::Release, self.map.first_page(slab));
                    let class = Class::Rebuild;
                    if !self.ask(Request { role, peer, op, class, space, page, version: grant }) {
                        break;
                    }
                }
                self.sessions.returns[peer].pop(may_speak);
            }
        }
    }

    /// A server cannot talk to this client. `None` if that is not what the datagram proves.
    pub fn was_refused(&mut self, receiver: u32, datagram: &[u8]) -> Option<()> {
        let peer = self.sessions.peers.of_number(receiver)?;
        let is_refused = self.sessions.peers[peer].has_refused(receiver, datagram, &self.config.pool)?;
        self.stats.incompatible += u64::from(is_refused);
        Some(())
    }

    /// Slabs are looked at, if a server's load has changed and it is time.
    pub fn look_at_load(&mut self, now: Time) {
        if self.sessions.is_load_due(now) {
            self.map.mark_all();
        }
    }
}
