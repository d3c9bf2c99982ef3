//! What is between the two hosts: two network namespaces and a link, which can be cut in each direction and slowed down.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::hosts::text;

/// Of the namespaces' names; the number of the test's process follows.
const PREFIX: &str = "pagoda-m";
/// The link's name at either end.
const DEVICE: &str = "v0";
/// Frames to this Ethernet address go into the link, and nobody takes them.
const NOBODY: &str = "02:00:00:00:00:99";

/// See the module. The kernel takes down what is in a namespace when the last of its processes has ended.
pub struct Network {
    pub namespaces: [String; 2],
}

/// Directions in which the link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Both,
    /// What this host sends does not arrive.
    From(usize),
}

impl Way {
    fn senders(self) -> Vec<usize> {
        match self {
            Way::Both => vec![0, 1],
            Way::From(index) => vec![index],
        }
    }
}

impl Network {
    pub fn new(namespaces: [String; 2]) -> Result<Network> {
        remove_left()?;
        let network = Network { namespaces };
        network.make()?;
        Ok(network)
    }

    fn make(&self) -> Result<()> {
        let [one, other] = &self.namespaces;
        for namespace in [one, other] {
            ip(&["netns", "add", namespace])?;
        }
        let there = ["type", "veth", "peer", "name", DEVICE, "address", ethernet(1), "netns", other];
        ip(&[&["link", "add", DEVICE, "address", ethernet(0), "netns", one], &there[..]].concat())?;
        for (index, namespace) in self.namespaces.iter().enumerate() {
            ip(&["-n", namespace, "addr", "add", &format!("{}/24", internet(index)), "dev", DEVICE])?;
            ip(&["-n", namespace, "link", "set", DEVICE, "up"])?;
            ip(&["-n", namespace, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// What is sent from now on does not arrive, and no sender hears of it.
    pub fn cut(&self, way: Way) -> Result<()> {
        way.senders().into_iter().try_for_each(|sender| self.send_to(sender, NOBODY))
    }

    pub fn heal(&self, way: Way) -> Result<()> {
        way.senders().into_iter().try_for_each(|sender| self.send_to(sender, ethernet(1 - sender)))
    }

    fn send_to(&self, sender: usize, ethernet: &str) -> Result<()> {
        let neighbor = ["neigh", "replace", internet(1 - sender), "lladdr", ethernet, "nud", "permanent"];
        ip(&[&["-n", &self.namespaces[sender]], &neighbor[..], &["dev", DEVICE]].concat())
    }

    /// The second namespace has one more address, for a third host.
    pub fn add_third(&self) -> Result<()> {
        ip(&["-n", &self.namespaces[1], "addr", "add", &format!("{}/24", internet(2)), "dev", DEVICE])
    }

    /// The link carries so much in either direction, as tc(8) understands it.
    pub fn slow(&self, rate: &str) -> Result<()> {
        let shape = ["qdisc", "replace", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", "64k", "latency", "50ms"];
        self.namespaces.iter().try_for_each(|namespace| run("tc", &[&["-n", namespace], &shape[..]].concat()))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            let _ = ip(&["netns", "del", namespace]);
        }
    }
}

/// A name of a namespace: no two tests have the same, and whose it is can be told.
pub fn name(of_test: &str) -> String {
    format!("{PREFIX}{}-{of_test}", std::process::id())
}

/// What tests have left that were killed. Their links would take what is sent to the same addresses here.
fn remove_left() -> Result<()> {
    let list = Command::new("ip").args(["netns", "list"]).output().context("run ip (iproute2)")?;
    for namespace in text(&list.stdout).lines().filter_map(|line| line.split_whitespace().next()) {
        let owner = namespace.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        if owner.is_some_and(|(pid, _)| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists()) {
            // Another test may have done it.
            let _ = ip(&["netns", "del", namespace]);
        }
    }
    Ok(())
}

fn ip(words: &[&str]) -> Result<()> {
    run("ip", words)
}

fn run(program: &str, words: &[&str]) -> Result<()> {
    let done = Command::new(program).args(words).output().with_context(|| format!("run {program} (iproute2)"))?;
    ensure!(done.status.success(), "{program} {}: {}", words.join(" "), text(&done.stderr));
    Ok(())
}

/// Each pair of hosts has its own network, so all have the same addresses.
pub fn address(index: usize) -> String {
    format!("{}:7075", internet(index))
}

const fn internet(index: usize) -> &'static str {
    ["10.78.0.1", "10.78.0.2", "10.78.0.3"][index]
}

const fn ethernet(index: usize) -> &'static str {
    ["02:00:00:00:00:01", "02:00:00:00:00:02"][index]
}
