//! Miss-ratio curve of one VM: what part of its accesses would miss if it had so many pages, for every number of pages.
//!
//! The *reuse distance* of an access is the number of different pages used since the page was used before. With c pages
//! under LRU it hits if its distance is below c (Mattson et al., "Evaluation techniques for storage hierarchies", 1970), so
//! one histogram of distances answers for all sizes. Distances of all pages cost too much; SHARDS (Waldspurger, Park,
//! Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015) watches a page only if its hashed number is
//! below a threshold T of a modulus P, and multiplies distances and counts by P / T. Of the paper:
//!
//! * *fixed size*: at most s pages are watched; one more, and those with the largest hash go and T falls to it (section 4.2);
//! * *adjusted*: accesses that sampling over- or under-represents are put right at distance 0 (section 5.3, SHARDS-adj).
//!
//! # Two inputs
//!
//! [`Mrc::access`] is for traces, which have every access. A pager sees few: [`Mrc::sampled`] takes those of *watched* pages
//! only, as they are seen when a page that was unmapped is touched; what happens between two unmappings is one access, and
//! counts as none. So all accesses whose distance is large are seen, which are those that would be faults at some size;
//! accesses at small distances are missing. [`Curve::misses`], the number of faults over the time observed, is right then, and
//! the ratio is one of *observed* accesses.
//!
//! In the daemon `crate::fault` feeds it (`fault/curve.rs`). Refaults need nothing of their own: watched pages are watched
//! while they are in swap, too. A VM that has no faults has its curve from ages ([`footprint`]).
//!
//! **Cost.** O(log s) per watched access, one hash for each other; about 100 bytes per watched page, 1 MiB in all.

pub mod curve;
pub mod footprint;
pub mod stack;
#[cfg(test)]
mod tests;
pub mod workloads;

use std::collections::BinaryHeap;

pub use curve::Curve;
use stack::Stack;

use crate::chance::mix;
use crate::units::{PageCount, PageIdx};

/// Pages watched at most: "s_max = 8K" has a mean error below 0.01 in the paper's traces (section 5.2, figure 6).
pub const WATCHED_MAX_DEFAULT: usize = 8192;
/// SHARDS' P: rates down to 6 in 10^8.
const MODULUS: u64 = 1 << 24;
/// Points of a curve: steps of 0.1 % of the VM's memory.
const BUCKETS: u64 = 1000;

/// The histogram of reuse distances of one VM.
#[derive(Clone, Debug)]
pub struct Mrc {
    seed: u64,
    memory: PageCount,
    watched_max: usize,
    /// A page is watched if its hash is below this: T of SHARDS.
    threshold: u64,
    stack: Stack,
    /// Pages of the memory that the threshold lets in, if somebody has counted them.
    counted: Option<usize>,
    /// The watched pages, largest hash first.
    by_hash: BinaryHeap<(u64, PageIdx)>,
    bucket: PageCount,
    /// Accesses by distance; the last bucket is all that is beyond the memory.
    histogram: Vec<f64>,
    cold: f64,
    /// Accesses of traces, and those that the watched ones stand for.
    seen: f64,
    stood_for: f64,
}

impl Mrc {
    /// For a VM of this size. `seed` decides which pages are watched.
    ///
    /// # Panics
    /// `watched_max` is 0.
    pub fn new(memory: PageCount, watched_max: usize, seed: u64) -> Mrc {
        assert!(watched_max > 0, "nothing can be learnt from no page");
        let bucket = PageCount(memory.0.div_ceil(BUCKETS).max(1));
        let buckets = memory.0.div_ceil(bucket.0) as usize + 1;
        Mrc {
            seed: mix(seed),
            memory,
            watched_max,
            threshold: MODULUS,
            counted: None,
            stack: Stack::default(),
            by_hash: BinaryHeap::new(),
            bucket,
            histogram: vec![0.0; buckets],
            cold: 0.0,
            seen: 0.0,
            stood_for: 0.0,
        }
    }

