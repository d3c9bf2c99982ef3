//! What a server's datagrams say of it: that it lives, how much room it has, how long it takes, what was lost.

use smallvec::SmallVec;

use super::send::PLAIN_ID;
use super::{Peer, Reach};
use crate::client::exchange::{Exchange, ExchangeId, Exchanges};
use crate::units::Time;
use crate::wire::OVERHEAD;
use crate::wire::message::{Direction, Fragment, Message, Op, Status};
use crate::wire::report::Report;

/// Later requests answered before an earlier one: then it was lost, not reordered (as TCP's three duplicates).
const OVERTAKEN_MAX: u8 = 3;

/// How a server's load differs from what it said before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadChange {
    Same,
    /// It can take more.
    Eased,
    Distressed,
}

/// What is new with a server that was heard.
#[derive(Clone, Copy, Debug)]
pub struct Heard {
    /// It was silent, or never heard before.
    pub is_back: bool,
    /// It lives as of when that was doubted, or later.
    pub is_certain: bool,
    /// It said how much room it has, as of when writes began to wait for that, or later.
    pub told_room: bool,
}

impl Peer {
    /// Opens a datagram of the session that is called `number`, in place.
    pub fn open<'a>(
        &mut self,
        number: u32,
        (epoch, counter): (u8, u64),
        datagram: &'a mut [u8],
    ) -> Option<(Message, Fragment, &'a [u8])> {
        let session = self.session.as_mut().filter(|_| self.number == number)?;
        Message::decode(session.open(epoch, counter, datagram).ok()?).ok()
    }

    /// A reply says how much its server has to do. `None`: it is no reply.
    pub fn note_load(&mut self, message: &Message) -> Option<(Status, LoadChange)> {
        let Direction::Reply { status, pressure, load } = message.direction else { return None };
        let change = match () {
            () if pressure < self.pressure || (self.free_slabs == 0 && load.free_slabs > 0) => LoadChange::Eased,
            () if pressure > self.pressure => LoadChange::Distressed,
            () => LoadChange::Same,
        };
        self.pressure = pressure;
        self.free_slabs = load.free_slabs;
        self.write_credits = load.write_credits;
        Some((status, change))
    }

    /// Takes the answer to a request about no page. `false` if it is another's.
    pub fn take_plain(&mut self, now: Time, message: &Message, status: Status, part: &[u8]) -> bool {
        match message.op {
            _ if message.id != PLAIN_ID => return false,
            Op::Report => self.report = Report::decode(part).ok(),
            Op::Drain => self.drain = Some(status),
            _ => {
                self.lived(Time(message.version.bits()).min(now));
                // It is there, and nothing that is longer gets there, or back.
                self.path.lost(now, self.timeouts);
                self.path.carried(part.len() + OVERHEAD);
            }
        }
        true
    }

    /// It gave a sign of life.
    pub fn heard(&mut self, now: Time, exchanges: &Exchanges) -> Heard {
        self.skip_ended(exchanges);
        self.heard_at = now;
        self.backoff = 0;
        let is_certain = self.doubted_since.take_if(|since| self.lived_at >= *since).is_some();
        let told_room = self.room_wanted_since.take_if(|since| self.lived_at >= *since).is_some();
        let waits = !self.in_flight.is_empty() || !self.resends.is_empty() || self.must_be_certain();
        self.unanswered_since = waits.then_some(now);
        let is_back = std::mem::replace(&mut self.reach, Reach::Up) != Reach::Up;
        if is_back {
            self.up_since = now;
        }
        Heard { is_back, is_certain, told_room }
    }

    /// It answered a request, whatever it said; one that was sent once, at `sent_at`, or one of which that is not known.
    pub fn answered(&mut self, now: Time, sent_at: Option<Time>) {
        self.timeouts = 0;
        if let Some(sent_at) = sent_at {
            self.trip.sample(now.since(sent_at));
            self.lived(sent_at);
        }
    }

    /// Something that it was asked at this time was answered.
    fn lived(&mut self, asked_at: Time) {
        self.lived_at = self.lived_at.max(asked_at);
    }

    /// Requests of the same class that were last sent before this one and are still unanswered. Those are lost, and taken out, that
    /// several have overtaken, and the oldest that one has, if it has been out for a timeout: each timeout sends one only, and where
    /// many are lost they would wait for one another. An answer has left the network, so there is room for a request.
    pub fn take_overtaken(&mut self, now: Time, by: &Exchange, exchanges: &mut Exchanges) -> SmallVec<[ExchangeId; 8]> {
        let mut lost = SmallVec::new();
        // Of one that was sent again it is not known which of them was answered. Where the network is only slow that is the first, and
        // nothing was overtaken.
        let sent_later = self.in_flight.iter().position(|id| *id == by.id).filter(|_| by.tries == 1);
        let Some(earlier) = sent_later else { return lost };
        let late = self.trip.late();
        for id in self.in_flight.range(..earlier).copied() {
            let Some((exchange, sent_at)) = exchanges.in_flight_mut(id) else { continue };
            if exchange.class == by.class && !exchange.was_put_off() {
                exchange.overtaken += 1;
                let is_overdue = now.since(sent_at) >= late;
                if exchange.overtaken == OVERTAKEN_MAX || (is_overdue && lost.is_empty()) {
                    lost.push(id);
                }
            }
        }
        if !lost.is_empty() {
            self.in_flight.retain(|id| !lost.contains(id));
        }
        lost
    }

    /// A request that was overtaken is sent again.
    pub fn resend_overtaken(&mut self, now: Time, exchange: &Exchange, exchanges: &Exchanges) {
        self.path.lost(now, exchange.tries_lost());
        exchanges.line_up(&mut self.resends, exchange.id);
    }
}
