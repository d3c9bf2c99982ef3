//! Servers that lend memory, and exporters of disks in it, as processes on the loopback.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use pagoda_sys::toy::process::die_with_parent;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;

use crate::{DaemonOptions, Folios, MIB, programs, wait};

const SLAB_BYTES: u64 = 64 * MIB;
/// A slab and what keeping it takes.
const SLAB_KIB: u64 = 66_000;

/// A process that exports a disk. Killed when dropped, as a crash would.
#[derive(Debug)]
pub struct Exporter {
    child: Child,
    /// Where it listens for clients.
    pub socket: PathBuf,
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // It may be gone already; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A pool: its directory, and its servers.
#[derive(Debug)]
pub struct Pool {
    dir: PathBuf,
    servers: Mutex<Vec<Option<Child>>>,
    /// Where each listens, and its slabs.
    listeners: Vec<(String, u64)>,
}

impl Pool {
    /// Starts one server for each of `slabs`, with so many slabs of 64 MiB. They are of different zones.
    ///
    /// # Errors
    /// A server does not start.
    pub fn start(dir: &Path, slabs: &[u64]) -> Result<Pool> {
        Pool::start_in(dir, slabs, None)
    }

    /// The same; where there is a `cluster`, an address of etcd, that knows the servers, and no list does.
    ///
    /// # Errors
    /// A server does not start.
    pub fn start_in(dir: &Path, slabs: &[u64], cluster: Option<&str>) -> Result<Pool> {
        Pool::start_at(dir, slabs, cluster, "127.0.0.1")
    }

    /// The same; the servers listen at this address.
    ///
    /// # Errors
    /// A server does not start.
    pub fn start_at(dir: &Path, slabs: &[u64], cluster: Option<&str>, address: &str) -> Result<Pool> {
        let mut pool = Pool { dir: dir.to_owned(), servers: Mutex::default(), listeners: Vec::new() };
        let key = pool.json(&["pool", "key", "init"])?;
        let key = key["public_key"].as_str().context("the public key")?.to_owned();
        pool.run(&["pool", "key", "add", &key, "--name", "self"])?;
        if let Some(cluster) = cluster {
            fs::write(pool.dir.join("pool.toml"), format!("cluster = {cluster:?}\n")).context("write pool.toml")?;
        }
        let mut list = String::new();
        for (id, slabs) in (1..).zip(slabs) {
            let (server, line) = pool.serve(id, *slabs, &format!("{address}:0"))?;
            list += &format!("{line}\n");
            let addr = line.split_whitespace().nth(1).context("where it listens")?;
            pool.listeners.push((addr.to_owned(), *slabs));
            pool.lock().push(Some(server));
        }
        if cluster.is_none() {
            fs::write(pool.dir.join("servers"), list).context("write the list of servers")?;
        }
        Ok(pool)
    }

    /// For a daemon that borrows here.
    pub fn daemon_options(&self, folios: Folios) -> DaemonOptions {
        let mut options = DaemonOptions::new(folios);
        options.more = vec!["--pool-dir".into(), self.dir.to_string_lossy().into_owned()];
        options
    }

    fn serve(&self, id: u32, slabs: u64, listen: &str) -> Result<(Child, String)> {
        let (id, size) = (id.to_string(), format!("{}K", slabs * SLAB_KIB));
        let mut command = self.command(&["pool", "serve", "--listen", listen, "--spin", "0", "--json"])?;
        // What is tested does not depend on how busy the machine is that runs the tests.
        let calm = self.dir.join("calm");
        // Once: servers that run read it.
        if !calm.exists() {
            fs::create_dir(&calm).context("make a directory")?;
            fs::write(calm.join("meminfo"), "MemTotal: 2 kB\nMemAvailable: 2 kB\n").context("write meminfo")?;
        }
        command.args(["--also-borrow", "--pressure-from"]).arg(&calm);
        command.args(["--id", &id, "--zone", &id, "--size", &size]);
        let (child, ready) = start(command).context("start a server")?;
        Ok((child, ready["line"].as_str().context("its line for the list")?.to_owned()))
    }

    /// Makes a disk with two copies of everything.
    ///
    /// # Errors
    /// There is one of this name.
    pub fn create_disk(&self, name: &str, mib: u64) -> Result<()> {
        self.run(&["disk", "create", name, "--size", &format!("{mib}M"), "--copies", "2"]).map(drop)
    }

    /// Exports a disk at a socket in the pool's directory, with more options of the command.
    ///
    /// # Errors
    /// No server answers, or another process exports it.
    pub fn export(&self, disk: &str, more: &[&str]) -> Result<Exporter> {
        self.export_at(disk, &format!("{disk}.sock"), more)
    }

    fn export_at(&self, disk: &str, socket: &str, more: &[&str]) -> Result<Exporter> {
        let socket = self.dir.join(socket);
        let path = socket.to_str().context("the directory's name is not UTF-8")?;
        let command = self.command(&[&["disk", "export", disk, "--nbd", path, "--json"], more].concat())?;
        let (child, _) = start(command).context("start an exporter")?;
        Ok(Exporter { child, socket })
    }

