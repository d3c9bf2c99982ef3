//! Our side: two daemons that trust each other, and a VM that moves between them.
//!
//! The VM has its files at the same path on both hosts. On the first one that is the directory itself. On the second one another
//! directory is mounted there, in a mount namespace of the daemon's, which QEMU inherits.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::counter::{PAGES_IN, PAGES_OUT};
use pagoda_api::{HostList, MoveOutcome, MoveReply, MoveRequest, MoveStatus, TrustedHost};
use testkit::daemon::Daemon;
use testkit::image::Images;
use testkit::qmp::Qmp;
use testkit::undo::{Guard, Undo, start_ticks_of};
use testkit::wait;

use super::guest::{Control, Moved, Size, VM, boot, forget_stops, monitor_of, qemu, when};
use super::network::{ADDRESSES, Network};
use crate::Setup;
use crate::balloon::guest::{Port, Start, socket_of};
use crate::restore::{END_MAX, epoch_us};

const NAMES: [&str; 2] = ["host1", "host2"];
const PORT: u16 = 7075;
/// Goes to a directory and becomes the rest.
const GO: &str = r#"cd "$0" && exec "$@""#;
/// In a mount namespace of its own: has the first directory at the second's path, goes there and becomes the rest.
const BECOME: &str = r#"mount --bind "$0" "$1" && cd "$1" && shift && exec "$@""#;
/// Between two looks at a move.
const LOOK: Duration = Duration::from_millis(50);
/// A move that takes longer hangs.
const MOVE_MAX: Duration = Duration::from_secs(600);
/// Nothing has come from swap or gone there for so long.
const QUIET: Duration = Duration::from_secs(2);
const SETTLE_MAX: Duration = Duration::from_secs(120);

/// One of the two.
struct Host {
    daemon: Daemon,
    name: &'static str,
    address: String,
    /// Its directory of VMs' files, as the bench sees it.
    files: PathBuf,
}

/// Both. Dropped, all VMs on them end.
pub struct Hosts<'a> {
    // The one that was started last is dropped first.
    other: Host,
    one: Host,
    network: &'a Network,
    /// How VMs see their directory.
    seen: PathBuf,
    /// What goes before a program on the first host.
    words: Vec<String>,
    qemu: String,
    _dir: Guard,
}

impl<'a> Hosts<'a> {
    /// # Errors
    /// A daemon does not start, or they do not reach each other.
    pub fn start(setup: &Setup, network: &'a Network, images: &Images) -> Result<Hosts<'a>> {
        let parent = setup.dir.canonicalize().context("find the directory of swap files")?;
        let dir = parent.join(format!("migrate-{}", std::process::id()));
        let remove = Guard::new(Undo::Directory { path: dir.clone() })?;
        let (seen, files) = (dir.join("vms"), dir.join("host2"));
        for path in [&seen, &files] {
            fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
        }
        let (qemu, moves) = (qemu()?, accepts(&seen, images)?);
        let own = words(&["unshare", "--mount", "--propagation", "private", "sh", "-c", BECOME]);
        let own = [own, vec![shown(&files), shown(&seen)]].concat();
        let one = Host::start(&parent, &dir, 0, network.words(0), &moves, seen.clone())?;
        let other = Host::start(&parent, &dir, 1, [network.words(1), own].concat(), &moves, files)?;
        let words = [network.words(0), words(&["sh", "-c", GO]), vec![shown(&seen)]].concat();
        let hosts = Hosts { other, one, network, seen, words, qemu: shown(&qemu), _dir: remove };
        for (who, whom) in [(&hosts.one, &hosts.other), (&hosts.other, &hosts.one)] {
            let HostList { own, .. } = whom.daemon.client().hosts().context("ask a host for its key")?;
            let host = TrustedHost { name: whom.name.to_owned(), key: own.key, address: whom.address.clone() };
            who.daemon.client().trust(&host).context("trust a host")?;
        }
        for (who, whom) in [(&hosts.one, &hosts.other), (&hosts.other, &hosts.one)] {
            wait::until("the hosts reach each other", wait::HANG, || Ok(who.daemon.client().ping(whom.name).ok()))?;
        }
        Ok(hosts)
    }

    /// Boots the VM on the first host, with all its memory in DRAM.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot(&self, size: Size, start: &Start<'_>) -> Result<Vm<'_>> {
        let run = ["run", "--name", VM, "--", &self.qemu];
        let words = [self.words.clone(), self.one.daemon.cli_words()?, words(&run)].concat();
        let (control, monitor) = boot(&words, &self.seen, size, start)?;
        Ok(Vm { hosts: self, control, monitor, at: 0, kills: Vec::new() })
    }

    fn host(&self, at: usize) -> &Host {
        if at == 0 { &self.one } else { &self.other }
    }

    /// QEMUs of both hosts: a daemon's child is not the bench's.
    fn qemus(&self) -> Vec<u32> {
        let seen = shown(&monitor_of(&self.seen));
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_qemu = |pid: &u32| {
            // It may end in this moment.
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            words.next().is_some_and(|program| program.contains("qemu")) && words.any(|word| word.contains(&seen))
        };
        pids.filter(is_qemu).collect()
    }

    fn kills(&self) -> Result<Vec<Guard>> {
        let kill = |pid: u32| Guard::new(Undo::Process { pid, start_ticks: start_ticks_of(pid).unwrap_or(0) });
        self.qemus().into_iter().map(kill).collect()
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        // Those of a move that has failed, which nobody else ends. Such a guard kills when it is dropped.
        let _ = self.kills();
    }
}

