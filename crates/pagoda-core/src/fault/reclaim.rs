//! Page-out: keeps free headroom, so that no fault waits for an eviction.
//!
//! Victims come from the head of the chunk queues. They are zapped first and stand in the *cold list*; one that is touched
//! there is rescued by a cheap fault, the others leave in order. The list is what makes the choice an approximation of
//! LRU without access bits, and the zap is what the pin rule needs anyway. Its length adapts: while most chunks in it
//! are rescued (a load without locality), it only costs faults and shrinks; while most of them leave, it grows.

use crate::bits::PageSet;
use crate::stats::Metric;
use crate::units::{ChunkIdx, PageCount};

use super::action::{Action, Actions, Now, OpId};
use super::headroom::{headroom_at, page_out_leaves};
use super::machine::{Machine, Replacement};
use super::ops::{Op, OpKind, ZAP_BATCH, ZAPS_MAX};
use super::state::share::Sharing;
use super::table::Phase;

/// Why chunks are to become cold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// Pages have to leave.
    Room,
    /// To learn which are in use.
    Heat,
}

/// The wide headroom is kept for so long after the last whole chunk came in.
const WIDE_MS: u64 = 1000;

impl Machine {
    /// Free pages that page-out maintains.
    pub(super) fn headroom(&self) -> u64 {
        headroom_at(self.cap(), self.wide)
    }

    /// Pages come in one by one, and half of the headroom is left: page-out need not hurry.
    pub fn has_time(&self) -> bool {
        !self.wide && self.waiting.is_empty() && self.free() * 2 > self.headroom()
    }

    /// Whole chunks come in: headroom for a stream, at once.
    pub(super) fn widen_headroom(&mut self) {
        (self.wide, self.chunk_came) = (true, true);
    }

    fn narrow_headroom(&mut self, now: Now) {
        if std::mem::take(&mut self.chunk_came) {
            self.wide_until_ms = now.ms + WIDE_MS;
        }
        self.wide = now.ms < self.wide_until_ms;
    }

    pub(super) fn plan_reclaim(&mut self, now: Now, out: &mut Actions) {
        self.pin_blocked = false;
        self.narrow_headroom(now);
        if !self.armed || self.pinned || matches!(self.stall, Some((super::Stall::Write(_), _))) {
            return;
        }
        if self.cap() >= self.config.chunks.pages().0 {
            return;
        }
        let wanted = (self.resident + self.reserved + self.charge() + self.headroom() + self.waiting.len() as u64)
            .saturating_sub(self.cap());
        if wanted == 0 {
            return;
        }
        let mut leaving = self.ops.pages_leaving();
        let missing = wanted.saturating_sub(leaving);
        while leaving < wanted {
            let Some(chunk) = self.next_cold(now) else { break };
            let count = u64::from(self.chunk(chunk).ram.count());
            if !self.may_leave(count, leaving) || !self.start_out(chunk, out) {
                break;
            }
            leaving += count;
        }
        let chunks_missing = (missing as usize).div_ceil(256);
        self.replenish_cold(self.cold.target().max(chunks_missing), Want::Room, out);
    }

    /// Whether so many pages may leave DRAM beside those that are `leaving`. Page-out stops at the VM's min, or as far below
    /// a cap as page-out needs it. Pages on their way in are not counted: they may never come. So that a fault that waits
    /// is served in any case, it may have the next chunk, whatever is guaranteed.
    fn may_leave(&self, count: u64, leaving: u64) -> bool {
        let stays = (self.resident + self.charge()).saturating_sub(leaving + count);
        let guaranteed = self.min.min(page_out_leaves(PageCount(self.cap())).0);
        stays >= guaranteed || (leaving == 0 && !self.waiting.is_empty())
    }

    /// The oldest cold chunk, if the pin rule lets it go.
    fn next_cold(&mut self, now: Now) -> Option<ChunkIdx> {
        let chunk = self.cold.oldest(&self.chunks)?;
        if let Phase::Cold { epoch, .. } = self.chunk(chunk).phase
            && epoch > now.oldest_io
        {
            self.pin_blocked = true;
            self.stats.add(Metric::PinWaits, 1);
            return None;
        }
        (!self.chunk(chunk).busy()).then_some(chunk)
    }

