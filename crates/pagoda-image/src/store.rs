//! The directory of images, and the only code that lists, opens and removes them.
//!
//! | name | what it is |
//! |---|---|
//! | `ID` | an image |
//! | `ID.part` | one that is being made: none yet |
//! | `ID.gone` | one that is being removed: none any more |
//!
//! Each is a directory. One daemon at a time uses them: it has the lock of the state directory. Names that are none of these are
//! left alone.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use pagoda_core::units::{Bytes, ChunkIdx, PageCount};
use rustix::fs::{AtFlags, Mode, OFlags};

use crate::adopt::{detach, detach_bytes};
use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::{Disk, LinuxDisk};
use crate::files::{check_owner, open_dir};
use crate::id::ImageId;
use crate::image::Image;
use crate::ledger::{GONE, Ledger, NEW_MANIFEST, PART, open_image, read_manifest, set_aside};
use crate::limits::{CHAIN_MAX, IMAGE_PAGES_MAX, LISTED_MAX, SNAPSHOTS_MAX, SNAPSHOTS_PER_VM_MAX};
use crate::manifest::{Manifest, Stage};
use crate::part::Part;
use crate::room::Room;
use crate::touched::{NEW_TOUCHED, TOUCHED};
use crate::verify::{Report, verify};
use crate::writer::Prepared;

/// Bytes of the unit of `st_blocks` (stat(2)).
const STAT_BLOCK: u64 = 512;

/// The open directory of images, and the disk that it is on.
#[derive(Debug)]
pub struct Store {
    disk: Arc<dyn Disk>,
    dir: Arc<OwnedFd>,
}

/// What the directory has.
#[derive(Debug, Default)]
pub struct Listing {
    pub images: Vec<Listed>,
    /// Images that were being made or removed when a daemon ended.
    pub leftovers: Vec<String>,
    /// What is nothing of ours.
    pub unknown: Vec<String>,
    /// There are more than [`LISTED_MAX`] names: the others were not looked at.
    pub has_more: bool,
}

/// Names in the directory.
#[derive(Debug, Default)]
struct Names {
    ids: Vec<ImageId>,
    leftovers: Vec<String>,
    unknown: Vec<String>,
    has_more: bool,
}

/// An image in the directory.
#[derive(Debug)]
pub struct Listed {
    pub id: ImageId,
    /// What it is of, if that can be read.
    pub manifest: Option<Manifest>,
    /// What is wrong with it, as far as it can be told without reading its pages.
    pub damage: Option<Damage>,
    /// What it takes on the disk.
    pub own: Bytes,
}

impl Listing {
    /// Whether the VM may have one more image of this name.
    ///
    /// # Errors
    /// Why not, for its user.
    pub fn check_new(&self, vm: &str, name: &str) -> Result<(), String> {
        if self.images.len() >= SNAPSHOTS_MAX || self.has_more {
            return Err(format!("the host has {} snapshots, and {SNAPSHOTS_MAX} at most", self.images.len()));
        }
        let of_vm = || self.images.iter().filter_map(|listed| listed.manifest.as_ref()).filter(|made| made.vm == vm);
        if of_vm().any(|made| made.name == name) {
            return Err(format!("{vm} has a snapshot of the name {name}"));
        }
        match of_vm().count() {
            SNAPSHOTS_PER_VM_MAX.. => Err(format!("{vm} has {SNAPSHOTS_PER_VM_MAX} snapshots, which is the most")),
            _ => Ok(()),
        }
    }

    /// What all images take.
    pub fn own(&self) -> Bytes {
        self.images.iter().map(|listed| listed.own).sum()
    }
}

impl Store {
    /// The directory at this path, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made or opened; others own it or may write it.
    pub fn open(path: &Path) -> Result<Store, ImageError> {
        Store::on(Arc::new(LinuxDisk), path)
    }

