//! The tests that need no guest, several test programs side by side.
//!
//! cargo builds them and says where they are; it would run one after the other, and most of their time they wait: for other
//! processes, timers, disks. Simulations have a clock of their own and only compute, so they run at a low priority and take
//! what the others leave of the cores. What a program prints is shown when it has ended, and is in out/tests meanwhile.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_sys::toy::skip::FILE_VARIABLE;
use serde::Deserialize;
use testkit::workspace::{cargo_command, repository};

use crate::hang;

/// At a time, simulations aside.
const SIDE_BY_SIDE: usize = 2;
/// Begun first, in this order: what takes longest must not be what all others wait for in the end. These wait for leases,
/// time-outs and processes, and need little of a core.
const WAITING: [&str; 3] = ["disk", "pagodad", "etcd"];
/// Tests at a time in each of those.
const WAITING_THREADS: usize = 6;
/// After that a program hangs. The longest is rmap's simulation: eight minutes beside the others on two slow cores, at a low
/// priority.
const PROGRAM_LIMIT: Duration = Duration::from_mins(25);
/// Of a simulation, for nice(1).
const LOW_PRIORITY: &str = "10";
const SIMULATION: &str = "sim";

/// What cargo says while it builds, a line each.
#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
}

/// Something that it built.
#[derive(Debug, Deserialize)]
struct Artifact {
    manifest_path: PathBuf,
    target: Target,
    profile: Profile,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    src_path: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

/// A test program that cargo has built.
#[derive(Debug)]
struct Program {
    target: String,
    /// Its source below the repository, such as `crates/rmap/tests/udp.rs`.
    name: String,
    executable: PathBuf,
    /// Of its package: where cargo runs it.
    directory: PathBuf,
}

/// Where the output of each is, from its beginning on.
fn directory() -> PathBuf {
    repository().join("out/tests")
}

/// Builds the test programs of `selection` (options of `cargo test`) and runs all of them. Tests that cannot run note so in
/// `skipped`.
///
/// # Errors
/// cargo or a test program cannot be started.
pub fn run(selection: &[&str], skipped: &Path) -> Result<bool> {
    let Some(programs) = build(selection)? else { return Ok(false) };
    let count = programs.len();
    fs::create_dir_all(directory()).context("make a directory for logs")?;
    let (simulations, others): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| program.target == SIMULATION);
    let (simulations, others) = (Mutex::new(simulations), Mutex::new(others));
    let failed = std::thread::scope(|scope| -> Result<Vec<String>> {
        let mut workers: Vec<_> = (0..SIDE_BY_SIDE).map(|_| scope.spawn(|| drain(&others, skipped))).collect();
        workers.push(scope.spawn(|| drain(&simulations, skipped)));
        let mut failed = Vec::new();
        for worker in workers {
            failed.extend(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(failed)
    })?;
    let examples = cargo_command().arg("test").args(selection).arg("--doc").status();
    let examples = examples.context("run cargo test --doc")?.success();
    println!("{count} test programs, {} failed", failed.len());
    failed.iter().for_each(|name| println!("FAILED: {name}"));
    Ok(failed.is_empty() && examples)
}

/// Test programs, the longest last; `None` when something does not compile, which cargo has said then.
fn build(selection: &[&str]) -> Result<Option<Vec<Program>>> {
    let mut cargo = cargo_command();
    cargo.arg("test").args(selection).args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let mut building = cargo.stdout(Stdio::piped()).spawn().context("run cargo test --no-run")?;
    let mut programs = Vec::new();
    for line in BufReader::new(building.stdout.take().context("what cargo says")?).lines() {
        programs.extend(program(&line.context("read what cargo says")?)?);
    }
    let built = building.wait().context("wait for cargo")?.success();
    ensure!(!built || !programs.is_empty(), "cargo names no test program");
    programs.sort_by_key(|program| WAITING.iter().rev().position(|name| *name == program.target));
    Ok(built.then_some(programs))
}

fn program(message: &str) -> Result<Option<Program>> {
    let understand = || format!("understand cargo's {message}");
    if serde_json::from_str::<Message>(message).with_context(understand)?.reason != "compiler-artifact" {
        return Ok(None);
    }
    let artifact: Artifact = serde_json::from_str(message).with_context(understand)?;
    let (true, Some(executable)) = (artifact.profile.test, artifact.executable) else { return Ok(None) };
    let source = &artifact.target.src_path;
    Ok(Some(Program {
        name: source.strip_prefix(repository()).unwrap_or(source).display().to_string(),
        target: artifact.target.name,
        executable,
        directory: artifact.manifest_path.parent().context("a package without a directory")?.to_owned(),
    }))
}

/// Runs programs until none is left. Those that failed.
fn drain(queue: &Mutex<Vec<Program>>, skipped: &Path) -> Result<Vec<String>> {
    let mut failed = Vec::new();
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(program) = next else { return Ok(failed) };
        if !program.run(skipped)? {
            failed.push(program.name);
        }
    }
}

impl Program {
    fn run(&self, skipped: &Path) -> Result<bool> {
        let mut command = if self.target == SIMULATION {
            let mut nice = Command::new("nice");
            nice.args(["-n", LOW_PRIORITY]).arg(&self.executable);
            nice
        } else {
            Command::new(&self.executable)
        };
        if WAITING.contains(&self.target.as_str()) {
            command.arg(format!("--test-threads={WAITING_THREADS}"));
        }
        command.current_dir(&self.directory).env("CARGO_MANIFEST_DIR", &self.directory);
        command.env(FILE_VARIABLE, skipped);
        // No pipe: what a test leaves behind would keep it open.
        let path = directory().join(self.name.replace('/', "-")).with_extension("log");
        let log = File::create(&path).with_context(|| format!("make {}", path.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone().context("share a log")?).stderr(log);
        let began = Instant::now();
        let mut program = command.spawn().with_context(|| format!("run {}", self.executable.display()))?;
        let ended = hang::wait(&mut program, PROGRAM_LIMIT)?;
        let (seconds, text) = (began.elapsed().as_secs_f64(), fs::read(&path).context("read a log")?);
        let text = String::from_utf8_lossy(&text);
        println!("     Ran {} ({}) in {seconds:.1} s\n{text}", self.name, self.executable.display());
        Ok(ended.is_some_and(|status| status.success()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_among_what_cargo_says() {
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/r/crates/rmap/Cargo.toml","target":{{"name":"udp",
                "src_path":"/r/crates/rmap/tests/udp.rs","kind":["test"]}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = program(&message(true, "\"/t/udp-1\"")).expect("a program").expect("a program");
        assert_eq!((found.target.as_str(), found.directory.as_path()), ("udp", Path::new("/r/crates/rmap")));
        for other in
            [&message(false, "\"/t/pagoda\""), &message(true, "null"), r#"{"reason":"build-finished","success":true}"#]
        {
            assert!(program(other).expect("understood").is_none(), "{other}");
        }
    }
}
