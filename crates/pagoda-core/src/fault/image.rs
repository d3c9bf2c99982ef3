//! Images of a VM's memory that cost nothing until a page changes.
//!
//! An image begins with all pages *frozen*: it owns what they hold, wherever that is, and refers to the page itself. Page-out,
//! page-in and sharing move content and change none, so they go on. Before a page can change, the image takes its content
//! over ([`Action::Preserve`]), and the page is the VM's own again.
//!
//! The order: nobody writes (the VM is stopped and no direct I/O is in flight) -> pages that may be mapped writable are
//! protected, most of them before, while the VM runs -> the image begins. Later, for each page: its content is in memory ->
//! preserved -> mapped writable, or dropped. So at every moment a frozen page is one that has not changed since the image
//! began, for a daemon that starts then too. Filling preserves pages that do not change, until none is frozen.
//!
//! *The same* is a page of which it is known that nobody could have changed it since the newest image began. An image that has
//! the one before it as its parent copies no such page: it refers to the parent, which has it. The set is full when an image
//! begins and only shrinks: a page leaves it before it can be written unseen ([`Machine::change`]), which filling does not do.
//! Whatever loses count of that (a pin, a loss, an unarmed VM, a new machine) empties it.
//!
//! Only the newest image has frozen pages. What an older one lacks is what the next newer one has. What fails ends the image;
//! the guest notices nothing but the copies that its first writes wait for.

use crate::bits::{PageSet, Run};
use crate::units::ChunkIdx;

use super::action::{Action, Actions, IoError, Now, OpId, Pages, Refusal, Source, Stall};
use super::machine::Machine;
use super::ops::{Op, OpKind};

/// Calls of one step of preparation, which protect as many chunks: some 0.4 ms, for which faults wait.
const PROTECT_CALLS: usize = 32;
/// Pages copied in one step of filling, some 100 us.
const FILL_PAGES: usize = 64;

impl Machine {
    /// Pages that the newest image owns and has no copy of.
    pub fn frozen(&self) -> u64 {
        self.images.frozen
    }

