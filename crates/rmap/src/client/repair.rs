//! A slab that has too few copies, or one at a server that wants to be rid of it, gets a new one.
//!
//! The order that loses nothing: the new copy gets every write from now on; it gets every page that it lacks, once the
//! writes that it missed are done, and from then on its acknowledgement is waited for like any other, so that it is not
//! behind for ever; then it joins the map. Only then does the copy leave that it replaces.

mod restore;

use super::tables::Tables;
use super::transfer::Transfer;
use crate::client::index::PeerIndex;
use crate::units::Version;

/// Slabs that get a new copy at a time, so that not all clients of a dead server copy everything at once.
pub const REPAIRS_MAX: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Fencing,
    Granting,
    /// The servers copy.
    Transferring(Transfer),
    /// What is missing goes through the client.
    Copying,
    /// The map is being changed.
    Joining,
}

/// A copy in the making.
#[derive(Debug)]
pub struct Repair {
    pub peer: PeerIndex,
    pub grant: Version,
    pub step: Step,
    replaces: Option<PeerIndex>,
    /// What it has, as far as is known.
    pub list: Box<[Version]>,
    /// Pages before this one were looked at in this pass.
    pub cursor: usize,
}

impl Repair {
    pub fn new(peer: PeerIndex, grant: Version, replaces: Option<PeerIndex>) -> Repair {
        Repair { peer, grant, step: Step::Fencing, replaces, list: Box::default(), cursor: 0 }
    }

    /// The server that gets every write.
    pub fn mirror(&self) -> Option<PeerIndex> {
        matches!(self.step, Step::Transferring(_) | Step::Copying | Step::Joining).then_some(self.peer)
    }

    /// The server without which no write that it got is done: one that has all but what is being written could be behind
    /// for ever otherwise, while others are faster.
    pub fn catches_up(&self) -> Option<PeerIndex> {
        matches!(self.step, Step::Copying | Step::Joining).then_some(self.peer)
    }

    pub fn granted(&mut self, tables: &mut Tables) {
        if self.step == Step::Granting {
            self.step = Step::Transferring(Transfer::Wanted);
            self.list = tables.take();
        }
    }
}
