//! The client: the one writer of its spaces. Knows where each slab is and which version each page has.
//!
//! Sans-I/O, like the server: datagrams, time and answers of the control plane go in; datagrams, questions to the control
//! plane and results come out. One thread owns it. All room is allocated at the start, but tables of versions, of which
//! some are kept ready (`tables.rs`), and what handshakes need.
//!
//! # What makes a read right
//!
//! The client is the only writer, so it knows the version of every page and takes no other. A page that it knows to be
//! never written or trimmed is zero without asking anybody. A write is acknowledged when every copy *in sync* has it; a copy
//! that misses a write leaves that set, in the control plane, before the write is acknowledged. A new owner fences every
//! copy, reads the versions of all of them and brings them to the greatest before it serves the slab; to the greatest content, where
//! that differs (`trims.rs`).
//!
//! # When something fails
//!
//! A server that is silent is given up after [`ClientConfig::fail_after`] where another copy is in sync; pages stall for
//! that long. Its copies leave once the server of the other has answered something that it was asked after that: two that
//! fall silent together may be a dead one and a slow one. The only copy is waited for; after [`ClientConfig::error_after`] what
//! waits fails as [`Failure::Silent`], and nothing is given up: its server may come back with all that it has. When it comes back with
//! another boot epoch, its pages are [`Failure::Lost`]: an error, never zeros. Without the control plane everything
//! goes on that needs no change of the map. Another owner of the space makes all of it [`Failure::Fenced`].

mod address;
mod attach;
mod check;
mod confirm;
mod copies;
mod discard;
mod exchange;
mod fence;
mod follow;
mod ledger;
mod leftovers;
mod open;
mod ops;
mod parity;
mod parked;
mod peer;
mod receive;
mod repair;
mod reserve;
mod returns;
mod scrub;
mod sealed;
mod servers;
mod slab;
mod stats;
mod tables;
mod timers;
mod transfer;
mod transmit;
mod trims;
mod unanswered;
mod unmapped;
mod vacate;
mod view;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use thiserror::Error;

use crate::control::{ControlReply, ControlRequest};
use crate::crypto::entropy::SharedEntropy;
use crate::crypto::{Entropy, KEY_SIZE, Keypair, PoolKey};
use crate::units::{Class, Generation, Page, PageNo, SEALED_SIZE, SealedPage, SlabSize, SpaceId, Time, content_of};

pub use exchange::WINDOW_MAX;
pub use ops::OPS_MAX;
pub use parity::ParityView;
pub use parity::standing::{Standing, standings};
pub use parked::PARKED_MAX;
pub use peer::{Drain, Reach};
pub use reserve::Reserved;
pub use scrub::SCRUB_PASS;
pub use sealed::{KEEP_AFTER, Tenure};
pub use servers::{Hint, SERVERS_MAX, ServerInfo};
pub use slab::SPACE_SLABS_MAX;
pub use stats::ClientStats;
pub use tables::{SPARES_MAX, SpareTable};
pub use vacate::GIVE_BACK_AFTER;
pub use view::{PageRun, ServerView};

use confirm::Confirms;
use copies::Copies;
use exchange::{Exchanges, Request};
use ledger::Ledger;
use leftovers::Look;
use ops::Ops;
use parity::cold::Cold;
use parity::stripe::Stripes;
use parked::Parking;
use peer::{Peer, PeerSet};
use receive::LoadWatch;
use scrub::Scrub;
use slab::Space;
use tables::Tables;
use unmapped::MapWatch;
use vacate::Vacating;

/// Spaces of one client: VMs of a host and their disks.
pub const SPACES_MAX: usize = 256;
/// Five timeouts at the shortest: a server is not given up for a few lost datagrams.
pub const FAIL_AFTER_MIN: Duration = Duration::from_millis(5);

