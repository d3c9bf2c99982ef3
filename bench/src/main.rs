//! Comparison benches: ours and its peers interleaved in one run, medians and spreads, the bars
//! each figure is held to, a table, JSON and a plot.

mod adaptive;
mod after_move;
mod again;
mod balloon;
mod chain;
mod clone;
mod crash;
mod create;
mod disk;
mod drain;
mod export;
mod failover;
mod far;
mod fault;
mod guest;
mod handover;
mod idle;
mod load;
mod loss;
mod migrate;
mod mrc;
mod nbd;
mod outbox;
mod outbox_control;
mod overcommit;
mod paging;
mod pins;
mod policy;
mod predict;
mod queues;
mod reallocate;
mod recover;
mod relay;
mod resident;
mod restart;
mod restore;
mod rmap;
mod sample;
mod share;
mod snapshot;
mod split;
mod svg;
mod table1;
mod tax;
mod ways;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;
use testkit::results::benches::Name;
use testkit::results::code::Crates;
use testkit::results::machine::Machine;
use testkit::results::report::Report;
use testkit::undo;
use testkit::workspace::{Build, repository};

/// Rounds of a full run: the median has two on either side.
const ROUNDS_DEFAULT: usize = 5;
/// Rounds of a quick run: just enough to have a spread.
const ROUNDS_QUICK: usize = 2;
/// More would take days.
const ROUNDS_MAX: usize = 100;

#[derive(Debug, Clone, Parser)]
#[command(name = "pagoda-bench", about = "Compare Pagoda with its peers")]
struct Cli {
    /// Which bench is to be run
    #[arg(value_enum)]
    name: Name,
    /// Also write the JSON here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Two short rounds; results go to out/bench
    #[arg(long)]
    quick: bool,
    /// Number of rounds that each bench makes
    #[arg(long)]
    rounds: Option<usize>,
    /// Directory for swap files, ours and the peers' (default: target/bench)
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Only the cases whose name contains this, such as "random read-write 2x" (overcommit, mrc, snapshot, restore, again, migrate, after-move, outbox, outbox-control); results go to out/bench
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// How long the soak of `outbox-control` lasts, in minutes [default: 60, and 3 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: Option<u64>,
    /// Measure the peers alone
    #[arg(long)]
    peers_only: bool,
    #[command(flatten)]
    moves: migrate::options::Options,
}

/// What every bench is told.
#[derive(Debug)]
pub struct Setup {
    /// Whether runs are short; their results do not replace those of full runs.
    pub quick: bool,
    /// How many rounds are asked for; a bench may make fewer.
    pub rounds: usize,
    /// Where swap files go.
    pub dir: PathBuf,
    /// Whether Pagoda takes part.
    pub ours: bool,
    /// Part of the name of the cases to run; `None`: all.
    pub only: Option<String>,
    /// How long a soak lasts, if it is said.
    pub minutes: Option<u64>,
    /// Of benches of moves.
    pub moves: migrate::options::Options,
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

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("pagoda-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs benches; `Ok(true)` when every bar holds.
///
/// # Errors
/// A bench cannot run; a page was wrong.
fn run(args: &Cli) -> Result<bool> {
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
    let has_cases = |name: &Name| {
        use Name::{AfterMove, Again, Migrate, Mrc, Outbox, OutboxControl, Overcommit, Restore, Snapshot};
        matches!(name, Overcommit | Mrc | Snapshot | Restore | Again | Migrate | AfterMove | Outbox | OutboxControl)
    };
    if args.only.is_some() && !names.iter().all(has_cases) {
        bail!(
            "--only is for `overcommit`, `mrc`, `snapshot`, `restore`, `again`, `migrate`, `after-move`, `outbox` and `outbox-control`, whose cases are many"
        );
    }
    let (only, moves) = (args.only.clone(), args.moves.clone());
    let setup = Setup { quick: args.quick, rounds, dir, ours: !args.peers_only, only, minutes: args.minutes, moves };
    // Before it is built: what is changed meanwhile is not what was measured.
    let crates = Crates::look()?;
    let names = names.into_iter().map(|name| Ok((name, name.code(&crates)?))).collect::<Result<Vec<_>>>()?;
    let is_pure = |(name, _): &(Name, String)| matches!(name, Name::Queues | Name::Rmap | Name::Chain);
    if setup.ours && !names.iter().all(is_pure) {
        Build::Bench.run()?;
    }
    let mut all_hold = true;
    let many = names.len() > 1;
    for (name, code) in names {
        match run_one(name, code, &setup, args.json.as_deref()) {
            Ok(holds) => all_hold &= holds,
            // The others have nothing to do with it.
            Err(error) if many => {
                eprintln!("pagoda-bench: {error:#}");
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
        Name::Create => create::run(setup),
        Name::Ways => ways::run(setup),
        Name::Snapshot => snapshot::run(setup),
        Name::Restore => restore::run(setup),
        Name::Chain => chain::run(setup),
        Name::Again => again::run(setup),
        Name::Clone => clone::run(setup),
        Name::Export => export::run(setup),
        Name::Migrate => migrate::run(setup),
        Name::AfterMove => after_move::run(setup),
        Name::Split => split::run(setup),
        Name::Outbox => outbox::run(setup),
        Name::OutboxControl => outbox_control::run(setup),
        Name::All => bail!("`all` is expanded before"),
    }
    .with_context(|| format!("bench {}", name.text()))?;
    report.code = code;
    println!("{}took {:.0} s\n", report.table(), began.elapsed().as_secs_f64());
    // Half a measurement must not replace a whole one.
    let is_part = setup.quick || setup.only.is_some() || setup.minutes.is_some() || setup.moves.is_part();
    let results = repository().join(if is_part { "out/bench" } else { "bench/results" });
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
