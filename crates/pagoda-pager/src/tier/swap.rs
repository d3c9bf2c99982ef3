//! The last tier: the VM's swap file. A page's block is at the page's own offset; a block that is a hole reads as zeros.
//!
//! Reads and writes go through the engine's ring, past the page cache. The file's own holes say which pages it has, so nothing
//! else has to be written for the next daemon.

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{IoError, Pages};
use pagoda_core::units::{CHUNK_PAGES, CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::{BufferSlice, FileId, Memory, Ring, RingError};
use pagoda_sys::swapfile::SwapFile;

use super::{Begun, Content, Counts, Io, Read, Step, Takes, Target, Tier, Write};
use crate::source::Source;

/// Bytes of one request: two requests of 512 KiB in flight beat one of 1 MiB by 10 % (throughput.md A).
const REQUEST_MAX: u64 = 512 << 10;
/// Write requests under way from which on no more are queued. A page-in that comes meanwhile stands behind them in the disk's
/// own queue, where no scheduler puts it first; enough to keep a disk busy, in large requests and in small ones.
const WRITES_MAX: usize = 16;
/// The same while pages come in one by one and there is time: the writes of a fragmented chunk are small and many, and each
/// that is under way makes a read of one page slower.
const WRITES_PACED: usize = 1;

/// The VM's swap file as a tier.
#[derive(Debug)]
pub struct SwapTier {
    file: SwapFile,
    /// Its number in the ring.
    id: Option<FileId>,
    /// Write requests under way.
    writes: usize,
    pages_in: u64,
    pages_out: u64,
}

impl SwapTier {
    /// The tier of this file.
    pub fn new(file: SwapFile) -> SwapTier {
        SwapTier { file, id: None, writes: 0, pages_in: 0, pages_out: 0 }
    }

    /// The swap file, in which each page has its own offset.
    pub fn file(&self) -> &SwapFile {
        &self.file
    }

    fn punch(&self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        for run in pages.runs() {
            let offset = Pages { chunk, run }.first().offset().0;
            self.file.punch(offset, u64::from(run.len) * PAGE_SIZE)?;
        }
        Ok(())
    }

    /// Queues one request after the other; the ring has room for all that the machine can have under way, or makes some.
    fn queue(
        &self,
        begun: &mut Begun,
        requests: impl Iterator<Item = (u64, u64)>,
        mut queue: impl FnMut(FileId, u64, u64) -> Result<(), RingError>,
    ) {
        for (at, len) in requests {
            match self.id.map(|file| queue(file, at, len)) {
                Some(Ok(())) => {
                    begun.parts += 1;
                    begun.bytes += len;
                }
                // The operation fails and the machine tries again.
                Some(Err(_)) | None => begun.error = Some(IoError::Failed(Errno::AGAIN.raw_os_error())),
            }
        }
    }
}

/// Offset from the run's start, and length, of each request of a run of pages.
pub(super) fn requests(run: Run) -> impl Iterator<Item = (u64, u64)> {
    let len = u64::from(run.len) * PAGE_SIZE;
    (0..len).step_by(REQUEST_MAX as usize).map(move |at| (at, (len - at).min(REQUEST_MAX)))
}

/// The memory that `len` bytes of the space from `offset` on are read into.
pub(super) fn memory_of(io: &Io<'_>, target: Target, offset: u64, len: u64) -> Memory {
    match target {
        Target::Buffer { id, first } => {
            BufferSlice { id, offset: (offset - first.offset().0) as u32, len: len as u32 }.into()
        }
        Target::Ram => {
            let location = io.space.locate_page(PageIdx(offset / PAGE_SIZE));
            location.region.view.io_target(location.offset, len as u32).into()
        }
    }
}

impl Tier for SwapTier {
    fn name(&self) -> &'static str {
        "swap"
    }

    fn attach(&mut self, ring: &mut Ring) -> Result<(), RingError> {
        self.id = Some(ring.add_file(self.file.as_fd())?);
        Ok(())
    }

    /// Unknown: only the file itself could tell. It has all blocks that no tier above has.
    fn holds(&self, _: ChunkIdx) -> PageSet {
        PageSet::EMPTY
    }

    fn takes(&self, has_time: bool) -> Takes {
        let writes_max = if has_time { WRITES_PACED } else { WRITES_MAX };
        if self.writes < writes_max { Takes::Now(Step::of_runs(has_time)) } else { Takes::Later }
    }

    fn read(&mut self, io: &mut Io<'_>, read: &Read) -> Begun {
        let mut begun = Begun::default();
        let key = Source::Io { tier: io.tier, op: read.op }.key();
        self.pages_in += u64::from(read.pages.count());
        for run in (read.pages | read.around).runs() {
            if (PageSet::range(run.start, run.len) & read.pages).is_empty() {
                continue;
            }
            let start = Pages { chunk: read.chunk, run }.first().offset().0;
            self.queue(&mut begun, requests(run), |file, at, len| {
                let into = memory_of(io, read.target, start + at, len);
                io.ring.read(file, start + at, into, key)
            });
        }
        begun
    }

    fn write(&mut self, io: &mut Io<'_>, write: &Write) -> Begun {
        let mut begun = Begun { overwritten: write.pages, ..Begun::default() };
        let key = Source::Io { tier: io.tier, op: write.op }.key();
        self.pages_out += u64::from(write.pages.count());
        for run in write.pages.runs() {
            let start = Pages { chunk: write.chunk, run }.first().offset().0;
            self.queue(&mut begun, requests(run), |file, at, len| {
                let from = memory_of(io, Target::Ram, start + at, len);
                io.ring.write(file, start + at, from, key)
            });
        }
        self.writes += usize::from(begun.parts);
        begun
    }

    fn ring_write_ended(&mut self) {
        self.writes -= 1;
    }

    /// What was written is there; blocks that another tier has now become holes.
    fn settle(&mut self, chunk: ChunkIdx, _: PageSet, lost: PageSet) -> Result<(), Errno> {
        self.punch(chunk, lost)
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        self.punch(chunk, pages)
    }

    fn clear(&mut self) -> Result<(), Errno> {
        self.file.punch(0, self.file.len())
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        out.copy_from_slice(self.file.read_page(page.0)?.bytes());
        Ok(())
    }

    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        let end = self.file.len();
        self.file.data_extents(&mut |offset, len| {
            let offset = offset.min(end);
            each_chunk(offset, len.min(end - offset), &mut *found);
        })
    }

    fn counts(&self) -> Counts {
        let disk_bytes = self.file.allocated().unwrap_or(0);
        let SwapTier { pages_in, pages_out, .. } = *self;
        Counts { pages: disk_bytes / PAGE_SIZE, disk_bytes, pages_in, pages_out, ..Counts::default() }
    }
}

