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
use pagoda_api::{HostList, MoveMode, MoveOutcome, MoveReply, MoveRequest, MoveStatus, TrustedHost, VmInfo};
use testkit::daemon::Daemon;
use testkit::image::Images;
use testkit::qmp::Qmp;
use testkit::undo::{Guard, Undo, start_ticks_of};
use testkit::wait;

use super::guest::{Common, Control, Moved, VM, boot, forget_stops, monitor_of, when};
use super::leg::Side;
use super::network::ADDRESSES;
use super::qemu::LEAD;
use super::reads::Reads;
use crate::balloon::guest::{Port, QEMU, socket_of};
use crate::restore::{END_MAX, epoch_us};

const NAMES: [&str; 2] = ["host1", "host2"];
const PORT: u16 = 7075;
/// Goes to a directory and becomes the rest.
const GO: &str = r#"cd "$0" && exec "$@""#;
/// In a mount namespace of its own: has the first directory at the second's path, goes there and becomes the rest.
const BECOME: &str = r#"mount --bind "$0" "$1" && cd "$1" && shift && exec "$@""#;
/// Causes of faults for which pages come from swap, or by the link from where the VM was.
const FETCHED: &str = "faults_swap";
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
    common: Common<'a>,
    /// How VMs see their directory.
    seen: PathBuf,
    /// What goes before a program on the first host.
    words: Vec<String>,
    _dir: Guard,
}

impl<'a> Hosts<'a> {
    /// # Errors
    /// A daemon does not start, or they do not reach each other.
    pub fn start(common: Common<'a>) -> Result<Hosts<'a>> {
        Hosts::start_with(common, &<[String; 2]>::default())
    }

    /// The same with more lines of the daemons' configurations, in no section.
    ///
    /// # Errors
    /// As of [`Hosts::start`].
    pub fn start_with(common: Common<'a>, more: &[String; 2]) -> Result<Hosts<'a>> {
        let Common { setup, network, start, qemu, .. } = common;
        let parent = setup.dir.canonicalize().context("find the directory of swap files")?;
        let dir = parent.join(format!("migrate-{}", std::process::id()));
        let remove = Guard::new(Undo::Directory { path: dir.clone() })?;
        let (seen, files) = (dir.join("vms"), dir.join("host2"));
        for path in [&seen, &files] {
            fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
        }
        let moves = accepts(&seen, qemu, start.images)?;
        let own = words(&["unshare", "--mount", "--propagation", "private", "sh", "-c", BECOME]);
        let own = [own, vec![shown(&files), shown(&seen)]].concat();
        let one = Host::start(&parent, &dir, 0, network.words(0), &[&more[0], &moves], seen.clone())?;
        let other = Host::start(&parent, &dir, 1, [network.words(1), own].concat(), &[&more[1], &moves], files)?;
        let words = [network.words(0), words(&["sh", "-c", GO]), vec![shown(&seen)]].concat();
        let hosts = Hosts { other, one, common, seen, words, _dir: remove };
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
    pub fn boot(&self) -> Result<Vm<'_>> {
        self.boot_with(&[])
    }

    /// The same with more options of `pagoda run`.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot_with(&self, more: &[&str]) -> Result<Vm<'_>> {
        let qemu = shown(self.common.qemu);
        let run = [&["run", "--name", VM], more, &["--", &qemu]].concat();
        let words = [self.words.clone(), self.one.daemon.cli_words()?, words(&run)].concat();
        let (control, monitor) = boot(&words, &self.seen, self.common)?;
        Ok(Vm { hosts: self, control, monitor, at: 0, half: false, said: Vec::new(), kills: Vec::new() })
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
    fn start(
        parent: &Path,
        dir: &Path,
        at: usize,
        wrapper: Vec<String>,
        texts: &[&str; 2],
        files: PathBuf,
    ) -> Result<Host> {
        let [more, moves] = texts;
        let (name, address) = (NAMES[at], format!("{}:{PORT}", ADDRESSES[at]));
        let config = dir.join(format!("{name}.toml"));
        fs::write(&config, "").context("write a configuration")?;
        let options = ["--config", &shown(&config)];
        let mut daemon = Daemon::start_with(parent, &format!("migrate-{name}"), &options)?;
        daemon.kill9()?;
        fs::write(&config, format!("{more}[hosts]\nlisten = \"{address}\"\n\n[moves]\n{moves}\n"))
            .context("write a configuration")?;
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        daemon.change_start(&options, &wrapper);
        daemon.restart().with_context(|| format!("start the daemon of {name}"))?;
        Ok(Host { daemon, name, address, files })
    }

    /// Pages of the VM that came from swap and went there; `None`: it has gone.
    fn paged(&self) -> Option<u64> {
        paged(&self.daemon.client().vm(VM).ok()?)
    }
}

/// Of the faults that fetched pages from somewhere, the commonest kind.
fn fetched_p50_us(vm: &VmInfo) -> f64 {
    let fetched = vm.latency.iter().filter(|(cause, _)| cause.starts_with(FETCHED)).map(|(_, latency)| latency);
    fetched.max_by_key(|latency| latency.count).map_or(0.0, |latency| latency.p50_us)
}

fn paged(vm: &VmInfo) -> Option<u64> {
    Some(vm.counters.get(PAGES_IN)? + vm.counters.get(PAGES_OUT)?)
}

/// The VM, wherever it is.
pub struct Vm<'a> {
    hosts: &'a Hosts<'a>,
    pub control: Control,
    monitor: Qmp,
    at: usize,
    half: bool,
    said: Vec<String>,
    /// Of the QEMUs that daemons have started.
    kills: Vec<Guard>,
}

impl Vm<'_> {
    /// Moves to the other host, into so much DRAM and in this mode. It begins to write by the command, if there is one, when its memory
    /// begins to be sent. It does not look at its memory there: `verify` does.
    ///
    /// # Errors
    /// It does not move.
    pub fn moves(&mut self, dram_mib: u64, mode: MoveMode, write: Option<&str>) -> Result<Moved> {
        self.moves_by(&|to| MoveRequest { dram: Some(dram_mib << 20), mode, ..MoveRequest::new(to) }, write)
    }

