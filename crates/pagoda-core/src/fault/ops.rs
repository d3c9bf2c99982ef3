//! Operations under way: a fixed slab, so that the page path allocates nothing.

use crate::bits::PageSet;
use crate::units::ChunkIdx;

use super::action::{Access, OpId};

/// Operations under way in one VM. More than the vCPUs and I/O threads of any VM can wait for at once; past it faults wait.
pub const OPS_MAX: usize = 256;
/// Whole-chunk reads under way. Each holds an intent or a buffer of a chunk; eight keep the disk busy in 512 KiB
/// requests (measured: a queue depth of 2 to 16 makes no difference).
pub const FILLS_MAX: usize = 8;
/// Of the buffers of whole-chunk reads, so many are for what an image lacks: the others are for those who wait.
pub const KEEPS_MAX: usize = 2;
/// The same for a move, which cannot have both: a disk that is read by one request at a time gives a part of what it could.
pub const COPY_READS_MAX: usize = 4;
/// Page-outs under way, for the same reason.
pub const OUTS_MAX: usize = 8;
/// Chunks in one zap: a command costs a wake-up of another process, a chunk in it 5 us (measured).
pub const ZAP_BATCH: usize = 16;
/// Borrowed chunks on their way to the RAM file: one is being moved while others wait for direct I/O.
pub const OWNS_MAX: usize = 4;
/// Zaps under way: one being executed, one on its way.
pub const ZAPS_MAX: usize = 2;

/// What an operation does.
#[derive(Clone, Copy, Debug)]
pub enum OpKind {
    /// One page into a buffer.
    Page {
        /// Index in the chunk.
        index: u8,
        /// What the faults on it wanted.
        access: Access,
    },
    /// A chunk, or what is missing of it.
    Fill {
        /// Pages that come in.
        pages: PageSet,
        /// Straight into the RAM file.
        direct: bool,
        /// Somebody waits for it; which page first.
        demand: Option<(u8, Access)>,
        /// Map it writable at once, because this stream writes what it reads.
        writable: bool,
        /// It was begun because its pages are expected to be needed soon.
        prefetch: bool,
    },
    /// Part of a chunk into a buffer, for an image.
    Keep {
        /// Pages that were frozen and in swap alone when it began.
        pages: PageSet,
        /// The number of the image.
        image: u32,
    },
    /// Part of a chunk into a buffer, for a move.
    CopyOut {
        /// Pages that were in swap alone when it began.
        pages: PageSet,
        /// Moves had looked so often when it began.
        look: u32,
    },
    /// Pages of a chunk are written to swap, and then leave DRAM.
    Out {
        /// Pages that will leave; those touched meanwhile were taken out of it.
        leaving: PageSet,
        /// Of the pages that set out: those that are being written.
        dirty: PageSet,
        /// The punch, or sharing, was asked for: it is too late to take a page out of `leaving`.
        punching: bool,
    },
    /// A look for equal content in a cold chunk.
    Scan {
        /// The scan looks at these pages.
        pages: PageSet,
        /// The chunk is cold since the zap of this epoch.
        epoch: u64,
    },
    /// A borrowed chunk becomes the VM's own.
    Own {
        /// The stage says how far it is.
        stage: OwnStage,
    },
    /// A zap of several chunks.
    Zap {
        /// Only the first `len` entries count.
        chunks: [ChunkIdx; ZAP_BATCH],
        /// So many entries of `chunks` are in use.
        len: u8,
    },
}

/// How far a borrowed chunk is on its way to the RAM file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnStage {
    /// It is being protected.
    Fencing {
        /// Somebody wrote to it meanwhile, so nothing comes of it.
        given_up: bool,
    },
    /// It is protected as a whole, and waits for the end of older direct I/O.
    Fenced {
        /// Direct I/O that began before this epoch may still write into its private pages.
        epoch: u64,
    },
    /// Private pages are being copied and the mapping is being moved: it cannot be given up any more.
    Moving,
}

/// An operation under way.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// The chunk it is about (of a zap: the first).
    pub chunk: ChunkIdx,
    /// The kind says what the operation does, and what it needs to know.
    pub kind: OpKind,
}

/// The slab has a fixed number of slots, which operations take and give back.
#[derive(Debug)]
pub struct Ops {
    slots: Vec<Option<Op>>,
    free: Vec<u16>,
    pages: usize,
    fills: usize,
    keeps: usize,
    outs: usize,
    scans: usize,
    zaps: usize,
    owns: usize,
}

impl Ops {
    pub fn new() -> Ops {
        Ops {
            slots: vec![None; OPS_MAX],
            free: (0..OPS_MAX as u16).rev().collect(),
            pages: 0,
            fills: 0,
            keeps: 0,
            outs: 0,
            scans: 0,
            zaps: 0,
            owns: 0,
        }
    }

