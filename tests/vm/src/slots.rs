//! Guests at a time on this machine, over all test processes: a lock file each. Processes that die give theirs back.

use std::fs::{self, File};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::{programs, wait};

/// Twice the cores of the smallest machine for this: with three a third of its CPUs' time was idle, for guests wait for the disk and
/// tests for something to happen. With four all of them took 715 s, with three 870 to 980.
pub const GUESTS_MAX: usize = 4;
/// The longest test, and a queue of them before us.
const WAIT_MAX: Duration = Duration::from_secs(1800);

/// The right to run so many guests, until dropped.
#[derive(Debug)]
pub struct Slots {
    _held: Vec<File>,
}

impl Slots {
    /// Waits for `count` free slots.
    ///
    /// # Errors
    /// More than there are; or none became free.
    pub fn take(count: usize) -> Result<Self> {
        ensure!(count <= GUESTS_MAX, "{count} guests at once, but the machine is for {GUESTS_MAX}");
        let dir = programs::work_dir()?.join("slots");
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let open = |name: &str| File::create(dir.join(name)).with_context(|| format!("open slot {name}"));
        // One process waits at a time, so nobody holds a part of what it needs while another does too.
        let gate = open("gate")?;
        flock(&gate, FlockOperation::LockExclusive).context("wait for the gate")?;
        let mut held = Vec::new();
        wait::until("a free slot for a guest", WAIT_MAX, || {
            for index in 0..GUESTS_MAX {
                let slot = open(&index.to_string())?;
                if held.len() < count && flock(&slot, FlockOperation::NonBlockingLockExclusive).is_ok() {
                    held.push(slot);
                }
            }
            Ok((held.len() == count).then_some(()))
        })?;
        Ok(Self { _held: held })
    }
}
