//! The guest's side: QEMU speaks vhost-user on one connection, and the file server answers.
//!
//! Between QEMU and here is the keeper, which says again what QEMU has said if this process takes over from another one. If
//! QEMU goes, what the guest was writing will never be whole, and readers of it are told so. What it has closed is still
//! delivered. Writes that wait then end, and their answers go into memory that is nobody's any more: QEMU's process has ended. If the
//! keeper parts with a QEMU that is there, it has ended this process before.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::{Error, VhostUserDaemon};
use vm_memory::GuestMemoryAtomic;

use crate::backend::Backend;
use crate::chain::Memory;
use crate::inflight::{RINGS, Table};
use crate::outbox::Outbox;

/// Has readers get nothing of files that may still change until the guest's requests are carried out that another process has left.
pub fn hold(outbox: &Outbox, table: &Table) {
    if (0..RINGS).any(|ring| table.is_busy(ring)) {
        outbox.space().hold();
    }
}

/// Serves the one connection that waits at `listener`, until it ends.
pub fn serve(outbox: &Arc<Outbox>, table: Table, listener: UnixListener) -> Result<()> {
    let backend = Backend::start(outbox, table).context("start the file server's threads")?;
    let memory = GuestMemoryAtomic::new(Memory::new());
    // The library's error is none of the standard library's.
    let daemon = VhostUserDaemon::new("vhost-user".into(), Arc::new(backend), memory);
    let mut daemon = daemon.map_err(|error| anyhow!("start vhost-user: {error}"))?;
    daemon.start(&mut Listener::from(listener)).map_err(|error| anyhow!("accept the VMM: {error}"))?;
    match daemon.wait() {
        Ok(()) | Err(Error::HandleRequest(VhostUserError::Disconnected | VhostUserError::PartialMessage)) => {
            outbox.abandon();
            // What a thread still finds in the guest's memory reaches no reader now. If the VM has ended, nobody answers its faults.
            pagoda_sys::mapper::release();
            Ok(())
        }
        Err(error) => Err(anyhow!("serve the VMM: {error}")),
    }
}
