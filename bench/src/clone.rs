//! Clones of a warm VM: how soon does one go on, and how much memory has it to itself?
//!
//! * **One.** From the start of `pagoda vm clone` to QEMU's own time stamp of RESUME; the memory that nobody shares with it then, and
//!   after ten idle seconds. The peer is QEMU alone ([`bare`]): it maps a file with the source's memory privately and loads the state.
//! * **Many at a time.** From the start of the command to the last RESUME, and the guest memory of all of them. The peer starts as
//!   many. What its guests have written, with the file that they share, is what has to be there.
//!
//! Both without sharing (`clone_sharing = false`) and with it: what clones share is counted with the many. With it, the first clone
//! of a snapshot is counted apart: it borrows nothing, and the template is made when its guest runs.
//!
//! Guests verify their memory afterwards: each single one, and [`VERIFIED`] of many.

mod bare;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::{CreateSnapshot, SnapshotName};
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};

use self::bare::{Bare, Template};
use super::balloon::guest::{self, Guest, Port, Shape, Start};
use super::snapshot::{append, wait_durable};
use super::{Setup, svg};

const MEMORY_MIB: u64 = 256;
/// What the guest's program has filled.
const WORK_MIB: u64 = 128;
/// Single clones in a round.
const REPEATS: usize = 3;
const MANY: usize = 100;
const MANY_QUICK: usize = 16;
/// Of many: each takes seconds of emulation.
const VERIFIED: usize = 2;
const IDLE: Duration = Duration::from_secs(10);
const VM: &str = "bench-clone";
const SNAPSHOT: &str = "warm";
/// More than the time in which a hundred end on two CPUs.
const END_MAX: Duration = Duration::from_secs(120);
/// The bars of the issue, each in the unit of its name or as a ratio.
const FIRST_MS_MAX: f64 = 80.0;
const OF_BARE_MAX: f64 = 1.3;
const FIRST_KIB_MAX: f64 = 64.0;
const IDLE_KIB_MAX: f64 = 1024.0;
const OF_MANY_BARE_MAX: f64 = 1.15;
const OF_WRITTEN_MAX: f64 = 1.01;

/// In the daemon's configuration.
const NO_SHARING: &str = "clone_sharing = false\n";
/// What the daemon calls the file that clones share, in the links of `/proc/PID/fd`.
const TEMPLATE: &str = "/memfd:pagoda-template";

#[derive(Default)]
struct Measured {
    own: Side,
    sharing: Side,
    /// The first clone of a snapshot, of those that share.
    first: Side,
    bare: Side,
}

