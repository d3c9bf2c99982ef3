//! The loop: one thread, one place to wait, all connections and the pool's socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event as Ready, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno as Os;
use rustix::net::{RecvFlags, SendFlags};
use thiserror::Error;

use crate::connection::Connection;
use crate::disk::{Disk, Pages};
use crate::listener::Listener;
use crate::negotiation::Offer;
use crate::spares::Spares;
use rmap::client::{Client, PageRun, Refused, SpaceRef, Token};
use rmap::control::{ControlReply, ControlRequest};
use rmap::units::{Class, PAGE_SIZE, Page, PageNo, SEALED_SIZE, SealedPage, Time, content_of};
use rmap_io::net::{UdpClient, Wait};

/// Clients at a time: the copies of nbdcopy, QEMU's or the kernel's connections, and some to look on.
pub const CONNECTIONS_MAX: usize = 32;
/// A client that has not agreed on an export by then goes: it takes another's slot.
const NEGOTIATION_MAX: Duration = Duration::from_secs(60);
/// When it is asked to stop, what clients have asked for by then is done and answered, if it takes no longer than this.
const LAST_REQUESTS: Duration = Duration::from_secs(1);
/// When a space is taken over, what is left to be said is sent for so long.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// What is on its way back to servers when the export ends is waited for so long. Servers keep the rest until they end.
const GIVING_BACK: Duration = Duration::from_secs(1);
/// Where datagrams were last taken in so long ago, they are before anybody counts as silent: their answers may lie in the socket, as
/// after a round with much to do. A fifth of [`FAIL_AFTER_MIN`](rmap::client::FAIL_AFTER_MIN).
const HEAR_EVERY: Duration = Duration::from_millis(1);
/// New servers may wait so long.
const MAINTAIN_EVERY: Duration = Duration::from_secs(1);
/// Where so many pages are under way, requests and answers come in bursts, and some more of a burst is let come before the next look:
/// a client sends its requests in a row, and each of them was worth a look and a message to a server (measured at depth 32: 76,000 of
/// each a second for 116,000 requests).
const GATHER_FROM: usize = 4;
/// So long for each page under way, a small part of what it takes to be read then ...
const GATHER_A_PAGE: Duration = Duration::from_nanos(250);
/// ... but no longer than this: pages of long requests come in bursts by themselves.
const GATHER_MAX: Duration = Duration::from_micros(8);
/// Where it took so long, a program that does not end by itself had the CPU, and would have it each time: a burst of a client is over
/// by then ...
const ROBBED_FROM: Duration = Duration::from_micros(500);
/// ... so nothing is gathered for this long.
const GATHER_AGAIN: Duration = Duration::from_millis(100);
/// What is waited for besides clients.
const OTHERS: usize = 3;
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const POOL: u64 = u64::MAX - 2;

/// A disk as it is exported.
#[derive(Debug)]
pub struct Export {
    pub name: String,
    pub space: SpaceRef,
    /// In bytes, a multiple of the page's size.
    pub size: u64,
    /// Of a space that the pool's client attached as a reader.
    pub read_only: bool,
}

/// Why a server stopped serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to.
    Stopped,
    /// Another owner has the space.
    TakenOver,
}

/// Why a server cannot go on.
#[derive(Debug, Error)]
pub enum ServerError {
    #[error("a disk of {size} bytes: give a multiple of {PAGE_SIZE} and at least that")]
    Size { size: u64 },
    #[error("wait for connections: {0}")]
    Wait(io::Error),
    #[error("start a thread: {0}")]
    Thread(io::Error),
    #[error("the pool's socket: {0}")]
    Pool(io::Error),
}

/// Whether something can be done without anything having to come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Done,
    Left,
}

/// What became of a connection's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    /// There were no answers to send.
    Nothing,
    APart,
    TheLast,
}

/// The pages of a space, now.
struct Space<'a> {
    client: &'a mut Client,
    space: SpaceRef,
    now: Time,
}

