//! Comparison benches: ours and its peers interleaved in one run, medians and spreads, the bars
//! each figure is held to, a table, JSON and a plot.

mod adaptive;
mod balloon;
pub mod code;
mod crash;
mod disk;
mod drain;
mod failover;
mod far;
mod fault;
mod guest;
mod handover;
mod idle;
mod link;
mod load;
mod loss;
pub mod machine;
mod mrc;
mod nbd;
mod overcommit;
mod paging;
mod peers;
mod pins;
mod policy;
mod pool;
mod predict;
mod queues;
mod reallocate;
mod recover;
mod relay;
pub mod report;
mod resident;
mod restart;
mod rmap;
mod sample;
mod share;
mod stepped;
mod svg;
mod table1;
mod tax;
pub mod undo;
mod ways;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

pub use machine::repository;
pub use peers::faults::{HandlerArgs, handler_main};
pub use stepped::{SteppedToy, this_program, toy_command};

use code::Crates;
use machine::Machine;
use report::Report;

use crate::tasks::build_pagoda;

/// Rounds of a full run: the median has two on either side.
const ROUNDS_DEFAULT: usize = 5;
/// Rounds of a quick run: just enough to have a spread.
const ROUNDS_QUICK: usize = 2;
/// More would take days.
const ROUNDS_MAX: usize = 100;

/// Command line of `xtask bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Which bench
    #[arg(value_enum)]
    name: Name,
    /// Also write the JSON here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Two short rounds; results go to out/bench
    #[arg(long)]
    quick: bool,
    /// Number of rounds
    #[arg(long)]
    rounds: Option<usize>,
    /// Directory for swap files, ours and the peers' (default: target/bench)
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Only the cases whose name contains this, such as "random read-write 2x" (overcommit, mrc); results go to out/bench
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Measure the peers alone
    #[arg(long)]
    peers_only: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Latency and CPU per fault, by cause
    Fault,
    /// RAM of 2x and 4x DRAM against the kernel's swap
    Overcommit,
    /// Adaptive page-in against each fixed choice
    Adaptive,
    /// From everything paged out to full speed
    Recover,
    /// Everything in DRAM against plain huge pages
    Resident,
    /// Page-out decisions from 1 GiB to 1 TiB
    Queues,
    /// kill -9 of the daemon under load
    Crash,
    /// Plans for 1,000 VMs, a simulated day, the ESX paper's experiments in the simulator
    Policy,
    /// Estimates of the working set against what is touched, and what they cost
    Sample,
    /// Miss-ratio curves by sampling against an exact replay, and what they predict of running VMs
    Mrc,
    /// Memory taken by the guest's own driver, against a smaller VM
    Balloon,
    /// A guest that swaps by itself while the host pages out
    Paging,
    /// One to six identical guests, and two of them beside the kernel's KSM (figure 4 of the ESX paper)
    Share,
    /// 256 MiB taken from one idle VM, by balloon, by page-out and by free page reporting
    Reclaim,
    /// Two VMs of equal shares, one idle, without a tax and with one (figure 7 of the ESX paper)
    Tax,
    /// Five guests on 60 % too little memory, booting at once (figure 8 of the ESX paper)
    Reallocate,
    /// Pages of another machine's memory against bare datagrams, memcached and nbdkit
    Rmap,
    /// A disk in another process's memory over NBD, against nbdkit's
    Nbd,
    /// kill -9 of one of three servers of a disk with two copies, while fio writes and verifies
    Failover,
    /// SIGTERM to a server with 1 GiB, under load
    Drain,
    /// A disk over a network that loses, changes and reorders datagrams
    Loss,
    /// A disk taken over from an owner that is paused and resumed
    Handover,
    /// A disk over a link of 1 Gbit/s against this machine's disk (table 1 and figure 5 of the MemX paper)
    Disk,
    /// A disk of the pool as a host, a host's guest and a client inside a guest have it, against disks (table 1 and figure 5
    /// of the MemX paper)
    Table1,
    /// Quicksort of twice the DRAM with the pool as far tier (table 2 of the MemX paper)
    Far,
    /// One to eight VMs on one pool (figure 7 of the MemX paper)
    Fleet,
    /// Wrong pages by every way of pinning guest memory, and a guest's disk behind the page cache against plain QEMU
    Pins,
    /// A VM over restarts of a daemon that cannot tell whether its process runs
    Restart,
    /// A VM over restarts of a daemon of which a part does not work that paging does not need
    Optional,
    /// Ways to RAM that nobody manages, and what passes between plain QEMU and Pagoda
    Ways,
    /// All of them
    All,
}

