//! One tier of a VM as the control API shows it.

use serde::{Deserialize, Serialize};

use super::latency::Latency;

/// What a tier holds, and what it has moved since the VM attached to this daemon. Bytes and pages of 4 KiB.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TierInfo {
    /// `compressed`, `remote`, `image` or `swap`.
    pub name: String,
    /// Pages that it holds.
    pub pages: u64,
    /// Memory of this machine that it takes.
    pub memory_bytes: u64,
    /// Disk of this machine that it takes.
    pub disk_bytes: u64,
    /// Pages read from it.
    pub pages_in: u64,
    /// Pages written to it.
    pub pages_out: u64,
    /// Pages that it did not take, so that the next tier was asked.
    pub declined_pages: u64,
    /// Its part of page-ins.
    pub read: Latency,
    /// Its part of page-outs.
    pub write: Latency,
}
