//! The command line of Pagoda. Called `pagoda-qemu`, it stands in for QEMU: see `wrapper`. Started by itself for a clone, it
//! becomes the clone's QEMU: see `run/clone/child.rs`.

mod cli;
mod disk;
mod doctor;
mod drain;
mod exit;
mod hosts;
mod man;
mod moves;
mod mrc;
mod outboxes;
mod output;
mod policy;
mod pool;
mod qemu_args;
mod run;
mod server;
mod show;
mod simulate;
mod snapshot;
mod top;
mod trace;
mod units;
mod wrapper;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use pagoda_api::{Client, socket_path};

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let result = match (qemu_words(), run::clone::child::wanted()) {
        (Some(words), _) => words.and_then(wrapper::run),
        (None, Some(start)) => start.and_then(run::clone::child::become_qemu),
        (None, None) => dispatch(Cli::parse()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn dispatch(cli: Cli) -> Result<()> {
    let client = Client::new(socket_path(cli.global.socket.as_deref())).saying_when_slow(say_slow);
    let format = cli.global.format();
    match cli.command {
        Command::Run(options) => run::run(&client, options),
        Command::Ls => show::ls(&client, format),
        Command::Top(options) => top::run(&client, &options, format),
        Command::Vm(command) => show::vm(&client, &command, format),
        Command::Moves(command) => moves::run(&client, &command, format),
        Command::Host(command) => show::host(&client, &command, format),
        Command::Doctor(options) => doctor::run(&client, &options, format),
        Command::Admit(options) => policy::admit(&client, &options, format),
        Command::WhatIf(options) => policy::what_if(&client, &options, format),
        Command::Trace(command) => trace::run(&client, &command, format),
        Command::Simulate(options) => simulate::run(&options, format),
        Command::Snapshot(command) => snapshot::run(&client, &command, format),
        Command::Outbox(command) => outboxes::run(&client, &command, format),
        Command::Pool(command) => pool::run(command, format),
        Command::Disk(command) => disk::run(command, format),
        Command::Completion { shell } => man::completion(shell),
        Command::Man { dir } => man::write_pages(&dir),
    }
}

fn say_slow(socket: &Path) {
    eprintln!("pagoda: the daemon on {} does not answer yet; still waiting", socket.display());
}

/// QEMU's options, if that is whom we stand in for.
fn qemu_words() -> Option<Result<Vec<String>>> {
    let words: Vec<OsString> = std::env::args_os().collect();
    if Path::new(words.first()?).file_name()? != wrapper::NAME {
        return None;
    }
    Some(run::in_utf8(words).map(|words| words[1..].to_vec()))
}
