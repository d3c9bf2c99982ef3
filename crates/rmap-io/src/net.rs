//! The protocol over UDP sockets: one `sendmsg` a message, cut by the kernel (GSO); many datagrams a `recvmmsg`, joined by the
//! kernel (GRO); don't-fragment set. Spins for a while before it blocks. No async runtime; one thread, or one for each
//! worker of a server, whose sockets share an address (SO_REUSEPORT).
//!
//! Where UDP is not allowed, the same datagrams go over TCP, each behind its length.
//!
//! When the network fails, sends are lost datagrams to the protocol, which repeats them; only a broken socket is an error.

mod announce;
mod client;
mod datagrams;
mod port;
mod server;
mod steer;
mod streams;

pub use announce::{ANNOUNCE_AT, ANNOUNCE_GROUP, AnnounceListener, AnnounceSender};
pub use client::{UdpClient, UdpClientError};
pub use datagrams::SOCKET_BUFFER;
pub use port::{Port, Wait};
pub use server::{Drained, drain, serve, serve_until, serve_workers};
pub use streams::STREAMS_MAX;
