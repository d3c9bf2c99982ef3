//! What a single fault costs, by cause: Pagoda's, the kernel's own for the same cause, and the
//! barest userfaultfd loop.
//!
//! Every latency is that of one access by the clock of the thread that makes it, on the same layout
//! on all sides, and nearly every access faults for the cause that is meant: the daemon's own
//! counters are asked, and a share below the bar means that the row is not what it is called. The
//! daemon reads single pages from swap, so that this is certain: which choice is best is what the
//! bench `adaptive` is about. One answer of Pagoda's to a MINOR fault may map more than the page; how
//! much is its own choice and may change, so it is not assumed: there are rows per fault, for lone
//! pages and for the first touch of a whole chunk, both against a loop that maps one page, and a row
//! per page, which is the time of a sweep over its pages.

use std::collections::BTreeMap;

use anyhow::Result;
use testkit::daemon::Daemon;
use testkit::peers::faults::{
    Answer, Cost, KernelFault, LONE_STRIDE, Order, Placement, bare_userfaultfd, kernel_fault, swap_in,
};
use testkit::peers::swap::{Swap, set_page_cluster};
use testkit::results::report::{Bar, Report, median};
use testkit::stepped::SteppedToy;
use testkit::toy::touch::Touched;

use super::{Setup, svg};

const MEMORY_MIB: u64 = 1024;
/// Below the memory, so that the VM is armed; above what is touched, so that nothing is reclaimed.
const DRAM_MIB: u64 = 640;
/// The range of lone pages, and behind it the one of whole chunks.
const LONE_MIB: usize = 256;
const CHUNKS_MIB: usize = 128;
/// Of the lone pages every fourth is read from swap: more would bring whole chunks in.
const SWAP_STRIDE: usize = LONE_STRIDE * 4;
const PAGES_PER_CHUNK: usize = 256;
/// Drops and touches of chunks, which are few.
const CHUNK_REPEATS: u32 = 8;
/// So many accesses must fault for the cause that a row is named after.
const MEANT_MIN: f64 = 0.9;
const SWAP_BYTES: u64 = 512 << 20;
const VM: &str = "bench-fault";
/// p50 of a resident fault and of a zero fill against the bare loop.
const BARE_RATIO_MAX: f64 = 1.5;
const THREADS: [usize; 2] = [1, 4];
/// What may stay in DRAM and still count as paged out.
const LEFT_MIB: u64 = 100;
const PAGE_OUT_MAX: std::time::Duration = std::time::Duration::from_secs(60);

/// One value of each for a round.
#[derive(Debug, Default, Clone)]
struct Costs {
    p50: Vec<f64>,
    p99: Vec<f64>,
    mean: Vec<f64>,
    cpu: Vec<f64>,
    /// Faults of the cause that is meant, for each access.
    meant: Vec<f64>,
}

impl Costs {
    fn push(&mut self, cost: Cost) {
        self.p50.push(cost.p50_us);
        self.p99.push(cost.p99_us);
        self.mean.push(cost.mean_us);
        self.cpu.push(cost.cpu_us);
    }
}

/// By name of the row.
type Rows = BTreeMap<&'static str, Costs>;

const ZERO: &str = "zero fill";
const MINOR: &str = "MINOR, lone page";
const MINOR_CHUNK: &str = "MINOR, first touch of a chunk";
const MINOR_SWEEP: &str = "MINOR, sweep";
const SWAP_PAGE: &str = "swap-in of a page";
const FIRST_WRITE: &str = "first write of a clean page";

const SHMEM_ZERO: &str = "kernel: shmem zero fill";
const ANONYMOUS_ZERO: &str = "kernel: anonymous zero fill";
const SHMEM_MINOR: &str = "kernel: shmem minor fault";
const SWAP_FILE: &str = "kernel: swap-in from a file";
const SWAP_ZRAM: &str = "kernel: swap-in from zram";
const BARE_ZERO: &str = "bare userfaultfd: zero page";
const BARE_COPY: &str = "bare userfaultfd: copy";
const BARE_MINOR: &str = "bare userfaultfd: continue a page";
const BARE_SWEEP: &str = "bare userfaultfd: sweep, a page an answer";
const BARE_CHUNK_SWEEP: &str = "bare userfaultfd: sweep, a chunk an answer";
const BARE_ZERO_CPU: &str = "bare userfaultfd: zero page, one CPU";
const BARE_MINOR_CPU: &str = "bare userfaultfd: continue a page, one CPU";

/// What a number of faulting threads gives.
#[derive(Debug, Default)]
struct Measured {
    ours: Rows,
    peers: Rows,
    /// By cause as the daemon's catalogue names them: from reading the message to having answered.
    daemon: BTreeMap<String, (Vec<f64>, Vec<f64>)>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A peer cannot be set up (root is needed), or the daemon fails.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("fault");
    let daemon =
        if setup.ours { Some(Daemon::start_with(&setup.dir, "daemon", &["--page-in", "page"])?) } else { None };
    let mut all: Vec<(usize, Measured)> = THREADS.map(|threads| (threads, Measured::default())).into();
    for round in 0..setup.rounds {
        eprintln!("fault: round {} of {}", round + 1, setup.rounds);
        for (threads, measured) in &mut all {
            if let Some(daemon) = &daemon {
                measure_ours(daemon, *threads, measured)?;
            }
            measure_peers(setup, *threads, &mut measured.peers)?;
        }
    }
    for (threads, measured) in &all {
        add_figures(&mut report, *threads, measured);
    }
    Ok((report, plot(&all)))
}

