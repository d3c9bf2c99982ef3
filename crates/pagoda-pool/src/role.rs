//! A machine lends memory to its pool or borrows from it. One that did both would pass its shortage on in a circle.

use std::path::Path;
use std::sync::Mutex;

use anyhow::{Result, anyhow};
use rmap::host::{HostError, Role};

/// This process borrows, until it ends.
static BORROWS: Mutex<Option<Role>> = Mutex::new(None);

/// This machine lends as long as the result is kept.
///
/// # Errors
/// It borrows.
pub fn lend(dir: &Path) -> Result<Role> {
    Role::lend(dir).map_err(advised)
}

fn advised(error: HostError) -> anyhow::Error {
    match error {
        HostError::Lends { .. } | HostError::Borrows { .. } => {
            anyhow!("{error}; or, to try a pool on one machine, start `pagoda pool serve` with --also-borrow")
        }
        other => other.into(),
    }
}

/// This process borrows from now on.
///
/// # Errors
/// The machine lends.
pub fn borrow(dir: &Path) -> Result<()> {
    let mut borrows = BORROWS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if borrows.is_none() {
        *borrows = Some(Role::borrow(dir).map_err(advised)?);
    }
    Ok(())
}
