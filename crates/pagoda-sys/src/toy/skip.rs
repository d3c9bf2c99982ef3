//! Tests that cannot run on a machine. Rust's harness counts them as passed; `xtask ci` and `xtask vm` count them apart.

use std::fs::OpenOptions;
use std::io::Write;

/// Where tests that could not run are noted, a line each: `xtask` sets it and reads the file.
pub const FILE_VARIABLE: &str = "PAGODA_SKIPPED";

/// Says that a test did nothing, and why.
///
/// # Panics
/// If it cannot be noted: it would count as passed.
pub fn skipped(why: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {why}", thread.name().unwrap_or("a test"));
    eprintln!("SKIPPED, nothing was tested: {line}");
    if let Some(path) = std::env::var_os(FILE_VARIABLE) {
        let file = OpenOptions::new().append(true).create(true).open(&path);
        file.and_then(|mut file| writeln!(file, "{line}")).expect("note that a test was skipped");
    }
}
