//! Compressed pages in this machine's memory.
//!
//! Content is kept in a file of a file system in memory, so it survives the daemon; a [`BlockMap`] beside it says where each page
//! is. A block is written before the map names it, and freed after the map has let go of it, so whatever a daemon that dies leaves
//! behind is whole. A page that does not become smaller by a quarter, or for which there is no room, is declined.
//!
//! The file is cut into segments of [`SEGMENT`] bytes. Each segment that is in use is cut into blocks of one size.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::path::PathBuf;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::IoError;
use pagoda_core::units::{Bytes, ChunkCount, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;

use super::block_map::BlockMap;
use super::{Begun, Content, Counts, Io, Read, STEP_RUNS, Step, Takes, Tier, Write};

/// Blocks are multiples of this.
const UNIT: u64 = 128;
/// The largest block: a page that takes more is declined, for it would save less than a quarter.
const UNITS_MAX: u64 = PAGE_SIZE * 3 / 4 / UNIT;
/// A segment: enough blocks of the largest size that little is left over.
const SEGMENT: u64 = 64 << 10;
const SEGMENT_UNITS: u64 = SEGMENT / UNIT;
/// Pages that are compressed between two looks at the faults: each takes some 3 us.
const STEP_PAGES: u16 = 8;

/// A block: where it is, and the length of what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    /// First unit in the file.
    unit: u64,
    /// Bytes, at most [`UNITS_MAX`] units.
    len: u16,
}

impl Block {
    const LEN_BITS: u32 = 16;

    fn units(len: u16) -> u64 {
        u64::from(len).div_ceil(UNIT)
    }

    /// The number that the map keeps.
    fn to_entry(self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.unit << Block::LEN_BITS | u64::from(self.len))
    }

    /// `None`: no block that this tier makes.
    fn of_entry(entry: NonZeroU64) -> Option<Block> {
        let block = Block { unit: entry.get() >> Block::LEN_BITS, len: entry.get() as u16 };
        let (units, inside) = (Block::units(block.len), block.unit % SEGMENT_UNITS);
        let fits = (1..=UNITS_MAX).contains(&units) && inside.is_multiple_of(units) && inside + units <= SEGMENT_UNITS;
        fits.then_some(block)
    }
}

/// One segment of the file.
#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    /// Units of each of its blocks; 0: it is not in use.
    units: u64,
    /// Blocks of the segment that are in use.
    used: u64,
}

/// Which blocks of the file are free.
#[derive(Debug)]
struct Allocator {
    segments: Vec<Segment>,
    /// Free blocks of each size, by their first unit.
    free: Vec<Vec<u64>>,
    free_segments: Vec<u64>,
    /// Segments that may be in use at a time.
    segments_max: u64,
}

impl Allocator {
    fn new(room: Bytes) -> Allocator {
        let free = vec![Vec::new(); UNITS_MAX as usize + 1];
        Allocator { segments: Vec::new(), free, free_segments: Vec::new(), segments_max: room.0 / SEGMENT }
    }

    /// What is free where these blocks are in use.
    ///
    /// # Errors
    /// Two of them cannot both be in use.
    fn recover(room: Bytes, blocks: impl Iterator<Item = Block>) -> Result<Allocator, Errno> {
        let mut allocator = Allocator::new(room);
        let mut used = std::collections::HashSet::new();
        for block in blocks {
            let units = Block::units(block.len);
            let index = (block.unit / SEGMENT_UNITS) as usize;
            if index >= allocator.segments.len() {
                allocator.segments.resize(index + 1, Segment::default());
            }
            let segment = &mut allocator.segments[index];
            if !used.insert(block.unit) || segment.units != 0 && segment.units != units {
                return Err(Errno::BADMSG);
            }
            (segment.units, segment.used) = (units, segment.used + 1);
        }
        for (index, segment) in (0..).zip(allocator.segments.clone()) {
            match segment.units {
                0 => allocator.free_segments.push(index),
                units => {
                    let all = blocks_of(index, units).filter(|unit| !used.contains(unit));
                    allocator.free[units as usize].extend(all);
                }
            }
        }
        Ok(allocator)
    }

