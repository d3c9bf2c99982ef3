//! A chunk's record: which pages have content, their checksums, and their content, compressed if that is shorter.
//!
//! | payload's bytes | what |
//! |---|---|
//! | 32 | a bit for each page, the lowest one first: it has content; the others are zero |
//! | 4 for each such page | its checksum, as the image has it ([`sum_of`]) |
//! | the rest | the pages, one behind the other; one zstd frame of them if that is shorter |
//!
//! A piece of QEMU's state is compressed in the same way.

use pagoda_core::bits::PageSet;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use zstd::bulk::{Compressor, Decompressor};

use super::format::{
    BITMAP_SIZE, CHUNK_PAYLOAD_MAX, Kind, RECORD_HEADER_SIZE, RecordHead, STATE_PIECE_MAX, SUM_SIZE, get_u32,
};
use crate::entry::sum_of;

const PAGE: usize = PAGE_SIZE as usize;

/// How much is tried to make a file short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Everything is stored as it is.
    Stored,
    /// A level of zstd: 1, the fastest, to [`Level::MAX`].
    Zstd(u8),
}

impl Level {
    /// The highest level that needs no more memory to be read than the chunk itself.
    pub const MAX: u8 = 19;
}

/// A record, ready to be written, with its checksum.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) record: Vec<u8>,
    pub(crate) sum: u64,
}

/// Makes records. One for each thread: it has a compressor's memory.
pub(crate) struct Packer(Option<Compressor<'static>>);

impl Packer {
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn new(level: Level) -> std::io::Result<Packer> {
        match level {
            Level::Stored => Ok(Packer(None)),
            Level::Zstd(level) => Compressor::new(i32::from(level)).map(Some).map(Packer),
        }
    }

    /// A chunk of which these pages have content: their checksums and their bytes, in order.
    pub(crate) fn chunk(&mut self, chunk: ChunkIdx, pages: PageSet, sums: &[u32], content: &[u8]) -> Packed {
        let count = usize::from(pages.count());
        assert!(count > 0 && sums.len() == count && content.len() == count * PAGE, "as many pages");
        let mut record = vec![0; RECORD_HEADER_SIZE + BITMAP_SIZE];
        for index in pages.iter() {
            record[RECORD_HEADER_SIZE + usize::from(index) / 8] |= 1 << (index % 8);
        }
        sums.iter().for_each(|sum| record.extend_from_slice(&sum.to_le_bytes()));
        self.add(&mut record, content);
        finish(Kind::Chunk, chunk.0, count as u32, record)
    }

    /// A piece of QEMU's state.
    pub(crate) fn state(&mut self, index: u32, piece: &[u8]) -> Packed {
        assert!((1..=STATE_PIECE_MAX).contains(&piece.len()), "a piece");
        let mut record = vec![0; RECORD_HEADER_SIZE];
        self.add(&mut record, piece);
        finish(Kind::State, index, piece.len() as u32, record)
    }

    /// Appends the bytes, compressed if that is shorter.
    fn add(&mut self, record: &mut Vec<u8>, bytes: &[u8]) {
        let start = record.len();
        if let Some(compressor) = &mut self.0 {
            record.resize(start + bytes.len() - 1, 0);
            // What does not fit is not shorter.
            if let Ok(len) = compressor.compress_to_buffer(bytes, &mut record[start..]) {
                return record.truncate(start + len);
            }
            record.truncate(start);
        }
        record.extend_from_slice(bytes);
    }
}

/// Chunks that are all zero.
pub(crate) fn zeros(first: ChunkIdx, count: u32) -> Packed {
    finish(Kind::Zeros, first.0, count, vec![0; RECORD_HEADER_SIZE])
}

/// A record with this payload.
pub(crate) fn plain(kind: Kind, payload: &[u8]) -> Packed {
    let mut record = vec![0; RECORD_HEADER_SIZE];
    record.extend_from_slice(payload);
    finish(kind, 0, 0, record)
}

fn finish(kind: Kind, index: u32, count: u32, mut record: Vec<u8>) -> Packed {
    let payload_len = record.len() - RECORD_HEADER_SIZE;
    let sum = RecordHead { kind, index, count, payload_len }.seal(&mut record);
    Packed { record, sum }
}

/// What a chunk's record has, but for the content.
#[derive(Debug)]
pub(crate) struct ChunkTable {
    pub(crate) pages: PageSet,
    pub(crate) sums: Vec<u32>,
    /// Where the content begins in the payload.
    pub(crate) content_at: usize,
}

/// Reads what stands before the content.
///
/// # Errors
/// Which byte of the payload is wrong, and why.
pub(crate) fn read_table(payload: &[u8], count: u32) -> Result<ChunkTable, (usize, String)> {
    if !(1..=PageSet::FULL.count() as u32).contains(&count) {
        return Err((0, format!("{count} pages with content: a chunk has 1 to 256")));
    }
    let content_at = BITMAP_SIZE + count as usize * SUM_SIZE;
    if payload.len() <= content_at || payload.len() > CHUNK_PAYLOAD_MAX {
        return Err((0, format!("{} bytes for a chunk with {count} pages", payload.len())));
    }
    let has_content = |index: &u8| payload[usize::from(*index) / 8] & (1 << (index % 8)) != 0;
    let pages: PageSet = (0..=u8::MAX).filter(has_content).collect();
    if u32::from(pages.count()) != count {
        return Err((0, format!("{} pages are marked, and {count} should be", pages.count())));
    }
    let sums = (0..count as usize).map(|index| get_u32(payload, BITMAP_SIZE + index * SUM_SIZE)).collect();
    Ok(ChunkTable { pages, sums, content_at })
}

/// Gets content of a known length out of a record: never more than that.
pub(crate) struct Unpacker(Decompressor<'static>);

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unpacker")
    }
}

impl Unpacker {
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn new() -> std::io::Result<Unpacker> {
        Decompressor::new().map(Unpacker)
    }

    /// Fills `content`, whose length is what the record says.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn unpack(&mut self, packed: &[u8], content: &mut [u8]) -> Result<(), String> {
        if packed.len() == content.len() {
            content.copy_from_slice(packed);
            return Ok(());
        }
        if packed.is_empty() || packed.len() > content.len() {
            return Err(format!("{} bytes that stand for {}", packed.len(), content.len()));
        }
        // It writes no byte more than `content` has, whatever the frame says of itself.
        match self.0.decompress_to_buffer(packed, content) {
            Ok(len) if len == content.len() => Ok(()),
            Ok(len) => Err(format!("its zstd frame has {len} bytes, and stands for {}", content.len())),
            Err(error) => Err(format!("its zstd frame of {} bytes cannot be read: {error}", packed.len())),
        }
    }
}

/// Compares pages with their checksums.
///
/// # Errors
/// The first page that does not match.
pub(crate) fn check_pages(chunk: ChunkIdx, table: &ChunkTable, content: &[u8]) -> Result<(), PageIdx> {
    let (pages, _) = content.as_chunks::<PAGE>();
    for ((index, sum), content) in table.pages.iter().zip(&table.sums).zip(pages) {
        let page = chunk.page(index);
        if sum_of(page, content) != *sum {
            return Err(page);
        }
    }
    Ok(())
}
