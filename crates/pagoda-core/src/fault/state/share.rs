//! What a machine keeps about sharing. See `fault/share.rs`.

use std::collections::VecDeque;

use crate::units::ChunkIdx;

/// Whether equal pages are looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// Never. What is shared already is copied back when it is touched.
    #[default]
    Off,
    /// When a page leaves for swap.
    PageOut,
    /// Also in chunks that are cold and need not leave. The VM is armed for it.
    Scan,
}

/// What the machine keeps about sharing, the sets of the chunks apart.
#[derive(Debug)]
pub struct Share {
    /// So many pages of the VM are shared.
    pub pages: u64,
    /// The VM's part of its frames, in pages.
    pub charged: u64,
    /// Cold chunks with pages to look at, the oldest first: the number of the chunk's entry in the cold list, and since
    /// when. Exactly one entry of each such chunk is true; the others are outdated.
    pub queue: VecDeque<(ChunkIdx, u32, u64)>,
    /// The next chunk whose pages are copied back.
    pub back_cursor: u32,
    /// The oldest chunk to look at waits for direct I/O that may hold older pins.
    pub blocked: bool,
}

impl Share {
    /// Of a VM of so many chunks.
    pub fn new(chunks: usize) -> Share {
        Share { pages: 0, charged: 0, queue: VecDeque::with_capacity(chunks), back_cursor: 0, blocked: false }
    }

    /// Nothing is to be looked at.
    pub fn forget_queue(&mut self) {
        self.queue.clear();
    }
}
