//! Runs of pages as bytes, in messages of both kinds of stream.

use pagoda_core::bits::Run;
use pagoda_core::units::{CHUNK_PAGES, ChunkIdx};

use super::fields::{Malformed, Reader, Writer};
use super::limits::VM_PAGES_MAX;
use crate::map::PageRun;

/// Bytes of a run: chunk (4), index of the first page (1), zero (1), number of pages (2).
pub(super) const RUN_SIZE: usize = 8;

pub(super) fn encode_run(run: PageRun, w: &mut Writer<'_>) {
    w.u32(run.chunk.0);
    w.u8(run.run.start);
    w.u8(0);
    w.u16(run.run.len);
}

pub(super) fn decode_run(r: &mut Reader<'_>) -> Result<PageRun, Malformed> {
    let chunk = decode_chunk(r)?;
    let start = r.u8("first page of a run")?;
    if r.u8("reserved byte of a run")? != 0 {
        return Err(Malformed("reserved byte of a run"));
    }
    let len = r.u16("pages of a run")?;
    if len == 0 || u64::from(start) + u64::from(len) > CHUNK_PAGES {
        return Err(Malformed("pages of a run"));
    }
    Ok(PageRun { chunk, run: Run { start, len } })
}

/// A chunk that some VM may have. Whether this one does is for the receiver to compare.
pub(super) fn decode_chunk(r: &mut Reader<'_>) -> Result<ChunkIdx, Malformed> {
    let chunk = r.u32("chunk")?;
    let is_possible = u64::from(chunk) < VM_PAGES_MAX.0 / CHUNK_PAGES;
    if is_possible { Ok(ChunkIdx(chunk)) } else { Err(Malformed("a chunk beyond any VM")) }
}
