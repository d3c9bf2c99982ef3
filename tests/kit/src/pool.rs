//! Servers that lend memory, disks and their exporters: the programs themselves, as processes of this machine, in
//! network namespaces where a bench says so. They end with the bench, however it ends.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use pagoda_sys::toy::process::die_with_parent;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use crate::link::{ETHERNET_LISTEN, ETHERNET_SERVER};
use crate::undo::{Guard, Undo, start_ticks_of};
use crate::workspace::repository;

/// A pool's directory: keys, the list of servers, the registry, disks.
#[derive(Debug)]
pub struct Pool {
    dir: PathBuf,
    _remove: Guard,
}

/// A program that runs until it is told to end.
#[derive(Debug)]
pub struct Running {
    child: Child,
    said: BufReader<ChildStdout>,
    _kill: Guard,
}

/// A process that lends memory.
#[derive(Debug)]
pub struct Server {
    pub process: Running,
    pub addr: SocketAddr,
    id: u32,
    key: String,
}

/// A process that exports a disk.
#[derive(Debug)]
pub struct Exporter {
    pub process: Running,
    pub socket: PathBuf,
    /// As libnbd and fio want it.
    pub uri: String,
}

/// What a server lends, and how it is started.
#[derive(Debug, Clone, Copy)]
pub struct Lend<'a> {
    /// Such as `1G`; 64 MiB of pages take 64.4 MiB.
    pub size: &'a str,
    pub listen: &'a str,
    /// The network namespace, unless it is this one.
    pub inside: Option<&'a str>,
    pub more: &'a [&'a str],
}

impl Lend<'_> {
    /// So much, at the other end of an [`Ethernet`](crate::link::Ethernet).
    pub fn over_ethernet(size: &str) -> Lend<'_> {
        Lend { size, listen: ETHERNET_LISTEN, inside: Some(ETHERNET_SERVER), more: &[] }
    }

    /// So much, on the loopback.
    pub fn on_loopback(size: &str) -> Lend<'_> {
        Lend { size, listen: "127.0.0.1:0", inside: None, more: &[] }
    }
}

impl Pool {
    /// A pool of this machine's own key.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn new(dir: &Path) -> Result<Pool> {
        let dir = dir.join("pool");
        let remove = Guard::new(Undo::Directory { path: dir.clone() })?;
        let _ = fs::remove_dir_all(&dir);
        let pool = Pool { dir, _remove: remove };
        let own = pool.run(&["pool", "key", "init"])?;
        pool.run(&["pool", "key", "add", text(&own, "public_key")?])?;
        Ok(pool)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts a server and waits until it serves.
    ///
    /// # Errors
    /// It cannot have the memory or the address.
    pub fn serve(&self, id: u32, lend: &Lend<'_>) -> Result<Server> {
        let number = id.to_string();
        let calm = self.calm_host()?;
        let words = ["pool", "serve", "--size", lend.size, "--listen", lend.listen, "--id", &number, "--also-borrow"];
        let host = ["--pressure-from", &calm];
        let (process, ready) = self.start(lend.inside, &[&words, &host[..], lend.more].concat())?;
        let addr = text(&ready, "listen")?.parse().context("where it listens")?;
        Ok(Server { process, addr, id, key: text(&ready, "public_key")?.to_owned() })
    }

    /// What servers take for their host's state: they stand for other machines, whose memory does not get short because this one
    /// borrows.
    fn calm_host(&self) -> Result<String> {
        let dir = self.dir.join("calm");
        fs::create_dir_all(&dir).context("make a directory")?;
        // Once: servers that run read it.
        if !dir.join("meminfo").exists() {
            fs::write(dir.join("meminfo"), "MemTotal: 100 kB\nMemAvailable: 100 kB\n").context("write meminfo")?;
        }
        Ok(dir.to_str().context("the directory's name is not UTF-8")?.to_owned())
    }

    /// Servers of the same size, one for each number from 1 on, all of them listed.
    ///
    /// # Errors
    /// As [`Pool::serve`].
    pub fn serve_listed(&self, count: u32, lend: &Lend<'_>) -> Result<Vec<Server>> {
        let servers = (1..=count).map(|id| self.serve(id, lend)).collect::<Result<Vec<_>>>()?;
        self.list(servers.iter().map(|server| (server, server.addr)))?;
        Ok(servers)
    }

