//! Makes parity of what is cold, group by group.

use std::time::Duration;

use super::cold::{Course, HELD_MIN, MAKING_MAX};
use crate::client::Client;
use crate::client::index::{GroupIndex, PeerIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::map::Map;
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::outcome::COPIES_MAX;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::{LEDGER_COPIES, Members};
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::client::vacate::MAP_SILENT;
use crate::units::{SlabNo, Time};

impl Client {
    /// Replaces [`ClientConfig::parity_after`](crate::client::ClientConfig::parity_after) from now on.
    pub fn set_parity_after(&mut self, after: Option<Duration>) {
        self.pool.config.parity_after = after;
        self.parity.cold.reset();
        self.pool.map.spaces.indices().for_each(|space| self.pool.expect_parity(space));
        self.make_room();
    }
}

impl Parity {
    /// Begins with groups that are cold by now, and looks at those that are not done.
    pub(in crate::client) fn poll_cold(&mut self, pool: &mut Pool, pages: &Pages, redundancy: &Redundancy, now: Time) {
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
    pub(in crate::client::parity) fn make_cold(
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

    /// As if it had not begun. It is tried again when the group was quiet for as long as at first.
    pub(in crate::client::parity) fn stop_making(
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

impl Redundancy {
    /// Whether nothing is under way in a group, and every copy that it should have is in sync at a server that answers.
    fn is_still(&self, pool: &Pool, pages: &Pages, space: SpaceIndex, group: GroupIndex) -> bool {
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
}

impl Parity {
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
}

impl Parity {
    /// When groups are to be looked at next.
    pub(in crate::client) fn cold_due(&self, pool: &Pool) -> Option<Time> {
        pool.config.parity_after.and(self.cold.due())
    }
}

impl Pool {
    /// There may be slabs beyond the last page.
    pub(in crate::client) fn expect_parity(&mut self, space: SpaceIndex) {
        if self.config.parity_after.is_some() && self.map.makes_parity(space) {
            let total = self.map.spaces[space].layout.total();
            self.map.spaces[space].extend_to(total);
        }
    }

    /// Each slab of a group and its parity have to be at servers of their own.
    fn servers_suffice(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let members = self.map.held_members(space, group);
        let taken =
            members.iter().flat_map(|slab| self.sessions.peers_of(&self.map.spaces[space].slabs[*slab].entry).iter());
        let lends =
            |peer: &PeerIndex| self.sessions.peers[*peer].can_lend() && !self.sessions.peers[*peer].has_overflow_disk();
        let all = taken.chain(self.sessions.peers.indices().filter(lends)).collect::<PeerSet>();
        let parity = self.map.spaces[space].layout.parity(group);
        all.len() > members.len() && self.room_apart(space, parity, false).is_some()
    }

    /// Whether what the ledger says of a group is at both of its copies: with one, a server could take it along with a member.
    pub(in crate::client::parity) fn is_ledger_kept(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        self.map.ledger_slabs(space, group).all(|slab| self.is_kept(space, slab))
    }

    /// The same of one slab of the ledger.
    pub(in crate::client::parity) fn is_kept(&self, space: SpaceIndex, ledger: SlabNo) -> bool {
        self.map.spaces[space].slabs.get(ledger).is_some_and(|state| {
            let good = self.sessions.peers_of(&state.entry).minus(state.failed);
            matches!(state.phase, Phase::Open) && good.len() >= LEDGER_COPIES
        })
    }
}

impl Map {
    /// Whether this client is the owner of a space whose cold groups are better off with parity.
    fn makes_parity(&self, space: SpaceIndex) -> bool {
        let state = &self.spaces[space];
        state.tenure == Tenure::Owner && !state.is_taken && !state.is_removed && state.copies == COPIES_MAX
    }

    /// A group waits for the map's word once that was asked for, and so do its writes.
    fn is_map_silent(&self, now: Time) -> bool {
        self.questions.silent_for(now).is_some_and(|silent| silent >= MAP_SILENT)
    }

    /// Slabs of the ledger with the versions of a group.
    pub(in crate::client::parity) fn ledger_slabs(
        &self,
        space: SpaceIndex,
        group: GroupIndex,
    ) -> impl Iterator<Item = SlabNo> + use<> {
        let layout = self.spaces[space].layout;
        let [first, last] = layout.table_pages_of(group).map(|page| self.slab_of(page).unwrap_or(SlabNo(0)));
        (first.0..=last.0).map(SlabNo)
    }

    /// Who comes next would not know what there is to put together.
    pub(in crate::client::parity) fn is_ledger_lost(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let slabs = &self.spaces[space].slabs;
        self.ledger_slabs(space, group)
            .any(|slab| slabs.get(slab).is_some_and(|slab| matches!(slab.phase, Phase::Lost)))
    }

    /// What the ledger says of a group without parity counts for nothing.
    pub(in crate::client::parity) fn forget_tables(&mut self, space: SpaceIndex, group: GroupIndex) {
        for slab in self.spaces[space].layout.members(group) {
            self.spaces[space].slabs[slab].table = Table::Unknown;
        }
    }
}
