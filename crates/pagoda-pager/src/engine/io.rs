//! Transfers between swap and memory: one operation of the machine is one or more requests to the disk.

use std::collections::VecDeque;
use std::time::Instant;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, IoError, OPS_MAX, OUTS_MAX, OpId, Pages};
use pagoda_core::stats::Metric;
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::{BufferId, BufferSlice, Buffers, RingError};

use super::{Engine, Source};

/// One request to the disk: two requests of 512 KiB in flight beat one of 1 MiB by 10 % (throughput.md A).
const REQUEST_MAX: u64 = 512 << 10;
/// Buffers for single pages: as many reads of one page as can be under way.
const PAGE_BUFFERS: u16 = OPS_MAX as u16;
/// Buffers for parts of chunks: as many as there can be whole-chunk reads.
const CHUNK_BUFFERS: u16 = pagoda_core::fault::FILLS_MAX as u16;

/// Runs of pages whose writes are queued between two looks at the faults: some 2 us each, so a fault waits 20 us at most.
const STEP_RUNS: usize = 8;
/// Write requests under way from which on no more are queued. A page-in that comes meanwhile stands behind them in the disk's
/// own queue, where no scheduler puts it first; enough to keep a disk busy, in large requests and in small ones.
const WRITES_MAX: usize = 16;
/// While pages come in one by one and there is time: so few are queued at once, and the next when these have ended. Writes
/// of a fragmented chunk are small and many, and each that is under way makes a read of one page slower.
const WRITES_PACED: usize = 4;

/// Makes the ring's bounce buffers: 9 MiB a VM.
pub fn buffers() -> Result<Buffers, RingError> {
    Buffers::new(&[(PAGE_BUFFERS, PAGE_SIZE as usize), (CHUNK_BUFFERS, CHUNK_SIZE as usize)])
}

/// What the requests of an operation add up to.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Requests not ended; one more while they are being queued.
    left: u16,
    /// Bytes not transferred yet.
    missing: u64,
    error: Option<IoError>,
    kind: Kind,
    /// The fault that waits for it.
    pub fault: Option<(Metric, Instant)>,
}

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
    /// Found zero.
    zero: PageSet,
    /// The pool has them.
    far: PageSet,
    /// Their writes to the swap file were begun.
    near: PageSet,
}

/// All transfers, by operation.
#[derive(Debug)]
pub struct Transfers {
    by_op: Vec<Option<Transfer>>,
    intents: Vec<usize>,
    plans: VecDeque<WritePlan>,
    /// Write requests under way.
    writes: usize,
    /// Single pages being read that a fault waits for.
    page_faults: usize,
}

/// Writes of a page-out that are not queued yet.
#[derive(Clone, Copy, Debug)]
struct WritePlan {
    op: OpId,
    chunk: ChunkIdx,
    rest: PageSet,
    /// To the swap file, whatever the pool says.
    near: bool,
}

