//! Network namespaces and links with Ethernet's frames between them, gone with these values.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::undo::{Guard, Undo};

/// Namespaces of the two ends.
pub const CLIENT: &str = "pagoda-bench-client";
pub const SERVER: &str = "pagoda-bench-server";
/// Address of the server's end.
pub const SERVER_ADDR: &str = "10.77.0.2";
/// Where [`Ethernet`]'s servers are.
pub const ETHERNET_SERVER: &str = "pagoda-bench-servers";
/// The address at which these servers are reached.
pub const ETHERNET_ADDR: &str = "10.77.1.2";
/// Any port of it.
pub const ETHERNET_LISTEN: &str = "10.77.1.2:0";
/// That of this namespace's end.
const ETHERNET_HERE: &str = "10.77.1.1";
/// Any port of it.
pub const ETHERNET_LISTEN_HERE: &str = "10.77.1.1:0";
/// The device that is this namespace's end of [`Ethernet`].
const ETHERNET_DEVICE: &str = "pagoda-bench";
/// The name of either end, in a namespace of ours.
const DEVICE: &str = "bench0";
/// What a token bucket saves up: more than a timer is late by, and nothing against what is measured.
const BURST: &str = "64kb";
/// The queue of a network card: a thousand frames of 1500 bytes.
const QUEUE: &str = "1500kb";

/// The link; its MTU is 1500.
#[derive(Debug)]
pub struct Link {
    _ends: [Guard; 2],
}

impl Link {
    /// A link that carries `rate`, as `tc` understands it, in either direction.
    ///
    /// # Errors
    /// Not root, or a kernel without veth or tbf.
    pub fn new(rate: &str) -> Result<Link> {
        let end = |name: &str| Guard::new(Undo::Namespace { name: name.to_owned() });
        let ends = [end(CLIENT)?, end(SERVER)?];
        for name in [CLIENT, SERVER] {
            // Of a bench that was killed.
            let _ = Undo::Namespace { name: name.to_owned() }.perform();
            run("ip", &["netns", "add", name])?;
        }
        let link = ["link", "add", DEVICE, "netns", CLIENT, "type", "veth", "peer", "name", DEVICE, "netns", SERVER];
        run("ip", &link)?;
        for (name, addr) in [(CLIENT, "10.77.0.1"), (SERVER, SERVER_ADDR)] {
            run("ip", &["-n", name, "addr", "add", &format!("{addr}/24"), "dev", DEVICE])?;
            run("ip", &["-n", name, "link", "set", DEVICE, "up"])?;
            let shape = ["qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", BURST, "limit", QUEUE];
            run("tc", &[&["-n", name], &shape[..]].concat())?;
        }
        Ok(Link { _ends: ends })
    }
}

/// A link from this namespace, where the clients are, to one with servers. Its MTU is 1500, and nothing but the CPU limits it.
#[derive(Debug)]
pub struct Ethernet {
    _end: Guard,
}

impl Ethernet {
    /// # Errors
    /// Not root, or a kernel without veth.
    pub fn new() -> Result<Ethernet> {
        let undo = || Undo::Namespace { name: ETHERNET_SERVER.to_owned() };
        let end = Guard::new(undo())?;
        // Of a bench that was killed, or of the round before: the kernel takes a namespace down after its name, and what was in it.
        let _ = undo().perform();
        let _ = run("ip", &["link", "del", ETHERNET_DEVICE]);
        run("ip", &["netns", "add", ETHERNET_SERVER])?;
        // What servers send to each other goes over `lo`, which has frames of the same size then.
        run("ip", &["-n", ETHERNET_SERVER, "link", "set", "lo", "mtu", "1500", "up"])?;
        let there = ["type", "veth", "peer", "name", DEVICE, "netns", ETHERNET_SERVER];
        run("ip", &[&["link", "add", ETHERNET_DEVICE], &there[..]].concat())?;
        for (namespace, device, addr) in
            [(&[][..], ETHERNET_DEVICE, ETHERNET_HERE), (&["-n", ETHERNET_SERVER], DEVICE, ETHERNET_ADDR)]
        {
            run("ip", &[namespace, &["addr", "add", &format!("{addr}/24"), "dev", device]].concat())?;
            run("ip", &[namespace, &["link", "set", device, "up"]].concat())?;
        }
        Ok(Ethernet { _end: end })
    }

    /// Does something where the servers are: sockets and processes that it makes stay there.
    ///
    /// # Errors
    /// Those of `make`; not root.
    pub fn at_servers<T: Send>(&self, make: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            // A thread of its own: it does not come back.
            let made = scope.spawn(|| {
                let namespace =
                    File::open(Path::new("/run/netns").join(ETHERNET_SERVER)).context("open a namespace")?;
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), network).context("move into a namespace")?;
                make()
            });
            made.join().map_err(|_| anyhow!("a thread in a namespace has panicked"))?
        })
    }
}

fn run(program: &str, words: &[&str]) -> Result<()> {
    let output = Command::new(program).args(words).output().with_context(|| format!("run {program} (iproute2)"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
