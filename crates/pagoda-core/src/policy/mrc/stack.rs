//! Reuse distances: an LRU stack that knows how many pages lie above one.
//!
//! Each page has the place of its last use; places grow with time, and a Fenwick tree (Fenwick, "A new data structure for
//! cumulative frequency tables", 1994) counts the places in use after any one, in O(log n). When places run out they are
//! numbered anew, once in as many uses as there are pages.

use std::collections::HashMap;

use crate::units::PageIdx;

/// Places to begin with.
const PLACES_MIN: usize = 1024;

/// An LRU stack of pages.
#[derive(Clone, Debug, Default)]
pub struct Stack {
    places: HashMap<PageIdx, usize>,
    /// Fenwick tree over the places, 1-based: how many are in use.
    tree: Vec<u32>,
    next: usize,
}

impl Stack {
    /// The number of pages.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether the page is in it.
    pub fn contains(&self, page: PageIdx) -> bool {
        self.places.contains_key(&page)
    }

    /// The page is used: the different pages used since its last use, or nothing if this is its first.
    pub fn touch(&mut self, page: PageIdx) -> Option<u64> {
        if self.next + 1 >= self.tree.len() {
            self.renumber();
        }
        self.next += 1;
        let before = self.places.insert(page, self.next);
        let distance = before.map(|place| {
            let above = self.places.len() as u64 - self.up_to(place);
            self.add(place, u32::MAX);
            above
        });
        self.add(self.next, 1);
        distance
    }

    /// The page is not in the stack any more.
    pub fn forget(&mut self, page: PageIdx) {
        if let Some(place) = self.places.remove(&page) {
            self.add(place, u32::MAX);
        }
    }

    /// Adds to a place; `u32::MAX` is minus one.
    fn add(&mut self, mut place: usize, value: u32) {
        while place < self.tree.len() {
            self.tree[place] = self.tree[place].wrapping_add(value);
            place += place & place.wrapping_neg();
        }
    }

    /// Places in use up to this one.
    fn up_to(&self, mut place: usize) -> u64 {
        let mut count = 0;
        while place > 0 {
            count += u64::from(self.tree[place]);
            place &= place - 1;
        }
        count
    }

    fn renumber(&mut self) {
        let mut order: Vec<(usize, PageIdx)> = self.places.iter().map(|(page, place)| (*place, *page)).collect();
        order.sort_unstable();
        let places = (2 * order.len()).max(PLACES_MIN).next_power_of_two() + 1;
        self.tree = vec![0; places];
        self.next = order.len();
        for (place, (_, page)) in (1..).zip(order) {
            self.places.insert(page, place);
            self.add(place, 1);
        }
    }
}
