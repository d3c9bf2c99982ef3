//! Processes that are to attach as a VM's program, and whether they have ended.

use std::time::Instant;

use pagoda_sys::process::Life;
use pagoda_sys::socket::Peer;

/// A process of a VM that is not attached yet.
#[derive(Debug, Clone, Copy)]
pub struct Starter {
    pub pid: u32,
    pub uid: u32,
    /// When it started; `None` if /proc did not say.
    pub start: Option<u64>,
}

impl Starter {
    pub fn of(peer: Peer) -> Self {
        Self { pid: peer.pid, uid: peer.uid, start: pagoda_sys::process::start_time(peer.pid).ok() }
    }

    /// Whether it is a fact that it has ended.
    pub fn has_ended(&self, vm: &str) -> bool {
        self.start.is_some_and(|start| has_ended(vm, self.pid, start))
    }
}

/// A VM's RAM is in a process.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    pub by: Starter,
    pub at: Instant,
}

/// Whether it is a fact that the VM's process has ended. If nobody can tell, it is said, and looked at again with the next
/// round of the reaper: what a running VM has on disk must not be removed on a doubt.
pub fn has_ended(vm: &str, pid: u32, start: u64) -> bool {
    match pagoda_sys::process::life(pid, start) {
        Life::Alive => false,
        Life::Ended => true,
        Life::Unknown(error) => {
            tracing::warn!(%vm, pid, "cannot tell whether its process still runs, so it is kept: {error}");
            false
        }
    }
}
