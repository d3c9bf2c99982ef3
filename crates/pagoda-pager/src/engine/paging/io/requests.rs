//! Begins and ends the parts of transfers.

use std::time::Instant;

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{Event, IoError, OpId, Pages};
use pagoda_core::stats::Metric;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::{BufferId, Ring};

use super::super::Paging;
use super::{Answered, Kind, Outgoing, Transfer, WritePlan, is_page_fault};
use crate::engine::broken::Broken;
use crate::source::Source;
use crate::tier::{ByTier, Ended, Outcome, Step, Takes, Target, TierIdx, Wanted, Write};

impl Paging {
    /// Executes `ReadPage`. `since`: when the message of the fault was read that waits for it, if one does.
    pub fn read_page(
        &mut self,
        ring: &mut Ring,
        op: OpId,
        page: PageIdx,
        since: Option<Instant>,
    ) -> Result<(), Broken> {
        let room = Pages { chunk: page.chunk(), run: Run { start: page.index_in_chunk(), len: 1 } };
        let fault = since.map(|since| (Metric::FaultsSwapPage, since));
        self.read_buffered(ring, op, room, PageSet::single(page.index_in_chunk()), fault)
    }

    /// Executes `ReadSpan`: the pages that are wanted, and none of the others in between.
    pub fn read_span(
        &mut self,
        ring: &mut Ring,
        op: OpId,
        span: Pages,
        wanted: PageSet,
        since: Option<Instant>,
    ) -> Result<(), Broken> {
        let fault = since.map(|since| (Metric::FaultsSwapChunk, since));
        self.read_buffered(ring, op, span, wanted, fault)
    }

    /// Executes `Keep`: reads pages for an image. Nobody waits for them, and any of their blocks may be written or dropped
    /// meanwhile: the machine knows whose content does not count then.
    pub fn keep(&mut self, ring: &mut Ring, op: OpId, chunk: ChunkIdx, pages: PageSet) -> Result<(), Broken> {
        let (Some(first), Some(last)) = (pages.first_set(), pages.last_set()) else {
            return Err("no page was to be read for an image".into());
        };
        let run = Run { start: first, len: u16::from(last - first) + 1 };
        self.read_buffered(ring, op, Pages { chunk, run }, pages, None)
    }

    /// Reads pages into a buffer that has room for `room`; the others of it are not used.
    fn read_buffered(
        &mut self,
        ring: &mut Ring,
        op: OpId,
        room: Pages,
        pages: PageSet,
        fault: Option<(Metric, Instant)>,
    ) -> Result<(), Broken> {
        let len = u64::from(room.run.len) * PAGE_SIZE;
        // There is a buffer for every operation the machine can start.
        let Some(id) = ring.take_buffer(len as usize) else { return Err("the page buffers ran out".into()) };
        self.io.page_faults += usize::from(fault.is_some_and(|(cause, _)| is_page_fault(cause)));
        let first = room.first();
        *self.io.slot(op) = Some(Transfer::new(Kind::Buffer { id, first }, fault));
        let (chunk, room) = (room.chunk, PageSet::range(room.run.start, room.run.len));
        let target = Target::Buffer { id, first };
        self.begin_read(ring, Wanted { op, chunk, pages, room, target, demand: fault.is_some() })
    }

    /// Executes `ReadChunk`: straight into the RAM file, under an intent.
    pub fn read_chunk(
        &mut self,
        ring: &mut Ring,
        op: OpId,
        chunk: ChunkIdx,
        since: Option<Instant>,
    ) -> Result<(), Broken> {
        let Some(intent) = self.io.take_intent() else { return Err("the intents ran out".into()) };
        self.shared.intents[intent].declare(chunk.0, PageSet::FULL.words());
        let fault = since.map(|since| (Metric::FaultsSwapChunk, since));
        *self.io.slot(op) = Some(Transfer::new(Kind::Direct { intent }, fault));
        let all = PageSet::FULL;
        let demand = fault.is_some();
        self.begin_read(ring, Wanted { op, chunk, pages: all, room: all, target: Target::Ram, demand })
    }

    fn begin_read(&mut self, ring: &mut Ring, wanted: Wanted) -> Result<(), Broken> {
        let (io, vm) = (&mut self.io, &self.vm);
        self.tiers.read(ring, &self.space, &wanted, |tier, begun| io.note_begun(vm, wanted.op, tier, &begun));
        self.all_begun(wanted.op)
    }

    /// Hands page-ins to the disk before something that takes a while: the kernel hands a submission to the disk as a whole.
    pub fn submit_page_ins(&self, ring: &mut Ring) -> Result<(), Broken> {
        if self.has_page_faults()
            && let Err(error) = ring.submit()
        {
            return Err(format!("the disk ring failed: {error}").into());
        }
        Ok(())
    }

    /// A fault waits for a single page.
    pub fn has_page_faults(&self) -> bool {
        self.io.has_page_faults()
    }

