//! Makes an image independent of its parent, so that the parent can be removed: the image takes over what it has there.
//!
//! The order: blocks are added -> they are on the disk -> entries name them, each with one write that is whole or not at all ->
//! these are on the disk -> the marks of chunks whose entries are all written go -> that is on the disk -> the manifest names the
//! parent's parent, and that is on the disk. Before the last step each page is had by either way, with the same content; after
//! it only by one. So a kill or a crash at any moment leaves a whole image that refers to its parent or to that one's. What was
//! added and not named takes room until the image goes.
//!
//! What the parent has from its own parent stays where it is: the entry that says "the parent's" is right for both.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use std::os::fd::AsFd;

use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkIdx, PAGE_SIZE};

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{BlockIdx, ENTRY_SIZE, Entry, entry_offset};
use crate::id::ImageId;
use crate::layer::Layer;
use crate::ledger::Ledger;
use crate::lengths::Lengths;
use crate::limits::IMAGE_PAGES_MAX;
use crate::manifest::Stage;
use crate::map::{CHUNK_ENTRIES, ChunkEntries, MARK_SIZE, mark_offset};

const PAGE: usize = PAGE_SIZE as usize;
/// Chunks whose blocks are on the disk before the first of their entries is written.
const BATCH: usize = 64;

/// A chunk whose entries are to change.
struct Moved {
    chunk: ChunkIdx,
    entries: Box<ChunkEntries>,
    /// It is marked as wholly the parent's, and has no entries in the map yet.
    is_marked: bool,
}

struct Adoption<'a> {
    child: &'a Ledger,
    parent: &'a Layer,
    /// The block that is written next.
    next: u64,
}

/// See the module, and [`crate::Store::detach`].
pub(crate) fn detach(disk: &Arc<dyn Disk>, images: &Arc<OwnedFd>, id: ImageId) -> Result<(), ImageError> {
    let child = Ledger::open(Arc::clone(disk), Arc::clone(images), id)?;
    let Some(parent) = child.parent() else { return Ok(()) };
    // Whoever makes it durable writes the same manifest.
    let manifest = child.manifest().ok_or(ImageError::WrongStage { stage: "not begun", needed: "durable" })?;
    let stage = manifest.stage;
    if stage != Stage::Durable {
        return Err(ImageError::WrongStage { stage: stage.name(), needed: Stage::Durable.name() });
    }
    let lengths = Lengths::of(&child.map, &child.pages, child.state.get(), child.marks.as_ref())?;
    lengths.check(&manifest)?;
    let opened = Layer::open(Arc::clone(disk), images, parent);
    let parent = opened.map_err(|error| ImageError::Parent { id: parent, why: error.to_string() })?;
    if parent.manifest.stage != Stage::Durable || parent.manifest.regions != manifest.regions {
        let why = format!("it is {}, or of another VM", parent.manifest.stage.name());
        return Err(ImageError::Parent { id: parent.manifest.id, why });
    }
    let next = lengths.pages.pages_ceil().0;
    Adoption { child: &child, parent: &parent, next }.run()?;
    child.pass_on(parent.manifest.parent)?;
    if parent.manifest.parent.is_none() {
        // Nobody looks at it any more; it goes with the image at the latest.
        let _ = disk.remove_file(child.dir.as_fd(), ImageFile::Inherited.name());
    }
    Ok(())
}