/// What a client is told.
#[derive(Debug)]
pub struct ClientConfig {
    pub keys: Keypair,
    pub pool: PoolKey,
    pub slab_size: SlabSize,
    /// A server that says nothing for so long is given up where there is another copy.
    pub fail_after: Duration,
    /// What only servers have that have been silent for so long is not waited for: it fails, until one of them is heard again;
    /// `None`: it is waited for as long as it takes. Either way only a server's return with an empty memory, or
    /// [`Client::forget_content`], loses what it had. So long is the control plane waited for, too, where there is no
    /// [`ClientConfig::map_patience`].
    pub error_after: Option<Duration>,
    /// A server that fell silent, and was silent for longer, counts as one that has no slab to give. Zero for who has
    /// somewhere else for its pages: it is told at once.
    pub grant_patience: Duration,
    /// A write to a slab that nobody has needs the control plane's answer first; where that takes longer, it is declined, and so
    /// are others like it until there is an answer. `None`: they wait, and fail as [`Failure::Silent`] after
    /// [`ClientConfig::error_after`].
    pub map_patience: Option<Duration>,
    /// Servers that keep pages on a disk are asked for slabs where no other has one to give. Not for who has a disk of its own.
    pub uses_last_resort: bool,
    /// A slab in which no page has content goes back to its servers after this; `None`: only by [`Client::discard_slab`].
    pub give_back_after: Option<Duration>,
    /// In this time every copy of every page is looked at once, as far as a thousand pages a second suffice; `None`: damage is
    /// found when it is read.
    pub scrub_pass: Option<Duration>,
    /// Slabs of a space with two copies that were not written to for so long get parity instead of second copies, in groups of four,
    /// and second copies again before the next write; `None`: they keep their copies.
    pub parity_after: Option<Duration>,
    /// A sealed space that has too few copies, and whose map has not changed for so long, or twice, has nobody who sees to
    /// it: this client does.
    pub keep_after: Duration,
    /// After a server is lost, copies begin to be restored within this time, at random: all its clients lose it at once, and the same
    /// servers are left to them.
    pub rebuild_spread: Duration,
    /// Of the link; copies that restore redundancy use 30 % of it at most.
    pub link_bytes_per_second: u64,
    /// Datagrams are never larger, whatever the path carries.
    pub datagram_max: usize,
    /// Datagrams under one key; `None` for the usual number.
    pub rekey_every: Option<u64>,
    /// Questions about slabs that are under way at a time.
    #[doc(hidden)]
    pub questions_max: usize,
    #[doc(hidden)]
    pub fault: Option<Fault>,
}

/// Ways of being wrong, for tests of the tests.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Acknowledges a write that one copy has.
    AcksEarly,
    /// Opens a taken-over slab by the versions of its first copy.
    OpensUnreconciled,
    /// Counts a new copy as in sync before it has the pages.
    JoinsEmpty,
    /// Takes a server's word that it has copied everything.
    TrustsSources,
    /// Takes a page in whatever version a server has, and a server whatever life it is in.
    TrustsServers,
    /// Says that a slab's life begins with its grant: what waited for that was asked for before.
    FloorsAtGrants,
    /// Counts parity as complete before it has its pages.
    ParityEarly,
    /// Forgets a slab of the group when a page is put together from the others.
    LeavesMembersOut,
    /// Does not wait with writes until their group has no parity any more.
    WritesToFrozen,
    /// Takes a write that failed because nobody answered for one that no server has.
    ForgetsUnanswered,
    /// Says that it owns a space without a look at who does.
    TrustsItself,
    /// Reads what another client writes from the copies that it knows, without a look at the map.
    FollowsOldMaps,
    /// Takes a trim for the last write although another copy does not have it.
    BelievesTrims,
}

