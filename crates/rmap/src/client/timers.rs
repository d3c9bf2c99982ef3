//! What happens because nothing came: requests sent again, reads asked of a second copy, servers given up.

use super::Client;
use super::exchange::{Exchange, Role};
use super::ops;
use super::peer::{PeerSet, Reach};
use crate::client::index::PeerIndex;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::units::Time;

impl Client {
    /// When [`Client::on_timeout`] is to be called, at the latest.
    pub fn poll_timeout(&mut self, now: Time) -> Option<Time> {
        let peers = self.pool.sessions.peers.due(now, &self.pool.config, &self.pool.sessions.exchanges);
        let timed = self.pool.map.questions.due().into_iter().chain(self.pool.map.agenda.timed_due());
        timed
            .chain(self.redundancy.scrub_due(&self.pool))
            .chain(self.pool.map.watch_due())
            .chain(self.redundancy.reservations.due())
            .chain(self.redundancy.vacating.due())
            .chain(self.parity.cold_due(&self.pool))
            .chain(self.pool.map.follow_due())
            .chain(self.pool.overdue_at(now))
            .chain(self.redundancy.repairs.due())
            .chain(self.pool.sessions.load_due())
            .chain(peers)
            .min()
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

    fn watch(&mut self, now: Time, peer_idx: PeerIndex) {
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
    pub(super) fn is_given_up_for(&mut self, now: Time, exchange: &Exchange) -> bool {
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
        self.pool.stats.servers_failed += 1;
        self.redundancy.spread_rebuild(&self.pool, now);
        self.pool.sessions.peers[peer_idx].give_up(now);
        // What it did not answer is asked again when it is back.
        self.take_back_questions(peer_idx);
        self.pool.sessions.peers[peer_idx].resend_all(&mut self.pool.sessions.exchanges);
        if !self.pool.sessions.peers[peer_idx].is_greeted() {
            self.pool.sessions.peers.greet(peer_idx, &self.pool.config);
        }
        self.pool.map.mark_all();
        self.redundancy.interrupt_sources_at(&mut self.pool, &mut self.pages, &mut self.parity, peer_idx);
        let size = self.pool.map.size;
        let reads = |op: &ops::Operation| op.stage == ops::Stage::Active && op.kind == ops::Kind::Read;
        // What is asked there once it was told is not asked yet.
        let waits =
            |op: &ops::Operation| op.sent.has(peer_idx) || self.pool.map.spaces[op.space].unknown_at.has(peer_idx);
        for op in self.pages.ops.select(|op| reads(op) && waits(op)) {
            let operation = *self.pages.ops.get(op);
            if self.pool.map.is_followed(operation.space) {
                self.pages.ask_for_page(&mut self.pool, &mut self.parity, op);
                continue;
            }
            let Some(slab) = size.slab(operation.page) else { continue };
            let state = &self.pool.map.spaces[operation.space].slabs[slab];
            let copies = self.pool.sessions.peers_of(&state.entry);
            let left = self.pool.sound_copies(operation.space, slab);
            if self.pool.map.is_grouped(operation.space, slab) {
                // Put together from others, or queued.
                self.pages.ask_for_page(&mut self.pool, &mut self.parity, op);
            } else if copies.minus(operation.sent).iter().any(|other| !self.pool.sessions.peers[other].is_down()) {
                self.pages.ask_for_page(&mut self.pool, &mut self.parity, op);
            } else if left.iter().all(|copy| self.pool.sessions.peers[copy].is_down()) {
                self.pages.queue_read(&mut self.pool, &mut self.parity, op);
            }
        }
        // Slabs that were about to be asked for here are asked for elsewhere.
        self.pages.mark_vacant_wanted(&mut self.pool);
    }
}

impl Pages {
    /// A demand read that takes long is asked of another copy as well.
    fn hedge(&mut self, pool: &mut Pool, parity: &mut Parity, now: Time, peer_idx: PeerIndex) {
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
}
