//! What a VM is.

use serde::{Deserialize, Serialize};

/// What maps the RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmKind {
    /// QEMU, which also gets a monitor of ours.
    Qemu,
    /// Any other program that maps the RAM files itself.
    Plain,
}
