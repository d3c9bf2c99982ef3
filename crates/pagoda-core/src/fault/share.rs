//! Equal pages: looked for in cold chunks, shared instead of being written out, copied back when they are touched.
//!
//! The machine says which pages may be looked at and when; which frame equals one is the pager's to find, because content
//! is its business. A page that is looked at cannot change meanwhile: its chunk is cold, that is zapped and not reached
//! since, and every direct I/O in flight began after the zap. The same conditions let a page leave for swap.
//!
//! An access to a shared page, a read as well as a write, makes it the VM's own again ([`Action::CopyBack`]). It
//! takes room below the cap as a page-in does, and the VM's part of its frames counts below the cap too.

use crate::bits::{PageSet, Run};
use crate::pattern::PageIn;
use crate::stats::Metric;
use crate::units::{ChunkIdx, PageIdx};

use super::action::{Action, Actions, Found, Now, OpId, Pages};
use super::machine::Machine;
use super::ops::{Op, OpKind};
use super::state::share::Sharing;
use super::table::Phase;

/// How long a chunk has to be cold before its pages are looked at: what a phase of a program touches again within a second is
/// not worth a copy there and back. Also the period of the zaps that make chunks cold.
const SETTLE_MS: u64 = 1000;
/// Pages looked at in one go, some 100 us: faults wait meanwhile.
const SCAN_PAGES: usize = 64;
/// Of a chunk that has been cold for long enough.
const AT_ONCE: u64 = 0;
/// Pages copied back for one fault of a stream.
const BACK_PAGES: u16 = 16;

impl Machine {
    /// Equal pages are looked for even without pressure.
    pub(super) fn scans(&self) -> bool {
        self.config.sharing == Sharing::Scan && !self.pinned
    }

    /// How much of the cap the VM's frames take. Others that leave the group make it grow, so it is bounded: page-out can
    /// only work on what is in the RAM file.
    pub(super) fn charge(&self) -> u64 {
        self.share.charged.min(self.cap() / 2)
    }

    /// The page may come into DRAM. A shared one needs no room if its frame goes: so a VM that may have all of its memory
    /// never waits, whatever the others of its group do.
    pub(super) fn has_room_for(&self, page: PageIdx) -> bool {
        let frame_goes = || {
            let is_shared = self.chunk(page.chunk()).shared.contains(page.index_in_chunk());
            is_shared && self.charge() >= self.share.pages && self.resident + self.reserved < self.cap()
        };
        self.room() > 0 || frame_goes() || self.is_private(page)
    }

    /// The VM's part as it was counted.
    pub(super) fn set_charge(&mut self, pages: u64) {
        self.share.charged = pages.min(self.share.pages);
    }

    /// So many pages are not shared any more, of `before`: what they were charged is not known before the next count, and
    /// taken to be the average.
    pub(super) fn uncharge(&mut self, pages: u64, before: u64) {
        let left = u128::from(self.share.charged) * u128::from(before - pages);
        self.share.charged = left.div_ceil(u128::from(before)) as u64;
    }

    /// The VM has a cap, and its frames take more of that than they should: no more are made, and what is shared with nobody any more is
    /// better off in swap.
    pub fn is_overcharged(&self) -> bool {
        self.cap() < self.config.chunks.pages().0 && self.share.charged > self.cap() / 4
    }

    /// A page takes the place of its frame, which goes. While there is no room page-out has something to do without it.
    pub(super) fn take_back(&mut self, page: PageIdx, out: &mut Actions) {
        let (chunk, index) = (page.chunk(), page.index_in_chunk());
        if self.armed && self.room() > 0 && self.chunk(chunk).shared.contains(index) {
            self.bring_back(Pages { chunk, run: Run { start: index, len: 1 } }, out);
        }
    }

    /// There is something that [`super::Event::Scan`] would look at.
    pub fn has_pages_to_scan(&self, now_ms: u64) -> bool {
        let due = |(_, _, since): &(ChunkIdx, u32, u64)| now_ms.saturating_sub(*since) >= SETTLE_MS;
        self.armed && !self.pinned && self.share.queue.front().is_some_and(due)
    }

    /// The last [`super::Event::Scan`] had to wait for direct I/O.
    pub fn is_scan_blocked(&self) -> bool {
        self.share.blocked
    }

