//! `pagoda pool try`: servers, a disk and its export on one machine, by one command.

use std::fs::DirBuilder;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use pagoda_cli::options::Try;
use pagoda_cli::output::{Format, print_json_line, print_text};
use pagoda_cli::units::format_size;
use pagoda_pool::record;
use pagoda_pool::slab::SLAB_BYTES;
use pagoda_pool::store::{self, Admitted};
use rmap::units::SLAB_PAGES;
use serde::{Deserialize, Serialize};

use crate::cli::{Cli, Command as Subcommand, Disk};
use crate::export;

const DISK: &str = "try";
/// So that one of the servers may be ended.
const COPIES: usize = 2;
/// Characters of a random name.
const NAME_LEN: usize = 12;

/// What is there before the disk is exported.
#[derive(Debug, Serialize)]
struct Trial<'a> {
    dir: &'a Path,
    servers: Vec<&'a Server>,
    disk: &'static str,
    size_bytes: u64,
}

pub fn run(options: &Try, format: Format) -> Result<()> {
    let disk = record::Disk::new(options.size, COPIES)?;
    let pool_dir = TrialDir::make()?;
    let dir = pool_dir.0.as_path();
    store::make_keys(dir)?;
    let key = store::identity(dir)?.0.public();
    store::set_admitted(dir, &[Admitted { key, name: "self".into(), admin: true }])?;
    // Each server has room for all of the disk: any two may be the last.
    let lent = disk.pages().div_ceil(SLAB_PAGES as u64) * SLAB_BYTES;
    let servers = (1..=options.servers).map(|id| Server::start(dir, id, lent)).collect::<Result<Vec<_>>>()?;
    let list: String = servers.iter().map(|server| server.ready.line.clone() + "\n").collect();
    std::fs::write(store::servers_path(dir), list).context("write the list of servers")?;
    record::create(dir, DISK, &disk)?;
    let trial = Trial { dir, servers: servers.iter().collect(), disk: DISK, size_bytes: options.size };
    match format {
        Format::Json => print_json_line(&trial)?,
        Format::Text => print_text(&introduction(&trial))?,
    }
    let socket = options.nbd.clone().unwrap_or_else(|| dir.join("try.sock"));
    export(dir, &socket, format)
}

fn introduction(trial: &Trial<'_>) -> String {
    let size = format_size(trial.size_bytes);
    let dir = trial.dir.display();
    let mut text = "A pool of this machine alone. Ctrl-C ends it, and nothing of it is left then.\n".to_owned();
    for Server { id, pid, ready, .. } in &trial.servers {
        text += &format!("  server {id}  {}  process {pid}\n", ready.listen);
    }
    text += &format!("  disk {DISK}  {size}, each page at {COPIES} servers\n\n");
    text += &format!("In another terminal:\n  export PAGODA_POOL_DIR={dir}\n");
    for (words, what) in [
        ("pagoda pool top".to_owned(), "what the servers lend"),
        (format!("pagoda disk show {DISK}"), "which servers have how much of it"),
        (format!("kill {}", trial.servers[0].pid), "a server ends, and the disk goes on"),
    ] {
        text += &format!("  {words:<24} {what}\n");
    }
    text + "Any NBD client can use it: nbdinfo, nbdcopy, qemu-img, or QEMU with -drive file=ADDRESS,format=raw\n\n"
}

/// Returns after a signal.
fn export(dir: &Path, socket: &Path, format: Format) -> Result<()> {
    let words = [
        "pagoda-server".as_ref(),
        "disk".as_ref(),
        "export".as_ref(),
        DISK.as_ref(),
        "--dir".as_ref(),
        dir.as_os_str(),
    ];
    let words = words.into_iter().chain(["--nbd".as_ref(), socket.as_os_str()]);
    match Cli::try_parse_from(words)?.command {
        Subcommand::Disk(Disk::Export(options)) => export::run(&options, format),
        other => unreachable!("these are the words of `disk export`: {other:?}"),
    }
}

/// The pool's directory, which ends with the trial.
struct TrialDir(PathBuf);

impl TrialDir {
    fn make() -> Result<TrialDir> {
        let name = &store::hex(&store::random_key())[..NAME_LEN];
        let dir = std::env::temp_dir().join(format!("pagoda-try-{name}"));
        // It fails where somebody else has made one.
        DirBuilder::new().mode(0o700).create(&dir).with_context(|| format!("make {}", dir.display()))?;
        Ok(TrialDir(dir))
    }
}

impl Drop for TrialDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("pagoda: {} could not be removed: {error}", self.0.display());
        }
    }
}

/// A server, which ends with the trial however that ends: its standard input is closed then.
#[derive(Debug, Serialize)]
struct Server {
    id: u32,
    pid: u32,
    #[serde(flatten)]
    ready: Ready,
    #[serde(skip)]
    process: Child,
}

/// What `pool serve --json` says when it is ready; of that, what is needed here.
#[derive(Debug, Serialize, Deserialize)]
struct Ready {
    listen: String,
    /// For the file `servers`.
    #[serde(skip_serializing)]
    line: String,
}

impl Server {
    fn start(dir: &Path, id: u32, bytes: u64) -> Result<Server> {
        let size = format!("{}M", bytes.div_ceil(1 << 20));
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.args(["--json", "pool", "serve", "--listen", "127.0.0.1:0", "--also-borrow", "--while-stdin"]);
        command.args(["--drain", "0", "--id", &id.to_string(), "--zone", &id.to_string(), "--size", &size]);
        // In a process group of its own: Ctrl-C ends the export first.
        command.arg("--dir").arg(dir).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut process = command.spawn().context("start a server")?;
        let mut line = String::new();
        let said = process.stdout.take().context("the server's output")?;
        BufReader::new(said).read_line(&mut line).context("read what the server says")?;
        if line.is_empty() {
            process.wait().context("wait for the server")?;
        }
        ensure!(!line.is_empty(), "server {id} did not start, see above");
        let ready = serde_json::from_str(&line).with_context(|| format!("read what the server says: {line:?}"))?;
        Ok(Server { id, pid: process.id(), ready, process })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        if let Err(error) = self.process.wait() {
            eprintln!("pagoda: wait for server {}: {error}", self.id);
        }
    }
}
