//! Servers are told of the owner of a space before they are asked for anything of it.
//!
//! An owner and a keeper tell each server that has a copy before they count on that copy. A server that still has what it was
//! told never says to them that it does not know their generation. The copy of one that says so counts as lost.
//!
//! A reader of a sealed space may have begun when a server was away. Such a server answers that it does not know the reader's
//! generation. That says nothing of its copy. So the reader tells it, asks it nothing until then, and then asks it again. A copy
//! is lost only if its server does not hold the slab, has another grant of it, or has begun a new life.
//!
//! A server that has something of a space never forgets its owner. If it says that it does not know the generation, is told, and
//! says so once more, it is not to be relied on. Its copies count as lost. So nobody is told and asked over and over.
//!
//! A server may say to a reader that the space has a newer generation. The reader then asks for the map, and believes the server
//! if the map says so, too. If the map does not, the server *refuses*: the other copies are asked, and this server again after a
//! while. It loses no copy for that, because honest servers say so, too, if a control plane was restored from a backup.

use std::time::Duration;

use super::Client;
use super::exchange::{EXCHANGES_MAX, Exchange, Request, Role};
use super::ops::{Kind, Operation, Stage};
use super::peer::PeerSet;
use super::sealed::{Tenure, Watch};
use super::slab::{Phase, Space};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::message::{Op as Wire, Status};

/// A server that refuses is asked again after so long. No honest one refuses for good.
const REFUSED_FOR: Duration = Duration::from_secs(5);

impl Role {
    /// What a reader asks of a copy that a server is thought to have.
    fn is_about_copy(self) -> bool {
        matches!(self, Role::Read { .. } | Role::Strip { .. } | Role::Scrub | Role::Versions | Role::Check)
    }
}

impl Client {
    pub(super) fn fence_answered(&mut self, space: SpaceIndex, peer: PeerIndex, status: Status) {
        let state = &mut self.pool.map.spaces[space];
        state.fencing.remove(peer);
        let was_asked = state.unknown_at.has(peer);
        if status == Status::Ok {
            self.pool.was_let_in(space, peer);
        } else {
            self.redundancy.was_not_let_in(&mut self.pool, &mut self.parity, space, peer);
        }
        self.pool.map.spaces[space].unknown_at.remove(peer);
        self.redundancy.reservations.poll_soon(space);
        self.pool.map.mark_all_of(space);
        if was_asked && status == Status::Ok {
            self.pages.ask_again(&mut self.pool, &mut self.parity, space);
        } else if was_asked {
            self.has_nothing(space, peer);
        }
    }

    /// So it has no copy of its slabs either.
    fn has_nothing(&mut self, space: SpaceIndex, peer: PeerIndex) {
        for slab in self.pool.map.spaces[space].slabs.indices() {
            if self.pool.sessions.peers_of(&self.pool.map.spaces[space].slabs[slab].entry).has(peer) {
                self.redundancy.copy_lost(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, peer);
            }
        }
    }

    /// A server that was asked for something of a copy does not know this reader. `true`: it will be told, and asked again. `false`: it
    /// was told for that already, or by an owner or keeper.
    pub(super) fn is_to_be_notified(&mut self, exchange: &Exchange) -> bool {
        let Exchange { role, space, peer, .. } = *exchange;
        let state = &mut self.pool.map.spaces[space];
        let is_reader = state.tenure == Tenure::Reader;
        if !is_reader || !role.is_about_copy() || state.notified_again.has(peer) {
            return false;
        }
        self.pool.stats.notified_again += 1;
        state.notified_again.insert(peer);
        state.unknown_at.insert(peer);
        state.fenced_at.remove(peer);
        self.is_not_asked(exchange);
        // What else is under way there would be answered so, too, and may be so after it was told.
        for slot in 0..EXCHANGES_MAX {
            let ours = |e: &Exchange| e.space == space && e.peer == peer && e.role.is_about_copy();
            if let Some(other) = self.pool.sessions.exchanges.at(slot).filter(ours) {
                self.pool.sessions.end_exchange(other.id);
                self.is_not_asked(&other);
            }
        }
        self.pool.fence(space, peer);
        true
    }

    /// As if a server had never been asked.
    fn is_not_asked(&mut self, exchange: &Exchange) {
        let Exchange { role, space, peer, page, .. } = *exchange;
        if let Role::Read { op } = role {
            self.pages.ops.get(op).sent.remove(peer);
        }
        self.redundancy.was_cancelled(&mut self.pool, &mut self.pages, &mut self.parity, exchange);
        if let Some(slab) = self.pool.map.slab_of(page).filter(|_| role == Role::Versions) {
            self.pool.map.list_again(space, slab, peer);
        }
    }