    /// Writes the list of servers, each with the address where clients find it and in a zone of its own.
    ///
    /// # Errors
    /// The list cannot be written.
    pub fn list<'a>(&self, servers: impl Iterator<Item = (&'a Server, SocketAddr)>) -> Result<()> {
        let line = |(server, addr): (&Server, SocketAddr)| server.line(addr) + "\n";
        fs::write(self.dir.join("servers"), servers.map(line).collect::<String>()).context("write the list of servers")
    }

    /// Lets the machine with this public key use the servers; they take it up within a second.
    ///
    /// # Errors
    /// It is no key.
    pub fn admit(&self, public_key: &str) -> Result<()> {
        self.run(&["pool", "key", "add", public_key]).map(drop)
    }

    /// Makes a disk of `bytes` in the pool.
    ///
    /// # Errors
    /// It exists.
    pub fn create(&self, name: &str, bytes: u64, copies: usize) -> Result<()> {
        let (size, copies) = (format!("{bytes}B"), copies.to_string());
        self.run(&["disk", "create", name, "--size", &size, "--copies", &copies])?;
        Ok(())
    }

    /// Exports a disk at a socket of this name in the pool's directory.
    ///
    /// # Errors
    /// No server answers, or another process exports it.
    pub fn export(&self, disk: &str, socket: &str, inside: Option<&str>, more: &[&str]) -> Result<Exporter> {
        let socket = self.dir.join(socket);
        let path = socket.to_str().context("the directory's name is not UTF-8")?;
        let (process, ready) = self.start(inside, &[&["disk", "export", disk, "--nbd", path], more].concat())?;
        Ok(Exporter { process, uri: text(&ready, "uri")?.to_owned(), socket })
    }

    /// What `pagoda disk ls` says in a field in bytes: what the map says, without a word to the servers.
    ///
    /// # Errors
    /// There is no such disk, or no such field.
    pub fn disk_bytes(&self, disk: &str, field: &str) -> Result<u64> {
        self.disk(disk)?[field].as_u64().with_context(|| format!("disk ls says no {field}"))
    }

    /// What servers have of a disk, each copy counted.
    ///
    /// # Errors
    /// There is no such disk.
    pub fn held_bytes(&self, disk: &str) -> Result<u64> {
        let shown = self.disk(disk)?;
        let servers = shown["servers"].as_array().context("disk ls says no servers")?;
        Ok(servers.iter().filter_map(|server| server["bytes"].as_u64()).sum())
    }

    fn disk(&self, disk: &str) -> Result<Value> {
        let mut listed = self.run(&["disk", "ls"])?;
        let listed = listed.as_array_mut().context("disk ls lists nothing")?;
        let mut named = listed.iter_mut().filter(|listed| listed["name"] == disk);
        named.next().map(Value::take).with_context(|| format!("disk ls does not list {disk}"))
    }

    /// Runs a command to its end; what it says as JSON, null if nothing.
    fn run(&self, words: &[&str]) -> Result<Value> {
        let output = self.command(None, words).output().context("run pagoda")?;
        if !output.status.success() {
            bail!("{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        if output.stdout.is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_slice(&output.stdout)?) }
    }

    /// Starts a command that stays, and waits for the line that it is ready with.
    fn start(&self, inside: Option<&str>, words: &[&str]) -> Result<(Running, Value)> {
        let mut command = self.command(inside, words);
        die_with_parent(&mut command);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("run pagoda")?;
        let pid = child.id();
        let kill = Guard::new(Undo::Process { pid, start_ticks: start_ticks_of(pid).unwrap_or(0) })?;
        let said = BufReader::new(child.stdout.take().context("its output")?);
        let mut running = Running { child, said, _kill: kill };
        let mut line = String::new();
        running.said.read_line(&mut line).context("read what it says")?;
        Ok((running, serde_json::from_str(&line).with_context(|| format!("{words:?} is not ready"))?))
    }

    fn command(&self, inside: Option<&str>, words: &[&str]) -> Command {
        let program = repository().join("target/release/pagoda");
        let mut command = match inside {
            None => Command::new(program),
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
        };
        command.args(words).arg("--json").arg("--dir").arg(&self.dir);
        command
    }
}

impl Server {
    /// Its line in the list of servers of a client that finds it at this address.
    pub fn line(&self, addr: SocketAddr) -> String {
        format!("{} {addr} {} {0}", self.id, self.key)
    }
}

/// A CPU for servers, which stand for other machines, and the others for who uses them.
#[derive(Debug)]
pub struct Apart {
    allowed: CpuSet,
    servers: CpuSet,
    others: CpuSet,
}

impl Apart {
    /// The last CPU that this process may use; all others.
    ///
    /// # Errors
    /// There is one only.
    pub fn new() -> Result<Apart> {
        let allowed = sched_getaffinity(None).context("read the CPUs")?;
        let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| allowed.is_set(*cpu)).context("no CPU")?;
        let (mut servers, mut others) = (CpuSet::new(), allowed);
        servers.set(last);
        others.unset(last);
        if others.count() == 0 {
            bail!("a server cannot have a CPU of its own: there is one only");
        }
        Ok(Apart { allowed, servers, others })
    }

    /// Keeps the threads of a server on the server's CPU.
    ///
    /// # Errors
    /// It is gone.
    pub fn server(&self, process: u32) -> Result<()> {
        keep_on(process, &self.servers)
    }

    /// Somebody who uses one.
    ///
    /// # Errors
    /// It is gone.
    pub fn user(&self, process: u32) -> Result<()> {
        keep_on(process, &self.others)
    }

    /// Runs what uses a server: programs that it starts are where users are.
    ///
    /// # Errors
    /// Those of `run`.
    pub fn as_user<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        sched_setaffinity(None, &self.others).context("leave a CPU to the server")?;
        let ran = run();
        sched_setaffinity(None, &self.allowed).context("take the CPU back")?;
        ran
    }
}

fn keep_on(process: u32, cpus: &CpuSet) -> Result<()> {
    for thread in fs::read_dir(format!("/proc/{process}/task")).context("list its threads")? {
        let name = thread.context("list its threads")?.file_name();
        let number = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        sched_setaffinity(Some(number.context("the number of a thread")?), cpus).context("keep a thread on a CPU")?;
    }
    Ok(())
}

impl Running {
    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("its number")?;
        kill_process(pid, signal).context("send a signal")
    }

    /// Waits until it has ended; its status.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn wait(&mut self) -> Result<Option<i32>> {
        self.said.read_to_end(&mut Vec::new()).context("read what it says")?;
        Ok(self.child.wait().context("wait for it")?.code())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text<'a>(value: &'a Value, name: &str) -> Result<&'a str> {
    value[name].as_str().with_context(|| format!("{name} is not there"))
}
