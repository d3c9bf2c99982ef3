//! The ledger: the versions of a space's pages, written down before a slab depends on parity.
//!
//! Which version a page has is known from its copies, as long as there is one. What is put together from other pages has none,
//! and what it comes to can be opened only by who knows its version. So versions lie beside the pages, sealed like these, in
//! slabs with two copies. A page of the ledger without content is damage, never "no page was written": what is missing there
//! must not read as zeros.
//!
//! A slab's part of the ledger is written by the keeper or owner that makes the parity of its group, before that is in the map, and is
//! read by whoever opens the slab afterwards. So nobody reads a part that is being written. Of a group that has no parity any more
//! it is out of date, and is written anew before the group gets parity again.

use std::collections::VecDeque;

use super::ops::{Kind, OWN_MAX, Stage};
use super::parity::layout::{VERSION_SIZE, VERSIONS_A_PAGE};
use super::slab::Phase;
use super::{Client, Failure};
use crate::units::{Class, PAGE_SIZE, Page, Time, Version};

/// How far the versions of a slab are known by the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Table {
    #[default]
    Unknown,
    /// Pages of it that were asked for, and those that came.
    Asked {
        next: usize,
        got: usize,
    },
    Known,
    /// The ledger has no such page, or none that is right.
    Bad,
    /// The last copy of the ledger is gone.
    Gone,
    /// Looked at by who makes parity, and knows the versions from the copies: what is written there already needs no writing.
    Compared {
        next: usize,
        got: usize,
    },
    /// To be written: what is there is something else, or nothing.
    Wanting,
    /// Being written: pages that were begun, and those that all copies have.
    Written {
        next: usize,
        done: usize,
    },
    /// No server has room for it, or it is lost.
    Refused,
}

/// Slabs whose part of the ledger is to be read or written.
#[derive(Debug)]
pub struct Ledger {
    reads: VecDeque<(usize, usize)>,
    writes: VecDeque<(usize, usize)>,
}

/// Slabs in line for which there is room from the start: more than an owner that makes parity has there at a time.
const LINE: usize = 64;

impl Default for Ledger {
    fn default() -> Ledger {
        Ledger { reads: VecDeque::with_capacity(LINE), writes: VecDeque::with_capacity(LINE) }
    }
}

impl Ledger {
    pub fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    /// What was to be written for a space that is somebody else's.
    pub fn end_writes(&mut self, space: usize) {
        self.writes.retain(|(of, _)| *of != space);
    }
}

/// A part of a table, as a page.
fn encode(versions: &[Version]) -> Page {
    let mut page = [0; PAGE_SIZE];
    for (bytes, version) in page.chunks_exact_mut(VERSION_SIZE).zip(versions) {
        bytes.copy_from_slice(&version.bits().to_le_bytes());
    }
    page
}

fn decode(page: &Page, versions: &mut [Version]) {
    for (bytes, version) in page.chunks_exact(VERSION_SIZE).zip(versions) {
        let mut bits = [0; VERSION_SIZE];
        bits.copy_from_slice(bytes);
        *version = Version::from_bits(u64::from_le_bytes(bits));
    }
}

/// What an operation of its own is about.
fn token(slab: usize, part: usize) -> u64 {
    (slab as u64) << 32 | part as u64
}

impl Client {
    pub(super) fn read_table(&mut self, space: usize, slab: usize) {
        let state = &mut self.spaces[space].slabs[slab];
        state.make_table(&mut self.tables);
        state.table = Table::Asked { next: 0, got: 0 };
        self.ledger.reads.push_back((space, slab));
    }

    /// Whether the ledger has a slab's versions already, as an earlier keeper left it.
    pub(super) fn compare_table(&mut self, space: usize, slab: usize) {
        self.spaces[space].slabs[slab].table = Table::Compared { next: 0, got: 0 };
        self.ledger.reads.push_back((space, slab));
    }

    pub(super) fn write_table(&mut self, space: usize, slab: usize) {
        self.spaces[space].slabs[slab].table = Table::Written { next: 0, done: 0 };
        self.ledger.writes.push_back((space, slab));
    }

