//! Makes an image independent of its parent, so that the parent can be removed. The image takes over what it refers to in the
//! parent.
//!
//! The order: blocks are added -> they are on the disk -> entries name them, each with one write that is whole or not at all ->
//! these are on the disk -> the marks of chunks whose entries are all written go -> that is on the disk -> the manifest names the
//! parent's parent, and that is on the disk. Before the last step each page can be had by either way, with the same content.
//! After it, each can be had only by one. So a kill or a crash at any moment leaves a whole image that refers to its parent or to
//! that one's.
//!
//! **After an interruption.** If this is cut off, what was written may be in the page cache and nowhere else. If the disk then
//! reports an error, the kernel takes the data for written all the same, and a later sync says nothing. So what an earlier
//! attempt took over is written once more to the same place: block, entry and mark. All that the last step relies on was written
//! and synced by the call that makes that step. Blocks that were added and not named are written over.
//!
//! What the parent has from its own parent stays where it is. The entry that says "the parent's" is right for both.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, ChunkIdx, PAGE_SIZE, PageIdx};

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{BlockIdx, ENTRY_SIZE, Entry, entry_offset};
use crate::id::ImageId;
use crate::layer::{Layer, check_sum};
use crate::ledger::Ledger;
use crate::lengths::Lengths;
use crate::limits::IMAGE_PAGES_MAX;
use crate::manifest::Stage;
use crate::map::{CHUNK_ENTRIES, ChunkEntries, MARK_SIZE, Tables, map_bytes, mark_offset};

const PAGE: usize = PAGE_SIZE as usize;
/// Chunks whose blocks are on the disk before the first of their entries is written.
const BATCH: usize = 64;

/// What the child takes over of a chunk.
struct Share {
    chunk: ChunkIdx,
    /// The child's entries: as they are, and then as they are to be.
    entries: Box<ChunkEntries>,
    /// The parent's entries of the same chunk.
    parents: Box<ChunkEntries>,
    /// The pages that are the parent's own, and that the child refers to or has taken over before.
    pages: PageSet,
    /// It is marked as wholly the parent's, and has no entries in the map yet.
    is_marked: bool,
}

impl Share {
    /// Blocks that the child does not have yet.
    fn new_blocks(&self) -> u64 {
        let is_new = |index: &u8| {
            let index = usize::from(*index);
            matches!((self.entries[index], self.parents[index]), (Entry::Parent { .. }, Entry::Block { .. }))
        };
        self.pages.iter().filter(is_new).count() as u64
    }
}

struct Adoption {
    child: Ledger,
    parent: Layer,
    /// The block that is written next: no entry names it or one behind it.
    next: u64,
}

/// See the module, and [`crate::Store::detach`].
pub(crate) fn detach(disk: &Arc<dyn Disk>, images: &Arc<OwnedFd>, id: ImageId) -> Result<(), ImageError> {
    let Some(mut adoption) = Adoption::open(disk, images, id)? else { return Ok(()) };
    adoption.run()?;
    let Adoption { child, parent, .. } = adoption;
    child.pass_on(parent.manifest.parent)?;
    if parent.manifest.parent.is_none() {
        // Nobody looks at it any more; it goes with the image at the latest.
        let _ = disk.remove_file(child.dir.as_fd(), ImageFile::Inherited.name());
    }
    Ok(())
}

/// The room that a detachment may take on the disk, for [`crate::Store::detach_bytes`].
pub(crate) fn detach_bytes(disk: &Arc<dyn Disk>, images: &Arc<OwnedFd>, id: ImageId) -> Result<Bytes, ImageError> {
    let Some(adoption) = Adoption::open(disk, images, id)? else { return Ok(Bytes::ZERO) };
    let mut blocks = 0;
    for chunk in adoption.child.chunks.iter() {
        blocks += adoption.share(chunk)?.map_or(0, |share| share.new_blocks());
    }
    Ok(Bytes(blocks * PAGE_SIZE) + Bytes(map_bytes(adoption.child.chunks)))
}

