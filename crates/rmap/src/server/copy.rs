//! Pages of a slab on their way to another server, still sealed, because their owner asked for it.
//!
//! To the other server this one is a client like any other, only that it may do nothing but what its ticket says
//! (`tickets.rs`). Until that server has answered the handshake, which only the one with the right key can, nothing but a few
//! hellos goes to the address that the owner gave: nobody can be made to be flooded.
//!
//! The pages are read as they are when they are sent, each with its version. What is written meanwhile goes to both servers
//! from its owner, and versions order it. This server's word that all were sent is no more than a hint: the owner asks the
//! other one what it has. A transfer ends with the owner's generation and with the grant that it was begun for.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use super::store::Fault;
use super::tickets::TICKET_LIFE;
use super::workers::{Identity, Shared, session_number};
use crate::crypto::entropy::SharedEntropy;
use crate::crypto::handshake::Initiator;
use crate::crypto::session::Session;
use crate::round_trip::RoundTrip;
use crate::transmit::Transmit;
use crate::units::{Class, Generation, SEALED_SIZE, SlabNo, SpaceId, Time, Version};
use crate::wire::copy::{CopyOrder, Progress};
use crate::wire::datagram::{Head, Versions};
use crate::wire::message::{Direction, Message, Op, Status};
use crate::wire::{DATAGRAM_MIN_MAX, DATAGRAM_SIZES, OVERHEAD, PROTOCOL_VERSION};

/// Slabs that one worker copies to others at a time; each has a session of its own and no page of its own.
pub const TRANSFERS_MAX: usize = 8;
/// Hellos to an address that does not answer, the first included: 1 KiB in 75 ms.
const HELLOS_MAX: u32 = 4;
const HELLO_RETRY: Duration = Duration::from_millis(5);
/// Pages that are under way at first, and at most: the other server's write credits may be fewer.
const WINDOW_FIRST: usize = 8;
const WINDOW_MAX: usize = 32;
/// A page that was sent so often in vain: the other server is away.
const TRIES_MAX: u32 = 8;
/// Large datagrams that got lost so often do not fit the path.
const BLACK_HOLE_TRIES: u32 = 4;
/// What a transfer may save up of its rate.
const BURST: u64 = 256 * 1024;
/// How soon a transfer that waits for its rate is looked at again.
const RATE_WAIT: Duration = Duration::from_micros(200);

/// Which slab is copied, in which state, and by which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Subject {
    space: SpaceId,
    slab: SlabNo,
    generation: Generation,
    grant: Version,
    order: CopyOrder,
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    id: u64,
    index: usize,
    sent_at: Time,
    tries: u32,
}

#[derive(Debug)]
struct Transfer {
    subject: Subject,
    progress: Progress,
    /// The owner was told that it is over. Its place is kept until then: who asks again would begin it again.
    is_reported: bool,
    /// What this server calls the session.
    number: u32,
    greeting: Option<Initiator>,
    hellos: u32,
    session: Option<Session>,
    /// What was sent last, or heard: the beginning of the next wait.
    due: Time,
    cut: usize,
    probes: u8,
    /// Pages before this one were sent.
    cursor: usize,
    ids: u64,
    window: usize,
    grown: usize,
    in_flight: VecDeque<Flight>,
    again: VecDeque<Flight>,
    trip: RoundTrip,
    backoff: u32,
    budget: u64,
    budget_at: Time,
}

#[derive(Debug)]
pub struct Transfers {
    worker: usize,
    all: Vec<Option<Transfer>>,
    turn: usize,
}

impl Transfers {
    pub fn new(worker: usize) -> Transfers {
        Transfers { worker, all: (0..TRANSFERS_MAX).map(|_| None).collect(), turn: 0 }
    }

