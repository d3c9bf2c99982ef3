//! Slabs that nobody needs any more go back to their servers while their space lives.
//!
//! The order: nothing is under way in the slab -> nothing begins in it -> the map says that nobody has it -> its servers may lend
//! it again. If this owner ends before the map says so, the next one finds the slab as it was.
//!
//! What is in the slab is gone then, and reads as zeros. A write of this life of the slab may still be on its way, and may arrive
//! in the next life, at a server where the page was never written. The next owner would take it for a page. So each life has an
//! *epoch*: a version that is taken when the life before it ends. Whatever was written before is below it. Whatever is written
//! after is above it. Servers are told the epoch with each grant, and store nothing that is below it.
//!
//! The first life under an owner has no epoch. Writes of earlier owners are refused by their generation, at each server that has
//! granted this owner anything.

use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::client::{Client, SpaceRef};
use crate::control::MapEntry;
use crate::units::{SlabNo, Time};

impl Client {
    /// Gives a slab back, whatever is in it: its pages are zeros then. `false`, and nothing is done, while something is under way
    /// there, or where there is nothing to give back.
    pub fn discard_slab(&mut self, now: Time, space: SpaceRef, slab: SlabNo) -> bool {
        let begun = self.redundancy.begin_discard(&mut self.pool, &mut self.pages, &mut self.parity, space.0, slab);
        self.settle(now);
        begun
    }

    /// Gives the slabs of a space that is being removed back to their servers, some at each call; its pages are errors
    /// then. Gives the slabs that are left: those whose servers are away or were asked.
    ///
    /// A slab leaves the map before its servers may lend it again, so that no owner ever looks for it there.
    pub fn give_back(&mut self, now: Time, space: SpaceRef) -> usize {
        const AT_A_TIME: usize = 32;
        let mut asked = self.pool.map.questions.len();
        let mut left = 0;
        if self.pool.map.spaces[space.0].tenure == Tenure::Owner {
            self.parity.forget_parity(&mut self.pool, space.0);
        }
        for slab in self.pool.map.spaces[space.0].slabs.indices() {
            let state = &self.pool.map.spaces[space.0].slabs[slab];
            left += usize::from(!matches!(state.phase, Phase::Vacant | Phase::Lost));
            let owned = self.pool.map.spaces[space.0].tenure == Tenure::Owner;
            if owned && matches!(state.phase, Phase::Open) && state.pending.is_none() && asked < AT_A_TIME {
                self.redundancy.abort_repair(&mut self.pool, &mut self.pages, &mut self.parity, space.0, slab);
                self.pool.map.propose(space.0, slab, MapEntry::lost());
                asked += 1;
            }
        }
        if left == 0 {
            self.redundancy.unreserve(space.0);
        }
        self.settle(now);
        left
    }
}
