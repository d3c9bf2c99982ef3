//! Refault distances by ghost sequence numbers.
//!
//! Every page that leaves DRAM takes the number of pages that left before it: its *ghost*. When it comes back, all pages in
//! DRAM were used since it was used last, and so were those that left after it and are still out (under LRU). Both together
//! are its reuse distance; no page need be watched for it.
//!
//! Linux (`mm/workingset.c`) takes all pages that left after it. That is an upper bound: a page that leaves and comes back
//! again and again is counted each time, and where a VM thrashes the bound is several times the memory. Here those that came
//! back are taken out of the count: pages that are out are counted by *epoch*, a run of evictions.
//!
//! **Cost.** 4 bytes per page in swap, [`EPOCHS`] counters per VM, a sum over them per refault (below 1 us; a read from
//! swap takes 20 us). A distance is right within half an epoch.

use crate::units::PageCount;

/// Counters. With 256 of them to a VM's memory they reach back over eight times its memory of evictions.
pub const EPOCHS: u64 = 2048;
/// Epochs to a VM's memory: a distance is right within 0.2 % of it.
const EPOCHS_PER_MEMORY: u64 = 256;

/// What a page takes along when it leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ghost(u32);

/// The counters of one VM.
#[derive(Clone, Debug)]
pub struct Ghosts {
    evictions: u64,
    /// Evictions in an epoch.
    width: u64,
    /// Pages out, by the epoch in which they left, modulo [`EPOCHS`].
    out: Vec<u32>,
    /// Pages out that left before all these.
    older: u64,
}

impl Ghosts {
    /// For a VM of this size.
    pub fn new(memory: PageCount) -> Ghosts {
        let width = memory.0.div_ceil(EPOCHS_PER_MEMORY).max(1);
        Ghosts { evictions: 0, width, out: vec![0; EPOCHS as usize], older: 0 }
    }

    /// A page leaves.
    pub fn evict(&mut self) -> Ghost {
        let number = self.evictions;
        if number.is_multiple_of(self.width) {
            let reused = self.slot(number / self.width);
            self.older += u64::from(std::mem::take(&mut self.out[reused]));
        }
        let slot = self.slot(number / self.width);
        self.out[slot] += 1;
        self.evictions += 1;
        Ghost(number as u32)
    }

    /// A page comes back while so many others are in DRAM: its reuse distance.
    pub fn refault(&mut self, ghost: Ghost, resident: PageCount) -> PageCount {
        let distance = self.distance(ghost, resident);
        self.forget(ghost);
        distance
    }

    /// The same of a page that stays out.
    pub fn distance(&self, ghost: Ghost, resident: PageCount) -> PageCount {
        let (epoch, now) = (self.epoch(ghost), self.newest());
        let oldest = (now + 1).saturating_sub(EPOCHS);
        let later = |from: u64| (from..=now).map(|epoch| u64::from(self.out[self.slot(epoch)])).sum::<u64>();
        let distance = match epoch {
            epoch if epoch < oldest => later(oldest) + self.older / 2,
            epoch => later(epoch + 1) + u64::from(self.out[self.slot(epoch)]) / 2,
        };
        resident + PageCount(distance)
    }

    /// A page that is out does not exist any more: the guest gave it back.
    pub fn forget(&mut self, ghost: Ghost) {
        let (epoch, now) = (self.epoch(ghost), self.newest());
        if epoch + EPOCHS <= now {
            self.older = self.older.saturating_sub(1);
        } else {
            let slot = self.slot(epoch);
            self.out[slot] = self.out[slot].saturating_sub(1);
        }
    }

    /// The epoch of the last eviction. The next one's counter may still hold that of an old one.
    fn newest(&self) -> u64 {
        self.evictions.saturating_sub(1) / self.width
    }

    fn slot(&self, epoch: u64) -> usize {
        (epoch % EPOCHS) as usize
    }

    /// A ghost keeps 32 bits; one that is 2^32 evictions old (16 TiB paged out) appears younger.
    fn epoch(&self, ghost: Ghost) -> u64 {
        let age = (self.evictions as u32).wrapping_sub(ghost.0);
        self.evictions.saturating_sub(u64::from(age)) / self.width
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_came_back_are_not_counted_again() {
        let mut ghosts = Ghosts::new(PageCount(10));
        let first = ghosts.evict();
        for _ in 0..100 {
            let other = ghosts.evict();
            assert_eq!(ghosts.refault(other, PageCount(3)), PageCount(3));
        }
        let _still_out = ghosts.evict();
        assert_eq!(ghosts.refault(first, PageCount(3)), PageCount(4));
    }

    #[test]
    fn old_ghosts_are_the_deepest() {
        let mut ghosts = Ghosts::new(PageCount(256));
        let old: Vec<Ghost> = (0..10).map(|_| ghosts.evict()).collect();
        let new: Vec<Ghost> = (0..EPOCHS).map(|_| ghosts.evict()).collect();
        assert_eq!(ghosts.refault(old[0], PageCount(0)), PageCount(EPOCHS + 5));
        ghosts.forget(old[1]);
        assert_eq!(ghosts.refault(new[EPOCHS as usize - 1], PageCount(7)), PageCount(7));
    }

    #[test]
    fn distances_survive_the_wrap_of_the_numbers() {
        let mut ghosts = Ghosts { evictions: u64::from(u32::MAX) - 1, ..Ghosts::new(PageCount(4)) };
        let ghost = ghosts.evict();
        (0..5).for_each(|_| _ = ghosts.evict());
        assert_eq!(ghosts.refault(ghost, PageCount(10)), PageCount(15));
    }
}