    /// Takes the cold list's first chunk out of DRAM.
    fn start_out(&mut self, chunk: ChunkIdx, out: &mut Actions) -> bool {
        let c = self.chunk(chunk);
        let (leaving, dirty) = (c.ram, c.ram - c.clean);
        // What a frame holds already need not be written: share before swap (ESX 4.3).
        let looks = self.config.sharing != Sharing::Off && !dirty.is_empty();
        let Some(op) = self.ops.insert(Op { chunk, kind: OpKind::Out { leaving, dirty, punching: looks } }) else {
            return false;
        };
        self.cold.take_oldest();
        let c = &mut self.chunks[chunk.as_usize()];
        c.out = Some(op);
        c.phase = Phase::Leaving;
        if looks {
            self.stats.add(Metric::PagesScanned, u64::from(dirty.count()));
            out.push(Action::Share { op, chunk, pages: dirty });
        } else {
            self.write_or_punch(op, dirty, out);
        }
        true
    }

    /// Goes on with a page-out: `dirty` of its pages have to be written first.
    pub(super) fn write_or_punch(&mut self, op: OpId, dirty: PageSet, out: &mut Actions) {
        if dirty.is_empty() {
            self.push_punch(op, out);
        } else {
            out.push(Action::WriteOut { op, chunk: self.ops.get(op).chunk, pages: dirty });
        }
    }

    /// Zaps victims until the cold list has `target` chunks.
    pub(super) fn replenish_cold(&mut self, target: usize, want: Want, out: &mut Actions) {
        while self.ops.zaps() < ZAPS_MAX && self.cold.count() + self.ops.zaps() * ZAP_BATCH < target {
            let most = (target - self.cold.count()).min(ZAP_BATCH);
            if self.zap_victims(most, want, out) == 0 {
                return;
            }
        }
    }

    fn victim(&mut self) -> Option<ChunkIdx> {
        match self.config.replacement {
            Replacement::Queues => self.queues.victim(),
            Replacement::Random => self.queues.random_victim(self.chance.draw()),
        }
    }

    pub(super) fn zap_victims(&mut self, most: usize, want: Want, out: &mut Actions) -> usize {
        let mut chunks = [ChunkIdx(0); ZAP_BATCH];
        let mut len = 0;
        // Busy chunks are hot: they go to the tail, and the search ends when it has seen as many as it may take.
        for _ in 0..2 * ZAP_BATCH {
            if len == most {
                break;
            }
            let Some(chunk) = self.victim() else { break };
            if self.chunk(chunk).busy() {
                self.queues.insert_tail_last(chunk);
                continue;
            }
            if self.chunk(chunk).borrowed {
                // Its private pages can leave only when it is the VM's own, and while nothing has to leave they need not.
                if want == Want::Room {
                    self.start_own(chunk, out);
                }
                self.queues.insert_tail_last(chunk);
                continue;
            }
            self.queues.remove(chunk);
            chunks[len] = chunk;
            len += 1;
        }
        if len == 0 {
            return 0;
        }
        let op = Op { chunk: chunks[0], kind: OpKind::Zap { chunks, len: len as u8 } };
        let Some(id) = self.ops.insert(op) else {
            chunks[..len].iter().for_each(|chunk| self.queues.insert_first(*chunk));
            return 0;
        };
        for chunk in &chunks[..len] {
            let c = &mut self.chunks[chunk.as_usize()];
            c.phase = Phase::Zapping { touched: false };
            c.mapped = PageSet::EMPTY;
        }
        self.stats.add(Metric::ZappedChunks, len as u64);
        out.push(Action::Zap { op: id });
        len
    }

    /// The chunk has been zapped, at this epoch, and not been touched since.
    pub(super) fn make_cold(&mut self, chunk: ChunkIdx, epoch: u64) {
        let seq = self.cold.next_seq();
        self.chunks[chunk.as_usize()].phase = Phase::Cold { epoch, seq };
        self.cold.push(chunk, &self.chunks);
    }

    pub(super) fn note_rescue(&mut self) {
        self.stats.add(Metric::RescuedChunks, 1);
        self.cold.note_rescue((self.resident / 256) as usize);
    }

    pub(super) fn note_eviction(&mut self) {
        self.cold.note_eviction((self.resident / 256) as usize);
    }
}
