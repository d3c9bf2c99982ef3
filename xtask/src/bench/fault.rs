//! What a single fault costs, by cause: Pagoda's, the kernel's own for the same cause, and the
//! barest userfaultfd loop.
//!
//! Ours come from a toy VMM under a DRAM limit. Its accesses mix hits and faults, so the latency
//! by cause is by the daemon's own clock, from reading the fault's message to having answered it.
//! The toy's percentiles over all its accesses, which include the way into the kernel and back,
//! stand beside it.

use anyhow::Result;

use super::peers::faults::{Answer, KernelFault, Placement, bare_userfaultfd, kernel_fault, swap_in};
use super::peers::swap::{Swap, set_page_cluster};
use super::report::{Bar, Report, median};
use super::{Setup, svg};
use crate::daemon::Daemon;
use crate::toy::histogram::LatencyHistogram;
use crate::toy::{Done, Latency};

const PAGES: usize = 16_384;
const ZRAM_BYTES: u64 = 512 << 20;
const SWAP_BYTES: u64 = 512 << 20;
const MEMORY_MIB: u64 = 512;
const DRAM_MIB: u64 = 256;
const VM: &str = "bench-fault";
/// p50 of a resident fault and of a zero fill against the bare loop.
const BARE_RATIO_MAX: f64 = 1.5;

/// p50 and p99 of every round, in microseconds.
#[derive(Debug, Default, Clone)]
struct Percentiles {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Percentiles {
    fn push(&mut self, latency: &LatencyHistogram) {
        self.p50.push(latency.percentile_us(0.5));
        self.p99.push(latency.percentile_us(0.99));
    }

    fn push_latency(&mut self, latency: &Latency) {
        self.p50.push(latency.p50_us);
        self.p99.push(latency.p99_us);
    }
}

#[derive(Debug, Default)]
struct Peers {
    anonymous_zero: Percentiles,
    shmem_zero: Percentiles,
    shmem_minor: Percentiles,
    swap_disk: Percentiles,
    swap_zram: Percentiles,
    bare_zero: Percentiles,
    bare_copy: Percentiles,
    bare_continue: Percentiles,
    bare_zero_same_cpu: Percentiles,
    bare_continue_same_cpu: Percentiles,
}

impl Peers {
    fn measure(&mut self, setup: &Setup) -> Result<()> {
        let pages = setup.count(PAGES);
        self.anonymous_zero.push(&kernel_fault(KernelFault::AnonymousZero, pages)?);
        self.shmem_zero.push(&kernel_fault(KernelFault::ShmemZero, pages)?);
        self.shmem_minor.push(&kernel_fault(KernelFault::ShmemMinor, pages)?);
        // Read-ahead would answer some faults before they happen.
        let cluster = set_page_cluster(0)?;
        let swap = Swap::on_file(&setup.dir, SWAP_BYTES)?;
        self.swap_disk.push_latency(&swap_in(pages)?);
        drop(swap);
        let zram = Swap::on_zram(ZRAM_BYTES)?;
        self.swap_zram.push_latency(&swap_in(pages)?);
        drop((zram, cluster));
        let (free, same) = (Placement::Free, Placement::SameCpu);
        self.bare_zero.push(&bare_userfaultfd(Answer::ZeroPage, free, pages)?);
        self.bare_copy.push(&bare_userfaultfd(Answer::Copy, free, pages)?);
        self.bare_continue.push(&bare_userfaultfd(Answer::Continue, free, pages)?);
        self.bare_zero_same_cpu.push(&bare_userfaultfd(Answer::ZeroPage, same, pages)?);
        self.bare_continue_same_cpu.push(&bare_userfaultfd(Answer::Continue, same, pages)?);
        Ok(())
    }

