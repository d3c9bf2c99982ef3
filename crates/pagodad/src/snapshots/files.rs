//! Snapshots as files: an export of one, and an image that is made of a file.
//!
//! An export holds its image as a VM that reads it does: nobody removes it meanwhile. An import is admitted like a snapshot before
//! anything is made, and nothing of it can be seen before all of the file was found to be right.

use std::io::{self, Read};

use pagoda_api::types::{
    ApiError, COMPRESS_DEFAULT, ErrorCode, ExportFormat, ExportReport, ExportRequest, Snapshot, SnapshotLaunch,
    SnapshotName,
};
use pagoda_api::{in_full, with_advice};
use pagoda_core::units::PageCount;
use pagoda_image::export::{ExportFailed, Exported, FileError, ImportError, Importing, Level, export, qemu};
use pagoda_image::{Image, ImageError, ImageId};

use crate::images::admission::NewImage;
use crate::images::readers::Reading;
use crate::images::transfers::Slot;
use crate::images::{Found, Images, describe, failed, refused};
use crate::random;

/// A snapshot that is going to be exported. Nobody removes it as long as this is.
#[derive(Debug)]
pub struct Export {
    image: Image,
    name: SnapshotName,
    form: Form,
    _reading: Reading,
    _slot: Slot,
}

#[derive(Debug)]
enum Form {
    Pagoda(Level),
    Qemu(qemu::Stream),
}

impl Export {
    /// Hands all of the file to `sink`.
    ///
    /// # Errors
    /// The image is damaged; `sink` takes no more. What was handed on until then is no file.
    pub fn run(&self, sink: &mut dyn FnMut(Vec<u8>) -> io::Result<()>) -> Result<ExportReport, ApiError> {
        let done = match &self.form {
            Form::Pagoda(level) => export(&self.image, *level, sink),
            Form::Qemu(stream) => qemu::export(&self.image, stream, sink),
        };
        let Exported { bytes, blocks, zeros } = done.map_err(|error| {
            let code = match &error {
                ExportFailed::Image(_) | ExportFailed::Unfit(_) => ErrorCode::Refused,
                ExportFailed::Receiver(_) | ExportFailed::Begin(_) => ErrorCode::Internal,
            };
            let hint = Some("see `pagoda snapshot verify`").filter(|_| code == ErrorCode::Refused);
            ApiError::new(code, format!("{} is not exported: {}", self.name, in_full(&error)), hint)
        })?;
        let of = |pages| PageCount(pages).bytes().0;
        Ok(ExportReport { bytes, content_bytes: of(blocks), zero_bytes: of(zeros) })
    }
}

/// A snapshot for an export. Everything that can be wrong without reading its memory is looked for.
///
/// # Errors
/// There is none of this name; it is lost, or not filled yet; it is being removed; others are under way; its state has what
/// cannot be written for a plain QEMU.
pub fn begin_export(images: &Images, name: &SnapshotName, request: &ExportRequest) -> Result<Export, ApiError> {
    request.check().map_err(|why| ApiError::new(ErrorCode::BadRequest, why, None))?;
    let slot = images.transfers().begin()?;
    let id = images.find(name)?.listed.id;
    let refused = |why: String| refused(format!("{name} is not exported: {why}"), None);
    let reading = images.readers().begin_export(id).ok_or_else(|| refused("it is being removed".to_owned()))?;
    let image = images.store()?.image(id).map_err(|error| refused(in_full(&error)))?;
    image.check_usable(images.boot_id()?).map_err(refused)?;
    let form = match (request.format, request.compress) {
        (ExportFormat::Pagoda, Some(0)) => Form::Pagoda(Level::Stored),
        (ExportFormat::Pagoda, level) => Form::Pagoda(Level::Zstd(level.unwrap_or(COMPRESS_DEFAULT))),
        (ExportFormat::Qemu, _) => Form::Qemu(qemu::Stream::of(&image).map_err(|error| refused(in_full(&error)))?),
    };
    Ok(Export { image, name: name.clone(), form, _reading: reading, _slot: slot })
}

/// Makes a snapshot of a file. It is durable when this returns, and waits to be accepted.
///
/// # Errors
/// The file is not right, or ends early; the name is taken; there is no room; the disk's. Nothing is left then.
pub fn import(images: &Images, name: Option<&SnapshotName>, file: impl Read) -> Result<Snapshot, ApiError> {
    let store = images.ready()?;
    let _slot = images.transfers().begin()?;
    let importing = Importing::open(file).map_err(not_imported)?;
    let manifest = importing.manifest();
    let of_file = || SnapshotName::new(&*manifest.vm, &*manifest.name);
    let name = name.cloned().unwrap_or_else(of_file);
    let unique = random::bytes().map_err(|error| failed("make a name for the image", &error))?;
    let id = ImageId(u128::from_le_bytes(unique));
    let new = NewImage { id, name: &name, pages: manifest.pages(), filled: importing.blocks() };
    let admitted = images.admit(&new)?;
    let made = importing.make(store, id, (&name.vm, &name.name)).map_err(not_imported)?;
    drop(admitted);
    tracing::info!(image = %id, bytes = made.totals.bytes, "{name} was imported from a file, and waits to be accepted");
    images.get(&name)
}

/// What starts a snapshot's QEMU, for somebody who is to decide whether it may.
///
/// # Errors
/// As [`Images::get`].
pub fn program(images: &Images, name: &SnapshotName) -> Result<SnapshotLaunch, ApiError> {
    images.find(name).map(|found| describe::launch(found.manifest))
}

/// What an imported snapshot starts may be started from now on.
///
/// # Errors
/// There is none of this name, or it is another image by now; it was not imported; the disk's.
pub fn accept(images: &Images, name: &SnapshotName, id: &str) -> Result<Snapshot, ApiError> {
    let Found { listed, manifest } = images.find(name)?;
    if listed.id.to_string() != id {
        let hint = "see `pagoda snapshot show`";
        return Err(refused(format!("{name} is another image by now, {}", listed.id), Some(hint)));
    }
    if manifest.imported.is_none() {
        return Err(refused(format!("{name} was taken on this host: there is nothing to accept"), None));
    }
    // It stays there while its manifest is written.
    let _reading = images.readers().begin_export(listed.id).ok_or_else(|| refused("it is being removed", None))?;
    let accepted = images.ready()?.ledger(listed.id).and_then(|ledger| ledger.accept());
    accepted.map_err(|error| failed("note that it is accepted", &error))?;
    images.get(name)
}

fn not_imported(error: ImportError) -> ApiError {
    let what = with_advice(format!("nothing was imported: {}", in_full(&error)));
    match error {
        ImportError::File(FileError::Bad(_)) => {
            refused(what, Some("the file is not as `pagoda snapshot export` wrote it: copy it or export it again"))
        }
        ImportError::File(FileError::Io { .. }) => ApiError::new(ErrorCode::GivenUp, what, None),
        ImportError::Image(ImageError::Io { source, .. } | ImageError::NotSynced { source, .. })
            if is_full(&source) =>
        {
            ApiError::new(ErrorCode::NoRoom, what, Some("see `pagoda snapshot ls`"))
        }
        ImportError::Image(_) => ApiError::new(ErrorCode::Internal, what, None),
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests;
