//! The memory policy: what a plan costs, what a simulated day costs, and the ESX paper's experiments in the simulator.
//!
//! The experiments are the scenarios of the repository, each round with another seed. They say what the policy does with
//! guests that behave as scripted; what real ones do is for the benches with VMs.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_core::chance::Chance;
use pagoda_core::policy::allocate::{Claim, allocate};
use pagoda_core::policy::{
    Balloon, HostSettings, Overhead, Policy, PoolSample, SampleCount, Shares, SwapSpace, VmId, VmSample, VmSettings,
};
use pagoda_core::units::{Bytes, PageCount};
use serde_json::Value;
use testkit::results::report::{Bar, Report};
use testkit::workspace::repository;

use super::Setup;

const VMS: u32 = 1000;
/// Plans in a row that are timed together.
const PLANS: u32 = 20;
const MIB: f64 = (1 << 20) as f64;

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A scenario cannot be run.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("policy");
    let (mut plans, mut targets) = (Vec::new(), Vec::new());
    for round in 0..setup.rounds as u64 {
        let (plan_ms, target_ms) = time_plans(round)?;
        plans.push(plan_ms);
        targets.push(target_ms);
    }
    report.single("plan for 1,000 VMs", "ms", &plans, Bar::AtMost(10.0));
    report.single("of it: targets once", "ms", &targets, Bar::None);
    day(setup, &mut report)?;
    sampling(setup, &mut report)?;
    idle_tax(setup, &mut report)?;
    let plot = reallocation(setup, &mut report)?;
    Ok((report, plot))
}

/// Milliseconds per plan, and per computation of targets, with 1,000 VMs that use twice the pool.
fn time_plans(seed: u64) -> Result<(f64, f64)> {
    let mut chance = Chance::new(seed);
    let gib = |gib| Bytes::from_gib(gib).pages_floor();
    let host = HostSettings::new(gib(4 * u64::from(VMS)));
    let mut policy = Policy::new(host.clone())?;
    let mut samples = Vec::new();
    let mut claims = Vec::new();
    for id in 0..VMS {
        let memory = gib(chance.within(2, 14));
        let shares = Shares::new(chance.within(100, 4000) as u32)?;
        let min = PageCount(memory.0 / 8);
        let swap = SwapSpace::empty(gib(16 * u64::from(VMS)));
        policy.add(VmId(id), VmSettings { min, shares, ..VmSettings::new(memory) }, Overhead::default(), &swap)?;
        let resident = PageCount(memory.0 / 2);
        let watched = policy.start_period(VmId(id), &mut chance).len() as u32;
        let sample = SampleCount { watched, touched: chance.below(100) as u32 };
        let balloon = if id % 3 == 0 { Balloon::Absent } else { Balloon::Inflated(PageCount(0)) };
        let (swapped, shared) = (PageCount(memory.0 / 2), PageCount::ZERO);
        samples.push(VmSample {
            id: VmId(id),
            resident,
            swapped,
            shared,
            is_at_limit: false,
            balloon,
            sample,
            pinned: false,
        });
        let working_set = PageCount(chance.below(memory.0));
        claims.push(Claim { shares, min, ceiling: memory, working_set });
    }
    let used = host.pool.saturating_sub(PageCount(host.pool.0 / 40));
    let start = Instant::now();
    for nth in 0..PLANS {
        let sample = PoolSample { now_ms: u64::from(nth) * 1000, pool: host.pool, used };
        black_box(policy.tick(&sample, &samples));
    }
    let plan_ms = start.elapsed().as_secs_f64() * 1000.0 / f64::from(PLANS);
    let start = Instant::now();
    for _ in 0..PLANS {
        black_box(allocate(&claims, host.tax, host.pool));
    }
    Ok((plan_ms, start.elapsed().as_secs_f64() * 1000.0 / f64::from(PLANS)))
}

/// Runs a scenario of the repository with another seed: the recording.
fn simulate(setup: &Setup, name: &str, seed: usize, plot: Option<&Path>) -> Result<Value> {
    let source = repository().join("scenarios").join(format!("{name}.toml"));
    let text = fs::read_to_string(&source).with_context(|| format!("read {}", source.display()))?;
    let reseed = |line: &str| if line.starts_with("seed =") { format!("seed = {seed}\n") } else { format!("{line}\n") };
    let file = setup.dir.join(format!("{name}-{seed}.toml"));
    fs::write(&file, text.lines().map(reseed).collect::<String>())
        .with_context(|| format!("write {}", file.display()))?;
    let mut command = Command::new(repository().join("target/release/pagoda"));
    command.arg("simulate").arg(&file).args(["--json", "--points"]);
    if let Some(plot) = plot {
        command.arg("--plot").arg(plot);
    }
    let output = command.output().context("run pagoda simulate")?;
    ensure!(output.status.success(), "pagoda simulate {name}: {}", String::from_utf8_lossy(&output.stderr));
    fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
    let recording: Value = serde_json::from_slice(&output.stdout).context("read what pagoda simulate printed")?;
    let broken = recording["violations"].as_object().context("no violations in the recording")?;
    ensure!(broken.values().all(|count| count == 0), "{name}: promises were broken: {broken:?}");
    Ok(recording)
}

/// The mean of a VM's `field` between two times.
fn mean(recording: &Value, vm: usize, field: &str, from_s: u64, until_s: u64) -> Result<f64> {
    let points = recording["vms"][vm]["points"].as_array().context("no points in the recording")?;
    let within = |point: &&Value| point["at_s"].as_u64().is_some_and(|at_s| (from_s..until_s).contains(&at_s));
    let values: Vec<f64> = points.iter().filter(within).filter_map(|point| point[field].as_f64()).collect();
    ensure!(!values.is_empty(), "no points of {field} from {from_s} to {until_s} s");
    Ok(values.iter().sum::<f64>() / values.len() as f64)
}

