//! Sampled pages and the miss-ratio curve.

use serde::{Deserialize, Serialize};

/// Begins a sampling period, for tests and tools: the daemon's policy begins its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleRequest {
    /// Pages of 4 KiB, counted from the beginning of the VM's RAM.
    pub pages: Vec<u64>,
}

/// What became of a period's pages so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleInfo {
    /// Periods begun since this daemon attached the VM.
    pub period: u64,
    /// Pages that were unmapped, or were not mapped.
    pub watched: u32,
    /// Of these, used since.
    pub touched: u32,
}

/// Switches the curve on, anew, or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CurveSwitch {
    /// True begins a new curve; false switches it off.
    pub on: bool,
}

/// A miss-ratio curve: misses by the size of DRAM, over the time since it was switched on (old ones fade).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CurveInfo {
    /// Uses that it stands on; few say little.
    pub accesses: f64,
    /// In order of size; empty while nothing is known.
    pub points: Vec<CurvePoint>,
}

/// A point says how many misses one size of DRAM would have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// The VM would have so much DRAM.
    pub bytes: u64,
    /// Pages that would have been read from swap.
    pub misses: f64,
}
