//! Sessions with clients, and how they begin.
//!
//! A host has a session for each of its VMs and disks, all of them under its one key, so hundreds of one node are as they should be.
//! No session ends for a new one as long as its client is heard: clients ask for a sign of life every second. When the table is full,
//! the first to go are other servers that came with a ticket and have none any more, the longest silent first; then whoever was silent
//! for long. Where nobody may go, the hello is not answered, and its client asks again.

use std::collections::{HashSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::reassembly::Pieces;
use super::stats::ServerStats;
use super::workers::{Identity, SESSIONS_MAX, session_number};
use crate::crypto::entropy::SharedEntropy;
use crate::crypto::handshake::{ServerHello, respond};
use crate::crypto::session::Session;
use crate::crypto::{PublicKey, Rejected};
use crate::list::{List, list_index};
use crate::transmit::Transmit;
use crate::units::Time;
use crate::wire::PROTOCOL_VERSION;
use crate::wire::datagram::{ACCEPT_SIZE, HEADER_SIZE, HELLO_SIZE, Head, Versions};

/// Sessions of one node: half of them, so that one that begins session after session leaves room to others.
pub(super) const SESSIONS_PER_NODE: usize = SESSIONS_MAX / 2;
/// Another node's session is given up for a new one when nothing was heard of it for so long.
pub(super) const SESSION_IDLE: Duration = Duration::from_secs(180);
/// A node's own session is, after this: ten signs of life in a row have not come, so its client has ended, or begins anew anyway.
pub(super) const OWN_IDLE: Duration = Duration::from_secs(10);
/// Handshakes of a worker a second, 0.2 ms of a core each (measured: X25519 in pure Rust), so that they take at most 4
/// % of one.
const HELLOS_PER_SECOND: u32 = 200;
/// Handshakes at once, when a whole cluster comes up.
const HELLOS_BURST: u32 = 64;
/// Answers that wait to be sent.
const ANSWERS_MAX: usize = HELLOS_BURST as usize;

list_index! {
    /// A session in its worker's table of them.
    SessionIndex
}

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
    pieces: Pieces,
    /// How it began: what is asked again in the same words is answered in the same words.
    hello: Box<[u8; HELLO_SIZE]>,
    accept: [u8; ACCEPT_SIZE],
}

/// Who may have a session.
pub struct Admission<A, S> {
    /// Whether a node may, and if it is a guest.
    pub admits: A,
    /// The servers that have a ticket.
    pub sources: S,
}

