//! Servers, disks and their exporters: the program itself, as processes on the loopback.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::LazyLock;

use rustix::process::Signal;
use serde_json::Value;

use crate::rig::send_signal;

/// A server's memory: three slabs of 64 MiB.
const SERVER_SIZE: &str = "200M";

/// A pool's directory, with servers.
pub struct Pool {
    pub dir: PathBuf,
    servers: Vec<Option<Running>>,
}

/// Something that runs in the foreground, with what it says.
pub struct Running {
    child: Child,
    said: BufReader<ChildStdout>,
    /// The line that it is ready with.
    pub ready: Value,
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a tool that must succeed. Its output.
pub fn tool(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}; scripts/install-deps.sh test installs it"));
    assert!(output.status.success(), "{program} {words:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// What those who run in the foreground say on standard error.
const SAID: &str = "said";

fn pagoda(dir: &Path, words: &[&str]) -> Command {
    pagoda_under(dir, &[], words)
}

/// The command, as its users run it. It finds the program of the servers beside itself.
pub fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let program = Path::new(env!("CARGO_BIN_EXE_pagoda-server")).with_file_name("pagoda");
        assert!(program.is_file(), "{} is missing: cargo build --profile ci --workspace --bins", program.display());
        program
    });
    &PROGRAM
}

/// As what some other program runs, which ends as that does.
fn pagoda_under(dir: &Path, runner: &[String], words: &[&str]) -> Command {
    let mut command = Command::new(runner.first().map_or(program(), Path::new));
    command.args(runner.iter().skip(1));
    if !runner.is_empty() {
        command.arg(program());
    }
    command.args(words).env("PAGODA_POOL_DIR", dir);
    command
}

impl Running {
    pub fn start(dir: &Path, words: &[&str]) -> Running {
        Running::begin(dir, pagoda(dir, words), words)
    }

    fn begin(dir: &Path, mut command: Command, words: &[&str]) -> Running {
        let stderr = OpenOptions::new().create(true).append(true).open(dir.join(SAID)).unwrap();
        let mut child = command.arg("--json").stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap_or_else(|_| {
            panic!("{words:?} is not ready: {line:?}{}", std::fs::read_to_string(dir.join(SAID)).unwrap())
        });
        Running { child, said, ready }
    }

    pub fn uri(&self) -> String {
        self.ready["uri"].as_str().unwrap().to_owned()
    }

    /// The file that the process which was started runs now.
    pub fn executable(&self) -> PathBuf {
        std::fs::read_link(format!("/proc/{}/exe", self.child.id())).unwrap()
    }

    /// What lists of processes show of it.
    pub fn words(&self) -> Vec<String> {
        let words = std::fs::read(format!("/proc/{}/cmdline", self.child.id())).unwrap();
        words.split(|byte| *byte == 0).map(text).filter(|word| !word.is_empty()).collect()
    }

