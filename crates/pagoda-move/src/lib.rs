//! Moving a VM between two hosts, as far as it computes and does nothing else.
//!
//! * [`wire`]: the bytes between the two. [`compare`]: what a destination refuses, by name.
//! * [`note`], [`owner`]: who owns the VM, at each moment and after each crash.
//! * [`rounds`]: which pages are sent while the VM runs, and when it is stopped. [`arrival`]: what is here of it.
//!   [`tail`]: pages that it gets afterwards.
//! * [`plan`]: what a move would do.
//! * [`units`], [`map`]: numbers and sets of pages of a move.

pub mod arrival;
pub mod compare;
pub mod map;
pub mod note;
pub mod owner;
pub mod plan;
pub mod rounds;
pub mod tail;
pub mod units;
pub mod wire;
