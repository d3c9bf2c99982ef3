//! Everything in DRAM: a VM under Pagoda must run as if Pagoda were not there, before any pressure
//! and again soon after it. The peer is plain memory with transparent huge pages. Both are pinned to the same CPU.
//!
//! Beside it what Pagoda costs a VM that does nothing (`idle`).

use std::time::{Duration, Instant};

use anyhow::Result;
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};
use testkit::stepped::{SteppedToy, toy_command};

use super::{Setup, svg};

const MEMORY_MIB: u64 = 1024;
/// Pressure of 4x for the phase in between.
const PRESSED_MIB: u64 = MEMORY_MIB / 4;
const CASE_SECONDS: f64 = 2.0;
/// Both sides take turns so often within a case: a host's other guests come and go within a second.
const TURNS: usize = 4;
const SPEED_MIN: f64 = 0.97;
/// What a phase of pressure may take until the VM is at its cap.
const PRESS_MAX: Duration = Duration::from_secs(60);
/// The time for recovery after the pressure has ended.
const SETTLE: Duration = Duration::from_secs(10);
const VM: &str = "bench-resident";
const WORKLOADS: [&str; 2] = ["seq", "random"];

/// MiB/s for each workload and round.
#[derive(Debug, Default)]
struct Speeds {
    by_workload: [Vec<f64>; WORKLOADS.len()],
}

/// Measures toys in turns, each with its speeds.
fn measure(setup: &Setup, sides: &mut [(&mut SteppedToy, &mut Speeds)]) -> Result<()> {
    let seconds = setup.seconds(CASE_SECONDS) / TURNS as f64;
    for (index, workload) in WORKLOADS.iter().enumerate() {
        let mut sums = vec![0.0; sides.len()];
        for _ in 0..TURNS {
            for ((toy, _), sum) in sides.iter_mut().zip(&mut sums) {
                let run = format!("--workload {workload} --mode read-write --seconds {seconds} --no-latency");
                *sum += toy.go(&run)?.mib_per_s;
            }
        }
        for ((_, speeds), sum) in sides.iter_mut().zip(sums) {
            speeds.by_workload[index].push(sum / TURNS as f64);
        }
    }
    Ok(())
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A side cannot be set up, or finds a wrong page.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("resident");
    let (mut before, mut after) = (Speeds::default(), Speeds::default());
    let (mut plain_before, mut plain_after) = (Speeds::default(), Speeds::default());
    let daemon = if setup.ours { Some(Daemon::start(&setup.dir)?) } else { None };
    for round in 0..setup.rounds {
        eprintln!("resident: round {} of {}", round + 1, setup.rounds);
        let mut plain = SteppedToy::start(&toy_command(&["--pin", "--mib", &MEMORY_MIB.to_string()])?)?;
        plain.fill()?;
        let mut ours = match &daemon {
            Some(daemon) => {
                let mut toy = daemon.start_toy(VM, MEMORY_MIB, MEMORY_MIB, &["--pin"])?;
                toy.fill()?;
                Some((toy, daemon))
            }
            None => None,
        };
        match &mut ours {
            Some((toy, daemon)) => {
                measure(setup, &mut [(toy, &mut before), (&mut plain, &mut plain_before)])?;
                press_and_release(daemon, toy)?;
                measure(setup, &mut [(toy, &mut after), (&mut plain, &mut plain_after)])?;
            }
            None => {
                measure(setup, &mut [(&mut plain, &mut plain_before)])?;
                measure(setup, &mut [(&mut plain, &mut plain_after)])?;
            }
        }
        plain.quit()?;
    }
    let held = if setup.ours { Bar::AtLeast(SPEED_MIN) } else { Bar::None };
    for (index, workload) in WORKLOADS.iter().enumerate() {
        for (phase, ours, plain) in
            [("before pressure", &before, &plain_before), ("after pressure", &after, &plain_after)]
        {
            let (ours, plain) = (&ours.by_workload[index], &plain.by_workload[index]);
            let name = format!("{workload}, {phase}: plain huge pages");
            report.pair(&name, "MiB/s", ours, plain, held);
        }
    }
    if let Some(daemon) = &daemon {
        super::idle::measure(setup, daemon, &mut report)?;
    }
    let group = |name: &str, ours: &Speeds, plain: &Speeds| {
        let bars = |index: usize| vec![svg::Bar::of(&ours.by_workload[index]), svg::Bar::of(&plain.by_workload[index])];
        WORKLOADS
            .iter()
            .enumerate()
            .map(|(index, workload)| (format!("{workload}, {name}"), bars(index)))
            .collect::<Vec<_>>()
    };
    let mut groups = group("before pressure", &before, &plain_before);
    groups.extend(group("after pressure", &after, &plain_after));
    let plot = svg::bar_chart(&svg::BarChart {
        title: format!("{MEMORY_MIB} MiB, all of it in DRAM"),
        y_label: "MiB/s of pages touched".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["Pagoda".to_owned(), "plain memory, huge pages".to_owned()],
        groups,
    });
    Ok((report, plot))
}

/// Pressure of 4x with a load on it, then none; leaves the time the issue allows.
fn press_and_release(daemon: &Daemon, toy: &mut SteppedToy) -> Result<()> {
    daemon.set_dram(VM, PRESSED_MIB)?;
    daemon.wait_for_vm(VM, PRESS_MAX, |info| info.resident_bytes <= PRESSED_MIB << 20)?;
    toy.go("--workload random --mode read-write --ops 50000 --no-latency")?;
    daemon.set_dram(VM, MEMORY_MIB)?;
    let released = Instant::now();
    // The load goes on, as a VM's would; what it does in this time is not counted.
    let seconds = SETTLE.as_secs_f64() - released.elapsed().as_secs_f64();
    toy.go(&format!("--workload random --mode read-write --seconds {seconds} --no-latency"))?;
    Ok(())
}
