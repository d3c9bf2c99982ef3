//! Faults: answered at once, or turned into a read whose end answers them, or left waiting for room.

use crate::bits::PageSet;
use crate::pattern::PageIn;
use crate::stats::Metric;
use crate::units::{ChunkIdx, PageIdx};

use super::action::{Access, Action, Actions, FaultKind, OpId, Pages, Served};
use super::machine::{LATE_AHEAD_MAX, Machine, PageInPolicy, WAITING_MAX};
use super::map::single;
use super::ops::{Op, OpKind};

/// Ranges mapped for one fault in a fragmented chunk. Each is an ioctl of about half a microsecond that may save a
/// fault of several.
const MAP_RUNS_MAX: usize = 8;
/// Free pages beyond twice the headroom from which on a VM counts as far from its cap: what reads under way may take.
const ROOMY_MIN: u64 = 16 * 256;
/// Pages mapped for the first fault in a chunk that was zapped: 2 us, where the whole chunk takes 29 (measured), and
/// the granularity of the kernel's own fault-around.
const FIRST_TOUCH_PAGES: u16 = 16;
/// A chunk with fewer pages in swap than this is read through a buffer even if it could be read straight into a large
/// folio, which would fill the rest of it with zeros.
const DIRECT_PAGES_MIN: u16 = 64;

/// Why what is missing of a chunk is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Somebody waits for this page of it.
    Fault { index: u8, access: Access, writable: bool },
    /// It is likely to be wanted next.
    Ahead { writable: bool },
    /// It is in the list of what is to be prefetched.
    Prefetch,
}

impl Machine {
    /// Answers a fault, now or later.
    pub(super) fn fault(&mut self, page: PageIdx, access: Access, kind: FaultKind, out: &mut Actions) -> Served {
        let hits = self.stats.get(Metric::ReadAheadHits);
        let cause = self.serve(page, access, kind, out);
        Served { cause, read_ahead: self.stats.get(Metric::ReadAheadHits) != hits }
    }

    fn serve(&mut self, page: PageIdx, access: Access, kind: FaultKind, out: &mut Actions) -> Metric {
        let (chunk, index) = (page.chunk(), page.index_in_chunk());
        self.note_use(page);
        if self.chunk(chunk).borrowed {
            return self.serve_borrowed(page, access, kind, out);
        }
        let c = &self.chunks[chunk.as_usize()];
        let (fill, reading, ram) = (c.fill, c.reading, c.ram);
        if let Some(op) = fill
            && self.join_fill(op, chunk, index, access, out)
        {
            Metric::FaultsJoined
        } else if reading.contains(index) {
            self.join_page(chunk, index, access);
            Metric::FaultsJoined
        } else if ram.contains(index) {
            self.serve_resident(chunk, index, access, kind, out)
        } else {
            self.serve_absent(page, access, out)
        }
    }

    /// From now on somebody waits for the chunk: its read must end mapped.
    fn join_fill(&mut self, op: OpId, chunk: ChunkIdx, index: u8, access: Access, out: &mut Actions) -> bool {
        let OpKind::Fill { pages, demand, prefetch, .. } = &mut self.ops.get_mut(op).kind else { return false };
        if !pages.contains(index) {
            return false;
        }
        let was_ahead = demand.is_none() && !*prefetch;
        let wrote = access == Access::Write || matches!(demand, Some((_, Access::Write)));
        *demand = Some((index, if wrote { Access::Write } else { Access::Read }));
        if was_ahead {
            let decision = self.read_ahead_hit(chunk, access, out);
            if let OpKind::Fill { writable, .. } = &mut self.ops.get_mut(op).kind {
                *writable |= decision;
            }
        }
        true
    }

    /// The first touch of a chunk that was read ahead goes on with its stream. True: map the chunk writable.
    fn read_ahead_hit(&mut self, chunk: ChunkIdx, access: Access, out: &mut Actions) -> bool {
        self.stats.add(Metric::ReadAheadHits, 1);
        let decision = self.pattern.on_read_ahead_hit(chunk, access);
        self.read_ahead(decision, out);
        matches!(decision, PageIn::Chunk { writable: true, .. })
    }

