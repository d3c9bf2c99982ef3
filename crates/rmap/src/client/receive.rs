//! Datagrams from servers: sessions, and replies to what was asked.

use std::net::SocketAddr;

use smallvec::SmallVec;

use super::exchange::{Exchange, Role, Stage};
use super::ops::{self, Kind};
use super::peer::Reach;
use super::timers::{BLACK_HOLE_TRIES, larger_than};
use super::transmit::PLAIN_ID;
use super::{Client, Fault};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::crypto::session::Session;
use crate::reassembly::Identity;
use crate::units::{SlabNo, Time, Version};
use crate::wire::datagram::Head;
use crate::wire::message::{Direction, Fragment, Message, Op, Status};
use crate::wire::report::Report;
use crate::wire::{DATAGRAM_SIZES, OVERHEAD, PROTOCOL_VERSION};

/// Later requests answered before an earlier one: then it was lost, not reordered (as TCP's three duplicates).
const OVERTAKEN_MAX: u8 = 3;

/// What a server is taken to have until it says so in its first reply. With little, the first writes to several slabs would
/// be declined; with too much, a server that is full says no.
const ROOM_UNREPORTED: u32 = crate::units::SLABS_MAX as u32;

impl Client {
    /// Takes a datagram in; decrypts it in place. Only its keys count; where it came from is looked at when a session begins.
    pub fn on_datagram(&mut self, now: Time, from: SocketAddr, datagram: &mut [u8]) {
        let used = match Head::decode(datagram) {
            Ok(Head::Accept { version: PROTOCOL_VERSION, receiver, sender }) => {
                self.accepted(now, from, (receiver, sender), datagram)
            }
            Ok(Head::Refuse { receiver, .. }) => self.was_refused(receiver, datagram),
            Ok(Head::Data { version: PROTOCOL_VERSION, epoch, receiver, counter }) => {
                self.data(now, receiver, (epoch, counter), datagram)
            }
            _ => None,
        };
        if used.is_none() {
            self.stats.dropped += 1;
        }
        self.settle(now);
    }

    fn was_refused(&mut self, receiver: u32, datagram: &[u8]) -> Option<()> {
        let peer_idx = self.peer_of_number(receiver)?;
        let greeting = self.peers[peer_idx].greeting.as_ref().filter(|greeting| greeting.number == receiver)?;
        if self.config.pool.admits_refusal(datagram, &greeting.initiator.hello) {
            self.stats.incompatible += 1;
        }
        Some(())
    }

    fn accepted(&mut self, now: Time, from: SocketAddr, (receiver, sender): (u32, u32), datagram: &[u8]) -> Option<()> {
        let peer_idx = self.peer_of_number(receiver)?;
        let greeting = self.peers[peer_idx].greeting.as_mut().filter(|greeting| greeting.number == receiver)?;
        let sent_at = greeting.sent_at?;
        let (secrets, about) = greeting.initiator.finish(datagram).ok()?;
        if about.slab_pages as usize != self.config.slab_size.pages() || about.server != self.peers[peer_idx].info.id {
            self.stats.incompatible += 1;
            return Some(());
        }
        let mut session = Session::client(&secrets, sender);
        if let Some(datagrams) = self.config.rekey_every {
            session.rekey_every(datagrams);
        }
        let peer = &mut self.peers[peer_idx];
        let restarted = peer.epoch.is_some_and(|epoch| epoch != about.epoch);
        peer.found_at(from);
        peer.session = Some(session);
        peer.number = receiver;
        peer.greeting = None;
        peer.epoch = Some(about.epoch);
        peer.write_credits = about.write_credits;
        peer.overflow_disk = about.overflow_disk;
        peer.trip.sample(now.since(sent_at));
        peer.timeouts = 0;
        peer.cut = DATAGRAM_SIZES[0];
        peer.probes = larger_than(peer.cut, self.config.datagram_max);
        // Every candidate for a slab until the first reply says otherwise.
        peer.free_slabs = ROOM_UNREPORTED;
        self.stats.sessions += 1;
        if restarted && !self.has(Fault::TrustsServers) {
            self.spread_rebuild(now);
            self.content_lost(peer_idx);
        }
        // What the old session carried is asked again.
        self.resend_all(peer_idx);
        self.heard(now, peer_idx);
        self.look_for_leftovers_at(peer_idx);
        Some(())
    }

