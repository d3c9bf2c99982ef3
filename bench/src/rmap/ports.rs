//! Sockets at the two ends of an [`Ethernet`].

use std::net::SocketAddr;

use anyhow::{Context, Result};
use rmap_io::net::Port;
use testkit::link::{ETHERNET_LISTEN, ETHERNET_LISTEN_HERE, Ethernet};

/// A socket at a server's end.
///
/// # Errors
/// It cannot be made.
pub fn server_port(link: &Ethernet) -> Result<Port> {
    link.at_servers(|| bind(ETHERNET_LISTEN))
}

/// A socket at a client's end. Without the link there is no such address.
///
/// # Errors
/// It cannot be made.
pub fn client_port(_link: &Ethernet) -> Result<Port> {
    bind(ETHERNET_LISTEN_HERE)
}

fn bind(addr: &str) -> Result<Port> {
    let addr: SocketAddr = addr.parse().context("an address")?;
    Port::bind(addr).with_context(|| format!("make a socket at {addr}"))
}
