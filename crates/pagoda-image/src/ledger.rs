//! How far an image is, while it is made and filled: one owner of its manifest for the daemon and the engine.
//!
//! The daemon begins the image, says that it is filled, and makes it durable. The engine says that it is lost. Whoever comes
//! second finds what the first one did: what is lost stays lost. A way of a page takes the lock only in the moment of a loss.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pagoda_core::units::{Bytes, ChunkCount, PageCount};

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::{Disk, Synced, replace};
use crate::entry::{Entry, entry_offset};
use crate::files::{For, open_dir, open_file, read_small};
use crate::id::ImageId;
use crate::limits::{MANIFEST_MAX, MANIFEST_RESERVE};
use crate::manifest::{Import, Manifest, Stage, shortened};
use crate::map::{self, Tables};
use crate::write_back::Progress;

/// The manifest before it gets its name.
pub(crate) const NEW_MANIFEST: &str = "manifest.new";
/// The directory of an image that is being made ends so.
pub(crate) const PART: &str = ".part";
/// That of one that is being removed.
pub(crate) const GONE: &str = ".gone";

/// The open files of an image that is being made or filled, and its manifest. The daemon and the engine share it.
#[derive(Debug)]
pub struct Ledger {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) images: Arc<OwnedFd>,
    pub(crate) dir: OwnedFd,
    pub(crate) id: ImageId,
    pub(crate) chunks: ChunkCount,
    // Open from the beginning: a file that is opened later may not be told of an error of the write-back before.
    pub(crate) map: File,
    pub(crate) pages: File,
    /// The file `inherited`, if the image has a parent.
    pub(crate) marks: Option<File>,
    /// The image's parent, from before there is a manifest.
    pub(crate) parent: Option<ImageId>,
    pub(crate) state: OnceLock<File>,
    pub(crate) progress: Progress,
    manifest: Mutex<Option<Manifest>>,
}

impl Ledger {
    /// Of an image that has no manifest yet.
    pub(crate) fn make(
        disk: Arc<dyn Disk>,
        images: Arc<OwnedFd>,
        (id, parent): (ImageId, Option<ImageId>),
        chunks: ChunkCount,
    ) -> std::io::Result<Ledger> {
        let part = format!("{id}{PART}");
        disk.make_dir(images.as_fd(), &part)?;
        let dir = open_dir(images.as_fd(), &part)?;
        let map = disk.make_file(dir.as_fd(), ImageFile::Map.name())?;
        let pages = disk.make_file(dir.as_fd(), ImageFile::Pages.name())?;
        let marks = match parent {
            None => {
                map::fill_with_zeros(&*disk, &map, chunks)?;
                None
            }
            // Most of the map stays a hole.
            Some(_) => {
                map::extend_with_hole(&*disk, &map, map::map_bytes(chunks))?;
                let marks = disk.make_file(dir.as_fd(), ImageFile::Inherited.name())?;
                map::extend_with_hole(&*disk, &marks, map::marks_bytes(chunks))?;
                Some(marks)
            }
        };
        let (state, progress, manifest) = (OnceLock::new(), Progress::default(), Mutex::default());
        Ok(Ledger { disk, images, dir, id, chunks, map, pages, marks, parent, state, progress, manifest })
    }

    /// Of an image that a daemon before this one began.
    pub(crate) fn open(disk: Arc<dyn Disk>, images: Arc<OwnedFd>, id: ImageId) -> Result<Ledger, ImageError> {
        let dir = open_image(&images, id)?;
        let manifest = read_manifest(&dir, id)?;
        let open = |file: ImageFile| {
            open_file(dir.as_fd(), file.name(), For::Writing).map_err(ImageError::io(file, 0)).map(|(opened, _)| opened)
        };
        let (map, pages, state) = (open(ImageFile::Map)?, open(ImageFile::Pages)?, open(ImageFile::State)?);
        let marks = manifest.parent.map(|_| open(ImageFile::Inherited)).transpose()?;
        Ok(Ledger {
            parent: manifest.parent,
            marks,
            chunks: manifest.pages().chunks_ceil(),
            manifest: Mutex::new(Some(manifest)),
            state: OnceLock::from(state),
            progress: Progress::default(),
            disk,
            images,
            dir,
            id,
            map,
            pages,
        })
    }

