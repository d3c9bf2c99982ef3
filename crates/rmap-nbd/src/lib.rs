//! A space as a disk: a server of the network block device protocol, for QEMU, libnbd, fio, `nbd-client` and others.
//!
//! Fixed newstyle negotiation, structured replies, `base:allocation`, several connections. One thread does everything: it
//! waits for the connections and for the pool's socket in one place, so that a request crosses no other thread. What a
//! client may ask is decided in [`negotiation`] and [`connection`], what happens to pages in [`disk`]; neither does I/O.
//!
//! # What an answer means
//!
//! A write is answered when every copy in sync has it, so FLUSH and FUA have nothing left to do, on whichever connection
//! they come: several connections are allowed and see one disk. A page is read, changed and written back for a write of a
//! part of it; no other write to that page begins meanwhile. A page is written as a whole or not at all; of a longer write
//! that fails, or whose client goes away in the middle, any of its pages may be new. TRIM makes whole pages zero. Where they are zero
//! already no server is asked; it is answered when the control plane has said, since then, that nobody else owns the space.
//!
//! # When something fails
//!
//! A client that breaks the rules loses its connection, and nobody else notices. Where the pool has no room a write fails
//! with ENOSPC, where pages are lost or damaged a read fails with EIO: never zeros. When another owner takes the space over,
//! everything fails with ESHUTDOWN and the server ends: what this one had not answered is refused by the pool's servers.

pub mod connection;
pub mod disk;
mod listener;
pub mod negotiation;
mod server;
mod spares;
pub mod wire;

pub use listener::{ListenError, Listener};
pub use server::{CONNECTIONS_MAX, Ended, Export, Server, ServerError};
