//! Does what the parts of redundancy ask for.

use crate::client::context::Context;
use crate::client::exchange::{Answer, Exchange, Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::reserve::Reserved;
use crate::client::scrub::pass::{Verdict, judge};
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::client::{Client, SpaceRef};
use crate::control::ControlRequest;
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::message::{Op, Status};

impl Client {
    /// Nothing more is given back by itself: this client is about to end.
    pub fn stop_giving_back(&mut self) {
        self.pool.config.give_back_after = None;
    }

    /// Whether slabs are on their way back to servers that answer: nobody else knows of them.
    pub fn is_giving_back(&self) -> bool {
        let leaves = |request: &ControlRequest| matches!(request, ControlRequest::Change(change) if change.entry.empty);
        self.pool.map.questions.iter().any(|question| leaves(&question.request)) || self.pool.sessions.is_returning()
    }

    /// What is kept for a space by servers that answer.
    pub fn reserved(&self, space: SpaceRef) -> Reserved {
        self.redundancy.reservations.view(space.0, &self.pool.sessions.peers)
    }

    /// Servers are to keep no room for a space any more.
    pub fn unreserve(&mut self, space: SpaceRef) {
        self.redundancy.reservations.end(space.0);
    }
}

impl Redundancy {
    /// Looks at the next page, if it is time.
    pub(in crate::client) fn poll_scrub(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, now: Time) {
        let Some(pass) = pool.config.scrub_pass else { return };
        let effects = self.scrub.poll(now, pass, &Context { pool, ops: &pages.ops });
        if let Some(id) = effects.cancel {
            self.cancel(pool, pages, parity, id);
        }
        if let Some(request) = effects.read {
            let exchange = pool.ask_for(request);
            self.scrub.was_asked(exchange);
        }
    }

    /// A copy returned what it has of a page.
    pub(in crate::client) fn scrub_answered(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        asked: &Exchange,
        Answer { status, version, payload }: Answer<'_>,
    ) {
        let Some(slab) = pool.map.slab_of(asked.page) else { return };
        let verdict = judge(&Context { pool, ops: &pages.ops }, asked, slab, (status, version), payload);
        pool.stats.scrubbed += u64::from(matches!(verdict, Verdict::Right | Verdict::Bad { .. }));
        pool.stats.scrub_bad += u64::from(matches!(verdict, Verdict::Bad { .. }));
        if matches!(verdict, Verdict::Gone | Verdict::Bad { another_answers: true }) {
            self.copy_lost(pool, pages, parity, asked.space, slab, asked.peer);
        }
    }

    /// Gives slabs back that have been without content for long enough.
    pub(in crate::client) fn poll_vacating(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        now: Time,
    ) {
        let Some(after) = pool.config.give_back_after else { return };
        while let Some((space, slab)) = self.vacating.poll(now, &Context { pool, ops: &pages.ops }) {
            let is_taken = pool.map.spaces[space].is_taken;
            let state = &mut pool.map.spaces[space].slabs[slab];
            state.content.left_queue();
            let is_open = matches!(state.phase, Phase::Open);
            // It is looked at again when its group has no parity any more.
            if is_taken || !state.content.is_empty() || !is_open || pool.map.is_in_frozen(space, slab) {
                continue;
            }
            let state = &pool.map.spaces[space].slabs[slab];
            let is_ripe = state.content.empty_for_at(after) <= now;
            // The number says when to look, the versions what there is.
            if is_ripe && state.versions.iter().any(|version| version.has_content()) {
                debug_assert!(false, "a slab with content was counted as empty");
                continue;
            }
            if is_ripe && pool.can_notify_all(space, slab) && self.begin_discard(pool, pages, parity, space, slab) {
                continue;
            }
            let content = &mut pool.map.spaces[space].slabs[slab].content;
            self.vacating.put_back(now, after, (space, slab), content);
        }
    }
}

impl Redundancy {
    /// When a page is to be looked at next.
    pub(in crate::client) fn scrub_due(&self, pool: &Pool) -> Option<Time> {
        pool.config.scrub_pass.and(self.scrub.due())
    }

    /// All copies in sync have another version of a page.
    pub(in crate::client) fn set_version(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        slab: SlabNo,
        index: usize,
        version: Version,
    ) {
        let state = &mut pool.map.spaces[space].slabs[slab];
        let before = std::mem::replace(&mut state.versions[index], version);
        state.content.replace(before, version);
        if before.has_content() {
            self.note_empty(pool, space, slab);
        }
    }

    /// An owner's slab is open now.
    pub(in crate::client) fn count_content(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        let state = &mut pool.map.spaces[space].slabs[slab];
        state.content.count(&state.versions);
        self.note_empty(pool, space, slab);
    }

    fn note_empty(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        let Some(after) = pool.config.give_back_after else { return };
        let owned = pool.map.spaces[space].tenure == Tenure::Owner;
        let content = &mut pool.map.spaces[space].slabs[slab].content;
        if owned && content.is_empty() {
            self.vacating.became_empty(pool.now, after, (space, slab), content);
        }
    }

    /// Looks at the reservations that it is time for.
    pub(in crate::client) fn poll_reservations(&mut self, pool: &mut Pool, pages: &Pages, now: Time) {
        while let Some((space, wanted)) = self.reservations.poll(now, &Context { pool, ops: &pages.ops }) {
            for (peer, slabs) in wanted {
                if pool.fence(space, peer) {
                    let (role, op, class) = (Role::Reserve, Op::Reserve, Class::Rebuild);
                    let (page, version) = (PageNo(0), Version::from_bits(slabs));
                    let exchange = pool.ask_for(Request { role, peer, op, class, space, page, version });
                    self.reservations.was_asked(space, peer, exchange);
                }
            }
        }
    }

    /// A server keeps what it was asked to keep, or cannot.
    pub(in crate::client) fn reserve_answered(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        peer: PeerIndex,
        slabs: u64,
        status: Status,
    ) {
        if !self.reservations.complete(space, peer, slabs, status) {
            pool.map.spaces[space].fenced_at.remove(peer);
        }
    }

    /// Slabs that a server keeps for this space and that it does not have yet.
    pub(in crate::client) fn room_kept(&self, pool: &Pool, space: SpaceIndex, peer: PeerIndex) -> u64 {
        let kept = self.reservations.kept_at(space, peer);
        if kept == 0 {
            return 0;
        }
        let server = pool.sessions.peers[peer].info().id;
        let replicas = pool.map.spaces[space].slabs.iter().flat_map(|slab| &slab.entry.replicas);
        kept.saturating_sub(replicas.filter(|replica| replica.server == server).count() as u64)
    }
}

impl Pool {
    /// Whether all servers of a slab will hear that it is theirs again. One that is away would keep it, should this owner end
    /// before that is back.
    fn can_notify_all(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let mut copies = self.sessions.peers_of(&self.map.spaces[space].slabs[slab].entry).iter();
        copies.all(|peer| self.sessions.peers[peer].is_up() && self.sessions.returns[peer].len() == 0)
    }
}
