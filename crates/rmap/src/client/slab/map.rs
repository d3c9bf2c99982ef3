//! Brings slabs up to what the map says, and the map up to what slabs need.

use super::{Pending, Phase};
use crate::client::Client;
use crate::client::exchange::Role;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::questions::Question;
use crate::client::redundancy::Redundancy;
use crate::client::sealed::Tenure;
use crate::client::sessions::Sessions;
use crate::control::{Change, ControlReply, ControlRequest, MapEntry};
use crate::units::{PageNo, SlabNo, Time};

impl Client {
    /// The control plane answered.
    pub(in crate::client) fn control_answered(&mut self, now: Time, question: Question, reply: ControlReply) {
        let (space, id) = (question.space, question.id);
        match (question.request, reply) {
            (ControlRequest::Change(change), reply) => {
                let slab = change.slab;
                self.pool.map.mark(space, slab);
                match reply {
                    // Where an earlier answer was lost, it is our own entry that stands there.
                    ControlReply::Conflict(entry) if entry != change.entry => self.space_taken(space),
                    ControlReply::Done | ControlReply::Conflict(_) => self.map_changed(space, slab, change.entry),
                    _ => self.space_taken(space),
                }
            }
            (ControlRequest::Confirm { .. }, ControlReply::Done) => self.pages.confirmed(&mut self.pool, space, id),
            (ControlRequest::Confirm { .. }, _) => self.space_taken(space),
            (_, ControlReply::Seen(today)) if self.pool.map.is_followed(space) => self.followed_seen(now, space, today),
            (_, ControlReply::Seen(today)) => self.space_seen(now, space, today, Tenure::Reader),
            (_, ControlReply::Kept(today)) => self.space_seen(now, space, today, Tenure::Keeper),
            _ => self.space_gone(space),
        }
    }