impl ClientConfig {
    /// With the usual limits: 30 ms and twice 30 s, for a link of 10 Gbit/s.
    pub fn new(keys: Keypair, pool: PoolKey) -> ClientConfig {
        ClientConfig {
            keys,
            pool,
            slab_size: SlabSize::default(),
            fail_after: Duration::from_millis(30),
            error_after: Some(Duration::from_secs(30)),
            grant_patience: Duration::from_secs(30),
            map_patience: None,
            uses_last_resort: true,
            give_back_after: Some(GIVE_BACK_AFTER),
            scrub_pass: Some(SCRUB_PASS),
            parity_after: None,
            keep_after: KEEP_AFTER,
            rebuild_spread: Duration::from_millis(500),
            link_bytes_per_second: 1_250_000_000,
            datagram_max: crate::wire::DATAGRAM_MAX,
            rekey_every: None,
            questions_max: exchange::QUESTIONS_MAX,
            fault: None,
        }
    }
}

/// A space as its owner opens it.
#[derive(Debug)]
pub struct SpaceSpec {
    pub id: SpaceId,
    pub pages: u64,
    /// 1 for what can be re-created, 2 otherwise.
    pub copies: usize,
    /// Slabs that servers keep room for, whatever others take; see [`Client::reserved`].
    pub reserve: usize,
    /// The pages' key.
    pub key: [u8; KEY_SIZE],
}

/// A space of this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceRef(usize);

/// Chosen by the caller to recognize a result.
pub type Token = u64;

/// Why an operation was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// A write is under way until a copy in the making has it, too, even where its result was taken; writes leave a quarter of
    /// the places to reads.
    #[error("as many operations are under way as can be, of at most {OPS_MAX}: take results first, or let time pass")]
    Busy,
    #[error("the page lies beyond the end of the space")]
    BeyondEnd,
    #[error("the space is only read here: it is sealed, or another client writes it")]
    ReadOnly,
    #[error("this owner has made all the writes that a generation allows: take the space over again")]
    VersionsUsedUp,
}

/// Why a client cannot do something.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ClientError {
    #[error("{SERVERS_MAX} servers are the most that a client talks to")]
    TooManyServers,
    #[error("it is known at {addr} already")]
    KnownServer { addr: SocketAddr },
    #[error("{SPACES_MAX} spaces are the most that a client holds")]
    TooManySpaces,
    #[error("{copies} copies: give 1 or {max}", max = slab::COPIES_MAX)]
    Copies { copies: usize },
    #[error("{pages} pages: give 1 to {max}")]
    Size { pages: u64, max: u64 },
    #[error("{slabs} slabs reserved: the space has {max}")]
    Reserve { slabs: usize, max: u64 },
    #[error("generation {generation}: give 1 to {max}", max = Generation::MAX.0)]
    Generation { generation: u32 },
    #[error("this client reads the space already")]
    KnownSpace,
    #[error("the map names server {server}, which is not in the list of servers")]
    UnknownServer { server: u32 },
}

/// Why an operation failed. Nothing that fails is ever answered with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    #[error("the last copy of the page is gone")]
    Lost,
    #[error("the space has another owner")]
    Fenced,
    #[error("no server has room: the page belongs to the local tier")]
    Declined,
    #[error("every copy of the page that answers is damaged")]
    Corrupt,
    /// Of a write: it may be done yet, before any later one to its page.
    #[error("every server that has the page, or the control plane, has been silent for too long; it may come back")]
    Silent,
}

/// A result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A page; its content is where the caller of [`Client::poll_event`] wanted it.
    Read { token: Token, result: Result<(), Failure> },
    /// A write or trim that all copies in sync have, or the answer to [`Client::confirm`].
    Written { token: Token, result: Result<(), Failure> },
}

/// A question to the control plane that was not answered yet.
#[derive(Clone, Debug)]
struct Question {
    id: u64,
    space: usize,
    request: ControlRequest,
    first_asked: Option<Time>,
    /// When it is asked (again).
    due: Time,
}

