//! Whether one more image fits. An image gets its pages while it is filled, long after it was admitted: what those that were
//! admitted may still need counts as taken.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagoda_api::types::{ApiError, ErrorCode, SnapshotName};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_image::limits::STATE_BYTES_MAX;
use pagoda_image::{ImageId, Listing, Room, Stage, check_room, needed};

use super::error::refused;
use crate::config::SnapshotsConfig;

/// An image that is to be made.
#[derive(Debug)]
pub struct NewImage<'a> {
    pub id: ImageId,
    pub name: &'a SnapshotName,
    /// Pages of the VM's memory.
    pub pages: PageCount,
    /// Of these, what is resident, swapped or shared: all others are zero.
    pub filled: PageCount,
}

/// Images that were admitted and may still grow.
#[derive(Debug, Default)]
pub struct Admission(Mutex<BTreeMap<ImageId, Promise>>);

#[derive(Debug, Clone)]
struct Promise {
    /// What it will be called.
    name: SnapshotName,
    /// The most that it will take.
    needed: Bytes,
    /// The image exists, or did.
    is_begun: bool,
}

/// Room for an image that does not exist yet. Dropped, the room is free again.
#[derive(Debug)]
#[must_use = "the room is kept while this is"]
pub struct Admitted<'a> {
    admission: &'a Admission,
    id: ImageId,
}

impl Admitted<'_> {
    /// The image exists: its room is kept until it has all pages, is lost or is removed.
    pub fn begun(self) {
        if let Some(promise) = self.admission.lock().get_mut(&self.id) {
            promise.is_begun = true;
        }
        std::mem::forget(self);
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.admission.forget(self.id);
    }
}

impl Admission {
    /// Keeps room for an image beside those of `listing`.
    ///
    /// # Errors
    /// Its name is taken, there are too many, or it does not fit.
    pub fn admit(
        &self,
        new: &NewImage<'_>,
        listing: &Listing,
        mut room: Room,
        config: &SnapshotsConfig,
    ) -> Result<Admitted<'_>, ApiError> {
        let hint = "see `pagoda snapshot ls`; `pagoda snapshot rm` removes one";
        let of_limits = |why: String| refused(format!("no snapshot {}: {why}", new.name), Some(hint));
        listing.check_new(&new.name.vm, &new.name.name).map_err(of_limits)?;
        let needed = needed(new.pages, new.filled, STATE_BYTES_MAX);
        let mut promises = self.lock();
        promises.retain(|id, promise| is_growing(listing, *id, promise));
        if promises.values().any(|promise| promise.name == *new.name) {
            return Err(of_limits("one of this name is being made".to_owned()));
        }
        let promised: Bytes = promises.iter().map(|(id, promise)| still_needed(listing, *id, promise)).sum();
        room.free = room.free.saturating_sub(promised);
        room.taken += promised;
        check_room(room, config.limits, needed).map_err(|why| {
            let dir = config.dir.display();
            let hint = format!("they are in {dir}: see `pagoda snapshot ls`, and [snapshots] in pagoda.toml");
            let what = format!("there is no room for a snapshot of {}: {why}", new.name.vm);
            ApiError::new(ErrorCode::NoRoom, what, Some(&hint))
        })?;
        promises.insert(new.id, Promise { name: new.name.clone(), needed, is_begun: false });
        Ok(Admitted { admission: self, id: new.id })
    }

    /// An image that is gone needs nothing any more.
    pub fn forget(&self, id: ImageId) {
        self.lock().remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ImageId, Promise>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether it may still take more than it does.
fn is_growing(listing: &Listing, id: ImageId, promise: &Promise) -> bool {
    match listing.images.iter().find(|listed| listed.id == id) {
        Some(listed) => listed.manifest.as_ref().is_some_and(|manifest| manifest.stage == Stage::Begun),
        None => !promise.is_begun,
    }
}

fn still_needed(listing: &Listing, id: ImageId, promise: &Promise) -> Bytes {
    let own = listing.images.iter().find(|listed| listed.id == id).map_or(Bytes::ZERO, |listed| listed.own);
    promise.needed.saturating_sub(own)
}
