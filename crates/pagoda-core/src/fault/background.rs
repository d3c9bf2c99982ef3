//! Work that nobody waits for: aging, sampling, giving swap blocks back, and bringing everything back into DRAM.

use crate::stats::Metric;
use crate::units::{CHUNK_PAGES, ChunkIdx, PageCount};

use super::action::{Action, Actions, Now, Pages};
use super::headroom::page_out_leaves;
use super::machine::Machine;
use super::ops::ZAP_BATCH;
use super::reclaim::Want;

/// The queues age at this period (VMemDirect 4.2 leaves it open; the working-set sampling of ESX 5.3 uses 30 s for a VM, a
/// phase of a program is a few seconds).
const AGE_MS: u64 = 2000;
/// Chunks zapped a second to learn heat where nothing forces page-out: at most as many faults a second, which is
/// 0.03 % of a core at 10 us.
const SAMPLE_CHUNKS: usize = 32;
/// Period of sampling and trimming.
const HOUSEKEEPING_MS: u64 = 1000;
/// Chunks looked at in one round of trimming.
const TRIM_CHUNKS: u32 = 1024;
/// Punches in one round of trimming: each takes the swap file's lock, so a page-in may wait behind it.
const TRIM_PUNCHES: usize = 64;

impl Machine {
    pub(super) fn tick(&mut self, now: Now, out: &mut Actions) {
        if !self.armed {
            return;
        }
        self.borrow.is_paused = false;
        self.tick_curve(now);
        self.plan_watch(out);
        if now.ms.saturating_sub(self.background.aged_ms) >= AGE_MS {
            self.background.aged_ms = now.ms;
            self.queues.age();
        }
        if now.ms.saturating_sub(self.background.kept_ms) >= HOUSEKEEPING_MS {
            self.background.kept_ms = now.ms;
            self.background.restore_paused = false;
            self.sample(out);
            self.trim(out);
        }
    }

    /// Zaps some of the coldest chunks even without pressure: untouched ones are known to be cold when it comes.
    fn sample(&mut self, out: &mut Actions) {
        let wanted = self.cap() < self.config.chunks.pages().0 || self.scans();
        if wanted && self.ops.zaps() == 0 && !self.pinned {
            self.replenish_cold(self.cold.count() + SAMPLE_CHUNKS, Want::Heat, out);
        }
    }

    /// Begins to learn which chunks are hot. Where page-out has work to do, the queues know it already.
    pub(super) fn learn_heat(&mut self) {
        if self.cap() >= self.config.chunks.pages().0 {
            self.background.to_learn = self.config.chunks.0;
        }
    }

    /// Zaps the next chunks to learn from, some at a time. What is touched behind that goes to the tail of the queues, so those that
    /// were never zapped come first.
    pub(super) fn plan_learning(&mut self, out: &mut Actions) {
        if self.background.to_learn == 0 || !self.armed || self.arming || self.pinned || self.ops.zaps() > 0 {
            return;
        }
        let most = ZAP_BATCH.min(self.background.to_learn as usize);
        let zapped = self.zap_victims(most, Want::Heat, out) as u32;
        // Without victims all that is in DRAM was zapped.
        self.background.to_learn = if zapped == 0 { 0 } else { self.background.to_learn - zapped };
    }

    /// Gives outdated swap blocks back while nothing moves: in the middle of paging they are about to be overwritten, and
    /// punching them would only fragment the file.
    fn trim(&mut self, out: &mut Actions) {
        let moved = self.stats.get(Metric::PagesIn) + self.stats.get(Metric::PagesOut);
        if std::mem::replace(&mut self.background.pages_moved, moved) != moved || self.ops.len() > self.ops.zaps() {
            return;
        }
        let mut punches = 0;
        for _ in 0..TRIM_CHUNKS.min(self.config.chunks.0) {
            let chunk = ChunkIdx(self.background.trim_cursor % self.config.chunks.0);
            let stale = if self.chunk(chunk).busy() { Default::default() } else { self.chunk(chunk).stale() };
            let runs = stale.runs().count();
            if punches + runs > TRIM_PUNCHES && punches > 0 {
                return;
            }
            punches += runs;
            self.background.trim_cursor = (chunk.0 + 1) % self.config.chunks.0;
            if runs == 0 {
                continue;
            }
            out.extend(stale.runs().map(|run| Action::SwapPunch { pages: Pages { chunk, run } }));
            self.edit(chunk, |c| c.swap -= stale);
            self.stats.add(Metric::TrimmedPages, u64::from(stale.count()));
        }
    }

    /// With a cap of the whole VM everything comes back, so that it can run unarmed on huge pages again. A VM that has less
    /// than it is guaranteed gets back what it has elsewhere, up to that.
    pub(super) fn plan_restore(&mut self, out: &mut Actions) {
        if !self.armed
            || self.swapped == self.missing
            || (self.cap() < self.config.chunks.pages().0 && !self.is_below_min())
        {
            return;
        }
        if self.stall.is_some() || self.background.restore_paused {
            return;
        }
        for _ in 0..self.config.chunks.0 {
            if !self.ops.has_fill_room() {
                return;
            }
            let chunk = ChunkIdx(self.background.restore_cursor % self.config.chunks.0);
            let c = self.chunk(chunk);
            if !c.at_hand().is_empty() && !c.busy() && !self.start_fill(chunk, None, true, out) {
                return;
            }
            self.background.restore_cursor = (chunk.0 + 1) % self.config.chunks.0;
            if self.cap() < self.config.chunks.pages().0 && !self.is_below_min() {
                return;
            }
        }
    }

    /// There is room for another chunk of what is guaranteed, and page-out would not take it again.
    fn is_below_min(&self) -> bool {
        let has = self.resident + self.reserved + self.charge();
        has + CHUNK_PAGES <= self.min.min(page_out_leaves(PageCount(self.cap())).0)
    }
}
