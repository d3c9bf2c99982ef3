//! What goes to a server next: a hello, signs of life, what is sent again, then requests by class, as far as the windows allow.

use super::{Drain, Peer};
use crate::client::exchange::{Exchange, Exchanges, Stage};
use crate::transmit::Transmit;
use crate::units::{Class, Generation, PageNo, SEALED_SIZE, SpaceId, Time, Version};
use crate::wire::OVERHEAD;
use crate::wire::message::{DRAIN, DRAIN_OFF, Direction, Message, Op};

/// Requests about no page have no exchange: whoever wants an answer asks again. Sizes tell probes apart.
pub const PLAIN_ID: u64 = 0;

impl Peer {
    /// The next datagram of the session itself.
    pub fn poll_own(&mut self, now: Time, out: &mut Vec<u8>) -> Option<Transmit> {
        let to = self.next_address();
        let hello = self.greeting.as_mut().and_then(|greeting| greeting.poll(now, to, out));
        if hello.is_some() {
            return hello;
        }
        if !self.is_up() {
            return None;
        }
        if let Some(size) = self.path.next_probe(now) {
            return self.send_plain(Op::Probe, 0, size, out);
        }
        if std::mem::take(&mut self.ping_due) {
            // The time comes back with the answer: so it is known which ping that is the answer to.
            return self.send_plain(Op::Probe, now.0, OVERHEAD, out);
        }
        if std::mem::take(&mut self.report_due) {
            return self.send_plain(Op::Report, 0, OVERHEAD, out);
        }
        let word = if self.drain_due.take()? == Drain::Begin { DRAIN } else { DRAIN_OFF };
        self.send_plain(Op::Drain, word, OVERHEAD, out)
    }

    /// Takes out the next request, if the windows allow to send it. Pages that are copied wait if `can_copy` says so.
    pub fn next_request(&mut self, exchanges: &Exchanges, can_copy: bool) -> Option<Exchange> {
        if !self.is_up() {
            return None;
        }
        for _ in 0..self.resends.len() {
            let id = self.resends.pop_front()?;
            match exchanges.in_flight(id) {
                Some((exchange, _)) if exchanges.may_be_sent(exchange) => return Some(*exchange),
                // Its reply's room went to others while its server was silent.
                Some(_) => self.resends.push_back(id),
                None => {}
            }
        }
        Class::ALL.into_iter().find_map(|class| self.next_of(class, exchanges, can_copy))
    }

    fn next_of(&mut self, class: Class, exchanges: &Exchanges, can_copy: bool) -> Option<Exchange> {
        let queue = &mut self.queues[class as usize];
        let exchange = loop {
            if let Some(exchange) = exchanges.peek(*queue.front()?) {
                break *exchange;
            }
            queue.pop_front();
        };
        let fits = match exchange.op {
            op if op.is_answered_at_length() => exchanges.has_window(),
            Op::Write | Op::Trim => self.writes_out < self.write_credits.max(1),
            _ => true,
        };
        let is_copy = class == Class::Rebuild && exchange.op == Op::Read;
        if !fits || is_copy && !can_copy {
            return None;
        }
        queue.pop_front();
        Some(exchange)
    }

    /// Sends a request that was taken out, about a space in its generation.
    pub fn send(
        &mut self,
        now: Time,
        exchange: &Exchange,
        (space, generation): (SpaceId, Generation),
        payload: &[u8],
        exchanges: &Exchanges,
        out: &mut Vec<u8>,
    ) -> Option<Transmit> {
        let Exchange { id, op, class, page, version, .. } = *exchange;
        exchanges.line_up(&mut self.in_flight, id);
        self.writes_out += u16::from(exchange.stage == Stage::Queued && op.is_change());
        self.unanswered_since.get_or_insert(now);
        let direction = Direction::Request { cut: self.path.cut() as u16, generation };
        let message = Message { op, class, direction, id: id.0, space, page, version, payload: payload.len() as u16 };
        self.seal(&message, payload, self.path.cut(), out)
    }

    /// A request that was sent, or not yet, has ended.
    pub fn ended(&mut self, exchange: &Exchange) {
        self.writes_out -= u16::from(matches!(exchange.stage, Stage::InFlight { .. }) && exchange.op.is_change());
    }

    /// A request about no page, in a datagram of a certain size.
    fn send_plain(&mut self, op: Op, version: u64, size: usize, out: &mut Vec<u8>) -> Option<Transmit> {
        const PADDING: [u8; SEALED_SIZE] = [0; SEALED_SIZE];
        let message = Message {
            op,
            class: Class::Demand,
            direction: Direction::Request { cut: self.path.cut() as u16, generation: Generation(0) },
            id: PLAIN_ID,
            space: SpaceId(0),
            page: PageNo(0),
            version: Version::from_bits(version),
            payload: (size - OVERHEAD) as u16,
        };
        self.seal(&message, &PADDING[..size - OVERHEAD], size, out)
    }

    fn seal(&mut self, message: &Message, payload: &[u8], size: usize, out: &mut Vec<u8>) -> Option<Transmit> {
        let segment = self.session.as_mut()?.seal(message, payload, size, out);
        Some(Transmit { to: self.addr, segment })
    }
}
