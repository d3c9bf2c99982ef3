//! Puts QEMU back to where it was: no migration of ours is left, RAM is in each of the next, and the guest runs if it ran.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::capability::{keep_ram, leaves_ram_out, wait_no_more};
use super::gate::{Gate, Opened};
use super::progress::{RunState, cancel, has_sent_ram, run_state};
use super::stream::take_end_back;
use crate::qmp::{Held, Monitor};

/// For a migration to end that is cancelled: QEMU needs milliseconds.
const END_WAIT: Duration = Duration::from_secs(5);
/// Between two looks at a QEMU that is about to let its guest run.
const LOOK: Duration = Duration::from_millis(5);

/// Ends what an operation has begun, as far as it came: its migration, the capability, the pause. The guest runs afterwards if it
/// stands in one of the `paused` states; in others it is left as it is. So is a VM whose RAM somebody else has sent elsewhere,
/// where it runs now. May be called again, and for a VM that needs nothing.
///
/// # Errors
/// QEMU did not answer, or the gate could not be opened: to be called again. What could be done is done.
pub fn undo(monitor: &Monitor, gate: &dyn Gate, paused: &[RunState]) -> Result<()> {
    let _held = Held::new(monitor);
    let deadline = Instant::now() + END_WAIT;
    let mut with_ram = Ok(());
    if leaves_ram_out(monitor)? {
        // Whoever began it: without RAM it must not complete.
        cancel(monitor, deadline).context("cancel the migration")?;
        let kept = Opened::new(gate).and_then(|through| keep_ram(monitor, through));
        with_ram = kept.context("have RAM in the next migration");
    }
    take_end_back(monitor);
    // Also if that failed: a guest does not wait for a gate.
    run_again(monitor, paused, deadline).context("let the VM run")?;
    // None of ours is under way any more.
    with_ram.and(wait_no_more(monitor).context("have it wait with no state"))
}

fn run_again(monitor: &Monitor, paused: &[RunState], deadline: Instant) -> Result<()> {
    let mut state = run_state(monitor)?;
    while state == RunState::FinishMigrate {
        ensure!(Instant::now() < deadline, "QEMU stays in the last step of a migration that has ended");
        let resumes = monitor.events().resumes;
        monitor.wait_for(Instant::now() + LOOK, |events| events.resumes != resumes);
        state = run_state(monitor)?;
    }
    if !paused.contains(&state) {
        return Ok(());
    }
    if state == RunState::PostMigrate && has_sent_ram(monitor)? {
        tracing::warn!("a VM was migrated by somebody else meanwhile, and is not let run here: end it, or QMP `cont`");
        return Ok(());
    }
    monitor.execute("cont").map(drop)
}
