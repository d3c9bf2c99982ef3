//! Everything a bench changes on the machine is put back: when a guard is dropped, on a panic
//! (whose hook runs even where panics abort), on SIGINT, SIGTERM and SIGHUP, and, after a kill -9
//! or a power cut, at the start of the next bench, from a record on disk.
//!
//! The record is written before the change. Undoing twice is harmless. Settings of the host are also other processes'
//! matter and kept for the whole machine by [`crate::tuned`]; what is undone here is a change within one
//! bench.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::tuned::{Tuned, chosen};
use anyhow::{Context, Result, bail};
use pagoda_sys::toy::process;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// A killed process takes a moment to leave its cgroup.
const CGROUP_REMOVAL_MAX: Duration = Duration::from_secs(5);
/// So does one that has a file open.
const UNMOUNT_MAX: Duration = Duration::from_secs(5);
/// So does the memory of one that was killed.
const SWAP_OFF_MAX: Duration = Duration::from_secs(30);
const RETRY_EVERY: Duration = Duration::from_millis(5);

/// How to put one thing back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Undo {
    /// Write the old value into a setting.
    Setting { path: PathBuf, value: String },
    /// Stop swapping to a file or device.
    SwapOff { path: PathBuf },
    /// Delete this file, if it is there.
    File { path: PathBuf },
    /// Delete a directory and all in it.
    Directory { path: PathBuf },
    /// Delete a cgroup, whose processes are gone by then.
    Cgroup { path: PathBuf },
    /// Kill a process, if its start time says that it is still the same.
    Process { pid: u32, start_ticks: u64 },
    /// Delete a network namespace and the links in it.
    Namespace { name: String },
    /// Take a file system away.
    Mount { path: PathBuf },
    /// Take the file away from a loop device.
    Loop { device: PathBuf },
}