/// One VM, its accesses and what the daemon counts of them.
struct Run<'run> {
    daemon: &'run Daemon,
    toy: SteppedToy,
    rows: &'run mut Rows,
}

impl Run<'_> {
    /// Touches, and puts the cost under `row` if nearly all faults were of the cause `counter`.
    fn touch(&mut self, row: &'static str, counter: &str, options: &str) -> Result<Touched> {
        let (before, cpu) = (self.count(counter)?, self.daemon.cpu_s()?);
        let touched = self.toy.touch(options)?;
        let cpu = self.daemon.cpu_s()? - cpu;
        let faults = self.count(counter)? - before;
        let costs = self.rows.entry(row).or_default();
        costs.push(Cost::of(&touched, cpu));
        costs.meant.push(faults as f64 / touched.touches as f64);
        Ok(touched)
    }

    fn count(&self, counter: &str) -> Result<u64> {
        Ok(self.daemon.vm(VM)?.counters.get(counter).copied().unwrap_or(0))
    }
}

fn measure_ours(daemon: &Daemon, threads: usize, measured: &mut Measured) -> Result<()> {
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, DRAM_MIB, &["--threads", &threads.to_string()])?;
    toy.map()?;
    let mut run = Run { daemon, toy, rows: &mut measured.ours };
    let lone = format!("--mib {LONE_MIB} --stride {LONE_STRIDE}");
    run.touch(ZERO, "faults_zero", &lone)?;
    run.touch(MINOR, "faults_minor", &format!("{lone} --drop-entries"))?;
    let chunks = format!("--from-mib {LONE_MIB} --mib {CHUNKS_MIB}");
    run.toy.touch(&format!("{chunks} --in-order --whole"))?;
    let drop = format!("{chunks} --stride {PAGES_PER_CHUNK} --drop-entries --repeat {CHUNK_REPEATS}");
    run.touch(MINOR_CHUNK, "faults_minor", &drop)?;
    run.touch(MINOR_SWEEP, "faults_minor", &format!("{chunks} --in-order --drop-entries"))?;
    // The least there is until it is out, then room again: what comes back displaces nothing.
    daemon.set_dram(VM, pagoda_api::dram_bytes_min(MEMORY_MIB << 20) >> 20)?;
    daemon.wait_for_vm(VM, PAGE_OUT_MAX, |info| info.resident_bytes <= LEFT_MIB << 20)?;
    daemon.set_dram(VM, DRAM_MIB)?;
    let some = format!("--mib {LONE_MIB} --stride {SWAP_STRIDE}");
    run.touch(SWAP_PAGE, "faults_swap_page", &format!("{some} --access load"))?;
    run.touch(FIRST_WRITE, "faults_write_protect", &some)?;
    for (cause, latency) in daemon.vm(VM)?.latency.into_iter().filter(|(_, latency)| latency.count > 0) {
        let (p50, p99) = measured.daemon.entry(cause).or_default();
        p50.push(latency.p50_us);
        p99.push(latency.p99_us);
    }
    run.toy.quit()
}

fn measure_peers(setup: &Setup, threads: usize, rows: &mut Rows) -> Result<()> {
    let mut push = |row: &'static str, cost: Cost| rows.entry(row).or_default().push(cost);
    push(ANONYMOUS_ZERO, kernel_fault(KernelFault::AnonymousZero, LONE_MIB, threads)?);
    push(SHMEM_ZERO, kernel_fault(KernelFault::ShmemZero, LONE_MIB, threads)?);
    push(SHMEM_MINOR, kernel_fault(KernelFault::ShmemMinor, LONE_MIB, threads)?);
    // Read-ahead would answer some faults before they happen.
    let cluster = set_page_cluster(0)?;
    let swap = Swap::on_file(&setup.dir, SWAP_BYTES)?;
    push(SWAP_FILE, swap_in(LONE_MIB, SWAP_STRIDE, threads)?);
    drop(swap);
    let zram = Swap::on_zram(SWAP_BYTES)?;
    push(SWAP_ZRAM, swap_in(LONE_MIB, SWAP_STRIDE, threads)?);
    drop((zram, cluster));
    let (free, same, lone) = (Placement::Free, Placement::SameCpu, Order::LoneAtRandom);
    push(BARE_ZERO, bare_userfaultfd(Answer::ZeroPage, free, lone, LONE_MIB, threads)?);
    push(BARE_COPY, bare_userfaultfd(Answer::Copy, free, lone, LONE_MIB, threads)?);
    push(BARE_MINOR, bare_userfaultfd(Answer::Continue, free, lone, LONE_MIB, threads)?);
    push(BARE_SWEEP, bare_userfaultfd(Answer::Continue, free, Order::Sweep, CHUNKS_MIB, threads)?);
    push(BARE_CHUNK_SWEEP, bare_userfaultfd(Answer::ContinueChunk, free, Order::Sweep, CHUNKS_MIB, threads)?);
    if threads == 1 {
        push(BARE_ZERO_CPU, bare_userfaultfd(Answer::ZeroPage, same, lone, LONE_MIB, threads)?);
        push(BARE_MINOR_CPU, bare_userfaultfd(Answer::Continue, same, lone, LONE_MIB, threads)?);
    }
    Ok(())
}