    /// The same as this asks for it of the host of this name.
    ///
    /// # Errors
    /// It does not move.
    pub fn moves_by(&mut self, request: &dyn Fn(&str) -> MoveRequest, write: Option<&str>) -> Result<Moved> {
        self.settle()?;
        let network = self.hosts.common.network;
        let (from, to) = (self.hosts.host(self.at), self.hosts.host(1 - self.at));
        for left in [socket_of(&to.files, VM), monitor_of(&to.files)] {
            // Of its last stay there.
            let _ = fs::remove_file(left);
        }
        forget_stops(&mut self.monitor)?;
        let vm = from.daemon.vm(VM)?;
        let before = paged(&vm).context("look at the VM's counters")?;
        let request = request(to.name);
        let mode = request.mode;
        let on_link = network.sent_bytes(self.at)?;
        let reads = Reads::of(from.daemon.pid());
        let is_before = mode == MoveMode::Postcopy;
        if let Some(write) = write.filter(|_| is_before) {
            // QEMU has to have given it to the guest: what is in the serial port does not go over.
            self.control.begin(write)?;
            std::thread::sleep(LEAD);
        }
        let began_us = epoch_us()?;
        let reply = from.daemon.client().move_vm(VM, &request).context("begin the move")?;
        let copying_us = epoch_us()?;
        ensure!(matches!(reply, MoveReply::Begun(_)), "{reply:?}");
        if let Some(write) = write.filter(|_| !is_before) {
            self.control.begin(write)?;
        }
        // QEMU waits for its state there. What the guest says later than that comes by this port.
        let mut monitor = Qmp::connect(&monitor_of(&to.files))?;
        let mut port = Port::of(UnixStream::connect(socket_of(&to.files, VM)).context("connect to the guest")?)?;
        self.kills.extend(self.hosts.kills()?);
        let (status, after, there) = follow((from, to), before)?;
        let whole_us = epoch_us()?;
        let link_bytes = network.sent_bytes(self.at)? - on_link;
        let now_there = to.daemon.vm(VM)?;
        let resumed_us = when(&mut monitor, "RESUME")?;
        let stopped_us = when(&mut self.monitor, "STOP")?;
        self.said = write.map(|write| self.control.end_at(&mut port, write)).transpose()?.unwrap_or_default();
        (self.control, self.monitor, self.at) = (Control::Moved(port), monitor, 1 - self.at);
        self.half = now_there.dram_limit_bytes < self.hosts.common.size.memory_mib << 20;
        Ok(Moved {
            ms: (resumed_us - began_us) / 1e3,
            copied_ms: (resumed_us - copying_us) / 1e3,
            resumed_us,
            whole_ms: (whole_us - began_us) / 1e3,
            fault_p50_us: fetched_p50_us(&now_there),
            downtime_ms: (resumed_us - stopped_us) / 1e3,
            link_bytes,
            sent_bytes: status.sent_bytes,
            paged: after - before,
            paged_there: there.iter().rev().find(|(at_us, _)| *at_us <= resumed_us).map_or(0, |(_, paged)| *paged),
            swapped_bytes: vm.swapped_bytes,
            swapped_there_bytes: now_there.swapped_bytes,
            read_bytes_per_s: reads.end(),
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

    /// Has the guest power off, and waits until the daemon has forgotten the VM.
    ///
    /// # Errors
    /// It does not end.
    pub fn end(mut self) -> Result<()> {
        self.control.begin("poweroff")?;
        self.hosts.host(self.at).daemon.wait_gone(VM, END_MAX)
    }
}

impl Side for Vm<'_> {
    const NAME: &'static str = "ours";

    fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    fn is_half(&self) -> bool {
        self.half
    }

    fn said(&self) -> &[String] {
        &self.said
    }

    fn only_move(&mut self, half: bool, write: Option<&str>) -> Result<Moved> {
        let size = self.hosts.common.size;
        let dram_mib = if half { size.half_mib() } else { size.memory_mib };
        self.moves(dram_mib, MoveMode::Precopy, write)
    }

    fn postcopy(&mut self, command: &str) -> Result<Moved> {
        self.moves(self.hosts.common.size.memory_mib, MoveMode::Postcopy, Some(command))
    }
}

/// How a move has ended, the counter of the source when the VM was last seen there, and that of the destination by time.
type Followed = (MoveStatus, u64, Vec<(f64, u64)>);

fn follow((from, to): (&Host, &Host), before: u64) -> Result<Followed> {
    let (began, mut paged, mut there) = (Instant::now(), before, Vec::new());
    loop {
        paged = from.paged().unwrap_or(paged);
        if let Some(paged) = to.paged() {
            there.push((epoch_us()?, paged));
        }
        let status = from.daemon.client().move_of(VM).context("look at the move")?;
        if status.is_over() {
            ensure!(status.outcome == MoveOutcome::Moved, "{status:?}");
            return Ok((status, paged, there));
        }
        ensure!(began.elapsed() < MOVE_MAX, "the move does not end: {status:?}");
        std::thread::sleep(LOOK);
    }
}

/// The section `[moves]` of both hosts.
fn accepts(seen: &Path, qemu: &Path, images: &Images) -> Result<String> {
    // What scripts/install-deps.sh unpacks is a script that becomes the program below it.
    let unpacked = qemu.with_file_name("usr").join("bin").join(QEMU);
    let programs = [qemu.to_owned(), qemu.canonicalize().context("look at QEMU")?, unpacked];
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
