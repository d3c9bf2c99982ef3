//! What is known of a tier from outside.

use super::Counts;
use crate::latency::Histogram;

/// What one tier reports.
#[derive(Clone, Debug)]
pub struct Report {
    /// The tier's name, such as `swap`.
    pub name: &'static str,
    /// What it holds and has moved.
    pub counts: Counts,
    /// How long its part of a read took, from asked for to all there.
    pub reads: Histogram,
    /// The same of a write to the tier.
    pub writes: Histogram,
}
