//! What is being done to a VM as a whole.

use pagoda_image::{ImageId, Manifest};
use serde::{Deserialize, Serialize};

/// See the module. It is on the disk before the VM can stand still for it, and until the VM runs again: so whichever daemon there
/// is knows that the VM has to be let run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    pub kind: OperationKind,
    /// What is made, what the VM is made of, or what it is put back to. Of a move: its attempt.
    pub image: ImageId,
    /// The guest is to run afterwards, however the operation ends.
    pub resume: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperationKind {
    /// An image of it is begun.
    Snapshot,
    /// It is new, and its guest has not run since.
    Restore,
    /// It is about to be ended, and made anew of an image.
    Rollback,
    /// It leaves for another host. Whether it may run here its note says (`moves/notes.rs`).
    Move,
    /// It comes from another host, and has not run here. Whether it may its note says.
    Arrival,
}

impl Operation {
    /// Makes a VM of this image, whose guest runs if it ran then.
    pub fn restore(image: &Manifest) -> Operation {
        Operation { kind: OperationKind::Restore, image: image.id, resume: image.running }
    }
}

impl OperationKind {
    /// Another host has a part in it.
    pub const fn is_move(self) -> bool {
        matches!(self, OperationKind::Move | OperationKind::Arrival)
    }

    /// As a user calls it.
    pub const fn name(self) -> &'static str {
        match self {
            OperationKind::Snapshot => "snapshot",
            OperationKind::Restore => "restore",
            OperationKind::Rollback => "rollback",
            OperationKind::Move => "move",
            OperationKind::Arrival => "arrival",
        }
    }
}
