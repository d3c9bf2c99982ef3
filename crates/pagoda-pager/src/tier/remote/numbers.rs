//! What is known of a VM's remote tier from outside.

use rmap::client::{ClientStats, ServerView};

/// What one look at a VM's client of the pool has found.
#[derive(Clone, Debug)]
pub struct RemoteNumbers {
    /// What it counts, since the engine began.
    pub stats: ClientStats,
    /// Pages of answers that may be under way.
    pub window: usize,
    /// Slabs with all their copies in sync.
    pub whole: usize,
    /// Slabs that have a copy in sync.
    pub held: usize,
    /// The servers that it knows.
    pub servers: Vec<ServerView>,
}
