//! Moving a VM between two hosts, as far as it computes and does nothing else.
//!
//! * [`wire`]: the bytes between the two. [`compare`]: what a destination refuses, by name.
//! * [`units`], [`map`]: numbers and sets of pages of a move.

pub mod compare;
pub mod map;
pub mod units;
pub mod wire;
