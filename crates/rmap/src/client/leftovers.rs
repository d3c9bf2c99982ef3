//! What earlier owners left at servers goes back to them.
//!
//! An owner may end after a server has granted a slab and before the map names it. Then the slab is at the server and in no map.
//! Nobody would ever ask for it again, and nobody else would be lent it. So each owner makes itself known to each server once,
//! asks which slabs of the space it has, and gives back what the map does not name. From then on the server lends earlier owners
//! nothing more, should one be left that does not know yet that it is one. The first owner need not ask, because there was none
//! before it.
//!
//! A slab that was granted in an earlier generation and is not in the map of this one never comes into the map: an owner adds
//! only what it was granted itself. What this owner was granted is its own to give back (`returns.rs`), whether the map names it
//! yet or not.

use std::collections::VecDeque;

use super::returns::RETURNS_MAX;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::wire::message::{HELD_END, HELD_MAX};

/// Servers and spaces that are looked at together. What they may answer has room among what is given back, or it would be forgotten.
pub const AT_A_TIME: usize = 8;
const _: () = assert!(AT_A_TIME * HELD_MAX <= RETURNS_MAX / 2);

/// What is to be asked: a server, what it has of a space, from which of its places on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    pub space: SpaceIndex,
    pub peer: PeerIndex,
    pub from: u64,
}

/// What servers were not asked yet of what earlier owners left there, in the order in which they are asked.
#[derive(Debug, Default)]
pub struct Leftovers {
    queue: VecDeque<Look>,
}

impl Leftovers {
    /// For so many servers and spaces.
    pub fn make_room(&mut self, looks: usize) {
        self.queue.reserve(looks.saturating_sub(self.queue.len()));
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// How many of those that are to be asked fit.
    pub fn count(&self, fits: impl Fn(SpaceIndex, PeerIndex) -> bool) -> usize {
        self.queue.iter().filter(|look| fits(look.space, look.peer)).count()
    }

    /// A server is to be asked for all that it has of a space, unless it stands in line already.
    pub fn add(&mut self, space: SpaceIndex, peer: PeerIndex) {
        if self.count(|of, at| (of, at) == (space, peer)) == 0 {
            self.queue.push_back(Look { space, peer, from: HELD_END });
        }
    }

    /// What could not be asked yet, or the rest of an answer.
    pub fn put_back(&mut self, look: Look) {
        self.queue.push_back(look);
    }

    pub fn next(&mut self) -> Option<Look> {
        self.queue.pop_front()
    }

    /// What was still to be asked is so no more.
    pub fn forget(&mut self, ends: impl Fn(SpaceIndex, PeerIndex) -> bool) {
        self.queue.retain(|look| !ends(look.space, look.peer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_asked_once_for_a_space() {
        let (mut leftovers, space) = (Leftovers::default(), SpaceIndex(0));
        [1, 2, 1].into_iter().for_each(|peer| leftovers.add(space, PeerIndex(peer)));
        assert_eq!(leftovers.len(), 2);
        leftovers.forget(|_, peer| peer == PeerIndex(1));
        let next = leftovers.next();
        assert_eq!(next, Some(Look { space, peer: PeerIndex(2), from: HELD_END }));
        assert_eq!((leftovers.len(), leftovers.next()), (0, None));
    }
}
