//! The servers of a pool and the exporters of its disks, in a program of their own.
//!
//! The command `pagoda` checks the options of `pool serve`, `pool try` and `disk export`, and becomes this program by
//! exec(2) with the same words. So the process, its signals and its output are those of the command; messages begin
//! with `pagoda: `.

mod cli;
mod export;
mod metrics;
mod serve;
mod trial;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use pagoda_cli::exit;

use crate::cli::{Cli, Command, Disk, Pool};

fn main() -> ExitCode {
    match dispatch(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error, exit::pool_status(&error)),
    }
}

fn dispatch(cli: &Cli) -> Result<()> {
    let format = cli.global.format();
    match &cli.command {
        Command::Pool(Pool::Serve(options)) => serve::run(options, format),
        Command::Pool(Pool::Try(options)) => trial::run(options, format),
        Command::Disk(Disk::Export(options)) => export::run(options, format),
    }
}
