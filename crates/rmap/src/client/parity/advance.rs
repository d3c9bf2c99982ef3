//! Brings groups on: makes their parity, opens their members, looks at their copies.

use super::cold::Course;
use super::{LEDGER_COPIES, Members, ParityView};
use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::map::Map;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
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

    /// What does not belong to any one slab. `true` if slabs have to be looked at again.
    pub(in crate::client) fn maintain_parity(&mut self) -> bool {
        if self.parity.stripes.has_turn() {
            self.pages.begin_waiting_stripes(&mut self.pool, &mut self.parity);
        }
        let any = self.pages.take_own_results(&mut self.pool);
        self.maintain_ledger() || any
    }

    /// Looks at a slab of a group that has parity, or is to have. `false` if it is a slab like any other.
    pub(in crate::client) fn advance_grouped(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) -> bool {
        let layout = self.pool.map.spaces[space].layout;
        let Some(group) = layout.group(slab).filter(|_| !self.pool.map.spaces[space].is_removed) else {
            self.pool.ledger_was_looked_at(space, slab);
            return false;
        };
        let owns = self.pool.map.spaces[space].tenure == Tenure::Owner;
        if owns && self.pool.map.is_frozen(space, group) {
            self.decline_late(space, slab);
        }
        if !self.pool.map.has_parity(space, group) && owns {
            return self.advance_cold(now, space, slab);
        }
        if !self.pool.map.has_parity(space, group) {
            let keeps =
                self.pool.map.spaces[space].tenure == Tenure::Keeper && self.pool.map.spaces[space].wants_parity;
            if keeps && layout.is_parity(slab) {
                self.make_group(now, space, group);
            } else if keeps && matches!(self.pool.map.spaces[space].slabs[slab].phase, Phase::Open) {
                self.pool.map.mark(space, layout.parity(group));
            }
            return layout.is_parity(slab);
        }
        if matches!(self.pool.map.spaces[space].slabs[slab].phase, Phase::Vacant | Phase::Granting(_) | Phase::Leaving)
        {
            return false;
        }
        let is_gone = self.pool.map.spaces[space].slabs[slab].entry.lost;
        // An owner may have given a slab up that the map has.
        let is_lost = |slab: &Slab| slab.entry.lost || owns && matches!(slab.phase, Phase::Lost);
        let others_gone =
            self.pool.map.other_columns(space, slab).any(|column| is_lost(&self.pool.map.spaces[space].slabs[column]));
        if owns && self.pool.map.is_worthless(space, group) {
            self.parity.dissolve(&mut self.pool, space, group);
        }
        // Of one that is not open, too: it may never be, where others of the group are lost, and these wait for what is known of it.
        self.pool.check_copies(space, slab);
        if is_gone && others_gone {
            self.slab_is_lost(space, slab, Failure::Lost);
        } else if matches!(self.pool.map.spaces[space].slabs[slab].phase, Phase::Open) {
            self.maintain_column(now, space, slab);
        } else if layout.is_parity(slab) {
            self.open_parity(space, group);
            self.pool.keep_unopened(space, slab);
        } else {
            let by_ledger = self.open_member(space, slab);
            if by_ledger {
                self.pool.keep_unopened(space, slab);
            }
            return by_ledger;
        }
        let is_open = matches!(self.pool.map.spaces[space].slabs[slab].phase, Phase::Open);
        if layout.is_parity(slab) && !is_open && self.parity.is_dissolving(&self.pool, space, slab) {
            // Nobody may ever need to read it.
            let doubt = self.pool.map.spaces[space].slabs[slab].doubt.take();
            self.part_group(now, (space, group), doubt);
        }
        true
    }

    /// A slab of an owner's group that the map does not say to have parity.
    pub(super) fn advance_cold(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) -> bool {
        let layout = self.pool.map.spaces[space].layout;
        let Some(group) = layout.group(slab) else { return false };
        if layout.is_parity(slab) {
            self.make_cold(now, space, group);
            return true;
        }
        if self.parity.cold.course(space, group) == Course::Making {
            self.pool.map.mark(space, layout.parity(group));
        }
        // While the map is being asked for parity it is asked for nothing else: whatever happens is judged after that.
        self.pool.map.is_frozen(space, group)
    }

    pub(super) fn slab_is_lost(&mut self, space: SpaceIndex, slab: SlabNo, failure: Failure) {
        self.abort_repair(space, slab);
        let owns = self.pool.map.spaces[space].tenure == Tenure::Owner;
        let is_new = !matches!(self.pool.map.spaces[space].slabs[slab].phase, Phase::Lost);
        self.pool.stats.slabs_lost += u64::from(owns && is_new && !self.pool.map.spaces[space].layout.is_parity(slab));
        self.pool.map.spaces[space].slabs[slab].phase = Phase::Lost;
        self.fail_ops(space, Some(slab), failure);
        self.pool.look_after_if_reader(&self.parity, space, slab);
    }

    /// By what the ledger says of it. `false`: there is no ledger any more, and its copy has to say it.
    pub(super) fn open_member(&mut self, space: SpaceIndex, slab: SlabNo) -> bool {
        match self.pool.map.spaces[space].slabs[slab].table {
            Table::Known => self.column_opens(space, slab),
            Table::Asked { .. } => {}
            Table::Bad => self.slab_is_lost(space, slab, Failure::Corrupt),
            Table::Gone if self.pool.map.spaces[space].slabs[slab].entry.lost => {
                self.slab_is_lost(space, slab, Failure::Lost);
            }
            Table::Gone => return false,
            _ => self.parity.read_table(&mut self.pool, &self.pages, space, slab),
        }
        true
    }

    pub(super) fn open_parity(&mut self, space: SpaceIndex, group: GroupIndex) {
        if self.pool.map.members_known(space, group) {
            self.pool.map.make_parity_table(space, group);
            self.column_opens(space, self.pool.map.spaces[space].layout.parity(group));
        }
    }

    pub(super) fn column_opens(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.pool.map.spaces[space].slabs[slab].phase = Phase::Open;
        self.pool.map.mark_group(space, slab);
        self.wake_ops(space, slab);
    }

    pub(super) fn maintain_column(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) {
        self.pages.retry_reads(&mut self.pool, &mut self.parity, space, slab);
        if self.pool.map.spaces[space].tenure == Tenure::Reader {
            self.pool.look_after(&self.parity, space, slab);
        } else {
            self.keep_column(now, space, slab);
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
