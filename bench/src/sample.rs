//! The working set by sampling, on the toucher of ESX figure 6: memory in use steps from 50 to 250 to 100 MB.
//!
//! The estimator is the daemon's; the bench begins its periods, which are shorter than in operation but have as many
//! pages: what is touched in a period is the same. Costs are of periods of 30 s. The paper gives figure 6 as a drawing without
//! numbers; what its text says of it are the bars here.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use pagoda_api::CurveSwitch;
use pagoda_core::chance::Chance;
use pagoda_core::policy::SampleCount;
use pagoda_core::policy::settings::SAMPLING_DEFAULT;
use pagoda_core::policy::working_set::Estimator;
use pagoda_core::units::{Bytes, PageIdx};
use testkit::cpu::threads_cpu_s;
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};
use testkit::stepped::SteppedToy;

use super::{Setup, svg};

/// The paper's toucher ran in a VM of 256 MB; a little more, so that untouched memory is left at the top.
const MEMORY_MIB: u64 = 320;
const VM: &str = "bench-sample";
/// Periods of each step.
const STEPS: [(u64, usize); 3] = [(50, 6), (250, 6), (100, 16)];
/// What the estimate may be off two periods after a step up.
const ERROR_PERCENT_MAX: f64 = 10.0;
const COST_PERCENT_MAX: f64 = 0.5;
/// How long a zap may take before the bench gives up: a guard, not a claim.
const ZAPPED_MAX: Duration = Duration::from_secs(120);
/// Length of a measurement of costs: two periods.
const COST_S: f64 = 60.0;

/// How the VM is served.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// A cap just below its memory: nothing is paged out, all faults are the sample's.
    Armed,
    Unarmed,
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Mode::Armed => "armed",
            Mode::Unarmed => "unarmed",
        }
    }

    const fn dram_mib(self) -> u64 {
        match self {
            Mode::Armed => MEMORY_MIB - 16,
            Mode::Unarmed => MEMORY_MIB,
        }
    }
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A VM cannot be started; a sample is lost.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let daemon = Daemon::start(&setup.dir)?;
    let mut report = setup.report("sample");
    let mut series = vec![("touched".to_owned(), Vec::new())];
    for mode in [Mode::Armed, Mode::Unarmed] {
        let (mut up, mut up_first, mut rises) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..setup.rounds {
            eprintln!("sample: {}, round {}", mode.name(), round + 1);
            let steps = follow(&daemon, mode, round as u64)?;
            let at = STEPS[0].1;
            up_first.push(error_percent(&steps[at]));
            up.push(error_percent(&steps[at + 1]));
            // Down: from one period to the next it never rises.
            let down = &steps[at + STEPS[1].1 - 1..];
            let highest = down.windows(2).map(|pair| pair[1].estimate_mib - pair[0].estimate_mib).fold(0.0, f64::max);
            rises.push(highest);
            if round == 0 {
                if mode == Mode::Armed {
                    series[0].1 = points(&steps, |step| step.touched_mib);
                }
                series.push((format!("estimate, {}", mode.name()), points(&steps, |step| step.estimate_mib)));
            }
        }
        let name = mode.name();
        report.single(&format!("{name}: error one period after 50 -> 250 MiB"), "%", &up_first, Bar::None);
        report.single(
            &format!("{name}: error two periods after 50 -> 250 MiB"),
            "%",
            &up,
            Bar::AtMost(ERROR_PERCENT_MAX),
        );
        report.single(&format!("{name}: greatest rise while it decays to 100 MiB"), "MiB", &rises, Bar::AtMost(0.0));
    }
    for mode in [Mode::Armed, Mode::Unarmed] {
        cost(setup, &daemon, mode, &mut report)?;
    }
    let plot = svg::line_chart(&svg::LineChart {
        title: "Active memory: touched and estimated (ESX figure 6)".to_owned(),
        x_label: "sampling periods".to_owned(),
        y_label: "MiB".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series,
    });
    Ok((report, plot))
}

/// What was touched and estimated in one period.
struct Step {
    touched_mib: f64,
    estimate_mib: f64,
}

fn error_percent(step: &Step) -> f64 {
    (step.estimate_mib - step.touched_mib).abs() / step.touched_mib * 100.0
}

fn points(steps: &[Step], value: impl Fn(&Step) -> f64) -> Vec<[f64; 2]> {
    steps.iter().enumerate().map(|(nth, step)| [nth as f64 + 1.0, value(step)]).collect()
}

fn start(daemon: &Daemon, mode: Mode) -> Result<SteppedToy> {
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, mode.dram_mib(), &[])?;
    toy.map()?;
    // All of it was in use once, as in a VM that runs for a while.
    toy.touch(&format!("--mib {} --in-order", mode.dram_mib() - 16))?;
    ensure!(daemon.vm(VM)?.armed == (mode == Mode::Armed), "the VM is not {}", mode.name());
    Ok(toy)
}

