//! What a machine keeps about borrowed chunks. See `fault/borrow.rs`.

use crate::fault::table::Chunk;
use crate::units::{ChunkCount, ChunkIdx};

/// Chunks that became the VM's own one by one, from which on all others do too. Each splits a mapping of the template and one
/// of the RAM file, and a process has 65,530 mappings (`vm.max_map_count`): so they take at most half of them.
const OWNED_MAX: u64 = 10_000;

/// What the machine keeps about borrowed chunks, the sets of the chunks apart.
#[derive(Debug, Default)]
pub struct Borrow {
    /// So many chunks are borrowed.
    pub chunks: u64,
    /// So many pages of borrowed chunks are private.
    pub private: u64,
    /// So many pages of theirs have content and are not private.
    pub lent: u64,
    /// All of them are to become the VM's own.
    pub is_unwanted: bool,
    /// None may become the VM's own.
    pub is_kept: bool,
    /// None sets out before the next tick.
    pub is_paused: bool,
    /// One waits for direct I/O that may hold older pins.
    pub is_pin_blocked: bool,
    owned: u64,
    cursor: u32,
}

impl Borrow {
    /// The chunk is about to change.
    pub fn leave(&mut self, chunk: &Chunk) {
        self.chunks -= u64::from(chunk.borrowed);
        self.private -= u64::from(chunk.private.count());
        self.lent -= u64::from(chunk.lent().count());
    }

    /// The chunk has changed, or is new.
    pub fn enter(&mut self, chunk: &Chunk) {
        self.chunks += u64::from(chunk.borrowed);
        self.private += u64::from(chunk.private.count());
        self.lent += u64::from(chunk.lent().count());
    }

    /// Chunks, private pages, pages lent.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.chunks, self.private, self.lent)
    }

    /// A chunk became the VM's own.
    pub fn note_owned(&mut self) {
        self.owned += 1;
    }

    /// There is a reason for all of them to become the VM's own, whatever becomes of the VM.
    pub fn wants_all(&self) -> bool {
        !self.is_kept && (self.is_unwanted || self.owned >= OWNED_MAX)
    }

    /// The next chunk to look at.
    pub fn next(&mut self, chunks: ChunkCount) -> ChunkIdx {
        let chunk = ChunkIdx(self.cursor % chunks.0);
        self.cursor = (chunk.0 + 1) % chunks.0;
        chunk
    }
}
