//! Removing a snapshot, also one that its VM still holds pages for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_api::types::{ApiError, ErrorCode, RemovedSnapshot};
use pagoda_image::{ImageId, Listed};
use pagoda_pager::handle::{Command, Handle};

use super::layers;
use crate::images::Which;
use crate::record::Record;
use crate::registry::Registry;

/// How long an engine may take to let go of its pages: they are given up, not copied.
const LET_GO_MAX: Duration = Duration::from_secs(5);
/// The pause between two looks whether the engine has let go.
const LOOK: Duration = Duration::from_millis(10);

/// Removes a snapshot. The layers of its disks stay.
///
/// # Errors
/// There is none; a VM reads it; its VM does not let go of it; the disk's.
pub fn remove(registry: &Arc<Registry>, which: &Which) -> Result<RemovedSnapshot, ApiError> {
    let mut manifest = None;
    registry.images.remove(which, |image| {
        manifest = image.manifest.clone();
        let_go(registry, image)
    })?;
    Ok(manifest.as_ref().map_or_else(RemovedSnapshot::default, layers::kept))
}

/// Called before anything of an image is removed. Its VM may have pages of it that exist nowhere else, and would go on writing
/// into files that are gone.
fn let_go(registry: &Registry, image: &Listed) -> Result<(), ApiError> {
    let is_used = |vm: &crate::registry::Vm| vm.record.operation.is_some_and(|operation| operation.image == image.id);
    let used_by = registry.lock().values().find(|vm| is_used(vm)).map(|vm| vm.record.clone());
    if let Some(Record { name, operation: Some(operation), .. }) = used_by {
        let what = format!("a {} of {name} is under way, and needs the image", operation.kind.name());
        return Err(ApiError::new(ErrorCode::WrongState, what, Some("try again in a moment")));
    }
    // Whose newest image it is, that VM's next one cannot refer to it.
    let attached: Vec<Arc<Handle>> = registry.lock().values().filter_map(|vm| vm.handle.clone()).collect();
    attached.iter().for_each(|handle| handle.send(Command::RemoveImage(image.id)));
    let holder = |vm: &crate::registry::Vm| (vm.governed.id, vm.record.clone(), vm.handle.clone());
    let held = registry.lock().values().find(|vm| vm.record.image == Some(image.id)).map(holder);
    let Some((id, record, handle)) = held else { return Ok(()) };
    let refuse = |why: &str| {
        let what = format!("{} still holds memory for the snapshot, and {why}", record.name);
        Err(ApiError::new(ErrorCode::WrongState, what, Some("try again in a moment")))
    };
    let Some(handle) = handle else { return refuse("is not attached") };
    handle.send(Command::RemoveImage(image.id));
    if !wait_until_gone(&handle, image.id) {
        return refuse("does not let go of it");
    }
    registry.forget_image(id, image.id);
    Ok(())
}

fn wait_until_gone(handle: &Arc<Handle>, image: ImageId) -> bool {
    let deadline = Instant::now() + LET_GO_MAX;
    loop {
        if handle.fresh_status().image.is_none_or(|of| of.id != image) {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(LOOK);
    }
}
