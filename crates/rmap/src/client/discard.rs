//! Slabs that nobody needs any more go back to their servers while their space lives.
//!
//! The order: nothing is under way in the slab -> nothing begins in it -> the map says that nobody has it -> its servers may
//! lend it again. Should this owner end before the map says so, the next one finds it as it was.
//!
//! What is in the slab is gone then, and reads as zeros; but a write of its first life that is still on the way may land in its
//! second, and the next owner would take that for a page. So this is for those who know by themselves which pages count and
//! read no other, as a VM's far tier does, and not for disks, whose trimmed pages have to stay zero.

use super::Client;
use super::SpaceRef;
use super::ops::Stage;
use super::sealed::Tenure;
use super::slab::Phase;
use crate::control::MapEntry;
use crate::units::{SlabNo, Time};

impl Client {
    /// Gives a slab back, whatever is in it: no page of it is to be read again before it is written anew. `false`, and nothing is
    /// done, while something is under way there, or where there is nothing to give back.
    pub fn discard_slab(&mut self, now: Time, space: SpaceRef, slab: SlabNo) -> bool {
        let (space, slab) = (space.0, slab.0 as usize);
        let size = self.config.slab_size;
        let Some(state) = self.spaces[space].slabs.get(slab) else { return false };
        let owned = self.spaces[space].tenure == Tenure::Owner && !self.spaces[space].is_taken;
        if !matches!(state.phase, Phase::Open) || state.pending.is_some() || !owned {
            return false;
        }
        let number = Some(SlabNo(slab as u32));
        let begun = |stage| matches!(stage, Stage::Waiting | Stage::Active);
        let busy = self.ops.any(|op| begun(op.stage) && op.space == space && size.slab(op.page) == number);
        if busy || self.parking.any_of(space, SlabNo(slab as u32), size) || self.copies.any_of(space, slab) {
            return false;
        }
        self.abort_repair(space, slab);
        let state = &mut self.spaces[space].slabs[slab];
        state.phase = Phase::Leaving;
        state.doubt = None;
        self.propose(space, slab, MapEntry::empty());
        self.settle(now);
        true
    }

    /// Gives the slabs of a space that is being removed back to their servers, some at each call; its pages are errors
    /// then. Gives the slabs that are left: those whose servers are away or were asked.
    ///
    /// A slab leaves the map before its servers may lend it again, so that no owner ever looks for it there.
    pub fn give_back(&mut self, now: Time, space: SpaceRef) -> usize {
        const AT_A_TIME: usize = 32;
        let mut asked = self.questions.len();
        let mut left = 0;
        for slab in 0..self.spaces[space.0].slabs.len() {
            let state = &self.spaces[space.0].slabs[slab];
            left += usize::from(!matches!(state.phase, Phase::Vacant | Phase::Lost));
            let owned = self.spaces[space.0].tenure == Tenure::Owner;
            if owned && matches!(state.phase, Phase::Open) && state.pending.is_none() && asked < AT_A_TIME {
                self.abort_repair(space.0, slab);
                self.propose(space.0, slab, MapEntry::lost());
                asked += 1;
            }
        }
        if left == 0 {
            self.end_reservation(space.0);
        }
        self.settle(now);
        left
    }
}