impl Undo {
    /// Does it. What is undone already is no error.
    ///
    /// # Errors
    /// The system refuses.
    pub fn perform(&self) -> io::Result<()> {
        let done = match self {
            Self::Setting { path, value } => fs::write(path, value),
            Self::SwapOff { path } => swap_off(path),
            Self::File { path } => fs::remove_file(path),
            Self::Directory { path } => fs::remove_dir_all(path),
            Self::Cgroup { path } => remove_cgroup(path),
            Self::Process { pid, start_ticks } => {
                if start_ticks_of(*pid) == Some(*start_ticks) {
                    process::kill(*pid)
                } else {
                    Ok(())
                }
            }
            Self::Namespace { name } => remove_namespace(name),
            Self::Mount { path } => unmount(path),
            Self::Loop { device } => detach(device),
        };
        match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

fn swap_off(path: &Path) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match process::swap_off(path) {
            // Not in use any more.
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => return Ok(()),
            // A process that was killed may not have given its memory back yet, and a signal ends the call.
            Err(error) if is_passing(&error) && start.elapsed() < SWAP_OFF_MAX => std::thread::sleep(RETRY_EVERY),
            other => return other,
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    let passing = [Errno::NOMEM, Errno::INTR, Errno::BUSY];
    passing.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn remove_namespace(name: &str) -> io::Result<()> {
    if !Path::new("/run/netns").join(name).exists() {
        return Ok(());
    }
    let removed = Command::new("ip").args(["netns", "del", name]).status()?;
    if removed.success() { Ok(()) } else { Err(io::Error::other(format!("ip netns del: {removed}"))) }
}

fn unmount(path: &Path) -> io::Result<()> {
    let show = path.display().to_string();
    let start = Instant::now();
    loop {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        if !mounts.lines().any(|line| line.split(' ').nth(1) == Some(&show)) {
            return Ok(());
        }
        let output = Command::new("umount").arg(path).output()?;
        // Whoever was killed just now may still have a file open.
        if !output.status.success() && start.elapsed() >= UNMOUNT_MAX {
            return Err(io::Error::other(format!("umount: {}", String::from_utf8_lossy(&output.stderr).trim())));
        }
        std::thread::sleep(RETRY_EVERY);
    }
}

fn detach(device: &Path) -> io::Result<()> {
    let Some(name) = device.file_name() else { return Ok(()) };
    if !Path::new("/sys/block").join(name).join("loop").exists() {
        return Ok(());
    }
    let detached = Command::new("losetup").arg("--detach").arg(device).status()?;
    if detached.success() { Ok(()) } else { Err(io::Error::other(format!("losetup --detach: {detached}"))) }
}

fn remove_cgroup(path: &Path) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match fs::remove_dir(path) {
            Err(error) if error.raw_os_error() == Some(16) && start.elapsed() < CGROUP_REMOVAL_MAX => {
                std::thread::sleep(RETRY_EVERY);
            }
            other => return other,
        }
    }
}

/// When a process started: with the pid it names a process for good.
pub fn start_ticks_of(pid: u32) -> Option<u64> {
    pagoda_sys::process::start_time(pid).ok()
}

struct Ledger {
    record: PathBuf,
    entries: Vec<(u64, Undo)>,
    next_id: u64,
    /// Of the host's settings; `None` once all is undone.
    tuned: Option<Tuned>,
    _lock: File,
}

static LEDGER: Mutex<Option<Ledger>> = Mutex::new(None);

fn ledger() -> MutexGuard<'static, Option<Ledger>> {
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ledger {
    fn write(&self) -> io::Result<()> {
        let undos: Vec<&Undo> = self.entries.iter().map(|(_, undo)| undo).collect();
        let scratch = self.record.with_extension("new");
        fs::write(&scratch, serde_json::to_vec_pretty(&undos)?)?;
        fs::rename(&scratch, &self.record)
    }
}

/// The newest first. Gives, in their order, those that could not be done.
fn perform_all(undos: impl DoubleEndedIterator<Item = Undo>) -> Vec<Undo> {
    let mut left: Vec<Undo> = undos.rev().filter(|undo| !is_put_back(undo)).collect();
    left.reverse();
    left
}

fn is_put_back(undo: &Undo) -> bool {
    let done = undo.perform();
    if let Err(error) = &done {
        eprintln!("bench: put back {undo:?}: {error}; the next bench tries again");
    }
    done.is_ok()
}

/// Puts back what an earlier bench left, and from now on whatever this one changes.
///
/// # Errors
/// Another bench is running; the record cannot be read or written.
pub fn start(work_dir: &Path) -> Result<()> {
    fs::create_dir_all(work_dir).with_context(|| format!("make {}", work_dir.display()))?;
    let lock_path = work_dir.join("bench.lock");
    let lock = File::create(&lock_path).context("open the bench lock")?;
    if rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
        bail!("another bench is running (it holds {})", lock_path.display());
    }
    let record = work_dir.join("undo.json");
    let mut still_left = Vec::new();
    match fs::read(&record) {
        Ok(bytes) => {
            let left: Vec<Undo> =
                serde_json::from_slice(&bytes).with_context(|| format!("read {}: delete it once", record.display()))?;
            if !left.is_empty() {
                eprintln!("bench: putting back {} changes of a bench that was killed", left.len());
            }
            // What a setting was before any bench is known to `Tuned`, which puts it back below.
            still_left = perform_all(left.into_iter().filter(|undo| !matches!(undo, Undo::Setting { .. })));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).context("read the undo record"),
    }
    if !still_left.is_empty() {
        bail!("an earlier bench left what cannot be put back: do so by hand, then delete {}", record.display());
    }
    let tuned = Tuned::begin([]).context("put back host settings that a killed process left")?;
    let new = Ledger { record, entries: Vec::new(), next_id: 0, tuned: Some(tuned), _lock: lock };
    new.write().context("write the undo record")?;
    *ledger() = Some(new);
    process::on_termination(undo_all).context("install the termination handler")?;
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default_hook(info);
        undo_all();
    }));
    Ok(())
}