    /// The owner wants a slab, which was granted as is said, to be copied, or asks again how far that is.
    pub fn ask(
        &mut self,
        now: Time,
        (identity, entropy): (&Identity, &SharedEntropy),
        (slab, grant): (SlabNo, Result<Version, Status>),
        generation: Generation,
        request: &Message,
        payload: &[u8],
    ) -> Status {
        let Ok(order) = CopyOrder::decode(payload) else { return Status::BadRequest };
        let grant = match grant {
            Ok(grant) if grant == request.version => grant,
            Ok(_) => return Status::BadRequest,
            Err(status) => return status,
        };
        let subject = Subject { space: request.space, slab, generation, grant, order };
        if self.all.iter().flatten().any(|transfer| transfer.subject == subject) {
            return Status::Ok;
        }
        // What still runs for the slab ends by itself: by its generation, its grant, or the other server's silence.
        let same = |transfer: &Transfer| (transfer.subject.space, transfer.subject.slab) == (request.space, slab);
        let over = |transfer: &Transfer| transfer.progress != Progress::Running;
        let done_with = |transfer: &Transfer| over(transfer) && (transfer.is_reported || transfer.is_old(now));
        let free = |transfer: &Option<Transfer>| transfer.as_ref().is_none_or(done_with);
        let slot = match self.all.iter().position(|transfer| transfer.as_ref().is_some_and(same)) {
            Some(slot) => Some(slot).filter(|slot| self.all[*slot].as_ref().is_none_or(over)),
            None => self.all.iter().position(free),
        };
        let Some(slot) = slot else { return Status::Full };
        // Sessions with clients come first where both have a number; the transfer fails then, which costs time only.
        let number = session_number(entropy.next_u64() as u32, self.worker, slot);
        let head = Head::Hello { versions: Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION }, sender: number };
        let greeting = Initiator::new(&identity.keys, &order.key, &identity.pool, head, entropy);
        self.all[slot] = Some(Transfer::new(now, subject, number, greeting));
        Status::Ok
    }

    /// How far the transfer of a slab is, if there is one; said to its owner.
    pub fn report_progress(&mut self, space: SpaceId, slab: SlabNo) -> Option<Progress> {
        let fits = |transfer: &&mut Transfer| (transfer.subject.space, transfer.subject.slab) == (space, slab);
        let transfer = self.all.iter_mut().flatten().find(fits)?;
        transfer.is_reported = transfer.progress != Progress::Running;
        Some(transfer.progress)
    }

    fn of(&mut self, number: u32) -> Option<&mut Transfer> {
        let slot = (number & (TRANSFERS_MAX as u32 - 1)) as usize;
        self.all[slot].as_mut().filter(|transfer| transfer.number == number && transfer.progress == Progress::Running)
    }

    /// The other server agrees to a session. `None` if this is not the answer to a hello of a transfer.
    pub fn accepted(
        &mut self,
        now: Time,
        receiver: u32,
        sender: u32,
        slab_pages: usize,
        datagram: &[u8],
    ) -> Option<()> {
        let transfer = self.of(receiver)?;
        let (secrets, about) = transfer.greeting.as_mut()?.finish(datagram).ok()?;
        if about.slab_pages as usize != slab_pages {
            transfer.progress = Progress::Failed;
            return Some(());
        }
        transfer.greeting = None;
        transfer.session = Some(Session::client(&secrets, sender));
        transfer.probes = (1 << DATAGRAM_SIZES.len()) - 2;
        transfer.due = now;
        transfer.budget_at = now;
        Some(())
    }

    /// An answer of the other server. `None` if it is for no transfer, or not authentic.
    pub fn data(&mut self, now: Time, receiver: u32, (epoch, counter): (u8, u64), datagram: &mut [u8]) -> Option<()> {
        let transfer = self.of(receiver)?;
        let body = transfer.session.as_mut()?.open(epoch, counter, datagram).ok()?;
        let (message, ..) = Message::decode(body).ok()?;
        let Direction::Reply { status, load, .. } = message.direction else { return None };
        transfer.answered(now, &message, status, usize::from(load.write_credits));
        Some(())
    }

    pub fn poll_timeout(&self) -> Option<Time> {
        self.all.iter().flatten().filter_map(Transfer::due_at).min()
    }

    pub fn on_timeout(&mut self, now: Time) {
        self.all.iter_mut().flatten().for_each(|transfer| transfer.expire(now));
    }

    /// The next thing to send, appended to `out`.
    pub fn poll_transmit(&mut self, now: Time, shared: &Shared, out: &mut Vec<u8>) -> Option<Transmit> {
        for step in 0..TRANSFERS_MAX {
            let slot = (self.turn + step) % TRANSFERS_MAX;
            if let Some(transfer) = &mut self.all[slot]
                && let Some(transmit) = transfer.transmit(now, shared, out)
            {
                self.turn = slot + 1;
                return Some(transmit);
            }
        }
        None
    }
}

