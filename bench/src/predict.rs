//! What the miss-ratio curve of a running VM says of another size of DRAM, against what happens at that size.
//!
//! The toy runs at one cap. As `pagoda whatif` does, the pages that an access reads from swap meanwhile are scaled by what the
//! curve says of this cap and of another. Then that cap is set and the same workload counted. Per access, not per
//! second: a VM that faults more does less.
//!
//! A VM that has all its memory reads nothing, and there is nothing to scale: what its curve, made of ages, says of a cap is
//! a number of pages a second, for the same work a second. So its toy is paced.
//!
//! Counting begins when as many pages were read as DRAM holds: before that, what an earlier cap left behind is counted.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{CurveInfo, CurveSwitch};
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};
use testkit::stepped::SteppedToy;

use super::Setup;

const VM: &str = "bench-mrc";
const MEMORY_MIB: u64 = 384;
/// The cap at which the curve is taken.
const DRAM_MIB: u64 = 192;
/// The caps that are predicted, then tried: less, and more.
const OTHER_MIB: [u64; 2] = [128, 256];
const WORKLOADS: [&str; 3] = ["random", "zipf", "mixed"];
/// What a prediction may be off.
const ERROR_PERCENT_MAX: f64 = 25.0;
/// A warm-up lasts this long, again and again until DRAM was replaced once, but so often at most.
const WARM_S: f64 = 15.0;
const WARM_MAX: u32 = 6;
const RUN_S: f64 = 40.0;
/// Accesses a second of the toy that has all its memory: pages stay unused for seconds, and each access could be a fault.
const PACE: u64 = 4000;
/// How long its ages are looked at: six times what a random load takes for as many accesses as there are pages.
const AGES_S: f64 = 150.0;
/// A round of all takes half an hour.
const ROUNDS_MAX: usize = 1;
/// A curve is published at most every 10 s.
const PUBLISHED: Duration = Duration::from_secs(11);
const GONE_MAX: Duration = Duration::from_secs(60);

/// Adds the figures of a VM with a cap.
///
/// # Errors
/// The VM cannot be run.
pub fn at_a_cap(setup: &Setup, daemon: &Daemon, report: &mut Report) -> Result<()> {
    for workload in WORKLOADS {
        let what = format!("{workload}: pages from swap per access, predicted at {DRAM_MIB} MiB");
        compare(setup, report, &what, || scaled(setup, daemon, workload))?;
    }
    Ok(())
}

/// Adds the figures of a VM that has all its memory.
///
/// # Errors
/// The VM cannot be run.
pub fn with_all_memory(setup: &Setup, daemon: &Daemon, report: &mut Report) -> Result<()> {
    for workload in WORKLOADS {
        let what = format!("{workload}: pages from swap a second, predicted with all memory");
        compare(setup, report, &what, || by_ages(setup, daemon, workload))?;
    }
    Ok(())
}

/// Rounds of one prediction, for each of the other caps.
fn compare(
    setup: &Setup,
    report: &mut Report,
    what: &str,
    mut one: impl FnMut() -> Result<Vec<(f64, f64)>>,
) -> Result<()> {
    if !setup.wants(what) {
        return Ok(());
    }
    let mut errors = OTHER_MIB.map(|_| Vec::new());
    let mut rates = OTHER_MIB.map(|_| (Vec::new(), Vec::new()));
    for round in 0..setup.rounds.min(ROUNDS_MAX) {
        eprintln!("mrc: {what}, round {}", round + 1);
        for (at, (predicted, measured)) in one()?.into_iter().enumerate() {
            eprintln!("mrc: at {} MiB: {predicted:.4} predicted, {measured:.4} measured", OTHER_MIB[at]);
            errors[at].push((predicted - measured).abs() / measured * 100.0);
            rates[at].0.push(predicted);
            rates[at].1.push(measured);
        }
    }
    for (at, mib) in OTHER_MIB.into_iter().enumerate() {
        report.pair(&format!("{what} for {mib} MiB, and measured"), "", &rates[at].0, &rates[at].1, Bar::None);
        report.single(&format!("{what} for {mib} MiB: error"), "%", &errors[at], Bar::AtMost(ERROR_PERCENT_MAX));
    }
    Ok(())
}