/// A pool client.
#[derive(Debug)]
pub struct Client {
    config: ClientConfig,
    entropy: SharedEntropy,
    peers: Vec<Peer>,
    /// Servers that have been silent for [`ClientConfig::error_after`].
    long_silent: PeerSet,
    map_watch: MapWatch,
    /// Before that no copy is restored.
    rebuilds_from: Option<Time>,
    spaces: Vec<Space>,
    exchanges: Exchanges,
    ops: Ops,
    parking: Parking,
    confirms: Confirms,
    copies: Copies,
    stripes: Stripes,
    cold: Cold,
    ledger: Ledger,
    tables: Tables,
    /// The payload of the reply that is being looked at; a page's room.
    reply: Box<[u8]>,
    /// Slabs whose state has to be looked at.
    dirty: VecDeque<(usize, usize)>,
    /// Slabs that get a new copy.
    repairing: Vec<(usize, usize)>,
    load: LoadWatch,
    /// Slabs that could not ask what they have to, as too much was asked; and the one that is being looked at.
    hungry: VecDeque<(usize, usize)>,
    at: Option<(usize, usize)>,
    questions: Vec<Question>,
    question_ids: u64,
    /// Slabs to be looked at later, whatever happens: those that servers copy, and those that wait for a silent server.
    looks: Vec<(Time, usize, usize)>,
    /// Sealed spaces that are not as they should be.
    watched: Vec<usize>,
    /// Spaces that servers keep room for.
    reserving: Vec<usize>,
    scrub: Scrub,
    vacating: Vacating,
    /// What servers were not asked yet of what earlier owners left there.
    unlooked: VecDeque<Look>,
    /// When something last came.
    now: Time,
    /// Which server is looked at first for something to send.
    turn: usize,
    /// Bytes that copies may use now, and when that was.
    rebuild_budget: u64,
    rebuild_at: Time,
    stats: ClientStats,
    /// How often a slab was looked at.
    #[cfg(test)]
    advanced: u64,
}

impl Client {
    pub fn new(config: ClientConfig, entropy: Box<dyn Entropy>) -> Client {
        let tables = Tables::new(config.slab_size);
        let exchanges = Exchanges::new(config.questions_max);
        let ops = Ops::new(config.slab_size, config.error_after.is_some());
        Client {
            config,
            entropy: SharedEntropy::new(entropy),
            peers: Vec::new(),
            long_silent: PeerSet::default(),
            map_watch: MapWatch::default(),
            rebuilds_from: None,
            spaces: Vec::new(),
            exchanges,
            ops,
            parking: Parking::default(),
            confirms: Confirms::default(),
            copies: Copies::new(),
            stripes: Stripes::new(),
            cold: Cold::default(),
            ledger: Ledger::default(),
            tables,
            reply: vec![0; SEALED_SIZE].into(),
            dirty: VecDeque::new(),
            repairing: Vec::new(),
            load: LoadWatch::default(),
            hungry: VecDeque::new(),
            at: None,
            questions: Vec::new(),
            question_ids: 0,
            looks: Vec::new(),
            watched: Vec::new(),
            reserving: Vec::new(),
            scrub: Scrub::default(),
            vacating: Vacating::default(),
            unlooked: VecDeque::new(),
            now: Time::default(),
            turn: 0,
            rebuild_budget: 0,
            rebuild_at: Time::default(),
            stats: ClientStats::default(),
            #[cfg(test)]
            advanced: 0,
        }
    }

    /// Makes a server known, or says where one is that has never answered. Its session begins at the next
    /// [`Client::poll_transmit`].
    ///
    /// # Errors
    /// More than [`SERVERS_MAX`]; one that has answered elsewhere.
    pub fn add_server(&mut self, now: Time, info: ServerInfo) -> Result<(), ClientError> {
        if let Some(place) = self.place_of(info.id) {
            if self.peers[place].epoch.is_some() {
                return Err(ClientError::KnownServer { addr: self.peers[place].addr });
            }
            self.peers[place].list(info);
            self.greet(place);
            return Ok(());
        }
        if self.peers.len() >= SERVERS_MAX {
            return Err(ClientError::TooManyServers);
        }
        self.peers.push(Peer::new(info, now));
        self.greet(self.peers.len() - 1);
        Ok(())
    }

