//! What happens to images behind their VMs' backs: filled ones are made durable, and those that nobody fills any more are lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use pagoda_api::in_full;
use pagoda_image::limits::CHAIN_MAX;
use pagoda_image::{ImageError, ImageId, Listed, Manifest, Stage, Store};

use crate::disks;

/// What the files of images do not say yet, and which images are lost by their disk.
#[derive(Debug, Default)]
pub struct Finishing {
    /// The images that VMs hold pages for, by all records of an earlier daemon.
    held: OnceLock<BTreeSet<ImageId>>,
    /// Held while an image is made durable, which is done for one at a time.
    alone: Mutex<()>,
    /// Images that have all pages, and whose files do not say so yet: the disk did not take that.
    to_be_marked: Mutex<BTreeSet<ImageId>>,
    /// Images whose disk reported an error when they were synced. The kernel tells that once, and takes what was not written for
    /// written: another try would succeed.
    failed: Mutex<BTreeMap<ImageId, String>>,
}

impl Finishing {
    /// Known once all records could be read. Images that are not filled and that no VM holds pages for are lost then.
    pub fn set_held(&self, held: BTreeSet<ImageId>) {
        // It is said once, at start.
        let _ = self.held.set(held);
    }

    /// Loses images that nobody fills. Before this daemon makes any: one that it makes is in no record of an earlier daemon.
    pub fn lose_orphans(&self, store: &Store) {
        let Some(held) = self.held.get() else { return };
        let images = match store.list() {
            Ok(listing) => listing.images,
            Err(error) => return tracing::warn!("look for images that nobody fills: {}", in_full(&error)),
        };
        let is_begun = |listed: &&Listed| stage_of(listed) == Some(Stage::Begun);
        for listed in images.iter().filter(is_begun).filter(|listed| !held.contains(&listed.id)) {
            store.lose(listed.id, "its VM ended before it was filled, while no daemon ran");
        }
    }

    /// That an image has all pages is to be said again.
    pub fn mark_later(&self, id: ImageId) {
        self.lock_to_be_marked().insert(id);
    }

    /// Whether an image has all pages, and its files do not say so.
    pub fn is_to_be_marked(&self, id: ImageId) -> bool {
        self.lock_to_be_marked().contains(&id)
    }

    /// The images of which that is to be said. One that was removed or lost meanwhile is forgotten.
    pub fn to_be_marked(&self, images: &[Listed]) -> BTreeSet<ImageId> {
        let is_begun =
            |id: &ImageId| images.iter().any(|listed| listed.id == *id && stage_of(listed) == Some(Stage::Begun));
        let mut all = self.lock_to_be_marked();
        all.retain(is_begun);
        all.clone()
    }

    /// The files of an image say by now that it has all pages.
    pub fn marked(&self, id: ImageId) {
        self.lock_to_be_marked().remove(&id);
    }

    fn lock_to_be_marked(&self) -> MutexGuard<'_, BTreeSet<ImageId>> {
        self.to_be_marked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a filled image outlive the host. It waits for the disk.
    ///
    /// # Errors
    /// An image that is lost by that, and why: the disk failed, so that nobody knows what it has of it, or it refers to one that is
    /// lost. It is said again each time, until its files say it. Other failures are tried again.
    pub fn make_durable(&self, store: &Store, id: ImageId) -> Result<(), (ImageId, String)> {
        let _alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lost = None;
        for id in chain_of(store, id) {
            if let Some(why) = self.lock_failed().get(&id) {
                return Err((id, why.clone()));
            }
            match (stage_in(store, id), &lost) {
                (Some(Stage::Lost), _) => lost = Some(id),
                (Some(Stage::Filled), Some(parent)) => {
                    return Err((id, format!("the image {parent} that it refers to is lost")));
                }
                _ => {}
            }
            let Err(error) = make_one_durable(store, id) else { continue };
            let why = in_full(error.as_ref());
            if matches!(error.downcast_ref(), Some(ImageError::NotSynced { .. })) {
                self.lock_failed().insert(id, why.clone());
                return Err((id, why));
            }
            tracing::warn!(image = %id, "make a snapshot durable, tried again: {why}");
            break;
        }
        Ok(())
    }

    /// That an image is lost is known by its files now.
    pub fn is_noted(&self, id: ImageId) {
        self.lock_failed().remove(&id);
    }

    /// The images that were filled in this life of the host, and are to be made durable.
    pub fn to_be_durable(&self, images: &[Listed], boot_id: &str) -> Vec<ImageId> {
        let is_of_now = |manifest: &Manifest| manifest.boot_id == boot_id;
        let due = images.iter().filter(|listed| stage_of(listed) == Some(Stage::Filled));
        let due = due.filter(|listed| listed.damage.is_none() && listed.manifest.as_ref().is_some_and(is_of_now));
        due.map(|listed| listed.id).collect()
    }

    fn lock_failed(&self) -> MutexGuard<'_, BTreeMap<ImageId, String>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The layers of its disks are on the disk before it says that it is.
fn make_one_durable(store: &Store, id: ImageId) -> anyhow::Result<()> {
    let ledger = store.ledger(id)?;
    match ledger.manifest().filter(|manifest| manifest.stage == Stage::Filled) {
        None => Ok(()),
        Some(manifest) => {
            disks::sync_layers(&manifest)?;
            Ok(ledger.make_durable()?)
        }
    }
}

/// The image and those that it refers to, as far as they can be read, the last of them first: what an image refers to has to be
/// durable before it.
pub fn chain_of(store: &Store, id: ImageId) -> Vec<ImageId> {
    let mut chain = vec![id];
    while chain.len() < CHAIN_MAX
        && let Some(parent) = store.ledger(chain[chain.len() - 1]).ok().and_then(|ledger| ledger.parent())
    {
        chain.push(parent);
    }
    chain.reverse();
    chain
}

fn stage_in(store: &Store, id: ImageId) -> Option<Stage> {
    store.ledger(id).ok()?.manifest().map(|manifest| manifest.stage)
}

fn stage_of(listed: &Listed) -> Option<Stage> {
    listed.manifest.as_ref().map(|manifest| manifest.stage)
}
