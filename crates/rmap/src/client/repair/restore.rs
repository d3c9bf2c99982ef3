//! Restores copies, and moves those that a server wants to be rid of.

use std::time::Duration;

use super::{REPAIRS_MAX, Repair, Step};
use crate::client::exchange::{Exchange, ExchangeId, Role};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::ops::{Kind, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::sessions::Sessions;
use crate::client::slab::{Doubt, GrantStep, Phase, Slab, Space};
use crate::client::{Client, Failure, Fault};
use crate::control::{MapEntry, Replica};
use crate::units::{SlabNo, Time, Version};
use crate::wire::message::Pressure;

impl Client {
    /// Whatever a server had is gone.
    pub(in crate::client) fn content_lost(&mut self, peer: PeerIndex) {
        self.pool.map.leftovers.forget(|_, of| of == peer);
        for space in self.pool.map.spaces.indices() {
            let state = &mut self.pool.map.spaces[space];
            let Space { fenced_at, fencing, unknown_at, notified_again, looked_at, disbelieved, .. } = state;
            let known = [fenced_at, fencing, unknown_at, notified_again, looked_at, disbelieved];
            known.into_iter().for_each(|set| set.remove(peer));
            [&mut state.accused, &mut state.refusing].into_iter().for_each(|set| set.remove(peer));
            if self.pool.map.is_followed(space) {
                // The grant says which life of a slab is meant, and the map may be of the server's new one.
                continue;
            }
            for slab in self.pool.map.spaces[space].slabs.indices() {
                if !self.check_again(space, slab, peer) {
                    self.redundancy.copy_lost(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, peer);
                }
            }
        }
    }
}

impl Pages {
    /// A damaged page: another copy may be better. Where no other one answers now, this one is kept: it is the only one that
    /// has the slab's other pages.
    pub(in crate::client) fn page_is_bad(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        peer: PeerIndex,
    ) {
        pool.stats.bad_pages += 1;
        let (space, page) = (self.ops.get(op).space, self.ops.get(op).page);
        let Some(slab) = pool.map.slab_of(page) else { return };
        let others = pool.sound_copies(space, slab);
        if others.iter().any(|other| other != peer && pool.sessions.peers[other].is_up()) {
            redundancy.copy_lost(pool, self, parity, space, slab, peer);
            if self.ops.peek(op).stage == Stage::Active && !self.is_answer_coming(pool, parity, op) {
                self.ask_for_page(pool, parity, op);
            }
        } else if pool.map.is_grouped(space, slab) {
            self.ops.get(op).is_bad_itself = true;
            self.ask_for_page(pool, parity, op);
        } else {
            self.finish_read(pool, parity, op, Err(Failure::Corrupt));
        }
    }
}

impl Redundancy {
    pub(in crate::client) fn advance_open(
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

    pub(in crate::client) fn advance_repair(
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
            Step::Transferring(transfer) => self.advance_transfer(pool, pages, parity, now, (space, slab), transfer),
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

    pub(in crate::client) fn abort_repair(
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

    /// One copy is gone or cannot be trusted. If it is one: a server may also never have had it.
    pub(in crate::client) fn copy_lost(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
    ) {
        let state = &pool.map.spaces[space].slabs[slab];
        let pending = state.pending.as_ref().is_some_and(|pending| pool.sessions.peers_of(&pending.entry).has(peer));
        let repairing = state.repair.as_ref().is_some_and(|repair| repair.peer == peer);
        if pool.sessions.peers_of(&state.entry).has(peer) || pending || repairing {
            pool.map.spaces[space].slabs[slab].failed.insert(peer);
            self.forget_copy(pool, pages, parity, space, slab, peer);
        } else if let Phase::Granting(candidates) = &mut pool.map.spaces[space].slabs[slab].phase {
            let asked = candidates.asked.iter().find(|c| c.peer == peer && c.step != GrantStep::Fencing).copied();
            candidates.forget(peer);
            self.forget_copy(pool, pages, parity, space, slab, peer);
            asked.into_iter().for_each(|candidate| self.forget_grant(pool, pages, parity, space, slab, candidate));
        }
        pool.map.mark(space, slab);
        pool.map.mark_group(space, slab);
    }

    /// Ends an exchange that no answer is wanted to any more.
    pub(in crate::client) fn cancel(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        id: ExchangeId,
    ) {
        if let Some(exchange) = pool.sessions.end_exchange(id) {
            self.was_cancelled(pool, pages, parity, &exchange);
        }
    }

    pub(in crate::client) fn was_cancelled(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        exchange: &Exchange,
    ) {
        match exchange.role {
            Role::Read { op } => {
                pages.op_exchange_ended(op);
                let again = pages.ops.peek(op).stage == Stage::Active && !pages.is_answer_coming(pool, parity, op);
                if again && !pool.map.spaces[exchange.space].is_taken && !pool.map.spaces[exchange.space].is_stale {
                    pages.ask_for_page(pool, parity, op);
                }
            }
            Role::Write { op } => pages.op_exchange_ended(op),
            Role::CopyRead { copy } | Role::CopyWrite { copy } => self.copy_failed(pool, copy),
            Role::Fence => pool.map.spaces[exchange.space].fencing.remove(exchange.peer),
            Role::Grant | Role::Versions | Role::Admit { .. } | Role::Order | Role::Listed => {
                if let Some(slab) = pool.map.slab_of(exchange.page) {
                    pool.map.mark(exchange.space, slab);
                }
            }
            Role::Strip { stripe } => parity.stripe_interrupted(pool, pages, self, stripe),
            Role::Check => {
                if let Some(slab) = pool.map.slab_of(exchange.page) {
                    pool.map.spaces[exchange.space].slabs[slab].checking.remove(exchange.peer);
                    pool.map.mark(exchange.space, slab);
                }
            }
            Role::Held => pool.look_for_leftovers_again(exchange.space, exchange.peer),
            Role::Scrub | Role::Reserve | Role::Release => {}
        }
    }
}

impl Redundancy {
    /// A server is lost, to this client and to others.
    pub(in crate::client) fn spread_rebuild(&mut self, pool: &Pool, now: Time) {
        let spread = pool.config.rebuild_spread.as_nanos() as u64;
        if spread > 0 {
            let entropy = &pool.entropy;
            self.repairs.put_off(|| now + Duration::from_nanos(entropy.next_u64() % spread));
        }
    }

    /// Copies are restored from now on, if it is time.
    pub(in crate::client) fn rebuild(&mut self, pool: &mut Pool, now: Time) {
        if self.repairs.poll(now) {
            pool.map.mark_all();
        }
    }

    fn begin_repair(&mut self, pool: &mut Pool, parity: &Parity, space: SpaceIndex, slab: SlabNo, here: PeerSet) {
        let copies = pool.sessions.peers_of(&pool.map.spaces[space].slabs[slab].entry);
        let replaces = here.iter().find(|peer| pool.sessions.peers[*peer].wants_relief());
        let missing = copies.len() < parity.wanted_copies(pool, space, slab);
        let state = &pool.map.spaces[space].slabs[slab];
        let is_stuck = state.is_stuck || !state.disputed.is_empty();
        if here.is_empty() || is_stuck || !(missing || replaces.is_some()) {
            return;
        }
        // Where a write waits for it, it does not wait.
        let waits = missing && self.repairs.is_put_off() && !parity.cold.is_any_dissolving();
        if waits || self.repairs_running(pool) >= REPAIRS_MAX {
            return;
        }
        // A server that is about to end has the only copy: rather on a disk than gone.
        let flees = here.len() == 1 && replaces.is_some_and(|peer| !pool.sessions.peers[peer].has_overflow_disk());
        let picked = self.pick_server(pool, space, copies);
        let Some(peer) = picked.or_else(|| if flees { pool.overflow_disk(copies) } else { None }) else { return };
        let Some(grant) = pool.map.spaces[space].next_version(false) else { return };
        let replaces = if missing { None } else { replaces };
        self.begins_repair(pool, space, slab, Repair::new(peer, grant, replaces));
        pool.map.mark(space, slab);
    }

    /// Slabs that get a copy now. What can be had from silent servers only waits for these, and takes nobody's turn.
    pub(in crate::client) fn repairs_running(&self, pool: &Pool) -> usize {
        let has_source = |space: SpaceIndex, slab: SlabNo| {
            let Slab { entry, failed, .. } = &pool.map.spaces[space].slabs[slab];
            let up =
                pool.sessions.peers_of(entry).minus(*failed).iter().any(|peer| !pool.sessions.peers[peer].is_down());
            up || pool.can_reconstruct(space, slab)
        };
        debug_assert_eq!(self.repairs.len(), pool.map.count_repairs(), "each that is begun ends once");
        self.repairs.iter().filter(|(space, slab)| has_source(*space, *slab)).count()
    }

    /// A slab gets a new copy from now on.
    pub(in crate::client) fn begins_repair(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        slab: SlabNo,
        repair: Repair,
    ) {
        let before = pool.map.spaces[space].slabs[slab].repair.replace(repair);
        debug_assert!(before.is_none(), "one at a time");
        self.repairs.begin(space, slab);
    }

    /// Nothing is in the making for a slab any more: others may have waited for its turn.
    pub(in crate::client) fn end_repair(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) -> Option<Repair> {
        let mut repair = pool.map.spaces[space].slabs[slab].repair.take()?;
        self.repairs.end(space, slab);
        pool.map.tables.give_back(std::mem::take(&mut repair.list).into());
        pool.map.mark_all();
        Some(repair)
    }

    /// The same where it is for a copy at a certain server.
    pub(in crate::client) fn end_repair_at(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
    ) -> Option<Repair> {
        let repair = pool.map.spaces[space].slabs[slab].repair.as_ref();
        if repair.is_some_and(|repair| repair.peer == peer) { self.end_repair(pool, space, slab) } else { None }
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
}

impl Pages {
    /// Writes that the new copy does not get: they began before it.
    fn has_unmirrored(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) -> bool {
        let size = pool.map.size;
        self.ops.any(|op| {
            op.stage == Stage::Active
                && matches!(op.kind, Kind::Write { .. })
                && op.space == space
                && size.slab(op.page) == Some(slab)
                && !op.sent.has(peer)
        })
    }
}

impl Pool {
    /// What the map says of a slab with these of its copies; lost, without any.
    pub(in crate::client) fn entry_of(&self, space: SpaceIndex, slab: SlabNo, keep: PeerSet) -> MapEntry {
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
    pub(in crate::client) fn may_leave(
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
}

impl Map {
    /// A copy has a page, by being written or by being copied to.
    pub(in crate::client) fn copy_has(
        &mut self,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
        index: usize,
        version: Version,
    ) {
        let state = &mut self.spaces[space].slabs[slab];
        if let Some(repair) = state.repair.as_mut().filter(|repair| repair.peer == peer)
            && let Some(has) = repair.list.get_mut(index)
        {
            *has = (*has).max(version);
        }
        if let Phase::Opening(listings) = &mut state.phase {
            let at_peer = listings.iter_mut().filter(|listing| listing.peer == peer);
            at_peer.filter_map(|listing| listing.list.get_mut(index)).for_each(|has| *has = (*has).max(version));
        }
    }

    /// Slabs that get a copy, by a look at all of them.
    fn count_repairs(&self) -> usize {
        let of_space =
            |space: &crate::client::slab::Space| space.slabs.iter().filter(|slab| slab.repair.is_some()).count();
        self.spaces.iter().map(of_space).sum()
    }

    pub(in crate::client) fn set_step(&mut self, space: SpaceIndex, slab: SlabNo, step: Step) {
        if let Some(repair) = &mut self.spaces[space].slabs[slab].repair {
            repair.step = step;
        }
    }

    /// Something changed that concerns slabs everywhere: a server came, or has room.
    pub(in crate::client) fn mark_all(&mut self) {
        self.spaces.indices().for_each(|space| self.mark_all_of(space));
    }

    pub(in crate::client) fn mark_all_of(&mut self, space: SpaceIndex) {
        for slab in self.spaces[space].slabs.indices() {
            if !matches!(self.spaces[space].slabs[slab].phase, Phase::Vacant) {
                self.mark(space, slab);
            }
        }
    }
}

impl Sessions {
    /// A server in distress is relieved at once where another copy is in sync.
    fn one_to_drop(&self, here: PeerSet) -> PeerSet {
        here.iter().find(|peer| self.peers[*peer].pressure() == Pressure::Red).into_iter().collect()
    }
}