    /// Less than a segment's worth of blocks is free, in whatever segments they are. Segments that are in use count too: a page
    /// that changes leaves one free block behind, and a segment may go on for long with a few blocks.
    fn is_full(&self) -> bool {
        let unused = self.segments_max.saturating_sub(self.used_segments()) * SEGMENT_UNITS;
        let free_blocks: u64 = (0..).zip(&self.free).map(|(units, blocks)| units * blocks.len() as u64).sum();
        unused + free_blocks < SEGMENT_UNITS
    }

    fn used_segments(&self) -> u64 {
        (self.segments.len() - self.free_segments.len()) as u64
    }

    /// A free block of this many units; `None`: there is no room.
    fn take(&mut self, units: u64) -> Option<u64> {
        if self.free[units as usize].is_empty() {
            if self.used_segments() >= self.segments_max {
                return None;
            }
            let index = self.free_segments.pop().unwrap_or_else(|| {
                self.segments.push(Segment::default());
                self.segments.len() as u64 - 1
            });
            self.segments[index as usize] = Segment { units, used: 0 };
            self.free[units as usize].extend(blocks_of(index, units));
        }
        let unit = self.free[units as usize].pop()?;
        self.segments[(unit / SEGMENT_UNITS) as usize].used += 1;
        Some(unit)
    }

    /// Gives a block back; the segment that has none in use any more, if it was the last of it.
    fn give(&mut self, block: Block) -> Option<u64> {
        let (units, index) = (Block::units(block.len), block.unit / SEGMENT_UNITS);
        let segment = &mut self.segments[index as usize];
        segment.used -= 1;
        self.free[units as usize].push(block.unit);
        if segment.used > 0 {
            return None;
        }
        *segment = Segment::default();
        self.free[units as usize].retain(|unit| unit / SEGMENT_UNITS != index);
        self.free_segments.push(index);
        Some(index)
    }
}

/// The first units of the blocks of a segment.
fn blocks_of(segment: u64, units: u64) -> impl Iterator<Item = u64> {
    (0..SEGMENT_UNITS / units).map(move |block| segment * SEGMENT_UNITS + block * units)
}

/// The compressed tier of one VM.
#[derive(Debug)]
pub struct CompressedTier {
    file: File,
    map: BlockMap,
    allocator: Allocator,
    /// Room for what a page compresses to.
    compressed: Vec<u8>,
    pages_in: u64,
    pages_out: u64,
    declined: u64,
}

impl CompressedTier {
    /// The files of a VM: its content, and where each page is in it.
    pub fn files(dir: &Path, vm_file_name: &str) -> [PathBuf; 2] {
        ["compressed", "blocks"].map(|ending| dir.join(format!("{vm_file_name}.{ending}")))
    }

    /// The tier of a VM of so many chunks, which may take so much memory. What a VM that is taken up (`taken_over`) has there stays.
    ///
    /// # Errors
    /// The files cannot be made, are not this VM's, or say what cannot be.
    pub fn open(
        [file, map]: &[PathBuf; 2],
        chunks: ChunkCount,
        room: Bytes,
        taken_over: bool,
    ) -> io::Result<CompressedTier> {
        let map = if taken_over { BlockMap::open(map, chunks)? } else { BlockMap::create(map, chunks)? };
        let mut options = OpenOptions::new();
        let file = options.create(!taken_over).truncate(!taken_over).read(true).write(true).mode(0o600).open(file)?;
        let unknown = || io::Error::new(io::ErrorKind::InvalidData, "a block that no daemon has made");
        let blocks: Option<Vec<Block>> = map.blocks().map(|(_, entry)| Block::of_entry(entry)).collect();
        let allocator = Allocator::recover(room, blocks.ok_or_else(unknown)?.into_iter())?;
        let compressed = vec![0; lz4_flex::block::get_maximum_output_size(PAGE_SIZE as usize)];
        Ok(CompressedTier { file, map, allocator, compressed, pages_in: 0, pages_out: 0, declined: 0 })
    }

    /// Keeps a page. False: it is declined.
    fn store(&mut self, page: PageIdx, content: &Content) -> io::Result<bool> {
        let len = lz4_flex::block::compress_into(content, &mut self.compressed).map_err(io::Error::other)?;
        let units = (len as u64).div_ceil(UNIT);
        let Some(unit) = (units <= UNITS_MAX).then(|| self.allocator.take(units)).flatten() else { return Ok(false) };
        let block = Block { unit, len: len as u16 };
        let written = self.file.write_all_at(&self.compressed[..len], unit * UNIT);
        match written.and_then(|()| self.map.set(page, block.to_entry())) {
            Ok(before) => {
                self.free(before);
                Ok(true)
            }
            // The file system is full. The page keeps the block that it had.
            Err(_) => {
                self.free(block.to_entry());
                Ok(false)
            }
        }
    }

