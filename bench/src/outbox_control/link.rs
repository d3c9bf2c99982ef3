//! A VM's link to its client: two network namespaces, the VM's own and the client's. Gone with this value.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Result;
use testkit::undo::Guard;

use crate::migrate::network::{inside, namespace, run, shape, words_inside};

/// The same in each pair of namespaces.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 4, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 4, 2);
const PORT: u16 = 8080;
const DEVICE: &str = "bench0";
/// Bytes on the link, headers of Ethernet, IP and TCP included, for so many bytes of a file.
const FRAME_BYTES: u64 = 1514;
const PAYLOAD_BYTES: u64 = 1448;

/// A shaped link of one guest's clients, as the head of this module says.
pub struct Link {
    host: String,
    client: String,
    _ends: [Guard; 2],
}

impl Link {
    /// # Errors
    /// Not root, or a kernel without veth.
    pub fn new(number: usize) -> Result<Link> {
        let [host, client] = ["host", "client"].map(|end| format!("pagoda-bench-size{number}-{end}"));
        let ends = [namespace(&host)?, namespace(&client)?];
        run("ip", &["link", "add", DEVICE, "netns", &host, "type", "veth", "peer", "name", DEVICE, "netns", &client])?;
        for (name, address) in [(&host, HOST), (&client, CLIENT)] {
            run("ip", &["-n", name, "addr", "add", &format!("{address}/24"), "dev", DEVICE])?;
            run("ip", &["-n", name, "link", "set", DEVICE, "up"])?;
        }
        Ok(Link { host, client, _ends: ends })
    }

    /// From now on the client gets so many bytes of files a second.
    ///
    /// # Errors
    /// A kernel without tbf.
    pub fn set_rate(&self, bytes_per_s: u64) -> Result<()> {
        let bits = u128::from(bytes_per_s) * 8 * u128::from(FRAME_BYTES) / u128::from(PAYLOAD_BYTES);
        shape(&self.host, DEVICE, &format!("{bits}bit"))
    }

    /// The words before a program that runs it at the VM's end. The process stays the same.
    pub fn host_words(&self) -> Vec<String> {
        words_inside(&self.host)
    }

    /// Where the VM's outbox listens.
    pub fn server() -> SocketAddr {
        SocketAddr::from((HOST, PORT))
    }

    /// Does something at the client's end.
    ///
    /// # Errors
    /// Those of `act`.
    pub fn at_client<T: Send>(&self, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(&self.client, act)
    }
}