impl Name {
    fn expand(self) -> Vec<Name> {
        match self {
            Self::All => Self::value_variants().iter().copied().filter(|n| *n != Self::All).collect(),
            one => vec![one],
        }
    }

    fn text(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }

    /// The crates that it measures.
    fn measures(self) -> &'static [&'static str] {
        const HOST: &[&str] = &["pagodad", "pagoda", "pagoda-shim"];
        match self {
            Self::Queues => &["pagoda-core"],
            Self::Rmap => &["rmap-io"],
            Self::Nbd | Self::Failover | Self::Drain | Self::Loss | Self::Handover | Self::Disk | Self::Table1 => {
                &["pagoda", "pagoda-server"]
            }
            Self::Far | Self::Fleet => &["pagodad", "pagoda", "pagoda-server", "pagoda-shim"],
            Self::Ways => &["pagodad", "pagoda", "pagoda-shim", "vm-tests"],
            _ => HOST,
        }
    }

    /// The module of this directory that measures it.
    fn module(self) -> String {
        match self {
            Self::Reclaim => Self::Balloon.text(),
            Self::Fleet => Self::Far.text(),
            Self::Optional => Self::Restart.text(),
            one => one.text(),
        }
    }

    /// The hash of the code that a result of today stands for.
    fn code(self, crates: &Crates) -> Result<String> {
        let here = repository().join("xtask/src/bench");
        let module = self.module();
        let own = [here.join(format!("{module}.rs")), here.join(module)];
        let own: Vec<PathBuf> = own.into_iter().filter(|path| path.exists()).collect();
        crates.hash(self.measures(), &own)
    }
}

/// The hash of the code that a result of the bench of this name would stand for today; `None` if there is no such bench.
///
/// # Errors
/// The sources cannot be read.
pub fn code_of(bench: &str, crates: &Crates) -> Result<Option<String>> {
    Name::from_str(bench, false).ok().map(|name| name.code(crates)).transpose()
}

/// What every bench is told.
#[derive(Debug)]
pub struct Setup {
    /// Short runs.
    pub quick: bool,
    /// Rounds.
    pub rounds: usize,
    /// Where swap files go.
    pub dir: PathBuf,
    /// Whether Pagoda takes part.
    pub ours: bool,
    /// Part of the name of the cases to run; `None`: all.
    pub only: Option<String>,
}

impl Setup {
    /// A length in seconds, shortened in a quick run.
    pub fn seconds(&self, full: f64) -> f64 {
        if self.quick { full / 2.0 } else { full }
    }

    /// Whether the case of this name is asked for.
    pub fn wants(&self, case: &str) -> bool {
        self.only.as_deref().is_none_or(|only| case.contains(only))
    }

    fn report(&self, name: &str) -> Report {
        self.report_of(name, "native")
    }

    /// The same with guests, run by `accelerator`.
    fn report_of(&self, name: &str, accelerator: &str) -> Report {
        Report::new(name, Machine::look(&self.dir), accelerator)
    }
}

