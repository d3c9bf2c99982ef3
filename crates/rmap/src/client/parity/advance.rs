//! Brings groups on: makes their parity, opens their members, looks at their copies.

use super::cold::Course;
use super::{LEDGER_COPIES, Members, ParityView};
use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::map::Map;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::sealed::Tenure;
use crate::client::slab::{Phase, Slab};
use crate::client::{Client, Failure, SpaceRef};
use crate::units::{SlabNo, Time, Version};

impl Client {
    /// Makes the parity of a sealed space: this client becomes its keeper, as soon as it can be. How far it is says
    /// [`Client::parity`]. Nothing is done for a space that another client writes.
    pub fn make_parity(&mut self, now: Time, space: SpaceRef) {
        if self.pool.map.is_followed(space.0) {
            return;
        }
        self.pool.now = now;
        let total = self.pool.map.spaces[space.0].layout.total();
        self.pool.map.spaces[space.0].extend_to(total);
        self.pool.map.spaces[space.0].wants_parity = true;
        if self.pool.map.spaces[space.0].tenure == Tenure::Reader {
            self.pool.begin_watch(space.0);
        } else {
            self.pool.map.spaces[space.0].slabs.indices().for_each(|slab| self.pool.map.mark(space.0, slab));
        }
        self.settle(now);
    }

    /// How far the parity of a space is.
    pub fn parity(&self, space: SpaceRef) -> ParityView {
        let (space, state) = (space.0, &self.pool.map.spaces[space.0]);
        let mut view = ParityView::default();
        for group in state.layout.groups() {
            let columns: Vec<&Slab> = state.layout.columns(group).filter_map(|slab| state.slabs.get(slab)).collect();
            if state.layout.members(group).all(|slab| !state.slabs[slab].is_held()) {
                continue;
            }
            view.groups += 1;
            view.with_parity += usize::from(self.pool.map.has_parity(space, group));
            view.stuck += usize::from(columns.iter().any(|slab| slab.is_stuck || slab.table == Table::Refused));
            let copies = || columns.iter().flat_map(|slab| &slab.entry.replicas);
            let mut servers: Vec<u32> = copies().map(|replica| replica.server.0).collect();
            servers.sort_unstable();
            servers.dedup();
            let held = columns.iter().filter(|slab| slab.is_held()).count();
            let single = columns.iter().all(|slab| slab.entry.replicas.len() == usize::from(slab.is_held()));
            let copies = |slab: SlabNo| state.slabs.get(slab).map_or(0, |slab| slab.entry.replicas.len());
            let has_ledger = self.pool.map.ledger_slabs(space, group).all(|slab| copies(slab) >= LEDGER_COPIES);
            let is_whole = self.pool.map.has_parity(space, group) && single && servers.len() == held && has_ledger;
            view.whole += usize::from(is_whole);
        }
        view
    }

    /// Groups of a space whose parity is in the map.
    pub fn groups_with_parity(&self, space: SpaceRef) -> usize {
        self.pool.map.spaces[space.0].layout.groups().filter(|group| self.pool.map.has_parity(space.0, *group)).count()
    }
}

impl Parity {
    /// What does not belong to any one slab. `true` if slabs have to be looked at again.
    pub(in crate::client) fn maintain_parity(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
    ) -> bool {
        if self.stripes.has_turn() {
            pages.begin_waiting_stripes(pool, self);
        }
        let any = pages.take_own_results(pool);
        self.maintain_ledger(pool, pages, redundancy) || any
    }