/// Puts everything back, the newest first.
pub fn undo_all() {
    // A panic inside this module would find the lock taken by its own thread.
    let Ok(mut guard) = LEDGER.try_lock() else { return };
    if let Some(ledger) = guard.as_mut() {
        let left = perform_all(std::mem::take(&mut ledger.entries).into_iter().map(|(_, undo)| undo));
        ledger.entries = left.into_iter().map(|undo| (u64::MAX, undo)).collect();
        // The last user of the host's settings puts them back.
        ledger.tuned = None;
        if let Err(error) = ledger.write() {
            eprintln!("bench: write the undo record: {error}");
        }
    }
}

/// Puts its change back when dropped.
#[derive(Debug)]
#[must_use = "dropping it puts the change back at once"]
pub struct Guard {
    id: u64,
}

impl Guard {
    /// Promises to put a change back. Call before making the change.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn new(undo: Undo) -> Result<Self> {
        let mut guard = ledger();
        let Some(ledger) = guard.as_mut() else { bail!("undo::start has not been called") };
        let id = ledger.next_id;
        ledger.next_id += 1;
        ledger.entries.push((id, undo));
        ledger.write().context("write the undo record")?;
        Ok(Self { id })
    }

    /// Changes a setting in /proc or /sys, and remembers its value.
    ///
    /// # Errors
    /// No such setting, or no permission.
    pub fn setting(path: &Path, value: &str) -> Result<Self> {
        let guard = Self::keep_setting(path)?;
        fs::write(path, value).with_context(|| format!("write {value} to {}", path.display()))?;
        Ok(guard)
    }

    /// Remembers a setting that another program is about to change.
    ///
    /// # Errors
    /// No such setting.
    pub fn keep_setting(path: &Path) -> Result<Self> {
        let show = path.display();
        remember(path).with_context(|| format!("save {show}"))?;
        let old = fs::read_to_string(path).with_context(|| format!("read {show}"))?;
        Self::new(Undo::Setting { path: path.to_owned(), value: chosen(&old).to_owned() })
    }
}

/// For the machine, before it is remembered for this bench.
fn remember(path: &Path) -> io::Result<()> {
    let mut guard = ledger();
    let Some(ledger) = guard.as_mut() else { return Err(io::Error::other("undo::start has not been called")) };
    match &ledger.tuned {
        Some(tuned) => tuned.remember(path),
        None => {
            ledger.tuned = Some(Tuned::begin([path])?);
            Ok(())
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut guard = ledger();
        let Some(ledger) = guard.as_mut() else { return };
        let Some(at) = ledger.entries.iter().position(|(id, _)| *id == self.id) else { return };
        // What fails stays in the record, and is tried again at the end and by the next bench.
        if is_put_back(&ledger.entries[at].1) {
            ledger.entries.remove(at);
        }
        if let Err(error) = ledger.write() {
            eprintln!("bench: write the undo record: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_identifies_a_process() {
        assert!(start_ticks_of(std::process::id()).is_some_and(|ticks| ticks > 0));
        assert_eq!(start_ticks_of(u32::MAX), None);
    }

    #[test]
    fn undoing_what_is_gone_is_no_error() {
        let path = std::env::temp_dir().join("pagoda-undo-test-no-such");
        for undo in [
            Undo::File { path: path.clone() },
            Undo::Directory { path: path.clone() },
            Undo::Cgroup { path: path.clone() },
            Undo::SwapOff { path },
            Undo::Process { pid: u32::MAX, start_ticks: 1 },
            Undo::Namespace { name: "pagoda-undo-test-no-such".to_owned() },
        ] {
            let done = undo.perform();
            // Without privileges swapoff is refused before the path is looked at.
            let refused = matches!(&done, Err(e) if e.kind() == io::ErrorKind::PermissionDenied);
            assert!(done.is_ok() || refused, "{undo:?}: {done:?}");
        }
    }
}
