//! What happens because nothing came: requests sent again, reads asked of a second copy, servers given up.

use std::time::Duration;

use super::Client;
use super::exchange::{Exchange, Role, Stage};
use super::ops;
use super::peer::{Peer, PeerSet, Reach};
use crate::client::index::PeerIndex;
use crate::units::Time;
use crate::wire::DATAGRAM_SIZES;

/// A server that nothing is asked of is asked for a sign of life, and for its load.
const PING_IDLE: Duration = Duration::from_secs(1);
/// Before this, a server that never answered is not counted as down: a handshake takes a while under load.
const CONNECT_AFTER: Duration = Duration::from_millis(100);
/// Large datagrams that got lost so often while others came through do not fit the path any more.
pub(super) const BLACK_HOLE_TRIES: u32 = 5;
/// Paths change; larger datagrams are tried again.
const PROBE_AGAIN: Duration = Duration::from_secs(60);
/// A page that a server does not answer for, although it is heard, is no longer waited for where there is another copy. By then each of the
/// 256 operations was asked for twice, if all are lost and each timeout of 8 ms repeats one.
pub(super) const PAGE_PATIENCE: Duration = Duration::from_secs(5);
/// The same of a server that such a copy was given up of lately: the next of its copies is not waited for as long.
const STALLED_PATIENCE: Duration = Duration::from_millis(500);
/// How long that is remembered. The server is given no copy meanwhile: it would keep those who write waiting again.
const STALLED_FOR: Duration = Duration::from_secs(60);
/// The rebuild budget is looked at this often while something waits for it.
const REBUILD_WAIT: Duration = Duration::from_micros(100);

impl Client {
    /// When [`Client::on_timeout`] is to be called, at the latest.
    pub fn poll_timeout(&mut self, now: Time) -> Option<Time> {
        self.peers.indices().for_each(|peer_idx| self.skip_ended(peer_idx));
        let mut next: Option<Time> = None;
        let mut at = |time: Time| next = Some(next.map_or(time, |next| next.min(time)));
        let timed = self.questions.due().into_iter().chain(self.agenda.timed_due());
        timed
            .chain(self.scrub_due())
            .chain(self.watch_due())
            .chain(self.redundancy.reservations.due())
            .chain(self.redundancy.vacating.due())
            .chain(self.cold_due())
            .chain(self.follow_due())
            .chain(self.overdue_at(now))
            .chain(self.redundancy.repairs.due())
            .chain(self.load_due())
            .for_each(&mut at);
        let (fail_after, error_after) = (self.config.fail_after, self.config.error_after);
        for (peer_idx, peer) in self.peers.enumerate_mut() {
            if let Some(greeting) = &peer.greeting {
                at(greeting.due_at());
            }
            match peer.reach {
                Reach::Connecting { since } => at(since + CONNECT_AFTER),
                Reach::Down { since } => {
                    if let Some(error_after) = error_after.filter(|_| !self.long_silent.has(peer_idx)) {
                        at(since + error_after);
                    }
                }
                Reach::Up => {
                    // A request that is under way asks for a sign of life, too.
                    if peer.in_flight.is_empty() {
                        at(peer.heard_at.max(peer.pinged_at) + PING_IDLE);
                    }
                    if let Some(since) = peer.unanswered_since {
                        at(since + peer.fail_after(fail_after));
                    }
                    if let Some(due) = peer.life_due(fail_after) {
                        at(due);
                    }
                    if let Some(oldest) = peer.in_flight.front().and_then(|id| self.exchanges.get(*id))
                        && let Stage::InFlight { sent_at } = oldest.stage
                    {
                        at((sent_at + peer.timeout()).max(peer.resend_at));
                        if !oldest.hedged && matches!(oldest.role, Role::Read { .. }) {
                            at(sent_at + peer.trip.hedge());
                        }
                    }
                    if peer.queues[crate::units::Class::Rebuild as usize].front().is_some() {
                        at(now + REBUILD_WAIT);
                    }
                }
            }
        }
        next
    }

    /// Time went by.
    pub fn on_timeout(&mut self, now: Time) {
        self.mark_timed(now);
        self.poll_scrub(now);
        self.watch_sealed(now);
        self.poll_reservations(now);
        self.poll_vacating(now);
        self.poll_cold(now);
        self.follow(now);
        for peer_idx in self.peers.indices() {
            match self.peers[peer_idx].reach {
                Reach::Connecting { since } if now.since(since) >= CONNECT_AFTER => self.give_up(now, peer_idx),
                Reach::Down { since } if self.is_overdue(now, peer_idx, since) => self.stays_silent(peer_idx),
                Reach::Up => self.watch(now, peer_idx),
                _ => {}
            }
        }
        self.poll_overdue(now);
        self.maintain_confirms(now);
        self.rebuild(now);
        self.look_at_load(now);
        self.settle(now);
    }

