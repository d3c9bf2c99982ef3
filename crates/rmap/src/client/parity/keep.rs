//! What a keeper does, and an owner with groups that have parity: parity is made, copies beyond one are dropped, what is gone is
//! made anew, and no server has two of a group.

use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::units::{SlabNo, Time};

impl Parity {
    /// What comes next for a group that is to have parity. Its last step is the map's: then it has.
    pub fn make_group(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        now: Time,
        space: SpaceIndex,
        group: GroupIndex,
    ) {
        let members = pool.map.held_members(space, group);
        let slabs = &pool.map.spaces[space].slabs;
        let ready = |slab: &SlabNo| {
            let slab = &slabs[*slab];
            let is_open = matches!(slab.phase, Phase::Open) && slab.disputed.is_empty();
            is_open && !slab.entry.lost && slab.pending.is_none() && slab.repair.is_none()
        };
        if members.is_empty() || !members.iter().all(ready) {
            return;
        }
        for slab in &members {
            match pool.map.spaces[space].slabs[*slab].table {
                Table::Known | Table::Compared { .. } | Table::Written { .. } | Table::Refused => {}
                Table::Wanting => self.write_table(pool, space, *slab),
                _ => self.compare_table(pool, pages, space, *slab),
            }
        }
        let is_known = |slab: &SlabNo| pool.map.spaces[space].slabs[*slab].table == Table::Known;
        if !members.iter().all(is_known) || !pool.is_ledger_kept(space, group) {
            return;
        }
        let parity = pool.map.spaces[space].layout.parity(group);
        if matches!(pool.map.spaces[space].slabs[parity].phase, Phase::Vacant) {
            pool.map.make_parity_table(space, group);
            pool.map.spaces[space].slabs[parity].phase = Phase::Open;
        }
        self.keep_column(pool, pages, redundancy, now, space, parity);
    }

    /// Does what comes next for an open slab of a group, as its keeper.
    pub fn keep_column(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        now: Time,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let doubt = pool.map.spaces[space].slabs[slab].doubt.take();
        if pool.map.is_changing(space, slab) {
            return;
        }
        let is_dissolving = self.is_dissolving(pool, space, slab);
        let unheard = |slab: SlabNo| pool.has_unheard_copy(space, slab);
        // Where all get copies of their own again, none depends on where the others are.
        if unheard(slab) || !is_dissolving && pool.map.other_columns(space, slab).any(unheard) {
            return;
        }
        if pool.gone_leave(space, slab) {
            return;
        }
        let copies = pool.sessions.peers_of(&pool.map.spaces[space].slabs[slab].entry);
        let layout = pool.map.spaces[space].layout;
        if let Some(group) = layout.group(slab).filter(|_| is_dissolving && layout.is_parity(slab)) {
            return self.part_group(pool, pages, redundancy, now, (space, group), doubt);
        }
        let columns = pool.columns_here(space, slab);
        let here = columns[0];
        if pool.map.spaces[space].slabs[slab].repair.is_some() {
            return redundancy.advance_repair(pool, pages, self, (space, slab), here, doubt);
        }
        if is_dissolving {
            // One that was not heard of since this owner began would be waited for: it goes, as it would without parity.
            let unheard = copies.minus(pool.map.heard_of(space, slab));
            let silent: PeerSet = unheard.iter().filter(|peer| pool.sessions.peers[*peer].is_down()).collect();
            if !silent.is_empty() && !here.is_empty() {
                if pool.may_leave(now, (space, slab), doubt, silent, here) {
                    pool.map.propose(space, slab, pool.entry_of(space, slab, copies.minus(silent)));
                }
                return;
            }
            return self.dissolve_column(pool, redundancy, space, slab, here);
        }
        let stays = pool.copy_that_stays(space, slab);
        // A copy leaves for parity, which is of use as long as the ledger is there.
        let has_ledger = |group: GroupIndex| pool.map.has_parity(space, group) && pool.is_ledger_kept(space, group);
        let may_be_single = layout.group(slab).is_some_and(has_ledger);
        let whole = columns.iter().all(|copies| !copies.is_empty());
        if let Some(peer_idx) = stays.filter(|_| copies.len() > 1 && whole && may_be_single) {
            // Another that is on its way was given a server that this one, too, could stay at.
            if pool.map.other_columns(space, slab).any(|column| pool.map.spaces[space].slabs[column].repair.is_some()) {
                return;
            }
            let keep: PeerSet = [peer_idx].into_iter().collect();
            if pool.may_leave(now, (space, slab), doubt, copies.minus(keep), keep) {
                pool.map.propose(space, slab, pool.entry_of(space, slab, keep));
            }
            return;
        }
        let relief = here.iter().find(|peer| pool.sessions.peers[*peer].wants_relief());
        let replaces = match (copies.is_empty(), here.is_empty()) {
            (true, _) => None,
            (false, true) => copies.iter().next(),
            (false, false) if copies.len() == 1 && relief.is_some() => relief,
            // Wherever it is, another one of the group needs that server more.
            (false, false) if stays.is_none() => here.iter().next(),
            (false, false) => return,
        };
        redundancy.begin_column(pool, space, slab, here, replaces);
    }
}