impl Adoption {
    /// Nothing if the image has no parent.
    fn open(disk: &Arc<dyn Disk>, images: &Arc<OwnedFd>, id: ImageId) -> Result<Option<Adoption>, ImageError> {
        let child = Ledger::open(Arc::clone(disk), Arc::clone(images), id)?;
        let Some(parent) = child.parent() else { return Ok(None) };
        // Whoever makes it durable writes the same manifest.
        let manifest = child.manifest().ok_or(ImageError::WrongStage { stage: "not begun", needed: "durable" })?;
        if manifest.stage != Stage::Durable {
            return Err(ImageError::WrongStage { stage: manifest.stage.name(), needed: Stage::Durable.name() });
        }
        let lengths = Lengths::of(&child.map, &child.pages, child.state.get(), child.marks.as_ref())?;
        lengths.check(&manifest)?;
        let opened = Layer::open(Arc::clone(disk), images, parent);
        let parent = opened.map_err(|error| ImageError::Parent { id: parent, why: error.to_string() })?;
        if parent.manifest.stage != Stage::Durable || parent.manifest.regions != manifest.regions {
            let why = format!("it is {}, or of another VM", parent.manifest.stage.name());
            return Err(ImageError::Parent { id: parent.manifest.id, why });
        }
        let next = blocks_named(&child)?;
        Ok(Some(Adoption { child, parent, next }))
    }

    fn run(&mut self) -> Result<(), ImageError> {
        let mut batch = Vec::with_capacity(BATCH);
        for chunk in self.child.chunks.iter() {
            if let Some(mut share) = self.share(chunk)? {
                self.copy(&mut share)?;
                batch.push(share);
            }
            if batch.len() == BATCH {
                self.name(&batch)?;
                batch.clear();
            }
        }
        self.name(&batch)
    }

    /// What is to be taken over of a chunk, if anything.
    fn share(&self, chunk: ChunkIdx) -> Result<Option<Share>, ImageError> {
        let tables = self.child.tables()?;
        let (is_marked, entries) = (tables.is_marked(chunk)?, Box::new(tables.chunk(chunk)?));
        let failed = |error: ImageError| error.in_parent(self.parent.manifest.id);
        let Some(parents) = self.parent.chunk(chunk).map_err(failed)? else { return Ok(None) };
        let mut pages = PageSet::EMPTY;
        for (index, (entry, of_parent)) in (0..=u8::MAX).zip(entries.iter().zip(parents.iter())) {
            let page = chunk.page(index);
            let is_shared = match (*entry, *of_parent) {
                // That of the parent's parent: it has this image's seal already.
                (_, Entry::Parent { .. }) => false,
                (Entry::Parent { .. }, Entry::Missing) => return Err(failed(missing(page))),
                (Entry::Parent { .. }, _) => true,
                (Entry::Zero, of_parent) => of_parent == Entry::Zero,
                (Entry::Block { block, sum }, Entry::Block { block: other, sum: sum_of_other }) => {
                    sum == sum_of_other && self.is_equal(page, (block, other), sum)
                }
                (Entry::Block { .. } | Entry::Missing, _) => false,
            };
            if is_shared {
                pages.set(index);
            }
        }
        Ok((!pages.is_empty()).then_some(Share { chunk, entries, parents, pages, is_marked }))
    }

    /// Whether two blocks of the same checksum, the child's and the parent's, hold the same. If the parent's is damaged, what the
    /// child has is its own, and needs nothing of it. If the child's is, it is what an earlier attempt lost.
    fn is_equal(&self, page: PageIdx, (block, of_parent): (BlockIdx, BlockIdx), sum: u32) -> bool {
        let (mut content, mut parents) = ([0; PAGE], [0; PAGE]);
        if self.parent.read_block(page, (of_parent, sum), &mut parents).is_err() {
            return false;
        }
        let read = self.child.disk.read_at(&self.child.pages, &mut content, block.offset().0);
        read.is_err() || content == parents || check_sum(page, (block, sum), &content).is_err()
    }