impl Adoption<'_> {
    fn run(&mut self) -> Result<(), ImageError> {
        let mut batch = Vec::with_capacity(BATCH);
        for chunk in self.child.chunks.iter() {
            batch.extend(self.copy(chunk)?);
            if batch.len() == BATCH {
                self.name(&batch)?;
                batch.clear();
            }
        }
        self.name(&batch)
    }

    /// Adds the blocks of a chunk that are the parent's own: the entries that name them.
    fn copy(&mut self, chunk: ChunkIdx) -> Result<Option<Moved>, ImageError> {
        let tables = self.child.tables()?;
        let is_marked = tables.is_marked(chunk)?;
        let mut entries = Box::new(tables.chunk(chunk)?);
        if !entries.iter().any(|entry| matches!(entry, Entry::Parent { .. })) {
            return Ok(None);
        }
        let id = self.parent.manifest.id;
        let Some(parents) = self.parent.chunk(chunk).map_err(|error| error.in_parent(id))? else { return Ok(None) };
        let mut content = [0; PAGE];
        let mut has_changed = false;
        for (index, entry) in (0..=u8::MAX).zip(entries.iter_mut()) {
            let Entry::Parent { .. } = entry else { continue };
            let page = chunk.page(index);
            *entry = match parents[usize::from(index)] {
                // That of the parent's parent: it has this image's seal already.
                Entry::Parent { .. } => continue,
                Entry::Zero => Entry::Zero,
                Entry::Block { block, sum } => {
                    let read = self.parent.read_block(page, (block, sum), &mut content);
                    read.map_err(|error| error.in_parent(id))?;
                    Entry::Block { block: self.add(&content)?, sum }
                }
                Entry::Missing => {
                    let damage =
                        Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), "the page is missing");
                    return Err(ImageError::from(damage).in_parent(id));
                }
            };
            has_changed = true;
        }
        Ok(has_changed.then_some(Moved { chunk, entries, is_marked }))
    }

    fn add(&mut self, content: &[u8]) -> Result<BlockIdx, ImageError> {
        if self.next >= IMAGE_PAGES_MAX.0 {
            let what = format!("it would have more than {IMAGE_PAGES_MAX} blocks");
            return Err(Damage::of_file(ImageFile::Pages, IMAGE_PAGES_MAX.bytes(), what).into());
        }
        let block = BlockIdx(self.next as u32);
        self.next += 1;
        let written = self.child.disk.write_at(&self.child.pages, content, block.offset().0);
        written.map_err(ImageError::io(ImageFile::Pages, block.offset().0))?;
        Ok(block)
    }

    /// The blocks of these chunks have been written: from now on their entries name them.
    fn name(&self, batch: &[Moved]) -> Result<(), ImageError> {
        if batch.is_empty() {
            return Ok(());
        }
        let disk = &*self.child.disk;
        disk.sync_file(&self.child.pages).map_err(ImageError::io(ImageFile::Pages, 0))?;
        for moved in batch {
            self.write_entries(moved)?;
        }
        disk.sync_file(&self.child.map).map_err(ImageError::io(ImageFile::Map, 0))?;
        let Some(marks) = &self.child.marks else { return Ok(()) };
        for Moved { chunk, .. } in batch.iter().filter(|moved| moved.is_marked) {
            let offset = mark_offset(*chunk);
            disk.write_at(marks, &[0; MARK_SIZE], offset).map_err(ImageError::io(ImageFile::Inherited, offset))?;
        }
        disk.sync_file(marks).map_err(ImageError::io(ImageFile::Inherited, 0))
    }

    /// A marked chunk's at once, for nobody looks at them before the mark goes; else one by one, for any reader may come between.
    fn write_entries(&self, moved: &Moved) -> Result<(), ImageError> {
        let mut bytes = [0; CHUNK_ENTRIES];
        let (words, _) = bytes.as_chunks_mut::<ENTRY_SIZE>();
        words.iter_mut().zip(moved.entries.iter()).for_each(|(word, entry)| *word = entry.encode().to_le_bytes());
        let step = if moved.is_marked { CHUNK_PAGES as usize } else { 1 };
        let first = entry_offset(moved.chunk.first_page());
        for (nth, bytes) in bytes.chunks(step * ENTRY_SIZE).enumerate() {
            let is_old = matches!(moved.entries[nth * step], Entry::Parent { .. });
            if is_old && !moved.is_marked {
                continue;
            }
            let offset = first + (nth * step * ENTRY_SIZE) as u64;
            let written = self.child.disk.write_at(&self.child.map, bytes, offset);
            written.map_err(ImageError::io(ImageFile::Map, offset))?;
        }
        Ok(())
    }
}
