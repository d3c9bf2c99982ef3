//! Chunks that are borrowed: clones of a snapshot read them in one *template*, which has what the snapshot has.
//!
//! The VMM has the template mapped there, privately and write-protected, so a read is no business of the machine's. The first
//! write to a page is a fault. It takes room for one page, the page is *private* from then on, and the kernel copies it. So a
//! clone has no copy of what it only reads, and one page for each that it writes.
//!
//! Private pages are the VMM's alone: they cannot be unmapped without being lost, nor can they leave. So a chunk becomes the
//! VM's own, in the RAM file, before anything is done to it that is done to pages: page-out, discards, images, pins. That is one
//! way only, and copies no page but those that differ from the template; the others are in swap, of which the template is a
//! copy.
//!
//! The order: protect the whole chunk -> move the clock on -> every direct I/O in flight began after that -> copy what differs
//! -> map the RAM file in the template's place. A write before the copy gives it up: the writer may be direct I/O that is waited
//! for. One after that waits for its end.
//!
//! `private` says what the VM is charged for, and never what has to be copied. It holds every page that can be written without
//! a fault, and so every page that was written.
//!
//! What the guest sees: a write to a borrowed page waits as a page-in does, when there is no room. If a chunk cannot become
//! the VM's own, it is tried again, and what waits for it goes on waiting. If none may ever ([`Event::KeepBorrowed`]), what the
//! guest gives back of it stays as it is.
//!
//! [`Event::KeepBorrowed`]: super::Event::KeepBorrowed

use crate::bits::{PageSet, Run};
use crate::stats::Metric;
use crate::units::{ChunkIdx, PageIdx};

use super::action::{Access, Action, Actions, FaultKind, Now, OpId, Pages};
use super::machine::Machine;
use super::ops::{Op, OpKind, OwnStage};
use super::table::Phase;

impl Machine {
    /// Chunks that are borrowed. While there are any, no image begins.
    pub fn borrowed_chunks(&self) -> u64 {
        self.borrow.chunks
    }

    /// A borrowed chunk was written when it was to become the VM's own: it is tried again at the next [`super::Event::Tick`],
    /// which should come soon.
    pub fn is_owning_paused(&self) -> bool {
        self.borrow.chunks > 0 && self.borrow.is_paused
    }

    /// A page that counts as DRAM already, so that nobody who writes it waits for room.
    pub(super) fn is_private(&self, page: PageIdx) -> bool {
        self.chunk(page.chunk()).private.contains(page.index_in_chunk())
    }

    /// A fault on a borrowed chunk.
    pub(super) fn serve_borrowed(
        &mut self,
        page: PageIdx,
        access: Access,
        kind: FaultKind,
        out: &mut Actions,
    ) -> Metric {
        let (chunk, index) = (page.chunk(), page.index_in_chunk());
        let pages = Pages { chunk, run: Run { start: index, len: 1 } };
        let is_moving = |op| matches!(self.ops.get(op).kind, OpKind::Own { stage: OwnStage::Moving });
        // The RAM file may be in its place already.
        if self.chunk(chunk).owning.is_some_and(is_moving) {
            self.wait(page, access);
            return Metric::FaultsWaited;
        }
        if access == Access::Read && kind == FaultKind::Unmapped {
            // The template has every page: the message is stale.
            out.push(Action::Wake { pages });
            return Metric::FaultsMinor;
        }
        if !self.has_room_for(page) {
            self.wait(page, Access::Write);
            return Metric::FaultsWaited;
        }
        self.give_up_owning(chunk);
        self.edit(chunk, |c| c.private.set(index));
        self.touch(chunk);
        out.push(Action::Unprotect { pages });
        Metric::FaultsBorrowed
    }

    /// Direct I/O that nobody sees may be in flight, so nothing may be moved. A move under way began before that.
    pub(super) fn keep_borrowed(&mut self) {
        self.borrow.is_kept = true;
        while let Some(op) = self.ops.fenced_by(u64::MAX) {
            self.end_own(op);
        }
        self.ops.give_up_fencing();
    }

    /// The chunk is being written.
    fn give_up_owning(&mut self, chunk: ChunkIdx) {
        let Some(id) = self.chunk(chunk).owning else { return };
        self.stats.add(Metric::OwnsGivenUp, 1);
        // Tried again at once, it would be protected before the writer has gone on.
        self.borrow.is_paused = true;
        let OpKind::Own { stage } = &mut self.ops.get_mut(id).kind else { unreachable!("a chunk is owned by another") };
        match stage {
            OwnStage::Fencing { given_up } => *given_up = true,
            OwnStage::Fenced { .. } => self.end_own(id),
            OwnStage::Moving => unreachable!("writers wait for the end of a move"),
        }
    }

