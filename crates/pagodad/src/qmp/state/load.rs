//! Giving a new QEMU the state that another one had.

use std::io::Read;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_image::limits::STATE_BYTES_MAX;
use serde_json::json;

use super::capability::{keep_ram, leave_ram_out, switch_events_on};
use super::gate::{Gate, Opened};
use super::progress::{RunState, run_state, wait_completed};
use super::stream::{give_end, uri, write_all};
use crate::qmp::{Held, Monitor};

/// Has a QEMU load a state that was started with `-S -incoming defer`, and whose RAM can be read by now. It is paused
/// afterwards, for `cont`. The gate is open all the time, because QEMU compares the names in the stream too.
///
/// # Errors
/// QEMU is good for nothing then, and has ended by itself or is to be ended. The gate is shut.
pub fn load(monitor: &Monitor, gate: &dyn Gate, state: &mut dyn Read, deadline: Instant) -> Result<()> {
    let _held = Held::new(monitor);
    let before = run_state(monitor)?;
    ensure!(before == RunState::InMigrate, "QEMU is {before}, and was not started to load a state");
    switch_events_on(monitor)?;
    let stream = give_end(monitor)?;
    let opened = Opened::new(gate)?;
    leave_ram_out(monitor, &opened)?;
    monitor.execute_with("migrate-incoming", json!({ "uri": uri() }))?;
    write_all(&stream, state, STATE_BYTES_MAX, deadline).context("give QEMU its state")?;
    wait_completed(monitor, deadline).context("wait until QEMU has its state")?;
    keep_ram(monitor, opened).context("have RAM in the next migration")?;
    let after = run_state(monitor)?;
    ensure!(after == RunState::Paused, "QEMU is {after}, and was not started with -S");
    Ok(())
}
