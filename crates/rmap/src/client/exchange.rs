//! Exchanges: one request to one server and its reply.

use std::collections::VecDeque;
use std::time::Duration;

use crate::client::index::{CopyIndex, OpIndex, PeerIndex, SpaceIndex, StripeIndex};
use crate::reassembly::Partial;
use crate::units::{Class, PageNo, Time, Version};
use crate::wire::message::{Op, Status};

/// Requests under way or waiting, to all servers.
pub const EXCHANGES_MAX: usize = 2048;
/// Of these, questions about slabs and spaces: there may be as many as there are slabs, and they wait for one another. The other
/// half is for pages, and always enough: a write has three (two copies and one in the making) or two grants, a read two; with
/// what is put together from others, copied and looked at, 920 together. Writes that have failed come on top when their servers are
/// back, and questions may have to wait for these.
pub const QUESTIONS_MAX: usize = EXCHANGES_MAX / 2;
/// Pages of replies under way, from all servers together: 1 MiB. More only fills the queues of a switch.
pub const WINDOW_MAX: usize = 256;
/// Slots in a list of exchanges, each of which may be in it twice. More than that are some that ended and were not
/// taken out.
pub const LINE_MAX: usize = 2 * EXCHANGES_MAX;
const INDEX_BITS: u32 = EXCHANGES_MAX.trailing_zeros();

/// One exchange, and no other ever: its slot in the low bits, and in the others how many began before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExchangeId(pub u64);

impl ExchangeId {
    fn slot(self) -> u16 {
        (self.0 & (EXCHANGES_MAX as u64 - 1)) as u16
    }
}

/// What an exchange is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Of a caller's operation.
    Read {
        op: OpIndex,
    },
    Write {
        op: OpIndex,
    },
    /// Of a take-over or a new copy.
    Fence,
    Grant,
    Versions,
    /// Of a copy that servers make: who may fill the slab, how far the source is, and what the target has.
    Admit {
        source: Option<PeerIndex>,
    },
    Order,
    Listed,
    /// Of a page that is copied from one server to another.
    CopyRead {
        copy: CopyIndex,
    },
    CopyWrite {
        copy: CopyIndex,
    },
    /// Of a page that others are put together from.
    Strip {
        stripe: StripeIndex,
    },
    /// Of a look at a page that nobody asked for.
    Scrub,
    /// Of a copy: whether it is the one that the map means.
    Check,
    /// Of a space: how much room a server is to keep for it.
    Reserve,
    /// Of nothing: what is left behind is given back.
    Release,
    /// Of a space: what a server has of it.
    Held,
}

impl Role {
    /// Of a slab or a space, and of no page.
    pub fn is_question(self) -> bool {
        self.is_of_space() || matches!(self, Role::Versions | Role::Check | Role::Release)
    }

    /// Of a space, whichever slab the page is in that it names.
    pub fn is_of_space(self) -> bool {
        matches!(self, Role::Fence | Role::Reserve | Role::Held)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Free,
    Queued,
    InFlight { sent_at: Time },
}

#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    pub id: ExchangeId,
    pub stage: Stage,
    pub role: Role,
    pub peer: PeerIndex,
    pub op: Op,
    pub class: Class,
    pub space: SpaceIndex,
    pub page: PageNo,
    pub version: Version,
    pub tries: u32,
    /// Those of them up to the last that was answered, if only by that the server has no time: they were not lost.
    pub excused: u32,
    pub first_sent_at: Option<Time>,
    /// Later requests of its class that were answered before it.
    pub overtaken: u8,
    /// A second copy was asked too.
    pub hedged: bool,
    /// Where the reply is put together, while in flight.
    partial: Option<usize>,
}

impl Exchange {
    /// When it was last sent, if it is under way.
    fn sent_at(&self) -> Option<Time> {
        if let Stage::InFlight { sent_at } = self.stage { Some(sent_at) } else { None }
    }

