//! What becomes of an image that has begun: its VM's engine fills it, then it is made durable, and the VM's record no longer
//! has it.

use std::sync::Arc;
use std::time::Duration;

use pagoda_api::in_full;
use pagoda_api::types::ApiError;
use pagoda_core::policy::VmId;
use pagoda_image::{ImageId, Ledger};
use pagoda_sys::socket::SharedMap;

use crate::record::Record;
use crate::registry::Registry;

/// Between two looks at a snapshot that is being taken.
const LOOK: Duration = Duration::from_millis(10);
/// How often, and how soon after one another, it is tried to say that an image is filled.
const MARK_TRIES: u32 = 5;
const MARK_PAUSE: Duration = Duration::from_secs(2);

/// An engine has said that an image has all pages. It waits for whoever takes the snapshot, and for disks.
pub fn finish(registry: &Arc<Registry>, vm: VmId, image: ImageId) {
    // The end of the VM waits for this, and not the other way round.
    while registry.is_taking(vm, image) {
        std::thread::sleep(LOOK);
    }
    // A daemon before this one may have said so. What was written since then came too late for it.
    let unseen = if registry.images.is_filled(image) { None } else { written_by_others(registry, vm) };
    let marked = match unseen {
        Some(why) => registry.images.lose(image, &format!("the VM's memory may have been written unseen: {why}")),
        None => mark_filled(registry, image).inspect_err(|_| registry.images.mark_filled_later(image)),
    };
    if let Err(error) = marked {
        // Until then the VM's record has it: the next daemon finds again that it has all pages.
        tracing::warn!(%image, "say that a snapshot is filled: {}", error.message);
        return;
    }
    registry.forget_image(vm, image);
    // It takes as long as the disk takes for all of the image, and the end of the VM does not wait for that.
    let registry = Arc::clone(registry);
    let sync = move || registry.images.make_durable(image);
    if let Err(error) = std::thread::Builder::new().name("image-sync".into()).spawn(sync) {
        tracing::warn!(%image, "make a snapshot durable, tried again: {error}");
    }
}

/// A process that maps the VM's memory unseen may have written to pages that the image took for unchanged. Why that may be so.
fn written_by_others(registry: &Registry, vm: VmId) -> Option<String> {
    let were_seen = registry.find_strangers();
    match registry.find_by_id(vm, |vm| vm.record.spec.pinned.clone()) {
        Some(Some(why)) => Some(why),
        Some(None) if were_seen => None,
        Some(None) => Some("other processes could not be looked at".to_owned()),
        None => Some("it ended before others were looked for".to_owned()),
    }
}

/// The disk may be full for a moment. The end of the VM waits for this; if it takes longer, [`crate::images::Images::run`] goes on.
fn mark_filled(registry: &Registry, image: ImageId) -> Result<(), ApiError> {
    for _ in 1..MARK_TRIES {
        if registry.images.mark_filled(image).is_ok() {
            return Ok(());
        }
        std::thread::sleep(MARK_PAUSE);
    }
    registry.images.mark_filled(image)
}

/// An engine has said that an image is lost. It waits for a disk.
pub fn lost(registry: &Registry, vm: VmId, image: ImageId, why: &str) {
    tracing::warn!(%image, "a snapshot is lost; the VM is not: {why}");
    // The engine may have ended before the image's files took a note of it.
    if let Err(error) = registry.images.lose(image, why) {
        tracing::warn!(%image, "{}", error.message);
    }
    registry.forget_image(vm, image);
}

/// The image that a VM still holds pages for, which an earlier daemon began. To be called before the VM's engine starts: from
/// then on pages change. One that cannot be gone on with is lost for all later daemons too, whatever its files say: `shared`, which
/// the VMM keeps, says so, and the caller takes it out of the record before the engine starts.
pub fn unfilled(registry: &Registry, record: &Record, shared: &SharedMap) -> Option<Arc<Ledger>> {
    let image = record.image?;
    let opened = match registry.images.store() {
        Ok(store) => store.ledger(image).map_err(|error| in_full(&error)),
        Err(error) => Err(error.message),
    };
    // It may never have begun. Its files are left alone: if they cannot be read now, nobody knows what they are.
    opened
        .inspect_err(|why| {
            tracing::info!(vm = %record.name, %image, "it holds no pages for a snapshot: {why}");
            shared.mark_lost_image(image.0);
        })
        .ok()
}
