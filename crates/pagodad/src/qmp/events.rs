//! Events of QEMU's.

use std::time::Instant;

/// What QEMU told without being asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Events {
    /// Times the guest was reset.
    pub resets: u64,
    /// Times the guest's balloon changed its size.
    pub balloon_changes: u64,
    /// When the guest was last shut down.
    pub shutdown: Option<Instant>,
}
