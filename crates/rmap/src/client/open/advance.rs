//! Looks at a slab and does what comes next: servers are asked for it, its copies are listed, compared and opened.

use smallvec::SmallVec;

use crate::client::index::SpaceIndex;
use crate::client::ledger::Table;
use crate::client::open::{ListStep, Listing};
use crate::client::outcome::COPIES_MAX;
use crate::client::peer::PeerSet;
use crate::client::sealed::Tenure;
use crate::client::slab::{Candidate, Candidates, GrantStep, Phase};
use crate::client::{Client, Failure};
use crate::control::{MapEntry, Replica};
use crate::units::{SlabNo, Time};

impl Client {
    /// Looks at a slab and does what comes next, whatever has happened to it.
    pub(in crate::client) fn advance(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) {
        #[cfg(test)]
        {
            self.advanced += 1;
        }
        if self.pool.map.spaces[space].is_taken || self.pool.map.spaces[space].is_stale {
            return;
        }
        if self.pool.map.is_followed(space) {
            return self.pages.advance_followed(&mut self.pool, &mut self.parity, space, slab);
        }
        self.pages.end_refusal(&mut self.pool, &mut self.parity, now, space);
        self.pool.notify_who_asked(space);
        if !self.pool.sessions.peers.long_silent().is_empty() || self.pages.ops.any_reported() {
            self.pages.maintain_unanswered(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
        self.pages.maintain_unmapped(&mut self.pool, &mut self.redundancy, &mut self.parity, now, space, slab);
        if self.parity.advance_grouped(&mut self.pool, &mut self.pages, &mut self.redundancy, now, space, slab) {
            return;
        }
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        if matches!(state.phase, Phase::Opening(_)) && state.entry.lost {
            state.phase = Phase::Lost;
        }
        match self.pool.map.spaces[space].slabs[slab].phase {
            Phase::Vacant => {
                let size = self.pool.map.size;
                let waits = |op: &crate::client::ops::Operation| {
                    op.stage == crate::client::ops::Stage::Waiting
                        && op.kind != crate::client::ops::Kind::Read
                        && op.space == space
                        && size.slab(op.page) == Some(slab)
                };
                let wanted = self.pages.ops.any(waits);
                if wanted && self.pool.map.is_in_frozen(space, slab) {
                    // It is of its group that it waits to be free.
                } else if wanted && self.pool.ends_unasked(now) && self.pages.ops.any(|op| waits(op) && !op.is_own) {
                    self.pages.end_unmapped(&mut self.pool, &mut self.redundancy, &mut self.parity, now, space, slab);
                } else if wanted {
                    self.pool.map.spaces[space].slabs[slab].phase = Phase::Granting(Candidates::default());
                    self.advance_granting(now, space, slab);
                }
            }
            Phase::Granting(_) => self.advance_granting(now, space, slab),
            Phase::Opening(_) => self.advance_opening(now, space, slab),
            Phase::Open if self.pool.map.spaces[space].tenure == Tenure::Reader => {
                self.pool.look_after(&self.parity, space, slab)
            }
            Phase::Open => {
                self.redundancy.advance_open(&mut self.pool, &mut self.pages, &mut self.parity, now, space, slab)
            }
            Phase::Leaving => {
                self.pages.wait_for_map(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab)
            }
            Phase::Followed => {}
            Phase::Lost => {
                self.pages.fail_ops(
                    &mut self.pool,
                    &mut self.redundancy,
                    &mut self.parity,
                    space,
                    Some(slab),
                    Failure::Lost,
                );
                self.pool.look_after_if_reader(&self.parity, space, slab);
            }
        }
    }

    fn advance_granting(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) {
        if self.pool.map.spaces[space].slabs[slab].pending.is_some() {
            return self.pages.wait_for_map(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
        let Phase::Granting(mut candidates) =
            std::mem::replace(&mut self.pool.map.spaces[space].slabs[slab].phase, Phase::Vacant)
        else {
            return;
        };
        let copies = self.parity.wanted_copies(&self.pool, space, slab);
        let silent = |c: &Candidate| self.pool.sessions.peers[c.peer].is_down() && c.step != GrantStep::Granted;
        let asked_in_vain: SmallVec<[Candidate; COPIES_MAX]> =
            candidates.asked.iter().filter(|c| silent(c) && c.step == GrantStep::Asked).copied().collect();
        candidates.refuse(silent);
        for candidate in asked_in_vain {
            self.redundancy.forget_grant(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, candidate);
        }
        while candidates.asked.len() < copies {
            let taken = candidates.peers();
            let nobody_else = candidates.asked.is_empty() && !self.pool.sessions.someone_may_come();
            let picked = self.redundancy.pick_server(&mut self.pool, space, taken);
            let last = || if nobody_else { self.pool.overflow_disk(taken) } else { None };
            let Some(peer) = picked.or_else(last) else { break };
            let Some(grant) = self.pool.map.spaces[space].next_version(false) else { break };
            candidates.asked.push(Candidate { peer, grant, step: GrantStep::Fencing });
        }
        for candidate in &mut candidates.asked {
            if candidate.step == GrantStep::Fencing
                && self.pool.fence(space, candidate.peer)
                && self.pool.grant(space, slab, candidate.peer, candidate.grant)
            {
                candidate.step = GrantStep::Asked;
            }
        }
        if candidates.asked.is_empty() {
            // The phase is vacant again: the next write tries anew. A server that may still come is waited for.
            if self.pool.sessions.someone_may_come() {
                return;
            }
            return match self.pool.patience_ends(now) {
                Some(at) => self.pool.map.mark_at(at, space, slab),
                None => self.pages.decline_full(&mut self.pool, now, space, slab),
            };
        }
        let all_granted = candidates.asked.iter().all(|candidate| candidate.step == GrantStep::Granted);
        let replica = |c: &Candidate| Replica { server: self.pool.sessions.peers[c.peer].info().id, grant: c.grant };
        let entry = MapEntry::of(candidates.asked.iter().map(replica));
        self.pool.map.spaces[space].slabs[slab].phase = Phase::Granting(candidates);
        if all_granted {
            self.pool.map.propose(space, slab, entry);
            self.pages.wait_for_map(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
    }

    fn advance_opening(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) {
        let doubt = self.pool.map.spaces[space].slabs[slab].doubt.take();
        let is_copied = self.redundancy.copies.any_of(space, slab);
        let Some(listings) = self.pool.list_copies(space, slab, is_copied) else { return };
        let away =
            |listing: &Listing| self.pool.sessions.peers[listing.peer].is_down() && listing.step != ListStep::Bad;
        let waits = |listing: &Listing| {
            matches!(listing.step, ListStep::Fencing | ListStep::Asked)
                && !self.pool.sessions.peers[listing.peer].is_down()
        };
        let usable =
            |listing: &Listing| listing.step == ListStep::Done && !self.pool.sessions.peers[listing.peer].is_down();
        let waiting = listings.iter().any(waits);
        if self.pool.map.spaces[space].tenure == Tenure::Reader {
            if waiting {
                self.pool.map.spaces[space].slabs[slab].phase = Phase::Opening(listings);
            } else {
                self.pool.map.spaces[space].slabs[slab].phase = Phase::Opening(Vec::new());
                self.read_listings(space, slab, &listings);
            }
            return;
        }
        let replicas = &self.pool.map.spaces[space].slabs[slab].entry.replicas;
        let is_good = |replica: &&Replica| listings.iter().any(|l| usable(l) && l.grant == replica.grant);
        let good = MapEntry::of(replicas.iter().filter(is_good).copied());
        let silent: PeerSet = listings.iter().filter(|l| away(l)).map(|listing| listing.peer).collect();
        let is_whole = !waiting && good.replicas.len() == replicas.len();
        let is_same = is_whole && self.redundancy.reconcile(&mut self.pool, &mut self.parity, space, slab, &listings);
        self.pool.map.spaces[space].slabs[slab].phase = Phase::Opening(listings);
        if is_same {
            return self.opens(space, slab);
        }
        if waiting || is_whole {
            return;
        }
        if good.replicas.is_empty() {
            if silent.is_empty() {
                self.pool.map.propose(space, slab, MapEntry::lost());
            }
        } else if self.pool.may_leave(now, (space, slab), doubt, silent, self.pool.sessions.peers_of(&good)) {
            self.pool.map.propose(space, slab, good);
        }
    }

    fn opens(&mut self, space: SpaceIndex, slab: SlabNo) {
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        if let Phase::Opening(listings) = std::mem::replace(&mut state.phase, Phase::Open) {
            listings.into_iter().for_each(|listing| self.pool.map.tables.give_back(listing.list));
        }
        self.pool.map.spaces[space].slabs[slab].table = Table::Unknown;
        self.redundancy.count_content(&mut self.pool, space, slab);
        self.parity.note_change(&mut self.pool, &mut self.pages, &mut self.redundancy, space, slab);
        self.pages.map_settled(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        self.pool.map.mark(space, slab);
    }
}