    /// Asks for a page.
    ///
    /// # Errors
    /// Nothing was begun.
    pub fn read(
        &mut self,
        now: Time,
        space: SpaceRef,
        page: PageNo,
        class: Class,
        token: Token,
    ) -> Result<(), Refused> {
        self.begin_read(now, space.0, page, class, token)
    }

    /// Stores a page. It is acknowledged by [`Event::Written`].
    ///
    /// # Errors
    /// Nothing was begun.
    pub fn write(
        &mut self,
        now: Time,
        space: SpaceRef,
        page: PageNo,
        class: Class,
        content: &Page,
        token: Token,
    ) -> Result<(), Refused> {
        self.write_with(now, space, page, class, token, |room| *room = *content)
    }

    /// The same; `content` puts all of the page where it is wanted, over what is there, if the write is begun.
    ///
    /// # Errors
    /// Nothing was begun.
    pub fn write_with(
        &mut self,
        now: Time,
        space: SpaceRef,
        page: PageNo,
        class: Class,
        token: Token,
        content: impl FnOnce(&mut Page),
    ) -> Result<(), Refused> {
        self.begin_write(now, space.0, page, class, Some(content), token)
    }

    /// Makes a page zero. Acknowledged like a write.
    ///
    /// # Errors
    /// Nothing was begun.
    pub fn trim(
        &mut self,
        now: Time,
        space: SpaceRef,
        page: PageNo,
        class: Class,
        token: Token,
    ) -> Result<(), Refused> {
        self.begin_write(now, space.0, page, class, None::<fn(&mut Page)>, token)
    }

    /// The next result. A page that was read is put into `page`.
    pub fn poll_event(&mut self, page: &mut Page) -> Option<Event> {
        self.next_event(|found| match found {
            Some(found) => *page = *content_of(found),
            None => page.fill(0),
        })
    }

    /// The same without a copy: a page that was read is the beginning of `room`, which the client has the old one for.
    pub fn swap_event(&mut self, room: &mut Box<SealedPage>) -> Option<Event> {
        self.next_event(|found| match found {
            Some(found) => std::mem::swap(room, found),
            None => room.fill(0),
        })
    }

    /// Whether [`Client::poll_event`] has a result. Timeouts and answers of the control plane make some, too.
    pub fn has_event(&self) -> bool {
        self.ops.has_done() || self.confirms.has_done()
    }

    /// A question for the control plane, to be answered by [`Client::on_control`]. Asked again if no answer comes.
    pub fn poll_control(&mut self, now: Time) -> Option<(u64, ControlRequest)> {
        let question = self.questions.iter_mut().find(|question| question.due <= now)?;
        question.first_asked.get_or_insert(now);
        question.due = now + slab::CONTROL_RETRY;
        Some((question.id, question.request.clone()))
    }

    /// An answer of the control plane. Answers to questions that are settled are of no use any more.
    pub fn on_control(&mut self, now: Time, id: u64, reply: ControlReply) {
        if let Some(at) = self.questions.iter().position(|question| question.id == id) {
            if reply == ControlReply::Later {
                let question = &mut self.questions[at];
                question.due = now + slab::ask_again(now.since(question.first_asked.unwrap_or(now)));
                return;
            }
            let question = self.questions.swap_remove(at);
            self.map_watch.heard_at = now;
            self.control_answered(now, question, reply);
            self.settle(now);
        }
    }

    /// Gives up what a server has, for good: as if it had come back empty.
    pub fn forget_content(&mut self, now: Time, server: crate::units::ServerId) {
        if let Some(peer) = self.place_of(server) {
            self.content_lost(peer);
            self.settle(now);
        }
    }

    pub fn stats(&self) -> &ClientStats {
        &self.stats
    }

