//! The harness of the tests with real VMMs: private daemons, QEMU guests, toy VMMs, scratch disks.
//!
//! A test is a closure given to [`Lab::run`]. The lab owns all that the test starts and changes, ends it in order
//! whatever happened, and on a failure first prints what the daemons, the VMs and the consoles say. Every wait has a
//! deadline. `README.md` beside this crate says what each test needs.

pub mod accel;
pub mod console;
pub mod control;
pub mod daemon;
pub mod disk;
pub mod guest;
pub mod kvm;
pub mod lab;
pub mod late;
pub mod loopfs;
pub mod pool;
pub mod programs;
pub mod slots;
pub mod toy;
pub mod watch;

pub use daemon::{Daemon, DaemonOptions, Folios};
pub use guest::{Guest, GuestOptions};
pub use lab::Lab;
pub use late::LateDisk;
pub use programs::Qemu;
pub use testkit::{qmp, wait};
pub use toy::Toy;
pub use watch::Watch;

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;
