//! What is wrong with an image, and where.

use std::fmt;
use std::io;

use pagoda_core::units::{Bytes, PageIdx};

use crate::id::ImageId;

/// A file of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageFile {
    /// What the image is of, and how far it is.
    Manifest,
    /// The device state that QEMU saved, without RAM.
    State,
    /// Where each page is.
    Map,
    /// The content of pages, in blocks of 4 KiB.
    Pages,
    /// Which chunks are wholly the parent's, of an image that has one.
    Inherited,
}

impl ImageFile {
    /// All files that an image may have.
    pub const ALL: [ImageFile; 5] =
        [ImageFile::Manifest, ImageFile::State, ImageFile::Map, ImageFile::Pages, ImageFile::Inherited];

    /// Its name in the image's directory.
    pub const fn name(self) -> &'static str {
        match self {
            ImageFile::Manifest => "manifest",
            ImageFile::State => "state",
            ImageFile::Map => "map",
            ImageFile::Pages => "pages",
            ImageFile::Inherited => "inherited",
        }
    }
}

impl fmt::Display for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A place in an image that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    pub file: ImageFile,
    /// The page of the VM that this makes unreadable, if it is one.
    pub page: Option<PageIdx>,
    /// Where in the file.
    pub offset: Bytes,
    /// What is wrong, in words.
    pub what: String,
}

impl Damage {
    /// Not of one page.
    pub fn of_file(file: ImageFile, offset: Bytes, what: impl Into<String>) -> Damage {
        Damage { file, page: None, offset, what: what.into() }
    }

    /// A damage that makes one page of the VM unreadable.
    pub fn of_page(file: ImageFile, page: PageIdx, offset: Bytes, what: impl Into<String>) -> Damage {
        Damage { file, page: Some(page), offset, what: what.into() }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some(page) = self.page {
            write!(f, ", page {page}")?;
        }
        write!(f, ", offset {}: {}", self.offset.0, self.what)
    }
}

/// Why an image, or a page of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It is not what was written.
    #[error("{0}")]
    Damaged(Damage),
    /// The disk failed when the file was read or written there.
    #[error("{file}, offset {}: {source}", offset.0)]
    Io { file: ImageFile, offset: Bytes, source: io::Error },
    /// The disk failed when the file was synced. What the disk has of it is not known, and the kernel says so once.
    #[error("{file} was not synced: {source}")]
    NotSynced { file: ImageFile, source: io::Error },
    /// It was given up while the VM ran.
    #[error("the image is lost: {why}")]
    Lost { why: String },
    /// It is in another stage than this needs.
    #[error("the image is {stage}, and this needs one that is {needed}")]
    WrongStage { stage: &'static str, needed: &'static str },
    /// Images refer to one another as no images do, or to one that cannot be had.
    #[error("its parent {id}: {why}")]
    Parent { id: ImageId, why: String },
    /// Other images refer to it.
    #[error("{child} refers to it: {why}")]
    IsParent { child: ImageId, why: String },
    /// Nothing that an image is made of.
    #[error("{what}: {source}")]
    Directory { what: String, source: io::Error },
}

impl ImageError {
    /// The place of it, for a report.
    pub fn into_damage(self) -> Damage {
        match self {
            ImageError::Damaged(damage) => damage,
            ImageError::Io { file, offset, source } => Damage::of_file(file, offset, source.to_string()),
            ImageError::NotSynced { file, source } => Damage::of_file(file, Bytes::ZERO, source.to_string()),
            other => Damage::of_file(ImageFile::Manifest, Bytes::ZERO, other.to_string()),
        }
    }

    /// The same of an image's parent.
    pub(crate) fn in_parent(self, id: ImageId) -> ImageError {
        let Damage { file, page, offset, what } = self.into_damage();
        Damage { file, page, offset, what: format!("of its parent {id}: {what}") }.into()
    }

    /// The disk failed at this place.
    pub(crate) fn io(file: ImageFile, offset: u64) -> impl FnOnce(io::Error) -> ImageError {
        move |source| ImageError::Io { file, offset: Bytes(offset), source }
    }
}

impl From<Damage> for ImageError {
    fn from(damage: Damage) -> ImageError {
        ImageError::Damaged(damage)
    }
}
