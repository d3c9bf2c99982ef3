//! The file `map`: an entry for each page of the VM, in order, without a header. It has its whole length from the beginning.
//!
//! An image with a parent has the file `inherited` beside it: four bytes for each chunk. They are 0, or the *mark* that all pages
//! of the chunk are the parent's. If there is a mark, the map says nothing of the chunk and may have a hole there. The mark is a
//! checksum of the image's name with the chunk's number. So a hole in the map never says "the parent's". It says "missing", as it
//! does in every other image. Only four bytes that no hole and no other image has say more.

use std::fs::File;
use std::io;

use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkCount, ChunkIdx, PageIdx};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{ENTRY_SIZE, Entry, entry_offset, seal_of};
use crate::id::ImageId;

/// Bytes of a chunk's entries. They start at a multiple of this, so a kernel's page has them all.
pub(crate) const CHUNK_ENTRIES: usize = CHUNK_PAGES as usize * ENTRY_SIZE;
/// Bytes of a mark.
pub(crate) const MARK_SIZE: usize = 4;
/// Bytes that are written at once when a map is made.
const ZEROS: usize = 256 << 10;
/// The seed of a mark, beside the chunk's number: no seal of a page has it.
const MARK_SEED: u64 = 1 << 63;

/// The entries of a chunk.
pub(crate) type ChunkEntries = [Entry; CHUNK_PAGES as usize];

/// Bytes of the map of so many chunks.
pub(crate) const fn map_bytes(chunks: ChunkCount) -> u64 {
    chunks.0 as u64 * CHUNK_ENTRIES as u64
}

/// Bytes of `inherited` of so many chunks.
pub(crate) const fn marks_bytes(chunks: ChunkCount) -> u64 {
    chunks.0 as u64 * MARK_SIZE as u64
}

/// What `inherited` has for a chunk whose pages are all the parent's. Never 0.
pub(crate) fn mark_of(image: ImageId, chunk: ChunkIdx) -> u32 {
    (xxh3_64_with_seed(&image.0.to_le_bytes(), MARK_SEED | u64::from(chunk.0)) as u32).max(1)
}

/// Where a chunk's mark is in `inherited`.
pub(crate) const fn mark_offset(chunk: ChunkIdx) -> u64 {
    chunk.0 as u64 * MARK_SIZE as u64
}

/// Writes all of the file, so that no entry fails later for want of space.
pub(crate) fn fill_with_zeros(disk: &dyn Disk, file: &File, chunks: ChunkCount) -> io::Result<()> {
    let len = map_bytes(chunks);
    let zeros = vec![0; ZEROS.min(len as usize)];
    for offset in (0..len).step_by(ZEROS) {
        let part = (len - offset).min(ZEROS as u64) as usize;
        disk.write_at(file, &zeros[..part], offset)?;
    }
    Ok(())
}

/// Gives an empty file this length, of which only the end takes space.
pub(crate) fn extend_with_hole(disk: &dyn Disk, file: &File, len: u64) -> io::Result<()> {
    disk.write_at(file, &[0; MARK_SIZE], len - MARK_SIZE as u64)
}

/// Where an image says where its pages are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables<'a> {
    pub(crate) disk: &'a dyn Disk,
    pub(crate) id: ImageId,
    pub(crate) map: &'a File,
    /// The file `inherited`, if the image has a parent.
    pub(crate) marks: Option<&'a File>,
    /// Blocks that `pages` has.
    pub(crate) blocks: u64,
}

impl Tables<'_> {
    /// Whether all pages of a chunk are the parent's by its mark.
    pub(crate) fn is_marked(&self, chunk: ChunkIdx) -> Result<bool, ImageError> {
        let Some(marks) = self.marks else { return Ok(false) };
        let (mut bytes, offset) = ([0; MARK_SIZE], mark_offset(chunk));
        self.disk.read_at(marks, &mut bytes, offset).map_err(ImageError::io(ImageFile::Inherited, offset))?;
        match u32::from_le_bytes(bytes) {
            0 => Ok(false),
            mark if mark == mark_of(self.id, chunk) => Ok(true),
            mark => {
                let what = format!("{mark:#010x} is no mark of chunk {} in this image", chunk.0);
                Err(Damage::of_page(ImageFile::Inherited, chunk.first_page(), Bytes(offset), what).into())
            }
        }
    }

    /// The entries of a chunk.
    pub(crate) fn chunk(&self, chunk: ChunkIdx) -> Result<ChunkEntries, ImageError> {
        if self.is_marked(chunk)? {
            return Ok(std::array::from_fn(|index| self.parents(chunk.page(index as u8))));
        }
        self.chunk_of_map(chunk)
    }

    /// The same, if the chunk is not marked.
    pub(crate) fn chunk_of_map(&self, chunk: ChunkIdx) -> Result<ChunkEntries, ImageError> {
        let mut bytes = [0; CHUNK_ENTRIES];
        let offset = entry_offset(chunk.first_page());
        self.disk.read_at(self.map, &mut bytes, offset).map_err(ImageError::io(ImageFile::Map, offset))?;
        let (words, _) = bytes.as_chunks::<ENTRY_SIZE>();
        let mut entries = [Entry::Missing; CHUNK_PAGES as usize];
        for ((index, word), entry) in (0..=u8::MAX).zip(words).zip(&mut entries) {
            *entry = self.decode(chunk.page(index), u64::from_le_bytes(*word))?;
        }
        Ok(entries)
    }

    /// A page's entry, if its chunk is not marked.
    pub(crate) fn entry_of_map(&self, page: PageIdx) -> Result<Entry, ImageError> {
        let (mut bytes, offset) = ([0; ENTRY_SIZE], entry_offset(page));
        self.disk.read_at(self.map, &mut bytes, offset).map_err(ImageError::io(ImageFile::Map, offset))?;
        self.decode(page, u64::from_le_bytes(bytes))
    }

    /// The entry of a page that is the parent's.
    pub(crate) fn parents(&self, page: PageIdx) -> Entry {
        Entry::Parent { seal: seal_of(self.id, page) }
    }

    /// What an entry says, if it can be true.
    fn decode(&self, page: PageIdx, bits: u64) -> Result<Entry, ImageError> {
        let damaged = |what| Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), what);
        let what = match Entry::decode(bits).map_err(damaged)? {
            Entry::Block { block, .. } if u64::from(block.0) >= self.blocks => {
                format!("it is block {}, and `pages` ends after {}", block.0, self.blocks)
            }
            Entry::Parent { .. } if self.marks.is_none() => {
                "the page is in a parent, and the image has none".to_owned()
            }
            entry @ Entry::Parent { .. } if entry != self.parents(page) => {
                "it says that the page is in a parent, for another image or page".to_owned()
            }
            entry => return Ok(entry),
        };
        Err(damaged(what).into())
    }
}