impl Pages for Space<'_> {
    fn read(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        self.client.read(self.now, self.space, page, Class::Demand, token)
    }

    fn write(&mut self, page: PageNo, content: &Page, token: Token) -> Result<(), Refused> {
        self.client.write(self.now, self.space, page, Class::Demand, content, token)
    }

    fn trim(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        self.client.trim(self.now, self.space, page, Class::Demand, token)
    }

    fn confirm(&mut self, token: Token) -> Result<(), Refused> {
        self.client.confirm(self.now, self.space, token)
    }

    fn queued(&self) -> usize {
        self.client.queued()
    }

    fn run(&self, page: PageNo, max: u64) -> PageRun {
        self.client.page_run(self.space, page, max)
    }
}

#[derive(Debug)]
struct Peer {
    fd: OwnedFd,
    connection: Connection,
    since: Instant,
    /// What the system is asked to report.
    watched: EventFlags,
    readable: bool,
    /// Nobody is there to be answered.
    broken: bool,
    /// The system reports nothing of it any more.
    is_unwatched: bool,
}

/// Exports one disk to its clients, from the pool's client that it owns.
#[derive(Debug)]
pub struct Server<C> {
    pool: UdpClient<C>,
    space: SpaceRef,
    offer: Offer,
    disk: Disk,
    listener: Listener,
    epoll: OwnedFd,
    clients: Vec<Option<Peer>>,
    page: Box<SealedPage>,
    wait: Wait,
    /// For slabs that are written to for the first time.
    spares: Option<Spares>,
    /// Which client is looked at first.
    turn: usize,
    /// Nothing is gathered before.
    gathers_from: Instant,
    /// When datagrams were last taken in.
    heard_at: Instant,
    /// It was asked to stop, and does so then at the latest.
    ends_at: Option<Instant>,
}

