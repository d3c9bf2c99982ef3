//! Opens sealed spaces, follows their maps, and sees to their copies where nobody else does.

use std::collections::HashSet;
use std::time::Duration;

use super::{LOOK_FIRST, LOOK_MAX, PATIENCE_MAX, Tenure, Watch};
use crate::client::exchange::Role;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::map::Map;
use crate::client::open::{ListStep, Listing};
use crate::client::ops::{Kind, Stage};
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::slab::{Phase, Slab};
use crate::client::{Client, Failure, Fault, trims};
use crate::control::{ControlRequest, MapEntry, Today};
use crate::units::{Generation, SlabNo, Time, Version};

impl Client {
    /// Another client keeps the space now: what this one knows is from before.
    pub(in crate::client) fn is_outdated(&mut self, space: SpaceIndex) {
        let state = &mut self.pool.map.spaces[space];
        state.tenure = Tenure::Reader;
        if std::mem::replace(&mut state.is_stale, true) {
            return;
        }
        self.pool.map.questions.forget(space, |request| matches!(request, ControlRequest::Change(_)));
        self.end_own_writes(space);
        self.pages.put_back_reads(&mut self.pool, &mut self.parity, |op| op.space == space);
        // Whoever asked for parity may ask again.
        self.pool.map.spaces[space].wants_parity = false;
        self.pool.begin_watch(space);
        let now = self.pool.now;
        if let Some(watch) = &mut self.pool.map.spaces[space].watch {
            watch.look_at = now;
        }
    }

    /// How the space is today, and whether that makes this client its keeper.
    pub(in crate::client) fn space_seen(&mut self, now: Time, space: SpaceIndex, today: Today, tenure: Tenure) {
        self.pool.now = now;
        let Today { generation, sealed, map } = today;
        if !sealed {
            return self.space_gone(space);
        }
        let newer = generation > self.pool.map.spaces[space].generation;
        if let Some(watch) = self.pool.map.spaces[space].watch.as_mut().filter(|watch| watch.is_early) {
            watch.is_early = false;
            if !newer {
                (watch.is_looking, watch.look_at) = (false, now);
                return;
            }
        }
        let mut changed = newer;
        if newer {
            self.begin_generation(space, generation);
        }
        let state = &mut self.pool.map.spaces[space];
        let was_stale = std::mem::replace(&mut state.is_stale, false);
        state.tenure = tenure;
        self.pool.stats.spaces_kept += u64::from(tenure == Tenure::Keeper);
        let needed = crate::client::parity::layout::slabs_needed(self.pool.map.spaces[space].layout, &map);
        self.pool.map.spaces[space].extend_to(needed);
        if newer || tenure == Tenure::Reader {
            self.forget_unmapped(space, &map);
        }
        for (slab, entry) in map {
            let Some(known) = self.pool.map.spaces[space].slabs.get(slab) else { continue };
            // The ledger has been written to since, where there is parity that there was not.
            let is_outdated = newer || changed && self.pool.map.spaces[space].layout.is_ledger(slab);
            if is_outdated || entry.revision != known.entry.revision {
                changed = true;
                self.reopen(space, slab, entry);
            }
        }
        self.pool.look_for_leftovers_of(space);
        if was_stale {
            self.pool.map.refuse_accused(now, space);
            self.parity.ledger.wake();
            // What came meanwhile was not looked at, and what was asked of those who refuse is asked elsewhere.
            self.pool.map.mark_all_of(space);
            self.pages.ask_again(&mut self.pool, &mut self.parity, space);
            // Slabs that are in no map, and that read as zeros, are not opened anew.
            for op in self.pages.ops.select(|op| op.stage == Stage::Waiting && op.space == space) {
                self.pages.try_op(&mut self.pool, &mut self.redundancy, &mut self.parity, op);
            }
        }
        let state = &self.pool.map.spaces[space];
        let well = tenure == Tenure::Keeper || !(state.wants_parity || self.pool.is_short(&self.parity, space));
        let Some(mut watch) = self.pool.map.spaces[space].watch.take().filter(|_| !well) else { return };
        watch.is_looking = false;
        if newer {
            watch.patience = (watch.patience * 2).min(PATIENCE_MAX);
        }
        if changed {
            (watch.unchanged_since, watch.pause) = (now, LOOK_FIRST);
        } else {
            watch.pause = (watch.pause * 2).min(LOOK_MAX);
        }
        watch.look_at = now + watch.pause;
        self.pool.map.spaces[space].watch = Some(watch);
    }

