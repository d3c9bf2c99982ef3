//! How many snapshots become files, and files snapshots, at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pagoda_api::types::{ApiError, ErrorCode};

/// Files that are written and read at a time, together: each takes CPUs and a disk from VMs.
const TRANSFERS_MAX: usize = 2;

/// How many transfers are under way.
#[derive(Debug, Default)]
pub struct Transfers(Arc<AtomicUsize>);

/// A transfer under way. Dropped, it is over.
#[derive(Debug)]
#[must_use = "another one may begin when this is dropped"]
pub struct Slot(Arc<AtomicUsize>);

impl Transfers {
    /// # Errors
    /// Others are under way.
    pub fn begin(&self) -> Result<Slot, ApiError> {
        let count = self.0.fetch_add(1, Ordering::Relaxed);
        let slot = Slot(Arc::clone(&self.0));
        if count >= TRANSFERS_MAX {
            let why = format!("{TRANSFERS_MAX} snapshots are being exported or imported");
            return Err(ApiError::new(ErrorCode::WrongState, why, Some("try again when one of them is done")));
        }
        Ok(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
