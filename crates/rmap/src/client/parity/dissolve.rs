//! Before a group with parity is written to, its parity has to go. This is an owner's part of that.
//!
//! A group is frozen from when the map is asked to have its parity until the map says that it has none. A write or trim to it
//! waits, and has the group *dissolved*. The order: what is gone of it is made anew -> each slab gets its second copy again ->
//! all of these are in the map -> the parity's entry leaves the map -> that is confirmed -> what waited goes on, and the parity
//! slab goes back to its server. Nothing is written before that. So whoever takes the space over in between finds a group with
//! parity, and all that the ledger says of it is right.
//!
//! From then on each slab depends on its own copies. So before the map is asked, a server with a copy of each slab has to answer.
//! One that was last heard of a while ago may have died since, and what it had is in the parity alone.
//!
//! A slab for whose second copy no server has room goes on with one, as every slab does. A slab that is gone may not be possible
//! to make anew, because there is no room or because a page that it would be made from is damaged. It keeps its group from being
//! dissolved. Writes to the group are declined then, as those to a new slab are where no server takes it.
//!
//! A group of which two slabs are lost, or whose versions are, is of no use any more. It is dissolved without a write.

use super::super::ops::{Operation, Stage};
use super::super::peer::PeerSet;
use super::super::repair::{REPAIRS_MAX, Repair};
use super::super::sealed::Tenure;
use super::super::slab::{Doubt, Phase};
use super::super::{Failure, Fault};
use super::Members;
use super::cold::Course;
use crate::client::index::{GroupIndex, OpIndex, PeerIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::sessions::Sessions;
use crate::control::MapEntry;
use crate::units::{SlabNo, Time, Version};

/// What a slab still needs before its group has no parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Footing {
    /// Nothing that can be had.
    Firm,
    Waits,
    /// It is gone, and cannot be made anew: no server has room, or a page that it would be made from is damaged.
    Gone,
}

impl Parity {
    /// A write is about to begin. `true` if it has to wait until its group has no parity.
    pub(in super::super) fn waits_for_group(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        op: OpIndex,
        slab: SlabNo,
    ) -> bool {
        let space = pages.ops.peek(op).space;
        let Some(group) = pool.map.spaces[space].layout.group(slab) else { return false };
        self.note_change(pool, pages, redundancy, space, slab);
        if !pool.map.is_frozen(space, group) || pool.has(Fault::WritesToFrozen) {
            return false;
        }
        self.dissolve(pool, space, group);
        pool.map.mark_group(space, slab);
        true
    }

    /// A slab is not what it was: its group is not cold, and parity of it that is being made would be wrong.
    pub(in super::super) fn note_change(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let Some(group) = pool.map.spaces[space].layout.group(slab) else { return };
        let course = self.cold.written(pool.now, space, group);
        if course == Some(Course::Making) && !pool.map.is_frozen(space, group) {
            self.stop_making(pool, pages, redundancy, space, group);
        }
    }

    /// The parity of a group that is being dissolved leaves the map when it is needed no more.
    pub(super) fn part_group(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        now: Time,
        (space, group): (SpaceIndex, GroupIndex),
        doubt: Option<Doubt>,
    ) {
        let layout = pool.map.spaces[space].layout;
        let parity = layout.parity(group);
        if layout.columns(group).any(|slab| pool.map.spaces[space].slabs[slab].pending.is_some()) {
            return;
        }
        redundancy.abort_repair(pool, pages, self, space, parity);
        let members = pool.map.held_members(space, group);
        let any = |footing: Footing| members.iter().any(|slab| self.footing(pool, redundancy, space, *slab) == footing);
        if any(Footing::Gone) {
            return self.decline_group(pool, pages, now, space, group);
        }
        if any(Footing::Waits) || !pool.members_live(now, space, group, &members, doubt) {
            return;
        }
        let Some(epoch) = pool.map.spaces[space].next_version(false) else { return };
        let state = &mut pool.map.spaces[space].slabs[parity];
        (state.phase, state.epoch, state.doubt) = (Phase::Leaving, epoch, None);
        pool.map.propose(space, parity, MapEntry::empty());
    }

    /// Writes that wait for the map's word on a group end in time.
    pub(super) fn decline_late(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let is_known = matches!(pool.map.spaces[space].slabs[slab].phase, Phase::Open | Phase::Vacant);
        let waits =
            |op: &Operation| op.stage == Stage::Waiting && op.space == space && pool.map.slab_of(op.page) == Some(slab);
        if is_known && pool.ends_unmapped() && pages.ops.any(waits) {
            pages.wait_for_map_of_group(pool, redundancy, self, space, slab);
        }
    }