    fn rows(&self) -> [(&'static str, &Percentiles); 10] {
        [
            ("kernel: anonymous zero fill", &self.anonymous_zero),
            ("kernel: shmem zero fill", &self.shmem_zero),
            ("kernel: shmem minor fault", &self.shmem_minor),
            ("kernel: swap-in from a file", &self.swap_disk),
            ("kernel: swap-in from zram", &self.swap_zram),
            ("bare userfaultfd: MISSING, zero page", &self.bare_zero),
            ("bare userfaultfd: MISSING, copy", &self.bare_copy),
            ("bare userfaultfd: MINOR, continue", &self.bare_continue),
            ("bare userfaultfd: zero page, one CPU", &self.bare_zero_same_cpu),
            ("bare userfaultfd: continue, one CPU", &self.bare_continue_same_cpu),
        ]
    }
}

/// Runs with one and with several threads of the toy.
const THREADS: [usize; 2] = [1, 4];

/// What a run under Pagoda gives: the daemon's latencies by cause, and the toy's own.
#[derive(Debug, Default)]
struct Ours {
    /// By cause, as the daemon's catalogue names them.
    by_cause: std::collections::BTreeMap<String, Percentiles>,
    /// Of all accesses that the toy made, hits included.
    accesses: Percentiles,
    /// CPU time of daemon and toy per fault.
    cpu_us_per_fault: Vec<f64>,
}

impl Ours {
    fn measure(&mut self, setup: &Setup, daemon: &Daemon, threads: usize) -> Result<()> {
        let options = ["--threads", &threads.to_string()];
        let mut toy = daemon.start_toy(VM, MEMORY_MIB, DRAM_MIB, &options)?;
        toy.fill()?;
        let (faults_before, cpu_before) = (faults_of(daemon)?, daemon.cpu_s()?);
        let ops = setup.count(400_000);
        let done: Done = toy.go(&format!("--workload random --mode read-write --ops {ops}"))?;
        let cpu_s = done.cpu_s + daemon.cpu_s()? - cpu_before;
        let faults = faults_of(daemon)? - faults_before;
        self.cpu_us_per_fault.push(cpu_s * 1e6 / faults.max(1) as f64);
        if let Some(latency) = &done.latency {
            self.accesses.push_latency(latency);
        }
        for (cause, latency) in daemon.vm(VM)?.latency {
            let percentiles = self.by_cause.entry(cause).or_default();
            percentiles.p50.push(latency.p50_us);
            percentiles.p99.push(latency.p99_us);
        }
        toy.quit()
    }
}

fn faults_of(daemon: &Daemon) -> Result<u64> {
    Ok(daemon.vm(VM)?.latency.values().map(|latency| latency.count).sum())
}

/// Runs the bench.
///
/// # Errors
/// A peer cannot be set up (root is needed), or the daemon fails.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut report = setup.report("fault");
    let mut peers = Peers::default();
    let mut ours: Vec<(usize, Ours)> = THREADS.map(|threads| (threads, Ours::default())).into();
    let daemon = if setup.ours { Some(Daemon::start(&setup.dir)?) } else { None };
    for round in 0..setup.rounds {
        eprintln!("fault: round {} of {}", round + 1, setup.rounds);
        if let Some(daemon) = &daemon {
            for (threads, ours) in &mut ours {
                ours.measure(setup, daemon, *threads)?;
            }
        }
        peers.measure(setup)?;
    }
    for (name, percentiles) in peers.rows() {
        report.peer_only(&format!("{name}, p50"), "us", &percentiles.p50);
        report.peer_only(&format!("{name}, p99"), "us", &percentiles.p99);
    }
    if setup.ours {
        for (threads, ours) in &ours {
            add_ours(&mut report, *threads, ours, &peers);
        }
    }
    Ok((report, plot(&peers, &ours)))
}

fn add_ours(report: &mut Report, threads: usize, ours: &Ours, peers: &Peers) {
    let suffix = if threads == 1 { "1 thread".into() } else { format!("{threads} threads") };
    for (cause, percentiles) in &ours.by_cause {
        // The bars are for one faulting thread, as the bare loop has.
        let held = if threads == 1 { Bar::AtMost(BARE_RATIO_MAX) } else { Bar::None };
        let (peer, bar) = match cause.as_str() {
            "minor" => (&peers.bare_continue, held),
            "zero" => (&peers.bare_zero, held),
            "swap" => (&peers.swap_disk, Bar::None),
            _ => (&peers.bare_continue, Bar::None),
        };
        let name = format!("{cause} fault, {suffix}");
        report.pair(&format!("{name}, p50"), "us", &percentiles.p50, &peer.p50, bar);
        report.pair(&format!("{name}, p99"), "us", &percentiles.p99, &peer.p99, Bar::None);
    }
    let accesses = &ours.accesses;
    report.single(&format!("access seen by the VM, {suffix}, p50"), "us", &accesses.p50, Bar::None);
    report.single(&format!("access seen by the VM, {suffix}, p99"), "us", &accesses.p99, Bar::None);
    report.single(&format!("CPU per fault, {suffix}"), "us", &ours.cpu_us_per_fault, Bar::None);
}

fn plot(peers: &Peers, ours: &[(usize, Ours)]) -> String {
    let bars = |p: &Percentiles| vec![svg::Bar::of(&p.p50), svg::Bar::of(&p.p99)];
    let mut groups: Vec<(String, Vec<Option<svg::Bar>>)> = Vec::new();
    for (threads, ours) in ours {
        for (cause, percentiles) in &ours.by_cause {
            if median(&percentiles.p50).is_some_and(|p50| p50 > 0.0) {
                groups.push((format!("Pagoda: {cause} x{threads}"), bars(percentiles)));
            }
        }
    }
    let short = |name: &str| name.replace("userfaultfd", "uffd");
    groups.extend(peers.rows().map(|(name, percentiles)| (short(name), bars(percentiles))));
    svg::bar_chart(&svg::BarChart {
        title: "Latency of one fault".to_owned(),
        y_label: "us (logarithmic)".to_owned(),
        y_scale: svg::Scale::Log,
        series: vec!["p50".to_owned(), "p99".to_owned()],
        groups,
    })
}
