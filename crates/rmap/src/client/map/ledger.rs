//! How far the versions of slabs are known by the ledger, and in which of its slabs they are.

use crate::client::Failure;
use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::ledger::line::Turn;
use crate::client::map::Map;
use crate::client::slab::Phase;
use crate::units::SlabNo;

impl Map {
    /// Slabs of the ledger with the versions of a group.
    pub fn ledger_slabs(&self, space: SpaceIndex, group: GroupIndex) -> impl Iterator<Item = SlabNo> + use<> {
        let layout = self.spaces[space].layout;
        let [first, last] = layout.table_pages_of(group).map(|page| self.slab_of(page).unwrap_or(SlabNo(0)));
        (first.0..=last.0).map(SlabNo)
    }

    /// Who comes next would not know what there is to put together.
    pub fn is_ledger_lost(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let slabs = &self.spaces[space].slabs;
        self.ledger_slabs(space, group)
            .any(|slab| slabs.get(slab).is_some_and(|slab| matches!(slab.phase, Phase::Lost)))
    }

    /// What the ledger says of a group without parity counts for nothing.
    pub fn forget_tables(&mut self, space: SpaceIndex, group: GroupIndex) {
        for slab in self.spaces[space].layout.members(group) {
            self.spaces[space].slabs[slab].table = Table::Unknown;
        }
    }

    /// Whether every page of the slab has one version for good, as far as this client knows it.
    pub fn knows_versions(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.spaces[space].slabs[slab];
        state.table == Table::Known || matches!(state.phase, Phase::Open)
    }

    /// Slabs of the ledger that have to say which versions a slab has before it can be opened.
    pub fn unread_tables(&self, space: SpaceIndex, slab: SlabNo) -> impl Iterator<Item = SlabNo> {
        let state = &self.spaces[space];
        let layout = state.layout;
        let is_member = layout.group(slab).is_some() && !layout.is_parity(slab);
        let is_unread =
            is_member && matches!(state.slabs[slab].phase, Phase::Opening(_)) && !self.knows_versions(space, slab);
        let parts = if is_unread { layout.table_pages } else { 0 };
        let tables = (0..parts).filter_map(move |part| self.slab_of(layout.table_page(slab, part)));
        tables.filter(|table| state.slabs.get(*table).is_some())
    }

    /// The page that is due. `None`: all of them were begun, or none is wanted any more.
    pub fn part_to_read(&self, turn: Turn) -> Option<usize> {
        let Turn { space, slab, again } = turn;
        let table_pages = self.spaces[space].layout.table_pages;
        match self.spaces[space].slabs.get(slab)?.table {
            Table::Asked { next, .. } | Table::Compared { next, .. } => {
                again.or_else(|| (next < table_pages).then_some(next))
            }
            _ => None,
        }
    }

    /// The page that is due, and how many are done.
    pub fn part_to_write(&self, Turn { space, slab, .. }: Turn) -> Option<(usize, usize)> {
        let table_pages = self.spaces[space].layout.table_pages;
        match self.spaces[space].slabs.get(slab)?.table {
            Table::Written { next, done } if next < table_pages => Some((next, done)),
            _ => None,
        }
    }

    /// A part of a slab's versions was written to the ledger, or could not be.
    pub fn part_was_written(&mut self, (space, slab): (SpaceIndex, SlabNo), result: Result<(), Failure>) {
        let table_pages = self.spaces[space].layout.table_pages;
        let state = &mut self.spaces[space].slabs[slab];
        // Of a making that was given up: the next one waits for its end.
        let Table::Written { next, done } = state.table else { return self.mark_group(space, slab) };
        state.table = match result {
            Ok(()) if done + 1 == table_pages => Table::Known,
            Ok(()) => Table::Written { next, done: done + 1 },
            // Somebody else keeps the space now: it begins anew, should that be this client again.
            Err(Failure::Fenced) => Table::Unknown,
            Err(_) => Table::Refused,
        };
        self.mark_group(space, slab);
    }
}