    /// The map says something else of a group's parity.
    pub(in super::super) fn parity_changed(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        parity: SlabNo,
    ) {
        let layout = pool.map.spaces[space].layout;
        let Some(group) = layout.group(parity).filter(|group| layout.parity(*group) == parity) else { return };
        if pool.map.spaces[space].slabs[parity].is_held() {
            pool.stats.groups_made += u64::from(self.cold.parity_joined(space, group));
            return;
        }
        let Some(course) = self.cold.parity_left(pool.now, space, group) else { return };
        pool.stats.groups_dissolved += u64::from(course == Course::Dissolving);
        pool.map.forget_tables(space, group);
        layout.columns(group).for_each(|slab| redundancy.end_copies(pool, self, space, slab));
        self.interrupt_stripes_of(pool, pages, redundancy, space, group);
        for slab in layout.members(group) {
            let state = &mut pool.map.spaces[space].slabs[slab];
            (state.checking, state.checked, state.is_stuck) = (PeerSet::default(), PeerSet::default(), false);
            match state.phase {
                // Nobody has it, and nothing is left that it could be made from.
                Phase::Open if state.entry.lost => {
                    state.phase = Phase::Lost;
                    pool.stats.slabs_lost += 1;
                    pages.fail_ops(pool, redundancy, self, space, Some(slab), Failure::Lost);
                }
                Phase::Open => {
                    redundancy.count_content(pool, space, slab);
                    pages.map_settled(pool, redundancy, self, space, slab);
                }
                _ => pages.wake_ops(pool, redundancy, self, space, slab),
            }
            pool.map.mark(space, slab);
        }
    }
}

impl Parity {
    /// What a member of a group that is being dissolved needs next.
    pub(super) fn dissolve_column(
        &self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
        here: PeerSet,
    ) {
        let (copies, refused) =
            (pool.sessions.peers_of(&pool.map.spaces[space].slabs[slab].entry), self.refused(pool, space, slab));
        let taken = copies.union(refused);
        let is_short = copies.len() < self.wanted_copies(pool, space, slab);
        // One that is stuck goes on with what it has.
        let is_stuck = pool.map.spaces[space].slabs[slab].is_stuck;
        let can_be_made = !is_stuck && (!here.is_empty() || pool.can_reconstruct(space, slab));
        if here.is_empty() || is_short {
            let layout = pool.map.spaces[space].layout;
            layout.group(slab).into_iter().for_each(|group| pool.map.mark(space, layout.parity(group)));
        }
        if !(here.is_empty() || is_short) || !can_be_made || !self.has_turn(pool, redundancy) {
            return;
        }
        // What is gone takes the room that there is first.
        let comes_first = |column: SlabNo| pool.is_gone_and_waits(space, column);
        if !here.is_empty() && pool.map.other_columns(space, slab).any(comes_first) {
            return;
        }
        let target = if here.is_empty() {
            let apart = pool.room_apart(space, slab, false).filter(|peer| !taken.has(*peer));
            apart.inspect(|peer| pool.sessions.peers[*peer].take_slab())
        } else {
            None
        };
        let flees = here.is_empty() || here.len() == 1 && here.iter().any(|peer| pool.sessions.flees(peer));
        let target = target.or_else(|| redundancy.pick_server(pool, space, taken));
        let Some(peer) = target.or_else(|| if flees { pool.overflow_disk(taken) } else { None }) else { return };
        let Some(grant) = pool.map.spaces[space].next_version(false) else { return };
        let replaces = copies.iter().next().filter(|_| here.is_empty());
        redundancy.begins_repair(pool, space, slab, Repair::new(peer, grant, replaces));
        pool.map.mark(space, slab);
    }

    /// Somebody waits: these have a share of their own of what is made anew at a time.
    fn has_turn(&self, pool: &Pool, redundancy: &Redundancy) -> bool {
        let dissolving = redundancy.repairs.iter().filter(|(space, slab)| self.is_dissolving(pool, *space, *slab));
        dissolving.count() < REPAIRS_MAX
    }

    /// Whether some server may take a copy beside those that there are.
    fn has_room(&self, pool: &Pool, redundancy: &Redundancy, space: SpaceIndex, slab: SlabNo, on_disk: bool) -> bool {
        let taken =
            pool.sessions.peers_of(&pool.map.spaces[space].slabs[slab].entry).union(self.refused(pool, space, slab));
        pool.sessions.peers.indices().filter(|peer| !taken.has(*peer)).any(|peer| {
            let server = &pool.sessions.peers[peer];
            let keeps = server.keeps_promises() && redundancy.room_kept(pool, space, peer) > 0;
            let may = !server.has_overflow_disk() || on_disk && pool.config.uses_overflow_disk;
            may && (server.can_lend() || keeps && !server.has_overflow_disk())
        })
    }

