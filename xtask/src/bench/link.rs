//! Two network namespaces and a link between them of a known speed, gone with this value.

use std::process::Command;

use anyhow::{Context, Result, bail};

use super::undo::{Guard, Undo};

/// Namespaces of the two ends.
pub const CLIENT: &str = "pagoda-bench-client";
pub const SERVER: &str = "pagoda-bench-server";
/// Address of the server's end.
pub const SERVER_ADDR: &str = "10.77.0.2";
/// The name of either end.
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

fn run(program: &str, words: &[&str]) -> Result<()> {
    let output = Command::new(program).args(words).output().with_context(|| format!("run {program} (iproute2)"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