    /// `None` when the slab or the share of this kind is used up.
    pub fn insert(&mut self, op: Op) -> Option<OpId> {
        let room = match op.kind {
            OpKind::Page { .. } | OpKind::Scan { .. } => true,
            OpKind::Fill { .. } => self.has_chunk_buffer(),
            OpKind::Keep { .. } => self.has_chunk_buffer() && self.keeps < KEEPS_MAX,
            OpKind::CopyOut { .. } => self.has_copy_buffer(),
            OpKind::Out { .. } => self.outs < OUTS_MAX,
            OpKind::Zap { .. } => self.zaps < ZAPS_MAX,
            OpKind::Own { .. } => self.owns < OWNS_MAX,
        };
        let slot = room.then(|| self.free.pop()).flatten()?;
        *self.count(&op.kind) += 1;
        self.slots[usize::from(slot)] = Some(op);
        Some(OpId(slot))
    }

    /// Ends an operation. Panics on one that is not under way: the pager reported twice.
    pub fn remove(&mut self, id: OpId) -> Op {
        let op = self.slots[usize::from(id.0)].take().expect("operation is under way");
        *self.count(&op.kind) -= 1;
        self.free.push(id.0);
        op
    }

    pub fn get_mut(&mut self, id: OpId) -> &mut Op {
        self.slots[usize::from(id.0)].as_mut().expect("operation is under way")
    }

    pub fn get(&self, id: OpId) -> &Op {
        self.slots[usize::from(id.0)].as_ref().expect("operation is under way")
    }

    /// The read of one page under way.
    pub fn find_page(&mut self, chunk: ChunkIdx, page: u8) -> Option<&mut Op> {
        self.slots
            .iter_mut()
            .flatten()
            .find(|op| op.chunk == chunk && matches!(op.kind, OpKind::Page { index, .. } if index == page))
    }

    pub fn len(&self) -> usize {
        OPS_MAX - self.free.len()
    }

    /// Another whole-chunk read may start.
    pub fn has_fill_room(&self) -> bool {
        self.has_chunk_buffer() && !self.free.is_empty()
    }

    fn has_chunk_buffer(&self) -> bool {
        self.fills + self.keeps < FILLS_MAX
    }

    /// Another read for a move may start.
    pub fn has_copy_room(&self) -> bool {
        self.has_copy_buffer() && !self.free.is_empty()
    }

    fn has_copy_buffer(&self) -> bool {
        self.has_chunk_buffer() && self.keeps < COPY_READS_MAX
    }

    /// Pages of the chunk are being read for an image.
    pub fn is_keeping(&self, chunk: ChunkIdx) -> bool {
        let is_keep = |op: &Op| op.chunk == chunk && matches!(op.kind, OpKind::Keep { .. });
        self.keeps > 0 && self.slots.iter().flatten().any(is_keep)
    }

    /// Some of these pages are being read for a move.
    pub fn is_copying_out(&self, chunk: ChunkIdx, wanted: PageSet) -> bool {
        let reads = |op: &Op| match op.kind {
            OpKind::CopyOut { pages, .. } => op.chunk == chunk && pages.intersects(wanted),
            _ => false,
        };
        self.keeps > 0 && self.slots.iter().flatten().any(reads)
    }

    pub fn zaps(&self) -> usize {
        self.zaps
    }

    /// Borrowed chunks on their way to the RAM file.
    pub fn owns(&self) -> usize {
        self.owns
    }

    /// Another one may set out.
    pub fn has_own_room(&self) -> bool {
        self.owns < OWNS_MAX && !self.free.is_empty()
    }

    /// One that waits for direct I/O that began before an epoch, which is this one or older.
    pub fn fenced_by(&self, latest: u64) -> Option<OpId> {
        let is_fenced = |op: &Option<Op>| {
            let kind = op.as_ref().map(|op| op.kind);
            matches!(kind, Some(OpKind::Own { stage: OwnStage::Fenced { epoch } }) if epoch <= latest)
        };
        let slot = if self.owns == 0 { None } else { self.slots.iter().position(is_fenced) };
        slot.map(|slot| OpId(slot as u16))
    }

    /// Nothing comes of those that are being protected.
    pub fn give_up_fencing(&mut self) {
        for op in self.slots.iter_mut().flatten() {
            if let OpKind::Own { stage: OwnStage::Fencing { given_up } } = &mut op.kind {
                *given_up = true;
            }
        }
    }

    /// Pages on their way out.
    pub fn pages_leaving(&self) -> u64 {
        if self.outs == 0 {
            return 0;
        }
        self.slots
            .iter()
            .flatten()
            .map(|op| match &op.kind {
                OpKind::Out { leaving, .. } => u64::from(leaving.count()),
                _ => 0,
            })
            .sum()
    }

    fn count(&mut self, kind: &OpKind) -> &mut usize {
        match kind {
            OpKind::Page { .. } => &mut self.pages,
            OpKind::Fill { .. } => &mut self.fills,
            OpKind::Keep { .. } | OpKind::CopyOut { .. } => &mut self.keeps,
            OpKind::Out { .. } => &mut self.outs,
            OpKind::Scan { .. } => &mut self.scans,
            OpKind::Zap { .. } => &mut self.zaps,
            OpKind::Own { .. } => &mut self.owns,
        }
    }
}
