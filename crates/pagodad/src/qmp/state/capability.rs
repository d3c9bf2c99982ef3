//! Capabilities of QEMU's migration.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::gate::Opened;
use crate::qmp::Monitor;

/// RAM that is a shared file is left out.
const IGNORE_SHARED: &str = "x-ignore-shared";
/// Disks are not activated at the end of a load.
pub const LATE_ACTIVATION: &str = "late-block-activate";
/// The guest stands still, and QEMU waits to be told before it saves the state.
const PAUSE_BEFORE_STATE: &str = "pause-before-switchover";
/// QEMU says how far a migration is. It stays on: that harms nobody, and others may rely on it.
pub const EVENTS: &str = "events";

/// The names of those that are on.
pub fn all_on(monitor: &Monitor) -> Result<Vec<String>> {
    let answer = monitor.execute("query-migrate-capabilities")?;
    let all = answer.as_array().context("the list of capabilities")?;
    let on = all.iter().filter(|one| one.get("state").and_then(Value::as_bool) == Some(true));
    Ok(on.filter_map(|one| one.get("capability")?.as_str().map(str::to_owned)).collect())
}

/// Has QEMU say how far a migration is.
pub fn switch_events_on(monitor: &Monitor) -> Result<()> {
    set(monitor, EVENTS, true)
}

/// Whether RAM is left out.
pub fn leaves_ram_out(monitor: &Monitor) -> Result<bool> {
    Ok(all_on(monitor)?.iter().any(|name| name == IGNORE_SHARED))
}

/// Has RAM left out, through a gate that is open.
pub fn leave_ram_out(monitor: &Monitor, _through: &Opened<'_>) -> Result<()> {
    set(monitor, IGNORE_SHARED, true)
}

/// Has RAM in every migration from now on, through a gate that is open, and is shut then.
///
/// # Errors
/// QEMU's; somebody else has used the gate.
pub fn keep_ram(monitor: &Monitor, through: Opened<'_>) -> Result<()> {
    set(monitor, IGNORE_SHARED, false)?;
    drop(through);
    ensure!(!leaves_ram_out(monitor)?, "somebody else has switched {IGNORE_SHARED} on");
    Ok(())
}

/// Has QEMU take the locks of its disks, and write to them, only when the guest is let run, not when its state is loaded: another QEMU
/// may still have them, and go on with them if this one does not run after all.
///
/// It is for a load, and stays on until the guest has been let run: so whatever saves the VM's state before that is refused
/// ([`super::check()`]), also by a later daemon.
///
/// # Errors
/// QEMU's.
pub fn leave_disks_alone(monitor: &Monitor, on: bool) -> Result<()> {
    set(monitor, LATE_ACTIVATION, on)
}

/// Has QEMU wait with the state of a guest that it has stopped for that.
///
/// # Errors
/// QEMU's.
pub fn wait_before_state(monitor: &Monitor) -> Result<()> {
    set(monitor, PAUSE_BEFORE_STATE, true)
}

/// It does not, from the next migration on. None is under way.
///
/// # Errors
/// QEMU's.
pub fn wait_no_more(monitor: &Monitor) -> Result<()> {
    match all_on(monitor)?.iter().any(|name| name == PAUSE_BEFORE_STATE) {
        true => set(monitor, PAUSE_BEFORE_STATE, false),
        false => Ok(()),
    }
}

/// The guest has been let run, and QEMU has its disks.
///
/// # Errors
/// QEMU's.
pub fn disks_are_taken(monitor: &Monitor) -> Result<()> {
    match all_on(monitor)?.iter().any(|name| name == LATE_ACTIVATION) {
        true => leave_disks_alone(monitor, false),
        false => Ok(()),
    }
}

fn set(monitor: &Monitor, name: &str, on: bool) -> Result<()> {
    let arguments = json!({ "capabilities": [{ "capability": name, "state": on }] });
    monitor.execute_with("migrate-set-capabilities", arguments).map(drop)
}
