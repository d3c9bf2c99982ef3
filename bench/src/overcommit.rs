//! A VM with two and four times as much RAM as DRAM, against the kernel's swap in a memory
//! cgroup of the same size with its swap file on the same disk.
//!
//! Ours and the peer live side by side and take turns case by case, so that a pair of figures is
//! only seconds apart: the disk of a virtual machine is rarely the same for minutes. Both toys are
//! pinned to the same CPU, as vCPUs are where latency matters: how far that CPU is from the disk's
//! interrupts is a quarter of a read's time on some machines, and would be chance.

use anyhow::Result;
use pagoda_api::types::counter;
use testkit::daemon::Daemon;
use testkit::peers::disk::DirectFile;
use testkit::peers::swap::{LimitedToy, Swap, page_cluster, set_page_cluster};
use testkit::results::report::{Bar, NO_VALUE, Report};
use testkit::stepped::{OomKilled, SteppedToy};
use testkit::toy::Done;

use super::{Setup, svg};

const DRAM_MIB: u64 = 512;
/// How many times as much RAM as DRAM the guest has.
const RATIOS: [u64; 2] = [2, 4];
/// The kernel's default first, then values it is known to do better with.
const PAGE_CLUSTERS: [u32; 3] = [3, 5, 0];
/// A quick run and rows without a bar leave the last one out.
const PAGE_CLUSTERS_FEW: usize = 2;
/// Of cases with bars; the others are shorter and have fewer rounds and peers.
const CASE_SECONDS: f64 = 3.0;
const INFO_SECONDS: f64 = 2.0;
const INFO_ROUNDS: usize = 2;
/// Of each load of the ceiling, before and again after ours: shorter ones catch the disk at a bad moment.
const CEILING_SECONDS: f64 = 1.0;
/// Swap traffic above the ceiling by more than noise means that the ceiling was measured too low, and then the bar against
/// it says nothing.
const CEILING_DOUBT: f64 = 1.1;
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

    /// Whether a bar of the issue is about it.
    fn is_held(self, ratio: u64) -> bool {
        match self.workload {
            "seq" => self.mode == "read-write",
            "random" => ratio == 2,
            _ => false,
        }
    }

    fn measure(self, setup: &Setup, ratio: u64) -> String {
        let seconds = setup.seconds(if self.is_held(ratio) { CASE_SECONDS } else { INFO_SECONDS });
        let timing = if self.is_sweep() { " --no-latency" } else { "" };
        format!("--workload {} --mode {} --seconds {seconds}{timing}", self.workload, self.mode)
    }
}

/// One result per round.
#[derive(Debug, Default)]
struct Rounds {
    /// `None` where the kernel killed it.
    done: Vec<Option<Done>>,
    /// CPU time of the run, the daemon's included.
    cpu_s: Vec<f64>,
    /// Read from and written to swap, as the daemon counts it: less than what is touched where the replacement has hits.
    swap_mib_per_s: Vec<f64>,
}

impl Rounds {
    fn each(&self, value: impl Fn(&Done) -> f64) -> Vec<f64> {
        self.done.iter().map(|done| done.as_ref().map_or(NO_VALUE, &value)).collect()
    }

    /// What to say of those in which the kernel killed it.
    fn killed(&self) -> Option<String> {
        let killed = self.done.iter().filter(|done| done.is_none()).count();
        (killed > 0).then(|| format!("peer out of memory and killed in {killed} of {} rounds", self.done.len()))
    }

    fn mib_per_s(&self) -> Vec<f64> {
        self.each(|done| done.mib_per_s)
    }

    fn cpu_s_per_gib(&self) -> Vec<f64> {
        let gib = |done: &Done| done.mib_per_s * done.seconds / 1024.0;
        let of = |done: &Option<Done>, cpu: &f64| done.as_ref().map_or(NO_VALUE, |done| cpu / gib(done));
        self.done.iter().zip(&self.cpu_s).map(|(done, cpu)| of(done, cpu)).collect()
    }

