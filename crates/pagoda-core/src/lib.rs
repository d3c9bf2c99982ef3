//! Pure logic of Pagoda: no I/O, no clock, no thread, no unsafe, no serde.
//!
//! * [`balloon`]: how far a guest is asked to inflate its balloon.
//! * [`units`], [`bits`]: pages, chunks, bytes, sets of pages.
//! * [`queues`]: recency of use (VMemDirect section 4.2). [`pattern`]: what to read for a fault.
//! * [`fault`]: the state machine of one VM's memory, where the decisions are.
//! * [`stats`]: the catalogue of metrics.

pub mod balloon;
pub mod bits;
pub mod fault;
pub mod pattern;
pub mod queues;
pub mod stats;
pub mod units;