    /// Servers have to be told of it, and what they were asked in the last one they refuse.
    fn begin_generation(&mut self, space: SpaceIndex, generation: Generation) {
        while let Some(exchange) = self.pool.sessions.exchanges.find(|e| e.space == space && e.role.is_of_space()) {
            self.redundancy.cancel(&mut self.pool, &mut self.pages, &mut self.parity, exchange.id);
        }
        self.pool.map.leftovers.forget(|of, _| of == space);
        let owner = self.pool.new_owner();
        let state = &mut self.pool.map.spaces[space];
        (state.generation, state.owner, state.sequence) = (generation, owner, 0);
        (state.fenced_at, state.fencing) = (PeerSet::default(), PeerSet::default());
        (state.unknown_at, state.notified_again) = (PeerSet::default(), PeerSet::default());
        (state.looked_at, state.disbelieved) = (PeerSet::default(), PeerSet::default());
        (state.accused, state.refusing) = (PeerSet::default(), PeerSet::default());
        self.pool.map.questions.forget(space, |request| matches!(request, ControlRequest::Change(_)));
    }

    /// What the last keeper had begun and is in no map is nothing to this one.
    fn forget_unmapped(&mut self, space: SpaceIndex, map: &[(SlabNo, MapEntry)]) {
        let first = self.pool.map.spaces[space].layout.data;
        let mapped: HashSet<SlabNo> = map.iter().map(|(slab, _)| *slab).collect();
        for slab in self.pool.map.spaces[space].slabs.indices().skip(first) {
            let begun = !matches!(self.pool.map.spaces[space].slabs[slab].phase, Phase::Vacant);
            if begun && !mapped.contains(&slab) {
                // Not lost, as an entry without copies would be: there is none.
                self.reopen_as(space, slab, MapEntry::default(), Phase::Vacant);
            }
        }
    }

    /// What was to be written beside the pages is the next keeper's to write.
    fn end_own_writes(&mut self, space: SpaceIndex) {
        self.parity.ledger.end_writes(space);
        for op in self.pages.ops.select(|op| op.space == space && matches!(op.kind, Kind::Write { .. })) {
            self.pages.fail_op(&mut self.pool, &mut self.redundancy, &mut self.parity, op, Failure::Fenced);
        }
    }

    /// Everything that was known of a slab is from before; what is read there begins anew.
    pub(in crate::client) fn reopen(&mut self, space: SpaceIndex, slab: SlabNo, entry: MapEntry) {
        let phase = Phase::of(&entry, self.pool.map.spaces[space].tenure);
        self.reopen_as(space, slab, entry, phase);
    }

