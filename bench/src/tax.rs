//! The idle memory tax with real VMs (figure 7 of the ESX paper): two toy VMMs of equal shares in a pool that is too
//! small for both, one of them idle; without a tax, then with one of 75 %.
//!
//! What the active one should have then is computed here, by the paper's formula, twice: from what the toys do (the active one
//! uses all of its memory, the idle one nothing), against the DRAM that both really have; and from the working sets that the
//! daemon has estimated, against its targets.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_api::{HostPatch, VmInfo};
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};
use testkit::stepped::SteppedToy;

use super::{Setup, svg};

const MIB: f64 = (1 << 20) as f64;
/// More than the paper's 256 MB: with a quite idle peer the formula gives the active VM 290 MiB of what is left for both,
/// and a VM that has all its memory shows only that it has.
const MEMORY_MIB: u64 = 320;
/// What is kept free and what the toys cost beside their RAM is in it: some 360 MiB are left for both.
const POOL_MIB: u64 = 400;
const TAX_PER_MILLE: u16 = 750;
/// Of figure 7, so that the estimates have settled within a bench's patience.
const SAMPLE_PERIOD_S: u32 = 5;
const SAMPLE_PAGES: u32 = 400;
/// The slow average of the idle VM's working set (gain 1/8) has forgotten that it was filled.
const SETTLE_SECONDS: f64 = 150.0;
/// The bar: so long after the change the active VM has what the formula gives it.
const CHANGE_SECONDS: f64 = 60.0;
const MEASURE_SECONDS: f64 = 20.0;
const ROUNDS_MAX: usize = 3;
/// The paper's Dbench VM had 179 MB and gained 64 MB; its throughput rose by over 30 %.
const PAPER_MIB: [f64; 2] = [179.0, 243.0];
const IDLE: &str = "bench-tax-idle";
const ACTIVE: &str = "bench-tax-active";

/// What one round saw, before the change and after it.
struct Round {
    /// Targets of the idle VM and of the active one, MiB.
    targets: [[f64; 2]; 2],
    /// DRAM of the idle VM and of the active one, MiB.
    dram: [[f64; 2]; 2],
    /// What the formula gives the active one after the change by the daemon's estimates, MiB.
    formula: f64,
    ops_per_s: [f64; 2],
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// The daemon or a toy refuses; a page was wrong.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("tax");
    let rounds = (0..setup.rounds.min(ROUNDS_MAX))
        .map(|nth| round(setup).with_context(|| format!("round {}", nth + 1)))
        .collect::<Result<Vec<Round>>>()?;
    let each = |pick: &dyn Fn(&Round) -> f64| rounds.iter().map(pick).collect::<Vec<f64>>();
    let apart = |pair: &[f64; 2]| (pair[0] / pair[1] - 1.0).abs() * 100.0;
    report.single("DRAM of the two, difference, no tax", "%", &each(&|round| apart(&round.dram[0])), Bar::AtMost(2.0));
    report.single("difference of the targets, no tax", "%", &each(&|round| apart(&round.targets[0])), Bar::AtMost(2.0));
    let has = each(&|round| round.dram[1][1]);
    let due_by_truth = each(&|round| balance(round.dram[1].iter().sum(), [0.0, MEMORY_MIB as f64], price_of_idle()));
    report.pair("DRAM of the active VM a minute after: by the formula", "MiB", &has, &due_by_truth, Bar::None);
    let off: Vec<f64> = has.iter().zip(&due_by_truth).map(|(has, due)| (has / due - 1.0).abs() * 100.0).collect();
    report.single("DRAM of the active VM against the formula", "%", &off, Bar::AtMost(5.0));
    let gained = each(&|round| round.targets[1][1] - round.targets[0][1]);
    let due = each(&|round| round.formula - round.targets[0][1]);
    let error: Vec<f64> = gained.iter().zip(&due).map(|(gained, due)| (gained / due - 1.0).abs() * 100.0).collect();
    report.pair(
        "gain of the active VM's target a minute after: by the formula and the daemon's estimates",
        "MiB",
        &gained,
        &due,
        Bar::None,
    );
    report.single(
        "gain of the active VM's target against the formula and the daemon's estimates",
        "%",
        &error,
        Bar::AtMost(5.0),
    );
    let [before, after] = [0, 1].map(|at: usize| each(&|round| round.ops_per_s[at]));
    report.pair("throughput of the active VM, taxed: untaxed", "op/s", &after, &before, Bar::AtLeast(1.3));
    let target = |vm: usize, at: usize| svg::Bar::of(&each(&|round| round.targets[at][vm]));
    let group =
        |name: &str, at: usize| (name.to_owned(), vec![target(0, at), target(1, at), svg::Bar::of(&[PAPER_MIB[at]])]);
    let plot = svg::bar_chart(&svg::BarChart {
        title: "Idle memory tax: targets of two VMs with equal shares (ESX, figure 7)".to_owned(),
        y_label: "MiB".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["idle".to_owned(), "active".to_owned(), "active, in the paper".to_owned()],
        groups: vec![group("no tax", 0), group("75 % tax", 1)],
    });
    Ok((report, plot))
}

