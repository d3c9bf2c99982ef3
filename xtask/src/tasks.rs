//! Tasks that run cargo: the whole check, the tests, the tests with real guests.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use crate::bench::repository;
use crate::{hang, suite, tidy};

/// What follows goes to the test programs: names of tests, or options after `--`.
#[derive(Debug, Clone, Args)]
pub struct TestArgs {
    /// Passed on to `cargo test`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// One profile for all that is checked and tested, and one selection of packages: what is compiled is compiled once.
const PROFILE: [&str; 2] = ["--profile", "ci"];

/// For the tests with real guests, which take a quarter of an hour on two cores.
const GUESTS_LIMIT: Duration = Duration::from_mins(45);

/// Formatting, lints, rules, documentation, tests: what must hold for every change.
///
/// # Errors
/// cargo cannot be run.
pub fn ci() -> Result<bool> {
    let steps: [(&str, &[&str]); 3] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--profile", "ci", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ("documentation", &["doc", "--profile", "ci", "--workspace", "--no-deps", "--document-private-items"]),
    ];
    let mut holds = true;
    for (name, arguments) in steps {
        holds &= report(name, cargo(arguments)?);
    }
    holds &= report("rules", tidy::main()?);
    holds &= report("tests", test(&TestArgs { arguments: Vec::new() })?);
    Ok(holds)
}

/// Every test that needs no guest.
///
/// # Errors
/// cargo cannot be run.
pub fn test(args: &TestArgs) -> Result<bool> {
    let selection = [&PROFILE[..], &["--workspace", "--exclude", "vm-tests"]].concat();
    // Who asks for certain tests wants to see what they print.
    if args.arguments.is_empty() {
        return suite::run(&selection);
    }
    cargo_with(&[&["test"], &selection[..]].concat(), &args.arguments)
}

/// The tests with real guests, four at a time: so many guests the harness lets run.
///
/// # Errors
/// cargo cannot be run.
pub fn vm(args: &TestArgs) -> Result<bool> {
    if !cargo(&[&["build"], &PROFILE[..], &["--workspace"]].concat())? {
        return Ok(false);
    }
    let mut arguments = args.arguments.clone();
    if !arguments.iter().any(|argument| argument == "--") {
        arguments.push("--".to_owned());
    }
    arguments.push("--test-threads=4".to_owned());
    let mut guests = cargo_command();
    guests.arg("test").args(PROFILE).args(["--workspace", "--test", "vm"]).args(arguments);
    let ended = hang::wait(&mut guests.spawn().context("run cargo test")?, GUESTS_LIMIT)?;
    Ok(ended.is_some_and(|status| status.success()))
}

fn report(name: &str, holds: bool) -> bool {
    println!("ci: {name}: {}", if holds { "ok" } else { "FAILED" });
    holds
}

fn cargo(arguments: &[&str]) -> Result<bool> {
    cargo_with(arguments, &[])
}

fn cargo_with(arguments: &[&str], more: &[String]) -> Result<bool> {
    let status = cargo_command()
        .args(arguments)
        .args(more)
        .status()
        .with_context(|| format!("run cargo {}", arguments.join(" ")))?;
    Ok(status.success())
}

pub fn cargo_command() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(repository());
    command
}
