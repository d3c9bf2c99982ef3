//! What follows when a copy is lost, or an answer is not wanted any more: all that was under way there ends, and whoever waited for it
//! goes on.

use crate::client::copies::Copy;
use crate::client::exchange::{EXCHANGES_MAX, Exchange, ExchangeId, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ops::Stage;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::stripe::Stripes;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::{Candidate, GrantStep, Phase};
use crate::units::SlabNo;

impl Redundancy {
    /// One copy is gone or cannot be trusted. If it is one: a server may also never have had it.
    pub fn copy_lost(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
    ) {
        let state = &pool.map.spaces[space].slabs[slab];
        let pending = state.pending.as_ref().is_some_and(|pending| pool.sessions.peers_of(&pending.entry).has(peer));
        let repairing = state.repair.as_ref().is_some_and(|repair| repair.peer == peer);
        if pool.sessions.peers_of(&state.entry).has(peer) || pending || repairing {
            pool.map.spaces[space].slabs[slab].failed.insert(peer);
            self.forget_copy(pool, pages, parity, space, slab, peer);
        } else if let Phase::Granting(candidates) = &mut pool.map.spaces[space].slabs[slab].phase {
            let asked = candidates.asked.iter().find(|c| c.peer == peer && c.step != GrantStep::Fencing).copied();
            candidates.forget(peer);
            self.forget_copy(pool, pages, parity, space, slab, peer);
            asked.into_iter().for_each(|candidate| self.forget_grant(pool, pages, parity, space, slab, candidate));
        }
        pool.map.mark(space, slab);
        pool.map.mark_group(space, slab);
    }

    /// Everything under way at a copy that is not one any more.
    pub fn forget_copy(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
    ) {
        let size = pool.map.size;
        loop {
            let found = pool.sessions.exchanges.find(|exchange| {
                exchange.space == space
                    && exchange.peer == peer
                    && size.slab(exchange.page) == Some(slab)
                    && !(exchange.role.is_of_space() || exchange.role == Role::Release)
            });
            let Some(exchange) = found else { break };
            self.cancel(pool, pages, parity, exchange.id);
        }
        // One that is still being read elsewhere would be written here once it has come.
        self.end_copies_to(pool, parity, space, slab, peer);
        pages.unsend_writes(pool, space, slab, peer);
    }

    /// Nobody waits for a server's answer any more whether it grants a slab. Should it have granted it, or do so yet, it is to know
    /// that nobody has it.
    pub fn forget_grant(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        candidate: Candidate,
    ) {
        let Candidate { peer, grant, .. } = candidate;
        let asks = |e: &Exchange| e.role == Role::Grant && e.space == space && e.peer == peer && e.version == grant;
        if let Some(exchange) = pool.sessions.exchanges.find(asks) {
            self.cancel(pool, pages, parity, exchange.id);
        }
        pool.sessions.release(space, slab, peer, grant);
    }

    /// Ends an exchange that no answer is wanted to any more.
    pub fn cancel(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, id: ExchangeId) {
        if let Some(exchange) = pool.sessions.end_exchange(id) {
            self.was_cancelled(pool, pages, parity, &exchange);
        }
    }

    /// An exchange has ended without an answer: whoever waited for it goes on.
    pub fn was_cancelled(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, exchange: &Exchange) {
        match exchange.role {
            Role::Read { op } => {
                pages.op_exchange_ended(op);
                let again = pages.ops.peek(op).stage == Stage::Active && !pages.is_answer_coming(pool, parity, op);
                if again && !pool.map.spaces[exchange.space].is_taken && !pool.map.spaces[exchange.space].is_stale {
                    pages.ask_for_page(pool, parity, op);
                }
            }
            Role::Write { op } => pages.op_exchange_ended(op),
            Role::CopyRead { copy } | Role::CopyWrite { copy } => self.copy_failed(pool, copy),
            Role::Fence => pool.map.spaces[exchange.space].fencing.remove(exchange.peer),
            Role::Grant | Role::Versions | Role::Admit { .. } | Role::Order | Role::Listed => {
                if let Some(slab) = pool.map.slab_of(exchange.page) {
                    pool.map.mark(exchange.space, slab);
                }
            }
            Role::Strip { stripe } => parity.stripe_interrupted(pool, pages, self, stripe),
            Role::Check => {
                if let Some(slab) = pool.map.slab_of(exchange.page) {
                    pool.map.spaces[exchange.space].slabs[slab].checking.remove(exchange.peer);
                    pool.map.mark(exchange.space, slab);
                }
            }
            Role::Held => pool.look_for_leftovers_again(exchange.space, exchange.peer),
            Role::Scrub | Role::Reserve | Role::Release => {}
        }
    }

    /// A server is silent: pages that others are put together from, or that are copied from it, are not waited for. Another may
    /// have them, or be what they are put together from.
    pub fn interrupt_sources_at(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, peer: PeerIndex) {
        let is_source = |role| matches!(role, Role::Strip { .. } | Role::CopyRead { .. });
        while let Some(exchange) = pool.sessions.exchanges.find(|e| e.peer == peer && is_source(e.role)) {
            self.cancel(pool, pages, parity, exchange.id);
        }
    }

    /// Nothing more is copied to a slab, nor put together for it.
    pub fn end_copies(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex, slab: SlabNo) {
        self.end_copies_where(pool, parity, |job| (job.space, job.slab) == (space, slab));
    }

    /// The same for one copy of it: what is still to be read for that comes to nothing.
    fn end_copies_to(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        target: PeerIndex,
    ) {
        self.end_copies_where(pool, parity, |job| (job.space, job.slab, job.target) == (space, slab, target));
    }

    fn end_copies_where(&mut self, pool: &mut Pool, parity: &mut Parity, ends: impl Fn(Copy) -> bool) {
        for copy in self.copies.indices() {
            if self.copies.get(copy).is_some_and(&ends) {
                parity.end_stripe(pool, Stripes::of_copy(copy));
                let ours = |role| role == Role::CopyRead { copy } || role == Role::CopyWrite { copy };
                while let Some(exchange) = pool.sessions.exchanges.find(|exchange| ours(exchange.role)) {
                    pool.sessions.end_exchange(exchange.id);
                }
                self.copies.end(copy);
            }
        }
    }

    /// A server does not know this reader even after it was told: it has none of the copies of the space.
    pub fn has_nothing(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        peer: PeerIndex,
    ) {
        for slab in pool.map.spaces[space].slabs.indices() {
            if pool.sessions.peers_of(&pool.map.spaces[space].slabs[slab].entry).has(peer) {
                self.copy_lost(pool, pages, parity, space, slab, peer);
            }
        }
    }

    /// As if a server had never been asked.
    pub fn is_not_asked(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, exchange: &Exchange) {
        let Exchange { role, space, peer, page, .. } = *exchange;
        if let Role::Read { op } = role {
            pages.ops.get(op).sent.remove(peer);
        }
        self.was_cancelled(pool, pages, parity, exchange);
        if let Some(slab) = pool.map.slab_of(page).filter(|_| role == Role::Versions) {
            pool.map.list_again(space, slab, peer);
        }
    }

    /// A server is silent. Questions about slabs are taken back, and asked when it is there again: there may be as many as it
    /// has slabs, and each has a slot that a question to another server needs.
    pub fn take_back_questions(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, peer: PeerIndex) {
        for slot in 0..EXCHANGES_MAX {
            let found = pool.sessions.exchanges.at(slot).filter(|e| e.peer == peer && e.role.is_question());
            let Some(exchange) = found else { continue };
            self.cancel(pool, pages, parity, exchange.id);
            let Some(slab) = pool.map.slab_of(exchange.page) else { continue };
            match exchange.role {
                Role::Versions => pool.map.list_again(exchange.space, slab, peer),
                Role::Release => pool.sessions.release(exchange.space, slab, peer, exchange.version),
                _ => {}
            }
        }
    }
}
