//! Requests that wait for the control plane's word on a slab: where its copies are to be, or that one of them counts no more.
//!
//! No request waits for that for ever. There are two kinds of callers:
//!
//! * A caller that has another place for its pages sets [`ClientConfig::map_patience`]. After that time it gets back writes that
//!   could not begin, as declined.
//! * A caller that has no other place is told after [`ClientConfig::error_after`] that its requests failed. What it asks after
//!   that fails at once, until there is an answer. If nothing was asked about the slab yet, it fails within a second. The reason
//!   is that a disk which says nothing is worse than one which says what is wrong.
//!
//! One exception is a read of a group with parity that has lost two members. It waits until the map says so.
//!
//! Nothing was sent of a request that could not begin. A write may have begun, be at every copy that can have it, and wait only
//! until the map is rid of the others. It fails as a write to silent servers does (see `pages/silence.rs`): it stays under way, and
//! is done when the map is changed. Later writes to a slab that has such a copy do not begin.
//!
//! [`ClientConfig::map_patience`]: super::ClientConfig::map_patience
//! [`ClientConfig::error_after`]: super::ClientConfig::error_after

use std::time::Duration;

/// A question that is asked while older ones have no answer waits for so long: a store that is there answers in milliseconds.
pub const GRACE: Duration = Duration::from_secs(1);
/// So many questions are asked in that time about slabs that nobody has, to see whether there are answers; and so many may be open.
/// Each takes slabs from servers.
pub const TRIALS_MAX: usize = 4;
pub const TRIALS_OPEN_MAX: usize = 64;
