//! Completions and manual pages, both from the definition of the command line.

use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;

pub fn completion(shell: Shell) -> Result<()> {
    // Into memory first: the generator panics when the reader of a pipe has gone.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "pagoda", &mut script);
    let script = String::from_utf8(script).context("generate completions")?;
    Ok(crate::output::print_text(&script)?)
}

/// Writes `pagoda.1`, `pagoda-run.1`, `pagoda-vm-show.1`, ... and `pagoda-qemu.1`.
pub fn write_pages(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    clap_mangen::generate_to(Cli::command(), dir)
        .with_context(|| format!("write manual pages into {}", dir.display()))?;
    let page = dir.join("pagoda-qemu.1");
    std::fs::write(&page, QEMU_PAGE).with_context(|| format!("write {}", page.display()))
}

/// The other face of this program has no options of its own, so its page is written by hand.
const QEMU_PAGE: &str = include_str!("pagoda-qemu.1");
