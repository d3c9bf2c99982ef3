//! What a client counts.

use crate::latency::Latency;
use crate::units::Class;

/// What happened, for operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientStats {
    pub reads: u64,
    /// Reads that needed no server: zero pages, and pages being written.
    pub reads_local: u64,
    pub writes: u64,
    /// Reads that were put together from the other slabs of a group.
    pub degraded: u64,
    pub sent: u64,
    /// Requests sent again after a timeout, and after others had overtaken them.
    pub resent_timeout: u64,
    pub resent_overtaken: u64,
    pub hedged: u64,
    /// Datagrams that were malformed, not authentic, replayed, or of no use any more.
    pub dropped: u64,
    /// Pages that a server returned in another state than it acknowledged.
    pub bad_pages: u64,
    pub sessions: u64,
    pub servers_failed: u64,
    /// Reads and writes that failed because every server of their page had been silent for too long.
    pub unanswered: u64,
    /// Copies that left the in-sync set, and that joined it.
    pub copies_left: u64,
    pub copies_joined: u64,
    pub slabs_lost: u64,
    /// Slabs that went back to their servers because nothing in them is needed.
    pub slabs_given_back: u64,
    /// Slabs that an earlier owner left at a server, where no map named them, and that went back.
    pub leftovers: u64,
    /// Groups of slabs that were cold and got parity, and those whose parity went before they were written to.
    pub groups_made: u64,
    pub groups_dissolved: u64,
    /// Requests that were declined, or failed, because the control plane did not say in time who has their slab, or is to.
    pub unmapped: u64,
    /// Pages that this client copied for a new copy of a slab.
    pub pages_copied: u64,
    /// Slabs that servers copied to each other for it, and those where what they stored was never written.
    pub slabs_transferred: u64,
    pub transfers_refused: u64,
    /// Sealed spaces that this client began to keep.
    pub spaces_kept: u64,
    /// Pages that were looked at without anybody asking, and those of them that were damaged or old.
    pub scrubbed: u64,
    pub scrub_bad: u64,
    /// Servers that did not know the reader of a sealed space when they were asked for something of it, and were told.
    pub notified_again: u64,
    /// How long reads and writes took, from being asked for to being told, by class; what failed included.
    pub reads_took: [Latency; Class::ALL.len()],
    pub writes_took: [Latency; Class::ALL.len()],
    /// Servers that speak other versions of the protocol, or have slabs of another size.
    pub incompatible: u64,
}
