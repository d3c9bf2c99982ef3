//! A machine lends memory to its pool or borrows from it. One that did both would pass its shortage on in a circle.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Result, anyhow};
use rmap_io::host::{HostError, Role};

/// This process borrows, until it ends; by the directory of the pool.
static BORROWS: Mutex<BTreeMap<PathBuf, Role>> = Mutex::new(BTreeMap::new());

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
    if !borrows.contains_key(dir) {
        borrows.insert(dir.to_owned(), Role::borrow(dir).map_err(advised)?);
    }
    Ok(())
}
