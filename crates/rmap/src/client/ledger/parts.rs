//! Reads and writes the parts of the ledger.

use super::line::Turn;
use super::{Ledger, OWN_WRITES_MAX, Table, decode, encode, slab_and_part, token};
use crate::client::Failure;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::ops::{Kind, OWN_MAX, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::layout::VERSIONS_A_PAGE;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::units::{Class, PageNo, SlabNo, Time};

impl Parity {
    /// Begins what there is room for, where somebody answers. `true` if that is something.
    pub(in crate::client) fn maintain_ledger(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
    ) -> bool {
        let mut any = false;
        while pages.ops.own_begun() < OWN_MAX
            && (self.begin_next_read(pool, pages, redundancy) || self.begin_next_write(pool, pages, redundancy))
        {
            any = true;
        }
        any
    }

    fn begin_next_read(&mut self, pool: &mut Pool, pages: &mut Pages, redundancy: &mut Redundancy) -> bool {
        while let Some(turn) = self.ledger.reads.first() {
            let Turn { space, slab, again } = turn;
            let Some(part) = pool.map.part_to_read(turn) else {
                self.ledger.reads.pop();
                continue;
            };
            let page = pool.map.spaces[space].layout.table_page(slab, part);
            if !pool.is_at_hand(space, page) {
                self.ledger.reads.put_off();
                continue;
            }
            match &mut pool.map.spaces[space].slabs[slab].table {
                Table::Asked { next, .. } | Table::Compared { next, .. } if again.is_none() => *next += 1,
                _ => self.ledger.reads.pop(),
            }
            self.begin_own_read(pool, pages, redundancy, space, page, (token(slab, part), pool.now));
            return true;
        }
        false
    }

    fn begin_next_write(&mut self, pool: &mut Pool, pages: &mut Pages, redundancy: &mut Redundancy) -> bool {
        if pages.ops.own_writes() >= OWN_WRITES_MAX {
            return false;
        }
        while let Some(turn) = self.ledger.writes.first() {
            let Turn { space, slab, .. } = turn;
            let Some((part, done)) = pool.map.part_to_write(turn) else {
                self.ledger.writes.pop();
                continue;
            };
            if !pool.is_at_hand(space, pool.map.spaces[space].layout.table_page(slab, part)) {
                self.ledger.writes.put_off();
                continue;
            }
            let begun = self.write_part(pool, pages, redundancy, space, slab, part);
            let next = Table::Written { next: part + 1, done };
            pool.map.spaces[space].slabs[slab].table = if begun { next } else { Table::Refused };
            return true;
        }
        false
    }

    fn write_part(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        slab: SlabNo,
        part: usize,
    ) -> bool {
        let page = pool.map.spaces[space].layout.table_page(slab, part);
        let versions = &pool.map.spaces[space].slabs[slab].versions;
        let end = versions.len().min((part + 1) * VERSIONS_A_PAGE);
        let content = encode(&versions[part * VERSIONS_A_PAGE..end]);
        let (kind, asked) = (Kind::Write { trim: false }, (token(slab, part), pool.now));
        let Some(version) = pool.map.spaces[space].next_version(false) else { return false };
        let Some(op) = pages.ops.begin_own(kind, space, page, Class::Eviction, asked) else { return false };
        pages.store_write(pool, op, version, |room| *room = content);
        pages.try_op(pool, redundancy, self, op);
        true
    }

    fn begin_own_read(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        page: PageNo,
        asked: (u64, Time),
    ) {
        if let Some(op) = pages.ops.begin_own(Kind::Read, space, page, Class::Demand, asked) {
            pages.try_op(pool, redundancy, self, op);
        }
    }
}

impl Pages {
    /// Whether a part of a slab's versions is being read or written.
    pub(in crate::client) fn has_own(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.any_own(space, slab, |_| true)
    }

    fn any_own(&self, space: SpaceIndex, slab: SlabNo, fits: impl Fn(&Operation) -> bool) -> bool {
        let about_it = |op: &Operation| op.is_own && op.space == space && slab_and_part(op.token).0 == slab;
        self.ops.own_begun() > 0 && self.ops.any(|op| about_it(op) && fits(op))
    }

    /// Nobody answers a read of the ledger now: others have its slot, and its page waits.
    pub(in crate::client) fn put_back(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, token, .. } = *self.ops.peek(op);
        let (slab, part) = slab_and_part(token);
        self.drop_exchanges(pool, parity, op);
        self.ops.leave(op);
        if pool.map.part_to_read(Turn { space, slab, again: Some(part) }).is_some() {
            parity.ledger.reads.push_waiting(space, slab, part);
        } else {
            // Whoever begins anew waits for its end.
            pool.map.mark_group(space, slab);
        }
    }

    /// The same for all that fit: what they have asked is of no use any more.
    pub(in crate::client) fn put_back_reads(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        fits: impl Fn(&Operation) -> bool,
    ) {
        if self.ops.own_begun() == 0 {
            return;
        }
        let reads = |op: &Operation| op.is_own && op.kind == Kind::Read;
        let begun = |op: &Operation| reads(op) && matches!(op.stage, Stage::Waiting | Stage::Active);
        for op in self.ops.select(|op| begun(op) && fits(op)) {
            self.put_back(pool, parity, op);
        }
    }

    /// Takes the results of what was begun. `true` if there were any.
    pub(in crate::client) fn take_own_results(&mut self, pool: &mut Pool) -> bool {
        let mut any = false;
        while let Some(op) = self.ops.next_own() {
            any = true;
            let about = *self.ops.peek(op);
            let (slab, part) = slab_and_part(about.token);
            let Stage::Done(result) = about.stage else { continue };
            if pool.map.spaces[about.space].slabs.get(slab).is_some() {
                match about.kind {
                    Kind::Read => {
                        self.part_was_read(pool, op, (about.space, slab), part, result.map(|()| about.has_content))
                    }
                    Kind::Write { .. } => pool.map.part_was_written((about.space, slab), result),
                }
            }
            self.ops.let_go(op);
        }
        any
    }

    fn part_was_read(
        &mut self,
        pool: &mut Pool,
        op: OpIndex,
        (space, slab): (SpaceIndex, SlabNo),
        part: usize,
        result: Result<bool, Failure>,
    ) {
        let table_pages = pool.map.spaces[space].layout.table_pages;
        let state = &mut pool.map.spaces[space].slabs[slab];
        let first = part * VERSIONS_A_PAGE;
        let end = state.versions.len().min(first + VERSIONS_A_PAGE);
        state.table = match (state.table, result) {
            (Table::Asked { next, got }, Ok(true)) => {
                decode(self.ops.content(op), &mut state.versions[first..end]);
                if got + 1 == table_pages { Table::Known } else { Table::Asked { next, got: got + 1 } }
            }
            (Table::Asked { .. }, Ok(false) | Err(Failure::Corrupt | Failure::Declined)) => Table::Bad,
            (Table::Asked { .. }, Err(Failure::Lost | Failure::Fenced)) => Table::Gone,
            // It says nothing: the ledger is asked again.
            (Table::Asked { .. }, Err(Failure::Silent)) => Table::Unknown,
            (Table::Compared { next, got }, Ok(true))
                if encode(&state.versions[first..end]) == *self.ops.content(op) =>
            {
                if got + 1 == table_pages {
                    Table::Known
                } else {
                    Table::Compared { next, got: got + 1 }
                }
            }
            (Table::Compared { .. }, _) => Table::Wanting,
            (table, _) => table,
        };
        pool.map.mark_group(space, slab);
    }
}

