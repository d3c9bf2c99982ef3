//! What kind of program a VM is: QEMU, or any other that maps the RAM.

use serde::{Deserialize, Serialize};

/// This kind of program maps the RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmKind {
    /// QEMU, which also gets a monitor of ours.
    Qemu,
    /// Any other program that maps the RAM files itself.
    Plain,
}
