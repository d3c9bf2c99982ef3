//! What earlier owners left at servers goes back to them.
//!
//! An owner that ends between the map's answer and the server's leaves a slab there that no map names: nobody would ever ask for it
//! again, and nobody else would be lent it. So each owner makes itself known to each server once, asks which slabs of the space that has,
//! and gives back what the map does not name. From then on the server lends earlier owners nothing more, should one be left that does
//! not know yet that it is one. The first owner need not ask: there was none before it.
//!
//! What was granted in an earlier generation and is not in the map of this one never comes into it: an owner adds only what it was
//! granted itself. What this owner was granted is its own to give back (`returns.rs`), whether the map names it yet or not.

mod find;

use super::returns::RETURNS_MAX;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::wire::message::HELD_MAX;

/// Servers and spaces that are looked at together. What they may answer has room among what is given back, or it would be forgotten.
const AT_A_TIME: usize = 8;
const _: () = assert!(AT_A_TIME * HELD_MAX <= RETURNS_MAX / 2);

/// What is to be asked: a server, what it has of a space, from which of its places on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    space: SpaceIndex,
    peer: PeerIndex,
    from: u64,
}

impl Look {
    pub fn is_of(&self, space: SpaceIndex, peer: PeerIndex) -> bool {
        (self.space, self.peer) == (space, peer)
    }
}
