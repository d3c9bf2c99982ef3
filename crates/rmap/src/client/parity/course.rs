//! What an owner does with each of its groups: nothing, make parity, or have it leave ([`Course`]).

use crate::client::index::{GroupIndex, PeerIndex, SpaceIndex};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::cold::Course;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::units::SlabNo;

impl Parity {
    /// Whether the parity of the group of a slab is to leave.
    pub fn is_dissolving(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> bool {
        let group = pool.map.spaces[space].layout.group(slab);
        group.is_some_and(|group| self.cold.course(space, group) == Course::Dissolving)
    }

    /// Has the parity of a group leave.
    pub fn dissolve(&mut self, pool: &mut Pool, space: SpaceIndex, group: GroupIndex) {
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
    pub fn dissolve_for(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        if let Some(group) = pool.map.spaces[space].layout.group(slab) {
            self.dissolve(pool, space, group);
        }
    }

    /// What was being made anew is not any more: those that wait for their turn, or for what comes first, look again.
    pub fn mark_dissolving(&self, pool: &mut Pool) {
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

    /// Servers that have no room for what the group of a slab needs.
    pub fn refused(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let group = pool.map.spaces[space].layout.group(slab);
        group.map(|group| self.cold.refused(space, group)).unwrap_or_default()
    }

    /// A server has no room for a slab that is to be made.
    pub fn has_refused(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
        if let Some(group) = pool.map.spaces[space].layout.group(slab) {
            self.cold.refuse(space, group, peer);
        }
        self.mark_dissolving(pool);
    }

    /// Another owner has the space, or it is being removed: its groups are nothing to this one.
    pub fn forget_groups(&mut self, space: SpaceIndex) {
        self.cold.forget(space);
    }

    /// A space is being removed: each of its slabs is what its copies are, and nothing is made of others.
    pub fn forget_parity(&mut self, pool: &mut Pool, space: SpaceIndex) {
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

    /// A slab is not what it was: its group is not cold, and parity of it that is being made would be wrong.
    pub fn note_change(
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
}
