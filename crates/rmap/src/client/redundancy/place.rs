//! Where a new copy goes, and which slabs get one now.
//!
//! At most [`REPAIRS_MAX`] copies are in the making at a time, counted by what can be had from servers that answer. Each that is begun
//! ends once.

use std::time::Duration;

use crate::client::exchange::{Exchange, Role};
use crate::client::index::{GroupIndex, PeerIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::cold::HELD_MIN;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::repair::{REPAIRS_MAX, Repair};
use crate::client::slab::{Candidate, Candidates, GrantStep, Phase, Slab};
use crate::units::{SlabNo, Time, Version};
use crate::wire::message::Status;

impl Redundancy {
    /// A server answered a request for a slab, for its first copies or for a new one.
    pub fn grant_answered(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        (space, slab): (SpaceIndex, SlabNo),
        peer: PeerIndex,
        (status, grant): (Status, Version),
    ) {
        pool.map.mark(space, slab);
        if matches!(status, Status::NotFenced | Status::UnknownSlab) {
            return pool.map.grant_after_fence(space, slab, peer, grant);
        }
        if status != Status::Ok {
            pool.sessions.peers[peer].found_full();
        }
        let state = &mut pool.map.spaces[space].slabs[slab];
        if let Phase::Granting(candidates) = &mut state.phase {
            let asked = |c: &Candidate| c.peer == peer && c.grant == grant && c.step == GrantStep::Asked;
            if status == Status::Ok {
                candidates.asked.iter_mut().filter(|c| asked(c)).for_each(|c| c.step = GrantStep::Granted);
            } else {
                candidates.refuse(asked);
            }
        }
        if let Some(repair) = &mut state.repair
            && repair.grant == grant
        {
            if status == Status::Ok {
                repair.granted(&mut pool.map.tables);
            } else {
                self.end_repair(pool, space, slab);
                parity.has_refused(pool, space, slab, peer);
            }
        }
    }

    /// The server that keeps the most room for the space; where none does, two servers at random, and of them the one with more
    /// room. In a zone that has no copy yet, if there is one.
    pub fn pick_server(&self, pool: &mut Pool, space: SpaceIndex, taken: PeerSet) -> Option<PeerIndex> {
        let kept = |peer: &PeerIndex| {
            if pool.sessions.peers[*peer].keeps_promises() { self.room_kept(pool, space, *peer) } else { 0 }
        };
        let open = |peer: &PeerIndex| {
            let state = &pool.sessions.peers[*peer];
            !taken.has(*peer) && (state.can_lend() || kept(peer) > 0) && !state.has_overflow_disk()
        };
        let zone = |peer: PeerIndex| pool.sessions.peers[peer].info().zone;
        let all: PeerSet = pool.sessions.peers.indices().filter(open).collect();
        let apart: PeerSet = all.iter().filter(|peer| taken.iter().all(|other| zone(other) != zone(*peer))).collect();
        let choice = if apart.is_empty() { all } else { apart };
        if choice.is_empty() {
            return None;
        }
        // Not at random: as long as the rest is spread evenly, each slab finds room at as many servers as it has copies.
        if let Some(most) = choice.iter().max_by_key(kept).filter(|peer| kept(peer) > 0) {
            return Some(most);
        }
        let any = || choice.iter().nth((pool.entropy.next_u64() % choice.len() as u64) as usize);
        let (Some(one), Some(other)) = (any(), any()) else { return None };
        let pick =
            if pool.sessions.peers[one].free_slabs() >= pool.sessions.peers[other].free_slabs() { one } else { other };
        pool.sessions.peers[pick].take_slab();
        Some(pick)
    }

    /// Slabs that a server keeps for this space and that it does not have yet.
    pub fn room_kept(&self, pool: &Pool, space: SpaceIndex, peer: PeerIndex) -> u64 {
        let kept = self.reservations.kept_at(space, peer);
        if kept == 0 {
            return 0;
        }
        let server = pool.sessions.peers[peer].info().id;
        let replicas = pool.map.spaces[space].slabs.iter().flat_map(|slab| &slab.entry.replicas);
        kept.saturating_sub(replicas.filter(|replica| replica.server == server).count() as u64)
    }

    /// Begins a new copy of a slab that has too few, or one at a server that wants to be rid of it, if it is its turn.
    pub fn begin_repair(&mut self, pool: &mut Pool, parity: &Parity, space: SpaceIndex, slab: SlabNo, here: PeerSet) {
        let copies = pool.sessions.peers_of(&pool.map.spaces[space].slabs[slab].entry);
        let replaces = here.iter().find(|peer| pool.sessions.peers[*peer].wants_relief());
        let missing = copies.len() < parity.wanted_copies(pool, space, slab);
        let state = &pool.map.spaces[space].slabs[slab];
        let is_stuck = state.is_stuck || !state.disputed.is_empty();
        if here.is_empty() || is_stuck || !(missing || replaces.is_some()) {
            return;
        }
        // Where a write waits for it, it does not wait.
        let waits = missing && self.repairs.is_put_off() && !parity.is_any_dissolving();
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

    /// Begins a copy that is to be the one of this slab.
    pub fn begin_column(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        slab: SlabNo,
        here: PeerSet,
        replaces: Option<PeerIndex>,
    ) {
        let can_be_made = !here.is_empty() || pool.can_reconstruct(space, slab);
        if self.repairs_running(pool) >= REPAIRS_MAX || !can_be_made || pool.map.spaces[space].slabs[slab].is_stuck {
            return;
        }
        let flees = replaces.is_some_and(|peer| here.has(peer) && !pool.sessions.peers[peer].has_overflow_disk());
        let Some(peer) = pool.room_apart(space, slab, flees) else { return };
        let Some(grant) = pool.map.spaces[space].next_version(false) else { return };
        pool.sessions.peers[peer].take_slab();
        self.begins_repair(pool, space, slab, Repair::new(peer, grant, replaces));
        pool.map.mark(space, slab);
    }

    /// A slab gets a new copy from now on.
    pub fn begins_repair(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo, repair: Repair) {
        let before = pool.map.spaces[space].slabs[slab].repair.replace(repair);
        debug_assert!(before.is_none(), "one at a time");
        self.repairs.begin(space, slab);
    }

    /// Slabs that get a copy now. What can be had from silent servers only waits for these, and takes nobody's turn.
    pub fn repairs_running(&self, pool: &Pool) -> usize {
        let has_source = |space: SpaceIndex, slab: SlabNo| {
            let Slab { entry, failed, .. } = &pool.map.spaces[space].slabs[slab];
            let up =
                pool.sessions.peers_of(entry).minus(*failed).iter().any(|peer| !pool.sessions.peers[peer].is_down());
            up || pool.can_reconstruct(space, slab)
        };
        debug_assert_eq!(self.repairs.len(), pool.map.count_repairs(), "each that is begun ends once");
        self.repairs.iter().filter(|(space, slab)| has_source(*space, *slab)).count()
    }

    /// A server is lost, to this client and to others.
    pub fn spread_rebuild(&mut self, pool: &Pool, now: Time) {
        let spread = pool.config.rebuild_spread.as_nanos() as u64;
        if spread > 0 {
            let entropy = &pool.entropy;
            self.repairs.put_off(|| now + Duration::from_nanos(entropy.next_u64() % spread));
        }
    }

    /// Copies are restored from now on, if it is time.
    pub fn rebuild(&mut self, pool: &mut Pool, now: Time) {
        if self.repairs.poll(now) {
            pool.map.mark_all();
        }
    }

    /// Whether nothing is under way in a group, and every copy that it should have is in sync at a server that answers.
    pub fn is_still(&self, pool: &Pool, pages: &Pages, space: SpaceIndex, group: GroupIndex) -> bool {
        let layout = pool.map.spaces[space].layout;
        let mut held = 0;
        for slab in layout.members(group) {
            match pool.map.spaces[space].slabs[slab].phase {
                Phase::Vacant => {}
                Phase::Open if self.is_in_sync(pool, space, slab) => held += 1,
                _ => return false,
            }
        }
        let of_group = |op: &Operation| {
            op.space == space && pool.map.slab_of(op.page).and_then(|s| layout.group(s)) == Some(group)
        };
        let is_under_way = |op: &Operation| matches!(op.stage, Stage::Waiting | Stage::Active) || op.exchanges > 0;
        let is_write = |op: &Operation| op.kind != Kind::Read && of_group(op) && is_under_way(op);
        held >= HELD_MIN && !pages.ops.any(is_write)
    }

    fn is_in_sync(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> bool {
        let (state, fenced_at) = (&pool.map.spaces[space].slabs[slab], pool.map.spaces[space].fenced_at);
        let copies = pool.sessions.peers_of(&state.entry);
        let is_good = |peer: PeerIndex| {
            let server = &pool.sessions.peers[peer];
            server.is_up() && !server.wants_relief() && !state.failed.has(peer) && fenced_at.has(peer)
        };
        let is_leaving = state.content.is_leaving();
        let is_changing = state.pending.is_some() || state.repair.is_some() || is_leaving;
        let is_whole = copies.len() == pool.map.spaces[space].copies && copies.iter().all(is_good);
        is_whole && !is_changing && !self.copies.any_of(space, slab)
    }

    /// Whether a server that says that the space has a newer owner is not to be believed: it was only looked at, or asked to keep room.
    /// Neither has it anything of this owner, nor is it asked for a slab. Where it is true, those say so that have slabs, and the control
    /// plane lets this owner add none.
    pub fn is_hearsay(&self, pool: &Pool, exchange: &Exchange) -> bool {
        let Exchange { role, space, peer, .. } = *exchange;
        let state = &pool.map.spaces[space];
        let counts = |slab: &Slab| {
            let is_asked = |candidates: &Candidates| candidates.asked.iter().any(|candidate| candidate.peer == peer);
            pool.sessions.peers_of(&slab.entry).has(peer)
                || slab.repair.as_ref().is_some_and(|repair| repair.peer == peer)
                || matches!(&slab.phase, Phase::Granting(candidates) if is_asked(candidates))
        };
        let is_looked_at = matches!(role, Role::Fence | Role::Held | Role::Reserve);
        is_looked_at && self.reservations.kept_at(space, peer) == 0 && !state.slabs.iter().any(counts)
    }
}