    /// Of its memory, in KiB; proc_pid_status(5).
    pub fn locked_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Asks it to end; its status.
    pub fn stop(mut self) -> Option<i32> {
        send_signal(&self.child, Signal::TERM);
        self.wait()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Option<i32> {
        let mut rest = String::new();
        self.said.read_to_string(&mut rest).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Pool {
    /// A pool of so many servers, each in a zone of its own, and a list of them.
    pub fn start(name: &str, servers: u32) -> Pool {
        let pool = Pool::start_with(name, servers, "");
        pool.list_servers();
        pool
    }

    /// Writes the file `servers`: those that run.
    pub fn list_servers(&self) {
        let line = |server: &Running| server.ready["line"].as_str().unwrap().to_owned() + "\n";
        std::fs::write(self.dir.join("servers"), self.servers.iter().flatten().map(line).collect::<String>()).unwrap();
    }

    /// A pool of so many servers, with settings.
    pub fn start_with(name: &str, servers: u32, settings: &str) -> Pool {
        let dir = std::env::temp_dir().join(format!("pagoda-disk-{name}-{}", std::process::id()));
        let mut pool = Pool::machine(dir, settings);
        let key = pool.public_key();
        pool.run(&["pool", "key", "add", &key, "--name", "self"]);
        (0..servers).for_each(|_| pool.add_server());
        pool
    }

    fn machine(dir: PathBuf, settings: &str) -> Pool {
        let _ = std::fs::remove_dir_all(&dir);
        let pool = Pool { dir, servers: Vec::new() };
        pool.run(&["pool", "key", "init"]);
        std::fs::write(pool.file("pool.toml"), settings).unwrap();
        pool
    }

    /// Another machine with the same pool key and settings, which the servers admit.
    pub fn beside(&self, host: &str) -> Pool {
        let dir = PathBuf::from(format!("{}-{host}", self.dir.display()));
        let settings = std::fs::read_to_string(self.file("pool.toml")).unwrap().replace("host = \"a\"", "");
        let other = Pool::machine(dir, &format!("{settings}\nhost = \"{host}\"\n"));
        tool("cp", &["-p", &self.file("pool.key"), other.dir.to_str().unwrap()]);
        self.run(&["pool", "key", "add", &other.public_key(), "--name", host]);
        other
    }

    fn public_key(&self) -> String {
        self.json(&["pool", "key", "init"])["public_key"].as_str().unwrap().to_owned()
    }

    /// All run on this machine; what is said of their zones is that they fail apart.
    pub fn add_server(&mut self) {
        self.add_server_with(&[]);
    }

    pub fn add_server_with(&mut self, more: &[&str]) {
        let server = self.serve(self.servers.len(), more);
        self.servers.push(Some(server));
    }

    /// Starts a server again that is not there any more; it has another port then.
    pub fn restart_server(&mut self, index: usize, more: &[&str]) {
        self.servers[index] = Some(self.serve(index, more));
    }

    fn serve(&self, number: usize, more: &[&str]) -> Running {
        let id = (number + 1).to_string();
        let index = ["pool", "serve", "--size", SERVER_SIZE, "--listen", "127.0.0.1:0"];
        // With one worker, two, three, and so on: what clients see is the same.
        let workers = (number % 3 + 1).to_string();
        let words = [&index[..], &["--id", &id, "--zone", &id, "--spin", "0", "--workers", &workers], more].concat();
        self.set_available(number, 100);
        let host = self.host(number);
        Running::start(&self.dir, &[&words[..], &["--also-borrow", "--pressure-from", &host]].concat())
    }

    /// One that lends room of a disk.
    pub fn add_disk_server(&mut self) {
        let id = (self.servers.len() + 1).to_string();
        let index = ["pool", "serve", "--size", SERVER_SIZE, "--listen", "127.0.0.1:0", "--spin", "0"];
        // The temporary directory may be in memory.
        let words = [&index[..], &["--id", &id, "--on-disk", env!("CARGO_TARGET_TMPDIR")]].concat();
        self.servers.push(Some(Running::start(&self.dir, &words)));
    }

    /// The process of a server.
    pub fn server(&self, index: usize) -> &Running {
        self.servers[index].as_ref().unwrap()
    }

    /// What a server said when it was ready.
    pub fn ready(&self, index: usize) -> &Value {
        &self.servers[index].as_ref().unwrap().ready
    }

    /// Where a server reads how much memory its host has.
    fn host(&self, index: usize) -> String {
        self.file(&format!("host{index}"))
    }

    /// What a server's host has available from now on, in percent.
    pub fn set_available(&self, index: usize, percent: u32) {
        let dir = self.host(index);
        std::fs::create_dir_all(&dir).unwrap();
        let meminfo = format!("MemTotal: 100 kB\nMemAvailable: {percent} kB\n");
        std::fs::write(format!("{dir}/new"), meminfo).unwrap();
        std::fs::rename(format!("{dir}/new"), format!("{dir}/meminfo")).unwrap();
    }

    /// Whether somebody who runs in the foreground has said so.
    pub fn has_said(&self, what: &str) -> bool {
        self.times_said(what) > 0
    }

    /// How often somebody who runs in the foreground has said so.
    pub fn times_said(&self, what: &str) -> usize {
        std::fs::read_to_string(self.file(SAID)).unwrap().matches(what).count()
    }

    /// Ends a server as a crash would.
    pub fn kill_server(&mut self, index: usize) {
        drop(self.servers[index].take());
    }

    /// Has a server hear and say nothing, or go on.
    pub fn pause_server(&self, index: usize, on: bool) {
        let server = self.servers[index].as_ref().unwrap();
        send_signal(&server.child, if on { Signal::STOP } else { Signal::CONT });
    }

    /// Asks a server to end, as systemd does.
    pub fn terminate_server(&self, index: usize) {
        send_signal(&self.servers[index].as_ref().unwrap().child, Signal::TERM);
    }

    /// Waits for the end of a server; its status.
    pub fn wait_server(&mut self, index: usize) -> Option<i32> {
        self.servers[index].take().unwrap().wait()
    }

    /// Whether all copies of a disk are there again, and none at this server. A server that was just killed counts as having its
    /// copies until somebody has noticed.
    pub fn is_whole_without(&self, disk: &str, index: usize) -> bool {
        let shown = self.json(&["disk", "show", disk]);
        let servers = shown["servers"].as_array().unwrap();
        shown["short_bytes"] == 0 && servers.iter().all(|server| server["id"] != index + 1)
    }

    pub fn output(&self, words: &[&str]) -> Output {
        pagoda(&self.dir, words).output().unwrap()
    }

    /// Runs a command that must succeed. Its output.
    pub fn run(&self, words: &[&str]) -> String {
        let output = self.output(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.run(&[words, &["--json"]].concat())).unwrap()
    }

    /// Runs a command that must fail with `status`, and say `what`.
    pub fn fails(&self, words: &[&str], status: i32, what: &str) {
        let output = self.output(words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {said}");
        assert!(said.contains(what), "{words:?} says {said:?}, not {what:?}");
    }

    pub fn socket(&self, name: &str) -> String {
        self.dir.join(format!("{name}.sock")).to_str().unwrap().to_owned()
    }

    pub fn export(&self, name: &str, more: &[&str]) -> Running {
        self.export_at(name, &self.socket(name), more)
    }

    pub fn export_at(&self, name: &str, socket: &str, more: &[&str]) -> Running {
        // A busy machine pauses processes: what is tested is that nothing gets lost, not how fast a death is noticed.
        let words = ["disk", "export", name, "--nbd", socket, "--spin", "0", "--fail-after", "3000"];
        Running::start(&self.dir, &[&words, more].concat())
    }

    /// Something else that runs in the foreground.
    pub fn start_in_front(&self, words: &[&str]) -> Running {
        Running::start(&self.dir, words)
    }

    /// The same, run by another program that becomes it.
    pub fn start_under(&self, runner: &[String], words: &[&str]) -> Running {
        Running::begin(&self.dir, self.command_under(runner, words), words)
    }

    pub fn command_under(&self, runner: &[String], words: &[&str]) -> Command {
        pagoda_under(&self.dir, runner, words)
    }

    pub fn file(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.servers.clear();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
