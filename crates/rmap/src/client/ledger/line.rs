//! The slabs whose part of the ledger is to be read or written, in a line.
//!
//! A slab whose page of the ledger nobody answers for now goes to the end of the line. It is passed over until that may have
//! changed. So one silent server holds up only what is at it.

use std::collections::VecDeque;

use crate::client::index::SpaceIndex;
use crate::units::SlabNo;

/// Room that there is from the start: for more slabs than an owner that makes parity has in line at a time.
const LINE: usize = 64;

/// A slab in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub space: SpaceIndex,
    pub slab: SlabNo,
    /// A page of its part that was asked for, and gave its slot back; `None`: those that nobody has asked for yet.
    pub again: Option<usize>,
}

#[derive(Debug)]
pub struct Line {
    all: VecDeque<Turn>,
    /// At the end: those that wait for a server.
    waiting: usize,
    /// Of all, those that are for one page.
    pages: usize,
}

impl Default for Line {
    fn default() -> Line {
        Line { all: VecDeque::with_capacity(LINE), waiting: 0, pages: 0 }
    }
}

impl Line {
    pub fn iter(&self) -> impl Iterator<Item = Turn> {
        self.all.iter().copied()
    }

    pub fn anyone_waits(&self) -> bool {
        self.waiting > 0
    }

    pub fn push(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.all.insert(self.all.len() - self.waiting, Turn { space, slab, again: None });
    }

    /// A page that nobody answers for now.
    pub fn push_waiting(&mut self, space: SpaceIndex, slab: SlabNo, page: usize) {
        self.all.push_back(Turn { space, slab, again: Some(page) });
        self.waiting += 1;
        self.pages += 1;
    }

    /// The first that does not wait.
    pub fn first(&self) -> Option<Turn> {
        self.all.front().copied().filter(|_| self.waiting < self.all.len())
    }

    /// That one is done.
    pub fn pop(&mut self) {
        if self.first().is_some() {
            let turn = self.all.pop_front();
            self.pages -= usize::from(turn.is_some_and(|turn| turn.again.is_some()));
        }
    }

    /// The first one waits for a server from now on, and stands at the end.
    pub fn put_off(&mut self) {
        if self.first().is_some() {
            self.all.rotate_left(1);
            self.waiting += 1;
        }
    }

    /// Somebody may answer: nobody waits any more.
    pub fn wake(&mut self) {
        self.waiting = 0;
    }

    pub fn forget_space(&mut self, space: SpaceIndex) {
        self.retain(|turn| turn.space != space);
    }

    pub fn forget_slab(&mut self, space: SpaceIndex, slab: SlabNo) {
        let is_it = |turn: &Turn| (turn.space, turn.slab) == (space, slab);
        if self.all.iter().any(is_it) {
            self.retain(|turn| !is_it(turn));
        }
    }

    /// Pages of a slab whose part is begun anew.
    pub fn forget_pages(&mut self, space: SpaceIndex, slab: SlabNo) {
        if self.pages > 0 {
            self.retain(|turn| turn.again.is_none() || (turn.space, turn.slab) != (space, slab));
        }
    }

    fn retain(&mut self, stays: impl Fn(&Turn) -> bool) {
        self.all.retain(stays);
        self.pages = self.all.iter().filter(|turn| turn.again.is_some()).count();
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: SpaceIndex = SpaceIndex(0);
    const OTHER: SpaceIndex = SpaceIndex(1);

    fn slabs(line: &Line) -> Vec<u32> {
        line.iter().map(|turn| turn.slab.0).collect()
    }

    #[test]
    fn who_waits_stands_behind_who_does_not() {
        let mut line = Line::default();
        (0..3).for_each(|slab| line.push(ONE, SlabNo(slab)));
        line.put_off();
        line.push(ONE, SlabNo(3));
        line.push_waiting(ONE, SlabNo(4), 9);
        line.push(OTHER, SlabNo(5));
        assert_eq!(slabs(&line), [1, 2, 3, 5, 0, 4]);
        while line.first().is_some() {
            line.pop();
        }
        assert_eq!((slabs(&line), line.anyone_waits()), (vec![0, 4], true));
        line.pop();
        line.put_off();
        assert_eq!(slabs(&line), [0, 4], "nobody's turn");
        line.wake();
        line.pop();
        assert_eq!(line.first(), Some(Turn { space: ONE, slab: SlabNo(4), again: Some(9) }));
    }

    #[test]
    fn a_part_that_is_begun_anew_has_no_pages_in_line() {
        let mut line = Line::default();
        line.push(ONE, SlabNo(4));
        let pages = [(ONE, 4), (ONE, 5), (OTHER, 4)];
        pages.into_iter().for_each(|(space, slab)| line.push_waiting(space, SlabNo(slab), 1));
        line.forget_pages(ONE, SlabNo(4));
        assert_eq!(slabs(&line), [4, 5, 4]);
        line.forget_slab(ONE, SlabNo(4));
        assert_eq!(slabs(&line), [5, 4]);
        line.forget_space(ONE);
        assert_eq!((slabs(&line), line.pages), (vec![4], 1));
        line.pop();
        assert_eq!((line.iter().count(), line.pages), (0, 0));
    }
}
