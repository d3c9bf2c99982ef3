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
}
