//! A VM with two and four times as much RAM as DRAM, against the kernel's swap in a memory
//! cgroup of the same size with its swap file on the same disk.
//!
//! Ours and the peer live side by side and take turns case by case, so that a pair of figures is
//! only seconds apart: the disk of a virtual machine is rarely the same for minutes.

use anyhow::Result;

use super::peers::disk::DirectFile;
use super::peers::swap::{LimitedToy, Swap, page_cluster, set_page_cluster};
use super::report::{Bar, Report};
use super::stepped::SteppedToy;
use super::{Setup, svg};
use crate::daemon::Daemon;
use crate::toy::Done;

const DRAM_MIB: u64 = 512;
/// RAM over DRAM.
const RATIOS: [u64; 2] = [2, 4];
/// The kernel's default first, then values it is known to do better with.
const PAGE_CLUSTERS: [u32; 3] = [3, 5, 0];
/// A quick run leaves the last one out, which has never been the best for a sweep.
const PAGE_CLUSTERS_QUICK: usize = 2;
const CASE_SECONDS: f64 = 4.0;
const CEILING_SECONDS: f64 = 2.0;
const VM: &str = "bench-overcommit";

/// The paper's figure (VMemDirect, section 5.4), against the default page cluster.
const SWEEP_RATIO_MIN: f64 = 3.2;
/// Against the best page cluster.
const SWEEP_BEST_RATIO_MIN: f64 = 2.4;
const SWEEP_CEILING_MIN: f64 = 0.95;
const SWEEP_CPU_MAX: f64 = 1.0 / 3.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Case {
    workload: &'static str,
    mode: &'static str,
}

impl Case {
    fn is_sweep(self) -> bool {
        self.workload == "seq"
    }

    /// Undoes what the case before has left behind, so that each starts from its own steady state.
    fn warm_up(self) -> &'static str {
        match self.workload {
            "seq" => "--workload seq --mode read-write --passes 1 --no-latency",
            "random" => "--workload random --mode read-write --ops 60000 --no-latency",
            _ => "--workload zipf --mode read-write --ops 60000 --no-latency",
        }
    }

    fn measure(self, setup: &Setup) -> String {
        let seconds = setup.seconds(CASE_SECONDS);
        let timing = if self.is_sweep() { " --no-latency" } else { "" };
        format!("--workload {} --mode {} --seconds {seconds}{timing}", self.workload, self.mode)
    }
}

/// One result per round.
#[derive(Debug, Default)]
struct Rounds {
    done: Vec<Done>,
    /// CPU time of the run, the daemon's included.
    cpu_s: Vec<f64>,
}

impl Rounds {
    fn each(&self, value: impl Fn(&Done) -> f64) -> Vec<f64> {
        self.done.iter().map(value).collect()
    }

    fn mib_per_s(&self) -> Vec<f64> {
        self.each(|done| done.mib_per_s)
    }

    fn cpu_s_per_gib(&self) -> Vec<f64> {
        let gib = |done: &Done| done.mib_per_s * done.seconds / 1024.0;
        self.done.iter().zip(&self.cpu_s).map(|(done, cpu)| cpu / gib(done)).collect()
    }

    fn percentile(&self, pick: impl Fn(&crate::toy::Latency) -> f64) -> Vec<f64> {
        self.done.iter().filter_map(|done| done.latency.as_ref()).map(pick).collect()
    }
}

struct CaseResult {
    case: Case,
    ratio: u64,
    ours: Rounds,
    /// In the order of `PAGE_CLUSTERS`.
    kernel: Vec<Rounds>,
    ceiling: Vec<f64>,
}

impl CaseResult {
    /// The page cluster with the best median.
    fn best_cluster(&self) -> usize {
        let median = |index: &usize| super::report::median(&self.kernel[*index].mib_per_s()).unwrap_or(0.0);
        let by_median = |a: &usize, b: &usize| median(a).total_cmp(&median(b));
        (0..self.kernel.len()).max_by(by_median).unwrap_or(0)
    }

