//! Opens slabs: those that are asked for the first time, and those that another owner left.

mod advance;

use crate::client::index::PeerIndex;
use crate::units::Version;

/// What one copy of a taken-over slab has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub peer: PeerIndex,
    pub grant: Version,
    pub step: ListStep,
    pub list: Vec<Version>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListStep {
    Fencing,
    Asked,
    Done,
    /// The copy is not there, or not the one that the map means.
    Bad,
    /// Its server says that a reader's generation is old, and the map says that it is not. It may have the copy.
    Refused,
}
