//! What is known while the VM's memory is registered with another userfaultfd, so that it cannot be armed.

use std::time::Instant;

/// The memory is registered with another userfaultfd.
#[derive(Debug)]
pub struct Busy {
    pub(super) since: Instant,
    pub(super) next: Instant,
}

impl Busy {
    /// What the VM waits for.
    pub fn text(&self) -> String {
        format!(
            "its VMM has had a userfaultfd of its own on its memory for {} s (post-copy migration, background snapshot), so \
             its limit cannot be kept: end that in the VMM",
            self.since.elapsed().as_secs()
        )
    }
}
