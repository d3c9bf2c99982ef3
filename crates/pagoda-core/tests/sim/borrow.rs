//! What a clone borrows: a template that is mapped privately, copies that the kernel makes of its pages, and moves of the
//! RAM file into its place, which the VMM carries out.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Access, Event, FaultKind, OpId};
use pagoda_core::units::ChunkIdx;

use crate::image::Mistake;
use crate::job::JobKind;
use crate::pager::{Crash, Pager, chunk_pages, set};
use crate::rng::Rng;
use crate::weather::Weather;
use crate::world::{CHUNK, Frame, Message, Pte, World};

/// The VM's part in the template.
#[derive(Debug)]
pub struct Loan {
    /// The template is mapped there, chunk by chunk.
    mapped: Vec<bool>,
    /// What the template holds for ever.
    pub template: Vec<u64>,
    /// The kernel's copies for this VM.
    anonymous: Vec<Option<Frame>>,
    /// A write to such a page raises a fault first.
    protected: Vec<bool>,
    /// Moves that were ordered and not done yet.
    orders: VecDeque<ChunkIdx>,
    /// The daemon that ordered them is gone.
    pub is_stale: bool,
    /// The clock of direct I/O says nothing any more.
    pub is_io_unseen: bool,
    /// What a mistaken pager has copied too early.
    early: Vec<Option<u64>>,
}

impl Loan {
    pub fn new(pages: usize) -> Loan {
        Loan {
            mapped: vec![false; pages / CHUNK],
            template: vec![0; pages],
            anonymous: vec![None; pages],
            protected: vec![false; pages],
            orders: VecDeque::new(),
            is_stale: false,
            is_io_unseen: false,
            early: vec![None; pages],
        }
    }

    pub fn has(&self, page: usize) -> bool {
        self.mapped[page / CHUNK]
    }

    pub fn has_any(&self) -> bool {
        self.mapped.contains(&true)
    }

    pub fn content(&self, page: usize) -> u64 {
        self.anonymous[page].as_ref().map_or(self.template[page], |frame| frame.get())
    }

    pub fn is_anonymous(&self, page: usize) -> bool {
        self.anonymous[page].is_some()
    }

    pub fn is_open(&self, page: usize) -> bool {
        self.has(page) && !self.protected[page]
    }

    /// The VM has another content there than the template, or may have before anybody is asked.
    pub fn is_written(&self, page: usize) -> bool {
        self.is_anonymous(page) && (self.is_open(page) || self.content(page) != self.template[page])
    }

    fn frame(&mut self, page: usize) -> Frame {
        self.anonymous[page].get_or_insert_with(|| Rc::new(Cell::new(self.template[page]))).clone()
    }
}

impl World {
    /// As the processor, or the kernel for direct I/O, reaches a page of the template.
    pub fn reach_borrowed(&mut self, page: usize, access: Access) -> Option<Frame> {
        self.used[page] = true;
        let was_mapped = self.pte[page] != Pte::Absent;
        self.pte[page] = Pte::Protected;
        if access == Access::Read {
            return Some(Rc::new(Cell::new(self.loan.content(page))));
        }
        if self.loan.protected[page] {
            // Of a page that was not mapped the kernel makes the copy first, and asks then.
            if !was_mapped {
                self.loan.frame(page);
            }
            self.messages.push(Message { page, access, kind: FaultKind::WriteProtected });
            return None;
        }
        Some(self.loan.frame(page))
    }

    pub fn open_borrowed(&mut self, pages: Range<usize>) {
        pages.for_each(|page| self.loan.protected[page] = false);
    }

    /// Into the RAM file, which is not mapped there yet.
    pub fn copy_private(&mut self, page: usize) {
        let content = self.loan.early[page].take().unwrap_or_else(|| self.loan.content(page));
        assert!(self.ram[page].is_none(), "page {page} is copied into the RAM file, but is there");
        self.ram[page] = Some(Rc::new(Cell::new(content)));
    }

    /// The RAM file takes the template's place.
    fn move_in(&mut self, chunk: ChunkIdx) {
        assert!(self.loan.has(chunk_pages(chunk).start), "{chunk:?} is moved twice");
        self.loan.mapped[chunk.0 as usize] = false;
        for page in chunk_pages(chunk) {
            self.loan.anonymous[page] = None;
            self.loan.protected[page] = false;
            self.pte[page] = Pte::Absent;
        }
    }

    /// The VMM does what a dead daemon has ordered, unless another one has told it not to.
    pub fn move_stray(&mut self, weather: &Weather) {
        if (self.loan.is_stale || weather.mistake == Some(Mistake::MovesLate))
            && let Some(chunk) = self.loan.orders.pop_front()
        {
            self.move_in(chunk);
        }
    }

