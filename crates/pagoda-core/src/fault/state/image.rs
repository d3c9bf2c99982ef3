//! What a machine keeps about images. See `fault/image.rs`.

use crate::units::{ChunkCount, ChunkIdx};

/// Reads for an image that may fail one after the other before it is lost.
const KEEP_TRIES: u32 = 3;

/// What the machine keeps about images, the sets of the chunks apart.
#[derive(Debug, Default)]
pub struct Images {
    /// So many pages are frozen.
    pub frozen: u64,
    /// Pages that are known to be the newest image's.
    pub same: u64,
    /// The last `Fill` found nothing that could be done at that moment.
    pub is_fill_blocked: bool,
    /// Of the newest image; reads that an older one asked for are told by it.
    number: u32,
    /// `Keep`s that have failed one after the other.
    failed_keeps: u32,
    fill_cursor: u32,
    preparing: bool,
    sweeps: u32,
    protect_cursor: u32,
}

impl Images {
    /// An image is to begin soon.
    pub fn is_preparing(&self) -> bool {
        self.preparing
    }

    /// Counts how often all pages have been protected since preparation began.
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
        self.number = self.number.wrapping_add(1);
        (self.preparing, self.failed_keeps, self.fill_cursor) = (false, 0, 0);
    }

    /// The number of the newest image.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// A `Keep` has come to its end.
    pub fn note_keep(&mut self) {
        self.failed_keeps = 0;
    }

    /// A `Keep` has failed. True: too often.
    pub fn note_failed_keep(&mut self) -> bool {
        self.failed_keeps += 1;
        self.failed_keeps >= KEEP_TRIES
    }

    /// The chunk to go on with.
    pub fn next_to_fill(&self) -> ChunkIdx {
        ChunkIdx(self.fill_cursor)
    }

    /// Nothing of that chunk can be done now.
    pub fn leave_filled(&mut self, chunks: ChunkCount) {
        self.fill_cursor = (self.fill_cursor + 1) % chunks.0;
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
