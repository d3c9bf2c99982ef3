//! Sessions with clients, and how they begin.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use super::lanes::{Identity, session_number};
use super::reassembly::Reassembly;
use super::{ServerStats, Transmit};
use crate::crypto::entropy::SharedEntropy;
use crate::crypto::handshake::{ServerHello, respond};
use crate::crypto::session::Session;
use crate::crypto::{PublicKey, Rejected};
use crate::units::Time;
use crate::wire::PROTOCOL_VERSION;
use crate::wire::datagram::{ACCEPT_SIZE, HELLO_SIZE, Head, Versions};

/// Sessions of a lane at a time. Each has room for the writes it may have under way: 8 MiB together.
const SESSIONS_MAX: usize = 64;
/// Sessions of one node: one per core that talks, and as many that it has forgotten.
const SESSIONS_PER_NODE: usize = 16;
/// Another node's session is given up for a new one when nothing was heard of it for so long.
const SESSION_IDLE: Duration = Duration::from_secs(180);
/// Handshakes of a lane a second, 0.2 ms of a core each (measured: X25519 in pure Rust), so that they take at most 4 % of one.
const HELLOS_PER_SECOND: u32 = 200;
/// Handshakes at once, when a whole cluster comes up.
const HELLOS_BURST: u32 = 64;
/// Answers that wait to be sent.
const ANSWERS_MAX: usize = HELLOS_BURST as usize;
/// The low bits of a session's number are its place.
pub const PLACE_BITS: u32 = SESSIONS_MAX.trailing_zeros();

/// A hello as it came.
#[derive(Debug)]
pub struct Hello<'a> {
    pub from: SocketAddr,
    pub versions: Versions,
    pub sender: u32,
    pub datagram: &'a [u8],
}

#[derive(Debug)]
pub struct Peer {
    number: u32,
    node: PublicKey,
    /// Not a client: another server that has, or had, a ticket.
    is_guest: bool,
    pub session: Session,
    pub addr: SocketAddr,
    heard_at: Time,
    pub reassembly: Reassembly,
    /// How it began: what is asked again in the same words is answered in the same words.
    hello: Box<[u8; HELLO_SIZE]>,
    accept: [u8; ACCEPT_SIZE],
}

/// Bytes of the longest answer to a hello.
const ANSWER_MAX: usize = if ACCEPT_SIZE > HELLO_SIZE { panic!("amplifies") } else { ACCEPT_SIZE };

#[derive(Debug)]
struct Answer {
    to: SocketAddr,
    bytes: [u8; ANSWER_MAX],
    length: usize,
}

#[derive(Debug)]
pub struct Sessions {
    lane: usize,
    count: usize,
    peers: Vec<Option<Peer>>,
    answers: VecDeque<Answer>,
    /// Handshakes that may happen now, in millionths, and when that was.
    tokens: u64,
    tokens_at: Time,
}

impl Sessions {
    pub fn new(lane: usize) -> Sessions {
        Sessions {
            lane,
            count: 0,
            peers: (0..SESSIONS_MAX).map(|_| None).collect(),
            answers: VecDeque::with_capacity(ANSWERS_MAX),
            tokens: u64::from(HELLOS_BURST) * 1_000_000,
            tokens_at: Time::default(),
        }
    }

    pub fn find(&self, number: u32) -> Option<usize> {
        let place = (number & (SESSIONS_MAX as u32 - 1)) as usize;
        self.peers[place].as_ref().is_some_and(|peer| peer.number == number).then_some(place)
    }

    pub fn number(&self, place: usize) -> Option<u32> {
        self.peers[place].as_ref().map(|peer| peer.number)
    }

    pub fn peer(&mut self, place: usize) -> Option<&mut Peer> {
        self.peers[place].as_mut()
    }

    /// Who is at the other end.
    pub fn node(&self, place: usize) -> Option<PublicKey> {
        self.peers[place].as_ref().map(|peer| peer.node)
    }

