//! Has each action of the machine executed by the owner of what it is about, and takes in what comes of it.

use std::time::Instant;

use pagoda_core::fault::{Action, Event};

use super::Engine;
use super::broken::Broken;
use super::link::agent::Asked;
use super::paging::Answered;
use super::sampler::{Context, Sampler};

impl Engine {
    /// Has an action executed by the owner of what it is about.
    pub(super) fn execute(&mut self, action: Action) -> Result<(), Broken> {
        let (paging, ring, now) = (&mut self.paging, &mut self.ring, self.fault_at);
        match action {
            Action::Map { pages, protect } => paging.map(pages, protect)?,
            Action::Unprotect { pages } => paging.unprotect(pages)?,
            Action::Protect { pages } => {
                if !paging.protect(pages) {
                    self.imager.note_unprotected();
                }
            }
            Action::Preserve { pages, from } => {
                let notice = self.imager.preserve(pages, from, paging, ring);
                self.report_image(notice);
            }
            Action::BeginImage => self.imager.begin(paging),
            Action::RefuseImage { why } => self.imager.refuse(why, paging),
            Action::LoseImages => self.lose_image(),
            Action::Wake { pages } => paging.wake(pages),
            Action::Zero { pages } => paging.zero(pages)?,
            Action::ZeroChunk { chunk } => paging.zero_chunk(chunk)?,
            Action::ReadPage { op, page, demand } => paging.read_page(ring, op, page, demand.then_some(now))?,
            Action::ReadSpan { op, span, wanted, demand } => {
                paging.read_span(ring, op, span, wanted, demand.then_some(now))?;
            }
            Action::ReadChunk { op, chunk, demand } => paging.read_chunk(ring, op, chunk, demand.then_some(now))?,
            Action::ChunkComplete { op } => {
                let answered = paging.withdraw(op);
                self.note_answered(answered);
            }
            Action::ChunkAbandon { op, chunk } => {
                let answered = paging.abandon_chunk(op, chunk)?;
                self.note_answered(answered);
            }
            Action::Copy { op, pages, protect } => paging.copy(ring, op, pages, protect)?,
            Action::Store { op, pages } => paging.store(ring, op, pages)?,
            Action::Keep { op, chunk, pages } => {
                paging.keep(ring, op, chunk, pages)?;
                self.imager.begin_read(op);
            }
            Action::CopyOut { pages, from } => self.mover.copy(pages, from, paging, ring),
            Action::CopyLater { pages } => self.mover.put_off(pages),
            Action::CopyFailed { pages, error } => self.mover.fail(pages, error, paging),
            Action::Release { op } => {
                let answered = paging.release(ring, op)?;
                self.imager.end_read(op);
                self.note_answered(answered);
            }
            Action::WriteOut { op, chunk, pages } => paging.write_out(op, chunk, pages),
            Action::PunchOut { op, chunk, pages, alone } => paging.punch_out(op, chunk, pages, alone)?,
            Action::CopyBack { pages } => paging.copy_back(pages)?,
            Action::DropShared { pages } => paging.drop_shared(pages),
            Action::SwapPunch { pages } => paging.swap_punch(pages)?,
            Action::RamPunch { pages } => paging.ram_punch(pages)?,
            Action::Zap { op } => self.zap(op)?,
            Action::ZapPages { ticket } => self.zap_pages(Asked::Watch { ticket, at: Instant::now() })?,
            Action::Fence { op, chunk } => paging.fence(op, chunk),
            Action::Own { op, chunk } => {
                paging.begin_own(op, chunk);
                self.go_on_owning()?;
            }
            Action::Share { op, chunk, pages } => self.sharer.share_pages(op, chunk, pages, paging, ring)?,
            Action::DiscardDone { token } => self.link.calls.complete_discard(ring, token),
            Action::Arm => self.begin_to_arm()?,
            Action::Disarm => self.disarm()?,
            Action::Stalled { stall } => self.reporter.report_stall(stall, paging),
        }
        Ok(())
    }

    /// Counts how long a fault waited that a read has answered.
    pub(super) fn note_answered(&mut self, answered: Option<Answered>) {
        let Some(answered) = answered else { return };
        if answered.is_page_fault() {
            self.busy_poll.note(answered.took);
        }
        self.reporter.note_latency(answered.cause, answered.took);
    }

    /// The sampler, and the owners through which it works.
    pub(super) fn sampling(&mut self) -> (&mut Sampler, Context<'_>) {
        let Engine { sampler, paging, link, ring, .. } = self;
        (sampler, Context { paging, agent: &mut link.agent, ring })
    }

    /// Goes on with all that tiers have done outside the ring.
    pub(super) fn follow_tiers(&mut self) {
        while let Some(ended) = self.paging.next_ended(&mut self.ring) {
            self.apply_ended(ended);
        }
        while let Some(placed) = self.paging.next_placed() {
            self.mover.note_placed(placed);
        }
        while let Some((chunk, pages)) = self.paging.take_came() {
            self.apply(Event::Came { chunk, pages });
        }
    }

    /// A part of an operation has ended, and perhaps with it the operation.
    pub(super) fn apply_ended(&mut self, ended: Result<Option<Event>, Broken>) {
        if let Some(Some(event)) = self.or_halt(ended) {
            self.apply(event);
        }
    }

    /// Pages of chunks that leave are to be looked at, whether they are equal to others.
    pub(super) fn can_look(&self) -> bool {
        self.sharer.has_looks() && !self.paging.is_halted()
    }

    /// An invariant is broken: from now on nothing of this VM changes, so that it can be looked at and no wrong page is
    /// ever mapped. Other VMs go on.
    pub(super) fn halt(&mut self, why: &Broken) {
        let text = format!("halted, because {why}. No page is lost; keep the state directory and report this");
        if self.paging.halt(&text) {
            self.reporter.report_halt(text);
            // What is broken may be what the image relies on.
            let notice = self.imager.lose("the VM was halted", &mut self.paging);
            self.report_image(notice);
        }
    }

    /// What an owner has done; the VM is halted if it found an invariant broken.
    pub(super) fn or_halt<T>(&mut self, result: Result<T, Broken>) -> Option<T> {
        result.map_err(|why| self.halt(&why)).ok()
    }
}