    /// Writes the blocks of the pages, behind all others or where they were taken over to before, and works out their entries.
    fn copy(&mut self, share: &mut Share) -> Result<(), ImageError> {
        let mut content = [0; PAGE];
        for index in share.pages.iter() {
            let page = share.chunk.page(index);
            let entry = &mut share.entries[usize::from(index)];
            let Entry::Block { block: of_parent, sum } = share.parents[usize::from(index)] else {
                *entry = Entry::Zero;
                continue;
            };
            let read = self.parent.read_block(page, (of_parent, sum), &mut content);
            read.map_err(|error| error.in_parent(self.parent.manifest.id))?;
            let block = match *entry {
                Entry::Block { block, .. } => block,
                _ => self.next_block()?,
            };
            let written = self.child.disk.write_at(&self.child.pages, &content, block.offset().0);
            written.map_err(ImageError::io(ImageFile::Pages, block.offset().0))?;
            *entry = Entry::Block { block, sum };
        }
        Ok(())
    }

    fn next_block(&mut self) -> Result<BlockIdx, ImageError> {
        if self.next >= IMAGE_PAGES_MAX.0 {
            let what = format!("it would have more than {IMAGE_PAGES_MAX} blocks");
            return Err(Damage::of_file(ImageFile::Pages, IMAGE_PAGES_MAX.bytes(), what).into());
        }
        self.next += 1;
        Ok(BlockIdx((self.next - 1) as u32))
    }

    /// The blocks of these chunks have been written: from now on their entries name them.
    fn name(&self, batch: &[Share]) -> Result<(), ImageError> {
        if batch.is_empty() {
            return Ok(());
        }
        let disk = &*self.child.disk;
        disk.sync_file(&self.child.pages).map_err(ImageError::io(ImageFile::Pages, 0))?;
        for share in batch {
            self.write_entries(share)?;
        }
        disk.sync_file(&self.child.map).map_err(ImageError::io(ImageFile::Map, 0))?;
        let Some(marks) = &self.child.marks else { return Ok(()) };
        for Share { chunk, .. } in batch {
            let offset = mark_offset(*chunk);
            disk.write_at(marks, &[0; MARK_SIZE], offset).map_err(ImageError::io(ImageFile::Inherited, offset))?;
        }
        disk.sync_file(marks).map_err(ImageError::io(ImageFile::Inherited, 0))
    }

    /// A marked chunk's at once, for nobody looks at them before the mark goes; else one by one, for any reader may come between.
    fn write_entries(&self, share: &Share) -> Result<(), ImageError> {
        let write = |bytes: &[u8], offset| {
            let written = self.child.disk.write_at(&self.child.map, bytes, offset);
            written.map_err(ImageError::io(ImageFile::Map, offset))
        };
        if share.is_marked {
            let mut bytes = [0; CHUNK_ENTRIES];
            let (words, _) = bytes.as_chunks_mut::<ENTRY_SIZE>();
            words.iter_mut().zip(share.entries.iter()).for_each(|(word, entry)| *word = entry.encode().to_le_bytes());
            return write(&bytes, entry_offset(share.chunk.first_page()));
        }
        (0..=u8::MAX).zip(share.entries.iter()).try_for_each(|(index, entry)| {
            // Those of the parent's parent may be from an attempt that found the chunk marked.
            let is_due = share.pages.contains(index) || matches!(entry, Entry::Parent { .. });
            let offset = entry_offset(share.chunk.page(index));
            if is_due { write(&entry.encode().to_le_bytes(), offset) } else { Ok(()) }
        })
    }
}

/// Blocks up to the last one that an entry of the image names.
fn blocks_named(image: &Ledger) -> Result<u64, ImageError> {
    let (tables, mut blocks) = (image.tables()?, 0);
    for chunk in image.chunks.iter().filter_map(|chunk| unmarked(&tables, chunk).transpose()) {
        for entry in chunk? {
            if let Entry::Block { block, .. } = entry {
                blocks = blocks.max(u64::from(block.0) + 1);
            }
        }
    }
    Ok(blocks)
}

/// The entries of a chunk that is not wholly the parent's.
fn unmarked(tables: &Tables<'_>, chunk: ChunkIdx) -> Result<Option<ChunkEntries>, ImageError> {
    if tables.is_marked(chunk)? { Ok(None) } else { tables.chunk_of_map(chunk).map(Some) }
}

fn missing(page: PageIdx) -> ImageError {
    Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), "the page is missing").into()
}
