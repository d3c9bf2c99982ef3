//! What is sent next: hellos, signs of life, what is sent again, then by class, as far as the windows allow.

use super::Client;
use super::exchange::{Exchange, Role, Stage};
use super::peer::{Drain, Greeting, Peer};
use super::transfer::Instruction;
use crate::client::index::PeerIndex;
use crate::crypto::handshake::Initiator;
use crate::transmit::Transmit;
use crate::units::{Class, PageNo, SEALED_SIZE, SpaceId, Time, Version};
use crate::wire::datagram::{Head, Versions};
use crate::wire::message::{DRAIN, DRAIN_OFF, Direction, Message, Op, Pressure};
use crate::wire::{DATAGRAM_SIZES, OVERHEAD, PROTOCOL_VERSION};

/// The low bits of a session's number are its server's index in the client's list; the others are random.
const PEER_BITS: u32 = super::SERVERS_MAX.trailing_zeros();
/// Copies that restore redundancy may use this part of the link: demand must not feel them, even where all clients of a
/// dead server copy at once. Each page comes in and goes out once.
const REBUILD_PERCENT: u64 = 30;
/// The same where a server asks to be relieved: somebody waits for its end, or for its memory.
const RELIEF_PERCENT: u64 = 60;
/// The same where a write waits until slabs have their second copies.
const DISSOLVE_PERCENT: u64 = 90;
/// Requests about no page have no exchange: whoever wants an answer asks again. Sizes tell probes apart.
pub const PLAIN_ID: u64 = 0;

impl Client {
    /// The place of the server that a session number belongs to.
    pub(super) fn peer_of_number(&self, number: u32) -> Option<PeerIndex> {
        let peer = PeerIndex((number & ((1 << PEER_BITS) - 1)) as usize);
        self.peers.get(peer).map(|_| peer)
    }

