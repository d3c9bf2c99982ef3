//! Snapshots as they are listed: how much of one that is being filled its VM still holds.

use std::collections::BTreeMap;
use std::time::Duration;

use pagoda_api::types::{ApiError, Snapshot, SnapshotList, SnapshotName, SnapshotStage};
use pagoda_core::units::Bytes;
use pagoda_image::ImageId;
use pagoda_pager::image::{ImageStage, ImageStatus};

use crate::registry::Registry;

/// How long it may take to find out what layers take. Then it is not said.
const LAYERS_MAX: Duration = Duration::from_secs(2);

/// All snapshots.
///
/// # Errors
/// The directory of images cannot be used.
pub fn list(registry: &Registry) -> Result<SnapshotList, ApiError> {
    let missing = missing(registry);
    let mut list = registry.images.list()?;
    list.snapshots.iter_mut().for_each(|snapshot| add(snapshot, &missing));
    add_layers(registry, &mut list.snapshots)?;
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
    add_layers(registry, std::slice::from_mut(&mut snapshot))?;
    Ok(snapshot)
}

/// What the layers of disks take.
fn add_layers(registry: &Registry, snapshots: &mut [Snapshot]) -> Result<(), ApiError> {
    let mut disks =
        snapshots.iter_mut().flat_map(|snapshot| &mut snapshot.disks).filter(|disk| disk.layer.is_some()).peekable();
    if disks.peek().is_none() {
        return Ok(());
    }
    let sizes = registry.layer_sizes.of(registry.images.layers()?, LAYERS_MAX);
    for disk in disks {
        let key = disk.layer.clone().map(|layer| (disk.file.clone(), layer));
        disk.layer_bytes = key.and_then(|key| sizes.get(&key).copied());
    }
    Ok(())
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
