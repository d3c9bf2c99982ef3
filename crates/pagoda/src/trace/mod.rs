//! `pagoda trace`: records what real VMs use as a scenario, and runs the policy over it.

mod record;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use pagoda_api::{Client, ClientError};
use pagoda_core::policy::{PerMille, TaxRate};
use pagoda_core::simulate::scenario::DURATION_S_MAX;
use pagoda_core::units::Bytes;

use self::record::Recorder;
use crate::output::{Format, print_text};
use crate::simulate::{self, Options};
use crate::units::{parse_per_mille, parse_seconds, parse_size};

/// Record what VMs use, and see what the memory policy would have made of it
///
/// A recording is a scenario file as those of `pagoda simulate`: settings, working sets and touched memory of the
/// real VMs over time. It can be read, changed, and replayed with another tax, pool or shares.
#[derive(Debug, Subcommand)]
pub enum Trace {
    Record(Record),
    Replay(Replay),
}

/// Record the VMs of this host into a scenario file
///
/// Until it is interrupted or --for has passed. The file is whole after every poll, whenever the recording ends. A
/// daemon that is replaced meanwhile is waited for.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda trace record --interval 5 --out monday.toml --for 8h
  pagoda trace replay monday.toml --plot monday.svg")]
pub struct Record {
    /// Seconds between two looks; the working sets change once in a sampling period
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,
    /// The scenario file to write
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// How long, such as 90s, 30m, 1h [default: until interrupted, at most 7d]
    #[arg(long = "for", value_name = "TIME", value_parser = length)]
    pub length_s: Option<u64>,
}

/// Run the memory policy over a recording
///
/// The guests do what they did; who gets how much is computed anew, by the daemon's own policy.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda trace replay monday.toml --plot monday.svg
  pagoda trace replay monday.toml --idle-tax 0%      what if idle memory cost nothing?
  pagoda trace replay monday.toml --pool 32G         would a smaller host do?")]
pub struct Replay {
    #[command(flatten)]
    pub options: Options,
    /// Another pool than the recorded one; what the host could spare at times is not replayed then
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub pool: Option<u64>,
    /// Another idle tax than the recorded one
    #[arg(long, value_name = "PART", value_parser = parse_per_mille)]
    pub idle_tax: Option<u16>,
}

fn length(text: &str) -> Result<u64, String> {
    match parse_seconds(text)? {
        0 => Err("0 seconds would record nothing; give 1s to 7d".into()),
        seconds if seconds > DURATION_S_MAX => Err("a scenario has at most 7d".into()),
        seconds => Ok(seconds),
    }
}

pub fn run(client: &Client, command: &Trace, format: Format) -> Result<()> {
    match command {
        Trace::Record(options) => record(client, options),
        Trace::Replay(options) => replay(options, format),
    }
}

fn record(client: &Client, options: &Record) -> Result<()> {
    let host = client.host()?;
    let mut recorder = Recorder::new(&host.hostname, options.interval);
    let length_s = options.length_s.unwrap_or(DURATION_S_MAX);
    let start = Instant::now();
    let mut lost: Option<ClientError> = None;
    loop {
        let at_s = start.elapsed().as_secs();
        if at_s >= length_s {
            break;
        }
        match client.host().and_then(|host| Ok((host.policy, client.vms()?.vms))) {
            Ok((policy, vms)) => {
                recorder.poll(at_s, &policy, &vms);
                write_whole(&options.out, &recorder.scenario()?)?;
                lost = None;
            }
            // Its VMs live on without it, and the next daemon knows them.
            Err(error) if error.is_unreachable() => {
                if lost.is_none() {
                    eprintln!("pagoda: waiting for the daemon: {error}");
                }
                lost = Some(error);
            }
            Err(error) => return Err(error.into()),
        }
        let next = Duration::from_secs((at_s + options.interval).min(length_s));
        thread::sleep(next.saturating_sub(start.elapsed()));
    }
    if let (Some(error), false) = (lost, options.out.exists()) {
        return Err(error.into());
    }
    let (vms, points) = recorder.counts();
    print_text(&format!("{}: {vms} VMs, {points} points in {length_s} s\n", options.out.display()))?;
    Ok(())
}

/// A reader, or a recording that is killed, never sees half a file.
fn write_whole(path: &Path, text: &str) -> Result<()> {
    let mut name = path.file_name().context("--out names no file")?.to_owned();
    name.push(".part");
    let part = path.with_file_name(name);
    fs::write(&part, text).with_context(|| format!("write {}", part.display()))?;
    fs::rename(&part, path).with_context(|| format!("rename {} to {}", part.display(), path.display()))
}

fn replay(options: &Replay, format: Format) -> Result<()> {
    let mut scenario = simulate::read(&options.options.file)?;
    if let Some(pool) = options.pool {
        scenario.host.pool = Bytes(pool).pages_floor();
        scenario.changes.retain(|change| !matches!(change.what, pagoda_core::simulate::ChangeKind::Pool(_)));
    }
    if let Some(tax) = options.idle_tax {
        scenario.host.tax = TaxRate::new(PerMille(tax))?;
        scenario.changes.retain(|change| !matches!(change.what, pagoda_core::simulate::ChangeKind::Tax(_)));
    }
    ensure!(!scenario.vms.is_empty(), "{} has no VM: none ran while it was recorded", options.options.file.display());
    simulate::run_scenario(&scenario, &options.options, format)
}
