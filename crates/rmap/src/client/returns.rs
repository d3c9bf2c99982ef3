//! Slabs that have left the map, or never came to be in it, go back to their servers.
//!
//! A server that is away is told when it answers again, however many slabs it has: they wait in a list of its own, and not as
//! requests, of which there is a limited number for all servers together. It is told of this owner first, or it would not listen.
//! A release names the grant that it ends, so one that comes late, twice or to a new life of the server ends nothing else.

use std::collections::VecDeque;

use crate::client::index::SpaceIndex;
use crate::units::{SlabNo, Version};

/// What is to be given back to one server, 256 GiB of the usual slabs: the rest of what a server that is away has lent is given
/// back when it is next asked for.
pub const RETURNS_MAX: usize = 4096;
/// Of these, under way.
const AT_A_TIME: usize = 32;

/// A slab as it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Return {
    pub space: SpaceIndex,
    pub slab: SlabNo,
    pub grant: Version,
}

/// What is to be given back to one server when it answers.
#[derive(Debug)]
pub struct Returns {
    waiting: VecDeque<Return>,
    /// Requests that are under way.
    asked: usize,
}

impl Returns {
    pub fn new() -> Returns {
        Returns { waiting: VecDeque::with_capacity(RETURNS_MAX), asked: 0 }
    }

    /// How many wait. Others may be under way.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether some wait, or are under way.
    pub fn is_pending(&self) -> bool {
        self.asked > 0 || !self.waiting.is_empty()
    }

    /// Whether there is room for as many as a server names at a time.
    pub fn has_room(&self) -> bool {
        self.waiting.len() <= RETURNS_MAX / 2
    }

    /// One more, if there is room.
    pub fn push(&mut self, slab: Return) {
        if self.waiting.len() < RETURNS_MAX {
            self.waiting.push_back(slab);
        }
    }

    /// Nothing of a space is to be given back.
    pub fn forget(&mut self, space: SpaceIndex) {
        self.waiting.retain(|slab| slab.space != space);
    }

    /// The next one, if it may be asked for now. It stays until it was asked for or put off.
    pub fn next(&self) -> Option<Return> {
        self.waiting.front().copied().filter(|_| self.asked < AT_A_TIME)
    }

    /// The next one goes behind all others.
    pub fn put_off(&mut self) {
        self.waiting.rotate_left(1);
    }

    /// The next one was asked for, or nobody may ask any more.
    pub fn pop(&mut self, was_asked: bool) {
        self.waiting.pop_front();
        self.asked += usize::from(was_asked);
    }

    /// A request has ended.
    pub fn ended(&mut self) {
        self.asked -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: SpaceIndex = SpaceIndex(0);
    const OTHER: SpaceIndex = SpaceIndex(1);

    fn slab(space: SpaceIndex, slab: u32) -> Return {
        Return { space, slab: SlabNo(slab), grant: Version::NEVER }
    }

    #[test]
    fn so_many_are_under_way_and_the_others_wait_in_turn() {
        let mut returns = Returns::new();
        [slab(ONE, 0), slab(OTHER, 1), slab(ONE, 2)].into_iter().for_each(|slab| returns.push(slab));
        returns.put_off();
        returns.pop(true);
        assert_eq!((returns.next(), returns.len()), (Some(slab(ONE, 2)), 2), "the one that was put off is last");
        returns.forget(ONE);
        assert_eq!((returns.next(), returns.is_pending()), (None, true));
        (0..AT_A_TIME as u32).for_each(|number| returns.push(slab(ONE, number)));
        (1..AT_A_TIME).for_each(|_| returns.pop(true));
        assert_eq!((returns.next(), returns.len()), (None, 1), "no more at a time");
        returns.ended();
        assert_eq!(returns.next(), Some(slab(ONE, AT_A_TIME as u32 - 1)));
        returns.pop(false);
        (1..AT_A_TIME).for_each(|_| returns.ended());
        assert!(!returns.is_pending());
    }

    #[test]
    fn a_list_does_not_grow() {
        let mut returns = Returns::new();
        assert!(returns.has_room());
        (0..=RETURNS_MAX as u32).for_each(|number| returns.push(slab(ONE, number)));
        assert_eq!((returns.len(), returns.has_room()), (RETURNS_MAX, false));
    }
}
