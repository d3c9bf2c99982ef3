//! The link to the VMM and its mappers: processes, the agent, and the calls of the VMM's threads.
//!
//! The [`agent`] is the shim's thread, which does for the engine what only the VMM's own process can. The [`calls`] are
//! what threads of the VMM ask of the engine and wait for. The [`mappers`] are other processes that map the VM's memory.
//! None changes a page: what is received goes back to the loop, which makes events of it.
//!
//! If a connection breaks, the VM goes on: its faults are served, and what needs the agent waits for its next connection.

pub mod agent;
pub mod calls;
mod gate;
pub mod mappers;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pagoda_sys::ring::{Ring, RingError};

use self::agent::Agent;
use self::calls::Calls;
use self::mappers::MapperLinks;
use super::broken::Broken;
use crate::source::Source;

/// Everything by which the engine speaks with the VMM and its mappers.
pub struct VmmLink {
    pidfd: OwnedFd,
    pub agent: Agent,
    pub calls: Calls,
    pub mappers: MapperLinks,
}

impl VmmLink {
    /// To the VMM of this VM, whose agent is not connected yet.
    pub fn new(vm: &Arc<str>, pidfd: OwnedFd) -> VmmLink {
        VmmLink {
            pidfd,
            agent: Agent::new(Arc::clone(vm)),
            calls: Calls::new(Arc::clone(vm)),
            mappers: MapperLinks::new(Arc::clone(vm)),
        }
    }

    /// Waits for the end of the VMM.
    ///
    /// # Errors
    /// Of the ring.
    pub fn poll_exit(&self, ring: &mut Ring) -> Result<(), RingError> {
        ring.poll_multishot(self.pidfd.as_fd(), Source::Exit.key())
    }

    /// The poll of the VMM's pidfd brought something: whether the VMM has ended. A poll may end for other reasons, such
    /// as a lack of memory, so the pidfd itself is asked: on its word the VM's files are removed.
    pub fn has_exited(&self, ring: &mut Ring, more: bool) -> Result<bool, Broken> {
        let has_ended = pagoda_sys::process::has_ended(self.pidfd.as_fd());
        if !has_ended
            && !more
            && let Err(error) = self.poll_exit(ring)
        {
            return Err(format!("cannot wait for the end of the VMM: {error}").into());
        }
        Ok(has_ended)
    }
}
