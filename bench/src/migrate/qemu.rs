//! The peer: QEMU alone, which migrates by itself between the same hosts, by pre-copy and without encryption. No limit of bandwidth is
//! set, and the downtime that it may take is ours.
//!
//! A destination, and then the source of the next migration, may be in a memory cgroup with the kernel's swap.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pagoda_api::MOVE_DOWNTIME_MS_DEFAULT;
use pagoda_sys::toy::process;
use serde_json::json;
use testkit::peers::cgroup::MemoryCgroup;
use testkit::qmp::Qmp;
use testkit::undo::{Guard, Undo, start_ticks_of};
use testkit::wait;

use super::guest::{Control, Moved, Size, VM, boot, forget_stops, monitor_of, qemu, when};
use super::network::{ADDRESSES, Network};
use crate::Setup;
use crate::balloon::guest::{Port, Shape, Start, machine_words, socket_of};
use crate::restore::epoch_us;

/// Each destination has the next one.
const PORT: u16 = 4450;
/// Bytes a second: more than any link here. QEMU's own default is 128 MiB/s.
const BANDWIDTH: u64 = 100 << 30;
/// QEMU's own memory, which a cgroup counts and our limit does not: QEMU 7.2 under TCG has some 60 MiB (RssAnon, 2026-11-21).
const OWN_BYTES: u64 = 64 << 20;
/// Joins a cgroup before there is any memory; `exec` keeps the process.
const JOIN: &str = r#"echo $$ > "$0" && exec "$@""#;
/// Nothing is measured before what the guest has done has come to rest.
const QUIET: Duration = Duration::from_secs(2);

/// The VM, wherever it is.
pub struct Peer<'a> {
    network: &'a Network,
    /// Words of the machine.
    words: Vec<String>,
    dir: PathBuf,
    control: Control,
    monitor: Qmp,
    at: usize,
    migrations: u16,
    /// Its process, once it has migrated.
    came: Option<Incoming>,
    _dir: Guard,
}

impl<'a> Peer<'a> {
    /// Boots it on the first host, with all its memory in DRAM.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot(setup: &Setup, network: &'a Network, size: Size, start: &Start<'_>) -> Result<Peer<'a>> {
        let dir = setup.dir.join(format!("migrate-qemu-{}", std::process::id()));
        let remove = Guard::new(Undo::Directory { path: dir.clone() })?;
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let program = qemu()?.display().to_string();
        let command = [network.words(0), vec![program]].concat();
        let (control, monitor) = boot(&command, &dir, size, start)?;
        let append = size.append();
        let shape = Shape { name: VM, memory_mib: size.memory_mib, append: &append, ..Shape::default() };
        let words = machine_words(&shape, start);
        Ok(Peer { network, words, dir, control, monitor, at: 0, migrations: 0, came: None, _dir: remove })
    }

    /// Migrates to the other host, into a cgroup of so much if that is said. The rest as of our side.
    ///
    /// # Errors
    /// It does not migrate, or a page is wrong.
    pub fn migrate(&mut self, limit_mib: Option<u64>, write: Option<&str>) -> Result<Moved> {
        std::thread::sleep(QUIET);
        self.migrations += 1;
        let came = Incoming::start(self, limit_mib)?;
        let mut monitor = Qmp::connect(&monitor_of(&came.dir))?;
        let port = UnixStream::connect(socket_of(&came.dir, VM)).context("connect to the guest")?;
        let mut port = Port::of(port)?;
        forget_stops(&mut self.monitor)?;
        let settings = json!({ "max-bandwidth": BANDWIDTH, "downtime-limit": MOVE_DOWNTIME_MS_DEFAULT });
        self.monitor.execute("migrate-set-parameters", settings)?;
        let on_link = self.network.sent_bytes(self.at)?;
        let began_us = epoch_us()?;
        self.monitor.execute("migrate", json!({ "uri": self.uri() }))?;
        if let Some(write) = write {
            self.control.begin(write)?;
        }
        let resumed_us = when(&mut monitor, "RESUME")?;
        let stopped_us = when(&mut self.monitor, "STOP")?;
        let sent_bytes = sent(&mut self.monitor)?;
        let link_bytes = self.network.sent_bytes(self.at)? - on_link;
        self.monitor.execute("quit", json!({}))?;
        if let Some(write) = write {
            self.control.end_at(&mut port, write)?;
        }
        (self.control, self.monitor, self.at) = (Control::Moved(port), monitor, 1 - self.at);
        self.came = Some(came);
        self.control.command("verify").context("the peer's memory is right")?;
        let ms = (resumed_us - began_us) / 1e3;
        let downtime_ms = (resumed_us - stopped_us) / 1e3;
        Ok(Moved { ms, copied_ms: ms, downtime_ms, link_bytes, sent_bytes, paged: 0 })
    }

    /// Where the other host waits for it.
    fn uri(&self) -> String {
        format!("tcp:{}:{}", ADDRESSES[1 - self.at], PORT + self.migrations)
    }
}

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
    _kill: Guard,
    _cgroup: Option<MemoryCgroup>,
}

impl Incoming {
    fn start(peer: &Peer<'_>, limit_mib: Option<u64>) -> Result<Incoming> {
        let dir = peer.dir.join(peer.migrations.to_string());
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let cgroup = limit_mib.map(|mib| limited(mib, peer.migrations)).transpose()?;
        let join = cgroup.as_ref().map(|cgroup| {
            let procs = cgroup.procs().display().to_string();
            ["sh", "-c", JOIN, &procs].map(str::to_owned).to_vec()
        });
        let words = [join.unwrap_or_default(), peer.network.words(1 - peer.at)].concat();
        let (program, words) = words.split_first().context("a program")?;
        let mut command = Command::new(program);
        command.args(words).arg(qemu()?).args(["-serial", "null", "-serial"]).arg(server(&socket_of(&dir, VM)));
        command.args(&peer.words).arg("-qmp").arg(server(&monitor_of(&dir))).arg("-incoming").arg(peer.uri());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
        process::die_with_parent(&mut command);
        let child = command.spawn().context("start QEMU")?;
        let start_ticks = start_ticks_of(child.id()).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid: child.id(), start_ticks })?;
        Ok(Incoming { child, dir, _kill: kill, _cgroup: cgroup })
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // It may have ended; either way it has to be reaped before its cgroup is removed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn limited(mib: u64, number: u16) -> Result<MemoryCgroup> {
    let name = format!("pagoda-bench-migrate-{}-{number}", std::process::id());
    MemoryCgroup::new(&name, (mib << 20) + OWN_BYTES)
}

fn server(path: &Path) -> String {
    format!("unix:{},server=on,wait=off", path.display())
}
