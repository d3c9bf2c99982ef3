//! Memory of other machines, page by page, over ordinary datagrams: the MemX idea without RDMA, encrypted and fenced.
//!
//! A *server* lends slabs of its memory. A *client* owns spaces, whose pages lie in slabs at one or two servers, sealed under
//! a key that no server has. A *control plane* says who owns a space and which servers have which slab in sync.
//!
//! [`server::Server`] and [`client::Client`] are sans-I/O: datagrams and time go in, datagrams come out. The simulation in
//! `tests/sim` and the drivers run the same code. The bytes are described in `docs/protocol/rmap.md`.
//!
//! This crate has no socket, file, thread or clock, and `xtask tidy` refuses them. `rmap-io` drives it on a machine,
//! `rmap-nbd` exports a space as a disk, `rmap-file` and `rmap-etcd` are control planes.
#![forbid(unsafe_code)]

pub mod announce;
pub mod client;
pub mod control;
pub mod crypto;
pub mod latency;
mod list;
pub mod medium;
pub mod pressure;
mod reassembly;
mod round_trip;
pub mod server;
pub mod servers;
pub mod transmit;
pub mod units;
pub mod wire;