    /// What a daemon that starts does before it answers anything.
    pub fn take_over_loan(&mut self, weather: &Weather, rng: &mut Rng) -> Result<(), Crash> {
        if weather.mistake != Some(Mistake::MovesLate) {
            self.loan.orders.clear();
        }
        self.loan.is_stale = false;
        for page in (0..self.pages()).filter(|page| self.loan.has(*page)).collect::<Vec<_>>() {
            if weather.mistake != Some(Mistake::LeavesCopies) {
                self.ram[page] = None;
            }
            self.loan.protected[page] |= weather.mistake != Some(Mistake::LeavesOpen);
            if page % CHUNK == 0 && rng.per_mille(weather.crash) {
                return Err(Crash);
            }
        }
        Ok(())
    }
}

impl Pager {
    pub fn fence(&mut self, op: OpId, chunk: ChunkIdx, world: &mut World, rng: &mut Rng) {
        let fails = rng.per_mille(self.weather.own_fails);
        for page in chunk_pages(chunk).filter(|_| !fails) {
            world.loan.early[page] = match self.weather.mistake {
                Some(Mistake::CopiesBeforeFence) => Some(world.loan.content(page)),
                _ => None,
            };
            world.loan.protected[page] |= !self.fences_nothing();
        }
        if !fails {
            world.epoch += 1;
        }
        let epoch = (!fails).then_some(world.epoch);
        self.punched.push_back(Event::Fenced { op, epoch });
    }

    fn fences_nothing(&self) -> bool {
        matches!(self.weather.mistake, Some(Mistake::FencesNothing | Mistake::CopiesBeforeFence))
    }

    pub fn own(&mut self, op: OpId, chunk: ChunkIdx, world: &mut World) {
        for page in chunk_pages(chunk).filter(|_| self.weather.mistake == Some(Mistake::CopiesBeforeFence)) {
            world.loan.protected[page] = true;
        }
        let differs =
            |page: &usize| world.loan.early[*page].unwrap_or(world.loan.content(*page)) != world.loan.template[*page];
        let kept: PageSet = chunk_pages(chunk).filter(differs).map(|page| (page % CHUNK) as u8).collect();
        self.start(op, JobKind::Own { chunk, kept }, set(kept, chunk));
    }

    /// Copies some pages, orders the move, does it, or reports it: a step each. Or gives it up.
    pub fn own_on(&mut self, index: usize, world: &mut World, rng: &mut Rng) -> Option<Event> {
        let job = &mut self.jobs[index];
        let JobKind::Own { chunk, kept } = job.kind else { return None };
        let op = job.op;
        let (is_moved, is_ordered) = (!world.loan.has(chunk_pages(chunk).start), world.loan.orders.contains(&chunk));
        match () {
            () if is_moved => {
                self.jobs.swap_remove(index);
                Some(Event::OwnDone { op, kept: Some(kept) })
            }
            () if is_ordered && rng.coin() => {
                world.loan.orders.retain(|other| *other != chunk);
                world.move_in(chunk);
                None
            }
            () if rng.per_mille(self.weather.own_fails) => {
                // The order is taken back before its answer counts for nothing.
                world.loan.orders.retain(|other| *other != chunk);
                chunk_pages(chunk).for_each(|page| world.ram[page] = None);
                self.jobs.swap_remove(index);
                Some(Event::OwnDone { op, kept: None })
            }
            () if is_ordered => None,
            () if !job.left.is_empty() => {
                let share = rng.within(1, job.left.len());
                job.advance(share, &mut self.buffers, world, &self.weather, rng);
                None
            }
            () => {
                world.loan.orders.push_back(chunk);
                None
            }
        }
    }
}

/// A VM that was made a clone, some time ago.
pub fn populate(world: &mut World, truth: &mut [u64], rng: &mut Rng) {
    let zeros = *rng.pick(&[0, 200, 900]);
    let written = *rng.pick(&[0, 10, 500]);
    for chunk in 0..world.pages() / CHUNK {
        let is_borrowed = rng.per_mille(800);
        world.loan.mapped[chunk] = is_borrowed;
        for (page, content) in truth.iter_mut().enumerate().take((chunk + 1) * CHUNK).skip(chunk * CHUNK) {
            if !rng.per_mille(zeros) {
                *content = page as u64 + 1;
                let block = world.blocks.target(page, false, None);
                world.blocks.write(block, *content);
                world.blocks.give(page, block);
            }
            world.loan.template[page] = *content;
            world.loan.protected[page] = is_borrowed;
            if is_borrowed && rng.per_mille(written) {
                world.loan.anonymous[page] = Some(Rc::new(Cell::new(page as u64 + 100_000)));
                *content = page as u64 + 100_000;
            }
        }
    }
}