/// Pages from swap a second, predicted while the VM has all its memory, and measured with less.
fn by_ages(setup: &Setup, daemon: &Daemon, workload: &str) -> Result<Vec<(f64, f64)>> {
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, MEMORY_MIB, &[])?;
    toy.fill()?;
    daemon.watch_curve(VM, CurveSwitch { on: true })?;
    let options = |seconds: f64| format!("--workload {workload} --mode read --no-latency --seconds {seconds}");
    let paced = |seconds: f64| format!("{} --pace {PACE}", options(seconds));
    let warm = options(setup.seconds(WARM_S));
    toy.go(&paced(AGES_S))?;
    let predicted = OTHER_MIB.map(|mib| daemon.what_if(VM, mib));
    daemon.watch_curve(VM, CurveSwitch { on: false })?;
    let mut found = Vec::new();
    for (predicted, mib) in predicted.into_iter().zip(OTHER_MIB) {
        let predicted = predicted?.page_ins_per_s_then.context("a VM that has all its memory has a curve")?;
        daemon.set_dram(VM, mib)?;
        warm_up(&mut toy, daemon, &warm, mib)?;
        let from = daemon.counter(VM, "pages_in")?;
        let done = toy.go(&paced(setup.seconds(RUN_S)))?;
        found.push((predicted, (daemon.counter(VM, "pages_in")? - from) as f64 / done.seconds));
    }
    toy.quit()?;
    daemon.wait_gone(VM, GONE_MAX)?;
    Ok(found)
}

/// Pages from swap per access, predicted and measured, for each of the other caps.
fn scaled(setup: &Setup, daemon: &Daemon, workload: &str) -> Result<Vec<(f64, f64)>> {
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, DRAM_MIB, &[])?;
    toy.fill()?;
    daemon.watch_curve(VM, CurveSwitch { on: true })?;
    let options = |seconds: f64| format!("--workload {workload} --mode read --no-latency --seconds {seconds}");
    let (warm, run) = (options(setup.seconds(WARM_S)), options(setup.seconds(RUN_S)));
    warm_up(&mut toy, daemon, &warm, DRAM_MIB)?;
    let now = measured(&mut toy, daemon, &run)?;
    let curve = published(daemon)?;
    daemon.watch_curve(VM, CurveSwitch { on: false })?;
    eprintln!("mrc: at {DRAM_MIB} MiB: {now:.4} measured");
    let mut found = Vec::new();
    for mib in OTHER_MIB {
        let predicted = now * misses(&curve, mib << 20)? / misses(&curve, DRAM_MIB << 20)?;
        daemon.set_dram(VM, mib)?;
        warm_up(&mut toy, daemon, &warm, mib)?;
        found.push((predicted, measured(&mut toy, daemon, &run)?));
    }
    toy.quit()?;
    daemon.wait_gone(VM, GONE_MAX)?;
    Ok(found)
}

/// Runs until as many pages were read from swap as DRAM holds.
fn warm_up(toy: &mut SteppedToy, daemon: &Daemon, options: &str, mib: u64) -> Result<()> {
    let from = daemon.counter(VM, "pages_in")?;
    for _ in 0..WARM_MAX {
        toy.go(options)?;
        if daemon.counter(VM, "pages_in")? - from >= mib << 8 {
            return Ok(());
        }
    }
    eprintln!("mrc: DRAM of {mib} MiB was not replaced once in {WARM_MAX} warm-ups");
    Ok(())
}

/// Pages from swap per access.
fn measured(toy: &mut SteppedToy, daemon: &Daemon, options: &str) -> Result<f64> {
    let from = daemon.counter(VM, "pages_in")?;
    let done = toy.go(options)?;
    let pages = daemon.counter(VM, "pages_in")? - from;
    ensure!(pages > 0, "nothing was read from swap");
    Ok(pages as f64 / done.ops as f64)
}

fn published(daemon: &Daemon) -> Result<CurveInfo> {
    std::thread::sleep(PUBLISHED);
    daemon.curve(VM)
}

/// Between the curve's points.
fn misses(curve: &CurveInfo, bytes: u64) -> Result<f64> {
    let next = curve.points.iter().position(|point| point.bytes >= bytes).context("the curve has no such size")?;
    let above = curve.points[next];
    let below = curve.points[next.saturating_sub(1)];
    let width = (above.bytes - below.bytes) as f64;
    let part = if width > 0.0 { (bytes - below.bytes) as f64 / width } else { 0.0 };
    Ok(below.misses + (above.misses - below.misses) * part)
}
