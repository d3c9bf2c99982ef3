//! Where QEMU stands: its run state, and how far its migration is.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::qmp::{MigrationStatus, Monitor};

/// QEMU is asked again after so long at the latest, whatever events it sends.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// QEMU's word for a migration whose guest stands still, and that waits to be told.
pub const BEFORE_STATE: &str = "pre-switchover";

/// QEMU's word for what the VM does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunState {
    Running,
    /// By its user, by the daemon, or because it was loaded.
    Paused,
    /// The last step of a migration, which ends by itself.
    FinishMigrate,
    /// Stopped by a migration that is completed.
    PostMigrate,
    /// It waits for a state to be loaded.
    InMigrate,
    Other(String),
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RunState::Running => "running",
            RunState::Paused => "paused",
            RunState::FinishMigrate => "finish-migrate",
            RunState::PostMigrate => "postmigrate",
            RunState::InMigrate => "inmigrate",
            RunState::Other(word) => word,
        })
    }
}

/// What the VM does now.
pub fn run_state(monitor: &Monitor) -> Result<RunState> {
    let answer = monitor.execute("query-status")?;
    let word = answer.get("status").and_then(Value::as_str).context("QEMU's status")?;
    Ok(match word {
        "running" => RunState::Running,
        "paused" => RunState::Paused,
        "finish-migrate" => RunState::FinishMigrate,
        "postmigrate" => RunState::PostMigrate,
        "inmigrate" => RunState::InMigrate,
        other => RunState::Other(other.to_owned()),
    })
}

/// How far the last migration is, and what QEMU says of its failure.
fn migration(monitor: &Monitor) -> Result<(MigrationStatus, Option<String>)> {
    let answer = monitor.execute("query-migrate")?;
    let text = |name| answer.get(name).and_then(Value::as_str);
    let status = text("status").map_or(MigrationStatus::None, MigrationStatus::of);
    Ok((status, text("error-desc").map(str::to_owned)))
}

/// Whether a migration is under way, whoever began it.
pub fn is_migrating(monitor: &Monitor) -> Result<bool> {
    Ok(migration(monitor)?.0 == MigrationStatus::UnderWay)
}

/// Whether the last migration had all of RAM in it, so that it was none of ours. Each page is counted that was sent, or was found to be
/// all zero. Where other memory of QEMU's is as large as RAM, this is said of ours too.
pub fn has_sent_ram(monitor: &Monitor) -> Result<bool> {
    let answer = monitor.execute("query-migrate")?;
    let Some(ram) = answer.get("ram") else { return Ok(false) };
    let count = |name| ram.get(name).and_then(Value::as_u64).unwrap_or(0);
    let sent = count("normal").saturating_add(count("duplicate")).saturating_mul(count("page-size"));
    let memory = monitor.execute("query-memory-size-summary")?;
    Ok(sent >= memory.get("base-memory").and_then(Value::as_u64).context("the VM's memory")?)
}

/// Waits until the migration that has begun is over. The monitor is held.
///
/// # Errors
/// It did not complete; it takes too long.
pub fn wait_completed(monitor: &Monitor, deadline: Instant) -> Result<()> {
    loop {
        let changes = monitor.events().migration_changes;
        match migration(monitor)? {
            (MigrationStatus::Completed, _) => return Ok(()),
            // One that comes in has no status before QEMU has read its first byte.
            (MigrationStatus::UnderWay | MigrationStatus::None, _) => wait_for_change(monitor, changes, deadline)?,
            (status, error) => bail!("{}", error.unwrap_or_else(|| format!("the migration {status}"))),
        }
    }
}

/// Waits until the guest was stopped for a migration that waits with the state. The monitor is held.
///
/// # Errors
/// It has ended; it takes too long.
pub fn wait_stopped(monitor: &Monitor, deadline: Instant) -> Result<()> {
    loop {
        let changes = monitor.events().migration_changes;
        let answer = monitor.execute("query-migrate")?;
        if answer.get("status").and_then(Value::as_str) == Some(BEFORE_STATE) {
            return Ok(());
        }
        match migration(monitor)? {
            (MigrationStatus::UnderWay | MigrationStatus::None, _) => wait_for_change(monitor, changes, deadline)?,
            (status, error) => bail!("{}", error.unwrap_or_else(|| format!("the migration {status}"))),
        }
    }
}

/// Cancels the migration that is under way, whoever began it, and waits for its end. The monitor is held.
///
/// # Errors
/// It takes too long.
pub fn cancel(monitor: &Monitor, deadline: Instant) -> Result<()> {
    loop {
        let changes = monitor.events().migration_changes;
        if migration(monitor)?.0 != MigrationStatus::UnderWay {
            return Ok(());
        }
        monitor.execute("migrate_cancel")?;
        wait_for_change(monitor, changes, deadline)?;
    }
}

fn wait_for_change(monitor: &Monitor, changes: u64, deadline: Instant) -> Result<()> {
    let now = Instant::now();
    ensure!(now < deadline, "the migration takes too long");
    monitor.wait_for(deadline.min(now + ASK_AGAIN), |events| events.migration_changes != changes);
    Ok(())
}
