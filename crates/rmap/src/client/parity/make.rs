//! Makes parity of what is cold, group by group.

use std::time::Duration;

use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::cold::{Course, MAKING_MAX};
use crate::client::parity::layout::Members;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::units::{SlabNo, Time};

impl Parity {
    /// When groups are to be looked at next.
    pub fn cold_due(&self, pool: &Pool) -> Option<Time> {
        pool.config.parity_after.and(self.cold.due())
    }

    /// Begins with groups that are cold by now, and looks at those that are not done.
    pub fn poll_cold(&mut self, pool: &mut Pool, pages: &Pages, redundancy: &Redundancy, now: Time) {
        let Some(after) = pool.config.parity_after else { return };
        if !self.cold.poll(now, after) {
            return;
        }
        for space in pool.map.spaces.indices() {
            for group in self.cold.groups_of(space) {
                if self.cold.course(space, group) != Course::Still {
                    pool.map.mark(space, pool.map.spaces[space].layout.parity(group));
                }
            }
        }
        let is_silent = pool.map.is_map_silent(now);
        let (all, mut making) = self.cold.count();
        for _ in 0..all {
            if making >= MAKING_MAX || is_silent {
                return;
            }
            let Some((space, group)) = self.cold.next_group() else { return };
            if self.is_cold(pool, pages, redundancy, now, after, (space, group)) {
                making += 1;
                self.cold.begin_making(space, group);
                pool.map.mark(space, pool.map.spaces[space].layout.parity(group));
            }
        }
    }

    fn is_cold(
        &self,
        pool: &Pool,
        pages: &Pages,
        redundancy: &Redundancy,
        now: Time,
        after: Duration,
        (space, group): (SpaceIndex, GroupIndex),
    ) -> bool {
        let state = &pool.map.spaces[space];
        let parity = state.layout.parity(group);
        let is_free = state.slabs.get(parity).is_some_and(|slab| matches!(slab.phase, Phase::Vacant));
        let is_due = self.cold.is_quiet(now, after, (space, group));
        is_due
            && is_free
            && pool.map.makes_parity(space)
            && !pool.map.is_frozen(space, group)
            && redundancy.is_still(pool, pages, space, group)
            && pool.servers_suffice(space, group)
            && !pool.map.is_ledger_lost(space, group)
    }

    /// What comes next for a group whose parity is being made. Its last step is the map's: from when that is asked for, the group
    /// is frozen.
    pub fn make_cold(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        now: Time,
        space: SpaceIndex,
        group: GroupIndex,
    ) {
        let parity = pool.map.spaces[space].layout.parity(group);
        let is_making = self.cold.course(space, group) == Course::Making;
        if !is_making || pool.map.is_frozen(space, group) {
            return;
        }
        let members = pool.map.held_members(space, group);
        let slabs = &pool.map.spaces[space].slabs;
        let is_refused = members.iter().any(|slab| slabs[*slab].table == Table::Refused);
        let cannot = is_refused || slabs[parity].is_stuck || pool.map.is_ledger_lost(space, group);
        if cannot || !redundancy.is_still(pool, pages, space, group) {
            return self.stop_making(pool, pages, redundancy, space, group);
        }
        if !self.is_written_down(pool, pages, space, group, &members) || pool.map.is_map_silent(now) {
            return;
        }
        if matches!(pool.map.spaces[space].slabs[parity].phase, Phase::Vacant) {
            pool.map.make_parity_table(space, group);
            pool.map.spaces[space].slabs[parity].phase = Phase::Open;
        }
        let has_begun = pool.map.spaces[space].slabs[parity].repair.is_some();
        let is_refused = !self.cold.refused(space, group).is_empty();
        if !has_begun && (is_refused || pool.room_apart(space, parity, false).is_none()) {
            return self.stop_making(pool, pages, redundancy, space, group);
        }
        self.keep_column(pool, pages, redundancy, now, space, parity);
    }

    /// Whether the versions of all members are in the ledger, at both of its copies.
    fn is_written_down(
        &mut self,
        pool: &mut Pool,
        pages: &Pages,
        space: SpaceIndex,
        group: GroupIndex,
        members: &Members,
    ) -> bool {
        for slab in members.iter().copied() {
            match pool.map.spaces[space].slabs[slab].table {
                Table::Known | Table::Written { .. } => {}
                // What an earlier making began has to end first: what the ledger has would be either.
                _ if pages.has_own(space, slab) => {}
                _ => self.write_table(pool, space, slab),
            }
        }
        let is_known = |slab: &SlabNo| pool.map.spaces[space].slabs[*slab].table == Table::Known;
        members.iter().all(is_known) && pool.is_ledger_kept(space, group)
    }

    /// As if it had not begun. It is tried again when the group was quiet for as long as at first.
    pub fn stop_making(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        group: GroupIndex,
    ) {
        let parity = pool.map.spaces[space].layout.parity(group);
        self.cold.stop_making(pool.now, space, group);
        redundancy.end_copies(pool, self, space, parity);
        redundancy.abort_repair(pool, pages, self, space, parity);
        // What was sent already is of a life that is over.
        let epoch = pool.map.spaces[space].next_version(false);
        let state = &mut pool.map.spaces[space].slabs[parity];
        (state.phase, state.is_stuck, state.doubt) = (Phase::Vacant, false, None);
        state.failed = PeerSet::default();
        state.epoch = epoch.unwrap_or(state.epoch);
        pool.map.tables.give_back(std::mem::take(&mut state.versions).into());
        pool.map.forget_tables(space, group);
    }
}
