//! Datagrams from servers: sessions, and replies to what was asked.

use std::net::SocketAddr;

use super::exchange::{Answer, Exchange, ExchangeId, Role};
use super::ops::{self, Kind};
use super::peer::{Accepted, LoadChange};
use super::{Client, Fault};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::sessions::Sessions;
use crate::reassembly::Identity;
use crate::units::{SlabNo, Time, Version};
use crate::wire::PROTOCOL_VERSION;
use crate::wire::datagram::Head;
use crate::wire::message::{Fragment, Message, Status};

impl Client {
    /// Takes a datagram in; decrypts it in place. Only its keys count; where it came from is looked at when a session begins.
    pub fn on_datagram(&mut self, now: Time, from: SocketAddr, datagram: &mut [u8]) {
        let used = match Head::decode(datagram) {
            Ok(Head::Accept { version: PROTOCOL_VERSION, receiver, sender }) => {
                self.accepted(now, from, (receiver, sender), datagram)
            }
            Ok(Head::Refuse { receiver, .. }) => self.pool.was_refused(receiver, datagram),
            Ok(Head::Data { version: PROTOCOL_VERSION, epoch, receiver, counter }) => {
                self.data(now, receiver, (epoch, counter), datagram)
            }
            _ => None,
        };
        if used.is_none() {
            self.pool.stats.dropped += 1;
        }
        self.settle(now);
    }

    fn accepted(&mut self, now: Time, from: SocketAddr, numbers: (u32, u32), datagram: &[u8]) -> Option<()> {
        let peer_idx = self.pool.sessions.peers.of_number(numbers.0)?;
        let Accepted::Session { is_restarted } =
            self.pool.sessions.peers[peer_idx].accept(now, from, numbers, datagram, &self.pool.config)?
        else {
            self.pool.stats.incompatible += 1;
            return Some(());
        };
        self.pool.stats.sessions += 1;
        if is_restarted && !self.pool.has(Fault::TrustsServers) {
            self.redundancy.spread_rebuild(&self.pool, now);
            self.content_lost(peer_idx);
        }
        // What the old session carried is asked again.
        self.pool.sessions.peers[peer_idx].resend_all(&mut self.pool.sessions.exchanges);
        self.heard(now, peer_idx);
        self.pool.look_for_leftovers_at(peer_idx);
        Some(())
    }

    fn data(&mut self, now: Time, receiver: u32, counter: (u8, u64), datagram: &mut [u8]) -> Option<()> {
        let peer_idx = self.pool.sessions.peers.of_number(receiver)?;
        let (message, fragment, part) = self.pool.sessions.peers[peer_idx].open(receiver, counter, datagram)?;
        let (status, change) = self.pool.sessions.peers[peer_idx].note_load(&message)?;
        if change != LoadChange::Same {
            self.pool.sessions.load.changed(now);
        }
        self.pool.look_at_load(now);
        if change == LoadChange::Eased {
            self.pages.mark_vacant_wanted(&mut self.pool);
        }
        if !self.pool.sessions.peers[peer_idx].take_plain(now, &message, status, part) {
            self.fragment(now, peer_idx, &message, status, fragment, part);
        }
        self.heard(now, peer_idx);
        Some(())
    }

    /// A server gave a sign of life.
    fn heard(&mut self, now: Time, peer_idx: PeerIndex) {
        let heard = self.pool.sessions.peers.heard(now, peer_idx, &self.pool.sessions.exchanges);
        if heard.is_back || heard.is_certain {
            self.pool.map.mark_all();
        }
        if heard.is_back || heard.told_room {
            self.pages.mark_vacant_wanted(&mut self.pool);
        }
        if heard.is_back {
            self.pool.look_for_leftovers_at(peer_idx);
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
        let id = ExchangeId(message.id);
        let (&exchange, sent_at) = self.pool.sessions.exchanges.in_flight(id)?;
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
            self.pool.sessions.exchanges.give_partial(id);
            self.pool.sessions.peers[peer_idx].answered(now, None);
            let exchange = self.pool.sessions.exchanges.get(id)?;
            exchange.excused = exchange.tries;
            return None;
        }
        let payload = usize::from(message.payload);
        let whole = payload == 0 || {
            let partial = self.pool.sessions.exchanges.partial(id)?;
            let identity = Identity::new(message.id, message.version.bits(), fragment, payload);
            if !partial.is(identity) {
                partial.begin(identity);
            }
            partial.add(fragment, part).is_some()
        };
        if !whole {
            return Some(());
        }
        self.pool.sessions.peers[peer_idx].answered(now, (exchange.tries == 1).then_some(sent_at));
        self.resend_overtaken(now, peer_idx, &exchange);
        // One that others have overtaken may have had the copy given up, and so this answer's exchange ended.
        self.pool.sessions.exchanges.get(id)?;
        self.pool.sessions.exchanges.grow_window(now.since(sent_at));
        if payload > 0 {
            // Another reply's room is as good for the next one, and this one stays where it is.
            self.pool.sessions.exchanges.partial(id)?.swap(&mut self.reply);
        }
        self.pool.sessions.end_exchange(id);
        let reply = std::mem::take(&mut self.reply);
        self.answered(now, &exchange, status, message.version, &reply[..payload]);
        self.reply = reply;
        Some(())
    }

