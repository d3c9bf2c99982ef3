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
//! # Who owns what
//!
//! `Client` is made of four parts, and coordinates them: it takes datagrams, timers and calls in, hands each to the part that it is
//! for, and keeps the order in which things happen. A method of a part says in its arguments which other parts it reads or changes.
//!
//! | part | what it owns |
//! |---|---|
//! | `Pool` | settings, time, chance, counters; `sessions`: servers, and requests to them; `map`: spaces, their slabs, questions to the control plane |
//! | `Pages` | callers' operations, reads that wait for silent servers, confirmations |
//! | `Redundancy` | copies in the making, scrub, slabs without content, room that servers keep |
//! | `Parity` | pages that are put together from others, groups that get parity or lose it, the ledger |
//!
//! Parts below do not know those above: `sessions` and `map` know nothing of each other, `Pool` knows both, and the other three
//! stand on it. What is a part of these has its state in private fields (`ops.rs`, `peers.rs`, `copies.rs`). What has work of its own
//! is polled with a `Context`, changes itself, and returns what is to be done.
//!
//! # When something fails
//!
//! A server that is silent is given up after [`ClientConfig::fail_after`] where another copy is in sync; pages stall for
//! that long. Its copies leave once the server of the other has answered something that it was asked after that: two that
//! fall silent together may be a dead one and a slow one. The only copy is waited for; after [`ClientConfig::error_after`] what
//! waits fails as [`Failure::Silent`], and nothing is given up: its server may come back with all that it has. When it comes back with
//! another boot epoch, its pages are [`Failure::Lost`]: an error, never zeros. Without the control plane everything
//! goes on that needs no change of the map. Another owner of the space makes all of it [`Failure::Fenced`].

mod agenda;
mod attach;
mod changes;
mod check;
mod config;
mod confirm;
mod context;
mod copies;
mod discard;
mod exchange;
mod fence;
mod follow;
mod index;
mod ledger;
mod leftovers;
mod load;
mod map;
mod open;
mod ops;
mod outcome;
mod pages;
mod parity;
mod peer;
mod peers;
mod pool;
mod questions;
mod read_queue;
mod receive;
mod redundancy;
mod repair;
mod reserve;
mod returns;
mod scrub;
mod sealed;
mod servers;
mod sessions;
mod settings;
mod slab;
mod stats;
mod tables;
mod timers;
mod transfer;
mod transmit;
mod trims;
mod unmapped;
mod vacate;
mod view;

use crate::client::index::SpaceIndex;
use crate::client::ops::Kind;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::control::{ControlReply, ControlRequest, QuestionId};
use crate::crypto::Entropy;
use crate::crypto::entropy::SharedEntropy;
use crate::units::{Class, Page, PageNo, SEALED_SIZE, SealedPage, Time, content_of};

pub use config::{ClientConfig, Fault};
pub use exchange::WINDOW_MAX;
pub use outcome::{
    ClientError, Event, FAIL_AFTER_MIN, Failure, OPS_MAX, Refused, SPACES_MAX, SpaceRef, SpaceSpec, Token,
};
pub use parity::ParityView;
pub use parity::status::{SlabStatus, slab_statuses};
pub use peer::{Drain, Reach, ServerView};
pub use read_queue::QUEUED_READS_MAX;
pub use reserve::Reserved;
pub use scrub::SCRUB_PASS;
pub use sealed::{KEEP_AFTER, Tenure};
pub use servers::{Hint, SERVERS_MAX, ServerInfo};
pub use slab::SPACE_SLABS_MAX;
pub use stats::ClientStats;
pub use tables::{SPARES_MAX, SpareTable};
pub use vacate::GIVE_BACK_AFTER;
pub use view::PageRun;

/// A client of a pool, with all the spaces that it has attached.
#[derive(Debug)]
pub struct Client {
    pool: Pool,
    pages: Pages,
    redundancy: Redundancy,
    parity: Parity,
    /// The payload of the reply that is being looked at; a page's room.
    reply: Box<[u8]>,
    /// How often a slab was looked at.
    #[cfg(test)]
    advanced: u64,
}

