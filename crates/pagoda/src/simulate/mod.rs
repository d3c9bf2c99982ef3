//! `pagoda simulate`: the policy over scripted VMs, under virtual time. No daemon takes part.

mod file;
mod plot;
mod report;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use pagoda_core::simulate;

use crate::output::print_json;
use crate::show::Format;

/// A longer scenario is a mistake: it is read into memory.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Run the memory policy over scripted VMs, under virtual time
///
/// The file says what the host has, which VMs come when and what they use. The policy is the
/// daemon's own. scenarios/ has examples, among them the experiments of the ESX paper.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda simulate scenarios/idle-tax.toml
  pagoda simulate scenarios/reallocation.toml --plot out.svg
  pagoda simulate scenarios/day.toml --json | jq .states")]
pub struct Simulate {
    /// The scenario
    pub file: PathBuf,
    /// Draw states and memory over time into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// With --json, also print what was recorded, point by point
    #[arg(long)]
    pub points: bool,
}

pub fn run(options: &Simulate, format: Format) -> Result<()> {
    let file = options.file.display();
    let length = fs::metadata(&options.file).with_context(|| format!("read {file}"))?.len();
    anyhow::ensure!(length <= FILE_BYTES_MAX, "{file} has {length} bytes; a scenario has at most {FILE_BYTES_MAX}");
    let text = fs::read_to_string(&options.file).with_context(|| format!("read {file}"))?;
    let scenario = file::parse(&text).with_context(|| format!("read {file}"))?;
    let recording = simulate::run(&scenario).with_context(|| format!("simulate {file}"))?;
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
