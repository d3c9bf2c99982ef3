//! The cold list: chunks that were zapped and have not been touched since, the oldest first.

use std::collections::VecDeque;

use crate::fault::table::{Chunk, Phase};
use crate::units::ChunkIdx;

/// Length at the start, in chunks: two page-out batches.
const TARGET_START: usize = 8;
/// The list holds at most this part of the resident chunks.
const PART_MAX: usize = 8;
/// Outcomes after which the list's length is reconsidered.
const WINDOW: u32 = 32;

/// See the module. An entry is outdated when its chunk is not cold any more, or cold by a later entry.
#[derive(Debug)]
pub struct ColdList {
    entries: VecDeque<(ChunkIdx, u32)>,
    count: usize,
    seq: u32,
    target: usize,
    rescued: u32,
    evicted: u32,
}

impl ColdList {
    /// Of a VM of so many chunks.
    pub fn new(chunks: usize) -> ColdList {
        let entries = VecDeque::with_capacity(chunks);
        ColdList { entries, count: 0, seq: 0, target: TARGET_START, rescued: 0, evicted: 0 }
    }

    /// Counts the chunks that are cold.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many cold chunks there should be.
    pub fn target(&self) -> usize {
        self.target
    }

    /// Bytes of the list.
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<(ChunkIdx, u32)>()
    }

    /// A number for the next entry.
    pub fn next_seq(&mut self) -> u32 {
        self.seq = self.seq.wrapping_add(1);
        self.seq
    }

    /// The chunk is cold, by its phase.
    pub fn push(&mut self, chunk: ChunkIdx, chunks: &[Chunk]) {
        if self.entries.len() == self.entries.capacity() {
            // Full of outdated entries: there are never more cold chunks than chunks.
            self.entries.retain(|entry| is_true(*entry, chunks));
        }
        if let Phase::Cold { seq, .. } = chunks[chunk.as_usize()].phase {
            self.entries.push_back((chunk, seq));
            self.count += 1;
        }
    }

    /// The oldest cold chunk. Outdated entries before it are dropped.
    pub fn oldest(&mut self, chunks: &[Chunk]) -> Option<ChunkIdx> {
        while let Some(&entry) = self.entries.front() {
            if is_true(entry, chunks) {
                return Some(entry.0);
            }
            self.entries.pop_front();
        }
        None
    }

    /// The oldest chunk leaves the list.
    pub fn take_oldest(&mut self) {
        self.entries.pop_front();
        self.count -= 1;
    }

    /// A chunk is not cold any more. Its entry is outdated from now on.
    pub fn leave(&mut self) {
        self.count -= 1;
    }

    /// No chunk is cold.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.count = 0;
    }

    /// A chunk was touched while it was cold, or about to be; `resident`: chunks in DRAM.
    pub fn note_rescue(&mut self, resident: usize) {
        self.rescued += 1;
        self.reconsider(resident);
    }

    /// A cold chunk has left.
    pub fn note_eviction(&mut self, resident: usize) {
        self.evicted += 1;
        self.reconsider(resident);
    }

    fn reconsider(&mut self, resident: usize) {
        if self.rescued + self.evicted < WINDOW {
            return;
        }
        if self.rescued > self.evicted {
            self.target /= 2;
        } else {
            self.target = (self.target * 2 + 1).min((resident / PART_MAX).max(1));
        }
        (self.rescued, self.evicted) = (0, 0);
    }
}

fn is_true((chunk, entry): (ChunkIdx, u32), chunks: &[Chunk]) -> bool {
    matches!(chunks[chunk.as_usize()].phase, Phase::Cold { seq, .. } if seq == entry)
}
