//! A host, its guest and a client: the host is a network namespace with a bridge, to which the guest's tap and a veth pair to the client
//! are connected. So every way to the client ends with the same link. Gone with this value.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Result;
use testkit::undo::Guard;

use crate::migrate::network::{inside, namespace, run, shape, words_inside};

pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 3, 1);
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 3, 2);
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 3, 3);
/// Bits of the network that all three addresses are in.
pub const MASK_BITS: u8 = 24;
/// The guest's device at the host.
pub const TAP: &str = "tap0";

const HOST_NAMESPACE: &str = "pagoda-bench-out-host";
const CLIENT_NAMESPACE: &str = "pagoda-bench-out-client";
const BRIDGE: &str = "bridge0";
/// The link's name at either end.
const LINK: &str = "bench0";

/// See the module. Its MTU is 1500.
pub struct Network {
    _ends: [Guard; 2],
}

impl Network {
    /// # Errors
    /// Not root, or a kernel without bridges, taps or veth.
    pub fn new() -> Result<Network> {
        let ends = [namespace(HOST_NAMESPACE)?, namespace(CLIENT_NAMESPACE)?];
        let host = |words: &[&str]| run("ip", &[&["-n", HOST_NAMESPACE], words].concat()).map(drop);
        let client = |words: &[&str]| run("ip", &[&["-n", CLIENT_NAMESPACE], words].concat()).map(drop);
        host(&["link", "add", BRIDGE, "type", "bridge"])?;
        host(&["tuntap", "add", TAP, "mode", "tap"])?;
        host(&["link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", CLIENT_NAMESPACE])?;
        for port in [TAP, LINK] {
            host(&["link", "set", port, "master", BRIDGE, "up"])?;
        }
        host(&["addr", "add", &format!("{HOST}/{MASK_BITS}"), "dev", BRIDGE])?;
        host(&["link", "set", BRIDGE, "up"])?;
        client(&["addr", "add", &format!("{CLIENT}/{MASK_BITS}"), "dev", LINK])?;
        client(&["link", "set", LINK, "up"])?;
        Ok(Network { _ends: ends })
    }

    /// The words before a program that runs it at the host. The process stays the same.
    pub fn host_words(&self) -> Vec<String> {
        words_inside(HOST_NAMESPACE)
    }

    /// Does something at the client: sockets that it makes stay there.
    ///
    /// # Errors
    /// Those of `act`.
    pub fn at_client<T: Send>(&self, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(CLIENT_NAMESPACE, act)
    }

    /// Does something while the link carries no more to the client than `rate`, as `tc` understands it.
    ///
    /// # Errors
    /// Those of `act`; a kernel without tbf.
    pub fn limited<T>(&self, rate: &str, act: impl FnOnce() -> Result<T>) -> Result<T> {
        shape(HOST_NAMESPACE, LINK, rate)?;
        let done = act();
        run("tc", &["-n", HOST_NAMESPACE, "qdisc", "del", "dev", LINK, "root"])?;
        done
    }
}

/// A port of one of the three.
pub fn port_of(host: Ipv4Addr, port: u16) -> SocketAddr {
    SocketAddr::from((host, port))
}
