//! What callers asked for: pages are read and written, and what cannot be done now waits or fails.
//!
//! Owns the operations ([`Ops`]), the reads that wait for silent servers ([`ReadQueue`]), and those who ask whether this client
//! still owns a space ([`Confirms`]). Each operation ends once for its caller, and a write only when every copy that it needs has
//! it, or with an error. Requests go out through the [`Pool`]; a page of a group with parity may be put together
//! by [`Parity`]. What the methods need of these, and what they change there, is in their arguments.

mod confirm;
mod fail;
mod follow;
mod group;
mod late;
mod own;
mod queue;
mod read;
mod silence;
mod write;

use crate::client::confirm::Confirms;
use crate::client::exchange::Role;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Ops, Reported, Selected, Stage};
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::read_queue::ReadQueue;
use crate::client::{Event, Failure};
use crate::units::{SealedPage, SlabNo, SlabSize};

#[derive(Debug)]
pub struct Pages {
    pub ops: Ops,
    read_queue: ReadQueue,
    confirms: Confirms,
}

impl Pages {
    /// `reports`: writes may fail and go on.
    pub fn new(size: SlabSize, reports: bool) -> Pages {
        Pages { ops: Ops::new(size, reports), read_queue: ReadQueue::default(), confirms: Confirms::default() }
    }

    /// Whether no operation is under way, and nobody waits.
    pub fn is_idle(&self) -> bool {
        self.ops.is_idle() && self.read_queue.is_empty() && self.confirms.is_idle()
    }

    /// Whether somebody has a result to take.
    pub fn has_done(&self) -> bool {
        self.ops.has_done() || self.confirms.has_done()
    }

    /// Reads that wait for a server that is silent.
    pub fn queued(&self) -> usize {
        self.read_queue.len()
    }

    /// Whether one of them is of this slab.
    pub fn any_queued_of(&self, space: SpaceIndex, slab: SlabNo, size: SlabSize) -> bool {
        self.read_queue.any_of(space, slab, size)
    }

    /// The next result. Of a read `take` is given the page, in room that may be exchanged for other; nothing if that is zero.
    pub fn next_event(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        take: impl FnOnce(Option<&mut Box<SealedPage>>),
    ) -> Option<Event> {
        if let Some(Reported { token, class, since }) = self.ops.next_told() {
            pool.stats.writes_took[class as usize].record(pool.now.since(since));
            pool.stats.unanswered += 1;
            self.resume_waiting(pool, parity);
            return Some(Event::Written { token, result: Err(Failure::Silent) });
        }
        if let Some(event) = self.confirms.next_event() {
            return Some(event);
        }
        let op = self.ops.next_done()?;
        let Operation { kind, token, stage, has_content, class, since, .. } = *self.ops.peek(op);
        let Stage::Done(result) = stage else { return None };
        if kind == Kind::Read {
            take(has_content.then(|| self.ops.page_of(op)));
        }
        let latencies = if kind == Kind::Read { &mut pool.stats.reads_took } else { &mut pool.stats.writes_took };
        latencies[class as usize].record(pool.now.since(since));
        pool.stats.unanswered += u64::from(result == Err(Failure::Silent));
        self.ops.let_go(op);
        self.resume_waiting(pool, parity);
        match kind {
            Kind::Read => Some(Event::Read { token, result }),
            Kind::Write { .. } => Some(Event::Written { token, result }),
        }
    }

    /// An exchange of an operation ended, whatever came of it.
    pub fn op_exchange_ended(&mut self, op: OpIndex) {
        self.ops.get(op).exchanges -= 1;
        self.ops.free_if_over(op);
    }

    /// No answer is wanted any more: of a second copy, or of one that is away.
    pub fn drop_exchanges(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        self.drop_stripe(pool, parity, op);
        while self.ops.peek(op).exchanges > 0 {
            let own = Role::Read { op };
            let found = pool.sessions.exchanges.find(|e| e.role == own || e.role == Role::Write { op });
            let Some(exchange) = found else { return };
            pool.sessions.end_exchange(exchange.id);
            self.op_exchange_ended(op);
        }
    }

    /// What cannot begin before something is known of a slab.
    pub fn waiting_for(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> Selected {
        let of_slab = |page| pool.map.slab_of(page) == Some(slab);
        self.ops.select(|op| op.stage == Stage::Waiting && op.space == space && of_slab(op.page))
    }
}