    /// Executes `WriteOut`: plans to write pages to the tiers; zero ones become holes there. The writes begin in steps,
    /// so that no fault waits for more than one step.
    pub fn write_out(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet) {
        let before = self.tiers.owners(chunk, self.machine.chunk(chunk).swap);
        let (written, overwritten) = (ByTier::default(), ByTier::default());
        let outgoing = Outgoing { chunk, before, zero: PageSet::EMPTY, written, overwritten };
        *self.io.slot(op) = Some(Transfer::new(Kind::Out(outgoing), None));
        self.io.plans.push_back(WritePlan { op, chunk, rest: pages, from: TierIdx(0) });
    }

    /// Plans to write pages of a page-out that a tier declined to one of those after it.
    fn write_below(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet, declined_by: TierIdx) {
        let from = TierIdx(declined_by.0 + 1);
        let planned = self.io.plans.iter_mut().find(|plan| plan.op == op && plan.from == from);
        match planned {
            Some(plan) => plan.rest |= pages,
            None => {
                if let Some(transfer) = self.io.slot(op) {
                    transfer.left += 1;
                }
                // Before what the first tiers may take: that can wait for them.
                self.io.plans.push_front(WritePlan { op, chunk, rest: pages, from });
            }
        }
    }

    /// The tier that takes the next pages that are planned to be written, and how many.
    fn next_offer(&self) -> Option<(TierIdx, Step)> {
        let plan = self.io.plans.front()?;
        match self.tiers.offer(plan.from, self.machine.has_time()) {
            (tier, Takes::Now(step)) => Some((tier, step)),
            (_, Takes::Later | Takes::No) => None,
        }
    }

    /// Some of what was planned can begin now. Of a halted VM nothing is written any more.
    pub fn can_write(&self) -> bool {
        !self.is_halted() && self.next_offer().is_some()
    }

    /// Begins the next few writes.
    pub fn step_plan(&mut self, ring: &mut Ring) -> Result<(), Broken> {
        let Some((tier, step)) = self.next_offer() else { return Ok(()) };
        let Some(plan) = self.io.plans.front_mut() else { return Ok(()) };
        let step = step.of(plan.rest);
        plan.rest -= step;
        let WritePlan { op, chunk, rest, .. } = *plan;
        if rest.is_empty() {
            self.io.plans.pop_front();
        }
        self.write_some(ring, op, chunk, step, tier);
        if rest.is_empty() { self.all_begun(op) } else { Ok(()) }
    }

    fn write_some(&mut self, ring: &mut Ring, op: OpId, chunk: ChunkIdx, pages: PageSet, tier: TierIdx) {
        let location = self.space.locate_chunk(chunk);
        let (view, first) = (location.region.view.clone(), location.pages().start);
        for run in pages.runs() {
            let start = first + u64::from(run.start);
            if let Err(errno) = view.make_readable(start..start + u64::from(run.len)) {
                return self.note_errno(op, errno);
            }
        }
        let is_zero = |index: &u8| view.is_zero(first + u64::from(*index)..first + u64::from(*index) + 1);
        let zero: PageSet = pages.iter().filter(is_zero).collect();
        if let Some(Transfer { kind: Kind::Out(outgoing), .. }) = self.io.slot(op) {
            outgoing.zero |= zero;
        }
        if let Err(errno) = self.tiers.drop_blocks(chunk, zero & self.machine.chunk(chunk).swap) {
            self.note_errno(op, errno);
        }
        let pages = pages - zero;
        if pages.is_empty() {
            return;
        }
        let begun = self.tiers.write(ring, &self.space, tier, &Write { op, chunk, pages });
        self.io.note_begun(&self.vm, op, tier, &begun);
        if !begun.declined.is_empty() {
            self.write_below(op, chunk, begun.declined, tier);
        }
    }

    /// All parts of the operation have begun: if there was none, it has ended.
    fn all_begun(&mut self, op: OpId) -> Result<(), Broken> {
        if let Some(event) = self.end_part(op, None)? {
            self.push(event);
        }
        Ok(())
    }

    fn note_errno(&mut self, op: OpId, errno: Errno) {
        let error = match errno {
            Errno::NOSPC | Errno::DQUOT => IoError::NoSpace,
            errno => IoError::Failed(errno.raw_os_error()),
        };
        self.io.note_error(op, error);
    }

    /// A request to the ring ended; the event if it was its operation's last part.
    pub fn finish_request(
        &mut self,
        tier: TierIdx,
        op: OpId,
        result: Result<u32, Errno>,
    ) -> Result<Option<Event>, Broken> {
        if let Some(Transfer { kind: Kind::Out(_), .. }) = self.io.slot(op) {
            self.tiers.ring_write_ended(tier);
        }
        match result {
            Ok(bytes) => self.io.note_bytes(op, u64::from(bytes)),
            Err(errno) => self.note_errno(op, errno),
        }
        self.end_part(op, Some(tier))
    }

