//! How much comes in for a fault: the adaptive choice against each fixed one (VMemDirect, section
//! 4.3), on loads for which different ones are best. Each choice has a daemon and a VM of its own,
//! and they take turns.

use anyhow::Result;
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report, median};
use testkit::stepped::SteppedToy;

use super::{Setup, svg};

const MEMORY_MIB: u64 = 512;
const DRAM_MIB: u64 = 256;
/// Of `pagodad --page-in`; the first is held against the others.
const POLICIES: [&str; 4] = ["adaptive", "page", "chunk", "page-then-chunk"];
const LOADS: [&str; 3] = ["seq", "random", "mixed"];
const WARM_UP_SECONDS: f64 = 0.5;
const SECONDS: f64 = 2.0;
/// The bound for the time of the adaptive choice against the better fixed one.
const TIME_RATIO_MAX: f64 = 1.10;
const VM: &str = "bench-page-in";

struct Side {
    /// Dropped before its daemon.
    toy: SteppedToy,
    daemon: Daemon,
    /// Microseconds for an access, by load and round.
    us: [Vec<f64>; LOADS.len()],
}

impl Side {
    fn start(setup: &Setup, policy: &str) -> Result<Self> {
        let daemon = Daemon::start_with(&setup.dir, policy, &["--page-in", policy])?;
        let mut toy = daemon.start_toy(VM, MEMORY_MIB, DRAM_MIB, &[])?;
        toy.fill()?;
        Ok(Self { toy, daemon, us: Default::default() })
    }

    fn measure(&mut self, setup: &Setup, load: usize) -> Result<()> {
        let name = LOADS[load];
        self.toy.go(&format!("--workload {name} --mode read-write --seconds {WARM_UP_SECONDS} --no-latency"))?;
        let seconds = setup.seconds(SECONDS);
        let done = self.toy.go(&format!("--workload {name} --mode read-write --seconds {seconds} --no-latency"))?;
        self.us[load].push(done.seconds * 1e6 / done.ops as f64);
        Ok(())
    }
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// The daemon fails, or a page is wrong.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("adaptive");
    anyhow::ensure!(setup.ours, "this bench has no peers to measure alone");
    let mut sides = Vec::new();
    let outcome = measure(setup, &mut sides);
    let times: Vec<[Vec<f64>; LOADS.len()]> = sides.iter().map(|side| side.us.clone()).collect();
    // The last first: each daemon puts the host's settings back as it found them.
    while let Some(Side { toy, daemon, .. }) = sides.pop() {
        drop(toy);
        drop(daemon);
    }
    outcome?;
    for (load, name) in LOADS.iter().enumerate() {
        let of = |policy: usize| &times[policy][load];
        let at = |policy: &usize| median(of(*policy)).unwrap_or(f64::INFINITY);
        let best = (1..POLICIES.len()).min_by(|a, b| at(a).total_cmp(&at(b))).unwrap_or(1);
        for (policy, policy_name) in POLICIES.iter().enumerate().skip(1) {
            let is_best = policy == best;
            let label = if is_best { ", the better fixed choice" } else { "" };
            let bar = if is_best { Bar::AtMost(TIME_RATIO_MAX) } else { Bar::None };
            let row = format!("{name}: adaptive against {policy_name}{label}");
            report.pair(&row, "us/acc", of(0), of(policy), bar);
        }
    }
    let groups = LOADS.iter().enumerate().map(|(load, name)| {
        let bars = times.iter().map(|us| svg::Bar::of(&us[load])).collect();
        ((*name).to_owned(), bars)
    });
    let plot = svg::bar_chart(&svg::BarChart {
        title: format!("Time of an access by page-in, {MEMORY_MIB} MiB in {DRAM_MIB} MiB"),
        y_label: "us (logarithmic)".to_owned(),
        y_scale: svg::Scale::Log,
        series: POLICIES.map(str::to_owned).into(),
        groups: groups.collect(),
    });
    Ok((report, plot))
}

fn measure(setup: &Setup, sides: &mut Vec<Side>) -> Result<()> {
    for policy in POLICIES {
        sides.push(Side::start(setup, policy)?);
    }
    for round in 0..setup.rounds {
        eprintln!("adaptive: round {} of {}", round + 1, setup.rounds);
        for load in 0..LOADS.len() {
            for side in &mut *sides {
                side.measure(setup, load)?;
            }
        }
    }
    Ok(())
}