    fn label(&self) -> String {
        format!("{} {} {}x", self.case.workload, self.case.mode, self.ratio)
    }
}

fn cases(quick: bool) -> Vec<Case> {
    let workloads: &[&'static str] = if quick { &["seq", "random"] } else { &["seq", "random", "zipf", "phase"] };
    let modes: &[&'static str] = if quick { &["read-write"] } else { &["read-write", "read"] };
    let pairs = workloads.iter().flat_map(|w| modes.iter().map(move |m| (*w, *m)));
    pairs.map(|(workload, mode)| Case { workload, mode }).collect()
}

/// Runs the bench.
///
/// # Errors
/// A side cannot be set up, or finds a wrong page.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("overcommit");
    let disk = DirectFile::new(&setup.dir)?;
    let daemon = if setup.ours { Some(Daemon::start(&setup.dir)?) } else { None };
    let mut results = Vec::new();
    for ratio in RATIOS {
        results.extend(run_ratio(setup, ratio, daemon.as_ref(), &disk)?);
    }
    for result in &results {
        add_figures(&mut report, result);
    }
    Ok((report, plot(&results)))
}

fn run_ratio(setup: &Setup, ratio: u64, daemon: Option<&Daemon>, disk: &DirectFile) -> Result<Vec<CaseResult>> {
    let memory_mib = DRAM_MIB * ratio;
    let swap = Swap::on_file(&setup.dir, (memory_mib << 20) * 2)?;
    let mut kernel = LimitedToy::start(&["--mib", &memory_mib.to_string()], DRAM_MIB)?;
    kernel.toy.fill()?;
    let mut ours = match daemon {
        Some(daemon) => {
            let mut toy = daemon.start_toy(VM, memory_mib, DRAM_MIB, &[])?;
            toy.fill()?;
            Some(toy)
        }
        None => None,
    };
    let clusters = &PAGE_CLUSTERS[..if setup.quick { PAGE_CLUSTERS_QUICK } else { PAGE_CLUSTERS.len() }];
    let empty = |case| CaseResult {
        case,
        ratio,
        ours: Rounds::default(),
        kernel: clusters.iter().map(|_| Rounds::default()).collect(),
        ceiling: Vec::new(),
    };
    let mut results: Vec<CaseResult> = cases(setup.quick).into_iter().map(empty).collect();
    for round in 0..setup.rounds {
        for result in &mut results {
            eprintln!("overcommit: round {} of {}, {}", round + 1, setup.rounds, result.label());
            if result.case.is_sweep() {
                result.ceiling.push(disk.balanced_mib_per_s(setup.seconds(CEILING_SECONDS))?);
            }
            if let (Some(toy), Some(daemon)) = (&mut ours, daemon) {
                toy.go(result.case.warm_up())?;
                measure(setup, result.case, toy, Some(daemon), &mut result.ours)?;
            }
            kernel.toy.go(result.case.warm_up())?;
            for (cluster, rounds) in clusters.iter().zip(&mut result.kernel) {
                let _cluster = set_page_cluster(*cluster)?;
                measure(setup, result.case, &mut kernel.toy, None, rounds)?;
            }
        }
    }
    drop((ours, kernel));
    drop(swap);
    Ok(results)
}

fn measure(
    setup: &Setup,
    case: Case,
    toy: &mut SteppedToy,
    daemon: Option<&Daemon>,
    rounds: &mut Rounds,
) -> Result<()> {
    let before = daemon.map_or(Ok(0.0), Daemon::cpu_s)?;
    let done = toy.go(&case.measure(setup))?;
    let after = daemon.map_or(Ok(0.0), Daemon::cpu_s)?;
    rounds.cpu_s.push(done.cpu_s + after - before);
    rounds.done.push(done);
    Ok(())
}

fn add_figures(report: &mut Report, result: &CaseResult) {
    let label = result.label();
    let ours = &result.ours;
    let default = &result.kernel[0];
    let best_at = result.best_cluster();
    let best = &result.kernel[best_at];
    let best_name = format!("page-cluster {}", PAGE_CLUSTERS[best_at]);
    let read_write = result.case.mode == "read-write";
    if result.case.is_sweep() {
        let bar = |bar| if read_write { bar } else { Bar::None };
        let speed = ours.mib_per_s();
        report.pair(
            &format!("{label}: kernel swap, default"),
            "MiB/s",
            &speed,
            &default.mib_per_s(),
            bar(Bar::AtLeast(SWEEP_RATIO_MIN)),
        );
        report.pair(
            &format!("{label}: kernel swap, best ({best_name})"),
            "MiB/s",
            &speed,
            &best.mib_per_s(),
            bar(Bar::AtLeast(SWEEP_BEST_RATIO_MIN)),
        );
        report.pair(
            &format!("{label}: balanced O_DIRECT"),
            "MiB/s",
            &speed,
            &result.ceiling,
            bar(Bar::AtLeast(SWEEP_CEILING_MIN)),
        );
        report.pair(
            &format!("{label}: CPU, kernel default"),
            "s/GiB",
            &ours.cpu_s_per_gib(),
            &default.cpu_s_per_gib(),
            bar(Bar::AtMost(SWEEP_CPU_MAX)),
        );
        report.pair(
            &format!("{label}: CPU, kernel best"),
            "s/GiB",
            &ours.cpu_s_per_gib(),
            &best.cpu_s_per_gib(),
            Bar::None,
        );
        return;
    }
    // The bars are for uniform random accesses at 2x.
    let held = result.case.workload == "random" && read_write && result.ratio == 2;
    let bar = |bar| if held { bar } else { Bar::None };
    for (name, kernel) in [("default".to_owned(), default), (format!("best ({best_name})"), best)] {
        report.pair(
            &format!("{label}: kernel swap, {name}"),
            "op/s",
            &ours.each(|done| done.ops_per_s),
            &kernel.each(|done| done.ops_per_s),
            bar(Bar::AtLeast(1.0)),
        );
    }
    report.pair(
        &format!("{label}: p50"),
        "us",
        &ours.percentile(|l| l.p50_us),
        &best.percentile(|l| l.p50_us),
        Bar::None,
    );
    report.pair(
        &format!("{label}: p99"),
        "us",
        &ours.percentile(|l| l.p99_us),
        &best.percentile(|l| l.p99_us),
        bar(Bar::AtMost(1.0)),
    );
    report.pair(
        &format!("{label}: p99.9"),
        "us",
        &ours.percentile(|l| l.p999_us),
        &best.percentile(|l| l.p999_us),
        bar(Bar::AtMost(1.0)),
    );
}

fn plot(results: &[CaseResult]) -> String {
    let default = page_cluster().unwrap_or(PAGE_CLUSTERS[0]);
    let groups = results.iter().map(|result| {
        let bars = vec![
            svg::Bar::of(&result.ours.mib_per_s()),
            svg::Bar::of(&result.kernel[0].mib_per_s()),
            svg::Bar::of(&result.kernel[result.best_cluster()].mib_per_s()),
            svg::Bar::of(&result.ceiling),
        ];
        (result.label(), bars)
    });
    svg::bar_chart(&svg::BarChart {
        title: format!("RAM of 2x and 4x {DRAM_MIB} MiB of DRAM, whole pages touched"),
        y_label: "MiB/s (logarithmic)".to_owned(),
        y_scale: svg::Scale::Log,
        series: vec![
            "Pagoda".to_owned(),
            format!("kernel swap, page-cluster {default}"),
            "kernel swap, best page-cluster".to_owned(),
            "balanced O_DIRECT".to_owned(),
        ],
        groups: groups.collect(),
    })
}