/// Runs benches; `Ok(true)` when every bar holds.
///
/// # Errors
/// A bench cannot run; a page was wrong.
pub fn main(args: &BenchArgs) -> Result<bool> {
    let rounds = args.rounds.unwrap_or(if args.quick { ROUNDS_QUICK } else { ROUNDS_DEFAULT });
    if rounds == 0 || rounds > ROUNDS_MAX {
        bail!("--rounds {rounds}: give 1 to {ROUNDS_MAX}");
    }
    let names = args.name.expand();
    if args.json.is_some() && names.len() > 1 {
        bail!("--json takes one bench; `all` writes bench/results/NAME.json for each");
    }
    let target = repository().join("target/bench");
    undo::start(&target)?;
    let dir = args.dir.clone().unwrap_or(target);
    fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    if args.only.is_some() && names.iter().any(|name| !matches!(name, Name::Overcommit | Name::Mrc)) {
        bail!("--only is for `overcommit` and `mrc`, whose cases are many");
    }
    let setup = Setup { quick: args.quick, rounds, dir, ours: !args.peers_only, only: args.only.clone() };
    // Before it is built: what is changed meanwhile is not what was measured.
    let crates = Crates::look()?;
    let names = names.into_iter().map(|name| Ok((name, name.code(&crates)?))).collect::<Result<Vec<_>>>()?;
    let is_pure = |(name, _): &(Name, String)| matches!(name, Name::Queues | Name::Rmap);
    if setup.ours && !names.iter().all(is_pure) {
        build_pagoda()?;
    }
    let mut all_hold = true;
    let many = names.len() > 1;
    for (name, code) in names {
        match run_one(name, code, &setup, args.json.as_deref()) {
            Ok(holds) => all_hold &= holds,
            // The others have nothing to do with it.
            Err(error) if many => {
                eprintln!("xtask: {error:#}");
                all_hold = false;
            }
            Err(error) => return Err(error),
        }
    }
    undo::undo_all();
    Ok(all_hold)
}

fn run_one(name: Name, code: String, setup: &Setup, json: Option<&Path>) -> Result<bool> {
    let began = Instant::now();
    let (mut report, plot) = match name {
        Name::Fault => fault::run(setup),
        Name::Overcommit => overcommit::run(setup),
        Name::Adaptive => adaptive::run(setup),
        Name::Recover => recover::run(setup),
        Name::Resident => resident::run(setup),
        Name::Queues => queues::run(setup),
        Name::Crash => crash::run(setup),
        Name::Policy => policy::run(setup),
        Name::Sample => sample::run(setup),
        Name::Mrc => mrc::run(setup),
        Name::Balloon => balloon::run(setup),
        Name::Paging => paging::run(setup),
        Name::Share => share::run(setup),
        Name::Reclaim => balloon::reclaim(setup),
        Name::Tax => tax::run(setup),
        Name::Reallocate => reallocate::run(setup),
        Name::Rmap => rmap::run(setup),
        Name::Nbd => nbd::run(setup),
        Name::Failover => failover::run(setup),
        Name::Drain => drain::run(setup),
        Name::Loss => loss::run(setup),
        Name::Handover => handover::run(setup),
        Name::Disk => disk::run(setup),
        Name::Table1 => table1::run(setup),
        Name::Far => far::run(setup),
        Name::Fleet => far::run_fleet(setup),
        Name::Pins => pins::run(setup),
        Name::Restart => restart::run(setup),
        Name::Optional => restart::optional(setup),
        Name::Ways => ways::run(setup),
        Name::All => bail!("`all` is expanded before"),
    }
    .with_context(|| format!("bench {}", name.text()))?;
    report.code = code;
    println!("{}took {:.0} s\n", report.table(), began.elapsed().as_secs_f64());
    // Half a measurement must not replace a whole one.
    let results = repository().join(if setup.quick || setup.only.is_some() { "out/bench" } else { "bench/results" });
    if setup.ours {
        report.write_json(&results.join(format!("{}.json", name.text())))?;
        let path = results.join(format!("{}.svg", name.text()));
        fs::write(&path, plot).with_context(|| format!("write {}", path.display()))?;
    }
    if let Some(path) = json {
        report.write_json(path)?;
    }
    Ok(report.holds() || !setup.ours)
}
