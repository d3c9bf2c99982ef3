//! An image and those that it refers to, each by the one before it. The chain says which of them has a page.
//!
//! It finds that once for each chunk. The first look at a chunk goes through the images. Its answer is one byte for each page, or
//! one byte for all, and is kept as long as the chain is open. From then on a page costs what it costs in an image without a
//! parent: one entry and one block. The answers take at most 1/4096 of the VM's memory. The entries themselves name no other
//! image. So an image in the middle can be removed by changing the entries of its children alone.

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkIdx, PageIdx};

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{Entry, entry_offset};
use crate::id::ImageId;
use crate::layer::Layer;
use crate::limits::CHAIN_MAX;
use crate::manifest::Stage;

/// How often a chain is opened anew whose images changed meanwhile: one of them was removed, and its child refers to another.
const TRIES: usize = 3;

/// Which image of the chain has each page of a chunk.
#[derive(Debug)]
enum Levels {
    All(u8),
    Each(Box<[u8; CHUNK_PAGES as usize]>),
}

/// Where the pages of a chunk are: in which image of the chain, and its entry.
pub(crate) type Entries = [(u8, Entry); CHUNK_PAGES as usize];

/// An image and its ancestors, opened for reading; the newest one is first.
#[derive(Debug)]
pub(crate) struct Chain {
    /// The image, its parent, that one's parent, and so on.
    layers: Vec<Layer>,
    /// Of each chunk, once it was looked for; empty if there is no parent.
    levels: Vec<OnceLock<Levels>>,
}

impl Chain {
    pub(crate) fn open(disk: &Arc<dyn Disk>, images: &OwnedFd, id: ImageId) -> Result<Chain, ImageError> {
        let mut tried = 1;
        let layers = loop {
            match open_layers(disk, images, id) {
                Err(ImageError::Parent { .. } | ImageError::Io { file: ImageFile::Inherited, .. }) if tried < TRIES => {
                    tried += 1;
                }
                opened => break opened?,
            }
        };
        let chunks = if layers.len() > 1 { layers[0].manifest.pages().chunks_ceil().as_usize() } else { 0 };
        let levels = std::iter::repeat_with(OnceLock::new).take(chunks).collect();
        Ok(Chain { layers, levels })
    }

    /// The image that was opened, which is the first of the chain.
    pub(crate) fn own(&self) -> &Layer {
        &self.layers[0]
    }

    /// The image at a place in the chain.
    pub(crate) fn layer(&self, level: u8) -> &Layer {
        &self.layers[usize::from(level)]
    }

    /// The names of those that it refers to.
    pub(crate) fn parents(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().skip(1)
    }

    /// What this image has of the page, and where in the chain. It is never the parent's.
    pub(crate) fn entry(&self, page: PageIdx) -> Result<(u8, Entry), ImageError> {
        let (chunk, index) = (page.chunk(), page.index_in_chunk());
        let level = match self.levels_of(chunk)? {
            None => 0,
            Some(Levels::All(level)) => *level,
            Some(Levels::Each(levels)) => levels[usize::from(index)],
        };
        let entry = self.layer(level).entry(page).map_err(|error| self.at(level, error))?;
        self.check(level, page, entry)?;
        Ok((level, entry))
    }

    /// The same of pages of a chunk.
    pub(crate) fn entries(&self, chunk: ChunkIdx, pages: PageSet) -> Result<Entries, ImageError> {
        let mut found = [(0, Entry::Missing); CHUNK_PAGES as usize];
        let levels = self.levels_of(chunk)?;
        let level_of = |index: usize| match levels {
            None => 0,
            Some(Levels::All(level)) => *level,
            Some(Levels::Each(levels)) => levels[index],
        };
        let mut left = pages;
        while let Some(first) = left.first_set() {
            let level = level_of(usize::from(first));
            let here: PageSet = left.iter().filter(|index| level_of(usize::from(*index)) == level).collect();
            left -= here;
            let layer = self.layer(level);
            let entries = layer.chunk(chunk).map_err(|error| self.at(level, error))?;
            for index in here.iter() {
                let (page, index) = (chunk.page(index), usize::from(index));
                let entry = entries.as_ref().map_or_else(|| layer.entry(page), |entries| Ok(entries[index]))?;
                self.check(level, page, entry)?;
                found[index] = (level, entry);
            }
        }
        Ok(found)
    }

