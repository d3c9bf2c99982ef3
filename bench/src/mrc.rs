//! Miss-ratio curves by sampling, against an exact replay of the same trace: error and cost; then predictions for running
//! VMs ([`super::predict`]).

use std::time::Instant;

use anyhow::Result;
use pagoda_core::policy::mrc::workloads::{WORKLOADS, Workload};
use pagoda_core::policy::mrc::{Curve, Mrc, WATCHED_MAX_DEFAULT};
use pagoda_core::units::{Bytes, PageCount, PageIdx};
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};

use super::Setup;
use super::svg;

const MEMORY: Bytes = Bytes::from_gib(1);
/// Accesses per page of the memory: enough that first uses do not make the curve.
const ACCESSES_PER_PAGE: usize = 12;
/// What the curve may be off, on average over all sizes.
const ERROR_MAX: f64 = 0.05;

struct Run {
    curve: Curve,
    ns_per_access: f64,
}

fn replay(trace: &[PageIdx], memory: PageCount, watched_max: usize, seed: u64) -> Run {
    let start = Instant::now();
    let mut mrc = Mrc::new(memory, watched_max, seed);
    trace.iter().for_each(|page| mrc.access(*page));
    let ns_per_access = start.elapsed().as_nanos() as f64 / trace.len().max(1) as f64;
    Run { curve: mrc.curve(), ns_per_access }
}

/// Mean and largest difference over all sizes.
fn errors(exact: &Curve, sampled: &Curve) -> (f64, f64) {
    let pairs = exact.points().zip(sampled.points());
    let differences: Vec<f64> = pairs.map(|((_, exact), (_, sampled))| (exact - sampled).abs()).collect();
    let largest = differences.iter().copied().fold(0.0, f64::max);
    (differences.iter().sum::<f64>() / differences.len().max(1) as f64, largest)
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// None of its own.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("mrc");
    let memory = MEMORY.pages_floor();
    let accesses =
        memory.bytes().pages_floor().0 as usize * if setup.quick { ACCESSES_PER_PAGE / 4 } else { ACCESSES_PER_PAGE };
    let mut series = Vec::new();
    for workload in WORKLOADS {
        let [mut mean, mut largest, mut ours, mut peer] = [const { Vec::new() }; 4];
        for round in 0..setup.rounds as u64 {
            let trace = workload.trace(memory.0, accesses, round);
            let exact = replay(&trace, memory, usize::MAX, 0);
            let sampled = replay(&trace, memory, WATCHED_MAX_DEFAULT, round);
            let (round_mean, round_largest) = errors(&exact.curve, &sampled.curve);
            mean.push(round_mean);
            largest.push(round_largest);
            ours.push(sampled.ns_per_access);
            peer.push(exact.ns_per_access);
            if round == 0 {
                series.push(line(workload, "exact", &exact.curve));
                series.push(line(workload, "sampled", &sampled.curve));
            }
        }
        let name = workload.name();
        report.single(&format!("{name}: mean error of the miss ratio"), "", &mean, Bar::AtMost(ERROR_MAX));
        report.single(&format!("{name}: largest error at any size"), "", &largest, Bar::None);
        report.pair(&format!("{name}: cost against the exact replay"), "ns", &ours, &peer, Bar::None);
    }
    // Six colours are told apart; the two that are alike say the least.
    series.retain(|(name, _): &(String, Vec<[f64; 2]>)| !name.starts_with(Workload::Phases.name()));
    let plot = svg::line_chart(&svg::LineChart {
        title: "Miss ratio by memory: sampled and exact".to_owned(),
        x_label: "memory, MiB".to_owned(),
        y_label: "miss ratio".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series,
    });
    super::predict::at_a_cap(setup, &Daemon::start(&setup.dir)?, &mut report)?;
    // Ages are looked at where pages are mapped one by one.
    let small = Daemon::start_with(&setup.dir, "small", &["--large-folios", "off"])?;
    super::predict::with_all_memory(setup, &small, &mut report)?;
    Ok((report, plot))
}

fn line(workload: Workload, kind: &str, curve: &Curve) -> (String, Vec<[f64; 2]>) {
    let point = |(size, ratio): (PageCount, f64)| [size.bytes().0 as f64 / f64::from(1 << 20), ratio];
    (format!("{}, {kind}", workload.name()), curve.points().step_by(10).map(point).collect())
}
