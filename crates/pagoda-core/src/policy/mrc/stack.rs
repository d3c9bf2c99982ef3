//! Reuse distances: an LRU stack that knows how many pages lie above one.
//!
//! Each page has the position of its last use; positions grow with time, and a Fenwick tree (Fenwick, "A new data
//! structure for cumulative frequency tables", 1994) counts the positions in use after any one, in O(log n). When
//! positions run out they are numbered anew, once in as many uses as there are pages.

use std::collections::HashMap;

use crate::units::PageIdx;

/// A stack begins with so many positions.
const POSITIONS_MIN: usize = 1024;

/// An LRU stack of pages.
#[derive(Clone, Debug, Default)]
pub struct Stack {
    positions: HashMap<PageIdx, usize>,
    /// Fenwick tree over the positions, 1-based: how many are in use.
    tree: Vec<u32>,
    next: usize,
}

impl Stack {
    /// Gives the number of pages in the stack.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Says whether the stack has no page.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Whether the page is in it.
    pub fn contains(&self, page: PageIdx) -> bool {
        self.positions.contains_key(&page)
    }

    /// The page is used: the different pages used since its last use, or nothing if this is its first.
    pub fn touch(&mut self, page: PageIdx) -> Option<u64> {
        if self.next + 1 >= self.tree.len() {
            self.renumber();
        }
        self.next += 1;
        let before = self.positions.insert(page, self.next);
        let distance = before.map(|position| {
            let above = self.positions.len() as u64 - self.up_to(position);
            self.add(position, u32::MAX);
            above
        });
        self.add(self.next, 1);
        distance
    }

    /// The page is not in the stack any more.
    pub fn forget(&mut self, page: PageIdx) {
        if let Some(position) = self.positions.remove(&page) {
            self.add(position, u32::MAX);
        }
    }

    /// Adds to a position; `u32::MAX` is minus one.
    fn add(&mut self, mut position: usize, value: u32) {
        while position < self.tree.len() {
            self.tree[position] = self.tree[position].wrapping_add(value);
            position += position & position.wrapping_neg();
        }
    }

    /// Positions in use up to this one.
    fn up_to(&self, mut position: usize) -> u64 {
        let mut count = 0;
        while position > 0 {
            count += u64::from(self.tree[position]);
            position &= position - 1;
        }
        count
    }

    fn renumber(&mut self) {
        let mut order: Vec<(usize, PageIdx)> =
            self.positions.iter().map(|(page, position)| (*position, *page)).collect();
        order.sort_unstable();
        let positions = (2 * order.len()).max(POSITIONS_MIN).next_power_of_two() + 1;
        self.tree = vec![0; positions];
        self.next = order.len();
        for (position, (_, page)) in (1..).zip(order) {
            self.positions.insert(page, position);
            self.add(position, 1);
        }
    }
}