    /// Others have answered before them: they are lost.
    fn resend_overtaken(&mut self, now: Time, peer_idx: PeerIndex, by: &Exchange) {
        let overtaken = self.pool.sessions.peers[peer_idx].take_overtaken(now, by, &mut self.pool.sessions.exchanges);
        if overtaken.is_empty() {
            return;
        }
        for id in overtaken {
            let Some(exchange) = self.pool.sessions.exchanges.peek(id).copied() else { continue };
            if !self.is_given_up_for(now, &exchange) {
                self.pool.sessions.peers[peer_idx].resend_overtaken(now, &exchange, &self.pool.sessions.exchanges);
                self.pool.stats.resent_overtaken += 1;
            }
        }
        self.pool.sessions.exchanges.shrink_window(now, self.pool.sessions.peers[peer_idx].round_trip());
    }

    /// Acts on a whole reply, by the role of the exchange that it answers.
    pub(super) fn answered(
        &mut self,
        now: Time,
        exchange: &Exchange,
        status: Status,
        version: Version,
        payload: &[u8],
    ) {
        let Exchange { role, peer, space, page, .. } = *exchange;
        let answer = Answer { status, version, payload };
        if self.pool.map.is_followed(space) {
            return self.pages.follow_answered(&mut self.pool, &mut self.parity, exchange, answer);
        }
        let Some(slab) = self.pool.map.slab_of(page) else { return };
        let is_news = status == Status::StaleGeneration && role != Role::Release;
        if is_news && !self.redundancy.is_hearsay(&self.pool, exchange) {
            match role {
                Role::Read { op } | Role::Write { op } => self.pages.op_exchange_ended(op),
                Role::Strip { stripe } => {
                    self.parity.stripe_interrupted(&mut self.pool, &mut self.pages, &mut self.redundancy, stripe)
                }
                Role::CopyRead { copy } | Role::CopyWrite { copy } => self.redundancy.copy_failed(&mut self.pool, copy),
                Role::Fence => self.pool.map.spaces[space].fencing.remove(peer),
                Role::Versions => self.pool.map.list_again(space, slab, peer),
                Role::Check => self.pool.map.spaces[space].slabs[slab].checking.remove(peer),
                _ => {}
            }
            return self.says_newer(space, peer);
        } else if is_news {
            self.pool.map.spaces[space].disbelieved.insert(peer);
        }
        if status == Status::NotFenced && self.is_to_be_notified(exchange) {
            return;
        }
        match role {
            Role::Fence => self.fence_answered(space, peer, status),
            Role::Grant => self.grant_answered(space, slab, peer, exchange.version, status),
            Role::Versions => self.versions_answered(space, page, peer, answer),
            Role::Admit { .. } => self.redundancy.admit_answered(
                &mut self.pool,
                &mut self.pages,
                &mut self.parity,
                now,
                (space, slab),
                status,
            ),
            Role::Order => self.redundancy.order_answered(
                &mut self.pool,
                &mut self.pages,
                &mut self.parity,
                now,
                (space, slab),
                (status, version),
            ),
            Role::Listed => {
                self.redundancy.listed_answered(&mut self.pool, &mut self.pages, &mut self.parity, space, page, answer)
            }
            Role::Check => self.check_answered(space, slab, peer, (status, version)),
            Role::Reserve => {
                self.redundancy.reserve_answered(&mut self.pool, space, peer, exchange.version.bits(), status)
            }
            Role::Release => {}
            Role::Held => self.pool.held_answered(space, peer, exchange.version, (status, version), payload),
            Role::Strip { stripe } => self.parity.strip_answered(
                &mut self.pool,
                &mut self.pages,
                &mut self.redundancy,
                stripe,
                exchange,
                answer,
            ),
            Role::Scrub => {
                self.redundancy.scrub_answered(&mut self.pool, &mut self.pages, &mut self.parity, exchange, answer)
            }
            Role::Read { op } => {
                self.pages.read_answered(&mut self.pool, &mut self.redundancy, &mut self.parity, op, exchange, answer)
            }
            Role::Write { op } => {
                self.pages.write_answered(&mut self.pool, &mut self.redundancy, &mut self.parity, op, exchange, status)
            }
            Role::CopyRead { copy }
                if status == Status::Ok
                    && !self.redundancy.copy_is_right(&self.pool, &self.pages, copy, version, payload) =>
            {
                self.redundancy.copy_is_wrong(&mut self.pool, &mut self.pages, &mut self.parity, copy, peer);
            }
            Role::CopyRead { copy } if status == Status::Ok && version.has_content() != payload.is_empty() => {
                if let Some(room) = self.redundancy.copies.buffer(copy).get_mut(..payload.len()) {
                    room.copy_from_slice(payload);
                }
                self.redundancy.copy_was_read(&mut self.pool, copy, version);
            }
            Role::CopyWrite { copy } if status == Status::Ok => self.redundancy.copy_was_written(&mut self.pool, copy),
            Role::CopyRead { copy } | Role::CopyWrite { copy } => {
                self.redundancy.copy_failed(&mut self.pool, copy);
                self.redundancy.copy_lost(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, peer);
            }
        }
    }
}