impl Transfer {
    fn new(now: Time, subject: Subject, number: u32, greeting: Initiator) -> Transfer {
        Transfer {
            subject,
            progress: Progress::Running,
            is_reported: false,
            number,
            greeting: Some(greeting),
            hellos: 0,
            session: None,
            due: now,
            cut: DATAGRAM_MIN_MAX,
            probes: 0,
            cursor: 0,
            ids: 0,
            window: WINDOW_FIRST,
            grown: 0,
            in_flight: VecDeque::with_capacity(WINDOW_MAX),
            again: VecDeque::with_capacity(WINDOW_MAX),
            trip: RoundTrip::default(),
            backoff: 0,
            budget: BURST,
            budget_at: now,
        }
    }

    /// Its owner has not asked for so long that it will not.
    fn is_old(&self, now: Time) -> bool {
        now.since(self.budget_at.max(self.due)) >= TICKET_LIFE
    }

    fn timeout(&self) -> Duration {
        self.trip.timeout() * 2_u32.pow(self.backoff.min(4))
    }

    fn due_at(&self) -> Option<Time> {
        match self.progress {
            Progress::Running if self.session.is_none() => Some(self.due),
            Progress::Running => {
                let oldest = self.in_flight.front().map(|flight| flight.sent_at + self.timeout());
                let waits_for_rate = self.budget < SEALED_SIZE as u64 && self.in_flight.len() < self.window;
                oldest.into_iter().chain(waits_for_rate.then(|| self.budget_at + RATE_WAIT)).min()
            }
            _ => None,
        }
    }

    fn expire(&mut self, now: Time) {
        if self.progress != Progress::Running || self.session.is_none() {
            return;
        }
        let Some(oldest) = self.in_flight.front().copied() else { return };
        if now < oldest.sent_at + self.timeout() {
            return;
        }
        self.in_flight.pop_front();
        if oldest.tries >= TRIES_MAX {
            self.progress = Progress::Failed;
            return;
        }
        if oldest.tries >= BLACK_HOLE_TRIES {
            self.cut = DATAGRAM_MIN_MAX;
        }
        self.again.push_back(oldest);
        self.window = (self.window / 2).max(1);
        (self.grown, self.backoff) = (0, self.backoff + 1);
    }

    fn answered(&mut self, now: Time, message: &Message, status: Status, credits: usize) {
        if message.op == Op::Probe {
            self.cut = self.cut.max(usize::from(message.payload) + OVERHEAD);
            return;
        }
        // Too much at once, says the other server: the timeout sends it again.
        if status == Status::Busy {
            return;
        }
        let Some(slot) = self.in_flight.iter().position(|flight| flight.id == message.id) else { return };
        let Some(flight) = self.in_flight.remove(slot) else { return };
        if status != Status::Ok {
            self.progress = Progress::Failed;
            return;
        }
        if flight.tries == 1 {
            self.trip.sample(now.since(flight.sent_at));
        }
        self.backoff = 0;
        self.grown += 1;
        if self.grown >= self.window {
            (self.grown, self.window) = (0, self.window + 1);
        }
        self.window = self.window.min(credits).clamp(1, WINDOW_MAX);
    }