/// What was measured of one side.
#[derive(Default)]
struct Side {
    first_ms: Vec<f64>,
    first_kib: Vec<f64>,
    idle_kib: Vec<f64>,
    many_ms: Vec<f64>,
    many_mib: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest does not boot, is not cloned, or finds a wrong page.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let images = testkit::image::build(&testkit::image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = testkit::accel::find(guest::QEMU, &images, &setup.dir)?;
    let start = Start { images: &images, accelerator, disk: None };
    let many = if setup.quick { MANY_QUICK } else { MANY };
    let mut measured = Measured::default();
    for round in 0..setup.rounds {
        eprintln!("clone: round {} of {}", round + 1, setup.rounds);
        let template = Template::make(setup, &start)?;
        let config = setup.dir.join("clone.toml");
        std::fs::write(&config, NO_SHARING).context("write the configuration")?;
        let own = ["--config".to_owned(), config.display().to_string()];
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        for (options, side) in [(&own[..], &mut measured.own), (&[][..], &mut measured.sharing)] {
            let daemon = Daemon::start_with(&setup.dir, "clone", options)?;
            take(&daemon, &start)?;
            if options.is_empty() {
                ours(&daemon, REPEATS, &mut measured.first)?;
            }
            for number in 0..REPEATS {
                ours(&daemon, number, side)?;
                template.one(&mut measured.bare)?;
            }
            many_ours(&daemon, many, side)?;
        }
        template.many(many, &mut measured.bare)?;
        std::fs::remove_file(&config).context("remove the configuration")?;
    }
    let mut report = setup.report_of("clone", accelerator.name());
    add_figures(&mut report, many, &measured);
    Ok((report, plot(many, &measured)))
}

fn add_figures(report: &mut Report, many: usize, Measured { own, sharing, first, bare }: &Measured) {
    add_side(report, many, "", own, bare);
    add_side(report, many, "sharing, ", sharing, bare);
    let which = "sharing, the first clone of a snapshot";
    let name = format!("{which}, command to first instruction: QEMU alone, start and load");
    report.pair(&name, "ms", &first.first_ms, &bare.first_ms, Bar::AtMost(OF_BARE_MAX));
    report.single(
        &format!("{which}, guest memory private to it after 10 idle seconds"),
        "KiB",
        &first.idle_kib,
        Bar::None,
    );
}

fn add_side(report: &mut Report, many: usize, which: &str, one: &Side, bare: &Side) {
    let command = &format!("{which}clone of a warm VM, command to first instruction");
    report.single(command, "ms", &one.first_ms, Bar::AtMost(FIRST_MS_MAX));
    let name = format!("{command}: QEMU alone, start and load");
    report.pair(&name, "ms", &one.first_ms, &bare.first_ms, Bar::AtMost(OF_BARE_MAX));
    let private = &format!("{which}guest memory private to a clone");
    for (when, ours, peer, bar) in [
        ("at its first instruction", &one.first_kib, &bare.first_kib, FIRST_KIB_MAX),
        ("after 10 idle seconds", &one.idle_kib, &bare.idle_kib, IDLE_KIB_MAX),
    ] {
        report.single(&format!("{private}, {when}"), "KiB", ours, Bar::AtMost(bar));
        report.pair(&format!("{private}, {when}: QEMU alone, private mapping"), "KiB", ours, peer, Bar::None);
    }
    let name = format!("{which}{many} clones, command to the last first instruction: {many} starts of QEMU alone");
    report.pair(&name, "ms", &one.many_ms, &bare.many_ms, Bar::AtMost(OF_MANY_BARE_MAX));
    let name = format!("{which}{many} clones, guest memory: the source's memory and written pages");
    report.pair(&name, "MiB", &one.many_mib, &bare.many_mib, Bar::AtMost(OF_WRITTEN_MAX));
}

fn plot(many: usize, Measured { own, sharing, bare, .. }: &Measured) -> String {
    let group = |name: &str, of: fn(&Side) -> &[f64]| {
        (name.to_owned(), [own, sharing, bare].map(|side| svg::Bar::of(of(side))).to_vec())
    };
    svg::bar_chart(&svg::BarChart {
        title: "Clones of a warm VM".to_owned(),
        y_label: "ms, KiB and MiB".to_owned(),
        y_scale: svg::Scale::Log,
        series: ["without clone_sharing", "pagoda vm clone", "QEMU alone, private mapping"].map(str::to_owned).to_vec(),
        groups: vec![
            group("one, ms", |side| &side.first_ms),
            group("private at first, KiB", |side| &side.first_kib),
            group("private after 10 s, KiB", |side| &side.idle_kib),
            group(&format!("{many}, ms"), |side| &side.many_ms),
            group(&format!("{many}, MiB"), |side| &side.many_mib),
        ],
    })
}

/// A warm VM, of which there is a durable snapshot afterwards and nothing else that takes CPU.
fn take(daemon: &Daemon, start: &Start<'_>) -> Result<()> {
    let append = append(WORK_MIB);
    let shape = Shape { name: VM, memory_mib: MEMORY_MIB, append: &append, ..Shape::default() };
    let mut guest = Guest::boot(daemon, &shape, start)?;
    guest.command(&format!("fill {WORK_MIB}"))?;
    let request = CreateSnapshot { name: Some(SNAPSHOT.to_owned()), disks: Some(false), wait_durable: false };
    daemon.client().take_snapshot(VM, &request).context("take the snapshot")?;
    wait_durable(daemon, VM, SNAPSHOT)?;
    guest.power_off()?;
    daemon.wait_gone(VM, END_MAX)
}

/// Clones that run. Killed when dropped.
struct Clones<'a> {
    daemon: &'a Daemon,
    names: Vec<String>,
    kills: Vec<testkit::undo::Guard>,
    /// From the start of the command to the last guest's first instruction.
    ms: f64,
    /// What they had to themselves when they were looked at first. Guests write as soon as they run: what QEMU itself has written is a page.
    first_bytes: u64,
}

