//! The client's own operations, which read and write the ledger. No caller is told of them.

use crate::client::Failure;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ledger::line::Turn;
use crate::client::ledger::{Table, decode, encode, slab_and_part};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::layout::VERSIONS_A_PAGE;
use crate::client::pool::Pool;
use crate::units::SlabNo;

impl Pages {
    /// Whether a part of a slab's versions is being read or written.
    pub fn has_own(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.any_own(space, slab, |_| true)
    }

    /// Whether an operation of the client's own that is about a slab fits.
    pub fn any_own(&self, space: SpaceIndex, slab: SlabNo, fits: impl Fn(&Operation) -> bool) -> bool {
        let about_it = |op: &Operation| op.is_own && op.space == space && slab_and_part(op.token).0 == slab;
        self.ops.own_begun() > 0 && self.ops.any(|op| about_it(op) && fits(op))
    }

    /// Nobody answers a read of the ledger now: others have its slot, and its page waits.
    pub fn put_back(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, token, .. } = *self.ops.peek(op);
        let (slab, part) = slab_and_part(token);
        self.drop_exchanges(pool, parity, op);
        self.ops.leave(op);
        if pool.map.part_to_read(Turn { space, slab, again: Some(part) }).is_some() {
            parity.put_off_read(space, slab, part);
        } else {
            // Whoever begins anew waits for its end.
            pool.map.mark_group(space, slab);
        }
    }

    /// The same for all that fit: what they have asked is of no use any more.
    pub fn put_back_reads(&mut self, pool: &mut Pool, parity: &mut Parity, fits: impl Fn(&Operation) -> bool) {
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
    pub fn take_own_results(&mut self, pool: &mut Pool) -> bool {
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
