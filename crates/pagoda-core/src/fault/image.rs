//! Images of a VM's memory that cost nothing until a page changes.
//!
//! An image begins with all pages *frozen*: it owns what they hold, wherever that is, and refers to the page itself. Page-out,
//! page-in and sharing move content and change none, so they go on. Before a page can change, the image takes its content
//! over ([`Action::Preserve`]), and the page is the VM's own again.
//!
//! The order: nobody writes (the VM is stopped and no direct I/O is in flight) -> pages that may be mapped writable are
//! protected -> the image begins. Later, for each page: protected -> preserved -> mapped writable, or dropped. So at every
//! moment a frozen page is one that has not changed since the image began, for a daemon that starts then too.
//!
//! Only the newest image has frozen pages. What an older one lacks is what the next newer one has.

use crate::bits::PageSet;
use crate::units::ChunkIdx;

use super::action::{Action, Actions, Now, OpId, Pages, Refusal, Source};
use super::machine::Machine;

/// Calls of one step of preparation, which protect as many whole chunks: some 0.4 ms, for which faults wait.
const PROTECT_CALLS: usize = 32;

impl Machine {
    /// Pages that the newest image owns and has no copy of.
    pub fn frozen(&self) -> u64 {
        self.images.frozen
    }

    /// How often all pages have been protected since preparation began.
    pub fn sweeps(&self) -> u32 {
        self.images.sweeps()
    }

    /// Protects some pages while the VM runs, so that few are left for the moment at which the image begins. Nothing relies
    /// on it: direct I/O in flight still writes to such pages, and no image begins before it has ended.
    pub(super) fn prepare(&mut self, on: bool, out: &mut Actions) {
        self.images.prepare(on);
        if !on || !self.armed || self.arming || self.pinned {
            return;
        }
        let mut calls = 0;
        while calls < PROTECT_CALLS {
            let (chunk, is_last) = self.images.next_to_protect(self.config.chunks);
            calls += self.protect_open(chunk, out);
            if is_last {
                return;
            }
        }
    }

    /// Begins an image, or refuses. It waits for nothing: the VM is stopped, and may run on after the answer alone.
    pub(super) fn freeze(&mut self, now: Now, out: &mut Actions) {
        let refusal = match () {
            () if self.pinned => Some(Refusal::Pinned),
            () if !self.armed || self.arming => Some(Refusal::Unarmed),
            () if now.oldest_io != u64::MAX => Some(Refusal::DirectIo),
            () => None,
        };
        if let Some(why) = refusal {
            out.push(Action::RefuseImage { why });
            return;
        }
        for chunk in self.config.chunks.iter() {
            self.protect_open(chunk, out);
            self.edit(chunk, |c| c.frozen = PageSet::FULL);
        }
        self.images.begin();
        out.push(Action::BeginImage);
    }

    /// Protects all pages of the chunk that may be written. Returns how many calls that takes.
    fn protect_open(&mut self, chunk: ChunkIdx, out: &mut Actions) -> usize {
        let open = std::mem::take(&mut self.chunks[chunk.as_usize()].open);
        out.extend(open.runs().map(|run| Action::Protect { pages: Pages { chunk, run } }));
        open.runs().count()
    }

    /// Pages may be written that were taken for protected. The image that was to begin behind that has not begun.
    pub(super) fn protect_failed(&mut self, pages: Pages) {
        let c = self.chunk(pages.chunk);
        let open = PageSet::range(pages.run.start, pages.run.len) & c.ram;
        if c.frozen.intersects(open) {
            self.thaw();
        }
        self.chunks[pages.chunk.as_usize()].open |= open;
    }

    /// These pages may change from now on: what images own of them is preserved first. `Action`s that let the VMM write them
    /// are to follow.
    pub(super) fn open(&mut self, chunk: ChunkIdx, pages: PageSet, out: &mut Actions) {
        self.preserve(chunk, pages, None, out);
        self.chunks[chunk.as_usize()].open |= pages;
    }

    /// What these pages hold is about to change or to go. `read`: has brought those of them that are only in swap.
    pub(super) fn preserve(&mut self, chunk: ChunkIdx, pages: PageSet, read: Option<OpId>, out: &mut Actions) {
        let c = self.chunk(chunk);
        let owned = c.frozen & pages;
        if owned.is_empty() {
            return;
        }
        let swapped = read.map_or(Source::Block, Source::Buffer);
        let zero = owned - c.ram - c.shared - c.swap;
        let sources = [
            (owned & c.ram, Source::Ram),
            (owned & c.shared, Source::Frame),
            (owned & c.swapped(), swapped),
            (zero, Source::Zero),
        ];
        for (pages, from) in sources {
            out.extend(pages.runs().map(|run| Action::Preserve { pages: Pages { chunk, run }, from }));
        }
        self.edit(chunk, |c| c.frozen -= owned);
    }

    /// The VM may never be evicted from now on, for DMA that nobody sees writes its memory.
    pub(super) fn pin(&mut self, out: &mut Actions) {
        self.pinned = true;
        if self.images.frozen > 0 {
            self.thaw();
            out.push(Action::LoseImages);
        }
    }

    pub(super) fn thaw(&mut self) {
        for chunk in self.config.chunks.iter() {
            self.edit(chunk, |c| c.frozen = PageSet::EMPTY);
        }
    }
}
