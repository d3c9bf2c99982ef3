//! The snapshots of this host: one owner of the directory of images, around [`pagoda_image::Store`].
//!
//! It lists, finds, verifies and removes, says whether one more fits, and counts. Of VMs it knows which read an image
//! ([`readers`]); who still fills one is asked by [`Images::remove`]. Nothing waits for a disk under a lock but for other
//! requests about snapshots.
//!
//! **What fails.** If the directory cannot be used, snapshots cannot, and paging goes on: `health` says so, and it is tried
//! again. Guests notice nothing.

pub mod admission;
pub mod describe;
mod error;
mod finishing;
mod parents;
pub mod readers;
pub mod source;
pub mod templates;
pub mod transfers;
mod verification;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pagoda_api::types::{
    ApiError, ErrorCode, HostSnapshots, Snapshot, SnapshotLaunch, SnapshotList, SnapshotName, VerifyReport,
};
use pagoda_api::{in_full, with_advice};
use pagoda_core::units::Bytes;
use pagoda_image::{Image, ImageId, Listed, Listing, Manifest, RoomLimits, Stage, Store, check_room};

use self::admission::{Admission, Admitted, NewImage};
pub use self::error::{as_refused, failed, refused};
use self::error::{in_use, no_image, no_such_snapshot};
use self::finishing::{Finishing, chain_of};
pub use self::parents::Held;
use self::parents::Parents;
use self::readers::{Readers, Reading};
use self::transfers::Transfers;
use self::verification::Verifications;
use crate::boot;
use crate::config::SnapshotsConfig;
use crate::disks::NotedLayer;
use crate::parts::{Parts, pauses};

/// The name under which health shows snapshots.
const PART: &str = "snapshots";
/// How often the images are counted: all their manifests are read, some milliseconds of CPU time for ten of them.
const COUNT_PERIOD: Duration = Duration::from_secs(30);

/// All snapshots of this host, and what is being done to them.
#[derive(Debug)]
pub struct Images {
    config: SnapshotsConfig,
    parts: Arc<Parts>,
    opened: OnceLock<Opened>,
    /// What daemons before this one left was removed.
    is_clean: Mutex<bool>,
    counted: Mutex<Option<HostSnapshots>>,
    finishing: Finishing,
    admission: Admission,
    readers: Arc<Readers>,
    verifications: Verifications,
    transfers: Transfers,
    parents: Parents,
    templates: templates::Templates,
    /// One image at a time is removed: its children change.
    removal: Mutex<()>,
}

#[derive(Debug)]
struct Opened {
    store: Arc<Store>,
    /// The life of the host that this is.
    boot_id: &'static str,
}

impl Opened {
    fn at(dir: &Path) -> Result<Opened, String> {
        let store = Store::open(dir).map_err(|error| in_full(&error))?;
        Ok(Opened { store: Arc::new(store), boot_id: boot::id()? })
    }
}

/// An image, by what its user knows of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    Named(SnapshotName),
    /// The image of this number, also if its manifest cannot be read.
    Id(ImageId),
}

/// An image that was found by its name or number.
#[derive(Debug)]
pub struct Found {
    pub listed: Listed,
    pub manifest: Manifest,
}

impl Images {
    /// Nothing is opened yet: that may fail, and is tried again.
    pub fn new(config: SnapshotsConfig, parts: Arc<Parts>) -> Images {
        Images {
            config,
            parts,
            opened: OnceLock::new(),
            is_clean: Mutex::default(),
            counted: Mutex::default(),
            finishing: Finishing::default(),
            admission: Admission::default(),
            readers: Arc::default(),
            verifications: Verifications::default(),
            transfers: Transfers::default(),
            parents: Parents::default(),
            templates: templates::Templates::default(),
            removal: Mutex::default(),
        }
    }