    fn data(&mut self, now: Time, receiver: u32, (epoch, counter): (u8, u64), datagram: &mut [u8]) -> Option<()> {
        let peer_idx = self.peer_of_number(receiver)?;
        let peer = &mut self.peers[peer_idx];
        if peer.number != receiver {
            return None;
        }
        let body = peer.session.as_mut()?.open(epoch, counter, datagram).ok()?;
        let (message, fragment, part) = Message::decode(body).ok()?;
        let Direction::Reply { status, pressure, load } = message.direction else { return None };
        let eased = pressure < peer.pressure || (peer.free_slabs == 0 && load.free_slabs > 0);
        let distressed = pressure > peer.pressure;
        peer.pressure = pressure;
        peer.free_slabs = load.free_slabs;
        peer.write_credits = load.write_credits;
        if eased || distressed {
            self.load.changed(now);
        }
        self.look_at_load(now);
        if eased {
            self.mark_vacant_wanted();
        }
        if message.id == PLAIN_ID {
            let peer = &mut self.peers[peer_idx];
            match message.op {
                Op::Report => peer.report = Report::decode(part).ok(),
                Op::Drain => peer.drain = Some(status),
                _ => {
                    peer.lived(Time(message.version.bits()).min(now));
                    if peer.timeouts >= BLACK_HOLE_TRIES {
                        // It is there, and nothing that is longer gets there, or back.
                        peer.cut_short(now);
                    }
                    peer.cut = peer.cut.max((part.len() + OVERHEAD).min(DATAGRAM_SIZES[DATAGRAM_SIZES.len() - 1]));
                }
            }
        } else {
            self.fragment(now, peer_idx, &message, status, fragment, part);
        }
        self.heard(now, peer_idx);
        Some(())
    }

    /// Slabs are looked at, if a server's load has changed and it is time.
    pub(super) fn look_at_load(&mut self, now: Time) {
        if self.load.is_due(now) {
            self.mark_all();
        }
    }

    /// When that is, if it has changed.
    pub(super) fn load_due(&self) -> Option<Time> {
        self.load.due
    }

    /// A server gave a sign of life.
    fn heard(&mut self, now: Time, peer_idx: PeerIndex) {
        let was_up = self.peers[peer_idx].reach == Reach::Up;
        let peer = &mut self.peers[peer_idx];
        while let Some(&id) = peer.in_flight.front() {
            if self.exchanges.get(id).is_some_and(|e| matches!(e.stage, Stage::InFlight { .. })) {
                break;
            }
            peer.in_flight.pop_front();
        }
        peer.heard_at = now;
        peer.backoff = 0;
        let certain = peer.doubted_since.take_if(|since| peer.lived_at >= *since).is_some();
        let said_room = peer.room_wanted_since.take_if(|since| peer.lived_at >= *since).is_some();
        let waits = !peer.in_flight.is_empty() || !peer.resends.is_empty() || peer.must_be_certain();
        peer.unanswered_since = waits.then_some(now);
        peer.reach = Reach::Up;
        peer.up_since = if was_up { peer.up_since } else { now };
        self.long_silent.remove(peer_idx);
        if !was_up || certain {
            self.mark_all();
        }
        if !was_up || said_room {
            self.mark_vacant_wanted();
        }
        if !was_up {
            self.look_for_leftovers_at(peer_idx);
        }
    }

    /// Slabs that wait for any server to come.
    pub(super) fn mark_vacant_wanted(&mut self) {
        let waiting = self.ops.select(|op| op.stage == ops::Stage::Waiting);
        for op in waiting {
            let (space, page) = (self.ops.get(op).space, self.ops.get(op).page);
            if let Some(slab) = self.slab_of(page) {
                self.mark(space, slab);
            }
        }
    }

    fn fragment(
        &mut self,
        now: Time,
        peer_idx: PeerIndex,
        message: &Message,
        status: Status,
        fragment: Fragment,
        part: &[u8],
    ) -> Option<()> {
        let exchange = *self.exchanges.get(message.id)?;
        let Stage::InFlight { sent_at } = exchange.stage else { return None };
        let about_it = exchange.peer == peer_idx && exchange.op == message.op && exchange.page == message.page;
        if !about_it {
            return None;
        }
        if status == Status::Busy && !exchange.class.may_be_put_off() {
            // Nobody may say so of what somebody waits for: that is no answer.
            return None;
        }
        if status == Status::Busy {
            // Too much at once, says the server: the timeout asks again.
            self.exchanges.give_partial(message.id);
            self.peers[peer_idx].timeouts = 0;
            let exchange = self.exchanges.get(message.id)?;
            exchange.excused = exchange.tries;
            return None;
        }
        let payload = usize::from(message.payload);
        let whole = payload == 0 || {
            let partial = self.exchanges.partial(message.id)?;
            let identity = Identity::new(message.id, message.version.bits(), fragment, payload);
            if !partial.is(identity) {
                partial.begin(identity);
            }
            partial.add(fragment, part).is_some()
        };
        if !whole {
            return Some(());
        }
        self.peers[peer_idx].timeouts = 0;
        if exchange.tries == 1 {
            self.peers[peer_idx].trip.sample(now.since(sent_at));
            self.peers[peer_idx].lived(sent_at);
        }
        self.note_overtaken(now, peer_idx, &exchange);
        // One that others have overtaken may have had the copy given up, and so this answer's exchange ended.
        self.exchanges.get(message.id)?;
        self.exchanges.grow_window(now.since(sent_at));
        if payload > 0 {
            // Another reply's room is as good for the next one, and this one stays where it is.
            self.exchanges.partial(message.id)?.swap(&mut self.reply);
        }
        self.end_exchange(message.id);
        let reply = std::mem::take(&mut self.reply);
        self.answered(now, &exchange, status, message.version, &reply[..payload]);
        self.reply = reply;
        Some(())
    }

