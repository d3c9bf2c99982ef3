//! What would keep the shim out of the program.
//!
//! A program without the shim cannot open its RAM, and ends. These checks, and those of the program itself
//! ([`super::program`]), say why before anything is started. Only the one for QEMU is needed for safety.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::exit::UsageError;

/// Descriptors that a program needs for itself and for the shim: RAM, userfaultfds and two connections.
const DESCRIPTORS_MIN: u64 = 128;
/// What a lower limit is raised to, where that is allowed: the usual one.
const DESCRIPTORS: u64 = 1024;

/// All that can be seen of a shim before a program is started with it. `has_gate`: the program is QEMU.
pub fn check(shim: &Path, has_gate: bool) -> Result<()> {
    if !shim.is_file() {
        bail!(
            "the daemon names {} as the shim, but there is no such file: install it, or start pagodad with the right \
             --shim",
            shim.display()
        );
    }
    check_path(shim)?;
    if has_gate { check_gate(shim) } else { Ok(()) }
}

/// The dynamic linker splits its list of libraries at blanks and colons and replaces what begins with `$`.
fn check_path(shim: &Path) -> Result<()> {
    let bytes = shim.as_os_str().as_bytes();
    if shim.is_absolute() && !bytes.iter().any(|byte| b" \t\n:$".contains(byte)) {
        return Ok(());
    }
    Err(UsageError(format!(
        "the shim is at {}, and the dynamic linker takes an absolute path without blanks, colons and $ only: install \
         Pagoda elsewhere, or start pagodad with --shim and the path of a link to it",
        shim.display()
    ))
    .into())
}

/// Where a library has the names of its functions, and what of them a shim with a gate has.
const NAMES_BYTES: u64 = 1 << 20;
const GATE: &[u8] = b"\0strcmp\0";

/// QEMU is told that RAM is shared. A shim of before would let it leave RAM out of a migration, where it is told to.
fn check_gate(shim: &Path) -> Result<()> {
    let mut names = Vec::new();
    let file = File::open(shim).with_context(|| format!("open {}", shim.display()))?;
    file.take(NAMES_BYTES).read_to_end(&mut names).with_context(|| format!("read {}", shim.display()))?;
    if names.windows(GATE.len()).any(|window| window == GATE) {
        return Ok(());
    }
    Err(UsageError(format!(
        "the shim at {} is older than this command and does not keep QEMU from leaving guest RAM out of a migration: install \
         both from one version, and restart pagodad with this shim",
        shim.display()
    ))
    .into())
}

/// Raises a limit that is too low, if it may.
pub fn check_descriptors() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= DESCRIPTORS_MIN) {
        return Ok(());
    }
    let raised = limit.maximum.map_or(DESCRIPTORS, |maximum| maximum.min(DESCRIPTORS));
    if raised < DESCRIPTORS_MIN {
        return Err(UsageError(format!(
            "this process may have {raised} open files, and a VM needs {DESCRIPTORS_MIN}: raise the limit (ulimit -Hn, \
             LimitNOFILE= of systemd)"
        ))
        .into());
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..limit }).context("raise the limit of open files")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_the_dynamic_linker_would_split_are_refused() {
        let table = [
            ("/usr/lib/pagoda/shim.so", true),
            ("/opt/möbel%20#/shim.so", true),
            ("/opt/my pagoda/shim.so", false),
            ("/opt/a:b/shim.so", false),
            ("/opt/$LIB/shim.so", false),
            ("shim.so", false),
        ];
        for (path, expected) in table {
            assert_eq!(check_path(Path::new(path)).is_ok(), expected, "{path}");
        }
    }
}
