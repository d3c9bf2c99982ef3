//! C programs that tests and benches run: a VMM of somebody else's, and the slow disk that it reads.
//!
//! They are C because they call what other people's programs call: libc's functions as a C compiler binds them, libaio's and
//! liburing's inline functions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::repository;

/// A FUSE file system with one slow file.
pub const LATE_DISK: &str = "late_disk";
/// A program that reads it into RAM in every way there is.
pub const VICTIM: &str = "victim";

/// A program with a userfaultfd of its own on its RAM.
const HOLDER: &str = "holder";

/// Each with what it is linked with.
const PROGRAMS: [(&str, &[&str]); 3] = [
    (LATE_DISK, &["-I/usr/include/fuse3", "-lfuse3", "-lpthread"]),
    (VICTIM, &["-pthread", "-laio", "-luring"]),
    (HOLDER, &[]),
];

/// What the victim reads: pages that begin and end with their offset, marked (`MARK` in its source).
pub const VICTIM_IMAGE: &str = "victim.img";
const MARK: u64 = 0x5a5a << 48;
/// More than 32 ways of half a MiB.
const IMAGE_BYTES: u64 = 16 << 20;
const PAGE: usize = 4096;

/// Compiles them and writes the victim's image; gives their directory.
///
/// # Errors
/// There is no compiler or a library is missing.
pub fn build() -> Result<PathBuf> {
    let directory = repository().join("out/programs");
    fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
    for (name, libraries) in PROGRAMS {
        compile(name, libraries, &directory)?;
    }
    let image = directory.join(VICTIM_IMAGE);
    if !image.exists() {
        let new = image.with_extension(std::process::id().to_string());
        fs::write(&new, image_content()).and_then(|()| fs::rename(&new, &image)).context("write the victim's image")?;
    }
    Ok(directory)
}

fn image_content() -> Vec<u8> {
    let mut content = Vec::with_capacity(IMAGE_BYTES as usize);
    for offset in (0..IMAGE_BYTES).step_by(PAGE) {
        let mark = (MARK | offset).to_le_bytes();
        content.extend_from_slice(&mark);
        content.resize(content.len() + PAGE - 2 * mark.len(), 0xab);
        content.extend_from_slice(&mark);
    }
    content
}

fn compile(name: &str, libraries: &[&str], directory: &Path) -> Result<()> {
    let source = repository().join("tests/vm/programs").join(name).with_extension("c");
    // It replaces the old one by renaming: who runs that at this moment is not disturbed.
    let new = directory.join(format!("{name}.{}", std::process::id()));
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-D_FORTIFY_SOURCE=2", "-Wall", "-Wextra", "-Werror", "-o"]);
    let output = compiler.arg(&new).arg(&source).args(libraries).output().context("run cc")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("compile {} (scripts/install-deps.sh test installs what it needs): {said}", source.display());
    }
    fs::rename(&new, directory.join(name)).context("name a program")
}