    /// Requests of the same class that were last sent before this one and are still unanswered. Those are lost that several have
    /// overtaken, and the oldest that one has, if it has been out for a timeout: each timeout sends one only, and where many are lost
    /// they would wait for one another. An answer has left the network, so there is room for a request.
    fn note_overtaken(&mut self, now: Time, peer_idx: PeerIndex, by: &Exchange) {
        let peer = &mut self.peers[peer_idx];
        // Of one that was sent again it is not known which of them was answered. Where the network is only slow that is the first, and
        // nothing was overtaken.
        let sent_later = peer.in_flight.iter().position(|id| *id == by.id).filter(|_| by.tries == 1);
        let Some(earlier) = sent_later else { return };
        let late = peer.trip.late();
        let mut lost: SmallVec<[u64; 8]> = SmallVec::new();
        for id in peer.in_flight.range(..earlier).copied() {
            if let Some(exchange) = self.exchanges.get(id)
                && let Stage::InFlight { sent_at } = exchange.stage
                && exchange.class == by.class
                && !exchange.was_put_off()
            {
                exchange.overtaken += 1;
                let is_overdue = now.since(sent_at) >= late;
                if exchange.overtaken == OVERTAKEN_MAX || (is_overdue && lost.is_empty()) {
                    lost.push(id);
                }
            }
        }
        if lost.is_empty() {
            return;
        }
        peer.in_flight.retain(|id| !lost.contains(id));
        for id in lost {
            let Some(exchange) = self.exchanges.get(id).copied() else { continue };
            if self.is_given_up_for(now, &exchange) {
                continue;
            }
            let tries = exchange.tries_lost();
            let peer = &mut self.peers[peer_idx];
            if tries >= BLACK_HOLE_TRIES {
                peer.cut_short(now);
            }
            self.exchanges.line_up(&mut peer.resends, id);
            self.stats.resent_overtaken += 1;
        }
        self.exchanges.shrink_window(now, self.peers[peer_idx].trip.smoothed());
    }

    /// Frees an exchange, and what it held of the windows.
    pub(super) fn end_exchange(&mut self, id: u64) -> Option<Exchange> {
        let exchange = *self.exchanges.get(id)?;
        if matches!(exchange.stage, Stage::InFlight { .. }) && matches!(exchange.op, Op::Write | Op::Trim) {
            self.peers[exchange.peer].writes_out -= 1;
        }
        self.peers[exchange.peer].returning -= usize::from(exchange.role == Role::Release);
        self.exchanges.end(id);
        Some(exchange)
    }

    /// A whole reply.
    pub(super) fn answered(
        &mut self,
        now: Time,
        exchange: &Exchange,
        status: Status,
        version: Version,
        payload: &[u8],
    ) {
        let Exchange { role, peer, space, page, .. } = *exchange;
        if self.is_followed(space) {
            return self.follow_answered(exchange, status, version, payload);
        }
        let Some(slab) = self.slab_of(page) else { return };
        let is_news = status == Status::StaleGeneration && role != Role::Release;
        if is_news && !self.is_hearsay(exchange) {
            match role {
                Role::Read { op } | Role::Write { op } => self.op_exchange_ended(op),
                Role::Strip { job } => self.stripe_interrupted(job),
                Role::CopyRead { copy } | Role::CopyWrite { copy } => self.copy_failed(copy),
                Role::Fence => self.spaces[space].fencing.remove(peer),
                Role::Versions => self.list_again(space, slab, peer),
                Role::Check => self.spaces[space].slabs[slab].checking.remove(peer),
                _ => {}
            }
            return self.says_newer(space, peer);
        } else if is_news {
            self.spaces[space].disbelieved.insert(peer);
        }
        if status == Status::NotFenced && self.is_to_be_notified(exchange) {
            return;
        }
        match role {
            Role::Fence => self.fence_answered(space, peer, status),
            Role::Grant => self.grant_answered(space, slab, peer, exchange.version, status),
            Role::Versions => self.versions_answered(space, page, peer, (status, version), payload),
            Role::Admit { .. } => self.admit_answered(now, space, slab, status),
            Role::Order => self.order_answered(now, space, slab, status, version),
            Role::Listed => self.listed_answered(space, page, (status, version), payload),
            Role::Check => self.check_answered(space, slab, peer, (status, version)),
            Role::Reserve => self.reserve_answered(space, peer, exchange.version.bits(), status),
            Role::Release => {}
            Role::Held => self.held_answered(space, peer, exchange.version, (status, version), payload),
            Role::Strip { job } => self.strip_answered(job, exchange, status, version, payload),
            Role::Scrub => self.scrub_answered(exchange, status, version, payload),
            Role::Read { op } => self.read_answered(op, exchange, status, version, payload),
            Role::Write { op } => self.write_answered(op, exchange, status),
            Role::CopyRead { copy } if status == Status::Ok && !self.copy_is_right(copy, version, payload) => {
                self.copy_is_wrong(copy, peer);
            }
            Role::CopyRead { copy } if status == Status::Ok && version.has_content() != payload.is_empty() => {
                if let Some(room) = self.redundancy.copies.buffer(copy).get_mut(..payload.len()) {
                    room.copy_from_slice(payload);
                }
                self.copy_was_read(copy, version);
            }
            Role::CopyWrite { copy } if status == Status::Ok => self.copy_was_written(copy),
            Role::CopyRead { copy } | Role::CopyWrite { copy } => {
                self.copy_failed(copy);
                self.copy_lost(space, slab, peer);
            }
        }
    }