fn add_figures(report: &mut Report, threads: usize, measured: &Measured) {
    let suffix = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    let bar = Bar::AtMost(BARE_RATIO_MAX);
    let none = Costs::default();
    let peer = |name: &str| measured.peers.get(name).unwrap_or(&none);
    let pairs = [
        (ZERO, BARE_ZERO, bar),
        (ZERO, SHMEM_ZERO, Bar::None),
        (MINOR, BARE_MINOR, bar),
        (MINOR, SHMEM_MINOR, Bar::None),
        (MINOR_CHUNK, BARE_MINOR, bar),
        (SWAP_PAGE, SWAP_FILE, Bar::None),
        (SWAP_PAGE, SWAP_ZRAM, Bar::None),
    ];
    for (row, against, bar) in pairs {
        let Some(ours) = measured.ours.get(row) else { continue };
        let (peer, name) = (peer(against), format!("{row}, {suffix}"));
        report.pair(&format!("{name}, p50: {against}"), "us", &ours.p50, &peer.p50, bar);
        report.pair(&format!("{name}, p99: {against}"), "us", &ours.p99, &peer.p99, Bar::None);
        report.pair(&format!("{name}, CPU per fault: {against}"), "us", &ours.cpu, &peer.cpu, Bar::None);
    }
    for against in [BARE_SWEEP, BARE_CHUNK_SWEEP] {
        let Some(ours) = measured.ours.get(MINOR_SWEEP) else { continue };
        let name = format!("{MINOR_SWEEP}, {suffix}, per page: {against}");
        report.pair(&name, "us", &ours.mean, &peer(against).mean, Bar::None);
    }
    for (row, ours) in &measured.ours {
        if *row == FIRST_WRITE {
            report.single(&format!("{row}, {suffix}, p50"), "us", &ours.p50, Bar::None);
            report.single(&format!("{row}, {suffix}, p99"), "us", &ours.p99, Bar::None);
            report.single(&format!("{row}, {suffix}, CPU per fault"), "us", &ours.cpu, Bar::None);
        }
        let meant = if *row == MINOR_SWEEP { Bar::None } else { Bar::AtLeast(MEANT_MIN) };
        report.single(&format!("{row}, {suffix}: faults of that cause per access"), "", &ours.meant, meant);
    }
    for name in [ANONYMOUS_ZERO, BARE_COPY, BARE_ZERO_CPU, BARE_MINOR_CPU] {
        let Some(costs) = measured.peers.get(name) else { continue };
        report.peer_only(&format!("{name}, {suffix}, p50"), "us", &costs.p50);
        report.peer_only(&format!("{name}, {suffix}, p99"), "us", &costs.p99);
        report.peer_only(&format!("{name}, {suffix}, CPU per fault"), "us", &costs.cpu);
    }
    for (cause, (p50, p99)) in &measured.daemon {
        report.single(&format!("{cause}, {suffix}, the daemon's own part, p50"), "us", p50, Bar::None);
        report.single(&format!("{cause}, {suffix}, the daemon's own part, p99"), "us", p99, Bar::None);
    }
}

fn plot(all: &[(usize, Measured)]) -> String {
    let bars = |costs: &Costs| vec![svg::Bar::of(&costs.p50), svg::Bar::of(&costs.p99)];
    let mut groups: Vec<(String, Vec<Option<svg::Bar>>)> = Vec::new();
    for (threads, measured) in all {
        let ours = measured.ours.iter().filter(|(row, costs)| **row != MINOR_SWEEP && median(&costs.p50).is_some());
        groups.extend(ours.map(|(row, costs)| (format!("Pagoda: {row} x{threads}"), bars(costs))));
    }
    if let Some((_, measured)) = all.first() {
        let single = measured.peers.iter().filter(|(row, _)| ![BARE_SWEEP, BARE_CHUNK_SWEEP].contains(row));
        groups.extend(single.map(|(row, costs)| (row.replace("userfaultfd", "uffd"), bars(costs))));
    }
    svg::bar_chart(&svg::BarChart {
        title: "Latency of one access that faults".to_owned(),
        y_label: "us (logarithmic)".to_owned(),
        y_scale: svg::Scale::Log,
        series: vec!["p50".to_owned(), "p99".to_owned()],
        groups,
    })
}
