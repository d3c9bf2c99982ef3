//! How long faults and reads took.

use serde::{Deserialize, Serialize};

/// Latency of one kind of fault since the VM attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    pub count: u64,
    pub p50_us: f64,
    pub p99_us: f64,
}