    /// One whose disk is as a test wants it.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn on(disk: Arc<dyn Disk>, path: &Path) -> Result<Store, ImageError> {
        let failed = |source: io::Error| ImageError::Directory { what: path.display().to_string(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let stat = rustix::fs::fstat(&dir).map_err(|error| failed(error.into()))?;
        check_owner(&stat).map_err(failed)?;
        Ok(Store { disk, dir: Arc::new(dir) })
    }

    /// Makes the files of a new image. What is made is no image before [`Prepared::commit`]. `id` is random.
    ///
    /// # Errors
    /// More pages than an image has; the disk's. [`Store::remove`] removes what is left then.
    pub fn create(&self, id: ImageId, pages: PageCount) -> Result<(Part, Prepared), ImageError> {
        self.create_on(None, id, pages)
    }

    /// The same for one that refers to `parent`, which is of the same VM and has all pages. Until it exists, the caller sees to
    /// it that the parent is not removed.
    ///
    /// # Errors
    /// As [`Store::create`].
    pub fn create_on(
        &self,
        parent: Option<ImageId>,
        id: ImageId,
        pages: PageCount,
    ) -> Result<(Part, Prepared), ImageError> {
        if pages > IMAGE_PAGES_MAX || !pages.bytes().is_multiple_of_chunk() {
            let what = format!("{pages} pages: an image has whole chunks, and at most {IMAGE_PAGES_MAX} pages");
            return Err(Damage::of_file(ImageFile::Map, Bytes::ZERO, what).into());
        }
        let made = Ledger::make(self.disk.clone(), self.dir.clone(), (id, parent), pages.chunks_ceil());
        let ledger = Arc::new(made.map_err(|source| ImageError::Directory { what: format!("{id}{PART}"), source })?);
        Ok((Part::new(ledger.clone()), Prepared::new(ledger)))
    }

    /// An image that a daemon before this one began: to be gone on with, or to be made durable.
    ///
    /// # Errors
    /// It is not there, or damaged.
    pub fn ledger(&self, id: ImageId) -> Result<Arc<Ledger>, ImageError> {
        Ledger::open(self.disk.clone(), self.dir.clone(), id).map(Arc::new)
    }

    /// Opens an image for reading.
    ///
    /// # Errors
    /// It is not there, lost, or damaged so that it can be seen without reading its pages.
    pub fn image(&self, id: ImageId) -> Result<Image, ImageError> {
        Image::open(self.disk.clone(), &self.dir, id)
    }

    /// Reads all of an image, and says what of it is damaged.
    pub fn verify(&self, id: ImageId) -> Report {
        self.verify_while(id, &mut |_| true).expect("nobody ends it")
    }

    /// The same, as long as `goes_on` says so. It is asked before each chunk; its first `false` ends all, without a report.
    pub fn verify_while(&self, id: ImageId, goes_on: &mut dyn FnMut(ChunkIdx) -> bool) -> Option<Report> {
        match self.image(id) {
            Ok(image) => verify(&image, goes_on),
            Err(error) => Some(Report::of(error)),
        }
    }

    /// Notes that an image is lost, whatever its files are. True if no daemon will take it for whole or fill it up.
    pub fn lose(&self, id: ImageId, why: &str) -> bool {
        match self.ledger(id) {
            Ok(ledger) => ledger.lose(why),
            Err(_) => set_aside(&*self.disk, &self.dir, id),
        }
    }

    /// Images that refer to this one. What is lost needs nothing any more.
    ///
    /// # Errors
    /// An image cannot be read, and could refer to this one. The directory cannot be read, or has too much.
    pub fn children(&self, id: ImageId) -> Result<Vec<ImageId>, ImageError> {
        let manifest = open_image(&self.dir, id).and_then(|dir| read_manifest(&dir, id));
        if matches!(&manifest, Ok(manifest) if manifest.stage == Stage::Begun) {
            // Only what was filled became a parent.
            return Ok(Vec::new());
        }
        let ancestors = self.ancestors(manifest.ok().and_then(|manifest| manifest.parent));
        let (mut children, listed) = (Vec::new(), self.names()?);
        if listed.has_more {
            return Err(ImageError::IsParent { child: id, why: "there are more names than are looked at".to_owned() });
        }
        for other in listed.ids.into_iter().filter(|other| *other != id) {
            match open_image(&self.dir, other).and_then(|dir| read_manifest(&dir, other)) {
                Ok(manifest) if manifest.stage == Stage::Lost || manifest.parent != Some(id) => {}
                Ok(_) => children.push(other),
                // It was removed after the directory had been listed.
                Err(ImageError::Directory { source, .. }) if source.kind() == ErrorKind::NotFound => {}
                // What it refers to itself does not refer to it.
                Err(_) if ancestors.contains(&other) => {}
                Err(error) => {
                    let why = format!("as far as is known, for it cannot be read: {error}");
                    return Err(ImageError::IsParent { child: other, why });
                }
            }
        }
        Ok(children)
    }

    /// This image, and those that it refers to, as far as they can be read.
    fn ancestors(&self, mut id: Option<ImageId>) -> Vec<ImageId> {
        let mut ancestors = Vec::new();
        while let Some(next) = id.filter(|next| ancestors.len() < CHAIN_MAX && !ancestors.contains(next)) {
            ancestors.push(next);
            let manifest = open_image(&self.dir, next).and_then(|dir| read_manifest(&dir, next));
            id = manifest.ok().and_then(|manifest| manifest.parent);
        }
        ancestors
    }

    /// An image that is durable becomes independent of its parent: it takes over what it has there and nowhere else. Then it
    /// refers to its parent's parent, if there is one. It is whole all the time.
    ///
    /// # Errors
    /// What it has of its parent is damaged, or cannot be read; there is no room; the disk's. It refers to its parent then, and
    /// this can be tried again.
    pub fn detach(&self, id: ImageId) -> Result<(), ImageError> {
        detach(&self.disk, &self.dir, id)
    }

    /// The room that [`Store::detach`] may take on the disk, at most.
    ///
    /// # Errors
    /// As for it.
    pub fn detach_bytes(&self, id: ImageId) -> Result<Bytes, ImageError> {
        detach_bytes(&self.disk, &self.dir, id)
    }

    /// Removes an image, or what was to be one. The order: that no other refers to it outlives the host -> its name is no image's
    /// any more -> that outlives the host -> its files go. So there is never a part of an image.
    ///
    /// # Errors
    /// Others refer to it, or may do so; the disk's. The image is there as it was, or is a leftover.
    pub fn remove(&self, id: ImageId) -> Result<(), ImageError> {
        if open_image(&self.dir, id).is_ok()
            && let Some(child) = self.children(id)?.first()
        {
            return Err(ImageError::IsParent {
                child: *child,
                why: "it has to take over first what it has there".into(),
            });
        }
        self.sync_manifests()?;
        let gone = format!("{id}{GONE}");
        match self.disk.rename(self.dir.as_fd(), &id.to_string(), &gone) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(ImageError::Directory { what: id.to_string(), source }),
        }
        self.sync_names()?;
        self.remove_leftover(&format!("{id}{PART}"))?;
        self.remove_leftover(&gone)
    }

