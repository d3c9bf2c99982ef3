//! What a machine knows of a pool of other machines' memory: its directory, who keeps it (a file, or etcd), and how a
//! client of its servers is made. For the command line and for the daemon.
//!
//! Nothing is printed here: what an operator should know is told by the [`Report`] that [`config::PoolConfig`] was
//! given.
#![forbid(unsafe_code)]

pub mod aside;
pub mod config;
pub mod connect;
pub mod error;
pub mod give_back;
pub mod news;
pub mod plane;
pub mod record;
pub mod role;
pub mod slab;
pub mod store;

/// How an operator is told something: a sentence, for a log or a terminal.
pub type Report = fn(&str);
