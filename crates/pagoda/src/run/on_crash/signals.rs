//! Passes signals that ask to end on to QEMU, and waits for its end.

use std::process::{Child, ExitStatus};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

/// What QEMU ends for, in order.
const PASSED_ON: [(i32, Signal); 3] = [(SIGTERM, Signal::TERM), (SIGINT, Signal::INT), (SIGHUP, Signal::HUP)];
/// Which signals this process ignores, as its starter said: a bit a signal (proc(5)).
const STATUS: &str = "/proc/self/status";

/// The signals of this process.
#[derive(Debug)]
pub struct Signals {
    received: signal_hook::iterator::Signals,
    was_asked: bool,
}

impl Signals {
    /// Handles them from now on. One that this process was started to ignore, as SIGHUP by nohup(1), stays ignored.
    ///
    /// # Errors
    /// They cannot be handled.
    pub fn handle() -> Result<Signals> {
        let status = std::fs::read_to_string(STATUS).with_context(|| format!("read {STATUS}"))?;
        let ignored = ignored(&status);
        let handled = PASSED_ON.iter().map(|(signal, _)| *signal).filter(|signal| ignored & bit(*signal) == 0);
        let received = signal_hook::iterator::Signals::new(handled.chain([SIGCHLD])).context("handle signals")?;
        Ok(Signals { received, was_asked: false })
    }

    /// Whether somebody wants the VM to be over.
    pub fn was_asked(&self) -> bool {
        self.was_asked
    }

    /// Takes in what has come while there is no child.
    pub fn look(&mut self) {
        self.was_asked |= self.received.pending().any(|signal| signal != SIGCHLD);
    }

    /// Waits for the child's end.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn pass_on_until_end(&mut self, mut child: Child) -> Result<ExitStatus> {
        loop {
            // Each change of a child is a signal that has come by now or comes later, so none is missed.
            if let Some(status) = child.try_wait().context("wait for QEMU")? {
                self.look();
                return Ok(status);
            }
            let received: Vec<i32> = self.received.wait().collect();
            for (signal, passed_on) in PASSED_ON.iter().filter(|(signal, _)| received.contains(signal)) {
                self.was_asked = true;
                // It was not waited for, so its number is its own.
                if let Some(Err(error)) = pid_of(&child).map(|pid| kill_process(pid, *passed_on)) {
                    eprintln!("pagoda: pass signal {signal} on: {error}");
                }
            }
        }
    }
}

/// The process that a child is, as long as it was not waited for.
fn pid_of(child: &Child) -> Option<Pid> {
    Pid::from_raw(i32::try_from(child.id()).ok()?)
}

fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_starter_had_ignored() {
        let status = "Name:\tpagoda\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000000\n";
        assert_eq!(ignored(status), bit(SIGHUP) | bit(13));
        assert_eq!(ignored(status) & bit(SIGTERM), 0);
        assert_eq!(ignored("Name:\tpagoda\n"), 0);
    }
}
