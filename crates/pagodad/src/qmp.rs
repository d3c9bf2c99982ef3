//! A QEMU monitor of ours, shared by all who need it.
//!
//! QEMU serves one client at a time on it. So there is one [`Monitor`] a VM, and one conversation at a time: by itself a short
//! one a command, so that an operator's `socat` is not kept out; while somebody holds it ([`Held`]), a lasting one, because
//! events come only to who is connected. Several may hold it at a time. A command may take long (QEMU stops a vCPU only when
//! its page fault is answered), so the wait is bounded; the command itself stays queued in QEMU and takes effect when it can.
//! Its late answer goes down with the connection.

mod events;
pub mod poll;
pub mod processors;
mod session;
#[allow(dead_code, unused_imports)]
pub mod state;
#[cfg(test)]
mod tests;

use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pagoda_sys::process::Wake;
use rustix::event::{PollFd, PollFlags};
use serde_json::{Value, json};

pub use events::{Events, MigrationStatus, QemuTime};
use poll::poll;
pub use session::Refused;
use session::Session;

/// QEMU is left alone for so long after its guest was shut down: QEMU 7.2 waits for ever in `monitor_cleanup` for a command
/// that comes while it ends. One that runs with `-no-shutdown` is spoken to again after that.
const ENDING: Duration = Duration::from_secs(10);

/// Between two looks at the events, for those who wait for some: another thread may have taken in what came.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug)]
struct State {
    session: Option<Session>,
    /// How many there are for whom the connection outlives a command.
    holders: usize,
    events: Events,
}

/// The monitor of one VM's QEMU.
#[derive(Debug)]
pub struct Monitor {
    path: PathBuf,
    state: Mutex<State>,
}

impl Monitor {
    /// A monitor at the socket `path`, to which nothing is connected yet.
    pub fn new(path: &Path) -> Monitor {
        let state = State { session: None, holders: 0, events: Events::default() };
        Monitor { path: path.to_owned(), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes a command without arguments and returns its `return` value.
    ///
    /// # Errors
    /// [`Refused`] by QEMU; no connection, no answer in time.
    pub fn execute(&self, command: &str) -> Result<Value> {
        self.execute_with(command, json!({}))
    }

    /// Executes a command and returns its `return` value.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn execute_with(&self, command: &str, arguments: Value) -> Result<Value> {
        self.converse(command, |session, events| session.execute(command, arguments, events))
    }

    /// Executes a command that takes a descriptor (`getfd`), and returns its `return` value.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn execute_with_fd(&self, command: &str, arguments: Value, fd: BorrowedFd<'_>) -> Result<Value> {
        self.converse(command, |session, events| session.execute_with_fd(command, arguments, fd, events))
    }

    fn converse(&self, command: &str, say: impl FnOnce(&mut Session, &mut Events) -> Result<Value>) -> Result<Value> {
        let mut state = self.lock();
        let state = &mut *state;
        if let Some(session) = &mut state.session {
            // That the connection is gone is noticed by the command.
            let _ = session.read_events(&mut state.events);
        }
        if state.events.shutdown.is_some_and(|at| at.elapsed() < ENDING) {
            bail!("execute {command}: the guest was shut down");
        }
        let mut session = match state.session.take() {
            Some(session) => session,
            None => Session::connect(&self.path, &mut state.events)?,
        };
        let answer = say(&mut session, &mut state.events);
        let is_usable = answer.as_ref().map_or_else(|error| error.is::<Refused>(), |_| true);
        if state.holders > 0 && is_usable {
            state.session = Some(session);
        }
        answer
    }

    /// The events so far.
    pub fn events(&self) -> Events {
        let mut state = self.lock();
        let State { session, events, .. } = &mut *state;
        if session.as_mut().is_some_and(|session| session.read_events(events).is_err()) {
            *session = None;
        }
        *events
    }

    /// Waits until QEMU says something, `wake` is signalled or the time is over.
    pub fn wait(&self, wake: &Wake, max: Duration) {
        let stream = self.lock().session.as_ref().map(|session| Arc::clone(session.stream()));
        let mut polled = vec![PollFd::new(wake, PollFlags::IN)];
        if let Some(stream) = &stream {
            polled.push(PollFd::new(stream, PollFlags::IN));
        }
        // Whatever ends it, the caller looks at everything again.
        let _ = poll(&mut polled, max);
        wake.clear();
    }

    /// Waits until the events are as wanted. `false`: the deadline is over, or the connection, without which none come. The
    /// caller holds it.
    pub fn wait_for(&self, deadline: Instant, wanted: impl Fn(&Events) -> bool) -> bool {
        loop {
            if wanted(&self.events()) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let stream = self.lock().session.as_ref().map(|session| Arc::clone(session.stream()));
            let (Some(stream), false) = (stream, left.is_zero()) else { return false };
            // Whatever ends it, the events are looked at again.
            let _ = poll(&mut [PollFd::new(&stream, PollFlags::IN)], left.min(LOOK));
        }
    }

    /// What runs the guest: `kvm` or `tcg`; `None` when QEMU does not say.
    pub fn accelerator(&self) -> Option<String> {
        let answer = self.execute("query-kvm").ok()?;
        let enabled = answer.get("enabled")?.as_bool()?;
        Some(if enabled { "kvm" } else { "tcg" }.to_owned())
    }

    /// Whether the guest runs; `false` when QEMU does not say.
    pub fn is_running(&self) -> bool {
        self.has_status("running")
    }

    fn has_status(&self, status: &str) -> bool {
        self.execute("query-status").is_ok_and(|answer| answer.get("status").and_then(Value::as_str) == Some(status))
    }
}

/// Keeps a monitor's connection from the next command on, until it is dropped.
#[derive(Debug)]
pub struct Held<M: Deref<Target = Monitor>>(M);

impl<M: Deref<Target = Monitor>> Held<M> {
    pub fn new(monitor: M) -> Held<M> {
        monitor.lock().holders += 1;
        Held(monitor)
    }
}

impl<M: Deref<Target = Monitor>> Deref for Held<M> {
    type Target = Monitor;

    fn deref(&self) -> &Monitor {
        &self.0
    }
}

impl<M: Deref<Target = Monitor>> Drop for Held<M> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.holders -= 1;
        if state.holders == 0 {
            state.session = None;
        }
    }
}
