//! What two hosts compute while a VM moves between them. This crate is pure: the daemons do what it says.
//!
//! * [`wire`]: the bytes between the two hosts. [`compare`]: what a destination refuses, by name.
//! * [`note`], [`owner`]: who owns the VM, at each moment and after each crash.
//! * [`rounds`]: which pages are sent while the VM runs, and when it is stopped. [`arrival`]: what the destination has of it.
//!   [`tail`]: pages that come after the VM runs there.
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