impl<C: FnMut(&ControlRequest) -> ControlReply> Server<C> {
    /// The pool's client has attached the space; its sessions may still be beginning. `wait` is for requests and for
    /// answers of the pool.
    ///
    /// # Errors
    /// The size makes no sense, or the system has no room to wait, or no thread.
    pub fn new(
        mut pool: UdpClient<C>,
        export: Export,
        listener: Listener,
        wait: Wait,
    ) -> Result<Server<C>, ServerError> {
        let Export { name, space, size, read_only } = export;
        if size == 0 || !size.is_multiple_of(PAGE_SIZE as u64) {
            return Err(ServerError::Size { size });
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(|error| ServerError::Wait(error.into()))?;
        watch(&epoll, &listener, LISTENER)?;
        watch(&epoll, pool.port(), POOL)?;
        let spares = (!read_only).then(|| Spares::start(&mut pool.client)).transpose().map_err(ServerError::Thread)?;
        Ok(Server {
            pool,
            space,
            offer: Offer { name, size, read_only },
            disk: Disk::new(size),
            listener,
            epoll,
            clients: (0..CONNECTIONS_MAX).map(|_| None).collect(),
            page: Box::new([0; SEALED_SIZE]),
            wait,
            spares,
            turn: 0,
            gathers_from: Instant::now(),
            heard_at: Instant::now(),
            ends_at: None,
        })
    }

    /// The pool's client, for statistics.
    pub fn pool(&self) -> &UdpClient<C> {
        &self.pool
    }

    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Serves until `stop` becomes readable, or somebody else owns the space. What clients have asked for by then is done first, as
    /// far as there is time. About once a second the pool's client is
    /// handed to `maintain`, to make servers known that have come since; it must not wait for anything.
    ///
    /// # Errors
    /// The pool's socket or the system's waiting is broken.
    pub fn run(
        &mut self,
        stop: BorrowedFd<'_>,
        mut maintain: impl FnMut(&mut Client, Time),
    ) -> Result<Ended, ServerError> {
        watch(&self.epoll, &stop, STOP)?;
        let mut ready = Vec::with_capacity(CONNECTIONS_MAX + OTHERS);
        let mut maintained_at = Instant::now();
        loop {
            if maintained_at.elapsed() >= MAINTAIN_EVERY {
                let now = self.pool.now();
                maintain(&mut self.pool.client, now);
                maintained_at = Instant::now();
            }
            if let Some(spares) = &self.spares {
                spares.top_up(&mut self.pool.client);
            }
            let work = self.work();
            self.pool.flush();
            if self.pool.client.is_taken(self.space) {
                self.last_words();
                return Ok(Ended::TakenOver);
            }
            if self.has_finished() {
                return self.give_back().map(|()| Ended::Stopped);
            }
            self.wait(&mut ready, work)?;
            for event in &ready {
                match event.data.u64() {
                    STOP => self.finish(stop),
                    LISTENER => self.accept(),
                    POOL => self.receive()?,
                    client => self.mark_ready(client as usize, event.flags),
                }
            }
        }
    }

    /// Waits for something to happen: looks for a while, then sleeps. Where there is work left, it only looks once.
    fn wait(&mut self, ready: &mut Vec<Ready>, work: Work) -> Result<(), ServerError> {
        let began = Instant::now();
        // Before there are events, which name clients by their slots.
        self.drop_the_slow();
        if work == Work::Done {
            self.gather(began);
        }
        loop {
            if self.heard_at.elapsed() >= HEAR_EVERY {
                self.receive()?;
            }
            let due = self.pool.expire();
            // What came of a timeout or of the control plane is to be answered, and nothing else would wake us for it.
            if self.pool.client.has_event() {
                ready.clear();
                return Ok(());
            }
            let now = Instant::now();
            let spins = work == Work::Done && now - began < self.wait.spin;
            let next = [due, self.next_deadline(), self.ends_at].into_iter().flatten().min();
            let left = next.map_or(Duration::from_secs(1), |next| next.saturating_duration_since(now));
            if work == Work::Done && !spins {
                self.sleep(left)?;
            }
            ready.clear();
            match epoll::wait(&self.epoll, spare_capacity(ready), Some(&Timespec::default())) {
                // Where cores are few, the client that an answer has just woken waits for this one.
                Ok(0) if spins => std::thread::yield_now(),
                Ok(_) | Err(Os::INTR) => return Ok(()),
                Err(error) => return Err(ServerError::Wait(error.into())),
            }
        }
    }

    /// Takes in what servers have sent.
    fn receive(&mut self) -> Result<(), ServerError> {
        self.pool.turn().map_err(ServerError::Pool)?;
        self.heard_at = Instant::now();
        Ok(())
    }

    /// Until something comes, or so long. By ppoll(2), which counts in nanoseconds: epoll_wait(2) rounds up to milliseconds, and
    /// epoll_pwait2(2) is not there before Linux 5.11, as in older guests.
    fn sleep(&self, most: Duration) -> Result<(), ServerError> {
        let timeout =
            Timespec { tv_sec: most.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: most.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(Os::INTR) => Ok(()),
            Err(error) => Err(ServerError::Wait(error.into())),
        }
    }

    /// Lets some more of a burst come. Who is to sleep at once is not to burn CPU time either.
    fn gather(&mut self, since: Instant) {
        // What waits for silent servers brings no burst.
        let pages = self.disk.pages_under_way().saturating_sub(self.pool.client.queued());
        if pages < GATHER_FROM || self.wait.spin < GATHER_MAX || since < self.gathers_from {
            return;
        }
        let enough = (GATHER_A_PAGE * pages as u32).min(GATHER_MAX);
        while since.elapsed() < enough {
            // The client has the burst to send, and on a host with few cores needs this one for it.
            std::thread::yield_now();
        }
        if since.elapsed() >= ROBBED_FROM {
            self.gathers_from = since + GATHER_AGAIN;
        }
    }

    /// Takes nobody and no request any more.
    fn finish(&mut self, stop: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, stop);
        let _ = epoll::delete(&self.epoll, &self.listener);
        self.clients.iter_mut().flatten().for_each(|client| client.connection.leave());
        self.ends_at = Some(Instant::now() + LAST_REQUESTS);
    }

