//! kill -9 of the daemon, again and again under a verifying load: wrong pages, and how long a VM
//! of 4 GiB waits once the new daemon has started: from exec to the end of the access that waited,
//! by the clock of the thread that made it, the last of all threads. There is no peer: the kernel's
//! swap cannot be killed.

use std::time::Duration;

use anyhow::{Result, bail};
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};
use testkit::toy::Done;

use super::{Setup, svg};

const MEMORY_MIB: u64 = 4096;
const DRAM_MIB: u64 = 1024;
const KILLS: usize = 100;
const KILLS_QUICK: usize = 10;
/// The load runs so long before a kill; the time changes from kill to kill, so that kills meet
/// every stage of a page-out.
const LOAD_MS: [u64; 5] = [20, 50, 110, 230, 370];
/// How long it goes on in all: longer than a kill and a recovery as the bar wants it.
const RUN_SECONDS: f64 = 1.0;
const RECOVERY_MS_MAX: f64 = 200.0;
const VM: &str = "bench-crash";

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// The daemon does not come back, or the toy dies.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("crash");
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let mut daemon = Daemon::start(&setup.dir)?;
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, DRAM_MIB, &["--threads", "2"])?;
    toy.fill()?;
    let kills = if setup.quick { KILLS_QUICK } else { KILLS };
    let mut recovery_ms = Vec::new();
    let mut bad_pages = 0;
    for (kill, load_ms) in (0..kills).zip(LOAD_MS.iter().cycle()) {
        let workload = ["random", "seq", "zipf"][kill % 3];
        toy.start_run(&format!("--workload {workload} --mode read-write --seconds {RUN_SECONDS}"))?;
        std::thread::sleep(Duration::from_millis(*load_ms));
        daemon.kill9()?;
        let answers = daemon.restart()?;
        let done = toy.finish_run()?;
        recovery_ms.push(recovery_s(&done, daemon.started_ns(), answers) * 1000.0);
        bad_pages += done.bad_pages;
        if (kill + 1) % 10 == 0 {
            eprintln!("crash: {} of {kills} kills, {bad_pages} wrong pages", kill + 1);
        }
    }
    // Every page once more: a page may be wrong that the load did not meet.
    bad_pages += toy.go_unverified("--workload seq --mode read --passes 1 --no-latency")?.bad_pages;
    drop(toy);
    report.single(&format!("wrong pages after {kills} kills"), "pages", &[bad_pages as f64], Bar::AtMost(0.0));
    report.single("service again after the new daemon starts, 4 GiB", "ms", &recovery_ms, Bar::AtMost(RECOVERY_MS_MAX));
    let worst = recovery_ms.iter().copied().fold(0.0, f64::max);
    report.single("service again, the slowest", "ms", &[worst], Bar::AtMost(RECOVERY_MS_MAX));
    let points = (1..).zip(&recovery_ms).map(|(kill, ms)| [f64::from(kill), *ms]);
    let plot = svg::line_chart(&svg::LineChart {
        title: format!("kill -9 of the daemon under a load on {MEMORY_MIB} MiB in {DRAM_MIB} MiB"),
        x_label: "kill".to_owned(),
        y_label: "ms until service".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series: vec![("recovery".to_owned(), points.collect())],
    });
    Ok((report, plot))
}

/// From the new daemon's exec to the end of the longest access of every thread that waited for it; to its first answer
/// where none did.
pub(super) fn recovery_s(done: &Done, started_ns: u64, answers: Duration) -> f64 {
    let waited = done.stalls.iter().filter(|stall| stall.ended_ns > started_ns);
    let last_ns = waited.map(|stall| stall.ended_ns - started_ns).max();
    last_ns.map_or(answers.as_secs_f64(), |ns| ns as f64 / 1e9)
}