fn round(setup: &Setup) -> Result<Round> {
    let config = setup.dir.join(format!("tax-{}.toml", std::process::id()));
    let _remove = testkit::undo::Guard::new(testkit::undo::Undo::File { path: config.clone() })?;
    let text = format!(
        "[policy]\npool = \"{POOL_MIB}M\"\nidle_tax = \"0%\"\nsample_pages = {SAMPLE_PAGES}\n\
         sample_period_s = {SAMPLE_PERIOD_S}\n"
    );
    fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
    let daemon = Daemon::start_with(&setup.dir, "tax", &["--config", config.to_str().context("a path in UTF-8")?])?;
    let mut idle = daemon.start_toy(IDLE, MEMORY_MIB, MEMORY_MIB, &[])?;
    let mut active = daemon.start_toy(ACTIVE, MEMORY_MIB, MEMORY_MIB, &[])?;
    idle.fill()?;
    active.fill()?;
    work(&mut active, setup.seconds(SETTLE_SECONDS))?;
    let untaxed = work(&mut active, setup.seconds(MEASURE_SECONDS))?;
    let before = [daemon.vm(IDLE)?, daemon.vm(ACTIVE)?];

    daemon.set_host(&HostPatch { idle_tax: Some(TAX_PER_MILLE), ..HostPatch::default() })?;
    let changed = Instant::now();
    active.start_run(&words(CHANGE_SECONDS))?;
    std::thread::sleep(Duration::from_secs_f64(CHANGE_SECONDS).saturating_sub(changed.elapsed()));
    let after = [daemon.vm(IDLE)?, daemon.vm(ACTIVE)?];
    let done = active.finish_run()?;
    anyhow::ensure!(done.bad_pages == 0, "{} wrong pages", done.bad_pages);
    let taxed = work(&mut active, setup.seconds(MEASURE_SECONDS))?;
    // The idle one still has all it was filled with.
    idle.go("--workload seq --mode read --passes 1 --no-latency")?;
    idle.quit()?;
    active.quit()?;
    let targets = [targets(&before)?, targets(&after)?];
    let dram = [&before, &after].map(|vms| [0, 1].map(|at: usize| vms[at].resident_bytes as f64 / MIB));
    Ok(Round { targets, dram, formula: due(&after, targets[1][0] + targets[1][1])?, ops_per_s: [untaxed, taxed] })
}

fn words(seconds: f64) -> String {
    format!("--workload random --mode read-write --seconds {seconds} --no-latency")
}

fn work(toy: &mut SteppedToy, seconds: f64) -> Result<f64> {
    Ok(toy.go(&words(seconds))?.ops_per_s)
}

/// The targets of both VMs in MiB, the idle one's first.
fn targets(vms: &[VmInfo; 2]) -> Result<[f64; 2]> {
    let target = |vm: &VmInfo| vm.policy.target_bytes.map(|bytes| bytes as f64 / MIB);
    Ok([target(&vms[0]).context("no target of the idle VM")?, target(&vms[1]).context("no target of the active VM")?])
}

/// What the active VM gets of `sum_mib` by the paper's formula (section 5.2): with equal shares, P (f + k (1 - f)) of
/// both are equal, k = 1 / (1 - tax), unless one has all its memory.
fn due(vms: &[VmInfo; 2], sum_mib: f64) -> Result<f64> {
    let working_set = |vm: &VmInfo| vm.policy.active_bytes.map(|bytes| bytes as f64 / MIB);
    let idle_ws = working_set(&vms[0]).context("no working set of the idle VM")?;
    let active_ws = working_set(&vms[1]).context("no working set of the active VM")?;
    Ok(balance(sum_mib, [idle_ws, active_ws], price_of_idle()))
}

/// k of the formula: what an idle page costs, where a used one costs 1.
fn price_of_idle() -> f64 {
    1.0 / (1.0 - f64::from(TAX_PER_MILLE) / 1000.0)
}

fn balance(sum: f64, [idle_ws, active_ws]: [f64; 2], k: f64) -> f64 {
    let price = |pages: f64, used: f64| pages.min(used) + k * (pages - pages.min(used));
    let most = sum.min(MEMORY_MIB as f64);
    let (mut low, mut high) = (0.0, most);
    // Both prices rise with size, so the active one's share is where they meet.
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if price(middle, active_ws) < price(sum - middle, idle_ws) { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula() {
        let check = |sum: f64, sets: [f64; 2], k: f64, expected: f64| {
            let found = balance(sum, sets, k);
            assert!((found - expected).abs() < 0.01, "{found} instead of {expected}");
        };
        // No tax: an equal split, whatever is used.
        check(300.0, [0.0, 200.0], 1.0, 150.0);
        // P = 4 (300 - P), all of the one and nothing of the other used.
        check(300.0, [0.0, 300.0], 4.0, 240.0);
        // P = 25 + 4 (300 - P - 25).
        check(300.0, [25.0, 300.0], 4.0, 225.0);
        // Nobody gets more than its memory.
        check(450.0, [0.0, 320.0], 4.0, 320.0);
    }
}
