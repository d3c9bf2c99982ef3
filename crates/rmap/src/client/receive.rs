//! Datagrams from servers: sessions, and replies to what was asked.

use std::net::SocketAddr;

use crate::client::exchange::{Answer, Exchange, ExchangeId, Role};
use crate::client::index::{CopyIndex, PeerIndex, SpaceIndex};
use crate::client::peer::{Accepted, LoadChange};
use crate::client::pool::transfer::Outcome;
use crate::client::{Client, Fault};
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
            self.pool.sessions.load_changed(now);
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
    pub(in crate::client) fn heard(&mut self, now: Time, peer_idx: PeerIndex) {
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

    /// Servers that copy a slab among themselves have come a step further, or cannot.
    fn transfer_went_on(&mut self, space: SpaceIndex, slab: SlabNo, outcome: Outcome) {
        if outcome == Outcome::Fails {
            self.redundancy.abort_repair(&mut self.pool, &mut self.pages, &mut self.parity, space, slab);
        }
    }

    /// Acts on a whole reply, by the role of the exchange that it answers.
    pub(in crate::client) fn answered(
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
            Role::Grant => {
                let said = (status, exchange.version);
                self.redundancy.grant_answered(&mut self.pool, &mut self.parity, (space, slab), peer, said);
            }
            Role::Versions => self.pool.versions_answered(space, page, peer, answer),
            Role::Admit { .. } => {
                let outcome = self.pool.admit_answered(now, (space, slab), status);
                self.transfer_went_on(space, slab, outcome);
            }
            Role::Order => {
                let outcome = self.pool.order_answered(now, (space, slab), (status, version));
                self.transfer_went_on(space, slab, outcome);
            }
            Role::Listed => {
                let outcome = self.pool.listed_answered(&self.pages, space, page, answer);
                self.transfer_went_on(space, slab, outcome);
            }
            Role::Check => self.check_answered(space, slab, peer, (status, version)),
            Role::Reserve => {
                self.redundancy.reserve_answered(&mut self.pool, space, peer, exchange.version.bits(), status)
            }
            Role::Release => {}
            Role::Held => self.pool.held_answered(space, peer, exchange.version, (status, version), payload),
            Role::Read { .. } | Role::Write { .. } | Role::Strip { .. } | Role::Scrub => {
                self.page_answered(exchange, answer)
            }
            Role::CopyRead { copy } | Role::CopyWrite { copy } => self.copy_answered(slab, copy, exchange, answer),
        }
    }

    /// The same of what was asked for a caller, or to look at a page.
    fn page_answered(&mut self, exchange: &Exchange, answer: Answer<'_>) {
        let Client { pool, pages, redundancy, parity, .. } = self;
        match exchange.role {
            Role::Read { op } => pages.read_answered(pool, redundancy, parity, op, exchange, answer),
            Role::Write { op } => pages.write_answered(pool, redundancy, parity, op, exchange, answer.status),
            Role::Strip { stripe } => parity.strip_answered(pool, pages, redundancy, stripe, exchange, answer),
            Role::Scrub => redundancy.scrub_answered(pool, pages, parity, exchange, answer),
            _ => {}
        }
    }

    /// The same of a page that passes through the client.
    fn copy_answered(&mut self, slab: SlabNo, copy: CopyIndex, exchange: &Exchange, answer: Answer<'_>) {
        let Client { pool, pages, redundancy, parity, .. } = self;
        let Answer { status, version, payload } = answer;
        let is_read = exchange.role == Role::CopyRead { copy };
        if is_read && status == Status::Ok && !redundancy.copy_is_right(pool, pages, copy, version, payload) {
            redundancy.copy_is_wrong(pool, pages, parity, copy, exchange.peer);
        } else if is_read && status == Status::Ok && version.has_content() != payload.is_empty() {
            if let Some(room) = redundancy.copies.buffer(copy).get_mut(..payload.len()) {
                room.copy_from_slice(payload);
            }
            redundancy.copy_was_read(pool, copy, version);
        } else if !is_read && status == Status::Ok {
            redundancy.copy_was_written(pool, copy);
        } else {
            redundancy.copy_failed(pool, copy);
            redundancy.copy_lost(pool, pages, parity, exchange.space, slab, exchange.peer);
        }
    }
}