    /// Begins what there is room for. `true` if that is something.
    pub(super) fn tend_ledger(&mut self) -> bool {
        let mut any = false;
        while self.ops.own_begun() < OWN_MAX {
            if let Some(&(space, slab)) = self.ledger.reads.front() {
                let (layout, table) = (self.spaces[space].layout, &mut self.spaces[space].slabs[slab].table);
                match table {
                    Table::Asked { next, .. } | Table::Compared { next, .. } if *next < layout.table_pages => {
                        let part = *next;
                        *next += 1;
                        let asked = (token(slab, part), self.now);
                        self.begin_own_read(space, layout.table_page(slab, part), asked);
                    }
                    _ => drop(self.ledger.reads.pop_front()),
                }
            } else if let Some(&(space, slab)) = self.ledger.writes.front() {
                let table_pages = self.spaces[space].layout.table_pages;
                match self.spaces[space].slabs[slab].table {
                    Table::Written { next, done } if next < table_pages => {
                        let begun = self.write_part(space, slab, next);
                        let next = Table::Written { next: next + 1, done };
                        self.spaces[space].slabs[slab].table = if begun { next } else { Table::Refused };
                    }
                    _ => drop(self.ledger.writes.pop_front()),
                }
            } else {
                break;
            }
            any = true;
        }
        any
    }

    fn write_part(&mut self, space: usize, slab: usize, part: usize) -> bool {
        let page = self.spaces[space].layout.table_page(slab, part);
        let versions = &self.spaces[space].slabs[slab].versions;
        let end = versions.len().min((part + 1) * VERSIONS_A_PAGE);
        let content = encode(&versions[part * VERSIONS_A_PAGE..end]);
        self.begin_own_write(space, page, &content, (token(slab, part), self.now))
    }

    /// Takes the results of what was begun. `true` if there were any.
    pub(super) fn take_own_results(&mut self) -> bool {
        let mut any = false;
        while let Some(op) = self.ops.next_own() {
            any = true;
            let about = *self.ops.peek(op);
            let (slab, part) = ((about.token >> 32) as usize, about.token as u32 as usize);
            let Stage::Done(result) = about.stage else { continue };
            if slab < self.spaces[about.space].slabs.len() {
                match about.kind {
                    Kind::Read => self.part_was_read(op, (about.space, slab), part, result.map(|()| about.has_content)),
                    Kind::Write { .. } => self.part_was_written((about.space, slab), result),
                }
            }
            self.ops.let_go(op);
        }
        any
    }

    fn part_was_read(&mut self, op: usize, (space, slab): (usize, usize), part: usize, result: Result<bool, Failure>) {
        let table_pages = self.spaces[space].layout.table_pages;
        let state = &mut self.spaces[space].slabs[slab];
        let first = part * VERSIONS_A_PAGE;
        let end = state.versions.len().min(first + VERSIONS_A_PAGE);
        state.table = match (state.table, result) {
            (Table::Asked { next, got }, Ok(true)) => {
                decode(self.ops.content(op), &mut state.versions[first..end]);
                if got + 1 == table_pages { Table::Known } else { Table::Asked { next, got: got + 1 } }
            }
            (Table::Asked { .. }, Ok(false) | Err(Failure::Corrupt | Failure::Declined)) => Table::Bad,
            (Table::Asked { .. }, Err(Failure::Lost | Failure::Fenced)) => Table::Gone,
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
        self.mark_group(space, slab);
    }

    fn part_was_written(&mut self, (space, slab): (usize, usize), result: Result<(), Failure>) {
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
    pub(super) fn knows_versions(&self, space: usize, slab: usize) -> bool {
        let state = &self.spaces[space].slabs[slab];
        state.table == Table::Known || matches!(state.phase, Phase::Open)
    }

    fn begin_own_read(&mut self, space: usize, page: crate::units::PageNo, asked: (u64, Time)) {
        if let Some(op) = self.ops.begin_own(Kind::Read, space, page, Class::Demand, asked) {
            self.try_op(op);
        }
    }

    fn begin_own_write(
        &mut self,
        space: usize,
        page: crate::units::PageNo,
        content: &Page,
        asked: (u64, Time),
    ) -> bool {
        let Some(version) = self.spaces[space].next_version(false) else { return false };
        let kind = Kind::Write { trim: false };
        let Some(op) = self.ops.begin_own(kind, space, page, Class::Eviction, asked) else { return false };
        self.store_write(op, version, content);
        self.try_op(op);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Generation;

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let versions: Vec<Version> =
            (0..VERSIONS_A_PAGE as u64).map(|n| Version::new(Generation(n as u32), n, n % 3 == 0)).collect();
        let mut back = vec![Version::NEVER; VERSIONS_A_PAGE];
        decode(&encode(&versions), &mut back);
        assert_eq!(back, versions);
        // The last one of a small slab.
        let mut few = [Version::NEVER; 8];
        decode(&encode(&versions[8..16]), &mut few);
        assert_eq!(few, versions[8..16]);
    }
}
