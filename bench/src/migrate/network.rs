//! Two hosts: network namespaces with a link between them, gone with this value.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use testkit::undo::{Guard, Undo};

use super::options::Speed;

/// Addresses of the hosts.
pub const ADDRESSES: [&str; 2] = ["10.77.2.1", "10.77.2.2"];
const NAMESPACES: [&str; 2] = ["pagoda-bench-host1", "pagoda-bench-host2"];
/// A third machine, and what all three are connected to, where there is a switch.
pub const POOL_ADDRESS: &str = "10.77.2.3";
pub const POOL_NAMESPACE: &str = "pagoda-bench-pool";
const SWITCH_NAMESPACE: &str = "pagoda-bench-switch";
/// Its name at either end.
const DEVICE: &str = "bench0";
/// What a sender hands over at once has up to 64 KiB and its headers. A smaller bucket would have the kernel cut it on the CPU, which a
/// network card does by itself.
const BURST: &str = "256k";
/// What the queue holds at most. One connection keeps about a millisecond in it (the kernel's limit for what TCP has below itself).
const LATENCY: &str = "50ms";

/// See the module. Its MTU is 1500.
pub struct Network {
    _ends: Vec<Guard>,
}

impl Network {
    /// # Errors
    /// Not root, or a kernel without veth or tbf.
    pub fn new(speed: Speed) -> Result<Network> {
        let ends = NAMESPACES.map(namespace).into_iter().collect::<Result<_>>()?;
        let [one, other] = NAMESPACES;
        run("ip", &["link", "add", DEVICE, "netns", one, "type", "veth", "peer", "name", DEVICE, "netns", other])?;
        for (name, address) in NAMESPACES.into_iter().zip(ADDRESSES) {
            run("ip", &["-n", name, "addr", "add", &format!("{address}/24"), "dev", DEVICE])?;
            run("ip", &["-n", name, "link", "set", "lo", "up"])?;
            run("ip", &["-n", name, "link", "set", DEVICE, "up"])?;
            if let Some(rate) = speed.rate() {
                shape(name, DEVICE, rate)?;
            }
        }
        Ok(Network { _ends: ends })
    }

    /// The hosts, whose network cards are as fast as `tc` understands that, and a third machine whose card has no limit, behind a switch.
    ///
    /// # Errors
    /// Not root, or a kernel without bridges, veth or tbf.
    pub fn behind_a_switch(rates: [&str; 2]) -> Result<Network> {
        let all = [NAMESPACES[0], NAMESPACES[1], POOL_NAMESPACE, SWITCH_NAMESPACE];
        let ends = all.map(namespace).into_iter().collect::<Result<_>>()?;
        run("ip", &["-n", SWITCH_NAMESPACE, "link", "add", "switch", "type", "bridge"])?;
        run("ip", &["-n", SWITCH_NAMESPACE, "link", "set", "switch", "up"])?;
        let addresses = [ADDRESSES[0], ADDRESSES[1], POOL_ADDRESS];
        let rates = [Some(rates[0]), Some(rates[1]), None];
        for (at, (name, (address, rate))) in all.into_iter().zip(addresses.into_iter().zip(rates)).enumerate() {
            let port = format!("port{at}");
            let there = ["type", "veth", "peer", "name", &port, "netns", SWITCH_NAMESPACE];
            run("ip", &[&["link", "add", DEVICE, "netns", name], &there[..]].concat())?;
            run("ip", &["-n", SWITCH_NAMESPACE, "link", "set", &port, "master", "switch", "up"])?;
            run("ip", &["-n", name, "addr", "add", &format!("{address}/24"), "dev", DEVICE])?;
            run("ip", &["-n", name, "link", "set", "lo", "up"])?;
            run("ip", &["-n", name, "link", "set", DEVICE, "up"])?;
            if let Some(rate) = rate {
                shape(name, DEVICE, rate)?;
                shape(SWITCH_NAMESPACE, &port, rate)?;
            }
        }
        Ok(Network { _ends: ends })
    }

    /// The words before a program that runs it on a host. The process stays the same.
    pub fn words(&self, host: usize) -> Vec<String> {
        words_inside(NAMESPACES[host])
    }

    /// Bytes that a host has put on the link so far. What TCP hands over at once has its headers counted once.
    ///
    /// # Errors
    /// `ip` does not say.
    pub fn sent_bytes(&self, host: usize) -> Result<u64> {
        let said = run("ip", &["-n", NAMESPACES[host], "-j", "-s", "link", "show", "dev", DEVICE])?;
        let links: Value = serde_json::from_slice(&said).context("read what ip says of a link")?;
        links[0]["stats64"]["tx"]["bytes"].as_u64().context("the bytes of a link")
    }

    /// Does something on a host: sockets that it makes stay there.
    ///
    /// # Errors
    /// Those of `act`; not root.
    pub fn inside<T: Send>(&self, host: usize, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(NAMESPACES[host], act)
    }
}

/// Does something in a namespace: sockets that it makes stay there.
///
/// # Errors
/// Those of `act`; not root.
pub fn inside<T: Send>(namespace: &str, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        // A thread of its own: it does not come back.
        let done = scope.spawn(|| {
            let namespace = File::open(Path::new("/run/netns").join(namespace)).context("open a namespace")?;
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), network).context("move into a namespace")?;
            act()
        });
        done.join().map_err(|_| anyhow!("a thread in a namespace has panicked"))?
    })
}

/// The words before a program that runs it in a namespace. The process stays the same.
pub fn words_inside(namespace: &str) -> Vec<String> {
    vec!["nsenter".to_owned(), format!("--net=/run/netns/{namespace}")]
}

/// A new one, gone with this value.
///
/// # Errors
/// Not root.
pub fn namespace(name: &str) -> Result<Guard> {
    let undo = Undo::Namespace { name: name.to_owned() };
    // Of a bench that was killed.
    let _ = undo.perform();
    let guard = Guard::new(undo)?;
    run("ip", &["netns", "add", name])?;
    Ok(guard)
}

/// What leaves by this device, which may be shaped already.
///
/// # Errors
/// A kernel without tbf.
pub fn shape(namespace: &str, device: &str, rate: &str) -> Result<()> {
    let shape = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY];
    run("tc", &[&["-n", namespace], &shape[..]].concat()).map(drop)
}

/// Runs a program to its end, and returns what it wrote to standard output.
///
/// # Errors
/// It is missing, or fails.
pub fn run(program: &str, words: &[&str]) -> Result<Vec<u8>> {
    let done = Command::new(program).args(words).output().with_context(|| format!("run {program} (iproute2)"))?;
    ensure!(done.status.success(), "{program} {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr));
    Ok(done.stdout)
}
