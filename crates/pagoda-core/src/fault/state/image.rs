//! What a machine keeps about images. See `fault/image.rs`.

use crate::units::{ChunkCount, ChunkIdx};

/// What the machine keeps about images, the sets of the chunks apart.
#[derive(Debug, Default)]
pub struct Images {
    /// Frozen pages.
    pub frozen: u64,
    preparing: bool,
    sweeps: u32,
    protect_cursor: u32,
}

impl Images {
    /// An image is to begin soon.
    pub fn is_preparing(&self) -> bool {
        self.preparing
    }

    /// See `Machine::sweeps`.
    pub fn sweeps(&self) -> u32 {
        self.sweeps
    }

    /// Preparation begins, goes on or ends. It begins at the first chunk.
    pub fn prepare(&mut self, on: bool) {
        if on && !self.preparing {
            self.begin_sweeps();
        }
        self.preparing = on;
    }

    /// No page has been protected yet.
    pub fn begin_sweeps(&mut self) {
        (self.sweeps, self.protect_cursor) = (0, 0);
    }

    /// An image has begun.
    pub fn begin(&mut self) {
        self.preparing = false;
    }

    /// The next chunk to protect, and whether it is the last of a sweep.
    pub fn next_to_protect(&mut self, chunks: ChunkCount) -> (ChunkIdx, bool) {
        let chunk = ChunkIdx(self.protect_cursor);
        self.protect_cursor = (chunk.0 + 1) % chunks.0;
        let is_last = self.protect_cursor == 0;
        self.sweeps = self.sweeps.saturating_add(u32::from(is_last));
        (chunk, is_last)
    }
}