    /// Shared pages come back although nobody asked for them: the machine wants a [`super::Event::Tick`] at once.
    pub fn is_copying_back(&self) -> bool {
        self.armed && self.share.pages > 0 && !self.scans() && self.cap() >= self.config.chunks.pages().0
    }

    /// The chunk has just become cold: all of it is to be looked at.
    pub(super) fn plan_look(&mut self, chunk: ChunkIdx, now: Now) {
        let pages = if self.scans() { self.chunk(chunk).ram } else { PageSet::EMPTY };
        self.queue_look(chunk, pages, now.ms);
    }

    /// The chunk is cold; nothing of it was to be looked at.
    fn queue_look(&mut self, chunk: ChunkIdx, pages: PageSet, since_ms: u64) {
        if self.share.queue.len() == self.share.queue.capacity() {
            let chunks = &self.chunks;
            self.share.queue.retain(|(chunk, entry, _)| {
                let c = &chunks[chunk.as_usize()];
                !c.scan.is_empty() && matches!(c.phase, Phase::Cold { seq, .. } if seq == *entry)
            });
        }
        let c = &mut self.chunks[chunk.as_usize()];
        c.scan = pages;
        if let Phase::Cold { seq, .. } = c.phase
            && !pages.is_empty()
        {
            let entry = (chunk, seq, since_ms);
            if since_ms == AT_ONCE { self.share.queue.push_front(entry) } else { self.share.queue.push_back(entry) }
        }
    }

    /// A hint led to a frame: the page is looked at again if it still is cold. If not, it will be when it is.
    pub(super) fn look_again(&mut self, page: PageIdx) {
        let (chunk, index) = (page.chunk(), page.index_in_chunk());
        if chunk.0 >= self.config.chunks.0 || self.config.sharing == Sharing::Off {
            return;
        }
        let c = &mut self.chunks[chunk.as_usize()];
        if !matches!(c.phase, Phase::Cold { .. }) || !c.ram.contains(index) {
            return;
        }
        if c.scan.is_empty() {
            self.queue_look(chunk, PageSet::single(index), AT_ONCE);
        } else {
            c.scan.set(index);
        }
    }

    /// Looks at some pages of the chunk that has been cold for longest.
    pub(super) fn plan_scan(&mut self, now: Now, out: &mut Actions) {
        self.share.blocked = false;
        // While it is being disarmed nothing may leave RAM any more: nobody would bring it back.
        if !self.armed || self.arming || self.pinned || self.stall.is_some() {
            return;
        }
        while let Some(&(chunk, entry, since)) = self.share.queue.front() {
            let c = &self.chunks[chunk.as_usize()];
            let Phase::Cold { epoch, seq } = c.phase else {
                self.share.queue.pop_front();
                continue;
            };
            let wanted = c.scan & c.ram;
            if seq != entry || wanted.is_empty() {
                self.share.queue.pop_front();
                if seq == entry {
                    // The guest gave the rest of it back.
                    self.chunks[chunk.as_usize()].scan = PageSet::EMPTY;
                }
                continue;
            }
            if now.ms.saturating_sub(since) < SETTLE_MS {
                return;
            }
            // The pin rule: direct I/O that began before the zap may still write into the page.
            if epoch > now.oldest_io {
                self.share.blocked = true;
                return;
            }
            let pages: PageSet = wanted.iter().take(SCAN_PAGES).collect();
            let Some(op) = self.ops.insert(Op { chunk, kind: OpKind::Scan { pages, epoch } }) else { return };
            self.cold.leave();
            self.share.queue.pop_front();
            let c = &mut self.chunks[chunk.as_usize()];
            c.out = Some(op);
            c.phase = Phase::Leaving;
            c.scan -= pages;
            self.stats.add(Metric::PagesScanned, u64::from(pages.count()));
            out.push(Action::Share { op, chunk, pages });
            return;
        }
    }

