//! Reads of pages that only silent servers have wait here, not among the operations under way: a server that is away for
//! hours must not fill their slots, or pages of all others would wait with it.
//!
//! A queued read has asked nobody and begins anew when its slab is looked at again: a server is back, the map has
//! changed, the slab is lost, its servers have been silent for too long. What it returns then is as right as at first:
//! the version is the one that is known at that time.

use std::collections::VecDeque;

use super::Token;
use crate::client::index::SpaceIndex;
use crate::units::{Class, PageNo, SlabNo, SlabSize, Time};

/// Reads that wait so at a time; more keep their slots among the operations. A VM asks for some two thousand at most.
pub const QUEUED_READS_MAX: usize = 4096;

#[derive(Clone, Copy, Debug)]
pub struct QueuedRead {
    pub space: SpaceIndex,
    pub page: PageNo,
    pub class: Class,
    pub token: Token,
    pub since: Time,
}

#[derive(Debug)]
pub struct ReadQueue {
    all: VecDeque<QueuedRead>,
    /// Some could begin, and there was no slot for them.
    is_short: bool,
}

impl Default for ReadQueue {
    fn default() -> ReadQueue {
        ReadQueue { all: VecDeque::with_capacity(QUEUED_READS_MAX), is_short: false }
    }
}

impl ReadQueue {
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_full(&self) -> bool {
        self.all.len() >= QUEUED_READS_MAX
    }

    /// A read waits, behind all others.
    pub fn push(&mut self, queued: QueuedRead) {
        self.all.push_back(queued);
    }

    /// The one at this position.
    pub fn get(&self, at: usize) -> Option<QueuedRead> {
        self.all.get(at).copied()
    }

    /// Takes out the first one.
    pub fn next(&mut self) -> Option<QueuedRead> {
        self.all.pop_front()
    }

    /// The first one could begin, and there is no slot for it among the operations, nor for any other.
    pub fn wait_for_place(&mut self, queued: QueuedRead) {
        self.is_short = true;
        self.all.push_front(queued);
    }

    /// Whether some waited for a slot that there is now.
    pub fn has_place(&mut self, is_free: bool) -> bool {
        let had_to_wait = self.is_short && is_free;
        self.is_short &= !had_to_wait;
        had_to_wait
    }

    pub fn any_in(&self, space: SpaceIndex) -> bool {
        self.all.iter().any(|queued| queued.space == space)
    }

    pub fn any_of(&self, space: SpaceIndex, slab: SlabNo, size: SlabSize) -> bool {
        self.all.iter().any(|queued| queued.space == space && size.slab(queued.page) == Some(slab))
    }
}