    fn footing(&self, pool: &Pool, redundancy: &Redundancy, space: SpaceIndex, slab: SlabNo) -> Footing {
        let state = &pool.map.spaces[space].slabs[slab];
        match state.phase {
            Phase::Lost | Phase::Vacant => return Footing::Firm,
            Phase::Open if state.pending.is_none() && state.repair.is_none() => {}
            _ => return Footing::Waits,
        }
        let (copies, here) = (pool.sessions.peers_of(&state.entry), pool.copies_here(space, slab));
        // Without parity each copy counts as one that is in sync: those that were not heard of since this owner began are asked first.
        let unheard = copies.minus(pool.map.heard_of(space, slab).minus(state.failed));
        if !unheard.is_empty() {
            // One whose only servers are silent, for longer than anybody waits, is made anew if there is room.
            let has_waited =
                pool.config.error_after.is_none() || unheard.is_subset_of(pool.sessions.peers.long_silent());
            let is_silent =
                here.is_empty() && has_waited && unheard.iter().all(|peer| pool.sessions.peers[peer].is_down());
            let has_no_room =
                || pool.can_reconstruct(space, slab) && !self.has_room(pool, redundancy, space, slab, true);
            return if is_silent && !state.is_stuck && has_no_room() { Footing::Gone } else { Footing::Waits };
        }
        if !here.is_empty() && (state.is_stuck || copies.len() >= self.wanted_copies(pool, space, slab)) {
            return Footing::Firm;
        }
        if !here.is_empty() {
            let flees = here.iter().any(|peer| pool.sessions.flees(peer));
            return if self.has_room(pool, redundancy, space, slab, flees) { Footing::Waits } else { Footing::Firm };
        }
        if !pool.can_reconstruct(space, slab) {
            return Footing::Waits;
        }
        // Where a page of the others is damaged, the rest of the slab can be read as long as there is parity.
        if state.is_stuck || !self.has_room(pool, redundancy, space, slab, true) {
            Footing::Gone
        } else {
            Footing::Waits
        }
    }
}

impl Parity {
    /// What is gone of a group cannot be made anew. A server that may still come, with room or with what is missing, is waited for.
    fn decline_group(&mut self, pool: &mut Pool, pages: &mut Pages, now: Time, space: SpaceIndex, group: GroupIndex) {
        let layout = pool.map.spaces[space].layout;
        if pool.sessions.someone_may_come() {
            return;
        }
        if let Some(at) = pool.patience_ends(now) {
            return pool.map.mark_at(at, space, layout.parity(group));
        }
        self.cold.forget_refused(space, group);
        for slab in layout.members(group) {
            if matches!(pool.map.spaces[space].slabs[slab].phase, Phase::Open | Phase::Vacant) {
                pages.decline_ops(pool, space, slab, now);
            }
        }
    }
}

impl Parity {
    pub(super) fn is_dissolving(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> bool {
        let group = pool.map.spaces[space].layout.group(slab);
        group.is_some_and(|group| self.cold.course(space, group) == Course::Dissolving)
    }

    /// Has the parity of a group leave.
    pub(in super::super) fn dissolve(&mut self, pool: &mut Pool, space: SpaceIndex, group: GroupIndex) {
        let parity = pool.map.spaces[space].layout.parity(group);
        if self.cold.begin_dissolving(space, group) {
            // What its move waited for was asked for earlier than what is asked now.
            if let Some(parity) = pool.map.spaces[space].slabs.get_mut(parity) {
                parity.doubt = None;
            }
            pool.map.mark_group(space, parity);
        }
    }

    /// Has the parity of the group of a slab leave.
    pub(in super::super) fn dissolve_for(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        if let Some(group) = pool.map.spaces[space].layout.group(slab) {
            self.dissolve(pool, space, group);
        }
    }

    /// What was being made anew is not any more: those that wait for their turn, or for what comes first, look again.
    pub(in super::super) fn mark_dissolving(&self, pool: &mut Pool) {
        if !self.cold.is_any_dissolving() {
            return;
        }
        for space in pool.map.spaces.indices() {
            for group in self.cold.groups_of(space) {
                if self.cold.course(space, group) == Course::Dissolving {
                    pool.map.mark_group(space, pool.map.spaces[space].layout.parity(group));
                }
            }
        }
    }

    fn refused(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let group = pool.map.spaces[space].layout.group(slab);
        group.map(|group| self.cold.refused(space, group)).unwrap_or_default()
    }

    /// A server has no room for a slab that is to be made.
    pub(in super::super) fn has_refused(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
        if let Some(group) = pool.map.spaces[space].layout.group(slab) {
            self.cold.refuse(space, group, peer);
        }
        self.mark_dissolving(pool);
    }

    /// Another owner has the space, or it is being removed: its groups are nothing to this one.
    pub(in super::super) fn forget_groups(&mut self, space: SpaceIndex) {
        self.cold.forget(space);
    }

    /// A space is being removed: each of its slabs is what its copies are, and nothing is made of others.
    pub(in super::super) fn forget_parity(&mut self, pool: &mut Pool, space: SpaceIndex) {
        if std::mem::replace(&mut pool.map.spaces[space].is_removed, true) {
            return;
        }
        self.forget_groups(space);
        for slab in pool.map.spaces[space].slabs.indices() {
            let state = &mut pool.map.spaces[space].slabs[slab];
            if matches!(state.phase, Phase::Lost) && !state.entry.replicas.is_empty() {
                state.phase = Phase::Opening(Vec::new());
            }
            pool.map.mark(space, slab);
        }
    }
}

impl Pool {
    /// Copies of a slab at servers that answer.
    pub(super) fn copies_here(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        self.copies_to_ask(space, slab).iter().filter(|peer| !self.sessions.peers[*peer].is_down()).collect()
    }

