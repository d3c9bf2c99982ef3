//! Snapshots as they are listed: how much of one that is being filled its VM still holds.

use std::collections::BTreeMap;

use pagoda_api::types::{ApiError, Snapshot, SnapshotList, SnapshotName, SnapshotStage};
use pagoda_core::units::Bytes;
use pagoda_image::ImageId;
use pagoda_pager::image::{ImageStage, ImageStatus};

use crate::registry::Registry;

/// All snapshots.
///
/// # Errors
/// The directory of images cannot be used.
pub fn list(registry: &Registry) -> Result<SnapshotList, ApiError> {
    let missing = missing(registry);
    let mut list = registry.images.list()?;
    list.snapshots.iter_mut().for_each(|snapshot| add(snapshot, &missing));
    Ok(list)
}

/// One snapshot.
///
/// # Errors
/// There is none of this name; the directory of images cannot be used.
pub fn get(registry: &Registry, name: &SnapshotName) -> Result<Snapshot, ApiError> {
    let missing = missing(registry);
    let mut snapshot = registry.images.get(name)?;
    add(&mut snapshot, &missing);
    Ok(snapshot)
}

fn add(snapshot: &mut Snapshot, missing: &BTreeMap<String, Bytes>) {
    if snapshot.stage == SnapshotStage::Begun {
        snapshot.missing_bytes = missing.get(&snapshot.id).map(|missing| missing.0);
    }
}

/// What VMs hold for images, as their engines said last.
fn missing(registry: &Registry) -> BTreeMap<String, Bytes> {
    let of = |status: ImageStatus| match status.stage {
        ImageStage::Filling { missing } => Some((ImageId::to_string(&status.id), missing.bytes())),
        ImageStage::Preparing { .. } | ImageStage::Lost => None,
    };
    let vms = registry.lock();
    vms.values().filter_map(|vm| of(vm.handle.as_ref()?.status().image?)).collect()
}