    fn join_page(&mut self, chunk: ChunkIdx, index: u8, access: Access) {
        if let Some(Op { kind: OpKind::Page { access: wanted, .. }, .. }) = self.ops.find_page(chunk, index)
            && access == Access::Write
        {
            *wanted = Access::Write;
        }
    }

    fn serve_resident(
        &mut self,
        chunk: ChunkIdx,
        index: u8,
        access: Access,
        kind: FaultKind,
        out: &mut Actions,
    ) -> Metric {
        let (leaving, hidden) = (self.leaving(chunk), self.watch.hidden(chunk));
        if leaving.contains(index) {
            // While others wait for room a page-out is not cancelled: a hot set as large as the cap would cancel every one.
            let starving = !self.waiting.is_empty() && self.room() == 0;
            if starving || self.is_punching(chunk) {
                self.wait(chunk.page(index), access);
                return Metric::FaultsWaited;
            }
            // Taken out of what will be punched; the write goes on and is worth nothing for these pages.
            let kept = single(leaving - hidden, index);
            if let Some(op) = self.chunk(chunk).out
                && let OpKind::Out { leaving, .. } = &mut self.ops.get_mut(op).kind
            {
                *leaving -= kept;
            }
            self.stats.add(Metric::PagesKept, u64::from(kept.count()));
            self.map(chunk, kept, Some((index, access)), false, out);
            return Metric::FaultsCancel;
        }
        let c = self.chunk(chunk);
        let protected = c.mapped.contains(index) && !c.open.contains(index);
        if kind == FaultKind::WriteProtected || (protected && access == Access::Write) {
            self.end_protection(chunk, index, out);
            self.touch(chunk);
            return Metric::FaultsWriteProtect;
        }
        if c.mapped.contains(index) {
            // The hint was wrong (the VMM dropped its entries by itself), probably for all of the chunk.
            self.chunks[chunk.as_usize()].mapped = PageSet::EMPTY;
        }
        let c = &mut self.chunks[chunk.as_usize()];
        let was_ahead = std::mem::take(&mut c.ahead);
        let unmapped = c.ram - c.mapped - leaving - hidden;
        let near = match () {
            () if unmapped.runs().count() > MAP_RUNS_MAX => single(unmapped, index),
            // The first touch after a zap is answered quickly; a second one says that the chunk is in use.
            () if c.mapped.is_empty() && !was_ahead => unmapped & around(index),
            () => unmapped,
        };
        self.touch(chunk);
        let writable = was_ahead && self.read_ahead_hit(chunk, access, out);
        self.map(chunk, near, Some((index, access)), writable, out);
        Metric::FaultsMinor
    }

    /// The page is in neither DRAM nor on its way: zero, or in swap.
    fn serve_absent(&mut self, page: PageIdx, access: Access, out: &mut Actions) -> Metric {
        let (chunk, index) = (page.chunk(), page.index_in_chunk());
        if !self.has_room_for(page) {
            self.wait(page, access);
            return Metric::FaultsWaited;
        }
        let pattern = self.pattern.on_fault(page, access);
        let c = &self.chunks[chunk.as_usize()];
        if c.shared.contains(index) {
            self.copy_back(chunk, index, pattern, out);
            self.read_ahead(pattern, out);
            return Metric::FaultsShared;
        }
        if !c.swap.contains(index) {
            self.zero_fill(chunk, index, pattern, out);
            self.read_ahead(pattern, out);
            return Metric::FaultsZero;
        }
        let decision = match self.config.page_in {
            // Only what somebody waits for: one bad block must not take its whole chunk along.
            _ if self.stall.is_some() || c.read_singly => PageIn::Page,
            // From another host: nobody waits for the pages beside it.
            _ if c.missing.contains(index) => PageIn::Page,
            // Nothing has to leave for it: what else is in the chunk is likely to be wanted, and comes cheapest now.
            PageInPolicy::Adaptive if self.is_roomy() => pattern.at_least_chunk(chunk, access),
            PageInPolicy::Adaptive => pattern,
            PageInPolicy::Page | PageInPolicy::PageThenChunk => PageIn::Page,
            PageInPolicy::Chunk => pattern.at_least_chunk(chunk, access),
        };
        if let PageIn::Chunk { writable, .. } = decision
            && self.start_fill(chunk, Some((index, access)), writable, out)
        {
            self.read_ahead(decision, out);
            return Metric::FaultsSwapChunk;
        }
        let op = Op { chunk, kind: OpKind::Page { index, access } };
        match self.ops.insert(op) {
            Some(op) => {
                self.chunks[chunk.as_usize()].reading.set(index);
                self.reserved += 1;
                self.touch(chunk);
                out.push(Action::ReadPage { op, page, demand: true });
                if self.config.page_in == PageInPolicy::PageThenChunk
                    && self.stall.is_none()
                    && !self.chunk(chunk).read_singly
                {
                    self.start_fill(chunk, None, access == Access::Write, out);
                }
                Metric::FaultsSwapPage
            }
            None => {
                self.wait(page, access);
                Metric::FaultsWaited
            }
        }
    }

