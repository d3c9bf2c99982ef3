//! Pure logic of Pagoda: no I/O, no clock, no thread, no unsafe, no serde.
//!
//! * [`balloon`]: how far a guest is asked to inflate its balloon.
//! * [`units`], [`bits`]: pages, chunks, bytes, sets of pages.
//! * [`queues`]: recency of use (VMemDirect section 4.2). [`pattern`]: what to read for a fault.
//! * [`fault`]: the state machine of one VM's memory, where the decisions are.
//! * [`policy`]: who gets how much memory, and [`policy::mrc`]: what another size would cost.
//! * [`outbox`]: how large an outbox is, by its VM's SLO, and what writers do when it is full.
//! * [`simulate`]: the policy over scripted VMs, under virtual time.
//! * [`stats`]: the catalogue of metrics. [`chance`]: random numbers from a seed.
//! * [`budget`]: how much of a processor background work may use.

pub mod balloon;
pub mod bits;
pub mod budget;
pub mod chance;
pub mod fault;
pub mod outbox;
pub mod pattern;
pub mod policy;
pub mod queues;
pub mod simulate;
pub mod stats;
pub mod units;
