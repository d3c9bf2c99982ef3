//! Spaces that another client writes, read by this one: one writer and many readers.
//!
//! A read returns the last write to its page that was acknowledged before it began, or one that was under way since. For a second it
//! waits rather than return content older than what this client has read there before, as long as the space keeps its owner and the
//! slab one of its copies. The writer knows nothing of its readers, and waits for none of them.
//!
//! # Why a read is right
//!
//! What is acknowledged is at every copy that the map names at that moment, and a copy in the making comes into the map when it has
//! all of that ([`super::Client::required`]). So a copy that the map named at *any* moment after the read began has what the read has to
//! return, and from then on, whether it stays in the map or not, has nothing older. A read therefore waits for a *look* at the map
//! that was asked for after it began, and then asks a copy of that map, for the page of exactly that grant: a server that was given
//! the slab anew since then refuses. All reads that begin while a look is under way share the next one.
//!
//! No clock and no lease is part of this, and no generation either: a server that does not know the owner of today is right to answer,
//! as long as the map names it.
//!
//! # What is believed of servers
//!
//! The owner's table of versions is not here. A page that is damaged, or of another place, is found by its seal; one older than
//! what was read before, by its version. That there is nothing is taken from a copy when the others have been asked, and none of
//! those that answer has anything. A server that keeps an old page, and lies, is found where another copy is asked as well, and not
//! otherwise. Versions that nothing proves, of trims, are not remembered.

mod look;

use std::time::Duration;

use super::ops::{Operation, Stage};
use crate::client::index::{GroupIndex, List};
use crate::units::Time;

/// A read that no copy answers is tried again with the next map, after a pause that grows: at first about what an owner takes to
/// notice that a server is gone.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// What was read before and no copy has any more was never acknowledged: its owner sees to that in less time, or has ended.
const SEEN_PATIENCE: Duration = Duration::from_secs(1);

/// The number of a look that no read waits for: it waits for its pause to end.
const PAUSED: u64 = u64::MAX;

/// What a reader knows of the map of a space that another client writes.
#[derive(Debug, Default)]
pub struct Following {
    /// Looks that were asked for, and that were answered; one at a time is under way.
    asked: u64,
    answered: u64,
    /// When reads are tried again that no copy answered.
    retry_at: Option<Time>,
    pause: Duration,
    parity: List<GroupIndex, GroupParity>,
}

/// Whether a group has parity: then one of its slabs may have no copy, and not be lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum GroupParity {
    #[default]
    None,
    There,
    Lost,
}

impl Following {
    pub fn new(groups: usize) -> Following {
        Following { parity: (0..groups).map(|_| GroupParity::None).collect(), ..Following::default() }
    }
}

fn is_paused(op: &Operation) -> bool {
    op.stage == Stage::Waiting && op.look == PAUSED
}
