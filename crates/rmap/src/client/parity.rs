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
pub mod assign;
pub mod cold;
mod course;
mod dissolve;
mod keep;
pub mod layout;
mod ledger;
mod make;
pub mod status;
pub mod stripe;

use crate::client::index::SpaceIndex;
use crate::client::ledger::Ledger;
use crate::client::parity::cold::Cold;
use crate::client::parity::stripe::Stripes;
use crate::client::slab::Slab;
use crate::units::SlabNo;

/// Pages that are put together, what is done with groups that get parity or lose it, and which parts of the ledger are to be read or
/// written.
#[derive(Debug)]
pub struct Parity {
    pub stripes: Stripes,
    cold: Cold,
    ledger: Ledger,
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

impl Parity {
    pub fn new() -> Parity {
        Parity { stripes: Stripes::new(), cold: Cold::default(), ledger: Ledger::default() }
    }

    /// The next space is opened: with so many groups, or none if it has another owner.
    pub fn open(&mut self, groups: usize) {
        self.cold.open(groups);
    }

    /// Groups become cold after another time: they are looked at anew.
    pub fn look_anew(&mut self) {
        self.cold.reset();
    }

    /// Whether a write waits until a group has no parity any more.
    pub fn is_any_dissolving(&self) -> bool {
        self.cold.is_any_dissolving()
    }

    /// Nothing of a space is done any more.
    pub fn forget(&mut self, space: SpaceIndex) {
        self.ledger.forget(space);
        self.cold.forget(space);
    }

    /// Those who wait to read or write the ledger may be answered.
    pub fn wake(&mut self) {
        self.ledger.wake();
    }

    /// What was to be written to the ledger of a space is somebody else's to write.
    pub fn end_ledger_writes(&mut self, space: SpaceIndex) {
        self.ledger.end_writes(space);
    }

    /// Nobody answers for a page of the ledger that was being read: it is read when somebody does.
    pub fn put_off_read(&mut self, space: SpaceIndex, slab: SlabNo, part: usize) {
        self.ledger.reads.push_waiting(space, slab, part);
    }
}