/// Splits a byte range by chunks; a page counts as soon as a byte of it is in the range.
pub fn each_chunk(offset: u64, len: u64, found: &mut dyn FnMut(ChunkIdx, PageSet)) {
    let (mut at, end) = (offset / PAGE_SIZE * PAGE_SIZE, offset + len);
    while at < end {
        let stop = end.min((at / CHUNK_SIZE + 1) * CHUNK_SIZE);
        let pages = PageSet::range((at % CHUNK_SIZE / PAGE_SIZE) as u8, (stop - at).div_ceil(PAGE_SIZE) as u16);
        found(ChunkIdx((at / CHUNK_SIZE) as u32), pages);
        at = stop;
    }
}

/// An operation that reads or writes a whole chunk in one run is two requests.
const _: () = assert!(CHUNK_PAGES * PAGE_SIZE == 2 * REQUEST_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_split_by_chunks_and_rounded_to_pages() {
        let mut pieces = Vec::new();
        each_chunk(CHUNK_SIZE - 4097, 8192, &mut |chunk, pages| pieces.push((chunk.0, pages)));
        assert_eq!(pieces, [(0, PageSet::range(254, 2)), (1, PageSet::range(0, 1))]);
    }

    #[test]
    fn a_run_is_cut_into_requests() {
        let cut = |len| requests(Run { start: 3, len }).collect::<Vec<_>>();
        assert_eq!(cut(1), [(0, PAGE_SIZE)]);
        assert_eq!(cut(129), [(0, REQUEST_MAX), (REQUEST_MAX, PAGE_SIZE)]);
    }
}