impl<'a> Clones<'a> {
    fn start(daemon: &'a Daemon, pattern: &str, count: usize) -> Result<Clones<'a>> {
        let from = SnapshotName::new(VM, SNAPSHOT).to_string();
        let words = daemon.cli_words()?;
        let mut command = std::process::Command::new(&words[0]);
        command.args(&words[1..]).args(["vm", "clone", &from, "--name", pattern, "--count", &count.to_string()]);
        command.arg("--log-dir").arg(daemon.dir().join("logs")).arg("--json");
        let began_us = super::restore::epoch_us()?;
        let done = command.output().context("run pagoda vm clone")?;
        ensure!(done.status.success(), "pagoda vm clone: {}", String::from_utf8_lossy(&done.stderr));
        let mut clones = Clones { daemon, names: Vec::new(), kills: Vec::new(), ms: 0.0, first_bytes: 0 };
        for vm in daemon.vms()? {
            let pid = vm.pid.context("a clone's process")?;
            let start_ticks = testkit::undo::start_ticks_of(pid).unwrap_or(0);
            clones.kills.push(testkit::undo::Guard::new(testkit::undo::Undo::Process { pid, start_ticks })?);
            let resumed_us = vm.resumed_unix_us.context("when a clone's guest ran first")? as f64;
            clones.ms = f64::max(clones.ms, (resumed_us - began_us) / 1e3);
            clones.first_bytes += vm.resident_bytes;
            clones.names.push(vm.name);
        }
        ensure!(clones.names.len() == count, "{count} clones, and not {:?}", clones.names);
        Ok(clones)
    }

    /// Guest memory that is not shared with others, of all of them.
    fn private_bytes(&self) -> Result<u64> {
        Ok(self.daemon.vms()?.iter().map(|vm| vm.resident_bytes).sum())
    }

    /// What all of them share: nothing, unless they do.
    fn shared_bytes(&self) -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        let pid = self.daemon.vms()?.first().and_then(|vm| vm.pid).context("a clone's process")?;
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).context("look at a clone's files")? {
            let path = entry.context("look at a clone's files")?.path();
            if std::fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().starts_with(TEMPLATE)) {
                return Ok(std::fs::metadata(&path).context("look at what clones share")?.blocks() * 512);
            }
        }
        Ok(0)
    }

    /// Some verify their memory, and all end.
    fn end(self, verified: usize) -> Result<()> {
        let source = guest::socket_of(self.daemon.dir(), VM);
        for name in self.names.iter().take(verified) {
            let socket = format!("{}.{name}", source.display());
            let stream =
                std::os::unix::net::UnixStream::connect(&socket).with_context(|| format!("connect to {socket}"))?;
            Port::of(stream)?.command("verify").with_context(|| format!("{name} has what its source had"))?;
        }
        drop(self.kills);
        self.names.iter().try_for_each(|name| self.daemon.wait_gone(name, END_MAX))
    }
}

fn ours(daemon: &Daemon, number: usize, side: &mut Side) -> Result<()> {
    let clones = Clones::start(daemon, &format!("one-{number}-%d"), 1)?;
    side.first_ms.push(clones.ms);
    side.first_kib.push(clones.first_bytes as f64 / 1024.0);
    std::thread::sleep(IDLE);
    side.idle_kib.push(clones.private_bytes()? as f64 / 1024.0);
    clones.end(1)
}

fn many_ours(daemon: &Daemon, count: usize, side: &mut Side) -> Result<()> {
    let clones = Clones::start(daemon, "many-%03d", count)?;
    side.many_ms.push(clones.ms);
    std::thread::sleep(IDLE);
    side.many_mib.push((clones.private_bytes()? + clones.shared_bytes()?) as f64 / (1 << 20) as f64);
    clones.end(VERIFIED)
}

impl Template {
    fn one(&self, side: &mut Side) -> Result<()> {
        let began = Instant::now();
        let bare = Bare::start(self, 0)?;
        side.first_ms.push(began.elapsed().as_secs_f64() * 1e3);
        side.first_kib.push(bare.private_bytes()? as f64 / 1024.0);
        std::thread::sleep(IDLE);
        side.idle_kib.push(bare.private_bytes()? as f64 / 1024.0);
        bare.end(true)
    }

    fn many(&self, count: usize, side: &mut Side) -> Result<()> {
        let began = Instant::now();
        let all = Bare::start_many(self, count)?;
        side.many_ms.push(began.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(IDLE);
        let written: u64 = all.iter().map(Bare::private_bytes).sum::<Result<_>>()?;
        side.many_mib.push((self.bytes()? + written) as f64 / (1 << 20) as f64);
        all.into_iter().enumerate().try_for_each(|(number, bare)| bare.end(number < VERIFIED))
    }
}
