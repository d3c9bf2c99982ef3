//! The client asks about outboxes here, and changes their sizes.

use super::{Client, ClientError};
use crate::types::{OutboxExplanation, OutboxInfo, OutboxList, OutboxPatch, check_vm_name, vm_file_name};

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

    /// Gives a VM's outbox another space, or another thing that its space follows.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn set_outbox(&self, vm: &str, patch: &OutboxPatch) -> Result<OutboxInfo, ClientError> {
        patch.check().map_err(ClientError::BadName)?;
        self.send("PATCH", &path(vm)?, patch)
    }

    /// Why a VM's outbox has the size that it has.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn explain_outbox(&self, vm: &str) -> Result<OutboxExplanation, ClientError> {
        self.get(&format!("{}/explain", path(vm)?))
    }
}

fn path(vm: &str) -> Result<String, ClientError> {
    check_vm_name(vm).map_err(ClientError::BadName)?;
    Ok(format!("/v1/outboxes/{}", vm_file_name(vm)))
}
