//! What a move of the VM to another host needs: which pages were written, and copies of what pages hold.
//!
//! A look gives all pages that may have changed since the look before, and protects them again. It rests on the same knowledge as
//! images do: a page leaves [`same`](super::table::Chunk::same) before it can be written unseen. The first look gives all pages.
//!
//! A copy is what a page holds at some moment after it was asked for. If the page changes after that, the next look has
//! it. A page in swap is read into a buffer for the move alone, and does not come into DRAM. Meanwhile it may be paged
//! in and change, and its block may be written again or dropped. So what the read has brought counts only for pages
//! that are still in swap alone, and only if there was no look since it began: that look would have taken such a change
//! for one before the copy. Where something else is under way with the chunk, the copy is refused, and has to be asked
//! for again.
//!
//! The clock of direct I/O is the mover's to look at: a copy counts only if all direct I/O in flight began behind the protection of
//! its pages (`docs/architecture/direct-io.md`).

use crate::bits::PageSet;
use crate::units::{ChunkIdx, PageIdx};

use super::action::{Access, Action, Actions, IoError, OpId, Pages, Source};
use super::machine::Machine;
use super::ops::{Op, OpKind};

impl Machine {
    /// Whether [`super::Event::Look`] can tell what was written, and why not.
    pub fn can_look(&self) -> Result<(), super::Refusal> {
        match () {
            () if self.pinned => Err(super::Refusal::Pinned),
            () if !self.armed || self.arming => Err(super::Refusal::Unarmed),
            () if self.borrow.chunks > 0 => Err(super::Refusal::Borrowed),
            () => Ok(()),
        }
    }

    /// Whether a copy of these pages could begin now. A few reads of pages in swap are under way at a time.
    pub fn has_copy_room(&self, chunk: ChunkIdx, pages: PageSet) -> bool {
        self.ops.has_copy_room() || !pages.intersects(self.chunk(chunk).swapped())
    }

    /// A write to this page is known to be the first since the last look, and nothing but its answer is needed for it to go on: no
    /// page-in, no room, no page-out that it would cancel.
    pub fn is_first_write(&self, page: PageIdx, access: Access) -> bool {
        let (c, index) = (self.chunk(page.chunk()), page.index_in_chunk());
        access == Access::Write
            && self.can_look().is_ok()
            && !c.busy()
            && c.same.contains(index)
            && c.ram.contains(index)
    }

    /// Pages that may hold something else than zeros, by chunk. Where it cannot be told, these are all pages of a chunk.
    pub fn content(&self) -> Vec<(ChunkIdx, PageSet)> {
        let may_hold = |chunk| {
            let c = self.chunk(chunk);
            let is_known = self.armed && !self.arming && !c.borrowed && !c.busy();
            if is_known { c.ram | c.shared | c.swap } else { PageSet::FULL }
        };
        self.config.chunks.iter().map(|chunk| (chunk, may_hold(chunk))).filter(|(_, pages)| !pages.is_empty()).collect()
    }

    /// What the last look has found, by chunk. It is given once.
    pub fn take_written(&mut self) -> Vec<(ChunkIdx, PageSet)> {
        std::mem::take(&mut self.written)
    }

    /// Notes what may have been written since the last look, and protects it.
    pub(super) fn look(&mut self, out: &mut Actions) {
        // An image has other uses for what is known to be the same.
        assert!(self.can_look().is_ok() && self.images.frozen == 0, "a look at what nobody can tell");
        self.written.clear();
        self.looks = self.looks.wrapping_add(1);
        for chunk in self.config.chunks.iter() {
            let written = PageSet::FULL - self.chunk(chunk).same;
            if written.is_empty() {
                continue;
            }
            self.protect_open(chunk, out);
            self.edit(chunk, |c| c.same = PageSet::FULL);
            self.written.push((chunk, written));
        }
    }

    /// Has copies made of what these pages hold.
    pub(super) fn copy_out(&mut self, pages: Pages, out: &mut Actions) {
        let Pages { chunk, run } = pages;
        let wanted = PageSet::range(run.start, run.len);
        let c = self.chunk(chunk);
        // A page-out may have asked for its punch in this very list of actions: then the RAM file is not read any more.
        if !self.armed || c.busy() || self.ops.is_copying_out(chunk, wanted) {
            out.push(Action::CopyLater { pages });
            return;
        }
        let swapped = wanted & c.swapped();
        let sources = [
            (wanted & c.ram, Source::Ram),
            (wanted & c.shared, Source::Frame),
            (wanted - c.ram - c.shared - c.swap, Source::Zero),
        ];
        for (pages, from) in sources {
            out.extend(pages.runs().map(|run| Action::CopyOut { pages: Pages { chunk, run }, from }));
        }
        if swapped.is_empty() {
            return;
        }
        match self.ops.insert(Op { chunk, kind: OpKind::CopyOut { pages: swapped, look: self.looks } }) {
            Some(op) => out.push(Action::Keep { op, chunk, pages: swapped }),
            None => copy_later(chunk, swapped, out),
        }
    }

    /// A read for a move has ended.
    pub(super) fn copy_out_done(
        &mut self,
        id: OpId,
        chunk: ChunkIdx,
        (pages, look): (PageSet, u32),
        result: Result<(), IoError>,
        out: &mut Actions,
    ) {
        let is_recent = look == self.looks;
        let still = if is_recent { pages & self.chunk(chunk).swapped() } else { PageSet::EMPTY };
        match result {
            Ok(()) => {
                let from = Source::Buffer(id);
                out.extend(still.runs().map(|run| Action::CopyOut { pages: Pages { chunk, run }, from }));
                copy_later(chunk, pages - still, out);
            }
            // The block of a page that has come in may be gone, so that it could not be read.
            Err(_) if still != pages => copy_later(chunk, pages, out),
            Err(error) => {
                out.extend(still.runs().map(|run| Action::CopyFailed { pages: Pages { chunk, run }, error }));
            }
        }
        out.push(Action::Release { op: id });
    }
}

fn copy_later(chunk: ChunkIdx, pages: PageSet, out: &mut Actions) {
    out.extend(pages.runs().map(|run| Action::CopyLater { pages: Pages { chunk, run } }));
}
