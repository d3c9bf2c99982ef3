//! The peer: QEMU alone, which migrates by itself between the same hosts, by pre-copy and without encryption. No limit of bandwidth is
//! set, and the downtime that it may take is ours. It has the settings with which it is fastest here ([`Way`]).
//!
//! A destination, and then the source of the next migration, may be in a memory cgroup with the kernel's swap: half of the guest's memory,
//! and what this QEMU needs for itself, as it was measured.
//!
//! QEMU 7.2 under TCG loses pages that the guest writes while they are sent: the guest's kernel then finds its lists broken, in 3 of 7
//! migrations of a writing guest into a cgroup, where they last longest; with QEMU 10 in 0 of 10 (2026-11-29). The cause was not
//! confirmed. So a leg of the peer is tried several times, and its row says how often it failed.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pagoda_api::MOVE_DOWNTIME_MS_DEFAULT;
use pagoda_sys::toy::process;
use serde_json::json;
use testkit::peers::cgroup::MemoryCgroup;
use testkit::qmp::Qmp;
use testkit::undo::{Guard, Undo, start_ticks_of};
use testkit::wait;

use super::content::{Content, Memory};
use super::guest::{Common, Control, Moved, VM, boot, forget_stops, monitor_of, when};
use super::leg::Side;
use super::network::ADDRESSES;
use crate::balloon::guest::{Port, Shape, machine_words, socket_of};
use crate::restore::epoch_us;

/// Each destination has the next one.
const PORT: u16 = 4450;
/// Bytes a second: more than any link here. QEMU's own default is 128 MiB/s.
const BANDWIDTH: u64 = 100 << 30;
/// A cgroup counts also what the kernel has for a process: page tables, sockets.
const KERNEL_BYTES: u64 = 8 << 20;
/// One for each CPU of the machines that this was written on. QEMU's own default is 2, too.
const CHANNELS: u32 = 2;
/// Joins a cgroup before there is any memory; `exec` keeps the process.
const JOIN: &str = r#"echo $$ > "$0" && exec "$@""#;
/// Nothing is measured before what the guest has done has come to rest.
const QUIET: Duration = Duration::from_secs(2);
/// From a command until a post-copy begins.
pub const LEAD: Duration = Duration::from_millis(300);
/// What a guest's kernel says when it finds itself broken.
const LOOK: Duration = Duration::from_millis(200);
const BROKEN: [&str; 4] = ["kernel BUG", "BUG:", "corruption", "Kernel panic"];

/// How QEMU sends memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Plain,
    Multifd,
    Zstd,
    /// As [`Way::Plain`], but the VM runs at the destination at once: with multifd neither version has that.
    Postcopy,
}

impl Way {
    /// Those of a pre-copy.
    pub const ALL: [Way; 3] = [Self::Plain, Self::Multifd, Self::Zstd];

    pub fn text(self) -> &'static str {
        match self {
            Self::Plain => "one connection",
            Self::Multifd => "multifd",
            Self::Zstd => "multifd with zstd",
            Self::Postcopy => "post-copy",
        }
    }

    /// On both sides, before anything is sent.
    fn set(self, monitor: &mut Qmp) -> Result<()> {
        let capabilities = json!([
            { "capability": "multifd", "state": matches!(self, Self::Multifd | Self::Zstd) },
            { "capability": "postcopy-ram", "state": self == Self::Postcopy },
        ]);
        monitor.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        let compression = if self == Self::Zstd { "zstd" } else { "none" };
        let settings = json!({ "multifd-channels": CHANNELS, "multifd-compression": compression,
            "max-bandwidth": BANDWIDTH, "downtime-limit": MOVE_DOWNTIME_MS_DEFAULT });
        monitor.execute("migrate-set-parameters", settings).map(drop)
    }
}

/// The VM, wherever it is.
pub struct Peer<'a> {
    common: Common<'a>,
    pub way: Way,
    /// Words of the machine.
    words: Vec<String>,
    dir: PathBuf,
    control: Control,
    monitor: Qmp,
    said: Vec<String>,
    at: usize,
    migrations: u16,
    /// Memory of QEMU itself, in bytes, beside the guest's RAM.
    own_bytes: u64,
    /// Its process, once it has migrated.
    came: Option<Incoming>,
    _dir: Guard,
}

