//! Everything paged out, then a zipf load with room for all of it: how long until the load runs
//! at 90 % of the speed it had before (VMemDirect, figure 8).
//!
//! Both sides refuse huge pages: after paging, the kernel's memory is in small pages for minutes,
//! and would never be back at the speed it had on huge ones. The `resident` bench is about those.

use std::time::Duration;

use anyhow::{Result, bail};
use testkit::daemon::Daemon;
use testkit::peers::swap::{LimitedToy, Swap};
use testkit::results::report::{Bar, Report};
use testkit::stepped::SteppedToy;
use testkit::toy::{Done, STEADY_SLICES};

use super::{Setup, svg};

const MEMORY_MIB: u64 = 1024;
const SLICE_MS: u64 = 100;
const REFERENCE_SECONDS: f64 = 2.0;
/// The load ends as soon as it is back.
const LOAD_SECONDS_MAX: f64 = 40.0;
/// Each takes up to `LOAD_SECONDS_MAX` on either side.
const ROUNDS_MAX: usize = 3;
/// Recovered means so much of the reference, on average over `STEADY_SLICES`: single slices are
/// noisy where the host has other guests.
const RECOVERED: f64 = 0.9;
const TIME_RATIO_MAX: f64 = 0.5;
const VM: &str = "bench-recover";
/// What may stay in memory and still count as "everything paged out".
const LEFT_FRACTION_MAX: f64 = 0.1;
const PAGE_OUT_MAX: Duration = Duration::from_secs(60);

/// Time to 90 % for each round, and the last round's curve.
#[derive(Debug, Default)]
struct Side {
    seconds: Vec<f64>,
    full_speed: Vec<f64>,
    curve: Vec<[f64; 2]>,
}

impl Side {
    fn push(&mut self, reference: &Done, load: &Done) {
        let full = reference.ops_per_s * SLICE_MS as f64 / 1000.0;
        let seconds = recovery_s(&load.slices, full);
        self.seconds.push(seconds.unwrap_or_else(|| {
            eprintln!("recover: not back after {:.0} s, counted as that", load.seconds);
            load.seconds
        }));
        self.full_speed.push(reference.ops_per_s);
        self.curve = (0..)
            .zip(&load.slices)
            .map(|(index, ops)| [f64::from(index) * SLICE_MS as f64 / 1000.0, *ops as f64 / full * 100.0])
            .collect();
    }
}

/// Seconds from the start to the first slice from which on the load is at full speed.
fn recovery_s(slices: &[u64], full: f64) -> Option<f64> {
    let wanted = RECOVERED * full * STEADY_SLICES as f64;
    let first = slices.windows(STEADY_SLICES).position(|window| window.iter().sum::<u64>() as f64 >= wanted)?;
    Some((first + 1) as f64 * SLICE_MS as f64 / 1000.0)
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A side cannot be set up, does not page out, or does not recover.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("recover");
    let (mut ours, mut kernel) = (Side::default(), Side::default());
    let daemon = if setup.ours { Some(Daemon::start(&setup.dir)?) } else { None };
    let swap = Swap::on_file(&setup.dir, (MEMORY_MIB << 20) * 2)?;
    let rounds = setup.rounds.min(ROUNDS_MAX);
    for round in 0..rounds {
        eprintln!("recover: round {} of {rounds}", round + 1);
        if let Some(daemon) = &daemon {
            measure_ours(daemon, &mut ours)?;
        }
        measure_kernel(&mut kernel)?;
    }
    drop(swap);
    report.pair(
        "time until 90 % of full speed: kernel swap",
        "s",
        &ours.seconds,
        &kernel.seconds,
        if setup.ours { Bar::AtMost(TIME_RATIO_MAX) } else { Bar::None },
    );
    report.pair("full speed", "op/s", &ours.full_speed, &kernel.full_speed, Bar::None);
    let plot = svg::line_chart(&svg::LineChart {
        title: format!("{MEMORY_MIB} MiB paged out, then a zipf(0.99) load"),
        x_label: "seconds".to_owned(),
        y_label: "% of full speed".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series: vec![("Pagoda".to_owned(), ours.curve), ("kernel swap".to_owned(), kernel.curve)],
    });
    Ok((report, plot))
}

fn reference(toy: &mut SteppedToy) -> Result<Done> {
    toy.go(&format!("--workload zipf --mode read-write --seconds {REFERENCE_SECONDS} --no-latency"))
}

/// Until it is as fast as the bench wants to see, or for too long.
fn load(toy: &mut SteppedToy, reference: &Done) -> Result<Done> {
    let stop_at = reference.ops_per_s * RECOVERED;
    toy.go(&format!(
        "--workload zipf --mode read-write --seconds {LOAD_SECONDS_MAX} --no-latency --report-every {SLICE_MS} \
         --stop-at {stop_at}"
    ))
}

fn measure_kernel(side: &mut Side) -> Result<()> {
    // Room for all of it: the limit is not what makes it slow.
    let mut limited = LimitedToy::start(&["--mib", &MEMORY_MIB.to_string(), "--no-huge"], MEMORY_MIB * 2)?;
    limited.toy.fill()?;
    let before = reference(&mut limited.toy)?;
    let allowed = ((MEMORY_MIB << 20) as f64 * LEFT_FRACTION_MAX) as u64;
    let left = limited.cgroup.reclaim_down_to(allowed)?;
    if left > allowed {
        bail!("the kernel still holds {} MiB in memory", left >> 20);
    }
    let after = load(&mut limited.toy, &before)?;
    side.push(&before, &after);
    Ok(())
}

fn measure_ours(daemon: &Daemon, side: &mut Side) -> Result<()> {
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, MEMORY_MIB, &["--no-huge"])?;
    toy.fill()?;
    let before = reference(&mut toy)?;
    // The least limit there is, until nearly everything is out, then all of it back.
    let least_mib = pagoda_api::dram_bytes_min(MEMORY_MIB << 20) >> 20;
    daemon.set_dram(VM, least_mib)?;
    let allowed = ((MEMORY_MIB << 20) as f64 * LEFT_FRACTION_MAX) as u64;
    daemon.wait_for_vm(VM, PAGE_OUT_MAX, |info| info.resident_bytes <= allowed)?;
    daemon.set_dram(VM, MEMORY_MIB)?;
    let after = load(&mut toy, &before)?;
    side.push(&before, &after);
    toy.quit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_needs_steady_slices() {
        for (slices, expected) in [
            (&[100, 100, 100, 100, 50][..], Some(0.1)),
            (&[10, 195, 10, 95, 92, 91, 90, 100][..], Some(0.2)),
            (&[10, 20, 95, 95, 95, 95][..], None),
            (&[][..], None),
        ] {
            assert_eq!(recovery_s(slices, 100.0), expected, "{slices:?}");
        }
    }
}
