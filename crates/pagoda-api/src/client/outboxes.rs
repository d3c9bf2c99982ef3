//! Requests about outboxes.

use super::{Client, ClientError};
use crate::types::{OutboxInfo, OutboxList, OutboxPatch, check_outbox_space, check_vm_name, vm_file_name};

impl Client {
    /// All outboxes of this host, also those whose VMs have ended and whose files wait.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn outboxes(&self) -> Result<OutboxList, ClientError> {
        self.get("/v1/outboxes")
    }

    /// A VM's outbox.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn outbox(&self, vm: &str) -> Result<OutboxInfo, ClientError> {
        self.get(&path(vm)?)
    }

    /// Gives a VM's outbox another space.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn set_outbox(&self, vm: &str, space_bytes: u64) -> Result<OutboxInfo, ClientError> {
        check_outbox_space(space_bytes).map_err(ClientError::BadName)?;
        self.send("PATCH", &path(vm)?, &OutboxPatch { space_bytes })
    }
}

fn path(vm: &str) -> Result<String, ClientError> {
    check_vm_name(vm).map_err(ClientError::BadName)?;
    Ok(format!("/v1/outboxes/{}", vm_file_name(vm)))
}
