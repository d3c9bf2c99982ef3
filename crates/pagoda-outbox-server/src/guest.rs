//! The guest's side: QEMU speaks vhost-user on one connection, and the file server answers.
//!
//! If QEMU goes, what the guest was writing will never be whole, and readers of it are told so. What it has closed is still
//! delivered.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::{Error, VhostUserDaemon};
use virtiofsd::vhost_user::VhostUserFsBackendBuilder;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::filesystem::GuestFiles;
use crate::outbox::{Outbox, WAITING_MAX};

/// Requests that are served at the same time. Those that wait for room are fewer, so metadata always goes through.
const THREADS: usize = WAITING_MAX + 8;

/// Serves the one connection that waits at `listener`, until it ends.
pub fn serve(outbox: &Arc<Outbox>, listener: UnixListener) -> Result<()> {
    let files = GuestFiles(Arc::clone(outbox));
    let backend = VhostUserFsBackendBuilder::default().set_thread_pool_size(THREADS).build(files);
    let backend = Arc::new(backend.context("start the file server's threads")?);
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
    // The library's error is none of the standard library's.
    let daemon = VhostUserDaemon::new("vhost-user".into(), backend, memory);
    let mut daemon = daemon.map_err(|error| anyhow!("start vhost-user: {error}"))?;
    daemon.start(&mut Listener::from(listener)).map_err(|error| anyhow!("accept the VMM: {error}"))?;
    let ended = daemon.wait();
    outbox.abandon();
    // What a thread still finds in the guest's memory reaches no reader now. If the VM has ended, nobody answers its faults.
    pagoda_sys::mapper::release();
    match ended {
        Ok(()) | Err(Error::HandleRequest(VhostUserError::Disconnected | VhostUserError::PartialMessage)) => Ok(()),
        Err(error) => Err(anyhow!("serve the VMM: {error}")),
    }
}
