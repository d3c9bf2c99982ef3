//! kill -9 of the daemon, again and again under a verifying load: wrong pages, and how long a VM
//! of 4 GiB waits once the new daemon has started. There is no peer: the kernel's swap cannot be
//! killed.

use std::time::Duration;

use anyhow::{Result, bail};
use pagoda_api::VmState;

use super::report::{Bar, Report};
use super::{Setup, svg};
use crate::daemon::Daemon;

const MEMORY_MIB: u64 = 4096;
const DRAM_MIB: u64 = 1024;
const KILLS: usize = 100;
/// The load runs so long between two kills; the time grows from kill to kill, so that kills meet
/// every stage of a page-out.
const LOAD_MS: [u64; 5] = [20, 50, 110, 230, 370];
const RECOVERY_MS_MAX: f64 = 200.0;
const SERVICE_MAX: Duration = Duration::from_secs(30);
const VM: &str = "bench-crash";

/// Runs the bench.
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
    let kills = setup.count(KILLS);
    let mut recovery_ms = Vec::new();
    let mut bad_pages = 0;
    // The load runs over several kills at a time and reports its slices; a slice without an
    // access is one in which the VM waited.
    for (kill, load_ms) in (0..kills).zip(LOAD_MS.iter().cycle()) {
        let workload = ["random", "seq", "zipf"][kill % 3];
        toy.start_run(&format!("--workload {workload} --mode read-write --seconds 1.5 --no-latency"))?;
        std::thread::sleep(Duration::from_millis(*load_ms));
        daemon.kill9()?;
        let answers = daemon.restart()?;
        let served = daemon.wait_for_vm(VM, SERVICE_MAX, |info| info.state == VmState::Running);
        let total = daemon.since_start();
        served?;
        recovery_ms.push(total.max(answers).as_secs_f64() * 1000.0);
        bad_pages += toy.finish_run()?.bad_pages;
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