/// The first bytes of the key that a client makes for each session: hellos that differ have the same only by chance.
fn mark_of(hello: &[u8]) -> u64 {
    hello[HEADER_SIZE..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Bytes of the longest answer to a hello.
const ANSWER_MAX: usize = if ACCEPT_SIZE > HELLO_SIZE { panic!("amplifies") } else { ACCEPT_SIZE };

#[derive(Debug)]
struct Answer {
    to: SocketAddr,
    bytes: [u8; ANSWER_MAX],
    length: usize,
}

// What is in the table; keys are beside it, some 600 bytes each, of which a session has two or three.
const _: () = assert!(size_of::<Option<Peer>>() <= 1024);

#[derive(Debug)]
pub struct Sessions {
    worker: usize,
    count: usize,
    peers: List<SessionIndex, Option<Peer>>,
    /// Of the hello that each began with, so that one that comes again is found without a look at all of them.
    marks: List<SessionIndex, u64>,
    answers: VecDeque<Answer>,
    /// Handshakes that may happen now, in millionths, and when that was.
    tokens: u64,
    tokens_at: Time,
}

impl Sessions {
    pub fn new(worker: usize) -> Sessions {
        Sessions {
            worker,
            count: 0,
            peers: (0..SESSIONS_MAX).map(|_| None).collect(),
            marks: (0..SESSIONS_MAX).map(|_| 0).collect(),
            answers: VecDeque::with_capacity(ANSWERS_MAX),
            tokens: u64::from(HELLOS_BURST) * 1_000_000,
            tokens_at: Time::default(),
        }
    }

    pub fn find(&self, number: u32) -> Option<SessionIndex> {
        let slot = SessionIndex((number & (SESSIONS_MAX as u32 - 1)) as usize);
        self.peers[slot].as_ref().is_some_and(|peer| peer.number == number).then_some(slot)
    }

    pub fn number(&self, slot: SessionIndex) -> Option<u32> {
        self.peers[slot].as_ref().map(|peer| peer.number)
    }

    pub fn peer(&mut self, slot: SessionIndex) -> Option<&mut Peer> {
        self.peers[slot].as_mut()
    }

    /// The number of a session, and where the pieces of its messages are.
    pub fn pieces(&mut self, slot: SessionIndex) -> Option<(u32, &mut Pieces)> {
        self.peers[slot].as_mut().map(|peer| (peer.number, &mut peer.pieces))
    }

    /// Who is at the other end.
    pub fn node(&self, slot: SessionIndex) -> Option<PublicKey> {
        self.peers[slot].as_ref().map(|peer| peer.node)
    }

    /// The other end, if it is a server that may only do what it has tickets for.
    pub fn guest(&self, slot: SessionIndex) -> Option<PublicKey> {
        self.peers[slot].as_ref().filter(|peer| peer.is_guest).map(|peer| peer.node)
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
        slot: SessionIndex,
        now: Time,
        from: SocketAddr,
        (epoch, counter): (u8, u64),
        datagram: &'a mut [u8],
    ) -> Result<&'a [u8], Rejected> {
        let peer = self.peers[slot].as_mut().ok_or(Rejected::NotAuthentic)?;
        let body = peer.session.open(epoch, counter, datagram)?;
        peer.addr = from;
        peer.heard_at = now;
        Ok(body)
    }

    /// A client wants a session, or a server that has a ticket.
    #[expect(clippy::too_many_arguments, reason = "all of it is looked at once")]
    pub fn greet(
        &mut self,
        now: Time,
        hello: &Hello<'_>,
        identity: &Identity,
        admission: Admission<impl FnOnce(PublicKey) -> Option<bool>, impl FnOnce() -> HashSet<PublicKey>>,
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
        let Some((slot, whose)) = self.find_slot(now, admission.sources) else {
            stats.throttled += 1;
            return;
        };
        let number = session_number(entropy.next_u64() as u32, self.worker, slot.0);
        let head = Head::Accept { version: PROTOCOL_VERSION, receiver: hello.sender, sender: number };
        let Ok((node, secrets, accept)) = respond(&identity.keys, &identity.pool, hello.datagram, head, about, entropy)
        else {
            stats.not_authentic += 1;
            return;
        };
        let Some(is_guest) = (admission.admits)(node) else {
            stats.not_admitted += 1;
            return;
        };
        let Ok(words) = hello.datagram.try_into().map(Box::new) else { return };
        if whose.is_some_and(|of| of != node) || !self.make_room(now, slot, node) {
            stats.throttled += 1;
            return;
        }
        self.marks[slot] = mark_of(hello.datagram);
        self.peers[slot] = Some(Peer {
            number,
            node,
            is_guest,
            session: Session::server(&secrets, hello.sender),
            addr: hello.from,
            heard_at: now,
            pieces: Pieces::default(),
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
        let mark = mark_of(hello);
        let slots = self.marks.enumerate().filter(|(_, of)| **of == mark);
        let mut peers = slots.filter_map(|(slot, _)| self.peers[slot].as_ref());
        peers.find(|peer| peer.hello[..] == *hello).map(|peer| (peer.accept, peer.addr))
    }

    /// Whether this answer is about to be sent.
    fn is_waiting(&self, to: SocketAddr, accept: &[u8]) -> bool {
        self.answers.iter().any(|answer| answer.to == to && answer.bytes[..answer.length] == *accept)
    }

    /// A place for a session: free, or of a guest that has no ticket any more, or of the one that is silent for longest. Also the
    /// node that alone may take it, if it is not silent for that long. Nothing ends yet: whoever asks may not be admitted.
    fn find_slot(
        &self,
        now: Time,
        sources: impl FnOnce() -> HashSet<PublicKey>,
    ) -> Option<(SessionIndex, Option<PublicKey>)> {
        let free = self.peers.position(Option::is_none);
        let longest_silent = |fits: &dyn Fn(&Peer) -> bool| {
            let slots = self.peers.enumerate();
            let heard = slots.filter_map(|(slot, peer)| Some((peer.as_ref().filter(|p| fits(p))?.heard_at, slot)));
            heard.min().map(|(_, slot)| slot)
        };
        let guest = || {
            let any = self.peers.iter().flatten().any(|peer| peer.is_guest);
            let sources = if any { sources() } else { HashSet::new() };
            longest_silent(&|peer| peer.is_guest && !sources.contains(&peer.node))
        };
        if let Some(slot) = free.or_else(guest) {
            return Some((slot, None));
        }
        let slot = longest_silent(&|peer| now.since(peer.heard_at) > OWN_IDLE)?;
        let is_own = |peer: &&Peer| now.since(peer.heard_at) <= SESSION_IDLE;
        Some((slot, self.peers[slot].as_ref().filter(is_own).map(|peer| peer.node)))
    }

    /// One node's sessions are limited: of those that are silent, the one for longest ends. `false` if there are enough that are not.
    fn make_room(&mut self, now: Time, slot: SessionIndex, node: PublicKey) -> bool {
        let own = |(at, peer): (SessionIndex, &Option<Peer>)| {
            let peer = peer.as_ref().filter(|peer| at != slot && peer.node == node)?;
            Some((peer.heard_at, at))
        };
        let own = self.peers.enumerate().filter_map(own);
        let (count, oldest) = own.fold((0, None), |(count, oldest): (usize, Option<(Time, SessionIndex)>), one| {
            (count + 1, Some(oldest.map_or(one, |oldest| oldest.min(one))))
        });
        if count < SESSIONS_PER_NODE {
            return true;
        }
        let silent = oldest.filter(|(heard_at, _)| now.since(*heard_at) > OWN_IDLE);
        silent.inspect(|(_, at)| self.peers[*at] = None).is_some()
    }

    /// Ends the sessions of clients that may not stay. Servers have theirs by ticket.
    pub fn end_unless(&mut self, may_stay: impl Fn(PublicKey) -> bool) {
        for slot in &mut self.peers {
            if slot.as_ref().is_some_and(|peer| !peer.is_guest && !may_stay(peer.node)) {
                *slot = None;
            }
        }
        self.count = self.peers.iter().flatten().count();
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