    /// Removes what daemons before this one left, as soon as the directory can be used, and counts images from time to time.
    /// What could not be done about an image is tried again: `filled` hears of each that it is filled by now. For a thread of
    /// its own: it may wait for the disk, and never ends.
    pub fn run(&self, filled: &dyn Fn(ImageId)) {
        for pause in pauses() {
            if self.ready().is_ok() {
                break;
            }
            std::thread::sleep(pause);
        }
        loop {
            match self.listing() {
                Ok(listing) => {
                    self.parts.works(PART);
                    self.try_again(&listing, filled);
                }
                Err(error) => self.parts.failed(PART, &error.message),
            }
            std::thread::sleep(COUNT_PERIOD);
        }
    }

    /// The directory of images, for reading, and for going on with an image that an earlier daemon began.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn store(&self) -> Result<&Arc<Store>, ApiError> {
        self.opened().map(|opened| &opened.store)
    }

    /// The same, for whoever makes or removes images: what daemons before this one left is gone, and is not taken for theirs.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn ready(&self) -> Result<&Arc<Store>, ApiError> {
        let store = self.store()?;
        let mut is_clean = lock(&self.is_clean);
        if !*is_clean {
            match store.clean() {
                Ok(0) => {}
                Ok(count) => tracing::info!("{count} images that were not finished, or not removed, are removed"),
                Err(error) => tracing::warn!("remove what is left of images: {}", in_full(&error)),
            }
            self.finishing.lose_orphans(store);
            *is_clean = true;
        }
        Ok(store)
    }

    /// The life of the host that this is, as manifests name it.
    ///
    /// # Errors
    /// As [`Images::store`].
    pub fn boot_id(&self) -> Result<&str, ApiError> {
        self.opened().map(|opened| opened.boot_id)
    }

    /// All snapshots, and what cannot be read.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn list(&self) -> Result<SnapshotList, ApiError> {
        let mut list = describe::list(&self.listing()?, self.boot_id()?);
        list.snapshots.iter_mut().for_each(|snapshot| self.add_use(snapshot));
        Ok(list)
    }

    /// One snapshot.
    ///
    /// # Errors
    /// There is none of this name; the directory cannot be used.
    pub fn get(&self, name: &SnapshotName) -> Result<Snapshot, ApiError> {
        let Found { listed, manifest } = self.find(name)?;
        let mut snapshot = describe::snapshot(&listed, &manifest, self.boot_id()?);
        self.add_use(&mut snapshot);
        // A record that cannot be read is as good as none; who makes a VM of the image says why.
        let touched = self.store()?.image(listed.id).ok().and_then(|image| image.touched().ok().flatten());
        snapshot.prefetch_bytes = touched.map(|touched| touched.pages().bytes().0);
        Ok(snapshot)
    }

    /// What is known of it beside its files.
    fn add_use(&self, snapshot: &mut Snapshot) {
        let Ok(id) = snapshot.id.parse() else { return };
        snapshot.readers = self.readers.of(id);
        snapshot.template_bytes = self.templates.bytes_of(id);
    }

    /// The templates that clones read.
    pub fn templates(&self) -> &templates::Templates {
        &self.templates
    }

    /// Who reads which image.
    pub fn readers(&self) -> &Arc<Readers> {
        &self.readers
    }

    /// What becomes a file or comes from one.
    pub fn transfers(&self) -> &Transfers {
        &self.transfers
    }

    /// The image of a snapshot.
    ///
    /// # Errors
    /// As [`Images::get`].
    pub fn find(&self, name: &SnapshotName) -> Result<Found, ApiError> {
        let is_it = |manifest: &Manifest| manifest.vm == name.vm && manifest.name == name.name;
        let listed = self.listing()?.images.into_iter().find(|listed| listed.manifest.as_ref().is_some_and(is_it));
        let found = listed.and_then(|listed| listed.manifest.clone().map(|manifest| Found { listed, manifest }));
        found.ok_or_else(|| no_such_snapshot(name))
    }

    /// The image of a snapshot that a VM can be made of, as far as the image tells.
    ///
    /// # Errors
    /// As [`Images::get`]; it is lost, damaged, not filled yet, or its QEMU cannot be started again.
    pub fn usable(&self, name: &SnapshotName) -> Result<Found, ApiError> {
        let found = self.find(name)?;
        let refused = |why: String| refused(format!("{name} cannot be restored: {why}"), None);
        found.manifest.check_usable(self.boot_id()?).map_err(refused)?;
        check_startable(name, &found.manifest)?;
        if let Some(damage) = &found.listed.damage {
            return Err(refused(format!("it is damaged: {damage}")));
        }
        let image = self.store()?.image(found.listed.id).map_err(|error| refused(in_full(&error)))?;
        image.check_usable(self.boot_id()?).map_err(refused)?;
        if let Some(why) = found.manifest.launch.why_unstartable() {
            return Err(refused(format!("its QEMU cannot be started again: {why}")));
        }
        Ok(found)
    }

    /// The image of a snapshot for a VM of this name that is going to read it. From now on nobody removes it.
    ///
    /// # Errors
    /// As [`Images::usable`]; it is being removed.
    pub fn hold(&self, name: &SnapshotName, vm: &str) -> Result<(Image, Reading), ApiError> {
        let id = self.usable(name)?.listed.id;
        let refused = |why: String| refused(format!("{name} cannot be restored: {why}"), None);
        let reading = self.readers.begin(id, vm).ok_or_else(|| refused("it is being removed".to_owned()))?;
        // It may have been removed or lost before that, and nothing that was seen of it counts.
        let image = self.store()?.image(id).map_err(|error| refused(in_full(&error)))?;
        image.check_usable(self.boot_id()?).map_err(refused)?;
        check_startable(name, image.manifest())?;
        Ok((image, reading))
    }

    /// The image of a VM that an earlier daemon made of it, and that runs.
    ///
    /// # Errors
    /// The directory or the image cannot be read.
    pub fn of_reader(&self, id: ImageId) -> anyhow::Result<Arc<Image>> {
        let store = self.store().map_err(|error| anyhow::anyhow!(error.message))?;
        Ok(Arc::new(store.image(id)?))
    }

    /// The files that are layers of disks in snapshots that were taken here, as far as these can be read. What an imported one says
    /// of files is another host's word.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn layers(&self) -> Result<Vec<NotedLayer>, ApiError> {
        let listing = self.listing()?;
        let manifests = listing.images.iter().filter_map(|listed| listed.manifest.as_ref());
        Ok(manifests.filter(|manifest| manifest.imported.is_none()).flat_map(NotedLayer::of).collect())
    }

    /// What starts a snapshot's QEMU again.
    ///
    /// # Errors
    /// As [`Images::usable`].
    pub fn launch(&self, name: &SnapshotName) -> Result<SnapshotLaunch, ApiError> {
        self.usable(name).map(|found| describe::launch(found.manifest))
    }

    /// Removes an image that no VM reads. `before_remove` is called when it is found, and before anything of it changes: who
    /// still fills it lets go of it there, or refuses.
    ///
    /// # Errors
    /// There is none; a VM reads it; it is refused; the disk's.
    pub fn remove(
        &self,
        which: &Which,
        before_remove: impl FnOnce(&Listed) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let store = self.ready()?;
        let listed = match which {
            Which::Named(name) => self.find(name)?.listed,
            Which::Id(id) => {
                let listed = self.listing()?.images.into_iter().find(|listed| listed.id == *id);
                listed.ok_or_else(|| no_image(*id))?
            }
        };
        let may_be_read = self.may_be_read(&listed)?;
        let _removal = self.readers.begin_removal(listed.id, may_be_read).map_err(|why| in_use(&listed, &why))?;
        let _alone = lock(&self.removal);
        let Some(_removing) = self.parents.remove(listed.id) else {
            let what = "a snapshot is being taken that refers to it, or it is being removed";
            return Err(ApiError::new(ErrorCode::WrongState, what, Some("try again in a moment")));
        };
        let children = self.children_of(store, listed.id)?;
        before_remove(&listed)?;
        self.detach(store, listed.id, &children)?;
        store.remove(listed.id).map_err(|error| failed("remove the image", &error))?;
        self.admission.forget(listed.id);
        self.templates.forget(listed.id);
        // What is counted is less now. If that fails, it is said where images are counted.
        let _ = self.listing();
        Ok(())
    }

    /// The images that refer to this one, and that can take over what they have there, as far as can be seen before.
    fn children_of(&self, store: &Store, id: ImageId) -> Result<Vec<ImageId>, ApiError> {
        let children = store.children(id).map_err(|error| {
            let hint = "see `pagoda snapshot ls`; `pagoda snapshot rm ID` removes an image that cannot be read, if no other \
                        one refers to it";
            refused(format!("other snapshots may need it: {}", in_full(&error)), Some(hint))
        })?;
        let mut needed = Bytes::ZERO;
        for child in &children {
            // Before that its manifest may be written by others, and it refers to this one for what it will not copy.
            self.sync(store, *child);
            needed += store.detach_bytes(*child).map_err(|error| {
                let what = format!("the image {child} refers to it, and cannot take over what it has there");
                let hint = "if that one is not durable yet, try again when it is: `pagoda snapshot ls`. If this one is damaged, \
                            remove that one first";
                refused(format!("{what}: {}", in_full(&error)), Some(hint))
            })?;
        }
        self.check_room_to_remove(store, needed)?;
        Ok(children)
    }

    /// A removal makes others larger before it frees anything.
    fn check_room_to_remove(&self, store: &Store, needed: Bytes) -> Result<(), ApiError> {
        // What all images take gets no larger by it.
        let limits = RoomLimits { max: None, ..self.config.limits };
        let room = store.room(Bytes::ZERO).map_err(|error| failed("look for room for the removal", &error))?;
        if needed == Bytes::ZERO {
            return Ok(());
        }
        check_room(room, limits, needed).map_err(|why| {
            let what = format!("others have to take over {needed} before it can go: {why}");
            ApiError::new(ErrorCode::NoRoom, what, Some("remove the newest snapshots first: nothing refers to them"))
        })
    }

    /// The images that refer to this one take over what they have there. A failure leaves all of them whole.
    fn detach(&self, store: &Store, id: ImageId, children: &[ImageId]) -> Result<(), ApiError> {
        for child in children {
            tracing::info!(image = %child, "takes over what it has in {id}, which is to be removed");
            let what = format!("the image {child} takes over what it has in {id}, and both stay what they were");
            store.detach(*child).map_err(|error| failed(&what, &error))?;
        }
        Ok(())
    }

    /// Whether a snapshot may refer to another one.
    pub fn makes_chains(&self) -> bool {
        self.config.chain_max > 1
    }

    /// Whether VMs that are made of an image get what one before needed first.
    pub fn prefetches(&self) -> bool {
        self.config.prefetch
    }

    /// An image that a new one of this VM may refer to, if it is whole and the chain is not too long. It is not removed as long as
    /// what is returned is.
    pub fn hold_parent(&self, id: ImageId, vm: &str) -> Option<Held<'_>> {
        let held = self.parents.hold(id)?;
        let (store, boot_id) = (self.ready().ok()?, self.boot_id().ok()?);
        // What cannot be opened or used is no parent: then the new one is a full one.
        let image = store.image(id).ok()?;
        let is_usable = image.check_usable(boot_id).is_ok() && image.manifest().vm == vm;
        let length = image.parents().count() + 2;
        (is_usable && length <= self.config.chain_max).then_some(held)
    }

    /// Keeps room for an image, if its name is free, limits allow it and it fits.
    ///
    /// # Errors
    /// Why not. Nothing was changed.
    pub fn admit(&self, new: &NewImage<'_>) -> Result<Admitted<'_>, ApiError> {
        let store = self.ready()?;
        let listing = self.listing()?;
        let room = store.room(listing.own()).map_err(|error| failed("look for room for the snapshot", &error))?;
        self.admission.admit(new, &listing, room, &self.config)
    }

    /// Begins to verify a snapshot, or says how far that is. Waits for a second at most.
    ///
    /// # Errors
    /// There is none of this name; it is lost, or not filled yet; others are verified.
    pub fn verify(&self, name: &SnapshotName) -> Result<VerifyReport, ApiError> {
        let Found { listed, manifest } = self.find(name)?;
        // What is being filled has no end that could be compared, and what is lost has no content.
        manifest.check_usable(self.boot_id()?).map_err(|why| {
            let hint = match self.is_being_filled(&manifest) {
                true => "try again when it is filled",
                false => "`pagoda snapshot rm` removes it",
            };
            refused(format!("{name} cannot be verified: {why}"), Some(hint))
        })?;
        self.verifications.ask(listed.id, describe::memory(&manifest), self.store()?)
    }

    /// The images that VMs hold pages for, by all records of an earlier daemon: to be said at start, if all of them could be
    /// read.
    pub fn set_held(&self, held: BTreeSet<ImageId>) {
        self.finishing.set_held(held);
    }

    /// Whether an image's files say that it has all pages.
    pub fn is_filled(&self, id: ImageId) -> bool {
        let ledger = self.store().ok().and_then(|store| store.ledger(id).ok());
        let stage = ledger.and_then(|ledger| ledger.manifest()).map(|manifest| manifest.stage);
        matches!(stage, Some(Stage::Filled | Stage::Durable))
    }

    /// An image has all pages, and the disk does not take that: it is tried again with the next count.
    pub fn mark_filled_later(&self, id: ImageId) {
        self.finishing.mark_later(id);
    }

    /// An image has all pages.
    ///
    /// # Errors
    /// It does not, or is lost; the disk's.
    pub fn mark_filled(&self, id: ImageId) -> Result<(), ApiError> {
        let marked =
            self.store()?.ledger(id).and_then(|ledger| match ledger.manifest().map(|manifest| manifest.stage) {
                Some(Stage::Filled | Stage::Durable) => Ok(()),
                _ => ledger.mark_filled(),
            });
        marked.map_err(|error| failed("say that the image is filled", &error))
    }

    /// No daemon takes an image for whole from now on.
    ///
    /// # Errors
    /// The directory cannot be used, or takes no note; a VM reads it, so it was whole once, and it stays for that VM.
    pub fn lose(&self, id: ImageId, why: &str) -> Result<(), ApiError> {
        let readers = self.readers.of(id);
        if !readers.is_empty() {
            let what =
                format!("the image {id} has a loss ({why}), and is kept for who reads it: {}", readers.join(", "));
            return Err(ApiError::new(ErrorCode::Internal, what, None));
        }
        let is_noted = self.store()?.lose(id, why);
        let unnoted = || format!("the image {id} is lost ({why}), and its files take no note of that");
        is_noted.then_some(()).ok_or_else(|| ApiError::new(ErrorCode::Internal, unnoted(), None))
    }

    /// The same of one that is not filled: nobody fills it any more.
    pub fn lose_unfilled(&self, id: ImageId, why: &str) {
        if self.finishing.is_to_be_marked(id) {
            return;
        }
        let Ok(ledger) = self.store().map_err(drop).and_then(|store| store.ledger(id).map_err(drop)) else { return };
        if ledger.manifest().is_some_and(|manifest| manifest.stage == Stage::Begun) && !ledger.lose(why) {
            tracing::warn!(image = %id, "its files take no note that it is lost: {why}");
        }
    }

    /// Makes a filled image outlive the host. What fails is tried again when images are counted.
    pub fn make_durable(&self, id: ImageId) {
        if let Ok(store) = self.store() {
            self.sync(store, id);
        }
    }

    /// The same. An image whose disk fails is lost: what the disk has of it is not known, and no later try tells. It stays, and is
    /// not durable, while VMs read it or one that refers to it.
    fn sync(&self, store: &Store, id: ImageId) {
        let Err((id, why)) = self.finishing.make_durable(store, id) else { return };
        match self.lose_unless_read(id, &format!("it could not be made durable: {why}")) {
            Ok(()) => self.finishing.is_noted(id),
            Err(error) => tracing::warn!("{}", error.message),
        }
    }

    fn lose_unless_read(&self, id: ImageId, why: &str) -> Result<(), ApiError> {
        let refers = |listed: &&Listed| self.store().is_ok_and(|store| chain_of(store, listed.id).contains(&id));
        let is_read = |listed: &Listed| !self.readers.of(listed.id).is_empty();
        if let Some(read) = self.listing()?.images.iter().filter(refers).find(|listed| is_read(listed)) {
            let what = format!("the image {id} may be damaged ({why}), and is kept for who reads {}", read.id);
            return Err(ApiError::new(ErrorCode::Internal, what, None));
        }
        self.lose(id, why)
    }

    /// What a disk did not take when it was due.
    fn try_again(&self, listing: &Listing, filled: &dyn Fn(ImageId)) {
        let Ok(opened) = self.opened() else { return };
        match opened.store.clean_gone(listing) {
            Ok(0) => {}
            Ok(count) => tracing::info!("{count} images whose removal had not been finished are removed"),
            Err(error) => tracing::warn!("remove what is left of images, tried again: {}", in_full(&error)),
        }
        for id in self.finishing.to_be_marked(&listing.images) {
            match self.mark_filled(id) {
                Ok(()) => {
                    self.finishing.marked(id);
                    filled(id);
                    self.sync(&opened.store, id);
                }
                Err(error) => tracing::warn!(image = %id, "tried again: {}", error.message),
            }
        }
        for id in self.finishing.to_be_durable(&listing.images, opened.boot_id) {
            self.sync(&opened.store, id);
        }
    }

    /// Whether a VM can have been made of it: it is whole, or nobody can tell.
    fn may_be_read(&self, listed: &Listed) -> Result<bool, ApiError> {
        let boot_id = self.boot_id()?;
        Ok(listed.manifest.as_ref().is_none_or(|manifest| manifest.check_usable(boot_id).is_ok()))
    }

    /// The snapshots, as they were counted last.
    pub fn counted(&self) -> Option<HostSnapshots> {
        lock(&self.counted).clone()
    }

    fn opened(&self) -> Result<&Opened, ApiError> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        match Opened::at(&self.config.dir) {
            Ok(opened) => {
                self.parts.works(PART);
                Ok(self.opened.get_or_init(|| opened))
            }
            Err(why) => {
                let why = with_advice(format!("the directory {} cannot be used: {why}", self.config.dir.display()));
                self.parts.failed(PART, &why);
                let hint = "see [snapshots] in pagoda.toml; the directory is for the daemon's user alone (chmod 700)";
                Err(ApiError::new(ErrorCode::Unsupported, format!("there are no snapshots: {why}"), Some(hint)))
            }
        }
    }

    /// Whether an image's VM still holds memory for it, or would if it were there.
    fn is_being_filled(&self, manifest: &Manifest) -> bool {
        manifest.stage == Stage::Begun && self.boot_id().is_ok_and(|boot_id| boot_id == manifest.boot_id)
    }

    /// What there is, counted on the way.
    fn listing(&self) -> Result<Listing, ApiError> {
        let opened = self.opened()?;
        let listing = opened.store.list().map_err(|error| failed("list the images", &error))?;
        *lock(&self.counted) = Some(describe::count(&listing, opened.boot_id, &self.config.dir));
        Ok(listing)
    }
}

/// What came from a file is another host's word.
fn check_startable(name: &SnapshotName, manifest: &Manifest) -> Result<(), ApiError> {
    manifest.check_startable().map_err(|why| {
        let hint = format!("look at it with `pagoda snapshot show {name}`, then `pagoda snapshot accept {name}`");
        refused(format!("{name} cannot be restored: {why}"), Some(&hint))
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
pub mod tests;
