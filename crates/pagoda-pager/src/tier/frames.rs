//! Frames of a share group as a tier, above all others: a shared page's content is its frame, whatever block it has below.
//!
//! Pages come to it by comparison, while they cannot change ([`crate::engine`], `share`), and leave it by a copy. So it takes no
//! page of a page-out, and its part in the rest is small: to bring content back, and to forget it.

use pagoda_core::bits::PageSet;
use pagoda_core::fault::IoError;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;

use super::{Begun, Content, Counts, Io, Read, Takes, Tier, Write};
use crate::share::Member;

impl Tier for Member {
    fn name(&self) -> &'static str {
        "shared"
    }

    fn holds(&self, chunk: ChunkIdx) -> PageSet {
        (0..=u8::MAX).filter(|index| self.frame_of(chunk.page(*index)).is_some()).collect()
    }

    fn takes(&self, _: bool) -> Takes {
        Takes::No
    }

    fn read(&mut self, io: &mut Io<'_>, read: &Read) -> Begun {
        let mut content = [0; PAGE_SIZE as usize];
        let brings = |index| {
            let page = read.chunk.page(index);
            Member::read(self, page, &mut content) && io.deliver(read.target, page, &content)
        };
        let all = read.pages.iter().all(brings);
        Begun { error: (!all).then_some(IoError::Lost), ..Begun::default() }
    }

    fn write(&mut self, _: &mut Io<'_>, write: &Write) -> Begun {
        Begun { declined: write.pages, ..Begun::default() }
    }

    /// Entries are written and cleared as pages are shared and copied back; a page-out changes none.
    fn settle(&mut self, _: ChunkIdx, _: PageSet, _: PageSet) -> Result<(), Errno> {
        Ok(())
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        pages.iter().for_each(|index| self.clear(chunk.page(index)));
        Ok(())
    }

    /// No page is shared; the table's memory is given back.
    fn clear(&mut self) -> Result<(), Errno> {
        self.trim();
        Ok(())
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        if Member::read(self, page, out) { Ok(()) } else { Err(Errno::NOENT) }
    }

    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        self.entries()?.into_iter().for_each(|(chunk, pages)| found(chunk, pages));
        Ok(())
    }

    fn counts(&self) -> Counts {
        Counts::default()
    }
}
