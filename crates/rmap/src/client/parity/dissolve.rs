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

use crate::client::index::{GroupIndex, OpIndex, SpaceIndex};
use crate::client::ops::{Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::cold::Course;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::repair::{REPAIRS_MAX, Repair};
use crate::client::slab::{Doubt, Phase};
use crate::client::{Failure, Fault};
use crate::control::MapEntry;
use crate::units::{SlabNo, Time};

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
    pub fn waits_for_group(
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

    /// What a member of a group that is being dissolved needs next.
    pub fn dissolve_column(
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
    pub fn has_turn(&self, pool: &Pool, redundancy: &Redundancy) -> bool {
        let dissolving = redundancy.repairs.iter().filter(|(space, slab)| self.is_dissolving(pool, *space, *slab));
        dissolving.count() < REPAIRS_MAX
    }

    /// Whether some server may take a copy beside those that there are.
    pub fn has_room(
        &self,
        pool: &Pool,
        redundancy: &Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
        on_disk: bool,
    ) -> bool {
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

    /// The parity of a group that is being dissolved leaves the map when it is needed no more.
    pub fn part_group(
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

    /// Writes that wait for the map's word on a group end in time.
    pub fn decline_late(
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
    pub fn parity_changed(
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