    /// Seals a disk that nobody exports, and exports it read-only as often as there are names of sockets.
    ///
    /// # Errors
    /// Not all copies answer.
    pub fn share(&self, disk: &str, names: &[&str], more: &[&str]) -> Result<Vec<Exporter>> {
        self.run(&["disk", "share", disk, "--read-only"])?;
        names.iter().map(|name| self.export_at(disk, &format!("{name}.sock"), more)).collect()
    }

    /// Waits until everything on a disk has two copies, none of them at a server that was killed: that one counts as having its
    /// copies until somebody has noticed.
    ///
    /// # Errors
    /// That does not happen.
    pub fn wait_two_copies(&self, disk: &str) -> Result<()> {
        wait::until("two copies of everything", wait::HANG, || {
            let shown = self.json(&["disk", "show", disk])?;
            let servers = shown["servers"].as_array().context("a list of servers")?;
            let all_up = servers.iter().all(|server| server["state"] == "up");
            Ok((shown["short_bytes"] == 0 && all_up).then_some(()))
        })
    }

    /// Lets the machine with this public key use the servers.
    ///
    /// # Errors
    /// It is no key.
    pub fn admit(&self, public_key: &str) -> Result<()> {
        self.run(&["pool", "key", "add", public_key, "--name", "guest"]).map(drop)
    }

    /// What all machines of the pool know: the text of the file with its key.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn key(&self) -> Result<String> {
        fs::read_to_string(self.dir.join("pool.key")).context("read the pool's key")
    }

    /// The list of servers, a line each.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn list(&self) -> Result<String> {
        fs::read_to_string(self.dir.join("servers")).context("read the list of servers")
    }

    /// Ends a server as a crash would.
    ///
    /// # Errors
    /// It is gone already.
    pub fn kill9(&self, index: usize) -> Result<()> {
        let mut child = self.lock()[index].take().context("a server that runs")?;
        child.kill().context("kill a server")?;
        child.wait().context("wait for a server").map(drop)
    }

    /// Starts a server that was killed again, where it was: its memory is empty.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&self, index: usize) -> Result<()> {
        let (listen, slabs) = &self.listeners[index];
        let (server, _) = self.serve(index as u32 + 1, *slabs, listen)?;
        self.lock()[index] = Some(server);
        Ok(())
    }

    /// Takes the machine's own key away, without which nobody can borrow, or gives it back.
    ///
    /// # Errors
    /// It is not there.
    pub fn hide_key(&self, hidden: bool) -> Result<()> {
        let (key, aside) = (self.dir.join("node.key"), self.dir.join("node.key.aside"));
        let (from, to) = if hidden { (key, aside) } else { (aside, key) };
        fs::rename(from, to).context("move the key")
    }

    /// Stops a server, with all its threads when this returns, or lets it go on.
    ///
    /// # Errors
    /// It is gone.
    pub fn pause(&self, index: usize, on: bool) -> Result<()> {
        let servers = self.lock();
        let child = servers[index].as_ref().context("a server that runs")?;
        let pid = Pid::from_child(child);
        kill_process(pid, if on { Signal::STOP } else { Signal::CONT }).context("signal a server")?;
        if on {
            let state = waitpid(Some(pid), WaitOptions::UNTRACED).context("wait for a server to stop")?;
            ensure!(state.is_some_and(|(_, status)| status.stopped()), "server {index} has ended");
        }
        Ok(())
    }

    /// Slabs that the servers have left, all together.
    ///
    /// # Errors
    /// They do not answer.
    pub fn free_slabs(&self) -> Result<u64> {
        let rows = self.json(&["pool", "ls"])?;
        let rows = rows.as_array().context("a list of servers")?;
        let free = |row: &Value| row["free_bytes"].as_u64().with_context(|| format!("a server that answers: {row}"));
        Ok(rows.iter().map(free).sum::<Result<u64>>()? / SLAB_BYTES)
    }

    /// Waits until so many slabs are free: what VMs that have ended had is given back by then.
    ///
    /// # Errors
    /// That does not happen.
    pub fn wait_free_slabs(&self, slabs: u64) -> Result<()> {
        wait::until(&format!("{slabs} free slabs"), wait::HANG, || Ok((self.free_slabs()? == slabs).then_some(())))
    }

    fn json(&self, words: &[&str]) -> Result<Value> {
        serde_json::from_str(&self.run(&[words, &["--json"]].concat())?).context("understand pagoda")
    }

    fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.command(words)?.output().context("run pagoda")?;
        ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).context("understand pagoda")
    }

    fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = Command::new(programs::bin_dir()?.join("pagoda"));
        command.args(words).env("PAGODA_POOL_DIR", &self.dir).stdin(Stdio::null());
        Ok(command)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Option<Child>>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts a command that stays, and waits for the line that it is ready with.
fn start(mut command: Command) -> Result<(Child, Value)> {
    die_with_parent(&mut command);
    let mut child = command.stdout(Stdio::piped()).spawn().context("run pagoda")?;
    let mut ready = String::new();
    let said = BufReader::new(child.stdout.take().context("its output")?).read_line(&mut ready);
    match said.map_err(anyhow::Error::from).and_then(|_| Ok(serde_json::from_str(&ready)?)) {
        Ok(ready) => Ok((child, ready)),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error.context("wait until it is ready"))
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for child in self.lock().iter_mut().flatten() {
            // It may be gone already; either way it has to be reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
