//! Taking the state of a VM, which stands still from then on.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_api::in_full;
use pagoda_core::units::Bytes;
use serde_json::json;

use super::capability::{keep_ram, leave_ram_out, switch_events_on, wait_before_state, wait_no_more};
use super::gate::{Gate, Opened};
use super::progress::{BEFORE_STATE, RunState, run_state, wait_completed, wait_stopped};
use super::stream::{give_end, read_all, uri};
use super::undo::undo;
use crate::qmp::{Held, Monitor, QemuTime, Refused};

/// What QEMU's streams begin with.
const MAGIC: &[u8] = b"QEVM";
/// For QEMU to put away a migration that is completed: well below a millisecond.
const FINALIZE_WAIT: Duration = Duration::from_secs(1);
/// The pause between two attempts to let the guest run.
const FINALIZE_PAUSE: Duration = Duration::from_micros(200);
/// For the event after `cont` was answered: QEMU sends it before the answer.
const RESUME_WAIT: Duration = Duration::from_secs(1);

/// A state, and the VM that it is of.
#[derive(Debug)]
pub struct Saved<'a> {
    /// QEMU's stream as it came.
    pub state: Vec<u8>,
    pub pause: Pause<'a>,
}

/// A VM that stands still since its state was taken. It stays so when this is dropped.
#[derive(Debug)]
pub struct Pause<'a> {
    /// Who lets it run meanwhile is heard.
    monitor: Held<&'a Monitor>,
    was_running: bool,
    resumes_before: u64,
    stopped: Option<QemuTime>,
}

/// Why there is no state.
#[derive(Debug, thiserror::Error)]
#[error("QEMU's state was not saved: {}", in_full(.why.as_ref()))]
pub struct SaveError {
    pub why: anyhow::Error,
    /// What could not be undone: [`undo`] has to be called until it succeeds. `None`: the VM is as it was.
    pub left: Option<anyhow::Error>,
}

/// Takes the state of a VM that [`super::check()`] has nothing against. QEMU has until the deadline, for `max` bytes at most.
///
/// # Errors
/// The guest runs if it ran, no capability but `events` is on, and the gate is shut; [`SaveError::left`] says if that is not so.
pub fn save<'a>(monitor: &'a Monitor, gate: &dyn Gate, max: Bytes, deadline: Instant) -> Result<Saved<'a>, SaveError> {
    save_after(monitor, gate, max, deadline, None)
}

/// What is done while the guest stands still, before its state is saved.
pub type Before<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The same, with something that is done in between. If this daemon dies meanwhile, the guest stands still until [`undo`] is called.
///
/// # Errors
/// As [`save`], and what `before` says.
pub fn save_after<'a>(
    monitor: &'a Monitor,
    gate: &dyn Gate,
    max: Bytes,
    deadline: Instant,
    before_state: Option<Before<'_>>,
) -> Result<Saved<'a>, SaveError> {
    let held = Held::new(monitor);
    let was_running = match run_state(monitor) {
        Ok(RunState::Running) => true,
        Ok(RunState::Paused) => false,
        Ok(other) => return Err(SaveError { why: anyhow!("the VM is {other}"), left: None }),
        Err(why) => return Err(SaveError { why, left: None }),
    };
    let before = monitor.events();
    let saved = take(monitor, gate, max, deadline, before_state).and_then(|state| {
        let after = monitor.events();
        let stopped = after.last_stop.filter(|_| after.stops > before.stops);
        let pause = Pause { monitor: held, was_running, resumes_before: before.resumes, stopped };
        pause.check()?;
        Ok(Saved { state, pause })
    });
    saved.map_err(|why| {
        // By us alone: who was paused, or is paused by others meanwhile, stays so.
        let paused: &[RunState] = if was_running { &[RunState::PostMigrate] } else { &[] };
        SaveError { why, left: undo(monitor, gate, paused).err() }
    })
}

