//! The QEMUs of clones from their VMs to the moment in which all guests run; all of them or none.
//!
//! Dropped before that, every process is ended, every VM is given up, and what was made for them is removed. A command that is
//! killed leaves those that it has started, which run, and VMs that no process ever came for, which the daemon removes.

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use pagoda_api::{Client, ErrorCode, VmInfo, VmState};
use rustix::process::{Pid, Signal, kill_process};

use super::child::Start;
use super::log::Log;
use crate::run::on_crash::signals::Signals;

/// QEMUs that are being started at a time. The daemon gives a VM up for which no process comes within a minute.
const AT_A_TIME: usize = 16;
/// How long one may take until its guest runs, page faults on a slow disk included.
const START_MAX: Duration = Duration::from_secs(180);
/// How long one may take to end in order, and the daemon to let go of it.
const END_MAX: Duration = Duration::from_secs(10);
const RELEASE_MAX: Duration = Duration::from_secs(60);
/// The pause between two looks at processes and VMs.
const LOOK: Duration = Duration::from_millis(5);

/// One clone, and how far its start is.
#[derive(Debug)]
pub struct Member {
    start: Start,
    log: Log,
    process: Option<Process>,
    /// The daemon has seen its process.
    has_attached: bool,
    ran: Option<Ran>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    since: Instant,
}

/// A clone whose guest runs, or is paused as that of its snapshot was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    pub pid: u32,
    /// QEMU's own time; not known of one that is paused.
    pub resumed_unix_us: Option<u64>,
}

/// All clones of one command.
pub struct Fleet<'a> {
    client: &'a Client,
    members: Vec<Member>,
    is_kept: bool,
}

impl Member {
    pub fn new(start: Start, log: Log) -> Member {
        Member { start, log, process: None, has_attached: false, ran: None }
    }

    pub fn name(&self) -> &str {
        &self.start.vm.name
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Looks whether the guest runs by now.
    fn look(&mut self, client: &Client) -> Result<()> {
        let Some(process) = self.process.as_mut().filter(|_| self.ran.is_none()) else { return Ok(()) };
        let name = &self.start.vm.name;
        if let Some(status) = process.child.try_wait()? {
            bail!("{}", failed(name, status, &self.log));
        }
        let vm = match client.vm(name) {
            Err(error) if error.code() == Some(ErrorCode::NoSuchVm) => bail!("the daemon has given up {name}"),
            // A daemon that has ended is followed by another one.
            Err(error) if error.code().is_none() => None,
            vm => Some(vm?),
        };
        let pid = process.child.id();
        if let Some(VmInfo { state: VmState::Stalled { reason, .. }, .. }) = &vm {
            bail!("{name} is stalled: {reason}");
        }
        self.has_attached |= vm.as_ref().is_some_and(|vm| vm.pid == Some(pid));
        if let Some(vm) = vm.filter(|vm| vm.state == VmState::Running && !vm.loading && vm.pid == Some(pid)) {
            self.ran = Some(Ran { pid, resumed_unix_us: vm.resumed_unix_us });
            return Ok(());
        }
        ensure!(process.since.elapsed() < START_MAX, "{name} does not run after {} s", START_MAX.as_secs());
        Ok(())
    }

    fn is_starting(&self) -> bool {
        self.process.is_some() && self.ran.is_none()
    }

    fn signal(&mut self, signal: Signal) {
        // The number of one that has ended may be another process's.
        if !self.has_ended()
            && let Some(process) = &self.process
            && let Some(pid) = i32::try_from(process.child.id()).ok().and_then(Pid::from_raw)
        {
            let _ = kill_process(pid, signal);
        }
    }

    fn has_ended(&mut self) -> bool {
        self.process.as_mut().is_none_or(|process| !matches!(process.child.try_wait(), Ok(None)))
    }
}

/// Waits until the daemon has no VM of this name any more. Its process has ended.
fn wait_released(client: &Client, name: &str, deadline: Instant) -> Result<()> {
    loop {
        // One that is attached is gone when the daemon sees the end of its process.
        match client.delete(name) {
            Ok(()) => return Ok(()),
            Err(error) if error.code() == Some(ErrorCode::NoSuchVm) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(anyhow!(error)),
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

fn failed(name: &str, status: ExitStatus, log: &Log) -> String {
    let said = log.tail();
    let said = if said.is_empty() {
        "it said nothing: see the daemon's log".to_owned()
    } else {
        format!("the end of its log:\n{said}")
    };
    format!("the QEMU of {name} ended with {status}; {said}")
}

impl<'a> Fleet<'a> {
    pub fn new(client: &'a Client, members: Vec<Member>) -> Fleet<'a> {
        Fleet { client, members, is_kept: false }
    }

    /// Starts all, and returns when every guest runs.
    ///
    /// # Errors
    /// One cannot be started, or a signal asks this process to end.
    pub fn start(&mut self, signals: &mut Signals) -> Result<Vec<Ran>> {
        loop {
            signals.look();
            ensure!(!signals.was_asked(), "interrupted");
            let mut free = AT_A_TIME.saturating_sub(self.members.iter().filter(|member| member.is_starting()).count());
            for member in &mut self.members {
                if member.process.is_none() && free > 0 {
                    let child = member.start.spawn(&member.log)?;
                    member.process = Some(Process { child, since: Instant::now() });
                    free -= 1;
                }
                member.look(self.client)?;
            }
            let ran: Vec<Ran> = self.members.iter().filter_map(|member| member.ran).collect();
            if ran.len() == self.members.len() {
                return Ok(ran);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Lets all clones run on: from now on none of them is ended.
    pub fn keep(mut self) -> Vec<Member> {
        self.is_kept = true;
        self.members.iter_mut().for_each(|member| member.log.keep());
        std::mem::take(&mut self.members)
    }

    fn end(&mut self) {
        self.members.iter_mut().for_each(|member| member.signal(Signal::TERM));
        let deadline = Instant::now() + END_MAX;
        while !self.members.iter_mut().all(Member::has_ended) && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        for process in self.members.iter_mut().filter_map(|member| member.process.as_mut()) {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
        let deadline = Instant::now() + RELEASE_MAX;
        for member in std::mem::take(&mut self.members) {
            let Member { start, log, has_attached, .. } = member;
            // Before its name is free: another clone of this name would have the same log.
            drop(log);
            match wait_released(self.client, &start.vm.name, deadline) {
                // We have ended it: that is no crash. As a rule there is no note that it was one.
                Ok(()) if has_attached => drop(self.client.forget_crashed(&start.vm.name)),
                Ok(()) => {}
                Err(error) => eprintln!("pagoda: give up {}: {error}", start.vm.name),
            }
        }
    }
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.end();
        }
    }
}