    fn percentile(&self, pick: impl Fn(&testkit::toy::Latency) -> f64) -> Vec<f64> {
        self.each(|done| done.latency.as_ref().map_or(NO_VALUE, &pick))
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
        let median = |index: &usize| testkit::results::report::median(&self.kernel[*index].mib_per_s()).unwrap_or(0.0);
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

/// Runs this bench, and returns its figures and their plot as SVG.
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
    drop(disk);
    for result in &results {
        add_figures(&mut report, result);
    }
    if setup.wants("guest") {
        super::guest::measure(setup, daemon.as_ref(), &mut report)?;
    }
    Ok((report, plot(&results)))
}

fn run_ratio(setup: &Setup, ratio: u64, daemon: Option<&Daemon>, disk: &DirectFile) -> Result<Vec<CaseResult>> {
    let memory_mib = DRAM_MIB * ratio;
    let empty = |case: Case| CaseResult {
        case,
        ratio,
        ours: Rounds::default(),
        kernel: clusters(setup, case, ratio).iter().map(|_| Rounds::default()).collect(),
        ceiling: Vec::new(),
    };
    let mut results: Vec<CaseResult> = cases(setup.quick).into_iter().map(empty).collect();
    results.retain(|result| setup.wants(&result.label()));
    if results.is_empty() {
        return Ok(results);
    }
    let swap = Swap::on_file(&setup.dir, (memory_mib << 20) * 2)?;
    let mut kernel = filled_peer(memory_mib)?;
    let mut ours = match daemon {
        Some(daemon) => {
            let mut toy = daemon.start_toy(VM, memory_mib, DRAM_MIB, &["--pin"])?;
            toy.fill()?;
            Some(toy)
        }
        None => None,
    };
    for round in 0..setup.rounds {
        for result in &mut results {
            if round >= INFO_ROUNDS && !result.case.is_held(ratio) {
                continue;
            }
            eprintln!("overcommit: round {} of {}, {}", round + 1, setup.rounds, result.label());
            let sweep = result.case.is_sweep();
            let before = if sweep { disk.balanced_mib_per_s(CEILING_SECONDS)? } else { 0.0 };
            if let (Some(toy), Some(daemon)) = (&mut ours, daemon) {
                toy.go(result.case.warm_up())?;
                measure(setup, result.case, ratio, toy, Some(daemon), &mut result.ours)?;
            }
            if sweep {
                result.ceiling.push(before.max(disk.balanced_mib_per_s(CEILING_SECONDS)?));
            }
            let mut lives = !is_killed(kernel.toy.go(result.case.warm_up()))?;
            for (cluster, rounds) in clusters(setup, result.case, ratio).iter().zip(&mut result.kernel) {
                let _cluster = set_page_cluster(*cluster)?;
                lives = lives && !is_killed(measure(setup, result.case, ratio, &mut kernel.toy, None, rounds))?;
                if !lives {
                    rounds.done.push(None);
                    rounds.cpu_s.push(NO_VALUE);
                }
            }
            if !lives {
                eprintln!("overcommit: the kernel's swap ran out of memory in its cgroup; its process begins anew");
                // The cgroup of the last one goes before the next is made.
                drop(kernel);
                kernel = filled_peer(memory_mib)?;
            }
        }
    }
    drop((ours, kernel));
    drop(swap);
    Ok(results)
}

/// The peer: plain memory in a cgroup, whose pages go to the kernel's swap.
fn filled_peer(memory_mib: u64) -> Result<LimitedToy> {
    let mut peer = LimitedToy::start(&["--pin", "--mib", &memory_mib.to_string()], DRAM_MIB)?;
    peer.toy.fill()?;
    Ok(peer)
}

/// Whether the peer did not come to its end because the kernel killed it.
///
/// # Errors
/// Any other end.
fn is_killed<T>(done: Result<T>) -> Result<bool> {
    match done {
        Ok(_) => Ok(false),
        Err(error) if error.is::<OomKilled>() => Ok(true),
        Err(error) => Err(error),
    }
}

/// The page clusters that a case is measured with.
fn clusters(setup: &Setup, case: Case, ratio: u64) -> &'static [u32] {
    let all = !setup.quick && case.is_held(ratio);
    &PAGE_CLUSTERS[..if all { PAGE_CLUSTERS.len() } else { PAGE_CLUSTERS_FEW }]
}