    /// Begins a handshake.
    pub(super) fn greet(&mut self, peer: PeerIndex) {
        let number = (self.entropy.next_u64() as u32) << PEER_BITS | peer.0 as u32;
        let versions = Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION };
        let head = Head::Hello { versions, sender: number };
        let key = self.peers[peer].info.key;
        let initiator = Initiator::new(&self.config.keys, &key, &self.config.pool, head, &self.entropy);
        self.peers[peer].greeting = Some(Greeting::new(initiator, number));
    }

    /// What new copies may use of the link, in bytes a second.
    pub(super) fn rebuild_rate(&self) -> u64 {
        let relieves = self.peers.iter().any(|peer| peer.pressure >= Pressure::Orange);
        let percent = match (self.parity.cold.is_any_dissolving(), relieves) {
            (true, _) => DISSOLVE_PERCENT,
            (_, true) => RELIEF_PERCENT,
            _ => REBUILD_PERCENT,
        };
        self.config.link_bytes_per_second / 100 * percent
    }

    /// The next thing to send, appended to `out`.
    pub fn poll_transmit(&mut self, now: Time, out: &mut Vec<u8>) -> Option<Transmit> {
        let rate = self.rebuild_rate();
        self.redundancy.repairs.earn(now, rate);
        for step in 0..self.peers.len() {
            let peer = PeerIndex((self.turn + step) % self.peers.len());
            if let Some(transmit) = self.transmit_to(now, peer, out) {
                self.turn = peer.0 + 1;
                self.stats.sent += 1;
                return Some(transmit);
            }
        }
        None
    }

    fn transmit_to(&mut self, now: Time, peer_idx: PeerIndex, out: &mut Vec<u8>) -> Option<Transmit> {
        let peer = &mut self.peers[peer_idx];
        if peer.greeting.as_ref().is_some_and(|greeting| greeting.due_at() <= now) {
            let to = peer.next_address();
            let greeting = peer.greeting.as_mut()?;
            greeting.sent(now, to);
            out.extend_from_slice(&greeting.initiator.hello);
            return Some(Transmit { to, segment: greeting.initiator.hello.len() });
        }
        if !peer.is_up() {
            return None;
        }
        if peer.probes != 0 {
            let size = peer.probes.trailing_zeros();
            peer.probes &= peer.probes - 1;
            peer.probed_at = now;
            return plain(peer, Op::Probe, 0, DATAGRAM_SIZES[size as usize], out);
        }
        if std::mem::take(&mut peer.ping_due) {
            // The time comes back with the answer: so it is known which ping that is the answer to.
            return plain(peer, Op::Probe, now.0, OVERHEAD, out);
        }
        if std::mem::take(&mut peer.report_due) {
            return plain(peer, Op::Report, 0, OVERHEAD, out);
        }
        if let Some(drain) = peer.drain_due.take() {
            let word = if drain == Drain::Begin { DRAIN } else { DRAIN_OFF };
            return plain(peer, Op::Drain, word, OVERHEAD, out);
        }
        for _ in 0..self.peers[peer_idx].resends.len() {
            let Some(id) = self.peers[peer_idx].resends.pop_front() else { break };
            let live = self.exchanges.get(id).copied().filter(|e| matches!(e.stage, Stage::InFlight { .. }));
            match live {
                Some(exchange) if self.exchanges.may_be_sent(&exchange) => return self.send(now, exchange, out),
                // Its reply's room went to others while its server was silent.
                Some(_) => self.peers[peer_idx].resends.push_back(id),
                None => {}
            }
        }
        for class in Class::ALL {
            if let Some(exchange) = self.next_of(peer_idx, class) {
                self.peers[peer_idx].queues[class as usize].pop_front();
                return self.send(now, exchange, out);
            }
        }
        None
    }

    /// The first of its class, if the windows allow to send it.
    fn next_of(&mut self, peer_idx: PeerIndex, class: Class) -> Option<Exchange> {
        let exchange = loop {
            let id = *self.peers[peer_idx].queues[class as usize].front()?;
            if let Some(exchange) = self.exchanges.get(id) {
                break *exchange;
            }
            self.peers[peer_idx].queues[class as usize].pop_front();
        };
        let peer = &self.peers[peer_idx];
        let fits = match exchange.op {
            op if op.is_answered_at_length() => self.exchanges.has_window(),
            Op::Write | Op::Trim => peer.writes_out < peer.write_credits.max(1),
            _ => true,
        };
        let copies = class == Class::Rebuild && exchange.op == Op::Read;
        let affordable = !copies || self.redundancy.repairs.can_afford_page();
        (fits && affordable).then_some(exchange)
    }

    fn send(&mut self, now: Time, exchange: Exchange, out: &mut Vec<u8>) -> Option<Transmit> {
        let Exchange { id, role, peer: peer_idx, op, class, space, page, version, .. } = exchange;
        let first = exchange.stage == Stage::Queued;
        if class == Class::Rebuild && op == Op::Read {
            self.redundancy.repairs.spend_page();
        }
        if op.is_answered_at_length() {
            self.exchanges.take_partial(id);
        }
        if let Some(exchange) = self.exchanges.get(id) {
            exchange.stage = Stage::InFlight { sent_at: now };
            exchange.tries += 1;
            exchange.first_sent_at.get_or_insert(now);
            exchange.overtaken = 0;
        }
        let instruction = self.instruction(role, space, page, version);
        let peer = &mut self.peers[peer_idx];
        self.exchanges.line_up(&mut peer.in_flight, id);
        if first && matches!(op, Op::Write | Op::Trim) {
            peer.writes_out += 1;
        }
        peer.unanswered_since.get_or_insert(now);
        let payload: &[u8] = match (op, role) {
            (Op::Write, Role::Write { op }) => self.ops.sealed(op),
            (Op::Write, Role::CopyWrite { copy }) => self.redundancy.copies.buffer(copy),
            _ => instruction.as_ref().map_or(&[], Instruction::payload),
        };
        let state = &self.spaces[space];
        let message = Message {
            op,
            class,
            direction: Direction::Request { cut: peer.cut as u16, generation: state.generation },
            id,
            space: state.id,
            page,
            version,
            payload: payload.len() as u16,
        };
        let segment = peer.session.as_mut()?.seal(&message, payload, peer.cut, out);
        Some(Transmit { to: peer.addr, segment })
    }
}

/// A request about no page, in a datagram of a certain size.
fn plain(peer: &mut Peer, op: Op, version: u64, size: usize, out: &mut Vec<u8>) -> Option<Transmit> {
    const PADDING: [u8; SEALED_SIZE] = [0; SEALED_SIZE];
    let message = Message {
        op,
        class: Class::Demand,
        direction: Direction::Request { cut: peer.cut as u16, generation: crate::units::Generation(0) },
        id: PLAIN_ID,
        space: SpaceId(0),
        page: PageNo(0),
        version: Version::from_bits(version),
        payload: (size - OVERHEAD) as u16,
    };
    let segment = peer.session.as_mut()?.seal(&message, &PADDING[..size - OVERHEAD], size, out);
    Some(Transmit { to: peer.addr, segment })
}
