//! QEMU is killed: from that moment to the guest's first reply again, against booting it.
//!
//! The VM runs under `pagoda run --on-crash restore` and has one snapshot, all of whose memory it has written. The peer is the same
//! guest in the same VM: from the start of the command to its first reply. It has nothing in memory then, so what a user loses
//! beside time does not count. The guest verifies its memory after each restore.

use std::time::Instant;

use anyhow::{Context, Result};
use pagoda_api::CreateSnapshot;
use rustix::process::{Pid, Signal, kill_process};
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};

use super::balloon::guest::{Guest, Shape, Start};
use super::snapshot::{append, of_each_size, wait_durable};
use super::{Setup, svg};

/// Crashes in a round.
const REPEATS: usize = 3;
/// What the guest does in between, so that it has something to lose.
const WORK: &str = "run random passes=1 write=100";
/// The guest answers at once.
const REPLY: &str = "idle 0";
const VM: &str = "bench-again";
const SNAPSHOT: &str = "here";
/// The bar of the issue: a restore takes at most this part of the time that booting takes.
const OF_BOOTING_MAX: f64 = 0.1;

/// What was measured of one size.
#[derive(Default)]
struct Size {
    again_ms: Vec<f64>,
    boot_ms: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest does not boot, is not restored, or finds a wrong page.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let (accelerator, measured) =
        of_each_size(setup, "again", |start, shape, size| crashes(setup, start, shape, size))?;
    let mut report = setup.report_of("again", accelerator);
    for (memory_mib, size) in &measured {
        let name = format!("{memory_mib} MiB, QEMU killed, first reply again: booting, first reply");
        report.pair(&name, "ms", &size.again_ms, &size.boot_ms, Bar::AtMost(OF_BOOTING_MAX));
    }
    Ok((report, plot(&measured)))
}

fn plot(measured: &[(u64, Size)]) -> String {
    let group = |(memory_mib, size): &(u64, Size)| {
        (format!("{memory_mib} MiB"), [&size.again_ms, &size.boot_ms].map(|side| svg::Bar::of(side)).to_vec())
    };
    svg::bar_chart(&svg::BarChart {
        title: "QEMU is killed: the guest's first reply again".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Log,
        series: ["restored", "booted"].map(str::to_owned).to_vec(),
        groups: measured.iter().map(group).collect(),
    })
}

/// Boots and crashes by turns.
fn crashes(setup: &Setup, start: &Start<'_>, (memory_mib, work_mib): (u64, u64), size: &mut Size) -> Result<()> {
    let daemon = Daemon::start(&setup.dir)?;
    let append = append(work_mib);
    let run = ["--on-crash", "restore=100"];
    let shape = Shape { name: VM, memory_mib, min_mib: 64, append: &append, run: &run, ..Shape::default() };
    for _ in 0..REPEATS {
        let began = Instant::now();
        let mut guest = Guest::boot(&daemon, &shape, start)?;
        guest.command(REPLY)?;
        size.boot_ms.push(began.elapsed().as_secs_f64() * 1e3);
        guest.command(&format!("fill {work_mib}"))?;
        let request = CreateSnapshot { name: Some(SNAPSHOT.to_owned()), disks: Some(false), wait_durable: false };
        daemon.client().take_snapshot(VM, &request).context("take the snapshot")?;
        wait_durable(&daemon, VM, SNAPSHOT)?;
        guest.command(WORK)?;
        let pid = daemon.client().vm(VM)?.pid.and_then(|pid| Pid::from_raw(pid as i32)).context("QEMU's process")?;
        let mut began = Instant::now();
        guest.replaced(&daemon, VM, || {
            began = Instant::now();
            kill_process(pid, Signal::KILL).context("kill QEMU")
        })?;
        guest.command(REPLY)?;
        size.again_ms.push(began.elapsed().as_secs_f64() * 1e3);
        guest.command("verify")?;
        guest.power_off()?;
        daemon.wait_gone(VM, super::restore::END_MAX)?;
        daemon.client().remove_snapshot(&pagoda_api::SnapshotName::new(VM, SNAPSHOT)).context("remove the snapshot")?;
    }
    Ok(())
}