    fn watch(&mut self, now: Time, peer_idx: PeerIndex) {
        self.skip_ended(peer_idx);
        if self.peers[peer_idx].stalled_at.take_if(|at| now.since(*at) >= STALLED_FOR).is_some() {
            self.mark_all();
        }
        let peer = &mut self.peers[peer_idx];
        if let Some(since) = peer.unanswered_since
            && now.since(since) >= peer.fail_after(self.config.fail_after)
        {
            return self.give_up(now, peer_idx);
        }
        if peer.session.as_ref().is_some_and(|session| session.is_worn_out()) && peer.greeting.is_none() {
            self.greet(peer_idx);
        }
        let peer = &mut self.peers[peer_idx];
        let quiet = peer.in_flight.is_empty() && now.since(peer.heard_at.max(peer.pinged_at)) >= PING_IDLE;
        let unanswered = peer.life_due(self.config.fail_after).is_some_and(|due| due <= now);
        if quiet || unanswered {
            peer.pinged_at = now;
            peer.ping_due = true;
            peer.unanswered_since.get_or_insert(now);
        }
        if now.since(peer.probed_at) >= PROBE_AGAIN && peer.cut < DATAGRAM_SIZES[DATAGRAM_SIZES.len() - 1] {
            peer.probed_at = now;
            peer.probes = larger_than(peer.cut, self.config.datagram_max);
        }
        self.resend(now, peer_idx);
        self.hedge(now, peer_idx);
    }

    fn skip_ended(&mut self, peer_idx: PeerIndex) {
        while let Some(&id) = self.peers[peer_idx].in_flight.front() {
            if self.exchanges.get(id).is_some_and(|exchange| matches!(exchange.stage, Stage::InFlight { .. })) {
                return;
            }
            self.peers[peer_idx].in_flight.pop_front();
        }
    }

    /// The oldest request, once: what else is lost shows when it is answered, or by being overtaken.
    fn resend(&mut self, now: Time, peer_idx: PeerIndex) {
        let timeout = self.peers[peer_idx].timeout();
        let Some(&id) = self.peers[peer_idx].in_flight.front() else { return };
        let Some(exchange) = self.exchanges.get(id) else { return };
        let Stage::InFlight { sent_at } = exchange.stage else { return };
        let due = (sent_at + timeout).max(self.peers[peer_idx].resend_at);
        let (exchange, lost) = (*exchange, exchange.tries_lost());
        if now < due || self.is_given_up_for(now, &exchange) {
            return;
        }
        let peer = &mut self.peers[peer_idx];
        peer.in_flight.pop_front();
        if !peer.resends.contains(&id) {
            self.exchanges.line_up(&mut peer.resends, id);
        }
        peer.resend_at = now + timeout;
        peer.backoff += 1;
        peer.timeouts += 1;
        if lost >= BLACK_HOLE_TRIES {
            peer.cut_short(now);
        }
        self.stats.resent_timeout += 1;
        let round_trip = peer.trip.smoothed();
        self.exchanges.shrink_window(now, round_trip);
    }

    /// A server that gives signs of life does not answer for a page. After [`PAGE_PATIENCE`] its copy of the slab is given up, if another
    /// server that has one has answered something that was sent after that. `true` if it was.
    pub(super) fn is_given_up_for(&mut self, now: Time, exchange: &Exchange) -> bool {
        let Exchange { role, peer: peer_idx, class, space, page, first_sent_at, .. } = *exchange;
        let is_page = matches!(role, Role::Read { .. } | Role::Write { .. });
        let (Some(sent_at), Some(slab)) = (first_sent_at, self.slab_of(page)) else { return false };
        let patience = self.peers[peer_idx].stalled_at.map_or(PAGE_PATIENCE, |_| STALLED_PATIENCE);
        let over = sent_at.max(self.peers[peer_idx].up_since) + patience;
        if now < over || !is_page || class.may_be_put_off() || self.is_followed(space) {
            return false;
        }
        let others: PeerSet = self
            .sound_copies(space, slab)
            .iter()
            .filter(|peer| *peer != peer_idx && self.peers[*peer].is_up())
            .collect();
        if !others.iter().any(|peer| self.peers[peer].lived_at >= over) {
            others.iter().for_each(|peer| self.peers[peer].doubt(now, over));
            return false;
        }
        self.peers[peer_idx].stalled_at = Some(now);
        self.copy_lost(space, slab, peer_idx);
        true
    }

