//! What one page of a group is, from that page of all others: a *stripe* is read, still sealed, and put together by XOR.
//!
//! Members are opened as they come, and what a member's page comes to is opened before it counts: nothing that a server made
//! up gets through, or into another slab. A bounded number of stripes is under way; room for their pages is allocated at the
//! start. Others wait for their turn.

mod assemble;

use std::collections::VecDeque;

use super::super::copies::COPIES_MAX;
use super::super::outcome::OPS_MAX;
use super::layout::MEMBERS;
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::units::{PageNo, SEALED_SIZE, SlabNo, Version};

/// Reads that are put together at a time: with four pages each, half of what may be under way.
const READS_MAX: usize = 32;

/// What a stripe is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Of a caller's operation.
    Read { op: OpIndex },
    /// Of a slab that is made anew: the stripe has the place of the copy.
    Copy,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    purpose: Purpose,
    space: SpaceIndex,
    slab: SlabNo,
    index: usize,
    version: Version,
    /// Pages that did not come yet.
    left: usize,
}

/// Stripes under way.
#[derive(Debug)]
pub struct Stripes {
    jobs: Vec<Option<Job>>,
    buffers: Vec<Box<[u8]>>,
    /// Reads that wait for their turn, or are to be begun anew.
    pub waiting: VecDeque<OpIndex>,
}

/// Where a page of a stripe is read.
#[derive(Clone, Copy, Debug)]
struct Source {
    peer: PeerIndex,
    page: PageNo,
    version: Version,
}

type Sources = [Option<Source>; MEMBERS];

impl Stripes {
    pub fn new() -> Stripes {
        let count = COPIES_MAX + READS_MAX;
        Stripes {
            jobs: vec![None; count],
            buffers: (0..count).map(|_| vec![0; SEALED_SIZE].into()).collect(),
            waiting: VecDeque::with_capacity(OPS_MAX),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.jobs.iter().all(Option::is_none) && self.waiting.is_empty()
    }

    fn free_for_read(&self) -> Option<usize> {
        (COPIES_MAX..self.jobs.len()).find(|job| self.jobs[*job].is_none())
    }

    pub fn has_turn(&self) -> bool {
        !self.waiting.is_empty() && self.free_for_read().is_some()
    }

    fn of_read(&self, op: OpIndex) -> Option<usize> {
        let own = |job: &Option<Job>| job.is_some_and(|job| job.purpose == Purpose::Read { op });
        self.jobs.iter().position(own)
    }
}
