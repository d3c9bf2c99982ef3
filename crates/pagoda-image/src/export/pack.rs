//! Writes an exported file: it keeps the order of its records, and makes the end marker.

use pagoda_core::units::{Bytes, ChunkCount, ChunkIdx};

use super::chunk::{self, Packed};
use super::format::{HEADER_SIZE, Header, Kind, get_u64};
use super::sums::Sums;
use crate::manifest::Manifest;

/// Puts packed records in order, and counts. Runs of chunks that are all zero become one record.
#[derive(Debug)]
pub(crate) struct Assembly {
    sums: Sums,
    chunks: ChunkCount,
    next: ChunkIdx,
    /// The chunks right before `next` that are zero and in no record yet.
    zeros: u32,
}

impl Assembly {
    /// With the header and the manifest, of an image of which so many pages have content.
    ///
    /// # Errors
    /// The manifest could not be read back, in words.
    pub(crate) fn begin(manifest: &Manifest, blocks: u64) -> Result<(Assembly, Vec<u8>), String> {
        let text = manifest.to_text()?;
        let chunks = manifest.pages().chunks_ceil();
        let header = Header { manifest_len: text.len(), chunks, state: Bytes(manifest.state.bytes), blocks }.encode();
        let mut assembly = Assembly { sums: Sums::default(), chunks, next: ChunkIdx(0), zeros: 0 };
        assembly.sums.add(HEADER_SIZE, get_u64(&header, HEADER_SIZE - 8));
        let mut out = header.to_vec();
        out.extend(assembly.count(chunk::plain(Kind::Manifest, text.as_bytes())));
        Ok((assembly, out))
    }

    /// The next piece of QEMU's state.
    pub(crate) fn state(&mut self, piece: Packed) -> Vec<u8> {
        self.count(piece)
    }

    /// The next chunk with content.
    pub(crate) fn chunk(&mut self, packed: Packed, blocks: u64) -> Vec<u8> {
        let mut out = self.flush_zeros();
        self.sums.add_chunk(blocks);
        self.next.0 += 1;
        let record = self.count(packed);
        if out.is_empty() {
            return record;
        }
        out.extend(record);
        out
    }

    /// The next chunk is all zero.
    pub(crate) fn zero_chunk(&mut self) {
        self.sums.add_chunk(0);
        self.zeros += 1;
        self.next.0 += 1;
    }

    /// What is left, and the end. How many bytes the file has, pages with content, and zero pages.
    pub(crate) fn end(mut self) -> (Vec<u8>, Sums) {
        assert_eq!(self.next.0, self.chunks.0, "all chunks");
        let mut out = self.flush_zeros();
        let end = chunk::plain(Kind::End, &self.sums.encode());
        out.extend(self.count(end));
        (out, self.sums)
    }

    fn flush_zeros(&mut self) -> Vec<u8> {
        match std::mem::take(&mut self.zeros) {
            0 => Vec::new(),
            count => self.count(chunk::zeros(ChunkIdx(self.next.0 - count), count)),
        }
    }

    fn count(&mut self, packed: Packed) -> Vec<u8> {
        self.sums.add(packed.record.len(), packed.sum);
        packed.record
    }
}
