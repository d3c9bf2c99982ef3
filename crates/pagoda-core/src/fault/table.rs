//! The page table: per chunk, which pages are in RAM, in swap, clean, mapped, and what the chunk is going through.

use crate::bits::PageSet;

use super::action::OpId;

/// What a chunk is going through as a candidate for page-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No page of it is in DRAM.
    Absent,
    /// The chunk is in the chunk queues.
    Hot,
    /// A zap is under way.
    Zapping {
        /// Something was mapped since the zap was asked for.
        touched: bool,
    },
    /// It was zapped and has not been touched since.
    Cold {
        /// The clock of direct I/O showed this epoch after the zap.
        epoch: u64,
        /// This number tells its entry in the cold list from older ones.
        seq: u32,
    },
    /// Pages of it are being written out.
    Leaving,
}

/// Where the pages of a chunk are when a machine takes a VM over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Located {
    /// The RAM file has them, which is the truth.
    pub ram: PageSet,
    /// These pages have a block in swap.
    pub swap: PageSet,
    /// Of those that have a block: it is still on its way from another host.
    pub missing: PageSet,
    /// Not in `ram`: a frame of the share group has them.
    pub shared: PageSet,
    /// The newest image has no entry of its own for them.
    pub frozen: PageSet,
    /// The VMM has the template mapped there.
    pub borrowed: bool,
    /// Of a borrowed chunk: the VMM may have copies of its own of them.
    pub private: PageSet,
}

/// One chunk. See the table in [`super`].
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The page is in the RAM file.
    pub ram: PageSet,
    /// The page's swap block holds data; else it is a hole.
    pub swap: PageSet,
    /// Subset of `swapped()`, a hint: the block is still on its way from another host, and to read it may take as long as that is
    /// away. Such a page is read only for who waits for it. Only `Machine::edit` changes this set, which counts it.
    pub missing: PageSet,
    /// Not in `ram`: the content is a frame of the share group. What swap holds is outdated.
    pub shared: PageSet,
    /// Subset of `ram`: the swap block equals the page.
    pub clean: PageSet,
    /// Subset of `ram`, a hint: the VMM reaches the page without a fault.
    pub mapped: PageSet,
    /// Subset of `ram`, no hint: the VMM may write the page without a fault. Of any other page it cannot.
    pub open: PageSet,
    /// Wherever the page is: an image owns what it holds, which the image takes over before that changes. Only
    /// `Machine::edit` changes this set, which counts it.
    pub frozen: PageSet,
    /// Subset of `frozen`: the parent of that image has the same content, so nothing has to be copied for it.
    pub inherited: PageSet,
    /// Wherever the page is: it is known that nobody could have changed it since the newest image began. Disjoint from
    /// `open`. Only `Machine::edit` changes this set, which counts it.
    pub same: PageSet,
    /// Subset of `ram`: prefetched, and not mapped since.
    pub prefetched: PageSet,
    /// Not in `ram`: single pages being read.
    pub reading: PageSet,
    /// A whole-chunk read under way.
    pub fill: Option<OpId>,
    /// This page-out of pages of the chunk is under way.
    pub out: Option<OpId>,
    /// As a candidate for page-out.
    pub phase: Phase,
    /// Read before it was asked for and not touched yet.
    pub ahead: bool,
    /// A read of several of its pages failed: faults on it read single pages, until the user says that the cause is gone.
    pub read_singly: bool,
    /// While the chunk is cold: pages that the scan for equal content has still to look at.
    pub scan: PageSet,
    /// The VMM has the template mapped there, privately (`borrow.rs`). Only `Machine::edit` changes this and the set below,
    /// which counts them.
    pub borrowed: bool,
    /// Of a borrowed chunk: pages that the VMM may have written, so that it has a copy of its own. They are in DRAM.
    pub private: PageSet,
    /// The chunk is on its way from the template to the RAM file.
    pub owning: Option<OpId>,
}