    /// Its last try was answered, if only by that the server has no time: a timeout asks again, and nothing sooner.
    pub fn was_put_off(&self) -> bool {
        self.excused == self.tries
    }

    /// Tries that nothing came of.
    pub fn tries_lost(&self) -> u32 {
        self.tries - self.excused
    }
}

/// What a new exchange is made of.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub role: Role,
    pub peer: PeerIndex,
    pub op: Op,
    pub class: Class,
    pub space: SpaceIndex,
    pub page: PageNo,
    pub version: Version,
}

/// What a server answered.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    pub status: Status,
    /// What the version means depends on what was asked.
    pub version: Version,
    pub payload: &'a [u8],
}

/// All exchanges of a client, and the room for replies.
#[derive(Debug)]
pub struct Exchanges {
    all: Vec<Exchange>,
    free: Vec<u16>,
    /// Questions under way, and how many there may be.
    questions: usize,
    questions_max: usize,
    /// Those of them that are about no slab.
    of_spaces: usize,
    sequence: u64,
    partials: Vec<Partial>,
    partials_free: Vec<u16>,
    /// Pages of replies that may be under way now.
    pub window: usize,
    /// Replies since the window grew.
    grown: usize,
    /// When it shrank last.
    shrunk_at: Option<Time>,
}

/// Where the window begins: 64 KiB, which no switch drops even if all servers answer at once.
const WINDOW_FIRST: usize = 16;
const WINDOW_MIN: usize = 4;
/// Where replies take longer, a larger window makes the queue longer, and nothing faster: a fault would wait behind all of it.
/// Many times a round trip, so only a network that is full, or a server that is, comes to it.
const QUEUE_MAX: Duration = Duration::from_millis(2);

impl Exchanges {
    pub fn new(questions_max: usize) -> Exchanges {
        let empty = Exchange {
            id: ExchangeId(0),
            stage: Stage::Free,
            role: Role::Release,
            peer: PeerIndex(0),
            op: Op::Probe,
            class: Class::Demand,
            space: SpaceIndex(0),
            page: PageNo(0),
            version: Version::NEVER,
            tries: 0,
            excused: 0,
            first_sent_at: None,
            overtaken: 0,
            hedged: false,
            partial: None,
        };
        Exchanges {
            all: vec![empty; EXCHANGES_MAX],
            free: (0..EXCHANGES_MAX as u16).rev().collect(),
            questions: 0,
            of_spaces: 0,
            questions_max: questions_max.clamp(1, QUESTIONS_MAX),
            sequence: 0,
            partials: (0..WINDOW_MAX).map(|_| Partial::new()).collect(),
            partials_free: (0..WINDOW_MAX as u16).rev().collect(),
            window: WINDOW_FIRST,
            grown: 0,
            shrunk_at: None,
        }
    }

    /// Whether one of either kind can begin.
    pub fn has_room(&self) -> bool {
        self.questions < self.questions_max && !self.free.is_empty()
    }

    /// How many are about spaces and no slab of them.
    pub fn of_spaces(&self) -> usize {
        self.of_spaces
    }

    pub fn begin(&mut self, request: Request) -> Option<ExchangeId> {
        let is_question = request.role.is_question();
        if is_question && self.questions >= self.questions_max {
            return None;
        }
        let index = self.free.pop()?;
        self.questions += usize::from(is_question);
        self.of_spaces += usize::from(request.role.is_of_space());
        self.sequence += 1;
        let id = ExchangeId(self.sequence << INDEX_BITS | u64::from(index));
        let Request { role, peer, op, class, space, page, version } = request;
        self.all[usize::from(index)] = Exchange {
            id,
            stage: Stage::Queued,
            role,
            peer,
            op,
            class,
            space,
            page,
            version,
            tries: 0,
            excused: 0,
            first_sent_at: None,
            overtaken: 0,
            hedged: false,
            partial: None,
        };
        Some(id)
    }

