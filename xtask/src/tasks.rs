//! Tasks that run cargo: the whole check, the tests, the tests with real guests.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use pagoda_sys::toy::skip::FILE_VARIABLE;
use testkit::workspace::{Build, cargo_command, programs_dir, repository};

use crate::{hang, suite, tidy};

/// What follows goes to the test programs: names of tests, or options after `--`.
#[derive(Debug, Clone, Args)]
pub struct TestArgs {
    /// Passed on to `cargo test`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// What follows goes to `pagoda-bench`; `--help` lists it.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Passed on to `pagoda-bench`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// One profile for all that is checked and tested, and one selection of packages: what is compiled is compiled once.
const PROFILE: [&str; 2] = ["--profile", "ci"];

/// After that a test with real guests hangs. All of them take a quarter of an hour on two fast cores, 35 minutes on two slow ones.
const GUESTS_LIMIT: Duration = Duration::from_mins(60);

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
    let skipped = Skipped::begin("tests")?;
    holds &= report("tests", suite::run(&selection(), &skipped.path)?);
    skipped.report()?;
    Ok(holds)
}

/// Every test that needs no guest.
///
/// # Errors
/// cargo cannot be run.
pub fn test(args: &TestArgs) -> Result<bool> {
    // Who asks for certain tests wants to see what they print.
    if args.arguments.is_empty() {
        let skipped = Skipped::begin("tests")?;
        let passed = suite::run(&selection(), &skipped.path)?;
        skipped.report()?;
        return Ok(passed);
    }
    cargo_with(&[&["test"], &selection()[..]].concat(), &args.arguments)
}

/// All but the tests with guests.
fn selection() -> Vec<&'static str> {
    [&PROFILE[..], &["--workspace", "--exclude", "vm-tests"]].concat()
}

/// Tests that lack something on this machine and do nothing. The harness says "ok" of them.
struct Skipped {
    path: PathBuf,
}

impl Skipped {
    fn begin(of: &str) -> Result<Skipped> {
        let directory = repository().join("out/tests");
        fs::create_dir_all(&directory).context("make a directory for logs")?;
        let path = directory.join(format!("skipped-{of}.txt"));
        fs::write(&path, "").with_context(|| format!("write {}", path.display()))?;
        Ok(Skipped { path })
    }

    /// The last line that is printed.
    fn report(&self) -> Result<()> {
        let text = fs::read_to_string(&self.path).with_context(|| format!("read {}", self.path.display()))?;
        let lines: BTreeSet<&str> = text.lines().collect();
        lines.iter().for_each(|line| println!("SKIPPED: {line}"));
        match lines.len() {
            0 => println!("no test was skipped"),
            count => println!("{count} of the tests counted as passed above were SKIPPED: nothing was tested by them"),
        }
        Ok(())
    }
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
    let skipped = Skipped::begin("guests")?;
    let mut guests = cargo_command();
    guests.env(FILE_VARIABLE, &skipped.path);
    guests.arg("test").args(PROFILE).args(["--workspace", "--test", "vm"]).args(arguments);
    let ended = hang::wait(&mut guests.spawn().context("run cargo test")?, GUESTS_LIMIT)?;
    skipped.report()?;
    Ok(ended.is_some_and(|status| status.success()))
}

/// Builds the benches and what they start, and becomes the benches' program.
///
/// # Errors
/// Something does not compile; the program cannot be started.
pub fn bench(args: &BenchArgs) -> Result<bool> {
    Build::BenchProgram.run()?;
    let profiles = programs_dir()?;
    let profiles = profiles.parent().context("find the target directory")?;
    let program = profiles.join("release/pagoda-bench");
    let error = Command::new(&program).args(&args.arguments).exec();
    Err(error).with_context(|| format!("run {}", program.display()))
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
