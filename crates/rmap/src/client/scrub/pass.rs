//! Goes through the pages that are looked at, and judges what comes.

use std::time::Duration;

use super::{COUNT_EVERY, PACE_MAX, PACE_MIN, PASSED_OVER_MAX, Scrub};
use crate::client::context::Context;
use crate::client::exchange::{Exchange, ExchangeId, Request, Role};
use crate::client::index::{ListIndex, PeerIndex, SpaceIndex};
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::units::{Class, PAGE_SIZE, SlabNo, Time, Version};
use crate::wire::message::{Op, Status};

/// What the client is to do for the next page.
#[derive(Debug, Default)]
pub struct Effects {
    /// No answer is wanted any more to this exchange: its server is away.
    pub cancel: Option<ExchangeId>,
    /// To be asked, and then handed to [`Scrub::was_asked`].
    pub read: Option<Request>,
}

/// What a copy returned of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may be right or not: the page was written since, or this is no copy of the slab any more.
    Unknown,
    /// The server does not have the copy.
    Gone,
    Right,
    /// Damaged or old. Whether another copy is at a server that answers.
    Bad {
        another_answers: bool,
    },
}

impl Scrub {
    /// When a page is to be looked at next.
    pub fn due(&self) -> Option<Time> {
        self.due
    }

    /// Looks at the next page, if it is time; everything is to be looked at once in the time of a `pass`.
    pub fn poll(&mut self, now: Time, pass: Duration, context: &Context<'_>) -> Effects {
        let mut effects = Effects::default();
        let due = *self.due.get_or_insert(now + PACE_MAX.min(pass));
        if now < due {
            return effects;
        }
        if self.pace.is_zero() || now.since(self.paced_at) >= COUNT_EVERY {
            (self.pace, self.paced_at) = (pace(pass, context), now);
        }
        self.due = Some(now + self.pace);
        // One at a time: a server that has not answered the last one has enough to do.
        match self.exchange.and_then(|id| context.pool.sessions.exchanges.peek(id)) {
            Some(exchange) if context.pool.sessions.peers[exchange.peer].is_down() => {
                effects.cancel = Some(exchange.id)
            }
            Some(_) => return effects,
            None => {}
        }
        effects.read = (0..PASSED_OVER_MAX).find_map(|_| self.next_read(context));
        effects
    }

    /// The page of [`Effects::read`] was asked for, or there was no room for that.
    pub fn was_asked(&mut self, exchange: Option<ExchangeId>) {
        self.exchange = exchange;
    }

    /// Moves on by a copy of a page. The request for it, if it is to be looked at.
    fn next_read(&mut self, context: &Context<'_>) -> Option<Request> {
        let Scrub { space, slab, index, copy, .. } = *self;
        let Some(state) = context.pool.map.spaces.get(space) else { return self.go_to(SpaceIndex(0), SlabNo(0), 0) };
        if state.tenure == Tenure::Follower {
            return self.go_to(space.next(), SlabNo(0), 0);
        }
        let Some(at) = state.slabs.get(slab) else { return self.go_to(space.next(), SlabNo(0), 0) };
        let open = matches!(at.phase, Phase::Open) && !state.is_taken && !state.is_stale;
        if !open || index >= context.pool.map.size.pages() {
            return self.go_to(space, slab.next(), 0);
        }
        let version = at.version(index);
        let peer = at.entry.replicas.get(copy).and_then(|replica| context.pool.sessions.peers.of(replica.server));
        let Some(peer) = peer.filter(|_| version.has_content() && !at.is_disputed(index)) else {
            return self.go_to(space, slab, index + 1);
        };
        self.copy += 1;
        let usable = context.pool.sessions.peers[peer].is_up() && may_be_scrubbed(context, space, slab, peer);
        if !usable || context.is_being_written(space, slab, index) {
            return None;
        }
        let page = context.pool.map.size.page(slab, index);
        Some(Request { role: Role::Scrub, peer, op: Op::Read, class: Class::Rebuild, space, page, version })
    }

    fn go_to(&mut self, space: SpaceIndex, slab: SlabNo, index: usize) -> Option<Request> {
        (self.space, self.slab, self.index, self.copy) = (space, slab, index, 0);
        None
    }
}

/// For a look at everything in that time.
fn pace(pass: Duration, context: &Context<'_>) -> Duration {
    let kept = context.pool.map.spaces.iter().filter(|space| space.tenure != Tenure::Follower);
    let slabs = kept.flat_map(|space| &space.slabs);
    let copies: usize = slabs.map(|slab| slab.entry.replicas.len()).sum();
    let pages = u32::try_from(copies * context.pool.map.size.pages());
    let pace = pages.map_or(PACE_MIN, |pages| pass.checked_div(pages).unwrap_or(PACE_MAX));
    pace.clamp(PACE_MIN, PACE_MAX)
}

/// Not a copy that is worthless, nor a reader's at a server that does not know it yet.
fn may_be_scrubbed(context: &Context<'_>, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) -> bool {
    let state = &context.pool.map.spaces[space];
    let may_be_written = state.tenure == Tenure::Reader && state.layout.is_ledger(slab);
    let known = !may_be_written && (!context.pool.map.is_grouped(space, slab) || state.fenced_at.has(peer));
    known && context.pool.sound_copies(space, slab).has(peer) && !state.unknown_at.has(peer)
}

/// What the answer to a look at a page says of the copy.
pub fn judge(
    context: &Context<'_>,
    asked: &Exchange,
    slab: SlabNo,
    (status, version): (Status, Version),
    payload: &[u8],
) -> Verdict {
    let Exchange { space, page, peer, .. } = *asked;
    if status != Status::Ok || context.pool.map.is_another_copy(space, version) {
        return Verdict::Gone;
    }
    let index = context.pool.map.size.index(page);
    let state = &context.pool.map.spaces[space];
    let copies = context.pool.sound_copies(space, slab);
    let is_current = state.slabs[slab].version(index) == asked.version && copies.has(peer);
    if !is_current || context.is_being_written(space, slab, index) {
        return Verdict::Unknown;
    }
    let mut content = [0; PAGE_SIZE];
    // Parity is under no seal of its own, and may be of a later life of its slab.
    let is_parity = state.layout.is_parity(slab);
    let is_later = is_parity && version > asked.version;
    let is_authentic = is_parity || state.key.open(page, version, payload, &mut content).is_ok();
    if (version == asked.version || is_later) && is_authentic {
        return Verdict::Right;
    }
    let another_answers = copies.iter().any(|other| other != peer && context.pool.sessions.peers[other].is_up());
    Verdict::Bad { another_answers }
}