impl Parity {
    pub(in crate::client) fn read_table(&mut self, pool: &mut Pool, pages: &Pages, space: SpaceIndex, slab: SlabNo) {
        if self.may_begin_table(pages, space, slab) {
            let state = &mut pool.map.spaces[space].slabs[slab];
            state.make_table(&mut pool.map.tables);
            state.table = Table::Asked { next: 0, got: 0 };
            self.ledger.reads.push(space, slab);
        }
    }

    /// Whether the ledger has a slab's versions already, as an earlier keeper left it.
    pub(in crate::client) fn compare_table(&mut self, pool: &mut Pool, pages: &Pages, space: SpaceIndex, slab: SlabNo) {
        if self.may_begin_table(pages, space, slab) {
            pool.map.spaces[space].slabs[slab].table = Table::Compared { next: 0, got: 0 };
            self.ledger.reads.push(space, slab);
        }
    }

    /// What was begun for a slab before has to end first, or a page of it would count twice. Its end brings the slab up again.
    fn may_begin_table(&mut self, pages: &Pages, space: SpaceIndex, slab: SlabNo) -> bool {
        self.ledger.reads.forget_pages(space, slab);
        !pages.any_own(space, slab, |op| op.stage != Stage::Lingering)
    }
}

impl Parity {
    pub(in crate::client) fn write_table(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        pool.map.spaces[space].slabs[slab].table = Table::Written { next: 0, done: 0 };
        // One that an earlier making left waits for a server, maybe.
        self.ledger.writes.forget_slab(space, slab);
        self.ledger.writes.push(space, slab);
    }

