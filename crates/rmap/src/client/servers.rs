//! Servers as operators list them, and where they say they are.

use std::net::SocketAddr;

use crate::announce::AnnounceKey;
use crate::crypto::PublicKey;
use crate::units::{BootEpoch, ServerId};

/// Servers of one client: bits of a `PeerSet`.
pub const SERVERS_MAX: usize = 64;

/// A server as the operator lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    pub id: ServerId,
    pub addr: SocketAddr,
    pub key: PublicKey,
    /// Servers of one zone fail together: a rack, a power supply.
    pub zone: u32,
    /// Who signs its announcements, if it makes any.
    pub announcer: Option<AnnounceKey>,
}

/// Where a server says it is, in an announcement or in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    pub server: ServerId,
    pub addr: SocketAddr,
    /// The life of the server that says so: a restarted server has another one.
    pub epoch: BootEpoch,
}