fn measure(
    setup: &Setup,
    case: Case,
    ratio: u64,
    toy: &mut SteppedToy,
    daemon: Option<&Daemon>,
    rounds: &mut Rounds,
) -> Result<()> {
    let (before, moved) = (daemon.map_or(Ok(0.0), Daemon::cpu_s)?, daemon.map(swap_mib).transpose()?);
    let done = toy.go(&case.measure(setup, ratio))?;
    let after = daemon.map_or(Ok(0.0), Daemon::cpu_s)?;
    rounds.cpu_s.push(done.cpu_s + after - before);
    if let (Some(daemon), Some(moved)) = (daemon, moved) {
        rounds.swap_mib_per_s.push((swap_mib(daemon)? - moved) / done.seconds);
    }
    rounds.done.push(Some(done));
    Ok(())
}

/// MiB read from and written to swap so far.
fn swap_mib(daemon: &Daemon) -> Result<f64> {
    let info = daemon.vm(VM)?;
    let pages: u64 = [counter::PAGES_IN, counter::PAGES_OUT].iter().filter_map(|name| info.counters.get(*name)).sum();
    Ok((pages * counter::PAGE_BYTES) as f64 / f64::from(1 << 20))
}

fn add_figures(report: &mut Report, result: &CaseResult) {
    if result.case.is_sweep() {
        add_sweep(report, result);
    } else {
        add_random(report, result);
    }
}

fn best_name(result: &CaseResult) -> String {
    format!("page-cluster {}", PAGE_CLUSTERS[result.best_cluster()])
}

fn add_sweep(report: &mut Report, result: &CaseResult) {
    let label = result.label();
    let ours = &result.ours;
    let (default, best) = (&result.kernel[0], &result.kernel[result.best_cluster()]);
    let best_name = best_name(result);
    let read_write = result.case.mode == "read-write";
    let bar = |bar| if read_write { bar } else { Bar::None };
    let speed = ours.mib_per_s();
    report.pair(
        &format!("{label}: kernel swap, default"),
        "MiB/s",
        &speed,
        &default.mib_per_s(),
        bar(Bar::AtLeast(SWEEP_RATIO_MIN)),
    );
    note(report, default);
    report.pair(
        &format!("{label}: kernel swap, best ({best_name})"),
        "MiB/s",
        &speed,
        &best.mib_per_s(),
        bar(Bar::AtLeast(SWEEP_BEST_RATIO_MIN)),
    );
    note(report, best);
    let both_ways: Vec<f64> = result.ceiling.iter().map(|each_way| each_way * 2.0).collect();
    let traffic: Vec<f64> = ours.swap_mib_per_s.iter().zip(&both_ways).map(|(ours, most)| ours / most).collect();
    let is_ceiling = testkit::results::report::median(&traffic).is_some_and(|traffic| traffic <= CEILING_DOUBT);
    let ceiling_bar = if is_ceiling { bar(Bar::AtLeast(SWEEP_CEILING_MIN)) } else { Bar::None };
    report.pair(&format!("{label}: balanced O_DIRECT"), "MiB/s", &speed, &result.ceiling, ceiling_bar);
    if !is_ceiling {
        report.note("no verdict: more was read and written than this peer could".to_owned());
    }
    report.pair(
        &format!("{label}: check of the ceiling, swap traffic against it both ways"),
        "MiB/s",
        &ours.swap_mib_per_s,
        &both_ways,
        bar(Bar::AtMost(CEILING_DOUBT)),
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
}

fn add_random(report: &mut Report, result: &CaseResult) {
    let label = result.label();
    let ours = &result.ours;
    let (default, best) = (&result.kernel[0], &result.kernel[result.best_cluster()]);
    let best_name = best_name(result);
    // The bars are for uniform random accesses at 2x.
    let held = result.case.is_held(result.ratio);
    let bar = |bar| if held { bar } else { Bar::None };
    for (name, kernel) in [("default".to_owned(), default), (format!("best ({best_name})"), best)] {
        report.pair(
            &format!("{label}: kernel swap, {name}"),
            "op/s",
            &ours.each(|done| done.ops_per_s),
            &kernel.each(|done| done.ops_per_s),
            bar(Bar::AtLeast(1.0)),
        );
        note(report, kernel);
    }
    report.pair(
        &format!("{label}: p75"),
        "us",
        &ours.percentile(|l| l.p75_us),
        &best.percentile(|l| l.p75_us),
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

/// Says beside the last row in which rounds the peer was killed.
fn note(report: &mut Report, peer: &Rounds) {
    if let Some(killed) = peer.killed() {
        report.note(killed);
    }
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
