//! What the tests with guests show, counted: a way to RAM that nobody manages, or a state that does not pass between plain QEMU
//! and Pagoda, is a fault however seldom. Each test is one way or several; there is no peer.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pagoda_sys::toy::skip::FILE_VARIABLE;
use testkit::accel;
use testkit::image::{self, ImageArgs};
use testkit::results::report::{Bar, Report};
use testkit::workspace::{cargo_command, programs_dir, repository};

use super::Setup;
use super::balloon::guest::QEMU;

/// A row: what its tests show, and the names that they begin with.
const ROWS: [(&str, &[&str]); 2] = [
    ("ways to RAM that nobody would manage: ways that were open", &["unmanaged::"]),
    (
        "options, savevm and migration, plain QEMU to Pagoda and back, QEMU 7.2 and 10: neither right nor refused before",
        &["options::", "rewriting::"],
    ),
];

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// The tests cannot be run.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let images = image::build(&ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(QEMU, &images, &setup.dir)?;
    let mut report = setup.report_of("ways", accelerator.name());
    for (row, names) in ROWS {
        let count = tests(names).with_context(|| row.to_owned())?;
        report.single(&format!("{row} (of {} tests)", count.run), "tests", &[count.failed as f64], Bar::AtMost(0.0));
        ensure!(count.skipped.is_empty(), "{row}: this machine lacks what these need: {}", count.skipped);
    }
    Ok((report, String::new()))
}

struct Count {
    run: usize,
    failed: usize,
    /// Why some did nothing.
    skipped: String,
}

/// Runs the tests whose names begin so, with the programs beside this one.
fn tests(names: &[&str]) -> Result<Count> {
    let skipped = repository().join("target/bench/skipped");
    std::fs::write(&skipped, "").with_context(|| format!("write {}", skipped.display()))?;
    let mut command: Command = cargo_command();
    command.args(["test", "-p", "vm-tests", "--test", "vm", "--"]).args(names).arg("--test-threads=4");
    command.env("PAGODA_BIN_DIR", programs_dir()?).env(FILE_VARIABLE, &skipped);
    let output = command.stderr(Stdio::inherit()).output().context("run the tests")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let ended = |how: &str| said.lines().filter(|line| line.starts_with("test ") && line.ends_with(how)).count();
    let (passed, failed) = (ended(" ... ok"), ended(" ... FAILED"));
    if failed > 0 {
        eprintln!("{said}");
    }
    ensure!(passed > 0 && output.status.success() == (failed == 0), "the tests ended with {}: {said}", output.status);
    let skipped = std::fs::read_to_string(&skipped).context("read which tests were skipped")?;
    Ok(Count { run: passed + failed, failed, skipped })
}