    fn reopen_as(&mut self, space: SpaceIndex, slab: SlabNo, entry: MapEntry, phase: Phase) {
        let size = self.pool.map.size;
        let of_slab = |page| size.slab(page) == Some(slab);
        self.pages.put_back_reads(&mut self.pool, &mut self.parity, |op| op.space == space && of_slab(op.page));
        let reads = |stage: Stage, kind: Kind| stage == Stage::Active && kind == Kind::Read;
        for op in self.pages.ops.select(|op| reads(op.stage, op.kind) && op.space == space && of_slab(op.page)) {
            self.pages.drop_exchanges(&mut self.pool, &mut self.parity, op);
            self.pages.ops.wait_again(op);
        }
        let ends = |role: Role| !(role.is_of_space() || role == Role::Release);
        while let Some(exchange) =
            self.pool.sessions.exchanges.find(|e| e.space == space && of_slab(e.page) && ends(e.role))
        {
            self.redundancy.cancel(&mut self.pool, &mut self.pages, &mut self.parity, exchange.id);
        }
        self.redundancy.end_repair(&mut self.pool, space, slab);
        let before = &self.pool.map.spaces[space].slabs[slab];
        let stays = entry.replicas.iter().filter(|replica| before.entry.replicas.contains(replica));
        let same: PeerSet = stays.filter_map(|replica| self.pool.sessions.peers.of(replica.server)).collect();
        let failed = before.failed.iter().filter(|peer| same.has(*peer)).collect();
        let marks = before.marks;
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        let disputed = std::mem::take(&mut state.disputed);
        let table =
            if matches!(state.table, Table::Known | Table::Asked { .. }) { state.table } else { Table::Unknown };
        // Versions that the ledger told are so for good.
        let versions = if table == Table::Unknown { Box::default() } else { std::mem::take(&mut state.versions) };
        *state = Slab { phase, entry, versions, failed, disputed, table, marks, ..Slab::vacant() };
        self.pool.map.mark(space, slab);
        self.pool.map.mark_group(space, slab);
        self.pages.wake_ops(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
    }

    /// All copies that could be asked have answered: a reader believes the newest of each page, which all of them should have. Where that
    /// is a trim, `trims.rs` says when.
    pub(in crate::client) fn read_listings(&mut self, space: SpaceIndex, slab: SlabNo, listings: &[Listing]) {
        let done = |listing: &&Listing| listing.step == ListStep::Done;
        let bad = listings.iter().filter(|listing| listing.step == ListStep::Bad).map(|listing| listing.peer);
        let failed: PeerSet = bad.collect();
        let any = listings.iter().any(|listing| done(&listing));
        let is_ledger = self.pool.map.spaces[space].layout.is_ledger(slab);
        let believes = self.pool.has(Fault::BelievesTrims);
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        if any {
            let mut disputed = Vec::new();
            for index in 0..state.versions.len() {
                let has = |listing: &Listing| listing.list[index];
                let newest = listings.iter().filter(done).map(has).max().unwrap_or_default();
                let kept = trims::beneath(listings.iter().filter(done), index).filter(|_| !believes).map(has);
                if is_ledger {
                    // It may be being written, and is never trimmed. What this reader needs of it is at all copies.
                    state.versions[index] = kept.unwrap_or(newest);
                    continue;
                }
                if state.take_listed(index, newest, kept) {
                    disputed.push(index);
                }
                let version = state.versions[index];
                let lacks = |listing: &&Listing| version.has_content() && has(listing) < version;
                let behind = listings.iter().filter(done).filter(lacks);
                state.behind = state.behind.union(behind.map(|listing| listing.peer).collect());
            }
            state.disputed = disputed;
            (state.phase, state.table) = (Phase::Open, Table::Unknown);
        }
        state.failed = state.failed.union(failed);
        if any {
            self.pages.map_settled(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        } else {
            for op in self.pages.waiting_for(&self.pool, space, slab) {
                if self.pages.is_refused(&self.pool, op, slab) {
                    self.pool.stats.bad_pages += 1;
                    self.pages.fail_op(&mut self.pool, &mut self.redundancy, &mut self.parity, op, Failure::Corrupt);
                }
            }
        }
        self.pool.look_after(&self.parity, space, slab);
    }
}

impl Pool {
    /// Looks at the maps that it is time for.
    pub(in crate::client) fn watch_sealed(&mut self, parity: &Parity, now: Time) {
        self.map.watched.retain(|space| self.map.spaces[*space].watch.is_some());
        for at in 0..self.map.watched.len() {
            let space = self.map.watched[at];
            let Some(watch) = self.map.spaces[space].watch else { continue };
            if watch.is_looking || now < watch.look_at {
                continue;
            }
            let state = &self.map.spaces[space];
            let (id, generation) = (state.id, state.generation);
            let nobody = now.since(watch.unchanged_since) >= watch.patience && !state.is_stale;
            let is_asked = state.wants_parity && !state.is_stale;
            let keeps = is_asked || nobody && self.can_improve(parity, space);
            let request = if state.tenure == Tenure::Reader && keeps {
                ControlRequest::Keep { space: id, generation }
            } else {
                ControlRequest::Look { space: id }
            };
            self.map.spaces[space].watch = Some(Watch { is_looking: true, ..watch });
            self.map.ask_control(space, request);
        }
    }

    /// A reader's part of what an owner does for an open slab: it sees what is missing.
    pub(in crate::client) fn look_after(&mut self, parity: &Parity, space: SpaceIndex, slab: SlabNo) {
        if !self.is_slab_short(parity, space, slab) {
            return;
        }
        self.begin_watch(space);
        let nobody = self.sound_copies(space, slab).iter().all(|peer| self.sessions.peers[peer].is_down());
        let soon = self.now + LOOK_FIRST;
        if let Some(watch) = self.map.spaces[space].watch.as_mut().filter(|_| nobody) {
            watch.look_at = watch.look_at.min(soon);
        }
    }

    fn is_short(&self, parity: &Parity, space: SpaceIndex) -> bool {
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

impl Pool {
    /// A reader's copies are not as they should be.
    pub(in crate::client) fn begin_watch(&mut self, space: SpaceIndex) {
        if self.map.spaces[space].watch.is_some() {
            return;
        }
        let patience = self.config.keep_after.max(Duration::from_millis(1));
        let chance = self.entropy.next_u64() % patience.as_millis() as u64;
        let now = self.now;
        self.map.spaces[space].watch = Some(Watch {
            unchanged_since: now,
            look_at: now,
            pause: LOOK_FIRST,
            patience: patience + Duration::from_millis(chance),
            is_looking: false,
            is_early: false,
        });
        if !self.map.watched.contains(&space) {
            self.map.watched.push(space);
        }
    }
}

impl Map {
    /// When a map is to be looked at next.
    pub(in crate::client) fn watch_due(&self) -> Option<Time> {
        let watches = self.watched.iter().filter_map(|space| self.spaces[*space].watch);
        watches.filter(|watch| !watch.is_looking).map(|watch| watch.look_at).min()
    }

    /// Whether a server answered for another copy than the one in this reader's map: one that left since, and came again in the same
    /// generation, and is being made. What is sealed and known to be written is never unwritten.
    pub(in crate::client) fn is_another_copy(&self, space: SpaceIndex, version: Version) -> bool {
        self.spaces[space].tenure == Tenure::Reader && version == Version::NEVER
    }
}
