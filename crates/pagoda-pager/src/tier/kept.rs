//! What pages of a chunk held when they were about to leave DRAM, for a tier that cannot bring them back at once.

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;

use super::Content;
use crate::space::Space;

/// Copies of pages of one chunk.
#[derive(Debug)]
pub struct Kept {
    content: Vec<u8>,
    chunk: ChunkIdx,
    pages: PageSet,
}

impl Kept {
    /// Room for a chunk. The kernel gives it memory when it is used first.
    pub fn new() -> Kept {
        Kept { content: vec![0; CHUNK_SIZE as usize], chunk: ChunkIdx(0), pages: PageSet::EMPTY }
    }

    /// Copies these pages out of DRAM, but for those that a memory error has taken. Others that were kept before are not any more.
    pub fn keep(&mut self, space: &Space, chunk: ChunkIdx, pages: PageSet) {
        let location = space.locate_chunk(chunk);
        let (view, first) = (&location.region.view, location.pages().start);
        let is_readable = |start: u64, len: u64| view.make_readable(start..start + len).is_ok();
        let mut readable = PageSet::EMPTY;
        for run in pages.runs() {
            if is_readable(first + u64::from(run.start), u64::from(run.len)) {
                readable.set_range(run.start, run.len);
            } else {
                let pages = PageSet::range(run.start, run.len).iter();
                pages.filter(|index| is_readable(first + u64::from(*index), 1)).for_each(|index| readable.set(index));
            }
        }
        (self.chunk, self.pages) = (chunk, readable);
        for (index, content) in (0..=u8::MAX).zip(self.content.chunks_exact_mut(PAGE_SIZE as usize)) {
            if readable.contains(index) {
                view.read_page(first + u64::from(index), content);
            }
        }
    }

    /// Gives a page back that was kept.
    ///
    /// # Errors
    /// EIO: it was not.
    pub fn read_back(&self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        let index = page.index_in_chunk();
        if page.chunk() != self.chunk || !self.pages.contains(index) {
            return Err(Errno::IO);
        }
        let start = usize::from(index) * PAGE_SIZE as usize;
        out.copy_from_slice(&self.content[start..start + PAGE_SIZE as usize]);
        Ok(())
    }
}