    /// Whether it was asked to stop, and nobody is left who waits for an answer, or they have waited for long enough.
    fn has_finished(&self) -> bool {
        self.ends_at.is_some_and(|at| self.clients.iter().all(Option::is_none) || Instant::now() >= at)
    }

    /// Ends what only this owner knows of.
    fn give_back(&mut self) -> Result<(), ServerError> {
        self.pool.client.stop_giving_back();
        let until = Instant::now() + GIVING_BACK;
        while self.pool.client.is_giving_back() && Instant::now() < until {
            let due = self.pool.expire().map_or(until, |due| due.min(until));
            self.pool.port().wait(Some(due)).map_err(ServerError::Pool)?;
            self.pool.turn().map_err(ServerError::Pool)?;
        }
        Ok(())
    }

    fn accept(&mut self) {
        if self.ends_at.is_some() {
            return;
        }
        // Out of descriptors: the client waits in the backlog, or goes.
        while let Ok(Some(fd)) = self.listener.accept() {
            self.admit(fd);
        }
    }

    fn admit(&mut self, fd: OwnedFd) {
        // One more than there are slots is closed at once, which its program reports.
        let Some(slot) = self.clients.iter().position(Option::is_none) else { return };
        let watched = EventFlags::IN;
        if epoll::add(&self.epoll, &fd, EventData::new_u64(slot as u64), watched).is_ok() {
            let connection = Connection::default();
            let since = Instant::now();
            let (readable, broken, is_unwatched) = (false, false, false);
            self.clients[slot] = Some(Peer { fd, connection, since, watched, readable, broken, is_unwatched });
        }
    }

    fn mark_ready(&mut self, slot: usize, flags: EventFlags) {
        if let Some(Some(client)) = self.clients.get_mut(slot) {
            client.readable |= flags.intersects(EventFlags::IN);
            // Without a reader there is nobody to answer; what was sent before it closed is read first.
            client.broken |=
                flags.intersects(EventFlags::ERR) || (flags.intersects(EventFlags::HUP) && !client.readable);
        }
    }

    /// Takes in results and requests and sends answers, until nothing more follows, or others are to have their turn first.
    fn work(&mut self) -> Work {
        let now = self.pool.now();
        self.turn = (self.turn + 1) % CONNECTIONS_MAX;
        self.clients.iter_mut().flatten().for_each(Peer::receive);
        self.disk.begin_round();
        loop {
            let mut pages = Space { client: &mut self.pool.client, space: self.space, now };
            let mut any = false;
            for step in 0..CONNECTIONS_MAX {
                let slot = (self.turn + step) % CONNECTIONS_MAX;
                if let Some(peer) = &mut self.clients[slot] {
                    peer.connection.advance(slot, &self.offer, &mut self.disk, &mut pages);
                }
            }
            self.disk.run(&mut pages);
            // After the requests: what needs no server has its result at once, and nothing would wake us for it.
            while let Some(event) = pages.client.swap_event(&mut self.page) {
                self.disk.on_event(event, content_of(&self.page), &mut pages);
                any = true;
            }
            while let Some((owner, request)) = self.disk.poll_done() {
                if let Some(peer) = &mut self.clients[owner] {
                    peer.connection.answer(&self.disk, request);
                }
                self.disk.free(request);
                any = true;
            }
            if !any {
                break;
            }
        }
        let mut work = if self.disk.has_more() { Work::Left } else { Work::Done };
        for slot in 0..CONNECTIONS_MAX {
            let Some(client) = &mut self.clients[slot] else { continue };
            // A request that waited for room in the output can begin once that is empty, and nothing would wake us for it: the
            // socket is not watched for being writable any more.
            if client.send() == Sent::TheLast && client.connection.has_input() {
                work = Work::Left;
            }
            // What a client asked for before it said that it goes is done, whether it waits for that or not. It keeps
            // its slot until then, so that no client leaves more behind than it may have under way.
            if client.connection.is_over() || (client.broken && !client.connection.is_leaving()) {
                self.hang_up(slot);
            } else if client.broken {
                client.unwatch(&self.epoll);
            } else {
                client.rewatch(&self.epoll, slot);
            }
        }
        work
    }

