//! `pagoda simulate`: the policy over scripted VMs, under virtual time, or over what a daemon recorded. No daemon takes part.

pub mod file;
mod plot;
mod replay;
mod report;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use pagoda_core::simulate::{self, Scenario};

use crate::output::{Format, print_json};

/// A longer scenario is a mistake: it is read into memory. A week of a hundred recorded VMs is shorter.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Run the memory policy over scripted VMs, under virtual time
///
/// The file says what the host has, which VMs come when and what they use. The policy is the
/// daemon's own. scenarios/ has examples, among them the experiments of the ESX paper.
///
/// With --replay, the file is a recording that `pagodad --policy-recording` made. What was measured
/// goes into the policy again, and every plan is compared with the one that was made then, to the
/// page. A difference is a failure (status 1).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda simulate scenarios/idle-tax.toml
  pagoda simulate scenarios/reallocation.toml --plot out.svg
  pagoda simulate scenarios/day.toml --json | jq .states
  pagoda simulate --replay policy.jsonl")]
pub struct Simulate {
    /// Make the rounds of a recording again instead, and compare their plans
    #[arg(long, conflicts_with_all = ["plot", "points"])]
    pub replay: bool,
    #[command(flatten)]
    pub options: Options,
}

// No doc comment: clap would take it for that of the commands that have these options.
#[derive(Debug, Args)]
pub struct Options {
    /// The scenario, or the recording
    pub file: PathBuf,
    /// Draw states and memory over time into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// With --json, also print what was recorded, point by point
    #[arg(long)]
    pub points: bool,
}

pub fn run(command: &Simulate, format: Format) -> Result<()> {
    if command.replay {
        return replay::run(&command.options.file, format);
    }
    run_scenario(&read(&command.options.file)?, &command.options, format)
}

/// Reads a scenario file.
pub fn read(path: &Path) -> Result<Scenario> {
    let file = path.display();
    let length = fs::metadata(path).with_context(|| format!("read {file}"))?.len();
    anyhow::ensure!(length <= FILE_BYTES_MAX, "{file} has {length} bytes; a scenario has at most {FILE_BYTES_MAX}");
    let text = fs::read_to_string(path).with_context(|| format!("read {file}"))?;
    file::parse(&text).with_context(|| format!("read {file}"))
}

/// Simulates what was read from `options.file`, and reports.
pub fn run_scenario(scenario: &Scenario, options: &Options, format: Format) -> Result<()> {
    let recording = simulate::run(scenario).with_context(|| format!("simulate {}", options.file.display()))?;
    if let Some(path) = &options.plot {
        fs::write(path, plot::draw(&recording)).with_context(|| format!("write {}", path.display()))?;
    }
    match format {
        Format::Json => print_json(&report::Report::new(&recording, options.points))?,
        Format::Text => crate::output::print_text(&report::text(&recording))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests;
