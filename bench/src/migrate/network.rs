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
/// Its name at either end.
const DEVICE: &str = "bench0";
/// What a sender hands over at once has up to 64 KiB and its headers. A smaller bucket would have the kernel cut it on the CPU, which a
/// network card does by itself.
const BURST: &str = "256k";
/// What the queue holds at most. One connection keeps about a millisecond in it (the kernel's limit for what TCP has below itself).
const LATENCY: &str = "50ms";

/// See the module. Its MTU is 1500.
pub struct Network {
    _ends: [Guard; 2],
}

impl Network {
    /// # Errors
    /// Not root, or a kernel without veth or tbf.
    pub fn new(speed: Speed) -> Result<Network> {
        let undo = |name: &str| Undo::Namespace { name: name.to_owned() };
        let ends = [Guard::new(undo(NAMESPACES[0]))?, Guard::new(undo(NAMESPACES[1]))?];
        for name in NAMESPACES {
            // Of a bench that was killed.
            let _ = undo(name).perform();
            run("ip", &["netns", "add", name])?;
        }
        let [one, other] = NAMESPACES;
        run("ip", &["link", "add", DEVICE, "netns", one, "type", "veth", "peer", "name", DEVICE, "netns", other])?;
        for (name, address) in NAMESPACES.into_iter().zip(ADDRESSES) {
            run("ip", &["-n", name, "addr", "add", &format!("{address}/24"), "dev", DEVICE])?;
            run("ip", &["-n", name, "link", "set", "lo", "up"])?;
            run("ip", &["-n", name, "link", "set", DEVICE, "up"])?;
            if let Some(rate) = speed.rate() {
                let shape =
                    ["qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY];
                run("tc", &[&["-n", name], &shape[..]].concat())?;
            }
        }
        Ok(Network { _ends: ends })
    }

    /// The words before a program that runs it on a host. The process stays the same.
    pub fn words(&self, host: usize) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--net=/run/netns/{}", NAMESPACES[host])]
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
        std::thread::scope(|scope| {
            // A thread of its own: it does not come back.
            let done = scope.spawn(|| {
                let namespace =
                    File::open(Path::new("/run/netns").join(NAMESPACES[host])).context("open a namespace")?;
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), network).context("move into a namespace")?;
                act()
            });
            done.join().map_err(|_| anyhow!("a thread in a namespace has panicked"))?
        })
    }
}

/// What it says.
fn run(program: &str, words: &[&str]) -> Result<Vec<u8>> {
    let done = Command::new(program).args(words).output().with_context(|| format!("run {program} (iproute2)"))?;
    ensure!(done.status.success(), "{program} {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr));
    Ok(done.stdout)
}
