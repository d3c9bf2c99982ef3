//! The file `map`: an entry for each page of the VM, in order, without a header. It has its whole length from the beginning.

use std::fs::File;
use std::io;

use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkCount, ChunkIdx, PageIdx};

use crate::damage::{Damage, ImageError, ImageFile};
use crate::disk::Disk;
use crate::entry::{ENTRY_SIZE, Entry, entry_offset};

/// Bytes of a chunk's entries. They start at a multiple of this, so a kernel's page has them all.
pub(crate) const CHUNK_ENTRIES: usize = CHUNK_PAGES as usize * ENTRY_SIZE;
/// Bytes that are written at once when a map is made.
const ZEROS: usize = 256 << 10;

/// Bytes of the map of so many chunks.
pub(crate) const fn map_bytes(chunks: ChunkCount) -> u64 {
    chunks.0 as u64 * CHUNK_ENTRIES as u64
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

/// The entries of a chunk as they are in the file.
pub(crate) fn read_chunk(
    disk: &dyn Disk,
    file: &File,
    chunk: ChunkIdx,
) -> Result<[u64; CHUNK_PAGES as usize], ImageError> {
    let mut bytes = [0; CHUNK_ENTRIES];
    let offset = entry_offset(chunk.first_page());
    disk.read_at(file, &mut bytes, offset).map_err(ImageError::io(ImageFile::Map, offset))?;
    let (entries, _) = bytes.as_chunks::<ENTRY_SIZE>();
    Ok(std::array::from_fn(|index| u64::from_le_bytes(entries[index])))
}

/// One entry as it is in the file.
pub(crate) fn read_entry(disk: &dyn Disk, file: &File, page: PageIdx) -> Result<u64, ImageError> {
    let mut bytes = [0; ENTRY_SIZE];
    disk.read_at(file, &mut bytes, entry_offset(page)).map_err(ImageError::io(ImageFile::Map, entry_offset(page)))?;
    Ok(u64::from_le_bytes(bytes))
}

/// What an entry says, if it can be true: its block is one of the first `blocks`.
pub(crate) fn decode(page: PageIdx, bits: u64, blocks: u64) -> Result<Entry, ImageError> {
    let damaged = |what| Damage::of_page(ImageFile::Map, page, Bytes(entry_offset(page)), what);
    match Entry::decode(bits).map_err(damaged)? {
        Entry::Block { block, .. } if u64::from(block.0) >= blocks => {
            let what = format!("it is block {}, and `pages` ends after {blocks}", block.0);
            Err(damaged(what).into())
        }
        entry => Ok(entry),
    }
}
