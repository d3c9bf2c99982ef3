//! Restores copies, and moves those that a server wants to be rid of, step by step (`../repair.rs`).

use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::open::Listing;
use crate::client::ops::{Kind, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::pool::transfer::Outcome;
use crate::client::redundancy::Redundancy;
use crate::client::repair::{Repair, Step};
use crate::client::sealed::Tenure;
use crate::client::slab::{Doubt, Phase};
use crate::client::{Fault, trims};
use crate::control::{MapEntry, Replica};
use crate::units::{SlabNo, Time};

impl Redundancy {
    /// Does what comes next for an open slab of an owner or keeper: copies leave, or one is made.
    pub fn advance_open(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        now: Time,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let state = &mut pool.map.spaces[space].slabs[slab];
        let doubt = state.doubt.take();
        if state.pending.is_some() {
            return;
        }
        let state = &pool.map.spaces[space].slabs[slab];
        let copies = pool.sessions.peers_of(&state.entry);
        let gone: PeerSet = copies.iter().filter(|peer| state.failed.has(*peer)).collect();
        let silent: PeerSet = copies.minus(gone).iter().filter(|peer| pool.sessions.peers[*peer].is_down()).collect();
        let here = copies.minus(gone).minus(silent);
        // Of copies that differ, none is as good as the other.
        let may_drop = here.len() > 1 && state.disputed.is_empty();
        let given_up = if may_drop { pool.sessions.one_to_drop(here) } else { PeerSet::default() };
        let keep = match (here.is_empty(), gone.is_empty()) {
            (false, _) => here.minus(given_up),
            (true, false) => silent,
            // Only silent ones are left: one of them has everything.
            (true, true) => copies,
        };
        if !pool.may_leave(now, (space, slab), doubt, copies.minus(gone).minus(keep), keep) {
            return;
        }
        if keep != copies {
            return pool.map.propose(space, slab, pool.entry_of(space, slab, keep));
        }
        if pool.map.spaces[space].slabs[slab].repair.is_some() {
            self.advance_repair(pool, pages, parity, (space, slab), here, doubt);
        } else {
            self.begin_repair(pool, parity, space, slab, here);
        }
    }

    /// Does what comes next for the copy in the making of a slab.
    pub fn advance_repair(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        (space, slab): (SpaceIndex, SlabNo),
        here: PeerSet,
        doubt: Option<Doubt>,
    ) {
        let now = pool.now;
        let state = &pool.map.spaces[space].slabs[slab];
        let Some(Repair { peer, grant, step, replaces, .. }) = state.repair else { return };
        let joined = state.entry.replicas.iter().any(|replica| replica.grant == grant);
        if joined {
            self.end_repair(pool, space, slab);
            return;
        }
        let is_column = pool.map.spaces[space].layout.is_parity(slab) || pool.map.is_grouped(space, slab);
        let is_hopeless = state.is_stuck || is_column && here.is_empty() && !pool.has_source(space, slab);
        if pool.sessions.peers[peer].is_down() || state.failed.has(peer) || is_hopeless {
            return self.abort_repair(pool, pages, parity, space, slab);
        }
        match step {
            Step::Fencing => {
                if pool.fence(space, peer) && pool.grant(space, slab, peer, grant) {
                    pool.map.set_step(space, slab, Step::Granting);
                }
            }
            Step::Granting => {}
            Step::Transferring(transfer) => {
                if pool.advance_transfer(now, (space, slab), transfer) == Outcome::Fails {
                    self.abort_repair(pool, pages, parity, space, slab);
                }
            }
            Step::Copying => {
                let leaving: PeerSet = replaces.into_iter().collect();
                let stay = here.minus(leaving).union([peer].into_iter().collect());
                if self.copy_missing(pool, parity, space, slab)
                    && !pages.has_unmirrored(pool, space, slab, peer)
                    && pool.may_leave(now, (space, slab), doubt, leaving, stay)
                {
                    pool.map.set_step(space, slab, Step::Joining);
                    let state = &pool.map.spaces[space].slabs[slab];
                    let stays = |r: &&Replica| replaces.is_none() || pool.sessions.peers.of(r.server) != replaces;
                    let new = Replica { server: pool.sessions.peers[peer].info().id, grant };
                    let entry = MapEntry::of(state.entry.replicas.iter().filter(stays).copied().chain([new]));
                    pool.map.propose(space, slab, entry);
                }
            }
            // It joined, and has left again since.
            Step::Joining => self.abort_repair(pool, pages, parity, space, slab),
        }
    }

    /// Copies what the new copy lacks, as far as there is room. `true` if it lacks nothing.
    fn copy_missing(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex, slab: SlabNo) -> bool {
        let pages = pool.map.size.pages();
        let mut complete = true;
        let is_parity = pool.map.spaces[space].layout.is_parity(slab);
        if pool.has(Fault::JoinsEmpty) || is_parity && pool.has(Fault::ParityEarly) {
            return true;
        }
        for pass in 0..2 {
            let Some(repair) = &pool.map.spaces[space].slabs[slab].repair else { return false };
            let (target, first) = (repair.peer, repair.cursor);
            for index in first..pages {
                let state = &pool.map.spaces[space].slabs[slab];
                let lacks = state.repair.as_ref().is_some_and(|repair| repair.list[index] < state.versions[index]);
                if !lacks {
                    continue;
                }
                complete = false;
                if !self.copy_page(pool, parity, space, slab, index, target) {
                    if let Some(repair) = &mut pool.map.spaces[space].slabs[slab].repair {
                        repair.cursor = index;
                    }
                    return false;
                }
            }
            if let Some(repair) = &mut pool.map.spaces[space].slabs[slab].repair {
                repair.cursor = 0;
            }
            // What lies before the cursor may have been written since: one more pass from the start.
            if first == 0 || pass == 1 {
                return complete;
            }
        }
        false
    }

    fn copy_page(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        index: usize,
        target: PeerIndex,
    ) -> bool {
        let up = pool.copies_to_read(space, slab).iter().find(|peer| !pool.sessions.peers[*peer].is_down());
        match up {
            Some(source) => self.start_copy(pool, parity, (space, slab, index), Some(source), target),
            None => {
                pool.can_reconstruct(space, slab) && self.start_copy(pool, parity, (space, slab, index), None, target)
            }
        }
    }

    /// Brings every copy to the greatest version of every page. `true` if all have that already. Writes that the last owner had
    /// not finished may so be finished or, where no copy has them, undone: either is right. Where that would be a trim that
    /// another copy has content beneath, `trims.rs` says what is done.
    pub fn reconcile(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        all: &[Listing],
    ) -> bool {
        let mut behind = false;
        let all = if pool.has(Fault::OpensUnreconciled) { &all[..1] } else { all };
        // The ledger is never trimmed, and who keeps the space writes it.
        let writes = pool.map.spaces[space].tenure == Tenure::Owner || pool.map.spaces[space].layout.is_ledger(slab);
        let mut disputed = Vec::new();
        for index in 0..pool.map.size.pages() {
            let Some(best) = all.iter().max_by_key(|listing| listing.list[index]) else { return false };
            let version = best.list[index];
            let beneath = trims::beneath(all.iter(), index).filter(|_| !pool.has(Fault::BelievesTrims));
            if let Some(kept) = beneath.filter(|_| writes) {
                behind = true;
                pool.map.spaces[space].slabs[slab].versions[index] = kept.list[index];
                if !self.renew(pool, parity, (space, slab, index), kept.peer, best.peer) {
                    return false;
                }
                continue;
            }
            let kept = beneath.map(|listing| listing.list[index]);
            if pool.map.spaces[space].slabs[slab].take_listed(index, version, kept) {
                disputed.push(index);
                continue;
            }
            for listing in all.iter().filter(|listing| listing.list[index] < version) {
                behind = true;
                if !self.start_copy(pool, parity, (space, slab, index), Some(best.peer), listing.peer) {
                    return false;
                }
            }
        }
        pool.map.spaces[space].slabs[slab].disputed = disputed;
        !behind
    }

    /// Nothing is in the making for a slab any more: others may have waited for its turn.
    pub fn end_repair(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) -> Option<Repair> {
        let mut repair = pool.map.spaces[space].slabs[slab].repair.take()?;
        self.repairs.end(space, slab);
        pool.map.tables.give_back(std::mem::take(&mut repair.list).into());
        pool.map.mark_all();
        Some(repair)
    }

    /// The same where it is for a copy at a certain server.
    pub fn end_repair_at(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
    ) -> Option<Repair> {
        let repair = pool.map.spaces[space].slabs[slab].repair.as_ref();
        if repair.is_some_and(|repair| repair.peer == peer) { self.end_repair(pool, space, slab) } else { None }
    }

    /// Gives up the copy in the making of a slab, if there is one.
    pub fn abort_repair(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let Some(repair) = self.end_repair(pool, space, slab) else { return };
        if pool.map.spaces[space].slabs[slab].entry.replicas.iter().any(|replica| replica.grant == repair.grant) {
            // It is done, and nobody has looked at it since.
            return;
        }
        self.forget_copy(pool, pages, parity, space, slab, repair.peer);
        pool.cancel_order(space, slab);
        pool.map.spaces[space].slabs[slab].failed.remove(repair.peer);
        if repair.step != Step::Fencing {
            pool.sessions.release(space, slab, repair.peer, repair.grant);
        }
        parity.mark_dissolving(pool);
        // Nothing waits for it any more.
        let size = pool.map.size;
        let of_slab = |page| size.slab(page) == Some(slab);
        let write = |kind| matches!(kind, Kind::Write { .. });
        for op in pages.ops.select(|o| o.stage == Stage::Active && write(o.kind) && o.space == space && of_slab(o.page))
        {
            pages.check_write(pool, self, parity, op);
        }
    }

    /// A server has no room for one more space, or says that this one has a newer owner and is not believed.
    pub fn was_not_let_in(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex, peer: PeerIndex) {
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
