//! What a keeper does, and an owner with groups that have parity: parity is made, copies beyond one are dropped, what is gone is
//! made anew, and no server has two of a group.

use super::super::ledger::Table;
use super::super::peer::PeerSet;
use super::super::repair::{REPAIRS_MAX, Repair};
use super::super::sealed::Tenure;
use super::super::slab::{Phase, Slab, Space};
use super::assign::{OfColumns, assign};
use crate::client::index::{GroupIndex, PeerIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::units::{SlabNo, Time};

impl Parity {
    /// What comes next for a group that is to have parity. Its last step is the map's: then it has.
    pub(super) fn make_group(
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
    pub(super) fn keep_column(
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

impl Redundancy {
    /// Begins a copy that is to be the one of this slab.
    fn begin_column(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        slab: SlabNo,
        here: PeerSet,
        replaces: Option<PeerIndex>,
    ) {
        let can_be_made = !here.is_empty() || pool.can_reconstruct(space, slab);
        if self.repairs_running(pool) >= REPAIRS_MAX || !can_be_made || pool.map.spaces[space].slabs[slab].is_stuck {
            return;
        }
        let flees = replaces.is_some_and(|peer| here.has(peer) && !pool.sessions.peers[peer].has_overflow_disk());
        let Some(peer) = pool.room_apart(space, slab, flees) else { return };
        let Some(grant) = pool.map.spaces[space].next_version(false) else { return };
        pool.sessions.peers[peer].take_slab();
        self.begins_repair(pool, space, slab, Repair::new(peer, grant, replaces));
        pool.map.mark(space, slab);
    }
}

impl Pool {
    /// A slab of the ledger was looked at. If both of its copies are there, and nothing is moved, groups that waited for that go on.
    pub(super) fn ledger_was_looked_at(&mut self, space: SpaceIndex, ledger: SlabNo) {
        let Space { tenure, layout, slabs, .. } = &self.map.spaces[space];
        let (layout, is_still) = (*layout, slabs[ledger].repair.is_none());
        // An owner looks at all of its groups again and again.
        if *tenure == Tenure::Keeper && layout.is_ledger(ledger) && is_still && self.is_kept(space, ledger) {
            layout.groups_in(ledger).for_each(|group| self.map.mark_group(space, layout.parity(group)));
        }
    }

    /// Copies of each column, at servers that answer: the slab's own ones first, then those of the others that hold anything.
    fn columns_here(&self, space: SpaceIndex, slab: SlabNo) -> OfColumns<PeerSet> {
        [slab]
            .into_iter()
            .chain(self.map.other_columns(space, slab))
            .map(|slab| self.copies_here(space, slab))
            .collect()
    }

    /// Which copy of a slab stays. Each slab of a group comes to the same.
    fn copy_that_stays(&self, space: SpaceIndex, slab: SlabNo) -> Option<PeerIndex> {
        let mut columns: OfColumns<SlabNo> = self.map.other_columns(space, slab).chain([slab]).collect();
        columns.sort_unstable();
        let own = columns.iter().position(|column| *column == slab)?;
        let here: OfColumns<PeerSet> = columns.iter().map(|column| self.copies_here(space, *column)).collect();
        assign(&here)[own]
    }

    /// Whether a copy may be there that this keeper has not heard of yet: its server does not know of the keeper so far, or has not
    /// said whether it has that copy.
    pub(super) fn has_unheard_copy(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.map.spaces[space].slabs[slab];
        // Before there is parity, a slab is open only when its copies have listed what they have.
        let heard = if self.map.is_grouped(space, slab) {
            self.map.heard_of(space, slab)
        } else {
            self.map.spaces[space].fenced_at
        };
        let good = self.sessions.peers_of(&state.entry).minus(state.failed).minus(heard);
        good.iter().any(|peer| !self.sessions.peers[peer].is_down())
    }

    /// Has copies that are gone leave the map. `true` if there are some.
    fn gone_leave(&mut self, space: SpaceIndex, slab: SlabNo) -> bool {
        let Slab { entry, failed, .. } = &self.map.spaces[space].slabs[slab];
        let copies = self.sessions.peers_of(entry);
        let keep = copies.minus(*failed);
        if keep == copies {
            return false;
        }
        self.map.propose(space, slab, self.entry_of(space, slab, keep));
        true
    }

    /// What cannot be opened, as its versions are not known, may be gone for all that: readers that know them from before the ledger
    /// was lost wait for it.
    pub(super) fn keep_unopened(&mut self, space: SpaceIndex, slab: SlabNo) {
        let keeps = self.map.spaces[space].tenure.changes_map();
        let is_open = matches!(self.map.spaces[space].slabs[slab].phase, Phase::Open);
        if keeps && !is_open && !self.map.is_changing(space, slab) {
            self.gone_leave(space, slab);
        }
    }

    /// Where a slab could be so that most slabs of its group are apart; of these in a zone of its own, if there is one, and
    /// where there is most room. On a disk only where it would be gone otherwise.
    pub(in super::super) fn room_apart(&self, space: SpaceIndex, slab: SlabNo, flees: bool) -> Option<PeerIndex> {
        let mut columns = self.columns_here(space, slab);
        let own = self.sessions.peers_of(&self.map.spaces[space].slabs[slab].entry);
        let target = |column: SlabNo| self.map.spaces[space].slabs[column].repair.as_ref().map(|repair| repair.peer);
        let taken = own.union(self.map.other_columns(space, slab).filter_map(target).collect());
        let pick = |columns: &mut OfColumns<PeerSet>, overflow_disk: bool| {
            let lends = |peer: &PeerIndex| {
                self.sessions.peers[*peer].can_lend() && self.sessions.peers[*peer].has_overflow_disk() == overflow_disk
            };
            let others: OfColumns<PeerSet> = columns[1..].into();
            let apart =
                |peer: &PeerIndex| !taken.has(*peer) && others.iter().all(|set| set.len() != 1 || !set.has(*peer));
            let open: PeerSet = self.sessions.peers.indices().filter(|peer| lends(peer) && apart(peer)).collect();
            open.iter().max_by_key(|peer| {
                columns[0] = [*peer].into_iter().collect();
                let chosen: OfColumns<PeerIndex> = assign(columns).into_iter().flatten().collect();
                let zone = self.sessions.peers[*peer].info().zone;
                let alone = chosen
                    .iter()
                    .all(|peer_idx| peer_idx == peer || self.sessions.peers[*peer_idx].info().zone != zone);
                (chosen.len(), alone, self.sessions.peers[*peer].free_slabs())
            })
        };
        let in_memory = pick(&mut columns, false);
        let may_flee = flees && self.config.uses_overflow_disk;
        in_memory.or_else(|| if may_flee { pick(&mut columns, true) } else { None })
    }

    /// Whether a keeper could make a slab of a group anew, or say that it is gone.
    pub(in super::super) fn can_improve_column(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let Slab { entry, failed, phase, .. } = &self.map.spaces[space].slabs[slab];
        let copies = self.sessions.peers_of(entry);
        let is_gone = !copies.is_empty() && copies.minus(*failed).is_empty();
        let is_open = matches!(phase, Phase::Open);
        is_gone || is_open && self.has_source(space, slab) && self.room_apart(space, slab, true).is_some()
    }

    /// A slab in the making whose pages cannot be had now gives its slot to others.
    pub(in super::super) fn has_source(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let up = self.copies_to_ask(space, slab).iter().any(|peer| !self.sessions.peers[peer].is_down());
        up || self.can_reconstruct(space, slab)
    }
}

impl Map {
    /// Servers that know this keeper, and have said that they have the slab as the map says.
    pub(super) fn heard_of(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        self.spaces[space].fenced_at.intersection(self.spaces[space].slabs[slab].checked)
    }

    /// Whether the map is being asked for a change of a slab's group. One at a time: what is decided of one slab depends on where the
    /// others are.
    fn is_changing(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let changing = |slab: SlabNo| self.spaces[space].slabs[slab].pending.is_some();
        changing(slab) || self.other_columns(space, slab).any(changing)
    }
}
