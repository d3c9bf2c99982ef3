//! QEMU's device state without RAM: whether QEMU can give it, and how it is taken and given back.
//!
//! QEMU leaves RAM out with the capability `x-ignore-shared`, which the shim hides from it. The [`Gate`] is open for as long as
//! one command takes, or one load, and the capability is on from there to the end of our own migration: whoever else migrated the
//! VM then would lose its RAM. So it is off again before the VM runs, and a migration of somebody else's that begins meanwhile is
//! cancelled.
//!
//! The guest is not stopped by us: QEMU does that itself in the last step of a migration, and lets it run again by itself when
//! that fails, also if this daemon dies in the middle. Once the state is whole the guest stands (`postmigrate`) until [`Pause`] is
//! resumed or [`undo()`] is called.
//!
//! QEMU is not trusted: whatever it says or sends is bounded in length and in time.

mod capability;
mod check;
mod gate;
mod load;
mod paused;
mod progress;
mod save;
mod stream;
#[cfg(test)]
pub mod tests;
mod undo;

pub use capability::{disks_are_taken, leave_disks_alone};
pub use check::{check, check_same, machine};
pub use gate::Gate;
pub use load::load;
pub use paused::{PauseKind, is_paused, pause_of};
pub use progress::{RunState, run_state};
pub use save::{Before, Pause, SaveError, Saved, cont, resume, save, save_after};
pub use undo::undo;