impl Pages {
    fn read_answered(
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

    fn write_answered(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        exchange: &Exchange,
        status: Status,
    ) {
        let Exchange { peer, space, page, version, .. } = *exchange;
        let Some(slab) = pool.map.slab_of(page) else { return };
        if status == Status::Ok {
            self.ops.get(op).acked.insert(peer);
            let index = pool.map.size.index(page);
            pool.map.copy_has(space, slab, peer, index, version);
            self.check_write(pool, redundancy, parity, op);
            self.op_exchange_ended(op);
            let joining = pool.map.spaces[space].slabs[slab].repair.as_ref().is_some_and(|repair| repair.peer == peer);
            if joining {
                pool.map.mark(space, slab);
            }
        } else {
            self.op_exchange_ended(op);
            redundancy.copy_lost(pool, self, parity, space, slab, peer);
        }
    }
}

impl Pages {
    /// Slabs that wait for any server to come.
    pub(super) fn mark_vacant_wanted(&mut self, pool: &mut Pool) {
        let waiting = self.ops.select(|op| op.stage == ops::Stage::Waiting);
        for op in waiting {
            let (space, page) = (self.ops.get(op).space, self.ops.get(op).page);
            if let Some(slab) = pool.map.slab_of(page) {
                pool.map.mark(space, slab);
            }
        }
    }

    /// The newest version of a page that may be at a server.
    fn newest_issued(&mut self, pool: &Pool, space: SpaceIndex, slab: SlabNo, page: crate::units::PageNo) -> Version {
        let known = pool.map.spaces[space].slabs[slab].version(pool.map.size.index(page));
        let writer = self.ops.writer(space, page);
        writer.map_or(known, |op| self.ops.get(op).version.max(known))
    }
}

impl Pool {
    fn was_refused(&mut self, receiver: u32, datagram: &[u8]) -> Option<()> {
        let peer = self.sessions.peers.of_number(receiver)?;
        let is_refused = self.sessions.peers[peer].has_refused(receiver, datagram, &self.config.pool)?;
        self.stats.incompatible += u64::from(is_refused);
        Some(())
    }

    /// Slabs are looked at, if a server's load has changed and it is time.
    pub(super) fn look_at_load(&mut self, now: Time) {
        if self.sessions.load.is_due(now) {
            self.map.mark_all();
        }
    }
}

impl Sessions {
    /// When that is, if it has changed.
    pub(super) fn load_due(&self) -> Option<Time> {
        self.load.due
    }

    /// Frees an exchange, and what it held of the windows.
    pub(super) fn end_exchange(&mut self, id: ExchangeId) -> Option<Exchange> {
        let exchange = *self.exchanges.get(id)?;
        self.peers[exchange.peer].ended(&exchange);
        if exchange.role == Role::Release {
            self.returns[exchange.peer].ended();
        }
        self.exchanges.end(id);
        Some(exchange)
    }
}
