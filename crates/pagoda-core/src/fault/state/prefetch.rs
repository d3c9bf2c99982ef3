//! What is still to be prefetched.

use std::collections::VecDeque;

use crate::bits::PageSet;
use crate::units::{ChunkCount, ChunkIdx};

/// Pages by chunk, in the order in which they come in. A chunk may be named more than once.
#[derive(Debug, Default)]
pub struct Prefetch {
    list: VecDeque<(ChunkIdx, PageSet)>,
    /// So many reads that prefetch pages are under way.
    pub in_flight: usize,
    /// When the rest is given up, once something was planned.
    pub until_ms: Option<u64>,
}

impl Prefetch {
    /// From now on these. Chunks outside the space are left out.
    pub fn set(&mut self, list: Vec<(ChunkIdx, PageSet)>, space: ChunkCount) {
        self.list = list.into();
        self.list.retain(|(chunk, _)| chunk.0 < space.0);
        self.until_ms = None;
    }

    /// These too, behind all others. What finds no room in the list is left out.
    pub fn add(&mut self, chunk: ChunkIdx, pages: PageSet, space: ChunkCount) {
        self.until_ms = None;
        let has_room = self.list.len() < space.as_usize();
        match self.list.back_mut() {
            _ if pages.is_empty() => {}
            Some((last, more)) if *last == chunk => *more |= pages,
            _ if has_room => self.list.push_back((chunk, pages)),
            _ => {}
        }
    }

    /// Gives the pages that are to come in next, which stay in the list.
    pub fn next(&self) -> Option<(ChunkIdx, PageSet)> {
        self.list.front().copied()
    }

    /// The next pages are not to be prefetched any more.
    pub fn drop_next(&mut self) {
        self.list.pop_front();
    }

    /// Nothing is to be prefetched any more.
    pub fn clear(&mut self) {
        self.list = VecDeque::new();
    }
}