    /// Another [`ClientConfig::scrub_pass`].
    pub fn set_scrub_pass(&mut self, pass: Option<Duration>) {
        self.config.scrub_pass = pass;
    }

    /// Another [`ClientConfig::keep_after`].
    pub fn set_keep_after(&mut self, keep_after: Duration) {
        self.config.keep_after = keep_after;
    }

    /// Asks every server how it is. What they say is in [`Client::servers`] as it comes; what gets lost is not asked
    /// for again.
    pub fn ask_reports(&mut self) {
        self.peers.iter_mut().for_each(|peer| (peer.report_due, peer.report) = (true, None));
    }

    /// Asks a server to be drained, or not to be. Its answer is in [`Client::servers`]; a request that gets lost is not
    /// made again.
    pub fn ask_drain(&mut self, server: crate::units::ServerId, drain: Drain) {
        if let Some(place) = self.place_of(server) {
            (self.peers[place].drain_due, self.peers[place].drain) = (Some(drain), None);
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.config.fault == Some(fault)
    }

    fn place_of(&self, server: crate::units::ServerId) -> Option<usize> {
        self.peers.iter().position(|peer| peer.info.id == server)
    }

    fn mark(&mut self, space: usize, slab: usize) {
        let state = &mut self.spaces[space].slabs[slab];
        if !state.dirty {
            state.dirty = true;
            self.dirty.push_back((space, slab));
        }
    }

    /// Looks at every slab that something happened to, until nothing more follows.
    fn settle(&mut self, now: Time) {
        self.now = now;
        self.unpark_waiting();
        loop {
            while let Some((space, slab)) = self.next_dirty() {
                self.spaces[space].slabs[slab].dirty = false;
                self.at = Some((space, slab));
                self.advance(now, space, slab);
                self.at = None;
                self.wake_ledger(space, slab);
                if !self.parking.is_empty() {
                    self.unpark(space, slab);
                }
            }
            if !(self.tend_parity() | self.tell_more()) {
                break;
            }
        }
        self.send_looks();
        self.send_returns();
    }

    fn next_dirty(&mut self) -> Option<(usize, usize)> {
        self.dirty.pop_front().or_else(|| self.copies.next_waiting()).or_else(|| self.next_hungry())
    }

    /// A slab that can ask now what it could not: for itself, or for its pages.
    fn next_hungry(&mut self) -> Option<(usize, usize)> {
        let (space, slab) = if self.exchanges.has_room() { self.hungry.pop_front()? } else { return None };
        self.spaces[space].slabs[slab].is_hungry = false;
        if !self.spaces[space].is_taken && !self.spaces[space].is_stale {
            self.map_settled(space, slab);
        }
        Some((space, slab))
    }

    fn slab_of(&self, page: PageNo) -> Option<usize> {
        self.config.slab_size.slab(page).map(|slab| slab.0 as usize)
    }

    /// A request to one server; waits in its queue until it may be sent.
    fn ask(&mut self, request: Request) -> bool {
        self.ask_for(request).is_some()
    }

    fn ask_for(&mut self, request: Request) -> Option<u64> {
        let Some(id) = self.exchanges.begin(request) else {
            let about = self.slab_of(request.page).map(|slab| (request.space, slab));
            for (space, slab) in about.into_iter().chain(self.at) {
                // What an earlier owner left may be of no slab of today.
                let Some(state) = self.spaces[space].slabs.get_mut(slab) else { continue };
                if !std::mem::replace(&mut state.is_hungry, true) {
                    self.hungry.push_back((space, slab));
                }
            }
            return None;
        };
        self.exchanges.line_up(&mut self.peers[request.peer].queues[request.class as usize], id);
        Some(id)
    }

    /// The page operations that wait behind a write to the same page.
    fn busy_key(space: usize, page: PageNo) -> (usize, u64) {
        (space, page.0)
    }
}

/// Writes under way, by page.
type Busy = HashMap<(usize, u64), usize>;

#[cfg(test)]
mod tests;