impl Chunk {
    /// A chunk of zeros.
    pub const EMPTY: Chunk = Chunk {
        ram: PageSet::EMPTY,
        swap: PageSet::EMPTY,
        missing: PageSet::EMPTY,
        shared: PageSet::EMPTY,
        clean: PageSet::EMPTY,
        mapped: PageSet::EMPTY,
        open: PageSet::EMPTY,
        frozen: PageSet::EMPTY,
        inherited: PageSet::EMPTY,
        same: PageSet::EMPTY,
        prefetched: PageSet::EMPTY,
        reading: PageSet::EMPTY,
        fill: None,
        out: None,
        phase: Phase::Absent,
        ahead: false,
        read_singly: false,
        scan: PageSet::EMPTY,
        borrowed: false,
        private: PageSet::EMPTY,
        owning: None,
    };

    /// Something is under way that owns pages of the chunk.
    pub fn busy(&self) -> bool {
        self.fill.is_some() || self.out.is_some() || self.owning.is_some() || !self.reading.is_empty()
    }

    /// Pages that take DRAM of the VM's own.
    pub fn dram(&self) -> PageSet {
        self.ram | self.private
    }

    /// Pages that the VMM reads from the template. Those of zeros are no content.
    pub fn lent(&self) -> PageSet {
        if self.borrowed { self.swap - self.private } else { PageSet::EMPTY }
    }

    /// Pages whose content is only in swap. What a borrowed chunk has there the VMM reaches without a fault.
    pub fn swapped(&self) -> PageSet {
        if self.borrowed { PageSet::EMPTY } else { self.swap - self.ram - self.shared }
    }

    /// Pages whose content is only in swap, and there already.
    pub fn at_hand(&self) -> PageSet {
        self.swapped() - self.missing
    }

    /// Frozen pages whose content an image has to copy, and that only swap has.
    pub fn unread(&self) -> PageSet {
        (self.frozen - self.inherited) & self.swapped()
    }

    /// Pages that are mapped writable only when they are written: an image has to see it.
    pub fn imaged(&self) -> PageSet {
        self.frozen | self.same
    }

    /// Swap blocks that are outdated.
    pub fn stale(&self) -> PageSet {
        ((self.swap & self.ram) - self.clean) | (self.swap & self.shared)
    }

    /// Panics when the sets contradict one another: called after every event in tests.
    pub fn check(&self) {
        assert!(self.ram.contains_all(self.clean), "clean pages are in RAM");
        assert!(self.ram.contains_all(self.mapped), "mapped pages are in RAM");
        assert!(self.ram.contains_all(self.open), "pages that can be written are in RAM");
        assert!(self.ram.contains_all(self.prefetched), "prefetched pages are in RAM");
        assert!(self.swapped().contains_all(self.missing), "what has not come is nowhere else");
        assert!(!self.open.intersects(self.clean | self.frozen), "clean and frozen pages cannot be written unseen");
        assert!(!self.open.intersects(self.same), "what can be written unseen is not known to be the same");
        assert!(self.frozen.contains_all(self.inherited), "what is the parent's is frozen");
        assert!(!matches!(self.phase, Phase::Cold { .. }) || self.open.is_empty(), "nobody reaches a cold chunk");
        assert!(!self.reading.intersects(self.ram), "a page being read is not in RAM");
        assert!(!self.shared.intersects(self.ram | self.reading), "a shared page is neither in RAM nor being read");
        assert!(self.phase != Phase::Absent || self.dram().is_empty(), "an absent chunk has no page in DRAM");
        assert!(!matches!(self.phase, Phase::Cold { .. }) || !self.busy(), "nothing is under way on a cold chunk");
        assert!(self.out.is_none() || self.phase == Phase::Leaving, "a chunk being written is leaving");
        assert!(self.borrowed || self.private.is_empty(), "only what is borrowed has private pages");
        assert!(self.borrowed || self.owning.is_none(), "what is the VM's own is not on its way to be");
        if self.borrowed {
            let managed = self.ram | self.shared | self.frozen | self.same | self.reading;
            assert!(managed.is_empty(), "a borrowed chunk is none that pages move in");
            assert!(self.fill.is_none() && self.out.is_none(), "a borrowed chunk is none that pages move in");
            let phase = if self.private.is_empty() { Phase::Absent } else { Phase::Hot };
            assert_eq!(self.phase, phase, "a borrowed chunk is never unmapped");
        }
    }
}
