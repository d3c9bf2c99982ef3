//! A *stripe* is the page at one place of every slab of a group. It is read, still sealed, and what is missing of it is put
//! together by XOR.
//!
//! Members are opened as they come, and what a member's page comes to is opened before it counts. So nothing that a server made
//! up gets through, or into another slab. A bounded number of stripes is under way, and room for their pages is allocated at the
//! start. Others wait for their turn. [`Stripes`] owns all of that. `assemble.rs` asks for pages and hands over what comes.

use std::collections::VecDeque;

use super::super::copies::COPIES_MAX;
use super::super::outcome::OPS_MAX;
use super::layout::MEMBERS;
use crate::client::index::{CopyIndex, List, OpIndex, PeerIndex, SpaceIndex, StripeIndex};
use crate::units::{PageNo, SEALED_SIZE, SlabNo, Version};

/// Reads that are put together at a time: with four pages each, half of what may be under way.
const READS_MAX: usize = 32;

/// What a stripe is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Of a caller's operation.
    Read { op: OpIndex },
    /// Of a slab that is made anew.
    Copy { copy: CopyIndex },
}

#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub purpose: Purpose,
    pub space: SpaceIndex,
    pub slab: SlabNo,
    pub index: usize,
    pub version: Version,
}

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    job: Job,
    /// Pages that did not come yet.
    left: usize,
}

/// Stripes under way, by number: those of copies have the numbers of these, those of reads the ones after them.
#[derive(Debug)]
pub struct Stripes {
    jobs: List<StripeIndex, Option<UnderWay>>,
    /// The XOR of what has come of each.
    sums: List<StripeIndex, Box<[u8]>>,
    /// Reads that wait for their turn, or are to be begun anew.
    waiting: VecDeque<OpIndex>,
}

/// Where a page of a stripe is read.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub peer: PeerIndex,
    pub page: PageNo,
    pub version: Version,
}

pub type Sources = [Option<Source>; MEMBERS];

impl Stripes {
    pub fn new() -> Stripes {
        let count = COPIES_MAX + READS_MAX;
        Stripes {
            jobs: (0..count).map(|_| None).collect(),
            sums: (0..count).map(|_| vec![0; SEALED_SIZE].into()).collect(),
            waiting: VecDeque::with_capacity(OPS_MAX),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.jobs.iter().all(Option::is_none) && self.waiting.is_empty()
    }

    /// The stripes that reads may use; those of copies come before them.
    pub fn of_reads(&self) -> impl Iterator<Item = StripeIndex> + use<> {
        self.jobs.indices().skip(COPIES_MAX)
    }

    /// The one of a copy.
    pub fn of_copy(copy: CopyIndex) -> StripeIndex {
        StripeIndex(copy.0)
    }

    pub fn free_for_read(&self) -> Option<StripeIndex> {
        self.of_reads().find(|stripe| self.jobs[*stripe].is_none())
    }

    /// Whether a read that waits can begin.
    pub fn has_turn(&self) -> bool {
        !self.waiting.is_empty() && self.free_for_read().is_some()
    }

    pub fn get(&self, stripe: StripeIndex) -> Option<Job> {
        self.jobs[stripe].map(|under_way| under_way.job)
    }

    /// The stripe of a read, if it has one.
    pub fn of_read(&self, op: OpIndex) -> Option<StripeIndex> {
        let own = |under_way: &Option<UnderWay>| {
            under_way.is_some_and(|under_way| under_way.job.purpose == Purpose::Read { op })
        };
        self.jobs.position(own)
    }

    /// Begins a stripe of so many pages.
    pub fn begin(&mut self, stripe: StripeIndex, job: Job, pages: usize) {
        self.jobs[stripe] = Some(UnderWay { job, left: pages });
        self.sums[stripe].fill(0);
    }

    pub fn end(&mut self, stripe: StripeIndex) -> Option<Job> {
        self.jobs[stripe].take().map(|under_way| under_way.job)
    }

    /// Another page of a stripe has come. Its job, if it was the last; until then, nothing. A page that `counts` not is left out.
    pub fn add(&mut self, stripe: StripeIndex, page: &[u8], counts: impl FnOnce(&Job, bool) -> bool) -> Option<Job> {
        let under_way = self.jobs[stripe].as_mut()?;
        under_way.left -= 1;
        let (job, is_last) = (under_way.job, under_way.left == 0);
        if counts(&job, is_last) {
            self.sums[stripe].iter_mut().zip(page).for_each(|(sum, byte)| *sum ^= byte);
        }
        is_last.then_some(job)
    }

    /// What the pages of a stripe come to.
    pub fn sum(&self, stripe: StripeIndex) -> &[u8] {
        &self.sums[stripe]
    }

    pub fn is_waiting(&self, op: OpIndex) -> bool {
        self.waiting.contains(&op)
    }

    /// A read waits for its turn.
    pub fn wait(&mut self, op: OpIndex) {
        if !self.is_waiting(op) {
            self.waiting.push_back(op);
        }
    }

    /// What a read has asked for does not come: it begins anew once all that changes at this moment has changed.
    pub fn begin_anew(&mut self, op: OpIndex) {
        self.waiting.push_back(op);
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The next read whose turn it is.
    pub fn next_waiting(&mut self) -> Option<OpIndex> {
        if self.has_turn() { self.waiting.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stripe_is_whole_with_its_last_page() {
        let (mut stripes, op) = (Stripes::new(), OpIndex(7));
        let (space, slab, version) = (SpaceIndex(0), SlabNo(3), Version::NEVER);
        let job = Job { purpose: Purpose::Read { op }, space, slab, index: 1, version };
        let stripe = stripes.free_for_read().unwrap();
        stripes.begin(stripe, job, 2);
        assert_eq!((stripes.of_read(op), stripes.is_idle()), (Some(stripe), false));
        assert!(stripes.add(stripe, &[5; SEALED_SIZE], |_, _| true).is_none());
        assert!(stripes.add(stripe, &[6; SEALED_SIZE], |_, is_last| is_last).is_some());
        assert_eq!(*stripes.sum(stripe), [3; SEALED_SIZE]);
        assert!(stripes.end(stripe).is_some() && stripes.end(stripe).is_none() && stripes.is_idle());
    }

    #[test]
    fn reads_wait_for_their_turn_once() {
        let mut stripes = Stripes::new();
        let job = |op| {
            let purpose = Purpose::Read { op: OpIndex(op) };
            Job { purpose, space: SpaceIndex(0), slab: SlabNo(0), index: 0, version: Version::NEVER }
        };
        while let Some(stripe) = stripes.free_for_read() {
            stripes.begin(stripe, job(stripe.0), 1);
        }
        (0..2).for_each(|_| stripes.wait(OpIndex(1)));
        assert_eq!((stripes.waiting(), stripes.next_waiting()), (1, None));
        stripes.end(stripes.of_reads().next().unwrap());
        assert_eq!((stripes.next_waiting(), stripes.waiting()), (Some(OpIndex(1)), 0));
    }
}
