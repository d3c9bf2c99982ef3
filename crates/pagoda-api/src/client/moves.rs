//! The client begins moves between hosts here, follows them and gives them up.

use super::{Client, ClientError, vm_path};
use crate::types::{MoveList, MoveReply, MoveRequest, MoveStatus, check_vm_name, vm_file_name};

impl Client {
    /// Begins a move, or says what it would come to. The move goes on by itself: [`Client::move_of`] says how far it is.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn move_vm(&self, vm: &str, request: &MoveRequest) -> Result<MoveReply, ClientError> {
        request.check().map_err(ClientError::BadName)?;
        self.send("POST", &vm_path(vm, "/move")?, request)
    }

    /// Moves that are under way, and the last one of each VM that has ended.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn moves(&self) -> Result<MoveList, ClientError> {
        self.get("/v1/moves")
    }

    /// How far the move of a VM is, or how it has ended.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn move_of(&self, vm: &str) -> Result<MoveStatus, ClientError> {
        self.get(&path(vm, "")?)
    }

    /// Gives a move up. It has ended when [`Client::move_of`] says so, and then the VM may have moved all the same.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn cancel_move(&self, vm: &str) -> Result<MoveStatus, ClientError> {
        self.send("POST", &path(vm, "/cancel")?, &())
    }

    /// Says that the other host is gone for good. If it is not, the VM may run twice.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn resolve_move(&self, vm: &str) -> Result<MoveStatus, ClientError> {
        self.send("POST", &path(vm, "/resolve")?, &())
    }
}

fn path(vm: &str, rest: &str) -> Result<String, ClientError> {
    check_vm_name(vm).map_err(ClientError::BadName)?;
    Ok(format!("/v1/moves/{}{rest}", vm_file_name(vm)))
}
