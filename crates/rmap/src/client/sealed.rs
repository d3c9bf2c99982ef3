//! Spaces that are sealed: many clients read them, nobody writes.
//!
//! What is in a page never changes again, so a reader needs no owner and asks nobody before it reads: a page in the version
//! that the copies list is right for ever, whichever of them has it. Only where the copies are changes. For that the space
//! still has a generation, and whoever took the last one *keeps* the space: it makes copies anew and drops those of servers
//! that are gone, like an owner, and may be any of the readers. A reader that finds too few copies looks at the map again
//! and again; when that does not change for [`KEEP_AFTER`], nobody sees to it, and the reader takes the next generation.
//! Servers then refuse the last one: the others look, read on with the new one, and who kept the space before is a reader again.

mod keep;

use std::time::Duration;

use crate::units::Time;

/// A keeper that lives has made a slab's copy anew by then, even on a slow network. Twice this at most: readers take chances,
/// so that not all of them try at once.
pub const KEEP_AFTER: Duration = Duration::from_secs(10);
/// Where keeping changes hands and nothing is better then, the next try waits longer each time.
const PATIENCE_MAX: Duration = Duration::from_secs(600);
/// Between two looks at a map: at first, and when it has not changed for a while.
const LOOK_FIRST: Duration = Duration::from_millis(100);
const LOOK_MAX: Duration = Duration::from_secs(5);

/// What a client may do with a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenure {
    /// Read and write: a space has one owner at a time.
    Owner,
    /// Read, and nothing else. The space is sealed.
    Reader,
    /// Read, and say where the copies are.
    Keeper,
    /// Read what another client writes.
    Follower,
}

impl Tenure {
    /// Who has this tenure says in the map where the copies are.
    pub fn changes_map(self) -> bool {
        matches!(self, Tenure::Owner | Tenure::Keeper)
    }
}

/// A reader waits for somebody to see to a space, or for its turn to do so.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// The map is as it was since then.
    unchanged_since: Time,
    look_at: Time,
    pause: Duration,
    patience: Duration,
    /// The control plane was asked.
    is_looking: bool,
    /// A server has said since then that there is a newer generation, of which the answer may know nothing yet.
    is_early: bool,
}

impl Watch {
    /// What is being looked up is to be looked up again.
    pub fn looks_again(&mut self) {
        self.is_early = self.is_looking;
    }
}