    pub fn get(&mut self, id: ExchangeId) -> Option<&mut Exchange> {
        let exchange = &mut self.all[usize::from(id.slot())];
        (exchange.id == id && exchange.stage != Stage::Free).then_some(exchange)
    }

    /// The same, to be read.
    pub fn peek(&self, id: ExchangeId) -> Option<&Exchange> {
        let exchange = &self.all[usize::from(id.slot())];
        (exchange.id == id && exchange.stage != Stage::Free).then_some(exchange)
    }

    /// The same, of one that was sent, and when it was last.
    pub fn in_flight(&self, id: ExchangeId) -> Option<(&Exchange, Time)> {
        self.peek(id).and_then(|exchange| Some((exchange, exchange.sent_at()?)))
    }

    pub fn in_flight_mut(&mut self, id: ExchangeId) -> Option<(&mut Exchange, Time)> {
        self.get(id).and_then(|exchange| exchange.sent_at().map(|sent_at| (exchange, sent_at)))
    }

    /// Appends to a list in which there may be some that ended: they go when it is full, so that it never grows.
    pub fn line_up(&self, line: &mut VecDeque<ExchangeId>, id: ExchangeId) {
        if line.len() >= LINE_MAX {
            line.retain(|id| self.peek(*id).is_some());
        }
        line.push_back(id);
    }

    /// What is in a slot, of which there are [`EXCHANGES_MAX`].
    pub fn at(&self, slot: usize) -> Option<Exchange> {
        self.all.get(slot).filter(|exchange| exchange.stage != Stage::Free).copied()
    }

    /// The first that fits.
    pub fn find(&self, fits: impl Fn(&Exchange) -> bool) -> Option<Exchange> {
        self.all.iter().find(|exchange| exchange.stage != Stage::Free && fits(exchange)).copied()
    }

    pub fn end(&mut self, id: ExchangeId) {
        let Some(exchange) = self.get(id) else { return };
        exchange.stage = Stage::Free;
        let (partial, role) = (exchange.partial.take(), exchange.role);
        self.questions -= usize::from(role.is_question());
        self.of_spaces -= usize::from(role.is_of_space());
        self.free.push(id.slot());
        self.partials_free.extend(partial.map(|slot| slot as u16));
    }

    /// Whether a reply with a page in it may be asked for now.
    pub fn has_window(&self) -> bool {
        WINDOW_MAX - self.partials_free.len() < self.window
    }

    /// An exchange is being sent. It takes room for its reply, where it needs some.
    pub fn send(&mut self, now: Time, id: ExchangeId) {
        let Some(exchange) = self.get(id) else { return };
        exchange.stage = Stage::InFlight { sent_at: now };
        exchange.tries += 1;
        exchange.first_sent_at.get_or_insert(now);
        exchange.overtaken = 0;
        if exchange.op.is_answered_at_length() && exchange.partial.is_none() {
            let slot = self.partials_free.pop().map(usize::from);
            if let Some(exchange) = self.get(id) {
                exchange.partial = slot;
            }
            if let Some(slot) = slot {
                self.partials[slot].clear();
            }
        }
    }

    /// Its reply is not expected for now: others may take its slot.
    pub fn give_partial(&mut self, id: ExchangeId) {
        let partial = self.get(id).and_then(|exchange| exchange.partial.take());
        self.partials_free.extend(partial.map(|slot| slot as u16));
    }

    /// Whether an exchange has room for its reply, where it needs some, or may have it now.
    pub fn may_be_sent(&self, exchange: &Exchange) -> bool {
        !exchange.op.is_answered_at_length() || exchange.partial.is_some() || self.has_window()
    }

    /// Where the reply of an exchange is put together.
    pub fn partial(&mut self, id: ExchangeId) -> Option<&mut Partial> {
        let slot = self.get(id)?.partial?;
        Some(&mut self.partials[slot])
    }

    /// A reply came as it should: one page more per window of them, unless what is under way already stands in a queue.
    pub fn grow_window(&mut self, took: Duration) {
        if took > QUEUE_MAX && self.window >= WINDOW_FIRST {
            return;
        }
        self.grown += 1;
        if self.grown >= self.window {
            self.grown = 0;
            self.window = (self.window + 1).min(WINDOW_MAX);
        }
    }