    /// Far from the cap: whole chunks can come in without page-out.
    fn is_roomy(&self) -> bool {
        self.free() > 2 * self.headroom() + ROOMY_MIN
    }

    fn zero_fill(&mut self, chunk: ChunkIdx, index: u8, decision: PageIn, out: &mut Actions) {
        let c = &self.chunks[chunk.as_usize()];
        let nowhere = !(c.ram | c.swap | c.shared | c.reading | self.watch.hidden(chunk));
        let whole = matches!(decision, PageIn::Chunk { .. });
        let run = if whole { single(nowhere, index) } else { PageSet::single(index) };
        let run = if u64::from(run.count()) > self.free() { PageSet::single(index) } else { run };
        if whole {
            self.widen_headroom();
        }
        self.change(chunk, run, None, out);
        let c = &self.chunks[chunk.as_usize()];
        if run.is_full() && self.config.direct && c.fill.is_none() {
            out.push(Action::ZeroChunk { chunk });
        } else {
            out.extend(run.runs().map(|run| Action::Zero { pages: Pages { chunk, run } }));
        }
        self.edit(chunk, |c| {
            c.ram |= run;
            c.mapped |= run;
            c.open |= run;
        });
        self.touch(chunk);
    }

    /// Reads what is missing of a chunk. False: not possible now.
    pub(super) fn start_fill(
        &mut self,
        chunk: ChunkIdx,
        demand: Option<(u8, Access)>,
        writable: bool,
        out: &mut Actions,
    ) -> bool {
        let c = self.chunk(chunk);
        let absent = c.at_hand() - c.reading;
        let purpose = match demand {
            Some((index, access)) => Purpose::Fault { index, access, writable },
            None => Purpose::Ahead { writable },
        };
        let is_begun = self.begin_fill(chunk, absent, purpose, out);
        if is_begun {
            self.widen_headroom();
            self.touch(chunk);
        }
        is_begun
    }

    /// Reads pages of a chunk that are in swap, and of which no read is under way. False: not possible now.
    pub(super) fn begin_fill(&mut self, chunk: ChunkIdx, pages: PageSet, purpose: Purpose, out: &mut Actions) -> bool {
        let c = self.chunk(chunk);
        if c.fill.is_some() {
            return false;
        }
        let absent = c.ram.is_empty() && c.shared.is_empty() && !c.busy();
        let direct = self.config.direct && absent && pages == c.swap && pages.count() >= DIRECT_PAGES_MIN;
        let pages = if direct { PageSet::FULL } else { pages };
        let count = u64::from(pages.count());
        if count == 0 || count > self.free() {
            return false;
        }
        let (demand, writable) = match purpose {
            Purpose::Fault { index, access, writable } => (Some((index, access)), writable),
            Purpose::Ahead { writable } => (None, writable),
            Purpose::Prefetch => (None, false),
        };
        let prefetch = purpose == Purpose::Prefetch;
        let kind = OpKind::Fill { pages, direct, demand, writable, prefetch };
        let Some(op) = self.ops.insert(Op { chunk, kind }) else { return false };
        self.reserved += count;
        self.chunks[chunk.as_usize()].fill = Some(op);
        let demand = demand.is_some();
        if direct {
            out.push(Action::ReadChunk { op, chunk, demand });
        } else if let (Some(first), Some(last)) = (pages.first_set(), pages.last_set()) {
            let run = crate::bits::Run { start: first, len: u16::from(last) - u16::from(first) + 1 };
            out.push(Action::ReadSpan { op, span: Pages { chunk, run }, wanted: pages, demand });
        }
        true
    }

