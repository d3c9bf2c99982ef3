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
use super::machine::{Machine, Replacement};
use super::ops::{Op, OpKind, ZAP_BATCH, ZAPS_MAX};
use super::share::Sharing;
use super::table::Phase;

/// Length of the cold list at the start, in chunks: two page-out batches.
pub(super) const COLD_TARGET_START: usize = 8;
/// The list holds at most this part of the resident chunks.
const COLD_PART: usize = 8;
/// Outcomes after which the list's length is reconsidered.
const WINDOW: u32 = 32;
/// Headroom: this part of the cap ...
const HEADROOM_PART: u64 = 32;
/// ... but at least as many pages as read-ahead of one stream and the page-outs behind it take ...
const HEADROOM_MIN: u64 = 8 * 256;
/// ... and at most what the disk writes in a few tens of milliseconds.
const HEADROOM_MAX: u64 = 64 * 256;
/// While pages come in one by one: this part of the cap, because at random every page of DRAM counts ...
const PAGEWISE_PART: u64 = 256;
/// ... but at least what two chunks leave behind, which is 20 ms of a disk that reads 25,000 pages a second.
const PAGEWISE_MIN: u64 = 2 * 256;
/// The wide headroom is kept for so long after the last whole chunk came in.
const WIDE_MS: u64 = 1000;

/// The most that page-out keeps free below a cap.
pub const fn headroom_max(cap: PageCount) -> PageCount {
    PageCount(headroom_at(cap.0, true))
}

/// What is kept free below a cap: `wide` while whole chunks come in.
pub(super) const fn headroom_at(cap: u64, wide: bool) -> u64 {
    let (part, least) = if wide { (HEADROOM_PART, HEADROOM_MIN) } else { (PAGEWISE_PART, PAGEWISE_MIN) };
    headroom_of(cap, part, least)
}

const fn headroom_of(cap: u64, part: u64, least: u64) -> u64 {
    let wanted = cap / part;
    let bounded = if wanted < least { least } else { wanted };
    let bounded = if bounded > HEADROOM_MAX { HEADROOM_MAX } else { bounded };
    if bounded > cap / 4 { cap / 4 } else { bounded }
}

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
        let mut missing = wanted.saturating_sub(self.ops.pages_leaving());
        while missing > 0 {
            match self.next_cold(now) {
                Some(chunk) => {
                    let count = u64::from(self.chunk(chunk).ram.count());
                    if !self.start_out(chunk, out) {
                        break;
                    }
                    missing = missing.saturating_sub(count);
                }
                None => break,
            }
        }
        let chunks_missing = (missing as usize).div_ceil(256);
        self.replenish_cold(self.cold_target.max(chunks_missing), out);
    }

    /// The oldest cold chunk, if the pin rule lets it go. Entries that are no longer true are dropped on the way.
    fn next_cold(&mut self, now: Now) -> Option<ChunkIdx> {
        loop {
            let &(chunk, entry) = self.cold.front()?;
            match self.chunk(chunk).phase {
                Phase::Cold { epoch, seq } if seq == entry => {
                    if epoch > now.oldest_io {
                        self.pin_blocked = true;
                        self.stats.add(Metric::PinWaits, 1);
                        return None;
                    }
                    if self.chunk(chunk).busy() {
                        return None;
                    }
                    return Some(chunk);
                }
                _ => {
                    self.cold.pop_front();
                }
            }
        }
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
        self.cold.pop_front();
        self.cold_count -= 1;
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
    pub(super) fn replenish_cold(&mut self, target: usize, out: &mut Actions) {
        while self.ops.zaps() < ZAPS_MAX && self.cold_count + self.ops.zaps() * ZAP_BATCH < target {
            let want = (target - self.cold_count).min(ZAP_BATCH);
            if self.zap_victims(want, out) == 0 {
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

    fn zap_victims(&mut self, want: usize, out: &mut Actions) -> usize {
        let mut chunks = [ChunkIdx(0); ZAP_BATCH];
        let mut len = 0;
        // Busy chunks are hot: they go to the tail, and the search ends when it has seen as many as it may take.
        for _ in 0..2 * ZAP_BATCH {
            if len == want {
                break;
            }
            let Some(chunk) = self.victim() else { break };
            if self.chunk(chunk).busy() {
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

    pub(super) fn push_cold(&mut self, chunk: ChunkIdx) {
        if self.cold.len() == self.cold.capacity() {
            // Full of outdated entries: there are never more cold chunks than chunks.
            let chunks = &self.chunks;
            self.cold.retain(
                |(chunk, entry)| matches!(chunks[chunk.as_usize()].phase, Phase::Cold { seq, .. } if seq == *entry),
            );
        }
        if let Phase::Cold { seq, .. } = self.chunk(chunk).phase {
            self.cold.push_back((chunk, seq));
            self.cold_count += 1;
        }
    }

    pub(super) fn note_rescue(&mut self) {
        self.stats.add(Metric::RescuedChunks, 1);
        self.rescued_window += 1;
        self.reconsider();
    }

    pub(super) fn note_eviction(&mut self) {
        self.evicted_window += 1;
        self.reconsider();
    }

    fn reconsider(&mut self) {
        if self.rescued_window + self.evicted_window < WINDOW {
            return;
        }
        let resident = (self.resident / 256) as usize;
        if self.rescued_window > self.evicted_window {
            self.cold_target /= 2;
        } else {
            self.cold_target = (self.cold_target * 2 + 1).min((resident / COLD_PART).max(1));
        }
        (self.rescued_window, self.evicted_window) = (0, 0);
    }
}