fn day(setup: &Setup, report: &mut Report) -> Result<()> {
    let file = repository().join("scenarios/day.toml");
    let mut seconds = Vec::new();
    for _ in 0..setup.rounds {
        let start = Instant::now();
        let output = Command::new(repository().join("target/release/pagoda")).arg("simulate").arg(&file).output();
        ensure!(output.context("run pagoda simulate")?.status.success(), "pagoda simulate day failed");
        seconds.push(start.elapsed().as_secs_f64());
    }
    report.single("simulator: a day of 100 VMs", "s", &seconds, Bar::AtMost(10.0));
    Ok(())
}

/// Figure 6: 65 MiB, then 265, then 115 are touched.
fn sampling(setup: &Setup, report: &mut Report) -> Result<()> {
    let (mut up, mut plateau, mut down) = (Vec::new(), Vec::new(), Vec::new());
    for seed in 0..setup.rounds {
        let recording = simulate(setup, "sampling", seed, None)?;
        let error = |from_s, until_s, touched: f64| -> Result<f64> {
            Ok((mean(&recording, 0, "working_set_bytes", from_s, until_s)? / MIB - touched).abs() / touched * 100.0)
        };
        up.push(error(540, 570, 265.0)?);
        plateau.push(error(540, 900, 265.0)?);
        down.push(error(1320, 1440, 115.0)?);
    }
    report.single("figure 6: error two periods after 65 -> 265 MiB", "%", &up, Bar::AtMost(10.0));
    report.single("figure 6: error until the next step", "%", &plateau, Bar::AtMost(10.0));
    report.single("figure 6: error seven minutes after 265 -> 115 MiB", "%", &down, Bar::None);
    Ok(())
}

/// Figure 7: two VMs, a tax of 0, then 75 % from 1200 s on.
fn idle_tax(setup: &Setup, report: &mut Report) -> Result<()> {
    let [mut split, mut resident, mut gain, mut idle, mut throughput] = [const { Vec::new() }; 5];
    for seed in 0..setup.rounds {
        let recording = simulate(setup, "idle-tax", seed, None)?;
        let has = |vm: usize, from_s, until_s| -> Result<f64> {
            let memory = recording["vms"][vm]["memory_bytes"].as_f64().context("no memory in the recording")?;
            Ok((memory - mean(&recording, vm, "balloon_bytes", from_s, until_s)?) / MIB)
        };
        let (before_idle, before) = (has(0, 900, 1200)?, has(1, 900, 1200)?);
        split.push((before_idle / before - 1.0).abs() * 100.0);
        let in_dram = |vm| mean(&recording, vm, "resident_bytes", 900, 1200);
        resident.push((in_dram(0)? / in_dram(1)? - 1.0).abs() * 100.0);
        // By the formula VM 2 would get all it can use, 245 MiB; within a minute.
        let after = mean(&recording, 1, "resident_bytes", 1260, 1320)? / MIB;
        gain.push((after / 245.0 - 1.0).abs() * 100.0);
        idle.push(has(0, 1800, 2400)?);
        let speed = |from_s, until_s| mean(&recording, 1, "speed", from_s, until_s);
        throughput.push((speed(1500, 2400)? / speed(900, 1200)? - 1.0) * 100.0);
    }
    report.single("figure 7: difference of what the two may use, no tax", "%", &split, Bar::AtMost(2.0));
    // The idle one leaves in swap what it does not touch, so it has less in DRAM than it may have.
    report.single("figure 7: difference of what they have in DRAM, no tax", "%", &resident, Bar::None);
    report.single("figure 7: active VM against the formula, a minute after", "%", &gain, Bar::AtMost(5.0));
    report.single("figure 7: left to the idle VM", "MiB", &idle, Bar::None);
    report.single("figure 7: throughput gained by the tax", "%", &throughput, Bar::AtLeast(30.0));
    Ok(())
}

/// Figure 8: five VMs on 60 % too little memory. Its plot.
fn reallocation(setup: &Setup, report: &mut Report) -> Result<String> {
    let [mut calm, mut zero, mut written, mut speed] = [const { Vec::new() }; 4];
    let plot = setup.dir.join("reallocation.svg");
    for seed in 0..setup.rounds {
        let recording = simulate(setup, "reallocation", seed, Some(&plot))?;
        let state = |name: &str| recording["states"][name].as_f64().context("no states in the recording");
        calm.push((state("high")? + state("soft")?) * 100.0);
        let vms = recording["vms"].as_array().context("no VMs in the recording")?;
        let sum = |field: &str| vms.iter().filter_map(|vm| vm[field].as_f64()).sum::<f64>();
        zero.push(sum("zero_dropped_bytes") / MIB);
        written.push(sum("swap_write_bytes") / MIB);
        speed.push(sum("speed_mean") / vms.len() as f64 * 100.0);
    }
    report.single("figure 8: time in high or soft", "%", &calm, Bar::AtLeast(90.0));
    report.single("figure 8: zero pages dropped", "MiB", &zero, Bar::None);
    report.single("figure 8: written to swap", "MiB", &written, Bar::None);
    report.single("figure 8: speed of the guests", "%", &speed, Bar::None);
    let svg = fs::read_to_string(&plot).with_context(|| format!("read {}", plot.display()))?;
    fs::remove_file(&plot).with_context(|| format!("remove {}", plot.display()))?;
    Ok(svg)
}