    /// A server says that another client has a newer generation of the space. Of a sealed one the map tells whether that is so.
    pub(super) fn says_newer(&mut self, space: SpaceIndex, peer: PeerIndex) {
        let state = &mut self.pool.map.spaces[space];
        if matches!(state.tenure, Tenure::Reader | Tenure::Keeper) {
            state.accused.insert(peer);
            // What is being looked up may be from before.
            state.watch.iter_mut().for_each(Watch::looks_again);
        }
        self.space_taken(space);
    }
}

impl Redundancy {
    /// A server has no room for one more space, or says that this one has a newer owner and is not believed.
    fn was_not_let_in(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex, peer: PeerIndex) {
        let mut was_wanted = false;
        pool.map.spaces[space].looked_at.insert(peer);
        self.reservations.keeps_nothing(space, peer);
        pool.sessions.returns[peer].forget(space);
        for slab in pool.map.spaces[space].slabs.indices() {
            let state = &mut pool.map.spaces[space].slabs[slab];
            if let Phase::Granting(candidates) = &mut state.phase {
                was_wanted |= candidates.asked.iter().any(|candidate| candidate.peer == peer);
                candidates.refuse(|candidate| candidate.peer == peer);
            }
            if self.end_repair_at(pool, space, slab, peer).is_some() {
                was_wanted = true;
                parity.has_refused(pool, space, slab, peer);
            }
        }
        if was_wanted {
            pool.sessions.peers[peer].found_full();
        }
    }
}

impl Pages {
    /// Those who refused are asked again when it is time.
    pub(super) fn end_refusal(&mut self, pool: &mut Pool, parity: &mut Parity, now: Time, space: SpaceIndex) {
        let state = &mut pool.map.spaces[space];
        if !state.refusing.is_empty() && now >= state.refused_until {
            state.refusing = PeerSet::default();
            pool.map.mark_all_of(space);
            self.ask_again(pool, parity, space);
        }
    }

    /// A page has no copy that may be asked, but for those whose servers refuse. `true` if it has waited for them for long enough.
    pub(super) fn is_refused(&self, pool: &Pool, op: OpIndex, slab: SlabNo) -> bool {
        let Operation { space, since, .. } = *self.ops.peek(op);
        let copies = pool.sound_copies(space, slab);
        let all_refuse = !copies.is_empty() && copies.is_subset_of(pool.map.spaces[space].refusing);
        all_refuse && pool.config.error_after.is_some_and(|error_after| pool.now.since(since) >= error_after)
    }

    /// Servers may be asked that could not be until now: reads that wait for that go on.
    pub(super) fn ask_again(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex) {
        let reads = |op: &Operation| op.stage == Stage::Active && op.kind == Kind::Read && op.space == space;
        for op in self.ops.select(reads) {
            if !self.is_answer_coming(pool, parity, op) {
                self.ask_for_page(pool, parity, op);
            }
        }
    }
}

impl Pool {
    /// Makes sure that a server knows this owner. `true` if it does. One that does not answer is told when it does.
    pub(super) fn fence(&mut self, space: SpaceIndex, peer: PeerIndex) -> bool {
        let state = &mut self.map.spaces[space];
        if state.fenced_at.has(peer) {
            return true;
        }
        if !state.fencing.has(peer) && !state.refusing.has(peer) && self.sessions.peers[peer].is_up() {
            let owner = if state.tenure.changes_map() { state.owner } else { 0 };
            let (page, version) = (PageNo(0), Version::from_bits(owner));
            let role = Role::Fence;
            let request = Request { role, peer, op: Wire::Fence, class: Class::Demand, space, page, version };
            if self.ask(request) {
                self.map.spaces[space].fencing.insert(peer);
            }
        }
        false
    }

    /// A server knows this owner from now on. Until then one before it might have been lent something there.
    fn was_let_in(&mut self, space: SpaceIndex, peer: PeerIndex) {
        self.map.spaces[space].fenced_at.insert(peer);
        self.map.spaces[space].disbelieved.remove(peer);
        self.map.leftovers.forget(|of, at| (of, at) == (space, peer));
        self.look_for_leftovers_again(space, peer);
    }

    /// Servers that said not to know this reader, and could not be told at once.
    pub(super) fn notify_who_asked(&mut self, space: SpaceIndex) {
        for peer in self.map.spaces[space].unknown_at.iter() {
            self.fence(space, peer);
        }
    }

    /// Copies that may be asked for a page, whether their servers answer or not.
    pub(super) fn copies_to_read(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let Space { unknown_at, refusing, .. } = &self.map.spaces[space];
        self.sound_copies(space, slab).minus(*unknown_at).minus(*refusing)
    }
}

impl Map {
    /// The map knows of no newer generation than those have heard of who said so.
    pub(super) fn refuse_accused(&mut self, now: Time, space: SpaceIndex) {
        let state = &mut self.spaces[space];
        let accused = std::mem::take(&mut state.accused);
        if !accused.is_empty() {
            state.refusing = state.refusing.union(accused);
            state.refused_until = now + REFUSED_FOR;
            self.mark_at(now + REFUSED_FOR, space, SlabNo(0));
        }
    }
}
