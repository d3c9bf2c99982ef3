//! The image tier: pages of a VM that was made of an image (a snapshot), which it reads when it needs them.

mod map;

use std::io;
use std::path::Path;
use std::sync::Arc;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::IoError;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_image::{Content as Found, Image};
use pagoda_sys::Errno;

pub use map::ImageTierError;

use super::page_map::PageMap;
use super::{Begun, Content, Counts, Io, Read, Takes, Tier, Write};

/// See the module.
#[derive(Debug)]
pub struct ImageTier {
    image: Arc<Image>,
    map: PageMap,
    pages_in: u64,
}

impl ImageTier {
    /// For a new VM, with as many chunks as the image. Makes the file `map`; what was there is gone.
    ///
    /// # Errors
    /// The image lacks a page, or its map is damaged; the file or the threads cannot be made.
    pub fn create(image: Arc<Image>, map: &Path) -> Result<ImageTier, ImageTierError> {
        let map = map::create(&image, map)?;
        Ok(ImageTier { image, map, pages_in: 0 })
    }

    /// For a VM that runs, after a restart of the daemon.
    ///
    /// # Errors
    /// The file is not there, or of another VM or image; the threads cannot be made.
    pub fn open(image: Arc<Image>, map: &Path) -> Result<ImageTier, ImageTierError> {
        let map = map::open(&image, map)?;
        Ok(ImageTier { image, map, pages_in: 0 })
    }

    fn load(&self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        match self.image.read_page(page, out) {
            Ok(Found::Block) => Ok(()),
            found => {
                tracing::error!(image = %self.image.manifest().id, page = page.0, "a page cannot be read: {found:?}");
                Err(Errno::IO)
            }
        }
    }
}

impl Tier for ImageTier {
    fn name(&self) -> &'static str {
        "image"
    }

    fn holds(&self, chunk: ChunkIdx) -> PageSet {
        self.map.of(chunk)
    }

    fn takes(&self, _: bool) -> Takes {
        Takes::No
    }

    fn read(&mut self, io: &mut Io<'_>, read: &Read) -> Begun {
        let mut begun = Begun::default();
        let mut content = [0; PAGE_SIZE as usize];
        for index in read.pages.iter() {
            let page = read.chunk.page(index);
            match self.load(page, &mut content) {
                Ok(()) if io.deliver(read.target, page, &content) => self.pages_in += 1,
                Ok(()) => begun.error = Some(IoError::Failed(Errno::FAULT.raw_os_error())),
                Err(errno) => begun.error = Some(IoError::Failed(errno.raw_os_error())),
            }
        }
        begun
    }

    fn write(&mut self, _: &mut Io<'_>, write: &Write) -> Begun {
        Begun { declined: write.pages, ..Begun::default() }
    }

    /// It gains nothing, for it takes nothing.
    fn settle(&mut self, chunk: ChunkIdx, gained: PageSet, lost: PageSet) -> Result<(), Errno> {
        if gained.is_empty() { self.drop_pages(chunk, lost) } else { Err(Errno::INVAL) }
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        let pages = self.map.of(chunk) - pages;
        self.map.set(chunk, pages).map_err(errno_of)
    }

    fn clear(&mut self) -> Result<(), Errno> {
        self.image.chunks().iter().try_for_each(|chunk| self.map.set(chunk, PageSet::EMPTY)).map_err(errno_of)
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.load(page, out)
    }

    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        let all = (0..).map(ChunkIdx).zip(self.map.chunks());
        all.filter(|(_, pages)| !pages.is_empty()).for_each(|(chunk, pages)| found(chunk, *pages));
        Ok(())
    }

    fn counts(&self) -> Counts {
        Counts { pages: self.map.count(), pages_in: self.pages_in, ..Counts::default() }
    }
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
