//! What happens because nothing came: requests sent again, reads asked of a second copy, servers given up.

use crate::client::exchange::{Exchange, Role};
use crate::client::index::PeerIndex;
use crate::client::peer::{PeerSet, Reach};
use crate::client::{Client, ops};
use crate::units::Time;

impl Client {
    /// When [`Client::on_timeout`] is to be called, at the latest.
    pub fn poll_timeout(&mut self, now: Time) -> Option<Time> {
        let peers = self.pool.sessions.peers.due(now, &self.pool.config, &self.pool.sessions.exchanges);
        let due = [
            peers,
            self.pool.map.due(),
            self.pool.overdue_at(now),
            self.pool.sessions.load_due(),
            self.redundancy.due(&self.pool),
            self.parity.cold_due(&self.pool),
        ];
        due.into_iter().flatten().min()
    }

    /// Does what is due by `now` although nothing came.
    pub fn on_timeout(&mut self, now: Time) {
        self.pool.map.mark_timed(now);
        self.redundancy.poll_scrub(&mut self.pool, &mut self.pages, &mut self.parity, now);
        self.pool.watch_sealed(&self.parity, now);
        self.redundancy.poll_reservations(&mut self.pool, &self.pages, now);
        self.redundancy.poll_vacating(&mut self.pool, &mut self.pages, &mut self.parity, now);
        self.parity.poll_cold(&mut self.pool, &self.pages, &self.redundancy, now);
        self.pages.follow(&mut self.pool, &mut self.parity, now);
        self.pool.sessions.peers.indices().for_each(|peer_idx| self.watch(now, peer_idx));
        self.pages.poll_overdue(&mut self.pool, now);
        self.pages.maintain_confirms(&mut self.pool, now);
        self.redundancy.rebuild(&mut self.pool, now);
        self.pool.look_at_load(now);
        self.settle(now);
    }

    pub(in crate::client) fn watch(&mut self, now: Time, peer_idx: PeerIndex) {
        let watched = self.pool.sessions.peers.watch(now, peer_idx, &self.pool.config, &self.pool.sessions.exchanges);
        if watched.takes_copies {
            self.pool.map.mark_all();
        }
        if watched.is_silent {
            self.give_up(now, peer_idx);
        } else if watched.is_long_silent {
            self.pages.stays_silent(&mut self.pool);
        } else if self.pool.sessions.peers[peer_idx].reach() == Reach::Up {
            self.resend(now, peer_idx);
            self.pages.hedge(&mut self.pool, &mut self.parity, now, peer_idx);
        }
    }

    fn resend(&mut self, now: Time, peer_idx: PeerIndex) {
        let Some(late) = self.pool.sessions.peers[peer_idx].late_request(now, &self.pool.sessions.exchanges) else {
            return;
        };
        if !self.is_given_up_for(now, &late) {
            self.pool.sessions.peers[peer_idx].resend_late(now, &late, &mut self.pool.sessions.exchanges);
            self.pool.stats.resent_timeout += 1;
        }
    }

    /// A server that gives signs of life does not answer for a page. After [`Peer::page_patience`](super::peer::Peer::page_patience) its copy
    /// of the slab is given up, if another server that has one has answered something that was sent after that. `true` if it was.
    pub(in crate::client) fn is_given_up_for(&mut self, now: Time, exchange: &Exchange) -> bool {
        let Exchange { role, peer: peer_idx, class, space, page, first_sent_at, .. } = *exchange;
        let is_page = matches!(role, Role::Read { .. } | Role::Write { .. });
        let (Some(sent_at), Some(slab)) = (first_sent_at, self.pool.map.slab_of(page)) else { return false };
        let over = self.pool.sessions.peers[peer_idx].page_patience(sent_at);
        if now < over || !is_page || class.may_be_put_off() || self.pool.map.is_followed(space) {
            return false;
        }
        let others: PeerSet = self
            .pool
            .sound_copies(space, slab)
            .iter()
            .filter(|peer| *peer != peer_idx && self.pool.sessions.peers[*peer].is_up())
            .collect();
        if !others.iter().any(|peer| self.pool.sessions.peers[peer].lived_at() >= over) {
            others.iter().for_each(|peer| self.pool.sessions.peers[peer].doubt(now, over));
            return false;
        }
        self.pool.sessions.peers[peer_idx].has_stalled(now);
        self.redundancy.copy_lost(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, peer_idx);
        true
    }

    /// A server is silent: reads go elsewhere, and copies there are dropped where another server that has them answers.
    fn give_up(&mut self, now: Time, peer_idx: PeerIndex) {
        let Client { pool, pages, redundancy, parity, .. } = self;
        pool.stats.servers_failed += 1;
        redundancy.spread_rebuild(pool, now);
        pool.sessions.peers[peer_idx].give_up(now);
        // What it did not answer is asked again when it is back.
        redundancy.take_back_questions(pool, pages, parity, peer_idx);
        pool.sessions.peers[peer_idx].resend_all(&mut pool.sessions.exchanges);
        if !pool.sessions.peers[peer_idx].is_greeted() {
            pool.sessions.peers.greet(peer_idx, &pool.config);
        }
        pool.map.mark_all();
        redundancy.interrupt_sources_at(pool, pages, parity, peer_idx);
        let size = pool.map.size;
        let reads = |op: &ops::Operation| op.stage == ops::Stage::Active && op.kind == ops::Kind::Read;
        // What is asked there once it was told is not asked yet.
        let waits = |op: &ops::Operation| op.sent.has(peer_idx) || pool.map.spaces[op.space].unknown_at.has(peer_idx);
        for op in pages.ops.select(|op| reads(op) && waits(op)) {
            let operation = *pages.ops.get(op);
            if pool.map.is_followed(operation.space) {
                pages.ask_for_page(pool, parity, op);
                continue;
            }
            let Some(slab) = size.slab(operation.page) else { continue };
            let state = &pool.map.spaces[operation.space].slabs[slab];
            let copies = pool.sessions.peers_of(&state.entry);
            let left = pool.sound_copies(operation.space, slab);
            if pool.map.is_grouped(operation.space, slab) {
                // Put together from others, or queued.
                pages.ask_for_page(pool, parity, op);
            } else if copies.minus(operation.sent).iter().any(|other| !pool.sessions.peers[other].is_down()) {
                pages.ask_for_page(pool, parity, op);
            } else if left.iter().all(|copy| pool.sessions.peers[copy].is_down()) {
                pages.queue_read(pool, parity, op);
            }
        }
        // Slabs that were about to be asked for here are asked for elsewhere.
        pages.mark_vacant_wanted(pool);
    }
}