    /// Pages of which it is known that the newest image has what they hold.
    pub fn same(&self) -> u64 {
        self.images.same
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
    pub(super) fn freeze(&mut self, has_parent: bool, now: Now, out: &mut Actions) {
        let refusal = match () {
            () if self.pinned => Some(Refusal::Pinned),
            () if !self.armed || self.arming => Some(Refusal::Unarmed),
            () if self.borrow.chunks > 0 => Some(Refusal::Borrowed),
            () if now.oldest_io != u64::MAX => Some(Refusal::DirectIo),
            () => None,
        };
        if let Some(why) = refusal {
            out.push(Action::RefuseImage { why });
            return;
        }
        // Of what the image before lacks, this one would be the parent of its parent.
        let inherits = has_parent && self.images.frozen == 0;
        for chunk in self.config.chunks.iter() {
            let open = self.chunk(chunk).open;
            self.protect_open(chunk, out);
            self.edit(chunk, |c| {
                c.inherited = if inherits { c.same - open } else { PageSet::EMPTY };
                (c.frozen, c.same) = (PageSet::FULL, PageSet::FULL);
            });
        }
        self.images.begin();
        out.push(Action::BeginImage);
    }

    /// Protects all pages of the chunk that may be written, with one call from the first to the last of them: what is between
    /// them is protected already, or not mapped and stays so. Returns how many calls that takes.
    pub(super) fn protect_open(&mut self, chunk: ChunkIdx, out: &mut Actions) -> usize {
        let open = std::mem::take(&mut self.chunks[chunk.as_usize()].open);
        let (Some(first), Some(last)) = (open.first_set(), open.last_set()) else { return 0 };
        let run = Run { start: first, len: u16::from(last - first) + 1 };
        out.push(Action::Protect { pages: Pages { chunk, run } });
        1
    }

    /// Pages may be written that were taken for protected. The image that was to begin behind that has not begun.
    pub(super) fn protect_failed(&mut self, pages: Pages) {
        let c = self.chunk(pages.chunk);
        // Clean pages among them were protected before, and are.
        let open = (PageSet::range(pages.run.start, pages.run.len) & c.ram) - c.clean;
        if c.frozen.intersects(open) {
            self.thaw();
        }
        // Some may have been protected before and be so still, which nobody knows.
        self.edit(pages.chunk, |c| {
            c.same -= open;
            c.open |= open;
        });
    }

    /// These pages may change from now on: what images own of them is preserved first. `Action`s that let the VMM write them
    /// are to follow.
    pub(super) fn open(&mut self, chunk: ChunkIdx, pages: PageSet, out: &mut Actions) {
        self.change(chunk, pages, None, out);
        self.chunks[chunk.as_usize()].open |= pages;
    }

    /// What these pages hold is about to change, may be changed unseen from now on, or goes. `read`: has brought those of them
    /// that are only in swap.
    pub(super) fn change(&mut self, chunk: ChunkIdx, pages: PageSet, read: Option<OpId>, out: &mut Actions) {
        self.preserve(chunk, pages, read, out);
        if self.chunk(chunk).same.intersects(pages) {
            self.edit(chunk, |c| c.same -= pages);
        }
    }

    /// The newest image takes over what these pages hold, as far as it has not done so yet.
    fn preserve(&mut self, chunk: ChunkIdx, pages: PageSet, read: Option<OpId>, out: &mut Actions) {
        let c = self.chunk(chunk);
        let owned = c.frozen & pages;
        if owned.is_empty() {
            return;
        }
        let inherited = owned & c.inherited;
        let copied = owned - inherited;
        let swapped = copied & c.swapped();
        assert!(swapped.is_empty() || read.is_some(), "{chunk:?}: a frozen page in swap changes that nobody has read");
        let zero = copied - c.ram - c.shared - c.swap;
        let sources = [
            (inherited, Source::Parent),
            (copied & c.ram, Source::Ram),
            (copied & c.shared, Source::Frame),
            (swapped, read.map_or(Source::Zero, Source::Buffer)),
            (zero, Source::Zero),
        ];
        for (pages, from) in sources {
            out.extend(pages.runs().map(|run| Action::Preserve { pages: Pages { chunk, run }, from }));
        }
        self.edit(chunk, |c| {
            c.frozen -= owned;
            c.inherited -= owned;
        });
    }

    /// These pages are to be dropped, and the image has still to read some of them from swap. It does so now.
    pub(super) fn waits_for_image(&mut self, chunk: ChunkIdx, pages: PageSet, out: &mut Actions) -> bool {
        let c = self.chunk(chunk);
        let unread = pages & c.unread();
        // If there is no room for another read, some are under way, and the end of one comes by here.
        let _ = !unread.is_empty() && self.start_keep(chunk, unread, out);
        !unread.is_empty()
    }

    /// Reads frozen pages that are in swap alone. False: not possible now.
    fn start_keep(&mut self, chunk: ChunkIdx, pages: PageSet, out: &mut Actions) -> bool {
        if self.ops.is_keeping(chunk) {
            return false;
        }
        let image = self.images.number();
        let Some(op) = self.ops.insert(Op { chunk, kind: OpKind::Keep { pages, image } }) else { return false };
        out.push(Action::Keep { op, chunk, pages });
        true
    }

    /// A `Keep` of an image, by its number, has ended. What counts is what has not changed since it began: a page that was
    /// preserved may have been written to its block again, and all of them are other pages for a newer image.
    pub(super) fn keep_done(
        &mut self,
        id: OpId,
        chunk: ChunkIdx,
        (pages, image): (PageSet, u32),
        result: Result<(), IoError>,
        out: &mut Actions,
    ) {
        let c = self.chunk(chunk);
        let is_newest = image == self.images.number();
        let unchanged = if is_newest { pages & c.unread() } else { PageSet::EMPTY };
        match result {
            Ok(()) => {
                self.images.note_keep();
                self.preserve(chunk, unchanged, Some(id), out);
            }
            // The block of a page that has changed may be gone, so that it could not be read.
            Err(_) if unchanged != pages => {}
            Err(_) if self.images.note_failed_keep() => self.lose_images(out),
            Err(_) => {}
        }
        out.push(Action::Release { op: id });
    }

    /// There is something that [`super::Event::Fill`] could do. A VM whose swap cannot be read is left in peace.
    pub fn has_pages_to_fill(&self) -> bool {
        self.armed && self.images.frozen > 0 && !matches!(self.stall, Some((Stall::Read(_), _)))
    }

    /// The last [`super::Event::Fill`] found nothing that could be done at that moment.
    pub fn is_fill_blocked(&self) -> bool {
        self.images.is_fill_blocked
    }

    /// Copies some of what the image lacks, so that it needs the VM no more.
    pub(super) fn plan_fill(&mut self, out: &mut Actions) {
        self.images.is_fill_blocked = false;
        if !self.has_pages_to_fill() {
            return;
        }
        for _ in 0..self.config.chunks.0 {
            if self.fill_from(self.images.next_to_fill(), out) {
                return;
            }
            self.images.leave_filled(self.config.chunks);
        }
        self.images.is_fill_blocked = true;
    }

    /// False: nothing of the chunk can be done now.
    fn fill_from(&mut self, chunk: ChunkIdx, out: &mut Actions) -> bool {
        let c = self.chunk(chunk);
        // Nothing is read of what the parent has.
        let inherited = c.inherited;
        if !inherited.is_empty() {
            self.preserve(chunk, inherited, None, out);
            return true;
        }
        // A page-out may have asked for its punch, in this very list of actions: then the RAM file is not read any more. And
        // what is on its way in need not be read twice.
        if c.frozen.is_empty() || c.busy() {
            return false;
        }
        let unread = c.unread();
        let zero = c.frozen - c.ram - c.shared - c.swap;
        let copied: PageSet = (c.frozen - unread - zero).iter().take(FILL_PAGES).collect();
        self.preserve(chunk, copied | zero, None, out);
        let is_read = !unread.is_empty() && self.start_keep(chunk, unread, out);
        is_read || !(copied | zero).is_empty()
    }

    /// The VM may never be evicted from now on, for DMA that nobody sees writes its memory.
    pub(super) fn pin(&mut self, out: &mut Actions) {
        self.pinned = true;
        self.forget();
        if self.images.frozen > 0 {
            self.lose_images(out);
        }
    }

    /// Of no page is it known any more that it is the newest image's. What that inherits from its own parent stays so.
    pub(super) fn forget(&mut self) {
        if self.images.same > 0 {
            self.config.chunks.iter().for_each(|chunk| self.edit(chunk, |c| c.same = PageSet::EMPTY));
        }
    }

    fn lose_images(&mut self, out: &mut Actions) {
        self.thaw();
        out.push(Action::LoseImages);
    }

    pub(super) fn thaw(&mut self) {
        for chunk in self.config.chunks.iter() {
            self.edit(chunk, |c| (c.frozen, c.inherited, c.same) = (PageSet::EMPTY, PageSet::EMPTY, PageSet::EMPTY));
        }
    }
}
