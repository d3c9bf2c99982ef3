//! The far tier as the engine uses it: which block of a page is where, and what waits for the pool.

use std::time::Duration;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{IoError, OpId, Pages};
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::{ChunkIdx, PAGE_SIZE};
use pagoda_sys::Errno;
use rmap::client::Failure;

use super::{Engine, Source};
use crate::far::{Far, Job, JobKind};

impl Engine {
    /// Waits for datagrams from now on.
    pub(super) fn poll_far(&mut self) {
        if let Some(far) = &self.far
            && let Err(error) = self.ring.poll_multishot(std::os::fd::AsFd::as_fd(far), Source::Far.key())
        {
            self.freeze(&format!("cannot wait for the pool: {error}"));
        }
    }

    /// Datagrams came.
    pub(super) fn hear_far(&mut self, more: bool) {
        if let Some(far) = &mut self.far
            && let Err(error) = far.turn()
        {
            // What is lost by that is asked for again, like anything that gets lost.
            tracing::warn!(vm = %self.name, "the pool's socket: {error}");
        }
        if !more {
            self.poll_far();
        }
    }

    /// Goes on with all that the pool has answered, or has not for too long.
    pub(super) fn follow_far(&mut self) {
        while let Some((job, result)) = self.far.as_mut().and_then(Far::next_done) {
            self.far_ended(job, result);
        }
        let Some(far) = &mut self.far else { return };
        let late = far.overdue();
        if !late.is_empty() {
            tracing::warn!(vm = %self.name, pages = late.len(), "the pool does not take pages: swap does");
        }
        for job in late {
            self.far_declined(job);
        }
    }

    /// Begins what waits for the pool. How long nothing more is to be done.
    pub(super) fn begin_far(&mut self) -> Duration {
        let Some(far) = &mut self.far else { return Duration::MAX };
        let space = &self.space;
        far.begin(|page, content| {
            let place = space.place_page(page);
            place.region.view.read_page(place.pages().start, content);
        });
        let wait = far.expire();
        if far.can_begin() { Duration::ZERO } else { wait }
    }

    pub(super) fn far_takes_writes(&self) -> bool {
        self.far.as_ref().is_some_and(Far::takes_writes)
    }

    pub(super) fn far_is_full(&self) -> bool {
        self.far.as_ref().is_some_and(Far::is_full)
    }

    /// Asks for those of the pages that the pool has. The others are to be had from the swap file.
    pub(super) fn read_far(&mut self, op: OpId, chunk: ChunkIdx, wanted: PageSet, demand: bool) -> PageSet {
        let there = self.far.as_ref().map_or(PageSet::EMPTY, |far| far.map().of(chunk)) & wanted;
        self.ask_far(op, chunk, there, JobKind::Read { demand });
        wanted - there
    }

    pub(super) fn write_far(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet) {
        self.ask_far(op, chunk, pages, JobKind::Write);
    }

    fn ask_far(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet, kind: JobKind) {
        let Some(far) = &mut self.far else { return };
        pages.iter().for_each(|index| far.ask(Job { op, page: chunk.page(index), kind }));
        self.io.begin_parts(op, pages.count());
    }

    fn far_ended(&mut self, job: Job, result: Result<(), Failure>) {
        let Job { op, page, kind } = job;
        match (kind, result) {
            (JobKind::Write, Ok(())) => self.io.far_has(op, page.index_in_chunk()),
            (JobKind::Write, Err(_)) => return self.far_declined(job),
            (JobKind::Read { .. }, Ok(())) => self.far_page_came(op, page),
            (JobKind::Read { .. }, Err(failure)) => {
                if self.far.as_mut().is_some_and(Far::is_first_loss) {
                    tracing::error!(vm = %self.name, page = page.0, "a page cannot be had from the pool: {failure}");
                }
                self.note_error(op, IoError::Lost);
            }
        }
        self.end_far_part(op);
    }

    /// The pool did not take a page: the swap file does.
    fn far_declined(&mut self, job: Job) {
        self.write_near(job.op, job.page.chunk(), PageSet::single(job.page.index_in_chunk()));
        self.end_far_part(job.op);
    }

    fn end_far_part(&mut self, op: OpId) {
        self.arrived(op, PAGE_SIZE);
        if let Some(event) = self.end_part(op) {
            self.apply(event);
        }
    }

    /// Makes swap blocks holes, wherever they are.
    pub(super) fn drop_blocks(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        let mut near = pages;
        if let Some(far) = &mut self.far {
            let there = far.map().of(chunk);
            near -= there;
            far.map_mut().set(chunk, there - pages).map_err(errno_of)?;
        }
        self.punch_near(chunk, near)
    }

    fn punch_near(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        for run in pages.runs() {
            let offset = Pages { chunk, run }.first().offset().0;
            self.swap.punch(offset, u64::from(run.len) * PAGE_SIZE)?;
        }
        Ok(())
    }

    /// A page-out has ended: the pool has `far`, the swap file `near`. What they had elsewhere is outdated.
    pub(super) fn settle_blocks(&mut self, chunk: ChunkIdx, far: PageSet, near: PageSet) {
        let Some(tier) = &mut self.far else { return };
        let before = tier.map().of(chunk);
        let moved = far & (self.machine.chunk(chunk).swap - before);
        // The bits first: a page with a bit and a block in the file is the pool's.
        let settled = tier.map_mut().set(chunk, (before - near) | far).map_err(errno_of);
        if let Err(errno) = settled.and_then(|()| self.punch_near(chunk, moved)) {
            self.freeze(&format!("where swapped pages are could not be noted: {errno}"));
        }
    }

    /// Keeps the content of pages that are about to leave the RAM file and are in the pool: those that a pin leaves behind
    /// get it back without waiting for the network.
    pub(super) fn keep_far(&mut self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let Some(far) = &mut self.far else { return PageSet::EMPTY };
        let there = far.map().of(chunk) & pages;
        let place = self.space.place_chunk(chunk);
        for (index, content) in (0..=u8::MAX).zip(far.kept_mut().chunks_exact_mut(PAGE_SIZE as usize)) {
            if there.contains(index) {
                place.region.view.read_page(place.pages().start + u64::from(index), content);
            }
        }
        there
    }

    /// Gives memory of the pool back that the VM has nothing in, and sees to whatever else is due with the pool.
    pub(super) fn return_slabs(&mut self) {
        if let Some(far) = &mut self.far {
            far.tend();
            far.return_slabs(self.io.written_out());
        }
    }

    /// Counts; and what the VM waits for, if its pages do not come. That is no stall: nothing is lost, and it goes on by itself.
    pub(super) fn count_far(&mut self, stats: &mut Stats) -> Option<String> {
        let far = self.far.as_ref()?;
        let (waiting, whom) = far.waits().unzip();
        let (pages_in, pages_out, declined) = far.counts();
        stats.set(Metric::Far, far.map().count());
        stats.set(Metric::FarIn, pages_in);
        stats.set(Metric::FarOut, pages_out);
        stats.set(Metric::FarDeclined, declined);
        stats.set(Metric::FarWaiting, waiting.unwrap_or(0));
        if whom.is_some() != std::mem::replace(&mut self.waits_for_pool, whom.is_some()) {
            match &whom {
                Some(whom) => tracing::warn!(vm = %self.name, "it waits for {whom}"),
                None => tracing::info!(vm = %self.name, "the pool brings its pages again"),
            }
        }
        whom
    }
}

fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
