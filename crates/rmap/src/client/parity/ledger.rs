//! Reads and writes the parts of the ledger (`../ledger.rs`).

use crate::client::index::SpaceIndex;
use crate::client::ledger::line::Turn;
use crate::client::ledger::{Ledger, OWN_WRITES_MAX, Table, encode, token};
use crate::client::ops::{Kind, OWN_MAX, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::layout::VERSIONS_A_PAGE;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::units::{Class, PageNo, SlabNo, Time};

impl Parity {
    /// Begins what there is room for, where somebody answers. `true` if that is something.
    pub fn maintain_ledger(&mut self, pool: &mut Pool, pages: &mut Pages, redundancy: &mut Redundancy) -> bool {
        let mut any = false;
        while pages.ops.own_begun() < OWN_MAX
            && (self.begin_next_read(pool, pages, redundancy) || self.begin_next_write(pool, pages, redundancy))
        {
            any = true;
        }
        any
    }

    /// Has a slab's versions read from the ledger.
    pub fn read_table(&mut self, pool: &mut Pool, pages: &Pages, space: SpaceIndex, slab: SlabNo) {
        if self.may_begin_table(pages, space, slab) {
            let state = &mut pool.map.spaces[space].slabs[slab];
            state.make_table(&mut pool.map.tables);
            state.table = Table::Asked { next: 0, got: 0 };
            self.ledger.reads.push(space, slab);
        }
    }

    /// Whether the ledger has a slab's versions already, as an earlier keeper left it.
    pub fn compare_table(&mut self, pool: &mut Pool, pages: &Pages, space: SpaceIndex, slab: SlabNo) {
        if self.may_begin_table(pages, space, slab) {
            pool.map.spaces[space].slabs[slab].table = Table::Compared { next: 0, got: 0 };
            self.ledger.reads.push(space, slab);
        }
    }

    /// Has a slab's versions written to the ledger.
    pub fn write_table(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        pool.map.spaces[space].slabs[slab].table = Table::Written { next: 0, done: 0 };
        // One that an earlier making left waits for a server, maybe.
        self.ledger.writes.forget_slab(space, slab);
        self.ledger.writes.push(space, slab);
    }

    /// What was begun for a slab before has to end first, or a page of it would count twice. Its end brings the slab up again.
    fn may_begin_table(&mut self, pages: &Pages, space: SpaceIndex, slab: SlabNo) -> bool {
        self.ledger.reads.forget_pages(space, slab);
        !pages.any_own(space, slab, |op| op.stage != Stage::Lingering)
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

    /// A slab was looked at. If it is one of the ledger, and answers, whoever waits is looked at, too.
    pub fn wake_ledger(&mut self, pool: &Pool, space: SpaceIndex, slab: SlabNo) {
        let waits = self.ledger.reads.anyone_waits() || self.ledger.writes.anyone_waits();
        if waits && pool.map.spaces[space].layout.is_ledger(slab) && pool.is_slab_at_hand(space, slab) {
            self.ledger.wake();
        }
    }

    /// Whether no part of the ledger is to be read or written.
    pub fn is_ledger_idle(&self, pool: &Pool) -> bool {
        let Ledger { reads, writes } = &self.ledger;
        !reads.iter().any(|turn| pool.map.part_to_read(turn).is_some())
            && !writes.iter().any(|turn| pool.map.part_to_write(turn).is_some())
    }

    #[cfg(test)]
    pub fn ledger_line(&self) -> impl Iterator<Item = Turn> {
        self.ledger.reads.iter()
    }
}
