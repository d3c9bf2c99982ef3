//! What a client asks of the control plane, whatever that is: a file, or a cluster's store.
//!
//! The control plane keeps for each space its owner's generation and which servers have which slab in sync. It compares and
//! swaps; the client retries a lost answer with the same request and recognizes its own entry.

use crate::units::{Generation, ServerId, SlabNo, SpaceId, Version};

/// Copies of a slab: two, and a third while one is being replaced.
pub const REPLICAS_MAX: usize = 3;

/// A copy of a slab at a server. The grant tells it from earlier ones at the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    pub server: ServerId,
    pub grant: Version,
}

/// Which servers have a slab in sync: every acknowledged write is at all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapEntry {
    /// Counts the entries of this slab; 0 is "none yet".
    pub revision: u64,
    pub replicas: Vec<Replica>,
    /// The last copy is gone. Its pages are errors, never zeros.
    pub lost: bool,
}

/// "Replace the entry before this one by it, if `generation` still owns the space."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlRequest {
    pub space: SpaceId,
    pub generation: Generation,
    pub slab: SlabNo,
    pub entry: MapEntry,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlReply {
    Done,
    /// The entry of today is this one.
    Conflict(MapEntry),
    /// The space has another owner.
    Fenced,
}