    /// A tier's own descriptor has something.
    pub fn turn_tier(&mut self, ring: &mut Ring, tier: TierIdx, more: bool) -> Result<(), Broken> {
        if let Err(error) = self.tiers.turn(tier) {
            // What is lost by that is asked for again, like anything that gets lost.
            tracing::warn!(vm = %self.vm, tier = self.tiers.name(tier), "its socket: {error}");
        }
        if !more
            && let Some(fd) = self.tiers.fd(tier)
            && let Err(error) = ring.poll_multishot(fd, Source::Tier(tier).key())
        {
            return Err(format!("cannot wait for the {} tier: {error}", self.tiers.name(tier)).into());
        }
        Ok(())
    }

    /// Takes in the next part that a tier has done outside the ring; the event if it was its operation's last part.
    /// `None`: there is none.
    pub fn next_ended(&mut self, ring: &mut Ring) -> Option<Result<Option<Event>, Broken>> {
        let (tier, ended) = self.tiers.next_ended(ring, &self.space)?;
        Some(self.part_ended(tier, ended))
    }

    fn part_ended(&mut self, tier: TierIdx, ended: Ended) -> Result<Option<Event>, Broken> {
        let Ended { op, page, outcome } = ended;
        match outcome {
            Outcome::Read => {}
            Outcome::Written => self.io.note_written(op, tier, page.index_in_chunk()),
            Outcome::Declined => {
                self.write_below(op, page.chunk(), PageSet::single(page.index_in_chunk()), tier);
            }
            Outcome::Failed(error) => self.io.note_error(op, error),
            Outcome::Undelivered => return Err("a page came from a tier for a buffer that is gone".into()),
        }
        if !matches!(outcome, Outcome::Failed(_)) {
            self.io.note_bytes(op, PAGE_SIZE);
        }
        self.end_part(op, Some(tier))
    }

    /// One part of an operation has ended; the event if it was the last.
    fn end_part(&mut self, op: OpId, tier: Option<TierIdx>) -> Result<Option<Event>, Broken> {
        let Some(transfer) = self.io.slot(op).as_mut() else { return Ok(None) };
        let is_read = !matches!(transfer.kind, Kind::Out(_));
        let took = tier.and_then(|tier| Some((tier, transfer.end_of_tier(tier)?)));
        if let Some((tier, took)) = took {
            self.tiers.note_latency(tier, is_read, took);
        }
        transfer.left -= 1;
        if transfer.left > 0 {
            return Ok(None);
        }
        // A transfer that ended short of what was asked for without an error: the rest is unknown.
        let short = (transfer.missing > 0).then_some(IoError::Failed(Errno::IO.raw_os_error()));
        let result = transfer.error.or(short).map_or(Ok(()), Err);
        match transfer.kind {
            Kind::Buffer { .. } | Kind::Direct { .. } => Ok(Some(Event::ReadDone { op, result })),
            Kind::Out(outgoing) => {
                *self.io.slot(op) = None;
                self.settle_blocks(&outgoing, result.is_ok())?;
                Ok(Some(Event::WriteDone { op, zero: outgoing.zero, result }))
            }
        }
    }

    /// A page-out has ended: what its pages had elsewhere is outdated. Of a failed one nothing is believed, but what it has
    /// overwritten is overwritten; its pages are in DRAM.
    fn settle_blocks(&mut self, outgoing: &Outgoing, succeeded: bool) -> Result<(), Broken> {
        let Outgoing { chunk, before, written, overwritten, .. } = *outgoing;
        let held: ByTier = std::array::from_fn(|tier| match succeeded {
            true => written[tier] | overwritten[tier],
            false => overwritten[tier],
        });
        let settled = self.tiers.settle(chunk, &before, &held);
        settled.map_err(|errno| format!("where swapped pages are could not be noted: {errno}").into())
    }

    /// The buffer of a read that ended, and the page of its first byte.
    pub(in crate::engine::paging) fn buffer_of(&self, op: OpId) -> Option<(BufferId, PageIdx)> {
        match self.io.get(op)?.kind {
            Kind::Buffer { id, first } => Some((id, first)),
            _ => None,
        }
    }

    /// Executes `Release`: ends a buffered read.
    pub fn release(&mut self, ring: &mut Ring, op: OpId) -> Result<Option<Answered>, Broken> {
        let is_busy = self.buffer_of(op).is_some_and(|(id, _)| !ring.give_buffer(id));
        let answered = self.end_read(op);
        if is_busy { Err("a page buffer was given back while the disk used it".into()) } else { Ok(answered) }
    }

    /// Executes `ChunkComplete`: ends a direct read, whose intent is no longer needed.
    pub fn withdraw(&mut self, op: OpId) -> Option<Answered> {
        if let Some(Transfer { kind: Kind::Direct { intent }, .. }) = *self.io.slot(op) {
            self.shared.intents[intent].withdraw();
            self.io.give_intent(intent);
        }
        self.end_read(op)
    }

    /// The read is over; how long the fault behind it took.
    fn end_read(&mut self, op: OpId) -> Option<Answered> {
        let slot = self.io.slot(op);
        let fault = slot.as_ref().and_then(|transfer| transfer.fault);
        *slot = None;
        let (cause, since) = fault?;
        self.io.page_faults -= usize::from(is_page_fault(cause));
        Some(Answered { cause, took: since.elapsed() })
    }
}
