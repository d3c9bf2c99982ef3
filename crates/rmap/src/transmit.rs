//! Datagrams on their way out. What makes them does no I/O.

use std::net::SocketAddr;

/// One or more datagrams to send, in the buffer that the caller gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    pub to: SocketAddr,
    /// The buffer is to be cut into datagrams of this size; the last may be shorter.
    pub segment: usize,
}