    fn map_changed(&mut self, space: SpaceIndex, slab: SlabNo, entry: MapEntry) {
        let before = self.pool.sessions.peers_of(&self.pool.map.spaces[space].slabs[slab].entry);
        let after = self.pool.sessions.peers_of(&entry);
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        let old = std::mem::replace(&mut state.entry, entry);
        state.pending = None;
        let left = before.minus(after);
        let given_back = matches!(state.phase, Phase::Leaving);
        let is_parity = self.pool.map.spaces[space].layout.is_parity(slab);
        self.pool.stats.slabs_given_back += u64::from(given_back && !is_parity);
        self.pool.stats.copies_left += if given_back { 0 } else { left.len() as u64 };
        self.pool.stats.copies_joined += if before.is_empty() { 0 } else { after.minus(before).len() as u64 };
        for replica in &old.replicas {
            if let Some(peer) = self.pool.sessions.peers.of(replica.server).filter(|peer| left.has(*peer)) {
                self.redundancy.forget_copy(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, peer);
                self.pool.sessions.release(space, slab, peer, replica.grant);
                let state = &mut self.pool.map.spaces[space].slabs[slab];
                state.failed.remove(peer);
                state.checked.remove(peer);
                self.redundancy.end_repair_at(&mut self.pool, space, slab, peer);
            }
        }
        let is_lost = self.pool.map.spaces[space].slabs[slab].entry.lost && !self.pool.map.is_grouped(space, slab);
        if is_lost {
            // There is nothing left to copy.
            self.redundancy.abort_repair(&mut self.pool, &mut self.pages, &mut self.parity, space, slab);
        }
        self.pool.map.mark_group(space, slab);
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        if is_lost {
            state.phase = Phase::Lost;
            self.pool.stats.slabs_lost += 1;
        } else if matches!(state.phase, Phase::Granting(_)) {
            state.make_table(&mut self.pool.map.tables);
            state.phase = Phase::Open;
            self.redundancy.count_content(&mut self.pool, space, slab);
        } else if matches!(state.phase, Phase::Leaving) {
            state.phase = Phase::Vacant;
            state.content.clear();
            self.pool.map.tables.give_back(std::mem::take(&mut state.versions).into());
        }
        if is_parity {
            self.parity.parity_changed(&mut self.pool, &mut self.pages, &mut self.redundancy, space, slab);
        }
        let state = &self.pool.map.spaces[space].slabs[slab];
        if !left.is_empty() && !state.disputed.is_empty() && matches!(state.phase, Phase::Open) {
            // What was disputed may be clear without the copies that left.
            let entry = state.entry.clone();
            return self.reopen(space, slab, entry);
        }
        self.pages.map_settled(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
    }

    /// Another owner has the space. Of a sealed one nothing is lost but the right to keep it.
    pub(in crate::client) fn space_taken(&mut self, space: SpaceIndex) {
        match self.pool.map.spaces[space].tenure {
            Tenure::Owner => self.space_gone(space),
            Tenure::Reader | Tenure::Keeper => self.is_outdated(space),
            // The next look at the map tells who owns it.
            Tenure::Follower => {}
        }
    }

    /// Nothing of the space can be done here any more.
    pub(in crate::client) fn space_gone(&mut self, space: SpaceIndex) {
        let state = &mut self.pool.map.spaces[space];
        if state.is_taken {
            return;
        }
        state.is_taken = true;
        state.watch = None;
        self.pool.map.questions.forget(space, |_| true);
        while let Some(exchange) = self.pool.sessions.exchanges.find(|exchange| exchange.space == space) {
            self.redundancy.cancel(&mut self.pool, &mut self.pages, &mut self.parity, exchange.id);
        }
        self.redundancy.copies.end_all(space);
        self.parity.ledger.forget(space);
        self.parity.forget_groups(space);
        for slab in self.pool.map.spaces[space].slabs.indices() {
            self.redundancy.end_repair(&mut self.pool, space, slab);
        }
        self.pages.fail_ops(
            &mut self.pool,
            &mut self.redundancy,
            &mut self.parity,
            space,
            None,
            crate::client::Failure::Fenced,
        );
        self.pages.resume_space(&mut self.pool, &mut self.parity, space);
        self.pages.refuse_confirms(space);
    }
}

impl Redundancy {
    /// Everything under way at a copy that is not one any more.
    pub(in crate::client) fn forget_copy(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
    ) {
        let size = pool.map.size;
        loop {
            let found = pool.sessions.exchanges.find(|exchange| {
                exchange.space == space
                    && exchange.peer == peer
                    && size.slab(exchange.page) == Some(slab)
                    && !(exchange.role.is_of_space() || exchange.role == Role::Release)
            });
            let Some(exchange) = found else { break };
            self.cancel(pool, pages, parity, exchange.id);
        }
        // One that is still being read elsewhere would be written here once it has come.
        self.end_copies_to(pool, parity, space, slab, peer);
        pages.unsend_writes(pool, space, slab, peer);
    }
}

impl Pool {
    /// Which copies must have a write before it is acknowledged: those of the map as it is, and as it may already be.
    pub(in crate::client) fn required(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let slab = &self.map.spaces[space].slabs[slab];
        let pending = slab.pending.as_ref().map(|pending| self.sessions.peers_of(&pending.entry)).unwrap_or_default();
        self.sessions.peers_of(&slab.entry).union(pending)
    }
}

impl Map {
    /// Asks the control plane for another set of copies. Only one change of a slab is under way at a time.
    pub(in crate::client) fn propose(&mut self, space: SpaceIndex, slab: SlabNo, entry: MapEntry) {
        let state = &mut self.spaces[space];
        debug_assert!(state.tenure.changes_map(), "readers change no map");
        let entry = MapEntry { revision: state.slabs[slab].entry.revision + 1, ..entry };
        let (id, generation) = (state.id, state.generation);
        let change = Change { space: id, generation, slab, entry: entry.clone() };
        state.slabs[slab].pending = Some(Pending { entry });
        self.ask_control(space, ControlRequest::Change(change));
    }

    pub(in crate::client) fn ask_control(&mut self, space: SpaceIndex, request: ControlRequest) {
        self.questions.ask(space, request);
    }

    pub(in crate::client) fn first_page(&self, slab: SlabNo) -> PageNo {
        self.size.page(slab, 0)
    }
}

impl Sessions {
    /// Servers of a map entry.
    pub(in crate::client) fn peers_of(&self, entry: &MapEntry) -> PeerSet {
        entry.replicas.iter().filter_map(|replica| self.peers.of(replica.server)).collect()
    }
}