    fn is_gone_and_waits(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.map.spaces[space].slabs[slab];
        let is_member = !self.map.spaces[space].layout.is_parity(slab);
        let is_open = matches!(state.phase, Phase::Open) && state.repair.is_none() && !state.is_stuck;
        is_member && is_open && self.copies_here(space, slab).is_empty() && self.can_reconstruct(space, slab)
    }

    /// Whether parity may leave for the sake of what its members have: of each of them, a server with a copy must have lived after
    /// that was wanted. Until then it may be dead and nobody has noticed, and its slab is in the parity alone. So those servers are
    /// asked. Their answer brings the parity up again, as does their silence.
    fn members_live(
        &mut self,
        now: Time,
        space: SpaceIndex,
        group: GroupIndex,
        members: &Members,
        doubt: Option<Doubt>,
    ) -> bool {
        let parity = self.map.spaces[space].layout.parity(group);
        let leaving = self.sessions.peers_of(&self.map.spaces[space].slabs[parity].entry);
        let since = doubt.filter(|doubt| doubt.leaving == leaving).map_or(now, |doubt| doubt.since);
        let phase = |slab: &SlabNo| &self.map.spaces[space].slabs[*slab].phase;
        let kept = members.iter().filter(|slab| !matches!(phase(slab), Phase::Lost));
        let copies = kept.map(|slab| self.copies_here(space, *slab));
        let is_unproven = |copies: &PeerSet| copies.iter().all(|peer| self.sessions.peers[peer].lived_at() < since);
        let unproven = copies.filter(is_unproven).fold(PeerSet::default(), PeerSet::union);
        if unproven.is_empty() {
            return true;
        }
        self.map.spaces[space].slabs[parity].doubt = Some(Doubt { leaving, since });
        for peer in unproven.iter() {
            self.sessions.peers[peer].doubt(now, since);
        }
        false
    }
}

impl Map {
    /// Whether nothing may be written to a group. Only its owner could.
    pub(in super::super) fn is_frozen(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let state = &self.spaces[space];
        let has = |slab: &super::super::slab::Slab| slab.is_held() || slab.pending.is_some();
        !state.is_removed
            && state.tenure == Tenure::Owner
            && state.slabs.get(state.layout.parity(group)).is_some_and(has)
    }

    /// The same for the group of a slab.
    pub(in super::super) fn is_in_frozen(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.spaces[space].layout.group(slab).is_some_and(|group| self.is_frozen(space, group))
    }

    /// Whether a group with parity is worth nothing any more.
    pub(super) fn is_worthless(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let slabs = &self.spaces[space].slabs;
        let is_lost = |slab: SlabNo| slabs.get(slab).is_some_and(|slab| matches!(slab.phase, Phase::Lost));
        self.spaces[space].layout.columns(group).any(is_lost) || self.is_ledger_lost(space, group)
    }

    /// The map is being asked to have the parity of a slab's group leave.
    pub(in super::super) fn is_parting(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.spaces[space];
        let parity = state.layout.group(slab).and_then(|group| state.slabs.get(state.layout.parity(group)));
        parity.is_some_and(|parity| matches!(parity.phase, Phase::Leaving))
    }

    /// Whether somebody can have taken this version for parity: whoever made it may have had epochs of its own.
    pub(in super::super) fn may_be_parity(&self, space: SpaceIndex, slab: SlabNo, version: Version) -> bool {
        let state = &self.spaces[space];
        state.layout.is_parity(slab) && version <= Version::new(state.generation, state.sequence, true)
    }
}

impl Sessions {
    fn flees(&self, peer: PeerIndex) -> bool {
        self.peers[peer].wants_relief() && !self.peers[peer].has_overflow_disk()
    }
}