/// Leads the toucher through its steps.
fn follow(daemon: &Daemon, mode: Mode, seed: u64) -> Result<Vec<Step>> {
    let mut toy = start(daemon, mode)?;
    let mut chance = Chance::new(seed);
    let memory = Bytes(MEMORY_MIB << 20).pages_floor();
    let mut estimator = Estimator::new(memory, SAMPLING_DEFAULT);
    let mut steps = Vec::new();
    for (touched_mib, periods) in STEPS {
        for _ in 0..periods {
            begin(daemon, &estimator.start_period(&mut chance))?;
            toy.touch(&format!("--mib {touched_mib}"))?;
            let info = daemon.sampled(VM)?;
            estimator.observe(SampleCount { watched: info.watched, touched: info.touched });
            // What is known at the end of a period is the next one's start.
            let mut ended = estimator.clone();
            ended.start_period(&mut chance);
            let estimate_mib = ended.estimate().working_set.bytes().0 as f64 / f64::from(1 << 20);
            steps.push(Step { touched_mib: touched_mib as f64, estimate_mib });
        }
    }
    toy.quit()?;
    daemon.wait_gone(VM, ZAPPED_MAX)?;
    Ok(steps)
}

/// Begins a period and waits until all pages are watched.
fn begin(daemon: &Daemon, pages: &[PageIdx]) -> Result<()> {
    let wanted = pages.len() as u32;
    daemon.sample(VM, pages.iter().map(|page| page.0).collect())?;
    let start = Instant::now();
    loop {
        let info = daemon.sampled(VM)?;
        if info.watched == wanted {
            return Ok(());
        }
        if start.elapsed() > ZAPPED_MAX {
            bail!("only {} of {wanted} pages are watched", info.watched);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// CPU time of sampling at the default rate, on both sides, while the guest touches all of it all the time.
fn cost(setup: &Setup, daemon: &Daemon, mode: Mode, report: &mut Report) -> Result<()> {
    let mut toy = start(daemon, mode)?;
    let period = Duration::from_secs(u64::from(SAMPLING_DEFAULT.period_s));
    let memory = Bytes(MEMORY_MIB << 20).pages_floor();
    let mut chance = Chance::new(1);
    let mut measure = |daemon: &Daemon, samples: bool, seconds: f64| -> Result<f64> {
        let start = Instant::now();
        // The daemon's and the agent's time. The guest's own faults are timed apart: its thread is busy anyway.
        let used = |toy: &SteppedToy| -> Result<f64> {
            Ok(threads_cpu_s(daemon.pid(), "")? + threads_cpu_s(toy.pid(), "pagoda-agent")?)
        };
        let before = used(&toy)?;
        let mut next = Duration::ZERO;
        while start.elapsed().as_secs_f64() < seconds {
            if samples && start.elapsed() >= next {
                next += period;
                let pages = Estimator::new(memory, SAMPLING_DEFAULT).start_period(&mut chance);
                daemon.sample(VM, pages.iter().map(|page| page.0).collect())?;
            }
            toy.touch(&format!("--mib {} --repeat 20", mode.dram_mib() - 16))?;
        }
        Ok((used(&toy)? - before) / start.elapsed().as_secs_f64() * 100.0)
    };
    let seconds = setup.seconds(COST_S);
    let idle = measure(daemon, false, seconds)?;
    let sampled = measure(daemon, true, seconds)?;
    let name = mode.name();
    report.single(&format!("{name}: CPU without sampling"), "% core", &[idle], Bar::None);
    report.single(
        &format!("{name}: CPU of sampling 100 pages in 30 s"),
        "% core",
        &[(sampled - idle).max(0.0)],
        Bar::AtMost(COST_PERCENT_MAX),
    );
    if mode == Mode::Armed {
        daemon.watch_curve(VM, CurveSwitch { on: true })?;
        measure(daemon, true, 10.0)?;
        let uses = daemon.counter(VM, "watched_uses")?;
        let start = Instant::now();
        let both = measure(daemon, true, seconds)?;
        let uses = (daemon.counter(VM, "watched_uses")? - uses) as f64 / start.elapsed().as_secs_f64();
        report.single(
            "armed: CPU of sampling and the curve",
            "% core",
            &[(both - idle).max(0.0)],
            Bar::AtMost(COST_PERCENT_MAX),
        );
        report.single("armed: uses noticed, with the curve", "1/s", &[uses], Bar::None);
    }
    toy.quit()?;
    daemon.wait_gone(VM, ZAPPED_MAX)
}
