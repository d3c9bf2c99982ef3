//! How long faults and reads took.

use serde::{Deserialize, Serialize};

/// Latency of one kind of fault since the VM attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    pub count: u64,
    pub p50_us: f64,
    pub p99_us: f64,
}

/// How long rounds of the memory policy waited for the daemon's locks, since the daemon started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundWait {
    /// Rounds that were made.
    pub rounds: u64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// The longest wait of a round.
    pub max_us: f64,
}
