//! Reads: a page is had from this client's own memory, or from the nearest copy that answers.
//!
//! A read asks one copy after another until one answers with what is right. It ends once, with a page or an error. Pages of a space
//! that another client writes are read in `follow.rs`, and those of a group with parity in `group.rs`, both beside this file.

use crate::client::exchange::{Answer, Exchange, Request, Role};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::Phase;
use crate::client::{Failure, Fault, Token, ops};
use crate::crypto::Rejected;
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::message::{Op as Wire, Status};

impl Pages {
    /// A read, from its beginning. `false`: there is no slot for it.
    pub fn begin_again(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        asked: (Token, Time),
    ) -> bool {
        let look = if pool.map.is_followed(space) { pool.map.look_needed(space) } else { 0 };
        let op = self.ops.begin(Kind::Read, space, page, class, asked);
        op.is_some_and(|op| {
            self.ops.get(op).look = look;
            self.try_read(pool, parity, op);
            true
        })
    }

    /// Answers a read if it can be answered now, or asks a server; else it waits for its slab.
    pub fn try_read(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        if pool.map.spaces[space].is_taken {
            return self.ops.finish(op, Err(Failure::Fenced));
        }
        if pool.map.is_followed(space) {
            return self.try_follow(pool, parity, op);
        }
        // The map that is being looked up decides.
        if pool.map.spaces[space].is_stale {
            return;
        }
        let Some(number) = pool.map.slab_of(page) else { return };
        let slab = &pool.map.spaces[space].slabs[number];
        match slab.phase {
            Phase::Lost => self.ops.finish(op, Err(Failure::Lost)),
            Phase::Vacant | Phase::Granting(_) | Phase::Leaving => self.read_zero(pool, op),
            Phase::Opening(_) if pool.is_out_of_reach(space, number) && !self.ops.get(op).is_own => {
                self.ops.finish(op, Err(Failure::Silent));
            }
            Phase::Opening(_) if pool.map.waits_for_map(space, number) => pool.map.mark(space, number),
            Phase::Opening(_) | Phase::Followed => {}
            Phase::Open => {
                // What is being written is as good as what was; and this is at hand.
                if let Some(writer) = self.ops.writer(space, page) {
                    return self.read_from_buffer(pool, op, writer);
                }
                let index = pool.map.size.index(page);
                if slab.is_disputed(index) {
                    pool.stats.bad_pages += 1;
                    return self.ops.finish(op, Err(Failure::Corrupt));
                }
                let version = slab.version(index);
                if !version.has_content() {
                    return self.read_zero(pool, op);
                }
                self.ops.get(op).version = version;
                self.ask_for_page(pool, parity, op);
            }
        }
    }

    /// A read of what was never written, or trimmed.
    pub fn read_zero(&mut self, pool: &mut Pool, op: OpIndex) {
        pool.stats.reads_local += 1;
        self.ops.get(op).has_content = false;
        self.ops.finish(op, Ok(()));
    }

    fn read_from_buffer(&mut self, pool: &mut Pool, op: OpIndex, writer: OpIndex) {
        let Operation { space, page, version, kind, .. } = *self.ops.peek(writer);
        if kind == (Kind::Write { trim: true }) {
            return self.read_zero(pool, op);
        }
        let opened = match self.ops.content_and_sealed(op, writer) {
            Some((content, sealed)) => pool.map.spaces[space].key.open(page, version, &sealed[..], content),
            None => Err(Rejected::NotAuthentic),
        };
        pool.stats.reads_local += 1;
        self.ops.get(op).has_content = true;
        self.ops.finish(op, opened.map_err(|_| Failure::Corrupt));
    }

