//! Requests that wait for the control plane's word on a slab: where its copies are to be, or that one of them counts no more.
//!
//! Nobody waits for that for ever. Who has another place for his pages has writes that could not begin back after
//! [`ClientConfig::map_patience`], as declined. Who has none is told after [`ClientConfig::error_after`] that they failed, and what is
//! asked after that fails at once, or within a second where nothing was asked about the slab yet, until there is an answer: a disk
//! that says nothing is worse than one that says what is wrong. (A read of a group with parity that has lost two members does wait
//! until the map says so.)
//!
//! Of what could not begin nothing was sent. A write that every copy has that can, and waits for the map to be rid of the others, fails
//! as one to silent servers does: it stays under way, and is done when the map is changed (see `unanswered.rs`). Later ones to a slab
//! that has such a copy do not begin.
//!
//! [`ClientConfig::map_patience`]: super::ClientConfig::map_patience
//! [`ClientConfig::error_after`]: super::ClientConfig::error_after

mod wait;

use std::time::Duration;

/// A question that is asked while older ones have no answer waits for so long: a store that is there answers in milliseconds.
const GRACE: Duration = Duration::from_secs(1);
/// So many questions are asked in that time about slabs that nobody has, to see whether there are answers; and so many may be open.
/// Each takes slabs from servers.
const TRIALS_MAX: usize = 4;
const TRIALS_OPEN_MAX: usize = 64;
