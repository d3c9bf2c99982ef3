//! Recordings of the memory policy's rounds (`docs/policy-recording.md`).
//!
//! A recording has one line of JSON for each round: what was measured, what was set since the round before, and what the round
//! made of it. [`Writer`] writes the lines, [`compare`] makes the rounds again and says where they differ.
//!
//! This crate is between `pagoda-core`, which has no serde, and the two programs that share recordings: the daemon writes
//! them, the command reads them. A recording may be damaged or made by somebody who wishes ill: every number is checked before
//! the policy sees it.

mod compare;
mod wire;
mod writer;

pub use compare::{Comparison, DIFFERENCES_MAX, Damage, Difference, compare};
pub use writer::Writer;

/// The version in a recording's first line.
pub const VERSION: u32 = 1;
/// A recording ends at this size: some hours of ten VMs, and little enough for a disk of which nothing is known.
pub const RECORDING_BYTES_MAX: u64 = 256 << 20;
/// The longest line. A round of as many VMs as a host may have takes a fifth of it.
pub const LINE_BYTES_MAX: u64 = 16 << 20;
