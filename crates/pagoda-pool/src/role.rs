//! A machine lends memory to its pool or borrows from it. One that did both would pass its shortage on in a circle.

use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result};
use rmap::host::Role;

/// This process borrows, until it ends.
static BORROWS: Mutex<Option<Role>> = Mutex::new(None);

/// This machine lends as long as the result is kept.
///
/// # Errors
/// It borrows.
pub fn lend(dir: &Path) -> Result<Role> {
    Role::lend(dir).context("to try a pool on one machine, start `pagoda pool serve` with --also-borrow")
}

/// This process borrows from now on.
///
/// # Errors
/// The machine lends.
pub fn borrow(dir: &Path) -> Result<()> {
    let mut borrows = BORROWS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if borrows.is_none() {
        let role = Role::borrow(dir);
        *borrows = Some(role.context("to try a pool on one machine, start `pagoda pool serve` with --also-borrow")?);
    }
    Ok(())
}
