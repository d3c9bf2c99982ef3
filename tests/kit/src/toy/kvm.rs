//! The toy VMM on KVM: a guest of a few instructions writes and verifies RAM, so that KVM itself faults the pages in.
//!
//! As [the native one](super), it takes the RAM file of `pagoda run --plain` or memory of its own. The guest compares each page in
//! every pass; when it has stopped, all pages are compared once more from user space. Exit status 0 when every page was
//! right, 1 when not, 77 when this machine's KVM does not run the guest, with the reason on the output.

use std::io::BufRead;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use pagoda_sys::toy::kvm::program::Walk;
use pagoda_sys::toy::kvm::{self, KvmError, Machine, Outcome, RAM_BYTES_MAX};
use pagoda_sys::toy::ram::{HugePages, PAGE_BYTES, Ram, RamSource};
use serde::Serialize;

use super::map_ram_file;

/// What automake's test driver and many after it take for "skipped".
pub const SKIPPED_STATUS: u8 = 77;
/// The modules that can be KVM's processor-specific half.
const KVM_MODULES: [&str; 3] = ["kvm_amd", "kvm_intel", "kvm_pvm"];

/// This machine's KVM does not run the guest.
#[derive(Debug, thiserror::Error)]
#[error("KVM does not run the guest here: {0}")]
pub struct Skipped(KvmError);

/// Command line of `toy-vmm kvm`.
#[derive(Debug, Clone, Args)]
pub struct ToyKvmArgs {
    /// MiB of RAM; with a RAM file, its size unless given
    #[arg(long)]
    mib: Option<usize>,
    /// vCPUs, each over its own part of the RAM
    #[arg(long, default_value_t = 1)]
    vcpus: usize,
    /// Run for so many seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Run until the input ends, however long that takes
    #[arg(long, conflicts_with = "seconds")]
    until_input_ends: bool,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// What is printed after the run.
#[derive(Debug, Serialize)]
struct Report {
    accelerator: &'static str,
    /// The kernel's module that is KVM here, where it says so.
    module: Option<&'static str>,
    mib: usize,
    vcpus: usize,
    seconds: f64,
    /// Passes of the slowest vCPU over all of its pages.
    passes: u64,
    pages_visited: u64,
    pages_per_s: f64,
    /// Times that the guest found a page wrong.
    wrong_in_guest: u64,
    /// Pages that user space found wrong after the guest had stopped.
    wrong_at_end: usize,
    /// The first of both kinds.
    wrong_pages: Vec<u64>,
}

/// Runs the guest; `Ok(true)` when every page was right.
///
/// # Errors
/// Bad options, no memory, a vCPU that ends; `Skipped` where KVM cannot run the guest at all.
pub fn main(args: &ToyKvmArgs) -> Result<bool> {
    if !args.seconds.is_finite() || args.seconds <= 0.0 {
        bail!("--seconds {}: give a number above zero", args.seconds);
    }
    match kvm::probe(args.vcpus) {
        Ok(()) => {}
        Err(error @ KvmError::VcpuCount(_)) => return Err(error).context("--vcpus"),
        Err(error) => return Err(Skipped(error).into()),
    }
    let mut ram = map_ram(args.mib)?;
    let mib = (ram.pages() * PAGE_BYTES) >> 20;
    eprintln!("toy-vmm: the guest starts: {mib} MiB, vCPUs {}", args.vcpus);
    let start = Instant::now();
    let outcomes = run(args, &mut ram)?;
    let report = report(&outcomes, &mut ram, start.elapsed());
    print(args.json, &report)?;
    Ok(report.wrong_in_guest == 0 && report.wrong_at_end == 0)
}

fn map_ram(mib: Option<usize>) -> Result<Ram> {
    if let Some(ram) = map_ram_file(mib, HugePages::Advise)? {
        return Ok(ram);
    }
    let mib_max = RAM_BYTES_MAX >> 20;
    match mib {
        Some(mib) if (1..=mib_max).contains(&mib) => {
            Ram::map(RamSource::Shmem(mib << 20), HugePages::Advise).with_context(|| format!("map {mib} MiB"))
        }
        Some(mib) => bail!("--mib {mib}: give 1 to {mib_max}"),
        None => bail!("give --mib, or run under `pagoda run --plain`, which makes the RAM"),
    }
}

fn run(args: &ToyKvmArgs, ram: &mut Ram) -> Result<Vec<Outcome>> {
    let machine = Machine::new(ram, args.vcpus).context("make the VM")?;
    let stop = &AtomicBool::new(false);
    let end = (!args.until_input_ends).then(|| Instant::now() + Duration::from_secs_f64(args.seconds));
    let go_on = |_: &Walk| {
        let over = end.is_some_and(|end| Instant::now() >= end) || stop.load(Ordering::Relaxed);
        if over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcomes = std::thread::scope(|scope| {
        if args.until_input_ends {
            scope.spawn(move || {
                // An input that cannot be read has ended, too.
                let _ = std::io::stdin().lock().lines().last();
                stop.store(true, Ordering::Relaxed);
            });
        }
        machine.run(go_on)
    });
    outcomes.context("run the guest")
}

fn report(outcomes: &[Outcome], ram: &mut Ram, elapsed: Duration) -> Report {
    let mib = (ram.pages() * PAGE_BYTES) >> 20;
    let mut wrong_pages: Vec<u64> = outcomes.iter().flat_map(|outcome| &outcome.wrong_pages).copied().collect();
    let part = &ram.split(1)[0];
    let at_end: Vec<usize> = outcomes.iter().flat_map(|outcome| outcome.walk.wrong_pages(part)).collect();
    /// Enough to see a pattern in.
    const WRONG_PAGES_SHOWN_MAX: usize = 16;
    wrong_pages.extend(at_end.iter().map(|page| *page as u64));
    wrong_pages.truncate(WRONG_PAGES_SHOWN_MAX);
    let pages_visited = outcomes.iter().map(|outcome| outcome.walk.pages_visited()).sum();
    Report {
        accelerator: "kvm",
        module: KVM_MODULES.into_iter().find(|name| Path::new("/sys/module").join(name).exists()),
        mib,
        vcpus: outcomes.len(),
        seconds: elapsed.as_secs_f64(),
        passes: outcomes.iter().map(|outcome| outcome.walk.passes).min().unwrap_or(0),
        pages_visited,
        pages_per_s: pages_visited as f64 / elapsed.as_secs_f64(),
        wrong_in_guest: outcomes.iter().map(|outcome| outcome.wrong).sum(),
        wrong_at_end: at_end.len(),
        wrong_pages,
    }
}

fn print(json: bool, report: &Report) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(report).context("write the report")?);
        return Ok(());
    }
    let Report { mib, vcpus, seconds, passes, pages_visited, pages_per_s, wrong_in_guest, wrong_at_end, .. } = report;
    let module = report.module.unwrap_or("module unknown");
    println!("accelerator kvm ({module}), {vcpus} vCPUs, {mib} MiB: {passes} passes in {seconds:.1} s");
    println!("{pages_visited} pages visited, {pages_per_s:.0} a second; the guest found {wrong_in_guest} wrong");
    println!("after the guest stopped user space found {wrong_at_end} wrong");
    if !report.wrong_pages.is_empty() {
        println!("first wrong pages: {:?}", report.wrong_pages);
    }
    Ok(())
}