    fn hang_up(&mut self, slot: usize) {
        if let Some(client) = self.clients[slot].take() {
            let _ = epoll::delete(&self.epoll, &client.fd);
            self.disk.abandon(slot);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let negotiating = self.clients.iter().flatten().filter(|client| client.connection.is_negotiating());
        negotiating.map(|client| client.since + NEGOTIATION_MAX).min()
    }

    fn drop_the_slow(&mut self) {
        if self.next_deadline().is_none_or(|at| at > Instant::now()) {
            return;
        }
        for slot in 0..CONNECTIONS_MAX {
            let slow = |client: &Peer| client.connection.is_negotiating() && client.since.elapsed() >= NEGOTIATION_MAX;
            if self.clients[slot].as_ref().is_some_and(slow) {
                self.hang_up(slot);
            }
        }
    }

    /// Tells everybody that the space is gone.
    fn last_words(&mut self) {
        let until = Instant::now() + LAST_WORDS;
        loop {
            let work = self.work();
            let unsaid = self.clients.iter().flatten().any(|peer| !peer.connection.output().is_empty());
            let is_over = work == Work::Done && !unsaid && self.disk.is_idle();
            if is_over || Instant::now() >= until {
                return;
            }
            std::thread::yield_now();
        }
    }
}

fn watch(epoll: &OwnedFd, fd: &impl AsFd, data: u64) -> Result<(), ServerError> {
    epoll::add(epoll, fd, EventData::new_u64(data), EventFlags::IN).map_err(|error| ServerError::Wait(error.into()))
}

impl Peer {
    /// Reads what has come, once: what does not fit is reported again.
    fn receive(&mut self) {
        if !std::mem::take(&mut self.readable) || !self.connection.wants_input() {
            return;
        }
        match rustix::net::recv(&self.fd, self.connection.room(), RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.broken = true,
            Ok((_, count)) => self.connection.filled(count),
            Err(Os::WOULDBLOCK | Os::INTR) => {}
            Err(_) => self.broken = true,
        }
    }

    /// Sends what can be sent now.
    fn send(&mut self) -> Sent {
        let left = self.connection.output().len();
        if self.broken {
            self.connection.sent(left);
        }
        if self.broken || left == 0 {
            return Sent::Nothing;
        }
        while !self.broken && !self.connection.output().is_empty() {
            match rustix::net::send(&self.fd, self.connection.output(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => self.connection.sent(count),
                Err(Os::INTR) => {}
                Err(Os::WOULDBLOCK) => return Sent::APart,
                Err(_) => self.broken = true,
            }
        }
        if self.broken { Sent::APart } else { Sent::TheLast }
    }

    /// The system would report again and again that its client is gone.
    fn unwatch(&mut self, epoll: &OwnedFd) {
        if !std::mem::replace(&mut self.is_unwatched, true) {
            let _ = epoll::delete(epoll, &self.fd);
        }
    }

    fn rewatch(&mut self, epoll: &OwnedFd, slot: usize) {
        let mut wanted = EventFlags::empty();
        wanted.set(EventFlags::IN, self.connection.wants_input());
        wanted.set(EventFlags::OUT, !self.connection.output().is_empty());
        if wanted != self.watched {
            self.broken |= epoll::modify(epoll, &self.fd, EventData::new_u64(slot as u64), wanted).is_err();
            self.watched = wanted;
        }
    }
}

#[cfg(test)]
mod tests;