    /// Looks at a slab of a group that has parity, or is to have. `false` if it is a slab like any other.
    pub(in crate::client) fn advance_grouped(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        now: Time,
        space: SpaceIndex,
        slab: SlabNo,
    ) -> bool {
        let layout = pool.map.spaces[space].layout;
        let Some(group) = layout.group(slab).filter(|_| !pool.map.spaces[space].is_removed) else {
            pool.ledger_was_looked_at(space, slab);
            return false;
        };
        let owns = pool.map.spaces[space].tenure == Tenure::Owner;
        if owns && pool.map.is_frozen(space, group) {
            self.decline_late(pool, pages, redundancy, space, slab);
        }
        if !pool.map.has_parity(space, group) && owns {
            return self.advance_cold(pool, pages, redundancy, now, space, slab);
        }
        if !pool.map.has_parity(space, group) {
            let keeps = pool.map.spaces[space].tenure == Tenure::Keeper && pool.map.spaces[space].wants_parity;
            if keeps && layout.is_parity(slab) {
                self.make_group(pool, pages, redundancy, now, space, group);
            } else if keeps && matches!(pool.map.spaces[space].slabs[slab].phase, Phase::Open) {
                pool.map.mark(space, layout.parity(group));
            }
            return layout.is_parity(slab);
        }
        if matches!(pool.map.spaces[space].slabs[slab].phase, Phase::Vacant | Phase::Granting(_) | Phase::Leaving) {
            return false;
        }
        let is_gone = pool.map.spaces[space].slabs[slab].entry.lost;
        // An owner may have given a slab up that the map has.
        let is_lost = |slab: &Slab| slab.entry.lost || owns && matches!(slab.phase, Phase::Lost);
        let others_gone =
            pool.map.other_columns(space, slab).any(|column| is_lost(&pool.map.spaces[space].slabs[column]));
        if owns && pool.map.is_worthless(space, group) {
            self.dissolve(pool, space, group);
        }
        // Of one that is not open, too: it may never be, where others of the group are lost, and these wait for what is known of it.
        pool.check_copies(space, slab);
        if is_gone && others_gone {
            self.slab_is_lost(pool, pages, redundancy, space, slab, Failure::Lost);
        } else if matches!(pool.map.spaces[space].slabs[slab].phase, Phase::Open) {
            self.maintain_column(pool, pages, redundancy, now, space, slab);
        } else if layout.is_parity(slab) {
            self.open_parity(pool, pages, redundancy, space, group);
            pool.keep_unopened(space, slab);
        } else {
            let by_ledger = self.open_member(pool, pages, redundancy, space, slab);
            if by_ledger {
                pool.keep_unopened(space, slab);
            }
            return by_ledger;
        }
        let is_open = matches!(pool.map.spaces[space].slabs[slab].phase, Phase::Open);
        if layout.is_parity(slab) && !is_open && self.is_dissolving(pool, space, slab) {
            // Nobody may ever need to read it.
            let doubt = pool.map.spaces[space].slabs[slab].doubt.take();
            self.part_group(pool, pages, redundancy, now, (space, group), doubt);
        }
        true
    }

    /// A slab of an owner's group that the map does not say to have parity.
    pub(super) fn advance_cold(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        now: Time,
        space: SpaceIndex,
        slab: SlabNo,
    ) -> bool {
        let layout = pool.map.spaces[space].layout;
        let Some(group) = layout.group(slab) else { return false };
        if layout.is_parity(slab) {
            self.make_cold(pool, pages, redundancy, now, space, group);
            return true;
        }
        if self.cold.course(space, group) == Course::Making {
            pool.map.mark(space, layout.parity(group));
        }
        // While the map is being asked for parity it is asked for nothing else: whatever happens is judged after that.
        pool.map.is_frozen(space, group)
    }

    pub(super) fn slab_is_lost(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
        failure: Failure,
    ) {
        redundancy.abort_repair(pool, pages, self, space, slab);
        let owns = pool.map.spaces[space].tenure == Tenure::Owner;
        let is_new = !matches!(pool.map.spaces[space].slabs[slab].phase, Phase::Lost);
        pool.stats.slabs_lost += u64::from(owns && is_new && !pool.map.spaces[space].layout.is_parity(slab));
        pool.map.spaces[space].slabs[slab].phase = Phase::Lost;
        pages.fail_ops(pool, redundancy, self, space, Some(slab), failure);
        pool.look_after_if_reader(self, space, slab);
    }

    /// By what the ledger says of it. `false`: there is no ledger any more, and its copy has to say it.
    pub(super) fn open_member(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
    ) -> bool {
        match pool.map.spaces[space].slabs[slab].table {
            Table::Known => self.column_opens(pool, pages, redundancy, space, slab),
            Table::Asked { .. } => {}
            Table::Bad => self.slab_is_lost(pool, pages, redundancy, space, slab, Failure::Corrupt),
            Table::Gone if pool.map.spaces[space].slabs[slab].entry.lost => {
                self.slab_is_lost(pool, pages, redundancy, space, slab, Failure::Lost);
            }
            Table::Gone => return false,
            _ => self.read_table(pool, pages, space, slab),
        }
        true
    }