impl Client {
    pub fn new(config: ClientConfig, entropy: Box<dyn Entropy>) -> Client {
        let pages = Pages::new(config.slab_size, config.error_after.is_some());
        Client {
            pool: Pool::new(config, SharedEntropy::new(entropy)),
            pages,
            redundancy: Redundancy::new(),
            parity: Parity::new(),
            reply: vec![0; SEALED_SIZE].into(),
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
        self.pool.sessions.add(now, info, &self.pool.config)
    }

    /// Takes note of where a server says it is. One that is silent is greeted there too, at once if that is news; one that
    /// answers, but says that it has begun a new life, is asked for a sign of the old one. `false` if no such server is known.
    pub fn hint(&mut self, now: Time, hint: &Hint) -> bool {
        let peer = self.pool.sessions.peers.of(hint.server);
        if let Some(peer) = peer.filter(|peer| self.pool.sessions.peers[*peer].hint(now, hint)) {
            self.pool.sessions.peers.greet(peer, &self.pool.config);
        }
        peer.is_some()
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

    fn begin_read(
        &mut self,
        now: Time,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        token: Token,
    ) -> Result<(), Refused> {
        if page.0 >= self.pool.map.spaces[space].pages {
            return Err(Refused::BeyondEnd);
        }
        if !self.pages.begin_again(&mut self.pool, &mut self.parity, space, page, class, (token, now)) {
            return Err(Refused::Busy);
        }
        self.pool.stats.reads += 1;
        self.settle(now);
        Ok(())
    }

    fn begin_write(
        &mut self,
        now: Time,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        content: Option<impl FnOnce(&mut Page)>,
        token: Token,
    ) -> Result<(), Refused> {
        if page.0 >= self.pool.map.spaces[space].pages {
            return Err(Refused::BeyondEnd);
        }
        if self.pool.map.spaces[space].tenure != Tenure::Owner {
            return Err(Refused::ReadOnly);
        }
        if !self.pages.ops.has_room_for_write() {
            return Err(Refused::Busy);
        }
        let version = self.pool.map.spaces[space].next_version(content.is_none()).ok_or(Refused::VersionsUsedUp)?;
        let kind = Kind::Write { trim: content.is_none() };
        let op = self.pages.ops.begin(kind, space, page, class, (token, now)).ok_or(Refused::Busy)?;
        self.pool.stats.writes += 1;
        self.pool.now = now;
        match content {
            Some(content) => self.pages.store_write(&mut self.pool, op, version, content),
            None => self.pages.ops.get(op).version = version,
        }
        self.pages.try_write(&mut self.pool, &mut self.redundancy, &mut self.parity, op);
        self.settle(now);
        Ok(())
    }

    /// Asks whether this client still owns a space, at some moment from now on. The answer is an [`crate::client::Event::Written`].
    ///
    /// # Errors
    /// Nothing was asked: too many wait for an answer, or the space is only read here.
    pub fn confirm(&mut self, now: Time, space: SpaceRef, token: Token) -> Result<(), Refused> {
        self.pages.confirm(&mut self.pool, now, space.0, token)
    }

    /// The next result. A page that was read is put into `page`.
    pub fn poll_event(&mut self, page: &mut Page) -> Option<Event> {
        self.pages.next_event(&mut self.pool, &mut self.parity, |found| match found {
            Some(found) => *page = *content_of(found),
            None => page.fill(0),
        })
    }

    /// The same without a copy: a page that was read is the beginning of `room`, which the client has the old one for.
    pub fn swap_event(&mut self, room: &mut Box<SealedPage>) -> Option<Event> {
        self.pages.next_event(&mut self.pool, &mut self.parity, |found| match found {
            Some(found) => std::mem::swap(room, found),
            None => room.fill(0),
        })
    }

    /// Whether [`Client::poll_event`] has a result. Timeouts and answers of the control plane make some, too.
    pub fn has_event(&self) -> bool {
        self.pages.has_done()
    }

    /// A question for the control plane, to be answered by [`Client::on_control`]. Asked again if no answer comes.
    pub fn poll_control(&mut self, now: Time) -> Option<(QuestionId, ControlRequest)> {
        self.pool.map.questions.poll(now)
    }

    /// An answer of the control plane. Answers to questions that are settled are of no use any more.
    pub fn on_control(&mut self, now: Time, id: QuestionId, reply: ControlReply) {
        if let Some(question) = self.pool.map.questions.receive(now, id, &reply) {
            self.control_answered(now, question, reply);
            self.settle(now);
        }
    }

    /// Gives up what a server has, for good: as if it had come back empty.
    pub fn forget_content(&mut self, now: Time, server: crate::units::ServerId) {
        if let Some(peer) = self.pool.sessions.peers.of(server) {
            self.content_lost(peer);
            self.settle(now);
        }
    }

    pub fn stats(&self) -> &ClientStats {
        &self.pool.stats
    }
}

#[cfg(test)]
mod tests;
