//! Begins and ends the parts of transfers.

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, IoError, OpId, Pages};
use pagoda_core::stats::Metric;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::BufferId;

use super::{Kind, Outgoing, Transfer, WritePlan, is_page_fault};
use crate::engine::Engine;
use crate::source::Source;
use crate::tier::{ByTier, Ended, Outcome, Step, Takes, Target, TierIdx, Wanted, Write};

impl Engine {
    /// Reads pages into a buffer that has room for `room`; the others of it are not used.
    pub(in crate::engine) fn read_buffered(
        &mut self,
        op: OpId,
        room: Pages,
        pages: PageSet,
        demand: bool,
        cause: Metric,
    ) {
        let len = u64::from(room.run.len) * PAGE_SIZE;
        let Some(id) = self.ring.take_buffer(len as usize) else {
            // There is a buffer for every operation the machine can start.
            return self.freeze("the page buffers ran out");
        };
        let fault = demand.then_some((cause, self.fault_at));
        self.io.page_faults += usize::from(fault.is_some_and(is_page_fault));
        let first = room.first();
        *self.io.slot(op) = Some(Transfer::new(Kind::Buffer { id, first }, fault));
        let (chunk, room) = (room.chunk, PageSet::range(room.run.start, room.run.len));
        self.begin_read(Wanted { op, chunk, pages, room, target: Target::Buffer { id, first }, demand });
    }

    /// Reads a chunk straight into the RAM file.
    pub(in crate::engine) fn read_direct(&mut self, op: OpId, chunk: ChunkIdx, demand: bool) {
        let Some(intent) = self.io.take_intent() else { return self.freeze("the intents ran out") };
        self.shared.intents[intent].declare(chunk.0, PageSet::FULL.words());
        let fault = demand.then_some((Metric::FaultsSwapChunk, self.fault_at));
        *self.io.slot(op) = Some(Transfer::new(Kind::Direct { intent }, fault));
        let all = PageSet::FULL;
        self.begin_read(Wanted { op, chunk, pages: all, room: all, target: Target::Ram, demand });
    }

    fn begin_read(&mut self, wanted: Wanted) {
        let (io, vm) = (&mut self.io, &self.name);
        self.tiers.read(&mut self.ring, &self.space, &wanted, |tier, begun| io.note_begun(vm, wanted.op, tier, &begun));
        self.all_begun(wanted.op);
    }