    /// The id of the image, after which its directory is named.
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// Pages of the VM.
    pub fn pages(&self) -> PageCount {
        self.chunks.pages()
    }

    /// The image that this one refers to.
    pub fn parent(&self) -> Option<ImageId> {
        self.parent
    }

    /// Where each page is.
    pub(crate) fn tables(&self) -> Result<Tables<'_>, ImageError> {
        let blocks = blocks_of(&self.pages)?;
        Ok(Tables { disk: &*self.disk, id: self.id, map: &self.map, marks: self.marks.as_ref(), blocks })
    }

    /// The manifest as it is now; nothing before the image begins.
    pub fn manifest(&self) -> Option<Manifest> {
        self.lock().clone()
    }

    /// Writes the first manifest.
    pub(crate) fn begin(&self, manifest: Manifest) -> Result<(), ImageError> {
        let mut current = self.lock();
        assert!(current.is_none(), "an image begins once");
        assert!(manifest.stage == Stage::Begun && manifest.id == self.id, "it begins as itself");
        self.write(&manifest, Synced::No, MANIFEST_MAX - MANIFEST_RESERVE)?;
        *current = Some(manifest);
        Ok(())
    }

    /// Notes how long the VM stood still.
    ///
    /// # Errors
    /// The disk's; the image is whole without it.
    pub fn note_pause(&self, pause_us: u64) -> Result<(), ImageError> {
        self.change(Synced::No, |manifest| Ok(Manifest { pause_us: Some(pause_us), ..manifest }))
    }

    /// Says that the image has all pages. It looks into the map whether that is so.
    ///
    /// # Errors
    /// It is lost, or lacks a page; the disk's.
    pub fn mark_filled(&self) -> Result<(), ImageError> {
        let inherited = self.count_inherited()?;
        self.change(Synced::No, |manifest| {
            let inherited_pages = manifest.parent.map(|_| inherited);
            advanced(Manifest { inherited_pages, ..manifest }, Stage::Filled)
        })
    }

    /// Pages that are the parent's, if none is missing.
    fn count_inherited(&self) -> Result<u64, ImageError> {
        let (tables, mut inherited) = (self.tables()?, 0);
        for chunk in self.chunks.iter() {
            for (index, entry) in (0..=u8::MAX).zip(tables.chunk(chunk)?) {
                let page = chunk.page(index);
                match entry {
                    Entry::Missing => {
                        let offset = Bytes(entry_offset(page));
                        return Err(Damage::of_page(ImageFile::Map, page, offset, "the page is missing").into());
                    }
                    Entry::Parent { .. } => inherited += 1,
                    Entry::Zero | Entry::Block { .. } => {}
                }
            }
        }
        Ok(inherited)
    }

    /// From now on the image refers to the parent of its parent, or to none. All that it has of its parent and that one has
    /// itself has been taken over, and outlives the host.
    pub(crate) fn pass_on(&self, parent: Option<ImageId>) -> Result<(), ImageError> {
        let inherited = self.count_inherited()?;
        self.change(Synced::Yes, |manifest| match manifest.stage {
            Stage::Durable => Ok(Manifest { parent, inherited_pages: parent.map(|_| inherited), ..manifest }),
            stage => Err(ImageError::WrongStage { stage: stage.name(), needed: Stage::Durable.name() }),
        })
    }

    /// Makes a filled image outlive the host. The order: what it consists of is on the disk -> so are its names -> the
    /// manifest says so -> that is on the disk. This waits for the disk, so no engine
    /// may call it; and the engine has ended its writer, else it would wait here for a loss to be noted.
    ///
    /// # Errors
    /// The image is begun or lost; the disk's. After that the image may be damaged: a verification tells.
    pub fn make_durable(&self) -> Result<(), ImageError> {
        let stage = self.lock().as_ref().map(|manifest| manifest.stage);
        if stage == Some(Stage::Durable) {
            // Whoever wrote that may have been killed before the name of its manifest was on the disk.
            return self.sync_dir(&self.dir);
        }
        if stage != Some(Stage::Filled) {
            let stage = stage.map_or("not begun", Stage::name);
            return Err(ImageError::WrongStage { stage, needed: Stage::Filled.name() });
        }
        if let Some(parent) = self.parent {
            // What it refers to has to outlive the host first.
            let dir = open_image(&self.images, parent)?;
            let stage = read_manifest(&dir, parent)?.stage;
            if stage != Stage::Durable {
                let why = format!("it is {}, and has to be durable first", stage.name());
                return Err(ImageError::Parent { id: parent, why });
            }
            self.sync_dir(&dir)?;
        }
        self.sync_files()?;
        self.sync_dir(&self.images)?;
        self.change(Synced::Yes, |manifest| advanced(manifest, Stage::Durable))
    }

    /// All but the manifest.
    fn sync_files(&self) -> Result<(), ImageError> {
        let sync = |file: ImageFile, opened: &File| {
            self.disk.sync_file(opened).map_err(|source| ImageError::NotSynced { file, source })
        };
        sync(ImageFile::Pages, &self.pages)?;
        sync(ImageFile::Map, &self.map)?;
        self.marks.as_ref().map_or(Ok(()), |marks| sync(ImageFile::Inherited, marks))?;
        sync(ImageFile::State, self.state.get().expect("an image that is filled has a state"))?;
        self.sync_dir(&self.dir)
    }

    /// An image that was made of a file, and of which nobody knows yet, begins to exist. It has all pages, and outlives the host
    /// when this returns.
    pub(crate) fn finish_import(&self, manifest: Manifest) -> Result<(), ImageError> {
        assert!(
            manifest.stage == Stage::Durable && manifest.id == self.id && manifest.parent.is_none(),
            "a whole image"
        );
        let mut current = self.lock();
        assert!(current.is_none(), "nobody knows of it");
        self.sync_files()?;
        self.write(&manifest, Synced::Yes, MANIFEST_MAX - MANIFEST_RESERVE)?;
        let part = format!("{}{PART}", self.id);
        let renamed = self.disk.rename(self.images.as_fd(), &part, &self.id.to_string());
        renamed.map_err(|source| ImageError::Directory { what: part, source })?;
        self.sync_dir(&self.images)?;
        *current = Some(manifest);
        Ok(())
    }

    /// Somebody accepts what an imported image starts.
    ///
    /// # Errors
    /// It was not imported; the disk's.
    pub fn accept(&self) -> Result<(), ImageError> {
        self.change(Synced::Yes, |manifest| match (manifest.imported, manifest.stage) {
            (Some(_), Stage::Durable) => Ok(Manifest { imported: Some(Import::Accepted), ..manifest }),
            (_, stage) => Err(ImageError::WrongStage { stage: stage.name(), needed: "imported" }),
        })
    }

    /// Writes content to the disk that is in the page cache alone, if it is much: see [`crate::Writer::is_behind`]. Whether it was.
    /// It waits for the disk. An error is told once: what was written may be gone then, so the caller loses the image.
    ///
    /// # Errors
    /// The disk's.
    pub fn write_back(&self) -> Result<bool, ImageError> {
        self.progress.sync_piece(|| self.disk.sync_file(&self.pages).map_err(ImageError::io(ImageFile::Pages, 0)))
    }

    /// Says that the image is lost, so that no daemon takes it for whole or fills it up. True if that is noted, also for the
    /// next daemon; else it has to be tried again, or noted elsewhere. A durable image needs nobody any more and stays.
    pub fn lose(&self, why: &str) -> bool {
        let mut current = self.lock();
        // Without a manifest there is no image.
        let Some(manifest) = current.as_mut() else { return true };
        // Others have this image open as well, and may have written its manifest since.
        if let Ok(newest) = read_manifest(&self.dir, self.id) {
            *manifest = newest;
        }
        if manifest.stage != Stage::Lost {
            if !manifest.stage.leads_to(Stage::Lost) {
                return true;
            }
            manifest.stage = Stage::Lost;
            manifest.why = Some(shortened(why));
        }
        // A full disk takes no new file, but it can do without a directory.
        self.write(manifest, Synced::No, MANIFEST_MAX).is_ok() || set_aside(&*self.disk, &self.images, self.id)
    }

    fn change(
        &self,
        sync: Synced,
        change: impl FnOnce(Manifest) -> Result<Manifest, ImageError>,
    ) -> Result<(), ImageError> {
        let mut current = self.lock();
        let before = current.clone().ok_or(ImageError::WrongStage { stage: "not begun", needed: "begun" })?;
        let after = change(before)?;
        self.write(&after, sync, MANIFEST_MAX)?;
        *current = Some(after);
        Ok(())
    }

    fn write(&self, manifest: &Manifest, sync: Synced, max: usize) -> Result<(), ImageError> {
        let text = manifest.to_text().map_err(|what| Damage::of_file(ImageFile::Manifest, Bytes::ZERO, what))?;
        if text.len() > max {
            let what = format!("{} bytes long, and it may have {max}", text.len());
            return Err(Damage::of_file(ImageFile::Manifest, Bytes(max as u64), what).into());
        }
        let names = (NEW_MANIFEST, ImageFile::Manifest.name());
        let written = replace(&*self.disk, self.dir.as_fd(), names, text.as_bytes(), sync);
        written.map_err(ImageError::io(ImageFile::Manifest, 0))
    }

    fn sync_dir(&self, dir: &OwnedFd) -> Result<(), ImageError> {
        let what = format!("directory of {}", self.id);
        self.disk.sync_dir(dir.as_fd()).map_err(|source| ImageError::Directory { what, source })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Manifest>> {
        self.manifest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn advanced(manifest: Manifest, stage: Stage) -> Result<Manifest, ImageError> {
    match manifest.stage {
        Stage::Lost => Err(ImageError::Lost { why: manifest.why.unwrap_or_default() }),
        before if before.leads_to(stage) => Ok(Manifest { stage, ..manifest }),
        before => Err(ImageError::WrongStage { stage: before.name(), needed: "one before that" }),
    }
}

/// Whole blocks of `pages`. What a killed daemon wrote of one more is none.
pub(crate) fn blocks_of(pages: &File) -> Result<u64, ImageError> {
    let len = pages.metadata().map_err(ImageError::io(ImageFile::Pages, 0))?.len();
    Ok(Bytes(len).pages_floor().0)
}

/// The directory of a begun image.
pub(crate) fn open_image(images: &OwnedFd, id: ImageId) -> Result<OwnedFd, ImageError> {
    let what = format!("directory of {id}");
    open_dir(images.as_fd(), &id.to_string()).map_err(|source| ImageError::Directory { what, source })
}

/// The manifest of the image in this directory.
pub(crate) fn read_manifest(dir: &OwnedFd, id: ImageId) -> Result<Manifest, ImageError> {
    let read = read_small(dir.as_fd(), ImageFile::Manifest.name(), MANIFEST_MAX);
    let manifest = Manifest::read(&read.map_err(ImageError::io(ImageFile::Manifest, 0))?)?;
    if manifest.id != id {
        let what = format!("it is of image {}", manifest.id);
        return Err(Damage::of_file(ImageFile::Manifest, Bytes::ZERO, what).into());
    }
    Ok(manifest)
}

/// Makes an image one that is being removed. False if it is there still.
pub(crate) fn set_aside(disk: &dyn Disk, images: &OwnedFd, id: ImageId) -> bool {
    match disk.rename(images.as_fd(), &id.to_string(), &format!("{id}{GONE}")) {
        Ok(()) => true,
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}
