//! Processes of the hosts that are killed, that stand still, and that wait for a disk.

use std::fs;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use vm_tests::wait;

use super::moving::PHASE_MAX;

/// A process that stands still until this is dropped.
pub struct Stopped(Pid);

impl Stopped {
    pub fn new(pid: u32) -> Result<Stopped> {
        let stopped = Stopped(pid_of(pid)?);
        kill_process(stopped.0, Signal::STOP).context("stop a process")?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have ended meanwhile.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Kills it, and does not wait for its end.
pub fn kill(pid: u32) -> Result<()> {
    kill_process(pid_of(pid)?, Signal::KILL).context("kill a process")
}

fn pid_of(pid: u32) -> Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).context("a pid")
}

/// A thread of this name of the process, or any if it is empty, waits for the disk that stands still.
pub fn wait_for_disk(pid: u32, thread: &str) -> Result<()> {
    let is_waiting = |task: fs::DirEntry| {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        // proc(5): the state is behind the name, which is in parentheses.
        (thread.is_empty() || read("comm").trim() == thread)
            && read("stat").rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
    };
    let tasks = format!("/proc/{pid}/task");
    let mut seen = 0;
    wait::until(&format!("{thread} of {pid} waits for the disk"), PHASE_MAX, || {
        let is_waiting = fs::read_dir(&tasks)?.flatten().any(is_waiting);
        // More than once, for other disks let it wait for a moment.
        seen = if is_waiting { seen + 1 } else { 0 };
        Ok((seen > 2).then_some(()))
    })
}