    /// Plans to write pages to the tiers; zero ones become holes there. The writes begin in steps, so that no fault waits for
    /// more than one step.
    pub(in crate::engine) fn write_out(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet) {
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

    /// Some of what was planned can begin now.
    pub(in crate::engine) fn can_write(&self) -> bool {
        self.next_offer().is_some()
    }

    /// Begins the next few writes.
    pub(in crate::engine) fn step_plan(&mut self) {
        let Some((tier, step)) = self.next_offer() else { return };
        let Some(plan) = self.io.plans.front_mut() else { return };
        let step = step.of(plan.rest);
        plan.rest -= step;
        let WritePlan { op, chunk, rest, .. } = *plan;
        if rest.is_empty() {
            self.io.plans.pop_front();
        }
        self.write_some(op, chunk, step, tier);
        if rest.is_empty() {
            self.all_begun(op);
        }
    }

    fn write_some(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet, tier: TierIdx) {
        let place = self.space.place_chunk(chunk);
        let (view, first) = (place.region.view.clone(), place.pages().start);
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
        let begun = self.tiers.write(&mut self.ring, &self.space, tier, &Write { op, chunk, pages });
        self.io.note_begun(&self.name, op, tier, &begun);
        if !begun.declined.is_empty() {
            self.write_below(op, chunk, begun.declined, tier);
        }
    }

    /// All parts of the operation have begun: if there was none, it has ended.
    fn all_begun(&mut self, op: OpId) {
        if let Some(event) = self.end_part(op, None) {
            self.events.push_back(event);
        }
    }

    fn note_errno(&mut self, op: OpId, errno: Errno) {
        let error = match errno {
            Errno::NOSPC | Errno::DQUOT => IoError::NoSpace,
            errno => IoError::Failed(errno.raw_os_error()),
        };
        self.io.note_error(op, error);
    }

    /// A request to the ring ended; the event if it was its operation's last part.
    pub(in crate::engine) fn finish_request(
        &mut self,
        tier: TierIdx,
        op: OpId,
        result: Result<u32, Errno>,
    ) -> Option<Event> {
        if let Some(Transfer { kind: Kind::Out(_), .. }) = self.io.slot(op) {
            self.tiers.ring_write_ended(tier);
        }
        match result {
            Ok(bytes) => self.io.note_bytes(op, u64::from(bytes)),
            Err(errno) => self.note_errno(op, errno),
        }
        self.end_part(op, Some(tier))
    }

    /// Waits for what a tier's own descriptor has, from now on.
    pub(in crate::engine) fn poll_tier(&mut self, tier: TierIdx) {
        if let Some(fd) = self.tiers.fd(tier)
            && let Err(error) = self.ring.poll_multishot(fd, Source::Tier(tier).key())
        {
            self.freeze(&format!("cannot wait for the {} tier: {error}", self.tiers.name(tier)));
        }
    }

    /// A tier's own descriptor has something.
    pub(in crate::engine) fn turn_tier(&mut self, tier: TierIdx, more: bool) {
        if let Err(error) = self.tiers.turn(tier) {
            // What is lost by that is asked for again, like anything that gets lost.
            tracing::warn!(vm = %self.name, tier = self.tiers.name(tier), "its socket: {error}");
        }
        if !more {
            self.poll_tier(tier);
        }
    }

    /// Goes on with all that tiers have done outside the ring.
    pub(in crate::engine) fn follow_tiers(&mut self) {
        while let Some((tier, ended)) = self.tiers.next_ended(&mut self.ring, &self.space) {
            self.part_ended(tier, ended);
        }
    }

    fn part_ended(&mut self, tier: TierIdx, ended: Ended) {
        let Ended { op, page, outcome } = ended;
        match outcome {
            Outcome::Read => {}
            Outcome::Written => self.io.note_written(op, tier, page.index_in_chunk()),
            Outcome::Declined => {
                self.write_below(op, page.chunk(), PageSet::single(page.index_in_chunk()), tier);
            }
            Outcome::Failed(error) => self.io.note_error(op, error),
            Outcome::Undelivered => return self.freeze("a page came from a tier for a buffer that is gone"),
        }
        if !matches!(outcome, Outcome::Failed(_)) {
            self.io.note_bytes(op, PAGE_SIZE);
        }
        if let Some(event) = self.end_part(op, Some(tier)) {
            self.apply(event);
        }
    }

    fn end_part(&mut self, op: OpId, tier: Option<TierIdx>) -> Option<Event> {
        let transfer = self.io.slot(op).as_mut()?;
        let is_read = !matches!(transfer.kind, Kind::Out(_));
        let took = tier.and_then(|tier| Some((tier, transfer.end_of_tier(tier)?)));
        if let Some((tier, took)) = took {
            self.tiers.note_latency(tier, is_read, took);
        }
        transfer.left -= 1;
        if transfer.left > 0 {
            return None;
        }
        // A transfer that ended short of what was asked for without an error: the rest is unknown.
        let short = (transfer.missing > 0).then_some(IoError::Failed(Errno::IO.raw_os_error()));
        let result = transfer.error.or(short).map_or(Ok(()), Err);
        Some(match transfer.kind {
            Kind::Buffer { .. } | Kind::Direct { .. } => Event::ReadDone { op, result },
            Kind::Out(outgoing) => {
                *self.io.slot(op) = None;
                self.settle_blocks(&outgoing, result.is_ok());
                Event::WriteDone { op, zero: outgoing.zero, result }
            }
        })
    }

    /// A page-out has ended: what its pages had elsewhere is outdated. Of a failed one nothing is believed, but what it has
    /// overwritten is overwritten; its pages are in DRAM.
    fn settle_blocks(&mut self, outgoing: &Outgoing, succeeded: bool) {
        let Outgoing { chunk, before, written, overwritten, .. } = *outgoing;
        let held: ByTier = std::array::from_fn(|tier| match succeeded {
            true => written[tier] | overwritten[tier],
            false => overwritten[tier],
        });
        if let Err(errno) = self.tiers.settle(chunk, &before, &held) {
            self.freeze(&format!("where swapped pages are could not be noted: {errno}"));
        }
    }

    /// The buffer of a read that ended, and the page of its first byte.
    pub(in crate::engine) fn buffer_of(&mut self, op: OpId) -> Option<(BufferId, PageIdx)> {
        match self.io.slot(op).as_ref()?.kind {
            Kind::Buffer { id, first } => Some((id, first)),
            _ => None,
        }
    }

    /// Ends a buffered read.
    pub(in crate::engine) fn release(&mut self, op: OpId) {
        if let Some((id, _)) = self.buffer_of(op)
            && !self.ring.give_buffer(id)
        {
            self.freeze("a page buffer was given back while the disk used it");
        }
        self.answered(op);
        *self.io.slot(op) = None;
    }

    /// Ends a direct read: the intent is no longer needed.
    pub(in crate::engine) fn withdraw(&mut self, op: OpId) {
        if let Some(Transfer { kind: Kind::Direct { intent }, .. }) = *self.io.slot(op) {
            self.shared.intents[intent].withdraw();
            self.io.give_intent(intent);
        }
        self.answered(op);
        *self.io.slot(op) = None;
    }

    /// Counts the time that the fault behind a read took.
    pub(in crate::engine) fn answered(&mut self, op: OpId) {
        let Some((cause, at)) = self.io.slot(op).as_ref().and_then(|transfer| transfer.fault) else { return };
        let took = at.elapsed();
        if is_page_fault((cause, at)) {
            self.io.page_faults -= 1;
            self.busy_poll.note(took);
        }
        self.note_fault_latency(cause, took);
    }
}
