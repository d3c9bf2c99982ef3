//! A disk whose reads are answered late and pin the reader's pages meanwhile: a FUSE file opened with FOPEN_DIRECT_IO, which
//! no flag shows. And the C programs that tests run.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::programs;

/// A late disk, which is mounted until it is dropped.
#[derive(Debug)]
pub struct LateDisk {
    mount: PathBuf,
    server: Child,
}

impl LateDisk {
    /// Mounts a new directory `mount` with one file that has the content of `image`.
    ///
    /// # Errors
    /// Not compiled, or FUSE refuses.
    pub fn mount(mount: &Path, image: &Path, delay: Duration) -> Result<Self> {
        std::fs::create_dir(mount).with_context(|| format!("make {}", mount.display()))?;
        let mut command = Command::new(c_programs()?.join("late_disk"));
        command.arg(mount).arg(image).args([&delay.as_millis().to_string(), "direct"]).stdout(Stdio::piped());
        pagoda_sys::toy::process::die_with_parent(&mut command);
        let mut server = command.spawn().context("start the late disk")?;
        let mut line = String::new();
        let said = server.stdout.take().context("what the late disk says")?;
        BufReader::new(said).read_line(&mut line).context("wait for the late disk")?;
        let disk = Self { mount: mount.to_owned(), server };
        ensure!(line == "mounted\n", "the late disk is not mounted: {line:?}");
        Ok(disk)
    }

    /// The one file that the mounted directory has.
    pub fn file(&self) -> PathBuf {
        self.mount.join("disk")
    }
}

impl Drop for LateDisk {
    fn drop(&mut self) {
        // Lazily: what still has the file open ends with the test. The server ends when it is unmounted.
        let unmounted = Command::new("umount").arg("-l").arg(&self.mount).status();
        if !unmounted.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("umount {}: {unmounted:?}", self.mount.display());
        }
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// The directory of the C programs and their image, compiled once a run.
///
/// # Errors
/// They cannot be compiled.
pub fn c_programs() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let xtask = programs::bin_dir().map_err(|error| format!("{error:#}"))?.join("xtask");
        let output =
            Command::new(xtask).arg("programs").output().map_err(|error| format!("xtask programs: {error}"))?;
        if !output.status.success() {
            return Err(format!("xtask programs: {}", String::from_utf8_lossy(&output.stderr)));
        }
        Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
    });
    built.clone().map_err(anyhow::Error::msg)
}