    pub(super) fn open_parity(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        group: GroupIndex,
    ) {
        if pool.map.members_known(space, group) {
            pool.map.make_parity_table(space, group);
            self.column_opens(pool, pages, redundancy, space, pool.map.spaces[space].layout.parity(group));
        }
    }

    pub(super) fn column_opens(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        pool.map.spaces[space].slabs[slab].phase = Phase::Open;
        pool.map.mark_group(space, slab);
        pages.wake_ops(pool, redundancy, self, space, slab);
    }

    pub(super) fn maintain_column(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        now: Time,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        pages.retry_reads(pool, self, space, slab);
        if pool.map.spaces[space].tenure == Tenure::Reader {
            pool.look_after(self, space, slab);
        } else {
            self.keep_column(pool, pages, redundancy, now, space, slab);
        }
    }
}

impl Parity {
    /// How many copies a slab is to have.
    pub(in crate::client) fn wanted_copies(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> usize {
        let state = &pool.map.spaces[space];
        if state.layout.is_ledger(slab) {
            return LEDGER_COPIES;
        }
        let is_dissolved = self.is_dissolving(pool, space, slab) && !state.layout.is_parity(slab);
        let is_single = pool.map.is_grouped(space, slab) && !is_dissolved || pool.map.is_followed_group(space, slab);
        if is_single { 1 } else { state.copies }
    }
}

impl Pool {
    pub(in crate::client) fn look_after_if_reader(&mut self, parity: &Parity, space: SpaceIndex, slab: SlabNo) {
        if self.map.spaces[space].tenure == Tenure::Reader {
            self.look_after(parity, space, slab);
        }
    }
}

impl Pool {
    pub(super) fn check_copies(&mut self, space: SpaceIndex, slab: SlabNo) {
        let copies = self.sessions.peers_of(&self.map.spaces[space].slabs[slab].entry);
        for peer in copies.iter() {
            if self.fence(space, peer) {
                self.check_copy(space, slab, peer);
            }
        }
    }
}

impl Map {
    /// Whether the map says that a group has parity.
    pub(in crate::client) fn has_parity(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let state = &self.spaces[space];
        !state.is_removed && state.slabs.get(state.layout.parity(group)).is_some_and(Slab::is_held)
    }

    /// Whether a slab is one of a group that has parity.
    pub(in crate::client) fn is_grouped(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.spaces[space].layout.group(slab).is_some_and(|group| self.has_parity(space, group))
    }

    /// Slabs of a group depend on each other.
    pub(in crate::client) fn mark_group(&mut self, space: SpaceIndex, slab: SlabNo) {
        let layout = self.spaces[space].layout;
        for column in layout.group(slab).into_iter().flat_map(|group| layout.columns(group)) {
            if self.spaces[space].slabs.get(column).is_some() {
                self.mark(space, column);
            }
        }
    }

    pub(super) fn members_known(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        self.held_members(space, group).iter().all(|slab| self.knows_versions(space, *slab))
    }

    pub(super) fn held_members(&self, space: SpaceIndex, group: GroupIndex) -> Members {
        let state = &self.spaces[space];
        state.layout.members(group).filter(|slab| state.slabs[*slab].is_held()).collect()
    }

    /// The versions that parity has: the greatest of its members' at each place, and none of an earlier life of it.
    pub(super) fn make_parity_table(&mut self, space: SpaceIndex, group: GroupIndex) {
        let members = self.held_members(space, group);
        let size = self.size;
        let parity = self.spaces[space].layout.parity(group);
        let slabs = &mut self.spaces[space].slabs;
        slabs[parity].make_table(&mut self.tables);
        for index in 0..size.pages() {
            let versions = members.iter().map(|slab| slabs[*slab].version(index));
            let greatest = versions.filter(|version| version.has_content()).max();
            slabs[parity].versions[index] = greatest.map_or(Version::NEVER, |version| version.max(slabs[parity].epoch));
        }
    }
}
