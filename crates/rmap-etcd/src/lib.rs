//! etcd as the control plane of [`rmap`]: which nodes there are, which spaces, who owns them, and where their slabs are.
//!
//! The page path never waits for etcd. [`Control`] asks it on a thread of its own and gives a driver of
//! [`rmap::client::Client`] the answers as they come; [`Member`] keeps a server's record alive on another. [`Etcd`] is the
//! store itself, for commands and for those two. [`Registers`] says who owns a VM that moves between hosts, which is nothing of rmap's. The keys and values are described in `docs/protocol/etcd.md`.
//!
//! # When something fails
//!
//! etcd away, slow, or without a leader: reads and writes of pages go on with the map as it is; what needs another map (a
//! server that died, a slab's first write, a take-over) waits, and [`Health`] says so. A change whose answer was lost is
//! asked for again, word for word, and recognizes itself. A value that cannot be right is never acted on: what needs it
//! waits, and the error names the key. The truth about an owner is what servers accept: a lease says who seems to be there,
//! never who may write.
#![forbid(unsafe_code)]

mod config;
mod control;
mod error;
mod gateway;
mod keys;
mod member;
mod registers;
mod spaces;
mod store;
mod values;

pub use config::{EtcdConfig, TlsFiles};
pub use control::{Control, Health, HealthView, Ownership};
pub use error::EtcdError;
pub use member::{Load, Member, Membership};
pub use registers::Registers;
pub use spaces::NewSpace;
pub use store::{BATCH_MAX, Etcd};
pub use values::{NAME_MAX, Node, NodeState, Owner, Register, Space, VALUE_MAX};
