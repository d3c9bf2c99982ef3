//! Whether this host is drained: its VMs move to others, and it takes no new ones.
//!
//! Whoever drains it says so, and says when that is over. It is not kept: a daemon that is started again takes VMs. What is here already
//! is not touched, and a VM of this host may be restored or rolled back.

use std::sync::atomic::{AtomicBool, Ordering};

use pagoda_api::types::{ApiError, ErrorCode};

/// Whether this host is drained, which the daemon alone remembers.
#[derive(Debug, Default)]
pub struct Draining(AtomicBool);

impl Draining {
    pub fn switch(&self, on: bool) {
        if self.0.swap(on, Ordering::Relaxed) != on {
            tracing::info!(on, "this host is drained and takes no new VMs, or takes them again");
        }
    }

    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Checks that a new VM may come.
    ///
    /// # Errors
    /// None may.
    pub fn check(&self, name: &str) -> Result<(), ApiError> {
        if !self.is_on() {
            return Ok(());
        }
        let what = format!("{name} is not made: this host is drained and takes no new VMs");
        Err(ApiError::new(ErrorCode::Refused, what, Some("wait for the drain, or end it: pagoda host drain --stop")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_vms_are_refused_meanwhile() {
        let draining = Draining::default();
        assert!(!draining.is_on() && draining.check("web1").is_ok());
        draining.switch(true);
        let refused = draining.check("web1").unwrap_err();
        assert!(refused.code == ErrorCode::Refused && refused.message.contains("web1"), "{refused:?}");
        draining.switch(false);
        assert!(draining.check("web1").is_ok());
    }
}
