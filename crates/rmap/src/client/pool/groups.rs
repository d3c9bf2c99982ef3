//! Groups with parity and the servers of their slabs: what can be put together now, which copy of a slab stays, and where one could
//! be made so that no server has two of a group.

use crate::client::index::{GroupIndex, PeerIndex, SpaceIndex};
use crate::client::parity::assign::{OfColumns, assign};
use crate::client::parity::layout::Members;
use crate::client::parity::stripe::{Source, Sources};
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::slab::{Doubt, Phase, Slab};
use crate::units::{SlabNo, Time};

impl Pool {
    /// Whether all that a page of the slab is put together from can be read now.
    pub fn can_reconstruct(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let layout = self.map.spaces[space].layout;
        let group = layout.group(slab);
        let parity = group.is_some_and(|group| layout.is_parity(slab) || self.map.has_parity(space, group));
        parity && self.map.other_columns(space, slab).all(|column| self.nearest(space, column).is_some())
    }

    /// Where the pages are read that one is put together from. `None` if one of them cannot be read now.
    pub fn sources(&self, space: SpaceIndex, slab: SlabNo, index: usize) -> Option<Sources> {
        let mut sources = Sources::default();
        let mut free = sources.iter_mut();
        for column in self.map.other_columns(space, slab) {
            let peer = self.nearest(space, column)?;
            let version = self.map.spaces[space].slabs[column].version(index);
            if version.has_content() {
                let page = self.map.size.page(column, index);
                *free.next()? = Some(Source { peer, page, version });
            }
        }
        Some(sources)
    }

    /// A slab in the making whose pages cannot be had now gives its slot to others.
    pub fn has_source(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let up = self.copies_to_ask(space, slab).iter().any(|peer| !self.sessions.peers[peer].is_down());
        up || self.can_reconstruct(space, slab)
    }

    /// Copies of each column, at servers that answer: the slab's own ones first, then those of the others that hold anything.
    pub fn columns_here(&self, space: SpaceIndex, slab: SlabNo) -> OfColumns<PeerSet> {
        [slab]
            .into_iter()
            .chain(self.map.other_columns(space, slab))
            .map(|slab| self.copies_here(space, slab))
            .collect()
    }

    /// Which copy of a slab stays. Each slab of a group comes to the same.
    pub fn copy_that_stays(&self, space: SpaceIndex, slab: SlabNo) -> Option<PeerIndex> {
        let mut columns: OfColumns<SlabNo> = self.map.other_columns(space, slab).chain([slab]).collect();
        columns.sort_unstable();
        let own = columns.iter().position(|column| *column == slab)?;
        let here: OfColumns<PeerSet> = columns.iter().map(|column| self.copies_here(space, *column)).collect();
        assign(&here)[own]
    }

    /// Whether a copy may be there that this keeper has not heard of yet: its server does not know of the keeper so far, or has not
    /// said whether it has that copy.
    pub fn has_unheard_copy(&self, space: SpaceIndex, slab: SlabNo) -> bool {
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
    pub fn gone_leave(&mut self, space: SpaceIndex, slab: SlabNo) -> bool {
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
    pub fn keep_unopened(&mut self, space: SpaceIndex, slab: SlabNo) {
        let keeps = self.map.spaces[space].tenure.changes_map();
        let is_open = matches!(self.map.spaces[space].slabs[slab].phase, Phase::Open);
        if keeps && !is_open && !self.map.is_changing(space, slab) {
            self.gone_leave(space, slab);
        }
    }

    /// Where a slab could be so that most slabs of its group are apart; of these in a zone of its own, if there is one, and
    /// where there is most room. On a disk only where it would be gone otherwise.
    pub fn room_apart(&self, space: SpaceIndex, slab: SlabNo, flees: bool) -> Option<PeerIndex> {
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
    pub fn can_improve_column(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let Slab { entry, failed, phase, .. } = &self.map.spaces[space].slabs[slab];
        let copies = self.sessions.peers_of(entry);
        let is_gone = !copies.is_empty() && copies.minus(*failed).is_empty();
        let is_open = matches!(phase, Phase::Open);
        is_gone || is_open && self.has_source(space, slab) && self.room_apart(space, slab, true).is_some()
    }

    /// Each slab of a group and its parity have to be at servers of their own.
    pub fn servers_suffice(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let members = self.map.held_members(space, group);
        let taken =
            members.iter().flat_map(|slab| self.sessions.peers_of(&self.map.spaces[space].slabs[*slab].entry).iter());
        let lends =
            |peer: &PeerIndex| self.sessions.peers[*peer].can_lend() && !self.sessions.peers[*peer].has_overflow_disk();
        let all = taken.chain(self.sessions.peers.indices().filter(lends)).collect::<PeerSet>();
        let parity = self.map.spaces[space].layout.parity(group);
        all.len() > members.len() && self.room_apart(space, parity, false).is_some()
    }

    /// Whether a member has no copy at a server that answers, and can be made anew.
    pub fn is_gone_and_waits(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.map.spaces[space].slabs[slab];
        let is_member = !self.map.spaces[space].layout.is_parity(slab);
        let is_open = matches!(state.phase, Phase::Open) && state.repair.is_none() && !state.is_stuck;
        is_member && is_open && self.copies_here(space, slab).is_empty() && self.can_reconstruct(space, slab)
    }

    /// Whether parity may leave for the sake of what its members have: of each of them, a server with a copy must have lived after
    /// that was wanted. Until then it may be dead and nobody has noticed, and its slab is in the parity alone. So those servers are
    /// asked. Their answer brings the parity up again, as does their silence.
    pub fn members_live(
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

    /// There may be slabs beyond the last page.
    pub fn expect_parity(&mut self, space: SpaceIndex) {
        if self.config.parity_after.is_some() && self.map.makes_parity(space) {
            let total = self.map.spaces[space].layout.total();
            self.map.spaces[space].extend_to(total);
        }
    }
}
