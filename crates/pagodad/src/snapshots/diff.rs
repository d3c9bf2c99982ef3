//! How much of the memory differs between two snapshots of a VM.

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, SnapshotDiff, SnapshotName};
use pagoda_core::units::PageCount;
use pagoda_image::{Diff, Image};

use crate::images::refused;
use crate::registry::Registry;

/// Compares two snapshots by their maps.
///
/// # Errors
/// There is no such snapshot; one is not filled, is lost or damaged; the disk's.
pub fn diff(registry: &Registry, first: &SnapshotName, second: &SnapshotName) -> Result<SnapshotDiff, ApiError> {
    let (before, after) = (open(registry, first)?, open(registry, second)?);
    let diff = Diff::between(&before, &after)
        .map_err(|error| refused(format!("{first} and {second} cannot be compared: {}", in_full(&error)), None))?;
    let bytes = |pages: u64| PageCount(pages).bytes().0;
    Ok(SnapshotDiff {
        memory_bytes: bytes(diff.pages),
        pages: diff.differing(),
        bytes: bytes(diff.differing()),
        changed_pages: diff.changed,
        filled_pages: diff.filled,
        cleared_pages: diff.cleared,
    })
}

fn open(registry: &Registry, name: &SnapshotName) -> Result<Image, ApiError> {
    let found = registry.images.find(name)?;
    let not = |why: String| refused(format!("{name} cannot be compared: {why}"), None);
    found.manifest.check_usable(registry.images.boot_id()?).map_err(not)?;
    // Opened, it is read to the end, also if it is removed meanwhile.
    registry.images.store()?.image(found.listed.id).map_err(|error| not(in_full(&error)))
}
