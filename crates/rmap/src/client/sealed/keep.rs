//! Opens sealed spaces, follows their maps, and sees to their copies where nobody else does.

use std::collections::HashSet;

use crate::client::exchange::Role;
use crate::client::index::SpaceIndex;
use crate::client::ledger::Table;
use crate::client::open::{ListStep, Listing};
use crate::client::ops::{Kind, Stage};
use crate::client::peer::PeerSet;
use crate::client::sealed::Tenure;
use crate::client::slab::{Phase, Slab};
use crate::client::{Client, Failure, Fault, trims};
use crate::control::{ControlRequest, MapEntry, Today};
use crate::units::{Generation, SlabNo, Time};

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
        self.pool.map.spaces[space].watch.iter_mut().for_each(|watch| watch.look_now(now));
    }

    /// How the space is today, and whether that makes this client its keeper.
    pub(in crate::client) fn space_seen(&mut self, now: Time, space: SpaceIndex, today: Today, tenure: Tenure) {
        self.pool.now = now;
        let Today { generation, sealed, map } = today;
        if !sealed {
            return self.space_gone(space);
        }
        let newer = generation > self.pool.map.spaces[space].generation;
        if self.pool.map.spaces[space].watch.as_mut().is_some_and(|watch| watch.is_outrun(now, newer)) {
            return;
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
            self.parity.wake();
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
        watch.end_look(now, newer, changed);
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
        self.parity.end_ledger_writes(space);
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
