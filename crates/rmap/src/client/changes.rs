//! Does what the control plane's answers mean: slabs are brought up to what the map says, and a space that another owner has is
//! left alone.

use crate::client::index::SpaceIndex;
use crate::client::ops::Stage;
use crate::client::questions::Question;
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::client::{Client, Failure};
use crate::control::{ControlReply, ControlRequest, MapEntry, Today};
use crate::units::{Generation, SlabNo, Time};

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

    /// How the space is today.
    fn followed_seen(&mut self, now: Time, space: SpaceIndex, today: Today) {
        self.pool.now = now;
        self.pool.map.spaces[space].following.end_look();
        if today.sealed {
            return self.was_sealed(now, space, today);
        }
        let Today { generation, map, .. } = today;
        let state = &mut self.pool.map.spaces[space];
        state.generation = state.generation.max(generation);
        self.pool.map.note_parity(space, &map);
        for (slab, entry) in map {
            if self.pool.map.spaces[space].layout.is_data(slab)
                && entry != self.pool.map.spaces[space].slabs[slab].entry
            {
                self.pages.follow_elsewhere(&mut self.pool, &mut self.parity, space, slab, entry);
            }
        }
        for op in self.pages.ops.select(|op| op.stage == Stage::Waiting && op.space == space) {
            self.pages.try_follow(&mut self.pool, &mut self.parity, op);
        }
    }

    /// Nobody writes any more: this client is a reader like those that began after that.
    fn was_sealed(&mut self, now: Time, space: SpaceIndex, today: Today) {
        for op in self.pages.ops.select(|op| op.stage == Stage::Active && op.space == space) {
            self.pages.follow_anew(&mut self.pool, &mut self.parity, op);
        }
        let state = &mut self.pool.map.spaces[space];
        state.following.forget_retry();
        for slab in &mut state.slabs {
            self.pool.map.tables.give_back(std::mem::take(&mut slab.versions).into());
            (slab.phase, slab.entry) = (Phase::Vacant, MapEntry::default());
        }
        // It knows of no generation what a reader knows, so today's is newer; and nothing begins before it is there.
        (state.tenure, state.generation, state.is_stale) = (Tenure::Reader, Generation(0), true);
        self.space_seen(now, space, today, Tenure::Reader);
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
        self.parity.forget(space);
        for slab in self.pool.map.spaces[space].slabs.indices() {
            self.redundancy.end_repair(&mut self.pool, space, slab);
        }
        self.pages.fail_ops(&mut self.pool, &mut self.redundancy, &mut self.parity, space, None, Failure::Fenced);
        self.pages.resume_space(&mut self.pool, &mut self.parity, space);
        self.pages.refuse_confirms(space);
    }
}
