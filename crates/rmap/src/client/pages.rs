//! What is done for callers: pages are read and written, and what cannot be done now waits or fails.
//!
//! The operations are in [`Ops`](super::ops::Ops), reads that wait for silent servers in
//! [`ReadQueue`](super::read_queue::ReadQueue), and those who ask whether this client still owns a space in
//! [`Confirms`](super::confirm::Confirms).

mod confirm;
mod fail;
mod queue;
mod serve;