    /// Something was lost on the way. What is lost within a round trip had no time to hear of it (as TCP's NewReno, RFC 6582).
    pub fn shrink_window(&mut self, now: Time, round_trip: Duration) {
        if self.shrunk_at.is_none_or(|at| now.since(at) >= round_trip) {
            self.window = (self.window / 2).max(WINDOW_MIN);
            self.grown = 0;
            self.shrunk_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The window after so many replies that took so long.
    fn grown(replies: usize, took_us: u64) -> usize {
        let mut exchanges = Exchanges::new(QUESTIONS_MAX);
        exchanges.shrink_window(Time(0), Duration::ZERO);
        (0..replies).for_each(|_| exchanges.grow_window(Duration::from_micros(took_us)));
        exchanges.window
    }

    #[test]
    fn a_window_that_fills_a_queue_grows_no_further() {
        for (replies, took_us, window) in [
            (7, 50, 8),
            (8, 50, 9),
            (100_000, 50, WINDOW_MAX),
            (100_000, 2000, WINDOW_MAX),
            (100_000, 2001, WINDOW_FIRST),
        ] {
            assert_eq!(grown(replies, took_us), window, "{replies} replies that took {took_us} us");
        }
    }

    /// The same loss may show more than once.
    #[test]
    fn the_window_shrinks_once_a_round_trip() {
        let mut exchanges = Exchanges::new(QUESTIONS_MAX);
        for (at_us, window) in [(0, 8), (0, 8), (99, 8), (100, 4), (101, 4), (300, WINDOW_MIN)] {
            exchanges.shrink_window(Time(at_us * 1000), Duration::from_micros(100));
            assert_eq!(exchanges.window, window, "after {at_us} us");
        }
    }

    fn request(role: Role) -> Request {
        let (op, class, page, version) = (Op::Probe, Class::Demand, PageNo(0), Version::NEVER);
        Request { role, peer: PeerIndex(0), op, class, space: SpaceIndex(0), page, version }
    }

    #[test]
    fn questions_leave_room_for_pages() {
        let mut exchanges = Exchanges::new(QUESTIONS_MAX);
        let asked: Vec<ExchangeId> = std::iter::from_fn(|| exchanges.begin(request(Role::Versions))).collect();
        assert_eq!((asked.len(), exchanges.has_room()), (QUESTIONS_MAX, false));
        let pages = std::iter::from_fn(|| exchanges.begin(request(Role::Write { op: OpIndex(0) }))).count();
        assert_eq!(pages, EXCHANGES_MAX - QUESTIONS_MAX);
        // What follows an answer has its slot.
        exchanges.end(asked[7]);
        assert!(exchanges.has_room());
        assert!(exchanges.begin(request(Role::Versions)).is_some() && !exchanges.has_room());
    }

    /// As where one is not answered while many that follow are.
    #[test]
    fn a_line_keeps_what_is_under_way_and_never_grows() {
        let request = request(Role::Scrub);
        let (mut exchanges, mut line) = (Exchanges::new(QUESTIONS_MAX), VecDeque::with_capacity(LINE_MAX));
        let capacity = line.capacity();
        let kept: Vec<ExchangeId> = (0..EXCHANGES_MAX - 1).map(|_| exchanges.begin(request).unwrap()).collect();
        kept.iter().chain(&kept).for_each(|id| exchanges.line_up(&mut line, *id));
        for _ in 0..3 * LINE_MAX {
            let id = exchanges.begin(request).unwrap();
            exchanges.line_up(&mut line, id);
            exchanges.end(id);
        }
        assert!(line.len() <= LINE_MAX && line.capacity() == capacity);
        assert!(line.into_iter().filter(|id| exchanges.get(*id).is_some()).eq(kept.iter().chain(&kept).copied()));
    }
}