    /// Removes what daemons before this one left: their number. What they said of images outlives the host from now on, also
    /// if they were killed before it did. To be called once, at start.
    ///
    /// # Errors
    /// The disk's; somebody has put something else there. All that could be removed is.
    pub fn clean(&self) -> Result<usize, ImageError> {
        let synced = self.sync_manifests();
        let removed = self.remove_leftovers(&self.names()?.leftovers)?;
        synced.map(|()| removed)
    }

    /// What manifests say by now outlives the host from now on. A daemon writes a manifest to the disk, then gives it its name, and
    /// syncs the name last: one that was killed before that left a name that a crash of the host may take back.
    fn sync_manifests(&self) -> Result<(), ImageError> {
        for id in self.names()?.ids {
            // Else it was removed meanwhile; or nobody could read its manifest, and so nobody relies on it.
            if let Ok(dir) = open_image(&self.dir, id) {
                self.disk.sync_dir(dir.as_fd()).map_err(|source| {
                    let what = format!("directory of {id}");
                    ImageError::Directory { what, source }
                })?;
            }
        }
        Ok(())
    }

    /// Removes images whose removal was not finished, and those that were set aside because a full disk took no note of their
    /// loss: those of `listing`; their number. At any time: nobody needs what has such a name.
    ///
    /// # Errors
    /// As [`Store::clean`].
    pub fn clean_gone(&self, listing: &Listing) -> Result<usize, ImageError> {
        let gone: Vec<String> = listing.leftovers.iter().filter(|name| name.ends_with(GONE)).cloned().collect();
        self.remove_leftovers(&gone)
    }

    fn remove_leftovers(&self, leftovers: &[String]) -> Result<usize, ImageError> {
        if leftovers.is_empty() {
            return Ok(0);
        }
        self.sync_names()?;
        let removed = |name: &String| self.remove_leftover(name);
        // One that cannot be removed keeps no other.
        let failed = leftovers.iter().map(removed).fold(Ok(()), Result::and);
        failed.map(|()| leftovers.len())
    }

