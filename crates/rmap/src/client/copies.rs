//! Pages on their way from one server to another, still sealed, through the client.
//!
//! A page keeps its version, so a copy that is late or done twice changes nothing.

use std::collections::VecDeque;

use crate::client::index::{CopyIndex, List, PeerIndex, SpaceIndex};
use crate::units::{SEALED_SIZE, SlabNo, Version};

/// Pages being copied at a time, each of them read and then written: they wait behind everything else, and fill a link of
/// 10 Gbit/s where a round trip takes 50 us.
pub const COPIES_MAX: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    pub space: SpaceIndex,
    pub slab: SlabNo,
    pub index: usize,
    pub target: PeerIndex,
    pub version: Version,
    /// The target gets the page in this version, sealed anew, because it has a trim that the page comes before; see `trims.rs`.
    pub renewed: Option<Version>,
}

#[derive(Debug)]
pub struct Copies {
    all: List<CopyIndex, Option<Copy>>,
    buffers: List<CopyIndex, Box<[u8]>>,
    /// Slabs that have pages to copy and found no room, in the order in which they get it.
    waiting: VecDeque<(SpaceIndex, SlabNo)>,
}

impl Copies {
    pub fn new() -> Copies {
        let buffers = (0..COPIES_MAX).map(|_| vec![0; SEALED_SIZE].into()).collect();
        Copies { all: (0..COPIES_MAX).map(|_| None).collect(), buffers, waiting: VecDeque::new() }
    }

    /// For the turns of so many slabs.
    pub fn make_room(&mut self, slabs: usize) {
        self.waiting.reserve(slabs.saturating_sub(self.waiting.len()));
    }

    pub fn is_idle(&self) -> bool {
        self.all.iter().all(Option::is_none)
    }

    pub fn has_room(&self) -> bool {
        self.all.iter().any(Option::is_none)
    }

    /// To be looked at again when there is room: what ends then may be another slab's copy.
    pub fn wait_for_room(&mut self, space: SpaceIndex, slab: SlabNo) {
        if !self.waiting.contains(&(space, slab)) {
            self.waiting.push_back((space, slab));
        }
    }

    /// A slab that waits for room, if there is some.
    pub fn next_waiting(&mut self) -> Option<(SpaceIndex, SlabNo)> {
        if self.has_room() { self.waiting.pop_front() } else { None }
    }

    /// A slot for one more, if there is one.
    pub fn free(&self) -> Option<CopyIndex> {
        self.all.position(Option::is_none)
    }

    pub fn indices(&self) -> impl Iterator<Item = CopyIndex> + use<> {
        self.all.indices()
    }

    /// Begins what has a free slot, or goes on with it.
    pub fn set(&mut self, copy: CopyIndex, job: Copy) {
        self.all[copy] = Some(job);
    }

    pub fn get(&self, copy: CopyIndex) -> Option<Copy> {
        self.all[copy]
    }

    pub fn buffer(&mut self, copy: CopyIndex) -> &mut [u8] {
        &mut self.buffers[copy]
    }

    pub fn is_copying(&self, space: SpaceIndex, slab: SlabNo, index: usize, target: PeerIndex) -> bool {
        let same = |copy: &Copy| (copy.space, copy.slab, copy.index, copy.target) == (space, slab, index, target);
        self.all.iter().flatten().any(same)
    }

    pub fn any_of(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.all.iter().flatten().any(|copy| (copy.space, copy.slab) == (space, slab))
    }

    pub fn end(&mut self, copy: CopyIndex) -> Option<Copy> {
        self.all[copy].take()
    }

    pub fn end_all(&mut self, space: SpaceIndex) {
        self.all.iter_mut().for_each(|copy| *copy = copy.filter(|copy| copy.space != space));
    }
}