    /// A demand read that takes long is asked of another copy as well.
    fn hedge(&mut self, now: Time, peer_idx: PeerIndex) {
        let after = self.peers[peer_idx].trip.hedge();
        let Some(&id) = self.peers[peer_idx].in_flight.front() else { return };
        let Some(exchange) = self.exchanges.get(id) else { return };
        let (Stage::InFlight { sent_at }, Role::Read { op }) = (exchange.stage, exchange.role) else { return };
        if exchange.hedged || now < sent_at + after {
            return;
        }
        exchange.hedged = true;
        let (space, page) = (exchange.space, exchange.page);
        let Some(slab) = self.slab_of(page) else { return };
        let copies = self.copies_to_read(space, slab);
        let operation = *self.ops.get(op);
        let others = copies.minus(operation.sent).iter().any(|peer| !self.peers[peer].is_down());
        if operation.stage == ops::Stage::Active && others {
            self.stats.hedged += 1;
            self.ask_for_page(op);
        }
    }

    /// A server is silent: reads go elsewhere, and copies there are dropped where another server that has them answers.
    fn give_up(&mut self, now: Time, peer_idx: PeerIndex) {
        self.stats.servers_failed += 1;
        self.spread_rebuild(now);
        let peer = &mut self.peers[peer_idx];
        peer.reach = Reach::Down { since: now };
        peer.unanswered_since = None;
        (peer.doubted_since, peer.room_wanted_since) = (None, None);
        // What it did not answer is asked again when it is back, and leaves the room for its replies to others' until then.
        self.take_back_questions(peer_idx);
        self.resend_all(peer_idx);
        if self.peers[peer_idx].greeting.is_none() {
            self.greet(peer_idx);
        }
        self.mark_all();
        self.interrupt_sources_at(peer_idx);
        let size = self.config.slab_size;
        let reads = |op: &ops::Operation| op.stage == ops::Stage::Active && op.kind == ops::Kind::Read;
        // What is asked there once it was told is not asked yet.
        let waits = |op: &ops::Operation| op.sent.has(peer_idx) || self.spaces[op.space].unknown_at.has(peer_idx);
        for op in self.ops.select(|op| reads(op) && waits(op)) {
            let operation = *self.ops.get(op);
            if self.is_followed(operation.space) {
                self.ask_for_page(op);
                continue;
            }
            let Some(slab) = size.slab(operation.page) else { continue };
            let state = &self.spaces[operation.space].slabs[slab];
            let copies = self.peers_of(&state.entry);
            let left = self.sound_copies(operation.space, slab);
            if self.is_grouped(operation.space, slab) {
                // Put together from others, or queued.
                self.ask_for_page(op);
            } else if copies.minus(operation.sent).iter().any(|other| !self.peers[other].is_down()) {
                self.ask_for_page(op);
            } else if left.iter().all(|copy| self.peers[copy].is_down()) {
                self.queue_read(op);
            }
        }
        // Slabs that were about to be asked for here are asked for elsewhere.
        self.mark_vacant_wanted();
    }

    /// Everything that a server has not answered is to be sent to it again.
    pub(super) fn resend_all(&mut self, peer_idx: PeerIndex) {
        let Peer { in_flight, resends, .. } = &mut self.peers[peer_idx];
        for id in in_flight.drain(..) {
            if self.exchanges.get(id).is_some() && !resends.contains(&id) {
                self.exchanges.line_up(resends, id);
            }
        }
        for id in resends.iter() {
            self.exchanges.give_partial(*id);
        }
    }

    fn is_overdue(&self, now: Time, peer_idx: PeerIndex, since: Time) -> bool {
        let is_over = self.config.error_after.is_some_and(|error_after| now.since(since) >= error_after);
        is_over && !self.long_silent.has(peer_idx)
    }
}

/// Sizes that are still to be tried, a bit each.
pub fn larger_than(cut: usize, max: usize) -> u8 {
    let larger = DATAGRAM_SIZES.iter().enumerate().filter(|(_, size)| **size > cut && **size <= max);
    larger.fold(0, |bits, (at, _)| bits | 1 << at)
}