fn take(
    monitor: &Monitor,
    gate: &dyn Gate,
    max: Bytes,
    deadline: Instant,
    before_state: Option<Before<'_>>,
) -> Result<Vec<u8>> {
    let waits = before_state.is_some();
    if waits {
        wait_before_state(monitor)?;
    }
    switch_events_on(monitor)?;
    let stream = give_end(monitor)?;
    leave_ram_out(monitor, &Opened::new(gate)?)?;
    monitor.execute_with("migrate", json!({ "uri": uri() }))?;
    let state = match before_state {
        None => read_all(&stream, max, deadline),
        Some(before_state) => read_around(monitor, &stream, max, deadline, before_state),
    };
    let state = state.context("read the state")?;
    wait_completed(monitor, deadline).context("wait for the end of the state")?;
    keep_ram(monitor, Opened::new(gate)?).context("have RAM in the next migration")?;
    if waits {
        wait_no_more(monitor)?;
    }
    ensure!(state.starts_with(MAGIC), "QEMU sent something else");
    Ok(state)
}

/// Reads the state of a QEMU that waits in the middle of it: what comes before is read meanwhile, or QEMU would not get that far.
fn read_around(
    monitor: &Monitor,
    stream: &UnixStream,
    max: Bytes,
    deadline: Instant,
    before_state: Before<'_>,
) -> Result<Vec<u8>> {
    thread::scope(|scope| {
        let reader = scope.spawn(|| read_all(stream, max, deadline));
        let mut go_on = || {
            wait_stopped(monitor, deadline).context("wait until it stands still")?;
            before_state()?;
            monitor.execute_with("migrate-continue", json!({ "state": BEFORE_STATE })).map(drop)
        };
        let gone_on = go_on();
        if gone_on.is_err() {
            // Nobody waits for a state that does not come. QEMU's end breaks, too.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let state = reader.join().unwrap_or_else(|_| bail!("a thread of this daemon panicked"));
        gone_on.and(state)
    })
}

impl Pause<'_> {
    /// Whether it ran when its state was asked for. One that its user had paused is not resumed.
    pub fn was_running(&self) -> bool {
        self.was_running
    }

    /// That the guest has stood still from the moment of its state.
    ///
    /// # Errors
    /// Somebody has let it run: its memory is not that of the state. Or QEMU does not say.
    pub fn check(&self) -> Result<()> {
        let state = run_state(&self.monitor)?;
        ensure!(state == RunState::PostMigrate, "the VM is {state}: somebody else has let it run or ended it");
        let resumes = self.monitor.events().resumes;
        ensure!(resumes == self.resumes_before, "somebody else has let the VM run");
        Ok(())
    }
}

/// Lets the guest run. QEMU refuses it for a moment behind the end of a migration ("not finalized yet").
///
/// # Errors
/// QEMU refuses for longer, or does not answer.
pub fn cont(monitor: &Monitor) -> Result<()> {
    let deadline = Instant::now() + FINALIZE_WAIT;
    loop {
        match monitor.execute("cont") {
            Ok(_) => return Ok(()),
            Err(error) if error.is::<Refused>() && Instant::now() < deadline => std::thread::sleep(FINALIZE_PAUSE),
            Err(error) => return Err(error),
        }
    }
}

/// Lets a VM run that ran before, if it has stood still until now. Gives back for how long it stood, in microseconds; `None` if
/// QEMU does not say.
///
/// # Errors
/// As [`Pause::check`]; QEMU does not let it run. [`undo`] is to be called.
pub fn resume(pause: Pause<'_>) -> Result<Option<u64>> {
    pause.check()?;
    let Pause { monitor, resumes_before, stopped, .. } = pause;
    cont(&monitor)?;
    if !monitor.wait_for(Instant::now() + RESUME_WAIT, |events| events.resumes > resumes_before) {
        let state = run_state(&monitor)?;
        return if state == RunState::Running { Ok(None) } else { bail!("it is {state} after QMP `cont`") };
    }
    let resumed = monitor.events().last_resume;
    Ok(stopped.zip(resumed).map(|(stopped, resumed)| resumed.us_since(stopped)))
}
