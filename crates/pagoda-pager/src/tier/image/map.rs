//! Which pages of a VM are in its image still ([`PageMap`]). The file's head names the image.
//!
//! | bytes | meaning |
//! |---|---|
//! | 0-15 | `pagoda-vm-image1` |
//! | 16-31 | the image's number, little-endian |
//! | 32- | 32 bytes a chunk: a bit for each page |

use std::path::Path;

use pagoda_core::bits::PageSet;
use pagoda_core::units::PageIdx;
use pagoda_image::{Image, ImageError};

use crate::tier::page_map::PageMap;

const MAGIC: &[u8; 16] = b"pagoda-vm-image1";

/// Why a VM cannot read an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageTierError {
    /// The image cannot be read, or its disk fails.
    #[error("the snapshot's files: {0}")]
    Image(#[from] ImageError),
    /// Nobody has the page any more, or only the VM that the image is made of.
    #[error("the snapshot is not filled: it lacks page {page}")]
    Missing {
        /// The first such page.
        page: PageIdx,
    },
    /// The file that says which pages of the VM are in the image fails.
    #[error("{path}: {source}")]
    Map {
        /// The path of the map's file.
        path: String,
        /// The error of the file.
        source: std::io::Error,
    },
    /// The threads that read cannot be started.
    #[error("start the threads that read the snapshot: {0}")]
    Threads(std::io::Error),
}

/// The map of a new VM, all of whose pages are in the image or zero. Reads the image's whole map.
pub fn create(image: &Image, path: &Path) -> Result<PageMap, ImageTierError> {
    let mut blocks = Vec::with_capacity(image.chunks().as_usize());
    for chunk in image.chunks().iter() {
        let found = image.look_at(chunk)?;
        if let Some(index) = found.missing.first_set() {
            return Err(ImageTierError::Missing { page: chunk.page(index) });
        }
        blocks.push(PageSet::FULL - found.zero);
    }
    PageMap::create(path, &head(image), blocks).map_err(failed(path))
}

/// The map of a VM that runs.
pub fn open(image: &Image, path: &Path) -> Result<PageMap, ImageTierError> {
    PageMap::open(path, &head(image), image.chunks()).map_err(failed(path))
}

fn head(image: &Image) -> [u8; 32] {
    let mut head = [0; 32];
    head[..16].copy_from_slice(MAGIC);
    head[16..].copy_from_slice(&image.manifest().id.0.to_le_bytes());
    head
}

fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> ImageTierError {
    move |source| ImageTierError::Map { path: path.display().to_string(), source }
}
