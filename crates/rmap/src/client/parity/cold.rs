//! Parity of what is cold, in a space that is still written: its owner makes it for groups that were not written to for
//! [`ClientConfig::parity_after`](super::super::ClientConfig::parity_after), if that is asked for, and has it leave before the
//! next write (`dissolve.rs`).
//!
//! The order is a keeper's: versions in the ledger, at both copies -> parity granted and filled -> parity in the map -> members
//! drop what they have beyond one copy. Until the map is asked, a write or trim to the group ends the making at once. From then
//! on the group is *frozen*, for this owner and for each that follows: nothing is written to it until a map without its
//! parity was confirmed. So what the ledger and the parity say of a group is right as long as the map says that it has
//! parity, and counts for nothing otherwise: a later making writes all of the ledger's pages again.
//!
//! Each making begins a new *life* of the parity slab, as giving a slab back does (`../discard.rs`): its floor is taken when the
//! one before it ends, and a place of parity has the greatest of its members' versions or the floor, whichever is greater. So what
//! was on its way to an earlier life is not stored in this one, even where a page was trimmed since, or a slab given back, and
//! the greatest version of today is less than that of then. Others than this owner do not know its floors. They need not: they
//! take parity in any version that is not less than its members', and a new owner has no earlier lives to fear, as servers
//! that have granted it anything refuse what earlier owners sent.

mod make;

use std::time::Duration;

use super::super::peer::PeerSet;
use crate::units::Time;

/// Groups whose parity is being made at a time: each has a table more in memory, and servers have other things to do.
const MAKING_MAX: usize = 2;
/// Groups are looked at so often while one becomes cold, within limits.
const LOOKS: u32 = 8;
const LOOK_MIN: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_secs(10);
/// One slab and its parity are no less than two copies.
const HELD_MIN: usize = 2;

/// What its owner does with a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Course {
    #[default]
    Still,
    /// Makes its parity.
    Making,
    /// Has its parity leave, as soon as its slabs have the copies that they need without it.
    Dissolving,
}

/// A group as its owner sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Group {
    /// When something was last written to it, or could not be made.
    pub quiet_since: Time,
    pub course: Course,
    /// Servers that have no room for what it needs before it is dissolved.
    pub refused: PeerSet,
}

/// Groups of all spaces.
#[derive(Debug, Default)]
pub struct Cold {
    due: Option<Time>,
    /// The group that is looked at next: so none is left out where there are many.
    next: (usize, usize),
    /// Groups that are being dissolved.
    pub dissolving: usize,
}