    fn read_answered(&mut self, op: OpIndex, exchange: &Exchange, status: Status, version: Version, payload: &[u8]) {
        self.op_exchange_ended(op);
        let Exchange { peer, space, page, .. } = *exchange;
        let operation = *self.ops.get(op);
        // A hedged read that the other copy has answered; its slot may even be another operation's by now.
        if operation.stage != ops::Stage::Active || operation.kind != Kind::Read {
            return;
        }
        let Some(slab) = self.slab_of(page) else { return };
        if status != Status::Ok || self.is_another_copy(space, version) {
            self.copy_lost(space, slab, peer);
            if self.ops.peek(op).stage == ops::Stage::Active && !self.is_answer_coming(op) {
                self.ask_for_page(op);
            }
            return;
        }
        // The version that was known, or one that was written while this was under way.
        let newest = self.newest_issued(space, slab, operation.page);
        let right = (version >= exchange.version && version <= newest) || self.has(Fault::TrustsServers);
        if !right || version.has_content() == payload.is_empty() {
            return self.page_is_bad(op, peer);
        }
        if payload.is_empty() {
            return self.page_was_trimmed(op, exchange, version);
        }
        if self.spaces[space].key.open(page, version, payload, self.ops.content(op)).is_err() {
            return self.page_is_bad(op, peer);
        }
        self.finish_read(op, Ok(true));
    }

    /// A trim has no seal: its version has to be one that this client gave. Which it gave between the one that was asked for and
    /// the last one is not known any more: where there is a later one, that is asked for.
    fn page_was_trimmed(&mut self, op: OpIndex, exchange: &Exchange, version: Version) {
        let Exchange { space, page, peer, version: asked, .. } = *exchange;
        let Some(slab) = self.slab_of(page) else { return };
        let known = self.spaces[space].slabs[slab].version(self.config.slab_size.index(page));
        let written = self.ops.writer(space, page).map(|writer| self.ops.peek(writer).version);
        if version == known || Some(version) == written || self.has(Fault::TrustsServers) {
            self.finish_read(op, Ok(false));
        } else if known > asked {
            self.ops.get(op).version = known;
            let comes = |e: &Exchange| e.role == Role::Read { op } && !self.peers[e.peer].is_down();
            if self.exchanges.find(comes).is_none() {
                self.ask_for_page(op);
            }
        } else {
            self.page_is_bad(op, peer);
        }
    }

    /// The newest version of a page that may be at a server.
    fn newest_issued(&mut self, space: SpaceIndex, slab: SlabNo, page: crate::units::PageNo) -> Version {
        let known = self.spaces[space].slabs[slab].version(self.config.slab_size.index(page));
        let writer = self.ops.writer(space, page);
        writer.map_or(known, |op| self.ops.get(op).version.max(known))
    }

    fn write_answered(&mut self, op: OpIndex, exchange: &Exchange, status: Status) {
        let Exchange { peer, space, page, version, .. } = *exchange;
        let Some(slab) = self.slab_of(page) else { return };
        if status == Status::Ok {
            self.ops.get(op).acked.insert(peer);
            let index = self.config.slab_size.index(page);
            self.copy_has(space, slab, peer, index, version);
            self.check_write(op);
            self.op_exchange_ended(op);
            let joining = self.spaces[space].slabs[slab].repair.as_ref().is_some_and(|repair| repair.peer == peer);
            if joining {
                self.mark(space, slab);
            }
        } else {
            self.op_exchange_ended(op);
            self.copy_lost(space, slab, peer);
        }
    }
}