    fn load(&self, page: PageIdx, out: &mut Content) -> io::Result<()> {
        let block = self.map.get(page).and_then(Block::of_entry).ok_or(io::ErrorKind::NotFound)?;
        let mut compressed = [0; (UNITS_MAX * UNIT) as usize];
        let compressed = &mut compressed[..usize::from(block.len)];
        self.file.read_exact_at(compressed, block.unit * UNIT)?;
        let len = lz4_flex::block::decompress_into(compressed, out).map_err(io::Error::other)?;
        if len == out.len() { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn free(&mut self, entry: Option<NonZeroU64>) {
        let Some(segment) = entry.and_then(Block::of_entry).and_then(|block| self.allocator.give(block)) else {
            return;
        };
        let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file, mode, segment * SEGMENT, SEGMENT) {
            // Its memory comes back when the segment is used again, or when the VM ends.
            tracing::debug!("give a segment of compressed memory back: {error}");
        }
    }
}

impl Tier for CompressedTier {
    fn name(&self) -> &'static str {
        "compressed"
    }

    fn holds(&self, chunk: ChunkIdx) -> PageSet {
        self.map.pages_of(chunk)
    }

    fn takes(&self, _: bool) -> Takes {
        if self.allocator.is_full() { Takes::No } else { Takes::Now(Step { runs: STEP_RUNS, pages: STEP_PAGES }) }
    }

    fn read(&mut self, io: &mut Io<'_>, read: &Read) -> Begun {
        let mut begun = Begun::default();
        let mut content = [0; PAGE_SIZE as usize];
        for index in read.pages.iter() {
            let page = read.chunk.page(index);
            match self.load(page, &mut content) {
                Ok(()) if io.deliver(read.target, page, &content) => self.pages_in += 1,
                Ok(()) => begun.error = Some(IoError::Failed(Errno::FAULT.raw_os_error())),
                Err(error) => {
                    tracing::error!(page = page.0, "a compressed page cannot be read: {error}");
                    begun.error = Some(IoError::Failed(Errno::IO.raw_os_error()));
                }
            }
        }
        begun
    }

    /// The guest may write to the pages meanwhile, so each is compressed from a copy.
    fn write(&mut self, io: &mut Io<'_>, write: &Write) -> Begun {
        let mut begun = Begun::default();
        let mut content = [0; PAGE_SIZE as usize];
        for index in write.pages.iter() {
            let page = write.chunk.page(index);
            io.take_content(page, &mut content);
            if self.store(page, &content).unwrap_or(false) {
                self.pages_out += 1;
                begun.overwritten.set(index);
            } else {
                self.declined += 1;
                begun.declined.set(index);
            }
        }
        begun
    }

    fn settle(&mut self, chunk: ChunkIdx, _: PageSet, lost: PageSet) -> Result<(), Errno> {
        self.drop_pages(chunk, lost)
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        for index in (pages & self.holds(chunk)).iter() {
            let before = self.map.set(chunk.page(index), None);
            let before = before.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            self.free(before);
        }
        Ok(())
    }

    fn clear(&mut self) -> Result<(), Errno> {
        (0..self.map.chunks()).map(ChunkIdx).try_for_each(|chunk| self.drop_pages(chunk, PageSet::FULL))
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.load(page, out).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        let chunks = (0..self.map.chunks()).map(ChunkIdx);
        chunks
            .map(|chunk| (chunk, self.holds(chunk)))
            .filter(|(_, pages)| !pages.is_empty())
            .for_each(|(c, p)| found(c, p));
        Ok(())
    }

    fn counts(&self) -> Counts {
        let CompressedTier { pages_in, pages_out, declined, .. } = *self;
        let memory_bytes = self.allocator.used_segments() * SEGMENT;
        Counts { pages: self.map.count(), memory_bytes, pages_in, pages_out, declined, ..Counts::default() }
    }
}

#[cfg(test)]
mod tests;
