//! A guest that stands still until its user lets it run.
//!
//! QEMU has no way back from `postmigrate` to `paused`. So a guest that its user had paused stands in `postmigrate` once its state
//! was saved, by a snapshot or by a move that was given up. Both are one pause for users: `pagoda vm cont` ends it.

use anyhow::Result;

use super::progress::{RunState, has_sent_ram, is_migrating, run_state};
use crate::qmp::Monitor;

/// How a guest stands that nobody lets run but its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseKind {
    /// It runs, or QEMU is at something else.
    None,
    /// The VM was paused by its user, or for a stall.
    Paused,
    /// The same, and its state has been saved since by this daemon.
    Saved,
    /// It was migrated by somebody else, and may run there.
    Elsewhere,
}

/// How the guest stands.
///
/// # Errors
/// QEMU does not say.
pub fn pause_of(monitor: &Monitor) -> Result<PauseKind> {
    Ok(match run_state(monitor)? {
        RunState::Paused => PauseKind::Paused,
        RunState::PostMigrate if is_migrating(monitor)? || has_sent_ram(monitor)? => PauseKind::Elsewhere,
        RunState::PostMigrate => PauseKind::Saved,
        _ => PauseKind::None,
    })
}

/// Whether the guest stands still until its user lets it run; `false` when QEMU does not say.
pub fn is_paused(monitor: &Monitor) -> bool {
    pause_of(monitor).is_ok_and(|pause| matches!(pause, PauseKind::Paused | PauseKind::Saved))
}