    /// Lists the images, and whatever else the directory has.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Listing, ImageError> {
        let Names { ids, leftovers, unknown, has_more } = self.names()?;
        Ok(Listing { images: ids.into_iter().map(|id| self.listed(id)).collect(), leftovers, unknown, has_more })
    }

    fn names(&self) -> Result<Names, ImageError> {
        let failed = |error: rustix::io::Errno| ImageError::Directory {
            what: "directory of images".to_owned(),
            source: error.into(),
        };
        let mut names = Names::default();
        for entry in rustix::fs::Dir::read_from(&self.dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if name == "." || name == ".." {
                continue;
            }
            if names.ids.len() + names.leftovers.len() + names.unknown.len() >= LISTED_MAX {
                names.has_more = true;
                break;
            }
            if let Ok(id) = name.parse() {
                names.ids.push(id);
            } else if is_leftover(&name) {
                names.leftovers.push(name);
            } else {
                names.unknown.push(name);
            }
        }
        names.ids.sort();
        Ok(names)
    }

    /// What an image takes on the disk: its directory and its files.
    ///
    /// # Errors
    /// It is not there.
    pub fn own_bytes(&self, id: ImageId) -> Result<Bytes, ImageError> {
        let dir = open_image(&self.dir, id)?;
        let bytes = |stat: rustix::fs::Stat| Bytes(u64::try_from(stat.st_blocks).unwrap_or(0) * STAT_BLOCK);
        let failed = |error: rustix::io::Errno| ImageError::Directory { what: id.to_string(), source: error.into() };
        let mut sum = bytes(rustix::fs::fstat(&dir).map_err(failed)?);
        for name in file_names() {
            match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => sum += bytes(stat),
                Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(sum)
    }

    /// What room there is, if images take `taken`.
    ///
    /// # Errors
    /// Those of statvfs(3).
    pub fn room(&self, taken: Bytes) -> Result<Room, ImageError> {
        let stat = rustix::fs::fstatvfs(&self.dir)
            .map_err(|error| ImageError::Directory { what: "directory of images".to_owned(), source: error.into() })?;
        let bytes = |blocks: u64| Bytes(blocks.saturating_mul(stat.f_frsize));
        Ok(Room { total: bytes(stat.f_blocks), free: bytes(stat.f_bavail), taken })
    }

    fn listed(&self, id: ImageId) -> Listed {
        let manifest = open_image(&self.dir, id).and_then(|dir| read_manifest(&dir, id));
        let (manifest, damage) = match manifest {
            Err(error) => (None, Some(error.into_damage())),
            Ok(manifest) if manifest.stage == Stage::Lost => (Some(manifest), None),
            Ok(manifest) => (Some(manifest), self.image(id).err().map(ImageError::into_damage)),
        };
        Listed { id, manifest, damage, own: self.own_bytes(id).unwrap_or(Bytes::ZERO) }
    }

    fn sync_names(&self) -> Result<(), ImageError> {
        let what = "directory of images".to_owned();
        self.disk.sync_dir(self.dir.as_fd()).map_err(|source| ImageError::Directory { what, source })
    }

    /// Removes a directory of no image, which may be gone already, with the files that an image has.
    fn remove_leftover(&self, name: &str) -> Result<(), ImageError> {
        let failed = |source: io::Error| ImageError::Directory { what: name.to_owned(), source };
        let dir = match open_dir(self.dir.as_fd(), name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened.map_err(failed)?,
        };
        for file in file_names() {
            match self.disk.remove_file(dir.as_fd(), file) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed.map_err(failed)?,
            }
        }
        match self.disk.remove_dir(self.dir.as_fd(), name) {
            // Somebody else removed it meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(failed),
        }
    }
}

/// All files that may be in an image's directory.
fn file_names() -> impl Iterator<Item = &'static str> {
    ImageFile::ALL.map(ImageFile::name).into_iter().chain([NEW_MANIFEST, TOUCHED, NEW_TOUCHED])
}

/// A name that only a daemon gives, while it makes or removes an image.
fn is_leftover(name: &str) -> bool {
    [PART, GONE].iter().any(|end| name.strip_suffix(end).is_some_and(|id| id.parse::<ImageId>().is_ok()))
}