    /// Starts the reads that a stream will want next, as far as there is room beside the headroom; the others as soon as there is.
    fn read_ahead(&mut self, decision: PageIn, out: &mut Actions) {
        let PageIn::Chunk { read_ahead, writable } = decision else { return };
        for next in read_ahead.chunks() {
            if self.late_ahead.len() == LATE_AHEAD_MAX {
                self.late_ahead.pop_front();
            }
            self.late_ahead.push_back((next, writable));
        }
        self.read_ahead_late(out);
    }

    /// Goes on with read-ahead. Where page-out takes its time, room comes long after the fault that asked for it, and the next one
    /// would find the disk, or the network, idle and have to wait.
    pub(super) fn read_ahead_late(&mut self, out: &mut Actions) {
        while let Some(&(chunk, writable)) = self.late_ahead.front() {
            let c = &self.chunks[chunk.as_usize()];
            let is_wanted =
                !c.busy() && !c.read_singly && c.ram.is_empty() && !c.at_hand().is_empty() && self.stall.is_none();
            if is_wanted && self.free() < 256 + self.headroom() / 4 {
                return;
            }
            self.late_ahead.pop_front();
            if is_wanted && self.start_fill(chunk, None, writable, out) {
                self.stats.add(Metric::ReadAheadChunks, 1);
            }
        }
    }

    /// How a page that was read alone is to be mapped.
    pub(super) fn predict_write(&mut self, access: Access) -> bool {
        access == Access::Write || self.predictor.predict()
    }

    /// Pages of the chunk that are on their way out.
    pub(super) fn leaving(&self, chunk: ChunkIdx) -> PageSet {
        match self.chunks[chunk.as_usize()].out.map(|op| &self.ops.get(op).kind) {
            Some(OpKind::Out { leaving, .. }) => *leaving,
            Some(OpKind::Scan { pages, .. }) => *pages,
            _ => PageSet::EMPTY,
        }
    }

    fn is_punching(&self, chunk: ChunkIdx) -> bool {
        let op = self.chunk(chunk).out.map(|op| &self.ops.get(op).kind);
        matches!(op, Some(OpKind::Out { punching: true, .. } | OpKind::Scan { .. }))
    }

    pub(super) fn wait(&mut self, page: PageIdx, access: Access) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back((page, access));
        } else {
            self.waiting_overflow = true;
        }
    }

    /// Answers faults that waited, as far as there is room. They were counted when they came.
    pub(super) fn serve_waiting(&mut self, out: &mut Actions) {
        for _ in 0..self.waiting.len() {
            let Some(&(page, access)) = self.waiting.front() else { break };
            if !self.has_room_for(page) {
                return;
            }
            self.waiting.pop_front();
            self.fault(page, access, FaultKind::Unmapped, out);
        }
        if self.waiting.is_empty() && std::mem::take(&mut self.waiting_overflow) {
            out.extend(
                self.config
                    .chunks
                    .iter()
                    .map(|chunk| Action::Wake { pages: Pages { chunk, run: crate::bits::Run { start: 0, len: 256 } } }),
            );
        }
    }
}

/// The aligned block of pages that the first touch of a chunk maps.
fn around(index: u8) -> PageSet {
    let start = u16::from(index) / FIRST_TOUCH_PAGES * FIRST_TOUCH_PAGES;
    PageSet::range(start as u8, FIRST_TOUCH_PAGES)
}
