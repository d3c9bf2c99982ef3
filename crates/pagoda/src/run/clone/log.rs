//! What the QEMUs of clones print.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use pagoda_api::vm_file_name;
use rustix::fs::OFlags;

/// The directory of logs if root starts the clones.
const DIR_OF_ROOT: &str = "/var/log/pagoda";
/// Where those of others are, below their directory for state or their home.
const DIR_OF_USER: &str = "pagoda";
/// How much of the end is shown of a QEMU that could not be started.
const TAIL_BYTES: u64 = 2000;
/// The mode of a log, which is its owner's alone.
const LOG_MODE: u32 = 0o600;

/// A log that QEMU appends to. Dropped before its clone runs, it is removed, unless it was there before.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
    /// It was there before, or its clone runs.
    is_kept: bool,
    /// The length of the file before QEMU wrote, in bytes.
    from: u64,
}

impl Log {
    /// Opens the log of a VM. What is in it stays. It is for its owner alone, for guests print what they like.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(dir: &Path, vm: &str) -> Result<Log> {
        let path = dir.join(vm_file_name(vm) + ".log");
        let mut options = OpenOptions::new();
        // Nobody else's file by way of a link.
        options.append(true).read(true).mode(LOG_MODE).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let (opened, is_kept) = match options.clone().create_new(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => (options.open(&path), true),
            opened => (opened, false),
        };
        let file = opened.with_context(|| format!("open the log {}", path.display()))?;
        let mut log = Log { path, file, is_kept, from: 0 };
        if is_kept {
            log.from = log.check_found().with_context(|| format!("use the log {}", log.path.display()))?;
        }
        Ok(log)
    }

    /// Of one that was there before: its length. It is for its owner alone from now on.
    fn check_found(&self) -> Result<u64> {
        let found = self.file.metadata()?;
        let is_own = found.is_file() && found.uid() == rustix::process::geteuid().as_raw();
        ensure!(is_own, "it is no file of yours: remove it, or say another --log-dir");
        self.file.set_permissions(Permissions::from_mode(LOG_MODE))?;
        Ok(found.len())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An output of a process.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn end(&self) -> Result<Stdio> {
        Ok(self.file.try_clone().context("open the log once more")?.into())
    }

    /// The end of what was written since it was opened; empty if that cannot be read.
    pub fn tail(&self) -> String {
        let read = || {
            let len = self.file.metadata()?.len();
            let first = self.from.max(len.saturating_sub(TAIL_BYTES));
            let mut bytes = vec![0; len.saturating_sub(first) as usize];
            self.file.read_exact_at(&mut bytes, first)?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&bytes).trim().to_owned())
        };
        read().unwrap_or_default()
    }

    /// The log stays, because its clone runs.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if !self.is_kept
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            eprintln!("pagoda: remove {}: {error}", self.path.display());
        }
    }
}

/// Where logs go unless the user says it.
///
/// # Errors
/// The user has no home.
pub fn default_dir() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(DIR_OF_ROOT.into());
    }
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Ok(state.context("HOME is not set: say --log-dir")?.join(DIR_OF_USER))
}

/// Makes the directory if it is not there.
///
/// # Errors
/// It cannot be made.
pub fn make_dir(dir: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(dir).with_context(|| format!("make {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_log_that_was_there_stays() {
        let dir = std::env::temp_dir().join(format!("pagoda-clone-log-{}", std::process::id()));
        make_dir(&dir).unwrap();
        std::fs::write(dir.join("old.log"), "before\n").unwrap();
        for (name, was_there) in [("old", true), ("new", false)] {
            let log = Log::open(&dir, name).unwrap();
            assert_eq!(log.tail(), "");
            (&log.file).write_all(b"one\ntwo\n").unwrap();
            assert_eq!(log.tail(), "one\ntwo", "{name}: nothing of before");
            let path = log.path().to_owned();
            drop(log);
            assert_eq!(path.exists(), was_there, "{name}");
        }
        std::os::unix::fs::symlink(dir.join("old.log"), dir.join("link.log")).unwrap();
        assert!(Log::open(&dir, "link").is_err(), "it is another file");
        assert_eq!(std::fs::metadata(dir.join("old.log")).unwrap().mode() & 0o777, LOG_MODE);
        Log::open(&dir, "kept").unwrap().keep();
        assert!(dir.join("kept.log").exists());
        assert_eq!(std::fs::read_to_string(dir.join("old.log")).unwrap(), "before\none\ntwo\n");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
