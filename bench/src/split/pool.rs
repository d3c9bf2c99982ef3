//! A pool behind the same switch as both hosts: etcd and one server.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_sys::toy::process::die_with_parent;
use testkit::pool::{Lend, Pool, Server};
use testkit::undo::{Guard, Undo, start_ticks_of};
use testkit::wait;

use crate::migrate::guest::Common;
use crate::migrate::network::{POOL_ADDRESS, POOL_NAMESPACE};

/// How hosts are called in etcd.
const NAMES: [&str; 2] = ["host1", "host2"];
const PORTS: [u16; 2] = [2379, 2380];
/// Between two looks whether it answers.
const LOOK: Duration = Duration::from_millis(50);

/// See the module. Gone with this value.
pub struct Lent {
    // Ends before etcd does.
    _server: Server,
    _pool: Pool,
    _etcd: Guard,
    dirs: [PathBuf; 2],
    _remove: Guard,
}

impl Lent {
    /// # Errors
    /// There is no etcd, or no memory.
    pub fn start(common: Common<'_>) -> Result<Lent> {
        let dir = common.setup.dir.canonicalize().context("find the directory of swap files")?.join("split-pool");
        let remove = Guard::new(Undo::Directory { path: dir.clone() })?;
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).context("make a directory")?;
        let etcd = etcd(&dir)?;
        let pool = Pool::new(&dir)?;
        let cluster = format!("cluster = \"etcd://{POOL_ADDRESS}:{}/bench\"\n", PORTS[0]);
        fs::write(pool.dir().join("pool.toml"), &cluster).context("write pool.toml")?;
        let size = format!("{}M", common.size.memory_mib * 2);
        let listen = format!("{POOL_ADDRESS}:0");
        let server = pool.serve(1, &Lend { size: &size, listen: &listen, inside: Some(POOL_NAMESPACE), more: &[] })?;
        let host_dir = |name: &str| {
            let own = dir.join(name);
            fs::create_dir(&own).context("make a directory")?;
            // Both have the same key, which the server knows.
            for file in ["node.key", "pool.key"].into_iter().filter(|file| pool.dir().join(file).exists()) {
                fs::copy(pool.dir().join(file), own.join(file)).context("copy a key")?;
            }
            fs::write(own.join("pool.toml"), format!("{cluster}host = {name:?}\n")).context("write pool.toml")?;
            Ok::<_, anyhow::Error>(own)
        };
        let dirs = [host_dir(NAMES[0])?, host_dir(NAMES[1])?];
        Ok(Lent { _server: server, _pool: pool, _etcd: etcd, dirs, _remove: remove })
    }

    /// What the configurations of the hosts' daemons have to say.
    pub fn settings(&self) -> [String; 2] {
        self.dirs.each_ref().map(|dir| format!("pool_dir = {dir:?}\n"))
    }
}

fn etcd(dir: &std::path::Path) -> Result<Guard> {
    let inside = |program: &str| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", POOL_NAMESPACE, program]);
        command
    };
    let [client, peer] = PORTS.map(|port| format!("http://{POOL_ADDRESS}:{port}"));
    let log = File::create(dir.join("etcd.log")).context("make a log")?;
    let mut command = inside("etcd");
    command.arg("--data-dir").arg(dir.join("etcd")).args(["--name", "m"]);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("m={peer}")]).stdout(Stdio::null()).stderr(log);
    die_with_parent(&mut command);
    let child = command.spawn().context("run etcd")?;
    let pid = child.id();
    let kill = Guard::new(Undo::Process { pid, start_ticks: start_ticks_of(pid).unwrap_or(0) })?;
    wait::until("etcd answers", wait::HANG, || {
        let mut ctl = inside("etcdctl");
        ctl.env("ETCDCTL_API", "3").args(["--endpoints", &client, "endpoint", "health"]);
        let done = ctl.stdout(Stdio::null()).stderr(Stdio::null()).status().context("run etcdctl")?;
        std::thread::sleep(LOOK);
        Ok(done.success().then_some(()))
    })?;
    ensure!(start_ticks_of(pid).is_some(), "etcd has ended");
    Ok(kill)
}