impl<'a> Peer<'a> {
    /// Boots it on the first host, with all its memory in DRAM.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot(common: Common<'a>, way: Way) -> Result<Peer<'a>> {
        let Common { setup, network, start, qemu, size } = common;
        let dir = setup.dir.join(format!("migrate-qemu-{}", std::process::id()));
        let remove = Guard::new(Undo::Directory { path: dir.clone() })?;
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let command = [network.words(0), vec![qemu.display().to_string()]].concat();
        let (control, monitor) = boot(&command, &dir, common)?;
        let append = size.append();
        let shape = Shape { name: VM, memory_mib: size.memory_mib, append: &append, ..Shape::default() };
        let words = machine_words(&shape, start);
        let mut peer = Peer {
            common,
            way,
            words,
            dir,
            control,
            monitor,
            said: Vec::new(),
            at: 0,
            migrations: 0,
            own_bytes: 0,
            came: None,
            _dir: remove,
        };
        peer.own_bytes = Memory::of(peer.pid()?)?.own_bytes;
        Ok(peer)
    }

    fn pid(&self) -> Result<u32> {
        match (&self.came, &self.control) {
            (Some(came), _) => Ok(came.child.id()),
            (None, Control::Booted(guest)) => Ok(guest.pid()),
            (None, Control::Moved(_)) => bail!("no QEMU"),
        }
    }

    /// What its memory holds, and QEMU's own bytes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn content(&self) -> Result<(Content, u64)> {
        let pid = self.pid()?;
        Ok((Memory::of(pid)?.content(pid)?, self.own_bytes))
    }

    /// Migrates to the other host, into a cgroup of so much and QEMU's own memory if that is said. The rest as of our side.
    fn migrate(&mut self, limit_mib: Option<u64>, write: Option<&str>) -> Result<Moved> {
        std::thread::sleep(QUIET);
        self.migrations += 1;
        let mut came = Incoming::start(self, limit_mib)?;
        let (mut monitor, mut port) = came.wait_for(&self.uri(), self.way)?;
        forget_stops(&mut self.monitor).with_context(|| self.console())?;
        self.way.set(&mut self.monitor).context("the QEMU that has the VM")?;
        let on_link = self.common.network.sent_bytes(self.at)?;
        let began_us = epoch_us()?;
        self.monitor.execute("migrate", json!({ "uri": self.uri() })).with_context(|| self.console())?;
        if let Some(write) = write {
            self.control.begin(write)?;
        }
        if self.way == Way::Postcopy {
            // What QEMU has of the command in its serial port does not go over.
            std::thread::sleep(LEAD);
            self.monitor.execute("migrate-start-postcopy", json!({})).context("begin the post-copy")?;
        }
        let resumed_us = when(&mut monitor, "RESUME")?;
        let stopped_us = when(&mut self.monitor, "STOP")?;
        let sent_bytes = sent(&mut self.monitor).context("the source")?;
        let whole_ms = (epoch_us()? - began_us) / 1e3;
        let link_bytes = self.common.network.sent_bytes(self.at)? - on_link;
        // It may be gone before it has answered.
        let _ = self.monitor.execute("quit", json!({}));
        let ended = write.map(|write| self.control.end_at(&mut port, write)).transpose();
        (self.control, self.monitor, self.at) = (Control::Moved(port), monitor, 1 - self.at);
        self.came = Some(came);
        self.said = ended.with_context(|| self.console())?.unwrap_or_default();
        let ms = (resumed_us - began_us) / 1e3;
        let downtime_ms = (resumed_us - stopped_us) / 1e3;
        Ok(Moved { ms, copied_ms: ms, whole_ms, resumed_us, downtime_ms, link_bytes, sent_bytes, ..Moved::default() })
    }

    /// What the guest's kernel has said of itself where it is now.
    fn console(&self) -> String {
        let console = self.came.as_ref().map(|came| fs::read_to_string(came.dir.join(CONSOLE)).unwrap_or_default());
        let console = console.unwrap_or_default();
        broken(&console).map_or("the peer".to_owned(), |line| format!("the peer's guest is broken: {line}"))
    }

    /// Where the other host waits for it.
    fn uri(&self) -> String {
        format!("tcp:{}:{}", ADDRESSES[1 - self.at], PORT + self.migrations)
    }
}

impl Side for Peer<'_> {
    const NAME: &'static str = "QEMU's own";

    fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    fn said(&self) -> &[String] {
        &self.said
    }

    fn is_half(&self) -> bool {
        self.came.as_ref().is_some_and(|came| came.cgroup.is_some())
    }

    fn only_move(&mut self, half: bool, write: Option<&str>) -> Result<Moved> {
        let half = half.then(|| self.common.size.half_mib());
        self.migrate(half, write)
    }

    fn postcopy(&mut self, command: &str) -> Result<Moved> {
        let way = std::mem::replace(&mut self.way, Way::Postcopy);
        let moved = self.migrate(None, Some(command));
        self.way = way;
        moved
    }

    fn state(&self) -> String {
        self.console()
    }
}