    /// An error of one of the images.
    pub(crate) fn at(&self, level: u8, error: ImageError) -> ImageError {
        if level == 0 { error } else { error.in_parent(self.layer(level).manifest.id) }
    }

    /// Images do not change so that a page goes back to a parent, and no parent lacks a page.
    fn check(&self, level: u8, page: PageIdx, entry: Entry) -> Result<(), ImageError> {
        let what = match entry {
            Entry::Parent { .. } => "the page is said to be in a parent, and was found here",
            Entry::Missing if level > 0 => "the page is missing",
            _ => return Ok(()),
        };
        let damage = Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), what);
        Err(self.at(level, damage.into()))
    }

    fn levels_of(&self, chunk: ChunkIdx) -> Result<Option<&Levels>, ImageError> {
        let Some(known) = self.levels.get(chunk.as_usize()) else { return Ok(None) };
        if let Some(levels) = known.get() {
            return Ok(Some(levels));
        }
        // Two may look at the same time, and find the same.
        let found = self.find(chunk)?;
        Ok(Some(known.get_or_init(|| found)))
    }

    fn find(&self, chunk: ChunkIdx) -> Result<Levels, ImageError> {
        let (mut left, mut levels) = (PageSet::FULL, [0; CHUNK_PAGES as usize]);
        for (level, layer) in (0u8..).zip(&self.layers) {
            let Some(entries) = layer.chunk(chunk).map_err(|error| self.at(level, error))? else { continue };
            let is_here = |index: &u8| !matches!(entries[usize::from(*index)], Entry::Parent { .. });
            let here: PageSet = left.iter().filter(is_here).collect();
            if here.is_full() {
                return Ok(Levels::All(level));
            }
            here.iter().for_each(|index| levels[usize::from(index)] = level);
            left -= here;
            if left.is_empty() {
                return Ok(Levels::Each(Box::new(levels)));
            }
        }
        // The last one has no parent, so its entries cannot say so.
        let page = chunk.page(left.first_set().unwrap_or_default());
        Err(Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), "no image has the page").into())
    }
}

/// Opens an image and those behind it.
fn open_layers(disk: &Arc<dyn Disk>, images: &OwnedFd, id: ImageId) -> Result<Vec<Layer>, ImageError> {
    let mut layers = vec![Layer::open(Arc::clone(disk), images, id)?];
    while let Some(parent) = layers[layers.len() - 1].manifest.parent {
        let refuse = |why: &str| Err(ImageError::Parent { id: parent, why: why.to_owned() });
        if layers.iter().any(|layer| layer.manifest.id == parent) {
            return refuse("it refers to itself by others");
        }
        if layers.len() == CHAIN_MAX {
            return refuse(&format!("there are more than {CHAIN_MAX} images, one behind the other"));
        }
        let opened = Layer::open(Arc::clone(disk), images, parent);
        let layer = opened.map_err(|error| ImageError::Parent { id: parent, why: error.to_string() })?;
        let (first, manifest) = (&layers[0].manifest, &layer.manifest);
        match manifest.stage {
            Stage::Filled | Stage::Durable => {}
            Stage::Begun | Stage::Lost => return refuse(&format!("it is {}", manifest.stage.name())),
        }
        if manifest.regions != first.regions {
            return refuse("it is of a VM with other regions");
        }
        if manifest.vm != first.vm {
            return refuse("it is of another VM");
        }
        layers.push(layer);
    }
    Ok(layers)
}