    /// A slab was looked at. If it is one of the ledger, and answers, whoever waits is looked at, too.
    pub(in crate::client) fn wake_ledger(&mut self, pool: &Pool, space: SpaceIndex, slab: SlabNo) {
        let waits = self.ledger.reads.anyone_waits() || self.ledger.writes.anyone_waits();
        if waits && pool.map.spaces[space].layout.is_ledger(slab) && pool.is_slab_at_hand(space, slab) {
            self.ledger.wake();
        }
    }

    #[cfg(test)]
    pub(in crate::client) fn ledger_line(&self) -> impl Iterator<Item = Turn> {
        self.ledger.reads.iter()
    }

    /// Whether no part of the ledger is to be read or written.
    pub(in crate::client) fn is_ledger_idle(&self, pool: &Pool) -> bool {
        let Ledger { reads, writes } = &self.ledger;
        !reads.iter().any(|turn| pool.map.part_to_read(turn).is_some())
            && !writes.iter().any(|turn| pool.map.part_to_write(turn).is_some())
    }
}

impl Pool {
    /// Whether what becomes of a page of the ledger is known soon: from a server that answers, or without one.
    fn is_at_hand(&self, space: SpaceIndex, page: PageNo) -> bool {
        self.map.slab_of(page).is_none_or(|slab| self.is_slab_at_hand(space, slab))
    }

    fn is_slab_at_hand(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.map.spaces[space];
        match &state.slabs[slab].phase {
            _ if state.is_taken => true,
            // The map that is being looked up decides.
            _ if state.is_stale => false,
            Phase::Opening(_) | Phase::Followed => false,
            Phase::Open => self.copies_to_read(space, slab).iter().any(|peer| self.sessions.peers[peer].is_up()),
            // Lost, or without content so far: a read has its answer, and a write goes to whoever takes the slab.
            Phase::Vacant | Phase::Granting(_) | Phase::Leaving | Phase::Lost => true,
        }
    }
}

impl Map {
    /// The page that is due. `None`: all of them were begun, or none is wanted any more.
    fn part_to_read(&self, turn: Turn) -> Option<usize> {
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
    fn part_to_write(&self, Turn { space, slab, .. }: Turn) -> Option<(usize, usize)> {
        let table_pages = self.spaces[space].layout.table_pages;
        match self.spaces[space].slabs.get(slab)?.table {
            Table::Written { next, done } if next < table_pages => Some((next, done)),
            _ => None,
        }
    }

    fn part_was_written(&mut self, (space, slab): (SpaceIndex, SlabNo), result: Result<(), Failure>) {
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

    /// Whether every page of the slab has one version for good, as far as this client knows it.
    pub(in crate::client) fn knows_versions(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.spaces[space].slabs[slab];
        state.table == Table::Known || matches!(state.phase, Phase::Open)
    }
}