    /// The other end, if it is a server that may only do what it has tickets for.
    pub fn guest(&self, place: usize) -> Option<PublicKey> {
        self.peers[place].as_ref().filter(|peer| peer.is_guest).map(|peer| peer.node)
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Opens a datagram of this session. An authentic one also tells where its client is now.
    ///
    /// # Errors
    /// It is not authentic, or was seen before.
    pub fn open<'a>(
        &mut self,
        place: usize,
        now: Time,
        from: SocketAddr,
        (epoch, counter): (u8, u64),
        datagram: &'a mut [u8],
    ) -> Result<&'a [u8], Rejected> {
        let peer = self.peers[place].as_mut().ok_or(Rejected::NotAuthentic)?;
        let body = peer.session.open(epoch, counter, datagram)?;
        peer.addr = from;
        peer.heard_at = now;
        Ok(body)
    }

    /// A client wants a session, or a server that has a ticket: `admits` says whether it may, and if it is a guest.
    #[expect(clippy::too_many_arguments, reason = "all of it is looked at once")]
    pub fn greet(
        &mut self,
        now: Time,
        hello: &Hello<'_>,
        identity: &Identity,
        admits: impl FnOnce(PublicKey) -> Option<bool>,
        about: ServerHello,
        entropy: &SharedEntropy,
        stats: &mut ServerStats,
    ) {
        if !identity.pool.admits_hello(hello.datagram) {
            stats.strangers += 1;
            return;
        }
        let known = self.accept_of(hello.datagram);
        if known.is_some_and(|(accept, _)| self.is_waiting(hello.from, &accept)) {
            stats.repeated += 1;
            return;
        }
        // What comes again from who has the session is no handshake. From elsewhere it may be a recording.
        let counts = known.is_none_or(|(_, client)| client != hello.from);
        if self.answers.len() >= ANSWERS_MAX || counts && !self.take_token(now) {
            stats.throttled += 1;
            return;
        }
        if let Some((accept, _)) = known {
            stats.repeated += 1;
            return self.answer(hello.from, &accept);
        }
        if !(hello.versions.min..=hello.versions.max).contains(&PROTOCOL_VERSION) {
            stats.refused += 1;
            let versions = Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION };
            let refusal = identity.pool.refuse(Head::Refuse { versions, receiver: hello.sender }, hello.datagram);
            self.answer(hello.from, &refusal);
            return;
        }
        // The number has to be in the answer, so a place is looked for before it is known who asks.
        let Some(place) = self.free_place(now) else {
            stats.throttled += 1;
            return;
        };
        let number = session_number(entropy.next_u64() as u32, self.lane, place);
        let head = Head::Accept { version: PROTOCOL_VERSION, receiver: hello.sender, sender: number };
        let Ok((node, secrets, accept)) = respond(&identity.keys, &identity.pool, hello.datagram, head, about, entropy)
        else {
            stats.not_authentic += 1;
            return;
        };
        let Some(is_guest) = admits(node) else {
            stats.not_admitted += 1;
            return;
        };
        let Ok(words) = hello.datagram.try_into().map(Box::new) else { return };
        self.make_room(node);
        self.peers[place] = Some(Peer {
            number,
            node,
            is_guest,
            session: Session::server(&secrets, hello.sender),
            addr: hello.from,
            heard_at: now,
            reassembly: Reassembly::new(),
            hello: words,
            accept,
        });
        self.count = self.peers.iter().flatten().count();
        self.answer(hello.from, &accept);
        stats.accepted += 1;
    }

    /// What was answered to the same hello, and where that session's client is. A client that hears nothing repeats it within
    /// milliseconds, and a busy server finds several of them waiting: were each a session, those of one client would push others
    /// of its node out, and were each counted as a handshake, new clients would wait for theirs. As RFC 7296, 2.1.
    fn accept_of(&self, hello: &[u8]) -> Option<([u8; ACCEPT_SIZE], SocketAddr)> {
        self.peers.iter().flatten().find(|peer| peer.hello[..] == *hello).map(|peer| (peer.accept, peer.addr))
    }

    /// Whether this answer is about to be sent.
    fn is_waiting(&self, to: SocketAddr, accept: &[u8]) -> bool {
        self.answers.iter().any(|answer| answer.to == to && answer.bytes[..answer.length] == *accept)
    }

    /// One node's sessions are limited: the one silent for longest goes.
    fn make_room(&mut self, node: PublicKey) {
        let own = || self.peers.iter().enumerate().filter(|(_, peer)| peer.as_ref().is_some_and(|p| p.node == node));
        if own().count() >= SESSIONS_PER_NODE {
            let oldest = own().min_by_key(|(_, peer)| peer.as_ref().map(|p| p.heard_at)).map(|(place, _)| place);
            if let Some(place) = oldest {
                self.peers[place] = None;
            }
        }
    }

    /// Ends the sessions of clients that may not stay. Servers have theirs by ticket.
    pub fn end_unless(&mut self, may_stay: impl Fn(PublicKey) -> bool) {
        for place in &mut self.peers {
            if place.as_ref().is_some_and(|peer| !peer.is_guest && !may_stay(peer.node)) {
                *place = None;
            }
        }
        self.count = self.peers.iter().flatten().count();
    }

    fn free_place(&self, now: Time) -> Option<usize> {
        let free = self.peers.iter().position(Option::is_none);
        free.or_else(|| {
            let heard = |peer: &Option<Peer>| peer.as_ref().map(|p| p.heard_at);
            let (place, peer) = self.peers.iter().enumerate().min_by_key(|(_, peer)| heard(peer))?;
            (now.since(heard(peer)?) > SESSION_IDLE).then_some(place)
        })
    }

    fn take_token(&mut self, now: Time) -> bool {
        let gained = now.since(self.tokens_at).as_micros() as u64 * u64::from(HELLOS_PER_SECOND);
        self.tokens = (self.tokens + gained).min(u64::from(HELLOS_BURST) * 1_000_000);
        self.tokens_at = now;
        let enough = self.tokens >= 1_000_000;
        if enough {
            self.tokens -= 1_000_000;
        }
        enough
    }

    fn answer(&mut self, to: SocketAddr, datagram: &[u8]) {
        let mut bytes = [0; ANSWER_MAX];
        bytes[..datagram.len()].copy_from_slice(datagram);
        self.answers.push_back(Answer { to, bytes, length: datagram.len() });
    }

    pub fn poll_handshake(&mut self, out: &mut Vec<u8>) -> Option<Transmit> {
        let answer = self.answers.pop_front()?;
        out.extend_from_slice(&answer.bytes[..answer.length]);
        Some(Transmit { to: answer.to, segment: answer.length })
    }
}
