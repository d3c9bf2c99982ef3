//! Snapshots as procedures: taking one of a VM that runs, filling it, and making a VM of one.
//!
//! Each works with three owners in turn: the VM's engine (its memory), QEMU (the state of its devices), and
//! [`crate::images::Images`] (the files). The VM's record says what is under way, so that whichever daemon there is lets the
//! guest run again.

mod clone;
mod diff;
pub mod disks;
mod files;
mod filling;
mod layers;
mod load;
mod progress;
mod remove;
mod restorable;
mod restore;
mod take;
pub mod timetables;

pub use clone::{clone_vms, launch};
pub use diff::diff;
pub use disks::written_file;
pub use files::{Export, accept, begin_export, import, program};
pub use filling::{finish, lost, unfilled};
pub use load::load;
pub use progress::{get, list};
pub use remove::remove;
pub use restorable::{crashed, crashed_one, forget_crashed, restorable};
pub use restore::restore;
pub use take::take;