    pub(super) fn share_done(&mut self, id: OpId, found: &Found, out: &mut Actions) {
        let op = *self.ops.get(id);
        let gone = found.shared | found.zero;
        self.stats.add(Metric::PagesMerged, u64::from(found.shared.count()));
        self.stats.add(Metric::PagesZeroOut, u64::from(found.zero.count()));
        self.share.charged += u64::from(found.frames);
        self.edit(op.chunk, |c| {
            c.ram -= gone;
            c.clean -= gone;
            c.mapped -= gone;
            c.open -= gone;
            c.shared |= found.shared;
            c.swap -= found.zero | found.zero_left;
        });
        match &mut self.ops.get_mut(id).kind {
            OpKind::Out { leaving, dirty, punching } => {
                *leaving -= gone;
                *dirty -= gone;
                *punching = false;
                let (leaving, dirty) = (*leaving, *dirty);
                if leaving.is_empty() {
                    self.stats.add(Metric::EvictedChunks, 1);
                    self.note_eviction();
                    self.end_out(id);
                } else {
                    self.write_or_punch(id, dirty, out);
                }
            }
            OpKind::Scan { epoch, .. } => {
                let epoch = *epoch;
                self.end_scan(id, op.chunk, epoch);
            }
            kind => unreachable!("sharing ended as {kind:?}"),
        }
    }

    /// The chunk is as cold as it was, unless an event in between brought something of it back.
    fn end_scan(&mut self, id: OpId, chunk: ChunkIdx, epoch: u64) {
        self.ops.remove(id);
        let c = &mut self.chunks[chunk.as_usize()];
        c.out = None;
        if c.ram.is_empty() {
            c.phase = Phase::Absent;
            return;
        }
        if c.busy() || !c.mapped.is_empty() {
            c.phase = Phase::Hot;
            self.queues.insert_tail_last(chunk);
            return;
        }
        let rest = c.scan;
        self.make_cold(chunk, epoch);
        self.queue_look(chunk, rest, AT_ONCE);
    }

    /// A fault on a shared page. In a stream its neighbours come along.
    pub(super) fn copy_back(&mut self, chunk: ChunkIdx, index: u8, pattern: PageIn, out: &mut Actions) {
        // A watched neighbour is brought back by its own use.
        let shared = self.chunk(chunk).shared - self.watch.hidden(chunk);
        let run = match (pattern, shared.run_around(index)) {
            (PageIn::Chunk { .. }, Some(run)) => {
                let room = self.free().clamp(1, u64::from(BACK_PAGES)) as u16;
                Run { start: index, len: (run.end() - u16::from(index)).min(room) }
            }
            _ => Run { start: index, len: 1 },
        };
        self.bring_back(Pages { chunk, run }, out);
    }

    fn bring_back(&mut self, pages: Pages, out: &mut Actions) {
        let set = PageSet::range(pages.run.start, pages.run.len);
        // Mapped without a use, so nobody can see the next one.
        let unseen = set & self.watch.hidden(pages.chunk);
        unseen.iter().for_each(|index| self.watch.forget(pages.chunk.page(index)));
        self.change(pages.chunk, set, None, out);
        self.edit(pages.chunk, |c| {
            c.shared -= set;
            c.ram |= set;
            c.mapped |= set;
            c.open |= set;
        });
        self.touch(pages.chunk);
        self.stats.add(Metric::PagesCopiedBack, u64::from(pages.run.len));
        out.push(Action::CopyBack { pages });
    }

    /// A VM without a cap that does not scan any more gets all its pages back, a chunk at a time.
    pub(super) fn plan_copy_back(&mut self, out: &mut Actions) {
        if !self.is_copying_back() {
            return;
        }
        for _ in 0..self.config.chunks.0 {
            let chunk = ChunkIdx(self.share.back_cursor % self.config.chunks.0);
            self.share.back_cursor = (chunk.0 + 1) % self.config.chunks.0;
            let shared = self.chunk(chunk).shared;
            if !shared.is_empty() && !self.chunk(chunk).busy() {
                shared.runs().for_each(|run| self.bring_back(Pages { chunk, run }, out));
                return;
            }
        }
    }

    /// Panics unless exactly the cold chunks with pages to look at are in the queue, once each.
    pub(super) fn check_scan_queue(&self) {
        for index in self.config.chunks.iter() {
            let c = self.chunk(index);
            let Phase::Cold { seq, .. } = c.phase else { continue };
            let entries = self.share.queue.iter().filter(|(chunk, entry, _)| *chunk == index && *entry == seq).count();
            assert_eq!(entries, usize::from(!c.scan.is_empty()), "entries of {index:?} in the scan queue");
        }
    }
}