impl Transfers {
    pub fn new() -> Transfers {
        Transfers {
            by_op: vec![None; OPS_MAX],
            intents: (0..pagoda_abi::shared::INTENTS).rev().collect(),
            plans: VecDeque::with_capacity(OUTS_MAX),
            writes: 0,
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

    /// So many pages of the operation were asked of the pool.
    pub fn begin_parts(&mut self, op: OpId, pages: u16) {
        if let Some(transfer) = self.slot(op) {
            transfer.left += pages;
            transfer.missing += u64::from(pages) * PAGE_SIZE;
        }
    }

    /// The pool has a page that is written out.
    pub fn far_has(&mut self, op: OpId, index: u8) {
        if let Some(Transfer { kind: Kind::Out(outgoing), .. }) = self.slot(op) {
            outgoing.far.set(index);
        }
    }

    /// Chunks that are being written out.
    pub fn written_out(&self) -> impl Iterator<Item = ChunkIdx> {
        self.by_op.iter().flatten().filter_map(|transfer| match transfer.kind {
            Kind::Out(Outgoing { chunk, .. }) => Some(chunk),
            _ => None,
        })
    }

    fn slot(&mut self, op: OpId) -> &mut Option<Transfer> {
        &mut self.by_op[usize::from(op.0)]
    }
}

/// Offset and length of each request of a run of pages.
fn requests(pages: Pages) -> impl Iterator<Item = (u64, u64)> {
    let len = u64::from(pages.run.len) * PAGE_SIZE;
    (0..len).step_by(REQUEST_MAX as usize).map(move |at| (at, (len - at).min(REQUEST_MAX)))
}

fn is_page_fault((cause, _): (Metric, Instant)) -> bool {
    cause == Metric::FaultsSwapPage
}

impl Engine {
    /// Reads pages into a buffer.
    pub(super) fn read_buffered(&mut self, op: OpId, pages: Pages, demand: bool, cause: Metric) {
        let len = u64::from(pages.run.len) * PAGE_SIZE;
        let Some(id) = self.ring.take_buffer(len as usize) else {
            // There is a buffer for every operation the machine can start.
            return self.freeze("the page buffers ran out");
        };
        let fault = demand.then_some((cause, self.fault_at));
        self.io.page_faults += usize::from(fault.is_some_and(is_page_fault));
        let kind = Kind::Buffer { id, first: pages.first() };
        *self.io.slot(op) = Some(Transfer { left: 1, missing: 0, error: None, kind, fault });
        let wanted = PageSet::range(pages.run.start, pages.run.len);
        for run in self.read_far(op, pages.chunk, wanted, demand).runs() {
            let near = Pages { chunk: pages.chunk, run };
            let before = (near.first().0 - pages.first().0) * PAGE_SIZE;
            for (at, part) in requests(near) {
                let slice = BufferSlice { id, offset: (before + at) as u32, len: part as u32 };
                self.queue(op, part, |engine, key| {
                    engine.ring.read(engine.swap_file, near.first().offset().0 + at, slice, key)
                });
            }
        }
        self.queued(op);
    }

    /// Reads a chunk straight into the RAM file.
    pub(super) fn read_direct(&mut self, op: OpId, chunk: ChunkIdx, demand: bool) {
        let Some(intent) = self.io.take_intent() else { return self.freeze("the intents ran out") };
        self.shared.intents[intent].declare(chunk.0, PageSet::FULL.words());
        let fault = demand.then_some((Metric::FaultsSwapChunk, self.fault_at));
        *self.io.slot(op) = Some(Transfer { left: 1, missing: 0, error: None, kind: Kind::Direct { intent }, fault });
        for run in self.read_far(op, chunk, PageSet::FULL, demand).runs() {
            let near = Pages { chunk, run };
            let place = self.space.place(near);
            let (view, start) = (place.region.view.clone(), place.offset);
            for (at, part) in requests(near) {
                let target = view.io_target(start + at, part as u32);
                self.queue(op, part, |engine, key| {
                    engine.ring.read(engine.swap_file, near.first().offset().0 + at, target, key)
                });
            }
        }
        self.queued(op);
    }

    /// Plans to write pages to swap; zero ones become holes there. The writes are queued in steps, so that no fault waits
    /// for more than one step.
    pub(super) fn write_out(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet) {
        let (zero, far, near) = (PageSet::EMPTY, PageSet::EMPTY, PageSet::EMPTY);
        let kind = Kind::Out(Outgoing { chunk, zero, far, near });
        *self.io.slot(op) = Some(Transfer { left: 1, missing: 0, error: None, kind, fault: None });
        self.io.plans.push_back(WritePlan { op, chunk, rest: pages, near: false });
    }

    /// Plans to write pages of a page-out to the swap file that the pool did not take.
    pub(super) fn write_near(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet) {
        let planned = self.io.plans.iter_mut().find(|plan| plan.op == op && plan.near);
        match planned {
            Some(plan) => plan.rest |= pages,
            None => {
                if let Some(transfer) = self.io.slot(op) {
                    transfer.left += 1;
                }
                // Before what the pool may take: that can wait for it.
                self.io.plans.push_front(WritePlan { op, chunk, rest: pages, near: true });
            }
        }
    }

    /// Some of what was planned can be queued now.
    pub(super) fn can_write(&self) -> bool {
        let max = if self.machine.has_time() { 1 } else { WRITES_MAX };
        self.io.plans.front().is_some_and(|plan| {
            if !plan.near && self.far_takes_writes() { !self.far_is_full() } else { self.io.writes < max }
        })
    }

    /// Queues the next few writes.
    pub(super) fn step_plan(&mut self) {
        let paced = self.machine.has_time();
        let Some(plan) = self.io.plans.front_mut() else { return };
        let step: PageSet = plan
            .rest
            .runs()
            .take(if paced { WRITES_PACED } else { STEP_RUNS })
            .map(|run| PageSet::range(run.start, run.len))
            .fold(PageSet::EMPTY, |step, run| step | run);
        plan.rest -= step;
        let WritePlan { op, chunk, rest, near } = *plan;
        self.write_some(op, chunk, step, near);
        if rest.is_empty() {
            self.io.plans.pop_front();
            self.queued(op);
        }
    }

    fn write_some(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet, near: bool) {
        let place = self.space.place_chunk(chunk);
        let (view, start, first) = (place.region.view.clone(), place.offset, place.pages().start);
        let is_zero = |index: &u8| view.is_zero(first + u64::from(*index)..first + u64::from(*index) + 1);
        let found: PageSet = pages.iter().filter(is_zero).collect();
        let far = !near && self.far_takes_writes();
        if let Some(Transfer { kind: Kind::Out(outgoing), .. }) = self.io.slot(op) {
            outgoing.zero |= found;
            if !far {
                outgoing.near |= pages - found;
            }
        }
        if let Err(errno) = self.drop_blocks(chunk, found & self.machine.chunk(chunk).swap) {
            self.note_errno(op, errno);
        }
        if far {
            return self.write_far(op, chunk, pages - found);
        }
        for run in (pages - found).runs() {
            let before = u64::from(run.start) * PAGE_SIZE;
            for (at, part) in requests(Pages { chunk, run }) {
                let source = view.io_target(start + before + at, part as u32);
                self.queue(op, part, |engine, key| {
                    engine.ring.write(engine.swap_file, chunk.offset().0 + before + at, source, key)
                });
            }
        }
    }

    /// Queues one request; the ring has room for all that the machine can have under way, or makes some.
    fn queue(&mut self, op: OpId, bytes: u64, request: impl FnOnce(&mut Engine, u64) -> Result<(), RingError>) {
        let key = Source::Io(u32::from(op.0)).key();
        match request(self, key) {
            Ok(()) => {
                if let Some(transfer) = self.io.slot(op) {
                    transfer.left += 1;
                    transfer.missing += bytes;
                    let writes = matches!(transfer.kind, Kind::Out(_));
                    self.io.writes += usize::from(writes);
                }
            }
            Err(error) => {
                tracing::warn!(vm = %self.name, "queue disk request: {error}");
                self.note_errno(op, Errno::AGAIN);
            }
        }
    }

    /// All requests of the operation are queued: if none was needed, it has ended.
    fn queued(&mut self, op: OpId) {
        if let Some(event) = self.end_part(op) {
            self.events.push_back(event);
        }
    }

    fn note_errno(&mut self, op: OpId, errno: Errno) {
        let error = match errno {
            Errno::NOSPC | Errno::DQUOT => IoError::NoSpace,
            errno => IoError::Failed(errno.raw_os_error()),
        };
        self.note_error(op, error);
    }

    pub(super) fn note_error(&mut self, op: OpId, error: IoError) {
        if let Some(transfer) = self.io.slot(op) {
            transfer.error.get_or_insert(error);
        }
    }

    /// A request ended; the event if it was its operation's last.
    pub(super) fn finish_part(&mut self, op: u32, result: Result<u32, Errno>) -> Option<Event> {
        let op = OpId(u16::try_from(op).ok()?);
        if let Some(Transfer { kind: Kind::Out(_), .. }) = self.io.slot(op) {
            self.io.writes -= 1;
        }
        match result {
            Ok(bytes) => self.arrived(op, u64::from(bytes)),
            Err(errno) => self.note_errno(op, errno),
        }
        self.end_part(op)
    }

    pub(super) fn arrived(&mut self, op: OpId, bytes: u64) {
        if let Some(transfer) = self.io.slot(op) {
            transfer.missing = transfer.missing.saturating_sub(bytes);
        }
    }

    pub(super) fn end_part(&mut self, op: OpId) -> Option<Event> {
        let transfer = self.io.slot(op).as_mut()?;
        transfer.left -= 1;
        if transfer.left > 0 {
            return None;
        }
        // A transfer that ended short of what was asked for without an error: the rest is unknown.
        let short = (transfer.missing > 0).then_some(IoError::Failed(Errno::IO.raw_os_error()));
        let result = transfer.error.or(short).map_or(Ok(()), Err);
        Some(match transfer.kind {
            Kind::Buffer { .. } | Kind::Direct { .. } => Event::ReadDone { op, result },
            Kind::Out(Outgoing { chunk, zero, far, near }) => {
                *self.io.slot(op) = None;
                // Of a failed page-out nothing is believed; its pages are in DRAM.
                let far = if result.is_ok() { far } else { PageSet::EMPTY };
                self.settle_blocks(chunk, far, near);
                Event::WriteDone { op, zero, result }
            }
        })
    }

    /// Puts a page that came from the pool where its operation wants it.
    pub(super) fn far_page_came(&mut self, op: OpId, page: PageIdx) {
        let Some(far) = &self.far else { return };
        let Some(Transfer { kind, .. }) = self.io.by_op[usize::from(op.0)] else { return };
        match kind {
            Kind::Buffer { id, first } => {
                let offset = ((page.0 - first.0) * PAGE_SIZE) as u32;
                if !self.ring.fill(BufferSlice { id, offset, len: PAGE_SIZE as u32 }, far.page()) {
                    self.freeze("a page of the pool came for a buffer that is gone");
                }
            }
            Kind::Direct { .. } => {
                let place = self.space.place_page(page);
                place.region.view.write_page(place.pages().start, far.page());
            }
            Kind::Out(_) => {}
        }
    }

    /// The buffer of a read that ended, and the page of its first byte.
    pub(super) fn buffer_of(&mut self, op: OpId) -> Option<(BufferId, PageIdx)> {
        match self.io.slot(op).as_ref()?.kind {
            Kind::Buffer { id, first } => Some((id, first)),
            _ => None,
        }
    }

    /// Ends a buffered read.
    pub(super) fn release(&mut self, op: OpId) {
        if let Some((id, _)) = self.buffer_of(op)
            && !self.ring.give_buffer(id)
        {
            self.freeze("a page buffer was given back while the disk used it");
        }
        self.answered(op);
        *self.io.slot(op) = None;
    }

    /// Ends a direct read: the intent is no longer needed.
    pub(super) fn withdraw(&mut self, op: OpId) {
        if let Some(Transfer { kind: Kind::Direct { intent }, .. }) = *self.io.slot(op) {
            self.shared.intents[intent].withdraw();
            self.io.give_intent(intent);
        }
        self.answered(op);
        *self.io.slot(op) = None;
    }

    /// Counts the time that the fault behind a read took.
    pub(super) fn answered(&mut self, op: OpId) {
        let Some((cause, at)) = self.io.slot(op).as_ref().and_then(|transfer| transfer.fault) else { return };
        let took = at.elapsed();
        if is_page_fault((cause, at)) {
            self.io.page_faults -= 1;
            self.busy_poll.note(took);
        }
        if let Some(index) = pagoda_core::stats::FAULT_CAUSES.iter().position(|other| *other == cause) {
            self.latency[index].record(took);
        }
    }
}
