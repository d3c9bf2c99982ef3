//! A QEMU monitor of ours, shared by all who need it.
//!
//! QEMU serves one client at a time on it. So there is one [`Monitor`] a VM, and one conversation at a time: by itself a
//! short one a command, so that an operator's `socat` is not kept out; while somebody holds it ([`Monitor::hold`]), a
//! lasting one, because events come only to who is connected. A command may take long (QEMU stops a vCPU only when its page
//! fault is answered), so the wait is bounded; the command itself stays queued in QEMU and takes effect when it can. Its
//! late answer goes down with the connection.

mod events;
mod session;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use pagoda_sys::process::Wake;
use rustix::event::{PollFd, PollFlags, Timespec};
use serde_json::{Value, json};

pub use events::Events;
pub use session::Refused;
use session::Session;

/// QEMU is left alone for so long after its guest was shut down: QEMU 7.2 waits for ever in `monitor_cleanup` for a command
/// that comes while it ends. One that runs with `-no-shutdown` is spoken to again after that.
const ENDING: Duration = Duration::from_secs(10);

/// Whether the connection outlives a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    Lasting,
    Short,
}

#[derive(Debug)]
struct State {
    session: Option<Session>,
    hold: Hold,
    events: Events,
}

/// See the module.
#[derive(Debug)]
pub struct Monitor {
    path: PathBuf,
    state: Mutex<State>,
}

impl Monitor {
    /// For the socket at `path`; nothing is connected yet.
    pub fn new(path: &Path) -> Monitor {
        let state = State { session: None, hold: Hold::Short, events: Events::default() };
        Monitor { path: path.to_owned(), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the connection from the next command on, or lets it go.
    pub fn hold(&self, hold: Hold) {
        let mut state = self.lock();
        state.hold = hold;
        if hold == Hold::Short {
            state.session = None;
        }
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
        let answer = session.execute(command, arguments, &mut state.events);
        let is_usable = answer.as_ref().map_or_else(|error| error.is::<Refused>(), |_| true);
        if state.hold == Hold::Lasting && is_usable {
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
        let max = Timespec { tv_sec: max.as_secs().cast_signed(), tv_nsec: i64::from(max.subsec_nanos()) };
        // Whatever ends it, the caller looks at everything again.
        let _ = rustix::event::poll(&mut polled, Some(&max));
        wake.clear();
    }

    /// What runs the guest: `kvm` or `tcg`; `None` when QEMU does not say.
    pub fn accelerator(&self) -> Option<String> {
        let answer = self.execute("query-kvm").ok()?;
        let enabled = answer.get("enabled")?.as_bool()?;
        Some(if enabled { "kvm" } else { "tcg" }.to_owned())
    }

    /// Whether the guest is paused; `false` when QEMU does not say.
    pub fn is_paused(&self) -> bool {
        self.has_status("paused")
    }

    /// Whether the guest runs; `false` when QEMU does not say.
    pub fn is_running(&self) -> bool {
        self.has_status("running")
    }

    fn has_status(&self, status: &str) -> bool {
        self.execute("query-status").is_ok_and(|answer| answer.get("status").and_then(Value::as_str) == Some(status))
    }
}
