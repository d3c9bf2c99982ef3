//! Transfers between DRAM and the tiers: one operation of the machine is one or more parts, of one tier or of several.

mod requests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{IoError, OPS_MAX, OUTS_MAX, OpId};
use pagoda_core::stats::Metric;
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::ring::{BufferId, Buffers, RingError};

use crate::tier::{Begun, ByTier, TIERS_MAX, TierIdx};

/// Buffers for single pages: as many reads of one page as can be under way.
const PAGE_BUFFERS: u16 = OPS_MAX as u16;
/// Buffers for parts of chunks: as many as there can be whole-chunk reads.
const CHUNK_BUFFERS: u16 = pagoda_core::fault::FILLS_MAX as u16;

/// Makes the ring's bounce buffers: 9 MiB a VM.
pub fn buffers() -> Result<Buffers, RingError> {
    Buffers::new(&[(PAGE_BUFFERS, PAGE_SIZE as usize), (CHUNK_BUFFERS, CHUNK_SIZE as usize)])
}

/// What the parts of an operation add up to.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Parts not ended; one more while they are being begun.
    left: u16,
    /// The same for each tier, and since when it has some.
    by_tier: [(u16, Option<Instant>); TIERS_MAX],
    /// Bytes not transferred yet.
    missing: u64,
    error: Option<IoError>,
    kind: Kind,
    /// The fault that waits for it.
    fault: Option<(Metric, Instant)>,
}

/// A fault that waited for a read has been answered.
#[derive(Clone, Copy, Debug)]
pub struct Answered {
    /// Why it had to wait.
    pub cause: Metric,
    /// The time from the fault's message to its answer.
    pub took: Duration,
}

impl Answered {
    /// It waited for a single page.
    pub fn is_page_fault(self) -> bool {
        is_page_fault(self.cause)
    }
}

impl Transfer {
    fn new(kind: Kind, fault: Option<(Metric, Instant)>) -> Transfer {
        Transfer { left: 1, by_tier: [(0, None); TIERS_MAX], missing: 0, error: None, kind, fault }
    }

    /// One of a tier's parts has ended; how long they took, if it was the last.
    fn end_of_tier(&mut self, tier: TierIdx) -> Option<Duration> {
        let (left, since) = self.by_tier.get_mut(tier.as_usize())?;
        *left = left.saturating_sub(1);
        let took = since.filter(|_| *left == 0)?.elapsed();
        *since = None;
        Some(took)
    }
}

// The page path allocates nothing, and there are few operations.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Into a buffer, whose first byte is this page.
    Buffer { id: BufferId, first: PageIdx },
    /// Into the RAM file; the index of its intent.
    Direct { intent: usize },
    /// Out of the RAM file.
    Out(Outgoing),
}

/// What became of the pages of a page-out so far.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    chunk: ChunkIdx,
    /// Which tier had which of the chunk's blocks when it began.
    before: ByTier,
    /// Pages that were found to be all zero: no tier writes them.
    zero: PageSet,
    /// Pages of which a tier says that it has written them.
    written: ByTier,
    /// Their blocks have been overwritten, for good or not.
    overwritten: ByTier,
}

/// All transfers, by operation.
#[derive(Debug)]
pub struct Transfers {
    by_op: Vec<Option<Transfer>>,
    intents: Vec<usize>,
    plans: VecDeque<WritePlan>,
    /// Single pages being read that a fault waits for.
    page_faults: usize,
}

/// Writes of a page-out that have not begun.
#[derive(Clone, Copy, Debug)]
struct WritePlan {
    op: OpId,
    chunk: ChunkIdx,
    rest: PageSet,
    /// The first tier that is asked: those before have declined the pages.
    from: TierIdx,
}

impl Transfers {
    pub fn new() -> Transfers {
        Transfers {
            by_op: vec![None; OPS_MAX],
            intents: (0..pagoda_abi::shared::PAGE_INTENTS).rev().collect(),
            plans: VecDeque::with_capacity(OUTS_MAX),
            page_faults: 0,
        }
    }

    /// A free intent. There are more than operations that use one.
    pub fn take_intent(&mut self) -> Option<usize> {
        self.intents.pop()
    }

    pub fn give_intent(&mut self, intent: usize) {
        self.intents.push(intent);
    }

    /// A fault waits for a single page.
    pub fn has_page_faults(&self) -> bool {
        self.page_faults > 0
    }

    /// Chunks that are being written out.
    pub fn written_out(&self) -> impl Iterator<Item = ChunkIdx> {
        self.by_op.iter().flatten().filter_map(|transfer| match transfer.kind {
            Kind::Out(Outgoing { chunk, .. }) => Some(chunk),
            _ => None,
        })
    }

    fn get(&self, op: OpId) -> Option<&Transfer> {
        self.by_op[usize::from(op.0)].as_ref()
    }

    fn slot(&mut self, op: OpId) -> &mut Option<Transfer> {
        &mut self.by_op[usize::from(op.0)]
    }

    /// A tier has begun its part of an operation.
    fn note_begun(&mut self, vm: &str, op: OpId, tier: TierIdx, begun: &Begun) {
        if let Some(error) = begun.error {
            tracing::warn!(vm, tier = tier.0, "a transfer could not begin: {error:?}");
        }
        let Some(transfer) = self.slot(op) else { return };
        transfer.left += begun.parts;
        transfer.missing += begun.bytes;
        transfer.error = transfer.error.or(begun.error);
        let (left, since) = &mut transfer.by_tier[tier.as_usize()];
        *left += begun.parts;
        if begun.parts > 0 {
            since.get_or_insert_with(Instant::now);
        }
        if let Kind::Out(outgoing) = &mut transfer.kind {
            outgoing.overwritten[tier.as_usize()] |= begun.overwritten;
        }
    }

    /// A tier has a page that is written out.
    fn note_written(&mut self, op: OpId, tier: TierIdx, index: u8) {
        if let Some(Transfer { kind: Kind::Out(outgoing), .. }) = self.slot(op) {
            outgoing.written[tier.as_usize()].set(index);
        }
    }

    fn note_bytes(&mut self, op: OpId, bytes: u64) {
        if let Some(transfer) = self.slot(op) {
            transfer.missing = transfer.missing.saturating_sub(bytes);
        }
    }

    fn note_error(&mut self, op: OpId, error: IoError) {
        if let Some(transfer) = self.slot(op) {
            transfer.error.get_or_insert(error);
        }
    }
}

fn is_page_fault(cause: Metric) -> bool {
    cause == Metric::FaultsSwapPage
}