/// In the directory of a QEMU that waits.
const CONSOLE: &str = "console";

/// Bytes of memory that a migration has sent, once QEMU knows that it is complete.
fn sent(monitor: &mut Qmp) -> Result<u64> {
    wait::until("the migration is complete", wait::HANG, || {
        let answer = monitor.execute("query-migrate", json!({}))?;
        match answer["status"].as_str() {
            Some("completed") => answer["ram"]["transferred"].as_u64().context("what was sent").map(Some),
            Some("failed" | "cancelled") => bail!("it does not migrate: {answer}"),
            _ => Ok(None),
        }
    })
}

/// A QEMU that waits for a VM. Killed when dropped, before its cgroup is removed.
struct Incoming {
    child: Child,
    dir: PathBuf,
    over: Arc<AtomicBool>,
    watch: Option<JoinHandle<()>>,
    _kill: Guard,
    cgroup: Option<MemoryCgroup>,
}

impl Incoming {
    fn start(peer: &Peer<'_>, limit_mib: Option<u64>) -> Result<Incoming> {
        let dir = peer.dir.join(peer.migrations.to_string());
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let cgroup = limit_mib.map(|mib| limited(mib, peer)).transpose()?;
        let join = cgroup.as_ref().map(|cgroup| {
            let procs = cgroup.procs().display().to_string();
            ["sh", "-c", JOIN, &procs].map(str::to_owned).to_vec()
        });
        let words = [join.unwrap_or_default(), peer.common.network.words(1 - peer.at)].concat();
        let (program, words) = words.split_first().context("a program")?;
        let mut command = Command::new(program);
        let console = format!("file:{}", dir.join(CONSOLE).display());
        command.args(words).arg(peer.common.qemu).args(["-serial", &console, "-serial"]);
        command.arg(server(&socket_of(&dir, VM))).args(&peer.words);
        command.arg("-qmp").arg(server(&monitor_of(&dir))).args(["-incoming", "defer"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
        process::die_with_parent(&mut command);
        let child = command.spawn().context("start QEMU")?;
        let start_ticks = start_ticks_of(child.id()).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid: child.id(), start_ticks })?;
        let over = Arc::new(AtomicBool::new(false));
        let watch = watch(dir.join(CONSOLE), child.id(), Arc::clone(&over));
        Ok(Incoming { child, dir, over, watch: Some(watch), _kill: kill, cgroup })
    }
}

impl Incoming {
    /// Has it wait for a VM. Its monitor, and the guest's port.
    fn wait_for(&mut self, uri: &str, way: Way) -> Result<(Qmp, Port)> {
        let dir = self.dir.clone();
        let connect = || {
            let mut monitor = Qmp::connect(&monitor_of(&dir))?;
            let port = UnixStream::connect(socket_of(&dir, VM)).context("connect to the guest")?;
            way.set(&mut monitor)?;
            monitor.execute("migrate-incoming", json!({ "uri": uri }))?;
            Ok((monitor, Port::of(port)?))
        };
        // How it ended says more than that it does not answer.
        let ended = |error: anyhow::Error| match self.child.try_wait() {
            Ok(Some(status)) => error.context(format!("the QEMU that waits has ended: {status}")),
            _ => error.context("the QEMU that waits"),
        };
        connect().map_err(ended)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = self.watch.take().map(JoinHandle::join);
        // It may have ended; either way it has to be reaped before its cgroup is removed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends a QEMU whose guest is broken: it would never answer.
fn watch(console: PathBuf, pid: u32, over: Arc<AtomicBool>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        while !over.load(Ordering::Relaxed) {
            if fs::read_to_string(&console).is_ok_and(|text| broken(&text).is_some()) {
                // It is not reaped before this thread has ended, so the number is still its own.
                let _ = process::kill(pid);
                return;
            }
            std::thread::sleep(LOOK);
        }
    })
}

/// What a guest's kernel says of itself when it is broken.
fn broken(console: &str) -> Option<&str> {
    console.lines().find(|line| BROKEN.iter().any(|word| line.contains(word)))
}

fn limited(mib: u64, peer: &Peer<'_>) -> Result<MemoryCgroup> {
    let name = format!("pagoda-bench-migrate-{}-{}", std::process::id(), peer.migrations);
    MemoryCgroup::new(&name, (mib << 20) + peer.own_bytes + KERNEL_BYTES)
}

fn server(path: &Path) -> String {
    format!("unix:{},server=on,wait=off", path.display())
}