    fn transmit(&mut self, now: Time, shared: &Shared, out: &mut Vec<u8>) -> Option<Transmit> {
        if self.progress != Progress::Running {
            return None;
        }
        let to = self.subject.order.addr;
        let Some(session) = &mut self.session else { return self.greet(now, to, out) };
        if self.probes != 0 {
            let size = DATAGRAM_SIZES[self.probes.trailing_zeros() as usize];
            self.probes &= self.probes - 1;
            let padding = [0; SEALED_SIZE];
            let probe = self.subject.message(Op::Probe, 0, Version::NEVER, size - OVERHEAD, self.cut);
            let segment = session.seal(&probe, &padding[..size - OVERHEAD], size, out);
            return Some(Transmit { to, segment });
        }
        let gained =
            now.since(self.budget_at).as_nanos() * u128::from(self.subject.order.bytes_per_second) / 1_000_000_000;
        if gained > 0 {
            self.budget = self.budget.saturating_add(u64::try_from(gained).unwrap_or(BURST)).min(BURST);
            self.budget_at = now;
        }
        if self.budget < SEALED_SIZE as u64 || self.in_flight.len() >= self.window {
            return None;
        }
        let mut next = self.again.pop_front();
        loop {
            let flight = match next.take() {
                Some(flight) => flight,
                None if self.cursor < shared.identity.slab_size.pages() => {
                    self.cursor += 1;
                    self.ids += 1;
                    Flight { id: self.ids, index: self.cursor - 1, sent_at: now, tries: 0 }
                }
                None => {
                    if self.in_flight.is_empty() {
                        self.progress = Progress::Sent;
                    }
                    return None;
                }
            };
            let Subject { space, slab, generation, grant, .. } = self.subject;
            let mut state = shared.state();
            let store = &mut state.store;
            let left_out = flight.index % 2 == 1 && store.has(Fault::CopiesHalf);
            let made_up = if store.has(Fault::MakesUpVersions) { 1 << 20 } else { 0 };
            let page = store.page_no(slab, flight.index);
            let Ok(stored) = store.page_of(space, slab, flight.index, generation, grant) else {
                self.progress = Progress::Failed;
                return None;
            };
            if stored.version == Version::NEVER || left_out {
                continue;
            }
            let version = Version::from_bits(stored.version.bits() + made_up);
            let payload = stored.sealed.unwrap_or(&[]);
            let op = if stored.sealed.is_some() { Op::Write } else { Op::Trim };
            let mut message = self.subject.message(op, flight.id, version, payload.len(), self.cut);
            message.page = page;
            let start = out.len();
            let segment = Session::lay_out(&message, payload, self.cut, out);
            drop(state);
            session.encrypt(&mut out[start..], segment);
            self.budget = self.budget.saturating_sub(SEALED_SIZE as u64);
            self.in_flight.push_back(Flight { sent_at: now, tries: flight.tries + 1, ..flight });
            return Some(Transmit { to, segment });
        }
    }

    fn greet(&mut self, now: Time, to: SocketAddr, out: &mut Vec<u8>) -> Option<Transmit> {
        if now < self.due {
            return None;
        }
        if self.hellos >= HELLOS_MAX {
            self.progress = Progress::Failed;
            return None;
        }
        let hello = &self.greeting.as_ref()?.hello;
        out.extend_from_slice(hello);
        self.due = now + HELLO_RETRY * 2_u32.pow(self.hellos);
        self.hellos += 1;
        Some(Transmit { to, segment: hello.len() })
    }
}

impl Subject {
    fn message(&self, op: Op, id: u64, version: Version, payload: usize, cut: usize) -> Message {
        let direction = Direction::Request { cut: cut as u16, generation: self.generation };
        let page = crate::units::PageNo(0);
        Message { op, class: Class::Rebuild, direction, id, space: self.space, page, version, payload: payload as u16 }
    }
}