    /// Asks the nearest copy that was not asked yet; any copy, where all were.
    pub fn ask_for_page(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, sent, .. } = *self.ops.peek(op);
        let Some(number) = pool.map.slab_of(page) else { return };
        if pool.map.is_followed(space) {
            return self.ask_followed(pool, parity, op);
        }
        if pool.map.spaces[space].is_stale {
            return self.ops.activate(op);
        }
        if pool.map.is_grouped(space, number) {
            return self.ask_group(pool, parity, op, number);
        }
        let copies = pool.copies_to_read(space, number);
        let near = |peer: &PeerIndex| {
            (pool.sessions.peers[*peer].is_down(), sent.has(*peer), pool.sessions.peers[*peer].round_trip())
        };
        // Without a copy that can be trusted, the change of the map decides; one that is to be told of this reader is asked then.
        let Some(peer) = copies.iter().min_by_key(near) else {
            let unknown = pool.sound_copies(space, number);
            let is_away = !unknown.is_empty() && unknown.iter().all(|peer| pool.sessions.peers[peer].is_down());
            if self.ops.peek(op).is_own {
                self.put_back(pool, parity, op);
            } else if self.is_refused(pool, op, number) {
                pool.stats.bad_pages += 1;
                self.fail_read(pool, parity, op, Failure::Corrupt);
            } else if !(is_away && self.queue_read(pool, parity, op)) {
                self.ops.activate(op);
            }
            return pool.map.mark(space, number);
        };
        if pool.sessions.peers[peer].is_down() && self.queue_read(pool, parity, op) {
            return;
        }
        let asked = |e: &Exchange| e.peer == peer && e.role == Role::Read { op };
        if !sent.has(peer) || pool.sessions.exchanges.find(asked).is_none() {
            self.ask_copy(pool, op, peer);
        }
    }

    /// Asks one copy for the page of a read.
    pub fn ask_copy(&mut self, pool: &mut Pool, op: OpIndex, peer: PeerIndex) {
        let Operation { space, page, class, version, .. } = *self.ops.peek(op);
        let request = Request { role: Role::Read { op }, peer, op: Wire::Read, class, space, page, version };
        if pool.ask(request) {
            self.ops.activate(op);
            self.ops.get(op).exchanges += 1;
            self.ops.get(op).sent.insert(peer);
        }
    }

    /// Servers may be asked that could not be until now: reads that wait for that go on.
    pub fn ask_again(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex) {
        let reads = |op: &Operation| op.stage == Stage::Active && op.kind == Kind::Read && op.space == space;
        for op in self.ops.select(reads) {
            if !self.is_answer_coming(pool, parity, op) {
                self.ask_for_page(pool, parity, op);
            }
        }
    }

    /// A demand read that takes long is asked of another copy as well.
    pub fn hedge(&mut self, pool: &mut Pool, parity: &mut Parity, now: Time, peer_idx: PeerIndex) {
        let late = pool.sessions.peers[peer_idx].hedge(now, &mut pool.sessions.exchanges);
        let Some(Exchange { role: Role::Read { op }, space, page, .. }) = late else { return };
        let Some(slab) = pool.map.slab_of(page) else { return };
        let copies = pool.copies_to_read(space, slab);
        let operation = *self.ops.get(op);
        let others = copies.minus(operation.sent).iter().any(|peer| !pool.sessions.peers[peer].is_down());
        if operation.stage == ops::Stage::Active && others {
            pool.stats.hedged += 1;
            self.ask_for_page(pool, parity, op);
        }
    }

    /// A copy has answered a read.
    pub fn read_answered(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        exchange: &Exchange,
        Answer { status, version, payload }: Answer<'_>,
    ) {
        self.op_exchange_ended(op);
        let Exchange { peer, space, page, .. } = *exchange;
        let operation = *self.ops.get(op);
        // A hedged read that the other copy has answered; its slot may even be another operation's by now.
        if operation.stage != ops::Stage::Active || operation.kind != Kind::Read {
            return;
        }
        let Some(slab) = pool.map.slab_of(page) else { return };
        if status != Status::Ok || pool.map.is_another_copy(space, version) {
            redundancy.copy_lost(pool, self, parity, space, slab, peer);
            if self.ops.peek(op).stage == ops::Stage::Active && !self.is_answer_coming(pool, parity, op) {
                self.ask_for_page(pool, parity, op);
            }
            return;
        }
        // The version that was known, or one that was written while this was under way.
        let newest = self.newest_issued(pool, space, slab, operation.page);
        let right = (version >= exchange.version && version <= newest) || pool.has(Fault::TrustsServers);
        if !right || version.has_content() == payload.is_empty() {
            return self.page_is_bad(pool, redundancy, parity, op, peer);
        }
        if payload.is_empty() {
            return self.page_was_trimmed(pool, redundancy, parity, op, exchange, version);
        }
        if pool.map.spaces[space].key.open(page, version, payload, self.ops.content(op)).is_err() {
            return self.page_is_bad(pool, redundancy, parity, op, peer);
        }
        self.finish_read(pool, parity, op, Ok(true));
    }

    /// A trim has no seal: its version has to be one that this client gave. Which it gave between the one that was asked for and
    /// the last one is not known any more: where there is a later one, that is asked for.
    fn page_was_trimmed(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        exchange: &Exchange,
        version: Version,
    ) {
        let Exchange { space, page, peer, version: asked, .. } = *exchange;
        let Some(slab) = pool.map.slab_of(page) else { return };
        let known = pool.map.spaces[space].slabs[slab].version(pool.map.size.index(page));
        let written = self.ops.writer(space, page).map(|writer| self.ops.peek(writer).version);
        if version == known || Some(version) == written || pool.has(Fault::TrustsServers) {
            self.finish_read(pool, parity, op, Ok(false));
        } else if known > asked {
            self.ops.get(op).version = known;
            let comes = |e: &Exchange| e.role == Role::Read { op } && !pool.sessions.peers[e.peer].is_down();
            if pool.sessions.exchanges.find(comes).is_none() {
                self.ask_for_page(pool, parity, op);
            }
        } else {
            self.page_is_bad(pool, redundancy, parity, op, peer);
        }
    }

    /// A damaged page: another copy may be better. Where no other one answers now, this one is kept: it is the only one that
    /// has the slab's other pages.
    fn page_is_bad(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        peer: PeerIndex,
    ) {
        pool.stats.bad_pages += 1;
        let (space, page) = (self.ops.get(op).space, self.ops.get(op).page);
        let Some(slab) = pool.map.slab_of(page) else { return };
        let others = pool.sound_copies(space, slab);
        if others.iter().any(|other| other != peer && pool.sessions.peers[other].is_up()) {
            redundancy.copy_lost(pool, self, parity, space, slab, peer);
            if self.ops.peek(op).stage == Stage::Active && !self.is_answer_coming(pool, parity, op) {
                self.ask_for_page(pool, parity, op);
            }
        } else if pool.map.is_grouped(space, slab) {
            self.ops.get(op).is_bad_itself = true;
            self.ask_for_page(pool, parity, op);
        } else {
            self.finish_read(pool, parity, op, Err(Failure::Corrupt));
        }
    }

    /// The newest version of a page that may be at a server.
    fn newest_issued(&mut self, pool: &Pool, space: SpaceIndex, slab: SlabNo, page: crate::units::PageNo) -> Version {
        let known = pool.map.spaces[space].slabs[slab].version(pool.map.size.index(page));
        let writer = self.ops.writer(space, page);
        writer.map_or(known, |op| self.ops.get(op).version.max(known))
    }

    /// Whether a page can be somewhere in this version: in one that was acknowledged, an earlier one, or the one that is being
    /// written.
    pub fn was_issued(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo, index: usize, version: Version) -> bool {
        let page = pool.map.size.page(slab, index);
        let writer = self.ops.writer(space, page);
        version <= pool.map.spaces[space].slabs[slab].version(index)
            || pool.map.may_be_parity(space, slab, version)
            || writer.is_some_and(|op| self.ops.peek(op).version == version)
    }

    /// A page came: the version that a copy has, and where it was put together.
    pub fn finish_read(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex, result: Result<bool, Failure>) {
        if self.ops.peek(op).stage != Stage::Active {
            return;
        }
        self.ops.get(op).has_content = result == Ok(true);
        self.ops.finish(op, result.map(drop));
        self.drop_exchanges(pool, parity, op);
    }

    /// A page has no copy that may be asked, but for those whose servers refuse. `true` if it has waited for them for long enough.
    pub fn is_refused(&self, pool: &Pool, op: OpIndex, slab: SlabNo) -> bool {
        let Operation { space, since, .. } = *self.ops.peek(op);
        let copies = pool.sound_copies(space, slab);
        let all_refuse = !copies.is_empty() && copies.is_subset_of(pool.map.spaces[space].refusing);
        all_refuse && pool.config.error_after.is_some_and(|error_after| pool.now.since(since) >= error_after)
    }

    /// Those who refused are asked again when it is time.
    pub fn end_refusal(&mut self, pool: &mut Pool, parity: &mut Parity, now: Time, space: SpaceIndex) {
        let state = &mut pool.map.spaces[space];
        if !state.refusing.is_empty() && now >= state.refused_until {
            state.refusing = PeerSet::default();
            pool.map.mark_all_of(space);
            self.ask_again(pool, parity, space);
        }
    }
}
