//! Snapshots as far as VMs have to do with them. Their files are [`crate::images::Images`]'.

use pagoda_api::types::{ApiError, ErrorCode, Snapshot, SnapshotList, SnapshotName};
use pagoda_image::Listed;

use super::Registry;
use crate::images::Which;

impl Registry {
    /// All snapshots.
    ///
    /// # Errors
    /// The directory of images cannot be used.
    pub fn snapshots(&self) -> Result<SnapshotList, ApiError> {
        self.images.list()
    }

    /// One snapshot.
    ///
    /// # Errors
    /// There is none of this name; the directory of images cannot be used.
    pub fn snapshot(&self, name: &SnapshotName) -> Result<Snapshot, ApiError> {
        self.images.get(name)
    }

    /// Removes a snapshot.
    ///
    /// # Errors
    /// There is none; its VM holds memory for it; the disk's.
    pub fn remove_snapshot(&self, which: &Which) -> Result<(), ApiError> {
        self.images.remove(which, |image| self.let_go_of(image))
    }

    /// Called before anything of an image is removed. Its VM may have pages of it that exist nowhere else, and would go on
    /// writing into files that are gone: while it is there, the image stays.
    fn let_go_of(&self, image: &Listed) -> Result<(), ApiError> {
        let Some(manifest) = &image.manifest else { return Ok(()) };
        if !self.images.is_being_filled(manifest) || !self.lock().contains_key(&manifest.vm) {
            return Ok(());
        }
        let what = format!("{}/{} is still being filled by its VM", manifest.vm, manifest.name);
        Err(ApiError::new(ErrorCode::WrongState, what, Some("try again when it is filled: see `pagoda snapshot ls`")))
    }
}
