//! One slab of parity for four, instead of second copies: 1.25 times the memory, and one server may go. For sealed spaces, and for what
//! is cold in others (`parity/cold.rs`).
//!
//! The parity slab of a group has at each place the XOR of what its members have there, *sealed* as it is at their servers;
//! what has no content counts as zeros. Nobody writes to a sealed space any more, nor to a group that has parity, so none is ever
//! out of date.
//!
//! # What makes a read right
//!
//! A page that is put together from the others is the sealed page of that member, and is opened under its space, number and
//! version like any other. A server that lies, parity that is not what it should be, a mistake in the grouping: all of that ends
//! in what is not authentic, an error, and never in a wrong page. Versions come from the ledger (`ledger.rs`), whose pages are
//! sealed too. Without the ledger's word no page of a group is taken for one that was never written; where the last copy of the
//! ledger is gone, for good and in the map, members are believed what they list of themselves, as the only copies of other spaces
//! are, and what would have to be put together is lost.
//!
//! A place of parity has the greatest of its members' versions: what is there never changes, so a slab that is made anew
//! is the same bit by bit, and its versions need no list of their own.
//!
//! # The order that loses nothing
//!
//! The space is sealed -> a keeper writes the versions of a group's members into the ledger -> all of them are at both of its
//! copies -> the parity slab is granted, at a server that none of the members needs -> every page of it is there -> it is in
//! the map: from now on the group *has parity* -> each member drops what it has beyond one copy, where all five
//! are at different servers then, one change of the group at a time. Whatever ends this in between leaves a group that is
//! as it was before, or has parity and some copies more than it needs.
//!
//! A slab of a group whose last copy is gone says so in the map, as lost; it is lost only where another of its group says so, too.
//! Until then it is read by the others, and its keeper makes it anew, at a server that has nothing of the group.

mod advance;
mod assemble;
mod assign;
pub mod cold;
mod dissolve;
mod keep;
pub mod layout;
mod make;
pub mod status;
pub mod stripe;

use smallvec::SmallVec;

use super::ledger::Ledger;
use super::slab::Slab;
use crate::units::SlabNo;

use cold::Cold;
use layout::MEMBERS;
use stripe::Stripes;

/// Slabs of a group, in place: an owner has no memory to ask for while it serves.
type Members = SmallVec<[SlabNo; MEMBERS]>;

/// What the client does about parity: pages that are put together, and groups that get parity or lose it.
#[derive(Debug)]
pub struct Parity {
    pub stripes: Stripes,
    pub cold: Cold,
    pub ledger: Ledger,
}

impl Parity {
    pub fn new() -> Parity {
        Parity { stripes: Stripes::new(), cold: Cold::default(), ledger: Ledger::default() }
    }
}

/// How far a space is on its way to parity. Groups that nothing was ever written to count nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParityView {
    pub groups: usize,
    /// Groups whose parity is in the map.
    pub with_parity: usize,
    /// Groups that have parity, and one copy of each slab, all at different servers, and whose versions are at two.
    pub whole: usize,
    /// Groups in which something is damaged, or that found no room.
    pub stuck: usize,
}

/// Of the ledger: without it, nothing that was lost can be made anew.
const LEDGER_COPIES: usize = 2;

impl Slab {
    /// Some server has it, or had.
    pub fn is_held(&self) -> bool {
        self.entry.lost || !self.entry.replicas.is_empty()
    }
}

impl super::slab::Space {
    /// A reader or owner that finds entries beyond the last page has room for all that there may be.
    pub fn extend_to(&mut self, slabs: usize) {
        while self.slabs.len() < slabs {
            self.slabs.push(Slab::vacant());
        }
    }
}