    fn end_own(&mut self, id: OpId) {
        let op = self.ops.remove(id);
        self.chunks[op.chunk.as_usize()].owning = None;
    }

    /// A borrowed chunk is to become the VM's own, if it is not on its way already and can be now.
    pub(super) fn start_own(&mut self, chunk: ChunkIdx, out: &mut Actions) {
        if self.borrow.is_paused || self.borrow.is_kept || self.chunk(chunk).owning.is_some() {
            return;
        }
        let kind = OpKind::Own { stage: OwnStage::Fencing { given_up: false } };
        let Some(op) = self.ops.insert(Op { chunk, kind }) else { return };
        self.chunks[chunk.as_usize()].owning = Some(op);
        out.push(Action::Fence { op, chunk });
    }

    /// These pages are to change in another way than by a write: their chunk has to be the VM's own first. It sets out now.
    pub(super) fn waits_to_own(&mut self, chunk: ChunkIdx, pages: PageSet, out: &mut Actions) -> bool {
        let c = self.chunk(chunk);
        let waits = c.borrowed && !self.borrow.is_kept && pages.intersects(c.swap | c.private);
        if waits {
            self.start_own(chunk, out);
        }
        waits
    }

    /// The chunk is protected.
    pub(super) fn fenced(&mut self, id: OpId, epoch: Option<u64>) {
        let OpKind::Own { stage } = &mut self.ops.get_mut(id).kind else {
            unreachable!("another operation was fenced")
        };
        match (*stage, epoch) {
            (OwnStage::Fencing { given_up: false }, Some(epoch)) => *stage = OwnStage::Fenced { epoch },
            (OwnStage::Fencing { .. }, _) => {
                self.borrow.is_paused = true;
                self.end_own(id);
            }
            (stage, _) => unreachable!("fenced in the stage {stage:?}"),
        }
    }

    /// Goes on with chunks that set out, and has more of them set out where all have to.
    pub(super) fn plan_owning(&mut self, now: Now, out: &mut Actions) {
        self.borrow.is_pin_blocked = false;
        if self.borrow.chunks == 0 || self.borrow.is_kept {
            return;
        }
        while let Some(op) = self.ops.fenced_by(now.oldest_io) {
            self.ops.get_mut(op).kind = OpKind::Own { stage: OwnStage::Moving };
            out.push(Action::Own { op, chunk: self.ops.get(op).chunk });
        }
        self.borrow.is_pin_blocked = self.ops.fenced_by(u64::MAX).is_some();
        let wants_all = self.borrow.wants_all() || self.pinned || self.images.is_preparing();
        while wants_all && !self.borrow.is_paused && self.ops.has_own_room() && self.has_idle_borrowed() {
            let chunk = self.borrow.next(self.config.chunks);
            if self.chunk(chunk).borrowed {
                self.start_own(chunk, out);
            }
        }
    }

    /// Not all borrowed chunks have set out.
    fn has_idle_borrowed(&self) -> bool {
        (self.ops.owns() as u64) < self.borrow.chunks
    }

    /// The chunk is the VM's own, or could not become so.
    pub(super) fn own_done(&mut self, id: OpId, kept: Option<PageSet>) {
        let op = *self.ops.get(id);
        assert!(matches!(op.kind, OpKind::Own { stage: OwnStage::Moving }), "{:?} ended as if it had moved", op.kind);
        self.end_own(id);
        let Some(kept) = kept else {
            self.borrow.is_paused = true;
            return;
        };
        self.stats.add(Metric::OwnedChunks, 1);
        self.borrow.note_owned();
        let is_empty = self.edit(op.chunk, |c| {
            (c.borrowed, c.private, c.ram) = (false, PageSet::EMPTY, kept);
            c.ram.is_empty()
        });
        if is_empty {
            self.queues.remove(op.chunk);
            self.chunks[op.chunk.as_usize()].phase = Phase::Absent;
        } else {
            // Of its pages it is known only when they were written first. If they are in use, that shows when they are unmapped.
            self.chunks[op.chunk.as_usize()].phase = Phase::Hot;
            self.queues.insert_first(op.chunk);
        }
    }
}
