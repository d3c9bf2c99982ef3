//! Prefetch: pages that are expected to be needed soon come in before anybody asks for them.
//!
//! It is meant for a VM that was made of an image: what such a VM needed the last time it will need again. And for one that runs
//! before all of its pages have come from another host: what comes unasked for is sent in the order of its use. The list is advice.
//! Reads of it are fills that nobody waits for, so a page goes through the states of any page-in, and a fault on it joins its
//! read. Faults come first: the pager reads for them first, and some fills are left for them. Nothing leaves DRAM for a prefetched
//! page, not even the headroom that page-out would restore. It comes in unmapped and clean, and does not make its chunk hot: if
//! nobody touches it, it is among the first to leave.

use crate::bits::PageSet;
use crate::stats::Metric;
use crate::units::{CHUNK_PAGES, ChunkIdx};

use super::action::{Action, Actions, Now, OpId, Pages};
use super::headroom::headroom_at;
use super::machine::Machine;
use super::serve::Purpose;
use super::table::Phase;

/// Of the whole-chunk reads, so many may be of prefetch: the others are for those who wait.
pub(super) const PREFETCHES_MAX: usize = super::FILLS_MAX / 2;
/// What has found no room for so long is given up: the VM is under way by then, and what it needs it has asked for.
const PREFETCH_MS_MAX: u64 = 30_000;

impl Machine {
    /// Has these pages brought in, in this order, as far as they are in swap and there is room. It takes the place of what was to
    /// be prefetched before. Chunks outside the space are left out. The reads begin with the next event.
    pub fn prefetch(&mut self, list: Vec<(ChunkIdx, PageSet)>) {
        self.prefetch.set(list, self.config.chunks);
    }

    /// Pages have come from another host. They come in before anybody asks, as what is to be prefetched.
    pub(super) fn came(&mut self, chunk: ChunkIdx, pages: PageSet) {
        if !self.armed {
            return;
        }
        self.edit(chunk, |c| c.missing -= pages);
        let pages = pages & self.chunk(chunk).swapped();
        self.prefetch.add(chunk, pages, self.config.chunks);
    }

    /// Starts the next reads of prefetch. True: some are under way, and what else could come in may wait.
    pub(super) fn plan_prefetch(&mut self, now: Now, out: &mut Actions) -> bool {
        while self.prefetch.in_flight < PREFETCHES_MAX
            && let Some((chunk, pages)) = self.prefetch.next()
        {
            if now.ms >= *self.prefetch.until_ms.get_or_insert(now.ms + PREFETCH_MS_MAX) {
                self.prefetch.clear();
                break;
            }
            if !self.armed || self.stall.is_some() || !self.waiting.is_empty() {
                break;
            }
            let c = self.chunk(chunk);
            let wanted = pages & (c.at_hand() - c.reading);
            // A chunk that is about to leave is not the one to be filled.
            let stays = c.out.is_none() && matches!(c.phase, Phase::Absent | Phase::Hot);
            if stays && !wanted.is_empty() {
                // What is being read of it may be the same.
                let is_filling = c.fill.is_some();
                if is_filling || !self.has_prefetch_room() || !self.begin_fill(chunk, wanted, Purpose::Prefetch, out) {
                    break;
                }
                self.prefetch.in_flight += 1;
            }
            self.prefetch.drop_next();
        }
        self.prefetch.in_flight > 0
    }

    /// Another chunk can come in, and page-out has no more to do than before.
    fn has_prefetch_room(&self) -> bool {
        let kept = if self.cap() < self.config.chunks.pages().0 { headroom_at(self.cap(), true) } else { 0 };
        self.free() >= CHUNK_PAGES + kept
    }

    /// Pages have come that nobody waits for.
    pub(super) fn prefetched(&mut self, id: OpId, chunk: ChunkIdx, pages: PageSet, direct: bool, out: &mut Actions) {
        let c = self.chunk(chunk);
        let swapped = c.swapped();
        // A single page may have been read beside it, and been quicker.
        let pages = pages - c.ram;
        self.note_read((pages & swapped).count());
        self.edit(chunk, |c| {
            c.ram |= pages;
            c.clean |= pages;
            c.prefetched |= pages;
        });
        let c = &mut self.chunks[chunk.as_usize()];
        if c.phase == Phase::Absent && !c.ram.is_empty() {
            c.phase = Phase::Hot;
            self.queues.insert_first(chunk);
        }
        self.stats.add(Metric::PagesIn, u64::from(pages.count()));
        self.stats.add(Metric::PagesPrefetched, u64::from(pages.count()));
        if direct {
            out.push(Action::ChunkComplete { op: id });
        } else {
            out.extend(pages.runs().map(|run| Action::Store { op: id, pages: Pages { chunk, run } }));
            out.push(Action::Release { op: id });
        }
    }

    /// Somebody waits for what was to be prefetched: it comes in as what was asked for.
    pub(super) fn note_prefetch_joined(&mut self, chunk: ChunkIdx, pages: PageSet) {
        let count = u64::from((pages - self.chunk(chunk).ram).count());
        self.stats.add(Metric::PagesPrefetched, count);
        self.stats.add(Metric::PrefetchedUsed, count);
    }
}
