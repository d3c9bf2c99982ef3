//! What callers asked for: pages are read and written, and what cannot be done now waits or fails.
//!
//! Owns the operations ([`Ops`]), the reads that wait for silent servers ([`ReadQueue`]), and those who ask whether this client
//! still owns a space ([`Confirms`]). Each operation ends once for its caller, and a write only when every copy that it needs has
//! it, or with an error. Requests go out through the [`Pool`](super::pool::Pool); a page of a group with parity may be put together
//! by [`Parity`](super::parity::Parity). What the methods need of these, and what they change there, is in their arguments.

mod confirm;
mod fail;
mod queue;
mod serve;

use super::confirm::Confirms;
use super::ops::Ops;
use super::read_queue::ReadQueue;
use crate::units::SlabSize;

#[derive(Debug)]
pub struct Pages {
    pub ops: Ops,
    pub read_queue: ReadQueue,
    pub confirms: Confirms,
}

impl Pages {
    /// `reports`: writes may fail and go on.
    pub fn new(size: SlabSize, reports: bool) -> Pages {
        Pages { ops: Ops::new(size, reports), read_queue: ReadQueue::default(), confirms: Confirms::default() }
    }
}
