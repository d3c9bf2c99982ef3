//! An etcd that both hosts reach, also while they do not reach each other.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use vm_tests::wait;

use super::hosts::{Hosts, text};

/// Where the pool and its etcd are, for this machine and both hosts.
pub const POOL: &str = "10.79.255.1";

/// The pools of all these tests have the same address on this machine.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A link from each host to where the pool is. The kernel takes it down with the host's namespace.
pub fn connect(hosts: &Hosts) -> Result<()> {
    for (index, namespace) in hosts.network.namespaces.iter().enumerate() {
        let (here, there) = (format!("10.79.{index}.1"), format!("10.79.{index}.2"));
        let name = format!("pgm{}{index}", std::process::id() % 100_000);
        let words = |words: &str| words.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        // That of the test before goes with its namespace, some time after it.
        let _ = ip(&words(&format!("link del {name}")));
        ip(&words(&format!("link add {name} type veth peer name p0 netns {namespace}")))?;
        ip(&words(&format!("addr add {here}/24 dev {name}")))?;
        if index == 0 {
            ip(&words(&format!("addr add {POOL}/32 dev {name}")))?;
        }
        ip(&words(&format!("link set {name} up")))?;
        ip(&words(&format!("-n {namespace} addr add {there}/24 dev p0")))?;
        ip(&words(&format!("-n {namespace} link set p0 up")))?;
        ip(&words(&format!("-n {namespace} route add {POOL}/32 via {here}")))?;
    }
    Ok(())
}

fn ip(words: &[String]) -> Result<()> {
    let done = Command::new("ip").args(words).output().context("run ip (iproute2)")?;
    ensure!(done.status.success(), "ip {}: {}", words.join(" "), text(&done.stderr));
    Ok(())
}

/// An etcd that both hosts reach. Killed when dropped.
pub struct Etcd {
    child: Child,
    port: u16,
}

impl Etcd {
    pub fn start(dir: &Path) -> Result<Etcd> {
        let free = || Ok::<u16, anyhow::Error>(TcpListener::bind((POOL, 0))?.local_addr()?.port());
        let (port, peer) = (free()?, free()?);
        let (client, peer) = (format!("http://{POOL}:{port}"), format!("http://{POOL}:{peer}"));
        let log = File::create(dir.join("etcd.log")).context("make a log")?;
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(dir.join("etcd")).args(["--name", "m"]);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("m={peer}")]).stdout(Stdio::null()).stderr(log);
        let etcd = Etcd { child: command.spawn().context("run etcd")?, port };
        let healthy = ["endpoint", "health"];
        wait::until("etcd answers", wait::HANG, || Ok(etcd.ctl(&healthy).ok()))?;
        Ok(etcd)
    }

    pub fn address(&self) -> String {
        format!("etcd://{POOL}:{}/lab", self.port)
    }

    fn ctl(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &format!("http://{POOL}:{}", self.port)]).args(words);
        let done = command.output().context("run etcdctl")?;
        ensure!(done.status.success(), "{}", text(&done.stderr));
        Ok(text(&done.stdout))
    }

    /// Its keys of the pool that begin so.
    pub fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let keys = self.ctl(&["get", "--prefix", "--keys-only", &format!("/rmap/1/lab/{prefix}")])?;
        Ok(keys.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal).context("signal etcd")
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
