//! Brings groups on: makes their parity, opens their members, looks at their copies.

use crate::client::Failure;
use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::cold::Course;
use crate::client::parity::layout::LEDGER_COPIES;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::sealed::Tenure;
use crate::client::slab::{Phase, Slab};
use crate::units::{SlabNo, Time};

impl Parity {
    /// What does not belong to any one slab. `true` if slabs have to be looked at again.
    pub fn maintain_parity(&mut self, pool: &mut Pool, pages: &mut Pages, redundancy: &mut Redundancy) -> bool {
        if self.stripes.has_turn() {
            pages.begin_waiting_stripes(pool, self);
        }
        let any = pages.take_own_results(pool);
        self.maintain_ledger(pool, pages, redundancy) || any
    }

    /// How many copies a slab is to have.
    pub fn wanted_copies(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> usize {
        let state = &pool.map.spaces[space];
        if state.layout.is_ledger(slab) {
            return LEDGER_COPIES;
        }
        let is_dissolved = self.is_dissolving(pool, space, slab) && !state.layout.is_parity(slab);
        let is_single = pool.map.is_grouped(space, slab) && !is_dissolved || pool.map.is_followed_group(space, slab);
        if is_single { 1 } else { state.copies }
    }

    /// Looks at a slab of a group that has parity, or is to have. `false` if it is a slab like any other.
    pub fn advance_grouped(
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
    fn advance_cold(
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

    /// By what the ledger says of it. `false`: there is no ledger any more, and its copy has to say it.
    fn open_member(
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

    fn open_parity(
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

    fn column_opens(
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

    fn maintain_column(
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

    fn slab_is_lost(
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
}