impl Host {
    fn start(parent: &Path, dir: &Path, at: usize, wrapper: Vec<String>, moves: &str, files: PathBuf) -> Result<Host> {
        let (name, address) = (NAMES[at], format!("{}:{PORT}", ADDRESSES[at]));
        let config = dir.join(format!("{name}.toml"));
        fs::write(&config, "").context("write a configuration")?;
        let options = ["--config", &shown(&config)];
        let mut daemon = Daemon::start_with(parent, &format!("migrate-{name}"), &options)?;
        daemon.kill9()?;
        fs::write(&config, format!("[hosts]\nlisten = \"{address}\"\n\n[moves]\n{moves}\n"))
            .context("write a configuration")?;
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        daemon.change_start(&options, &wrapper);
        daemon.restart().with_context(|| format!("start the daemon of {name}"))?;
        Ok(Host { daemon, name, address, files })
    }

    /// Pages of the VM that came from swap and went there; `None`: it has gone.
    fn paged(&self) -> Option<u64> {
        let counters = self.daemon.client().vm(VM).ok()?.counters;
        Some(counters.get(PAGES_IN)? + counters.get(PAGES_OUT)?)
    }
}

/// The VM, wherever it is.
pub struct Vm<'a> {
    hosts: &'a Hosts<'a>,
    pub control: Control,
    monitor: Qmp,
    at: usize,
    /// Of the QEMUs that daemons have started.
    kills: Vec<Guard>,
}

impl Vm<'_> {
    /// Moves to the other host, into so much DRAM. It begins to write by the command, if there is one, when its memory begins to be
    /// sent. It verifies its memory when it is there.
    ///
    /// # Errors
    /// It does not move, or a page is wrong.
    pub fn move_into(&mut self, dram_mib: u64, write: Option<&str>) -> Result<Moved> {
        self.settle()?;
        let (from, to) = (self.hosts.host(self.at), self.hosts.host(1 - self.at));
        for left in [socket_of(&to.files, VM), monitor_of(&to.files)] {
            // Of its last stay there.
            let _ = fs::remove_file(left);
        }
        forget_stops(&mut self.monitor)?;
        let before = from.paged().context("look at the VM's counters")?;
        let request = MoveRequest { dram: Some(dram_mib << 20), ..MoveRequest::new(to.name) };
        let on_link = self.hosts.network.sent_bytes(self.at)?;
        let began_us = epoch_us()?;
        let reply = from.daemon.client().move_vm(VM, &request).context("begin the move")?;
        let copying_us = epoch_us()?;
        ensure!(matches!(reply, MoveReply::Begun(_)), "{reply:?}");
        if let Some(write) = write {
            self.control.begin(write)?;
        }
        // QEMU waits for its state there. What the guest says later than that comes by this port.
        let mut monitor = Qmp::connect(&monitor_of(&to.files))?;
        let mut port = Port::of(UnixStream::connect(socket_of(&to.files, VM)).context("connect to the guest")?)?;
        self.kills.extend(self.hosts.kills()?);
        let (status, after) = follow(from, before)?;
        let link_bytes = self.hosts.network.sent_bytes(self.at)? - on_link;
        let resumed_us = when(&mut monitor, "RESUME")?;
        let stopped_us = when(&mut self.monitor, "STOP")?;
        if let Some(write) = write {
            self.control.end_at(&mut port, write)?;
        }
        port.command("verify").context("its memory is right")?;
        (self.control, self.monitor, self.at) = (Control::Moved(port), monitor, 1 - self.at);
        Ok(Moved {
            ms: (resumed_us - began_us) / 1e3,
            copied_ms: (resumed_us - copying_us) / 1e3,
            downtime_ms: (resumed_us - stopped_us) / 1e3,
            link_bytes,
            sent_bytes: status.sent_bytes,
            paged: after - before,
        })
    }

    /// Waits until nothing comes from swap or goes there.
    fn settle(&self) -> Result<()> {
        let (host, began) = (self.hosts.host(self.at), Instant::now());
        let (mut last, mut since) = (host.paged(), Instant::now());
        while since.elapsed() < QUIET {
            ensure!(began.elapsed() < SETTLE_MAX, "the VM's pages still come and go");
            std::thread::sleep(LOOK);
            let paged = host.paged();
            if paged != last {
                (last, since) = (paged, Instant::now());
            }
        }
        Ok(())
    }

    /// Ends it.
    ///
    /// # Errors
    /// It does not end.
    pub fn end(mut self) -> Result<()> {
        self.control.begin("poweroff")?;
        self.hosts.host(self.at).daemon.wait_gone(VM, END_MAX)
    }
}

/// How a move has ended, and the counters of the source when the VM was last seen there.
fn follow(from: &Host, before: u64) -> Result<(MoveStatus, u64)> {
    let (began, mut paged) = (Instant::now(), before);
    loop {
        paged = from.paged().unwrap_or(paged);
        let status = from.daemon.client().move_of(VM).context("look at the move")?;
        if status.is_over() {
            ensure!(status.outcome == MoveOutcome::Moved, "{status:?}");
            return Ok((status, paged));
        }
        ensure!(began.elapsed() < MOVE_MAX, "the move does not end: {status:?}");
        std::thread::sleep(LOOK);
    }
}

/// The section `[moves]` of both hosts.
fn accepts(seen: &Path, images: &Images) -> Result<String> {
    let qemu = qemu()?;
    let programs = [qemu.clone(), qemu.canonicalize().context("look at QEMU")?];
    let dir = |file: &Path| file.parent().map(Path::to_owned).context("the directory of an image");
    let paths = [seen.to_owned(), dir(&images.kernel)?, dir(&images.initrd)?];
    Ok(format!("accept = true\nprograms = {programs:?}\nusers = [\"root\"]\npaths = {paths:?}"))
}

fn words(some: &[&str]) -> Vec<String> {
    some.iter().map(|word| (*word).to_owned()).collect()
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