    /// Whether this page is watched now. Of all pages, a part that falls as more pages are used.
    pub fn watches(&self, page: PageIdx) -> bool {
        self.hash(page) < self.threshold
    }

    /// The part of all pages that is watched.
    pub fn rate(&self) -> f64 {
        match self.counted {
            Some(pages) if pages > 0 => pages as f64 / self.memory.0 as f64,
            _ => self.threshold as f64 / MODULUS as f64,
        }
    }

    /// So many pages of the memory are watched, exactly: chance has chosen some more or less than the threshold says.
    pub fn set_watched(&mut self, pages: usize) {
        self.counted = Some(pages);
    }

    /// Watches from now on so many of all pages, on average; never more than before. What was counted keeps its weight.
    pub fn narrow(&mut self, pages: u64) {
        let threshold = u128::from(MODULUS) * u128::from(pages) / u128::from(self.memory.0.max(1));
        let threshold = (threshold.max(1)).min(u128::from(MODULUS)) as u64;
        if threshold < self.threshold {
            self.threshold = threshold;
            self.drop_above();
        }
    }

    /// An access of a trace that has all of them.
    pub fn access(&mut self, page: PageIdx) {
        self.seen += 1.0;
        if self.watches(page) {
            self.stood_for += 1.0 / self.rate();
            self.sampled(page);
        }
    }

    /// An access to a watched page, by somebody who does not see the others. Any other page is ignored.
    pub fn sampled(&mut self, page: PageIdx) {
        if !self.watches(page) {
            return;
        }
        let weight = 1.0 / self.rate();
        match self.stack.touch(page) {
            Some(distance) => self.count((distance as f64 / self.rate()) as u64, weight),
            None => {
                self.cold += weight;
                self.watch(page);
            }
        }
    }

    /// The same of a page that was used before, if only before anybody looked. Then its distance is what was used since, at
    /// least.
    pub fn used_again(&mut self, page: PageIdx) {
        if !self.watches(page) || self.stack.contains(page) {
            return self.sampled(page);
        }
        self.count((self.stack.len() as f64 / self.rate()) as u64, 1.0 / self.rate());
        self.stack.touch(page);
        self.watch(page);
    }

    /// The page has lost its content: its next use is a first one.
    pub fn forget(&mut self, page: PageIdx) {
        if self.stack.contains(page) {
            self.stack.forget(page);
            self.by_hash.retain(|(_, other)| *other != page);
        }
    }

    /// Halves the past, so that the curve follows the VM. Once every few minutes.
    pub fn decay(&mut self) {
        self.histogram.iter_mut().for_each(|count| *count /= 2.0);
        for count in [&mut self.cold, &mut self.seen, &mut self.stood_for] {
            *count /= 2.0;
        }
    }

    /// The curve of what was counted.
    pub fn curve(&self) -> Curve {
        let mut hits = self.histogram.clone();
        // SHARDS-adj. Below zero there is nothing to take from.
        hits[0] = (hits[0] + self.seen - self.stood_for).max(0.0);
        Curve::new(self.bucket, &hits, self.cold)
    }

    fn hash(&self, page: PageIdx) -> u64 {
        mix(page.0 ^ self.seed) % MODULUS
    }

    fn count(&mut self, distance: u64, weight: f64) {
        let last = self.histogram.len() - 1;
        self.histogram[((distance / self.bucket.0) as usize).min(last)] += weight;
    }

    fn watch(&mut self, page: PageIdx) {
        self.by_hash.push((self.hash(page), page));
        if self.by_hash.len() <= self.watched_max {
            return;
        }
        // All pages with the largest hash go: the threshold excludes them from now on.
        self.threshold = self.by_hash.peek().map_or(self.threshold, |(hash, _)| *hash);
        self.drop_above();
    }

    /// Forgets the pages that the threshold excludes.
    fn drop_above(&mut self) {
        self.counted = None;
        while let Some((_, page)) = self.by_hash.peek().filter(|(hash, _)| *hash >= self.threshold) {
            self.stack.forget(*page);
            self.by_hash.pop();
        }
    }
}
