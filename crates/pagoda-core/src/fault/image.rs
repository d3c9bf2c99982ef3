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

use super::action::{Action, Actions, Now, OpId, Pages, Source};
use super::machine::Machine;

impl Machine {
    /// Pages that the newest image owns and has no copy of.
    pub fn frozen(&self) -> u64 {
        self.frozen
    }

    /// Begins the image that was asked for, if nobody can write past protection.
    pub(super) fn plan_image(&mut self, now: Now, out: &mut Actions) {
        if !self.freezing || !self.armed || self.arming {
            return;
        }
        self.freezing = false;
        if self.pinned || now.oldest_io != u64::MAX {
            out.push(Action::RefuseImage);
            return;
        }
        for chunk in self.config.chunks.iter() {
            let open = self.chunk(chunk).open;
            out.extend(open.runs().map(|run| Action::Protect { pages: Pages { chunk, run } }));
            self.edit(chunk, |c| {
                c.open = PageSet::EMPTY;
                c.frozen = PageSet::FULL;
            });
        }
        out.push(Action::BeginImage);
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
        if self.frozen > 0 {
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
