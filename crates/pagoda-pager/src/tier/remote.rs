//! The remote tier: memory of other machines, borrowed from a pool of servers.
//!
//! A page of the VM is the page of the same number of a space in the pool, and counts while its bit in the [`RemoteMap`] is set.
//!
//! * The bits are set when every copy has every page. What the pool declines, fails or does not take within
//!   [`WRITE_PATIENCE`] is declined, and goes to the next tier.
//! * A block that is outdated loses its bit at once. The pool is not told: it keeps whole slabs, and a page's next content
//!   replaces the old one. Slabs in which no page has a bit go back to their servers after a while.
//! * A page that the pool lost stops the VM ([`IoError::Lost`]). It is never taken for zeros.
//! * While the VM moves, the daemon says what may be done with the space ([`Handover`]).

mod handover;
mod map;
mod numbers;
mod opened;
mod placing;

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{IoError, OpId};
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use rmap::client::{Event, Failure, Reach, Refused, SpaceRef};
use rmap::units::{Class, Page, PageNo, SEALED_SIZE, SealedPage, SlabNo, content_of};
use rmap_io::net::UdpClient;

use handover::Followed;
pub use handover::{Handover, NotStill, Standing, WeakHandover};
pub use map::RemoteMap;
pub use numbers::RemoteNumbers;
pub use opened::{Control, Maintain, Opened};

use self::placing::{PLACE_PATIENCE, Placing};
use super::kept::Kept;
use super::{
    Begun as Started, Content, Counts, Ended, Io, Outcome, Placed, Places, Read, Step, Takes, Target, Tier, Write,
};
use crate::space::Space;

/// How long page-out waits for the pool before the swap file gets the page: many round trips, and far longer than the pool
/// needs to fail over to another copy.
pub const WRITE_PATIENCE: Duration = Duration::from_millis(500);
/// After that the pool is not asked to take pages for so long.
const WRITE_PAUSE: Duration = Duration::from_secs(2);
/// Pages being written to the pool at a time, of the 256 that a client can have under way: page-ins always find room.
const WRITES_MAX: usize = 64;
/// Pages whose writes are begun between two looks at the faults: each is sealed, which takes some 5 us.
const WRITES_STEP: usize = 8;
/// Pages waiting to be written from which on no more are planned.
const WAITING_MAX: usize = 256;
/// How often it is looked for slabs without a page that counts. One that has none at two looks in a row goes back to its servers.
const RETURN_EVERY: Duration = Duration::from_secs(10);
/// Slabs that go back at a look: each is a change of the map, and some messages.
const RETURNS_MAX: usize = 16;
/// A VM of a terabyte has thousands of slabs, and is asked how it is several times a second.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// A page that was asked for so long ago is waited for: it is said then, for the pool may be silent for hours.
const WAIT_REPORTED: Duration = Duration::from_secs(1);
/// How long a new daemon waits for a page that it needs before it can serve the VM: longer than the pool takes to say that it
/// is lost.
const READ_PATIENCE: Duration = Duration::from_secs(60);

/// What is asked of the pool for one page of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    op: OpId,
    page: PageIdx,
    kind: JobKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobKind {
    Read { target: Target, demand: bool },
    Write,
}

impl Job {
    fn ended(self, outcome: Outcome) -> Ended {
        Ended { op: self.op, page: self.page, outcome }
    }
}

#[derive(Clone, Copy, Debug)]
struct Begun {
    job: Job,
    at: Instant,
}

/// The remote tier of one VM.
pub struct RemoteTier {
    /// The VM's name, which messages show.
    vm: String,
    udp: UdpClient<Control>,
    space: SpaceRef,
    map: RemoteMap,
    maintain: Maintain,
    handover: Handover,
    /// How the VM stands to the space as of the last turn, and since when.
    standing: Standing,
    stands_since: Instant,
    /// Held, and no write can land that makes a page the tier's: as of the last turn.
    is_still: bool,
    /// Another host has been told what is there: as of the last turn.
    is_named: bool,
    /// Copies for whoever the VM moves to.
    placing: Placing,
    /// Not begun: page-ins that a fault waits for, others, page-outs with the time they were asked for.
    demand: VecDeque<Job>,
    ahead: VecDeque<Job>,
    writes: VecDeque<Begun>,
    /// Requests that the client has begun, by token.
    begun: HashMap<u64, Begun>,
    writes_begun: usize,
    /// Writes that took too long and are to be declined.
    late: VecDeque<Job>,
    /// Writes that were given up and that the client still tries: none of them counts, but each takes room from page-ins.
    abandoned: HashSet<u64>,
    /// The client would begin no more just now.
    is_refused: bool,
    tokens: u64,
    /// The page that was read last.
    page: Box<SealedPage>,
    /// What pages hold that are being taken out of DRAM.
    kept: Kept,
    /// The pool takes no page before this.
    paused_until: Option<Instant>,
    pages_in: u64,
    pages_out: u64,
    declined: u64,
    has_lost: bool,
    /// Slabs with all copies in sync and with any, as of then.
    counted: (usize, usize),
    counted_at: Option<Instant>,
    /// Slabs that had nothing at the last look, and when that was.
    idle: Vec<bool>,
    looked_at: Instant,
}

impl std::fmt::Debug for RemoteTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteTier")
            .field("space", &self.space)
            .field("pages", &self.map.count())
            .finish_non_exhaustive()
    }
}

impl RemoteTier {
    /// The tier of the VM of this name. The space that was opened has a page for each of the VM.
    pub fn new(vm: &str, opened: Opened, map: RemoteMap, handover: Handover) -> RemoteTier {
        let Opened { udp, space, maintain } = opened;
        RemoteTier {
            vm: vm.to_owned(),
            udp,
            space,
            map,
            maintain,
            standing: handover.standing(),
            stands_since: Instant::now(),
            handover,
            is_still: false,
            is_named: false,
            placing: Placing::default(),
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            writes: VecDeque::with_capacity(2 * WAITING_MAX),
            begun: HashMap::with_capacity(rmap::client::OPS_MAX),
            writes_begun: 0,
            late: VecDeque::new(),
            abandoned: HashSet::with_capacity(WRITES_MAX),
            is_refused: false,
            tokens: 0,
            page: Box::new([0; SEALED_SIZE]),
            kept: Kept::new(),
            paused_until: None,
            pages_in: 0,
            pages_out: 0,
            declined: 0,
            has_lost: false,
            counted: (0, 0),
            counted_at: None,
            idle: Vec::new(),
            looked_at: Instant::now(),
        }
    }

    /// Does what the daemon says of the space, and says whether a write may land.
    fn follow(&mut self) {
        let has_writes = !self.writes.is_empty() || self.writes_begun > 0 || !self.abandoned.is_empty();
        let followed = self.handover.follow(has_writes || !self.placing.is_still());
        let Followed { standing, opened, is_named } = followed;
        if let Some(opened) = opened {
            self.replace(opened);
        }
        if standing != self.standing {
            (self.standing, self.stands_since) = (standing, Instant::now());
        }
        self.is_still = standing == Standing::Held && !has_writes;
        self.is_named = is_named;
    }

    /// Goes on as the owner that another client is. What was asked of the one before is asked of it again; what that was writing does
    /// not count.
    fn replace(&mut self, opened: Opened) {
        let Opened { udp, space, maintain } = opened;
        self.udp.replace(udp);
        (self.space, self.maintain, self.counted_at) = (space, maintain, None);
        self.abandoned.clear();
        self.placing.replace();
        let mut begun: Vec<(u64, Begun)> = self.begun.drain().collect();
        // The last first: each is put before all others.
        begun.sort_unstable_by_key(|(token, _)| std::cmp::Reverse(*token));
        for (_, Begun { job, .. }) in begun {
            match job.kind {
                JobKind::Read { demand: true, .. } => self.demand.push_front(job),
                JobKind::Read { demand: false, .. } => self.ahead.push_front(job),
                JobKind::Write => self.late.push_back(job),
            }
        }
        self.late.extend(self.writes.drain(..).map(|begun| begun.job));
        self.writes_begun = 0;
    }

    /// Hands what waits to the client, as much as it takes.
    fn begin_waiting(&mut self, io: &Io<'_>) {
        self.is_refused = false;
        for class in [Class::Demand, Class::Prefetch] {
            let queue = if class == Class::Demand { &mut self.demand } else { &mut self.ahead };
            while let Some(&job) = queue.front() {
                let now = self.udp.now();
                if self.udp.client.read(now, self.space, PageNo(job.page.0), class, self.tokens + 1).is_err() {
                    break;
                }
                queue.pop_front();
                self.tokens += 1;
                self.begun.insert(self.tokens, Begun { job, at: Instant::now() });
            }
        }
        for _ in 0..WRITES_STEP {
            let Some(&waiting) = self.writes.front().filter(|_| self.writes_begun < WRITES_MAX) else { break };
            let Job { page, .. } = waiting.job;
            let (now, number, token) = (self.udp.now(), PageNo(page.0), self.tokens + 1);
            let put = |room: &mut Page| io.take_content(page, room);
            match self.udp.client.write_with(now, self.space, number, Class::Eviction, token, put) {
                Ok(()) => {}
                // The others do not end: its patience will.
                Err(Refused::Busy | Refused::BeyondEnd | Refused::VersionsUsedUp | Refused::ReadOnly) => {
                    self.is_refused = true;
                    break;
                }
            }
            self.writes.pop_front();
            self.tokens += 1;
            self.writes_begun += 1;
            self.begun.insert(self.tokens, waiting);
        }
        self.begin_placing();
        self.udp.flush();
    }

    /// The same for copies that go to another host with the space.
    fn begin_placing(&mut self) {
        for _ in 0..WRITES_STEP {
            let Some((page, content)) = self.placing.next().filter(|_| self.placing.begun() < WRITES_MAX) else {
                return;
            };
            let (now, number, token) = (self.udp.now(), PageNo(page.0), self.tokens + 1);
            let put = |room: &mut Page| room.copy_from_slice(content);
            if self.udp.client.write_with(now, self.space, number, Class::Eviction, token, put).is_err() {
                // It waits on, until its patience is over.
                self.is_refused = true;
                return;
            }
            self.tokens += 1;
            self.placing.note_begun(token);
        }
    }

    /// The pool has not taken pages of late.
    fn is_paused(&self) -> bool {
        self.paused_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether a page could be asked for at once that was not.
    fn can_begin(&self) -> bool {
        let can_write = !self.writes.is_empty() && self.writes_begun < WRITES_MAX;
        let can_place = self.placing.is_waiting() && self.placing.begun() < WRITES_MAX;
        self.standing != Standing::Away && !self.is_refused && (can_write || can_place)
    }

    /// Does what is due, and says how long nothing more is.
    fn expire(&mut self) -> Duration {
        if self.standing == Standing::Away {
            return Duration::MAX;
        }
        let due = self.udp.expire();
        if self.udp.client.has_event() {
            return Duration::ZERO;
        }
        let due = due.map_or(WRITE_PATIENCE, |due| due.saturating_duration_since(Instant::now()));
        let due = if self.placing.is_busy() { due.min(PLACE_PATIENCE / 10) } else { due };
        if self.writes.is_empty() && self.writes_begun == 0 { due } else { due.min(WRITE_PATIENCE / 10) }
    }

    /// The next job that has ended and is still wanted. What was read is in `page`.
    fn next_done(&mut self) -> Option<(Job, Result<(), Failure>)> {
        loop {
            let (token, result) = match self.udp.client.swap_event(&mut self.page)? {
                Event::Read { token, result } | Event::Written { token, result } => (token, result),
            };
            if self.placing.note_ended(token, result) {
                continue;
            }
            let Some(Begun { job, .. }) = self.begun.remove(&token) else {
                self.abandoned.remove(&token);
                continue;
            };
            self.writes_begun -= usize::from(job.kind == JobKind::Write);
            return Some((job, result));
        }
    }

    /// Gives up writes that took too long. What the pool makes of them does not count any more.
    fn give_up_late(&mut self) {
        let now = Instant::now();
        let is_late = |begun: &Begun| begun.job.kind == JobKind::Write && now - begun.at >= WRITE_PATIENCE;
        let oldest_waits = self.writes.front().is_some_and(is_late);
        if !oldest_waits && !self.begun.values().any(is_late) {
            return;
        }
        let late: Vec<u64> = self.begun.iter().filter(|(_, begun)| is_late(begun)).map(|(token, _)| *token).collect();
        self.late.extend(late.iter().filter_map(|token| self.begun.remove(token)).map(|begun| begun.job));
        self.writes_begun -= late.len();
        self.late.extend(self.writes.drain(..).map(|begun| begun.job));
        self.abandoned.extend(late);
        self.paused_until = Some(now + WRITE_PAUSE);
        tracing::warn!(vm = %self.vm, pages = self.late.len(), "the pool does not take pages: swap does");
    }

    /// Says what a failed read means, once: where one page is lost, many are.
    fn note_loss(&mut self, page: PageIdx, failure: Failure) {
        if !std::mem::replace(&mut self.has_lost, true) {
            tracing::error!(vm = %self.vm, page = page.0, "a page cannot be had from the pool: {failure}");
        }
    }

    /// Gives slabs back in which no page counts, some at a time. `written` names chunks that are being written out: their pages
    /// will count, and nothing says so yet.
    fn return_slabs(&mut self, written: &mut dyn Iterator<Item = ChunkIdx>) {
        if self.looked_at.elapsed() < RETURN_EVERY {
            return;
        }
        self.looked_at = Instant::now();
        let mut empty: Vec<bool> = self.map.slabs().iter().map(|pages| *pages == 0).collect();
        let waiting = self.demand.iter().chain(&self.ahead).chain(self.writes.iter().map(|begun| &begun.job));
        let begun = self.begun.values().map(|begun| &begun.job);
        let asked = waiting.chain(begun).map(|job| job.page.chunk()).chain(self.placing.chunks());
        asked.chain(written).for_each(|chunk| empty[RemoteMap::slab_of(chunk)] = false);
        self.idle.resize(empty.len(), false);
        let both = (0..).zip(empty.iter().zip(&self.idle)).filter(|(_, (now, before))| **now && **before);
        let idle: Vec<u32> = both.map(|(slab, _)| slab).collect();
        let now = self.udp.now();
        let mut returned = 0;
        for slab in idle {
            if returned < RETURNS_MAX && self.udp.client.discard_slab(now, self.space, SlabNo(slab)) {
                returned += 1;
            }
        }
        self.idle = empty;
    }

    /// How many pages are waited for, and in words for whom: `None` where all come in time. Where none is, pages may still be
    /// declined because nothing says which servers are to have them.
    fn late_pages(&self) -> Option<(u64, String)> {
        let pages = self.late_reads();
        let silent = self.udp.client.control_silent_for(self.udp.now()).filter(|silent| *silent >= WAIT_REPORTED);
        let map = silent.map(|silent| {
            let seconds = silent.as_secs();
            format!("a change of the pool's map for {seconds} s (is etcd there?): what needs one goes to the swap file")
        });
        match (pages, map) {
            (Some((pages, whom)), Some(map)) => Some((pages, format!("{whom}; {map}"))),
            (None, Some(map)) => Some((0, map)),
            (pages, None) => pages,
        }
    }

    fn late_reads(&self) -> Option<(u64, String)> {
        if self.standing == Standing::Away {
            let pages = (self.demand.len() + self.ahead.len() + self.begun.len()) as u64;
            let is_late = pages > 0 && self.stands_since.elapsed() >= WAIT_REPORTED;
            let what = || format!("{pages} pages of the pool, whose map is being taken over (is etcd there?)");
            return is_late.then(|| (pages, what()));
        }
        let (now, at) = (Instant::now(), self.udp.now());
        let is_late = |begun: &&Begun| begun.job.kind != JobKind::Write && now - begun.at >= WAIT_REPORTED;
        let begun: Vec<&Begun> = self.begun.values().filter(is_late).collect();
        let pages = begun.len() as u64;
        let since = begun.iter().map(|begun| begun.at).min()?;
        let silent = self.udp.client.servers().filter_map(|server| match server.reach {
            Reach::Down { since } => {
                Some(format!("server {} is silent for {} s", server.id.0, at.since(since).as_secs()))
            }
            Reach::Connecting { .. } | Reach::Up => None,
        });
        let silent: Vec<String> = silent.collect();
        let whom = if silent.is_empty() { "all servers answer".to_owned() } else { silent.join(", ") };
        Some((pages, format!("{pages} pages of the pool for {} s: {whom}", (now - since).as_secs())))
    }

    fn begin_jobs(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet, kind: JobKind) -> Started {
        for index in pages.iter() {
            let job = Job { op, page: chunk.page(index), kind };
            match kind {
                JobKind::Read { demand: true, .. } => self.demand.push_back(job),
                JobKind::Read { demand: false, .. } => self.ahead.push_back(job),
                JobKind::Write => self.writes.push_back(Begun { job, at: Instant::now() }),
            }
        }
        let parts = pages.count();
        Started { parts, bytes: u64::from(parts) * PAGE_SIZE, ..Started::default() }
    }
}

impl Tier for RemoteTier {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.udp.port().as_fd())
    }

    fn holds(&self, chunk: ChunkIdx) -> PageSet {
        self.map.of(chunk)
    }

    fn takes(&self, has_time: bool) -> Takes {
        if self.standing != Standing::Owner {
            return Takes::No;
        }
        if !self.abandoned.is_empty() || self.placing.has_abandoned() || self.is_paused() {
            return Takes::No;
        }
        if self.writes.len() >= WAITING_MAX {
            return Takes::Later;
        }
        Takes::Now(Step::of_runs(has_time))
    }

    /// Asks for each page; it is sent with the next [`Tier::begin`].
    fn read(&mut self, _: &mut Io<'_>, read: &Read) -> Started {
        let kind = JobKind::Read { target: read.target, demand: read.demand };
        self.begin_jobs(read.op, read.chunk, read.pages, kind)
    }

    fn write(&mut self, _: &mut Io<'_>, write: &Write) -> Started {
        // It was held since it was asked whether it takes any.
        if self.standing != Standing::Owner {
            return Started { declined: write.pages, ..Started::default() };
        }
        self.begin_jobs(write.op, write.chunk, write.pages, JobKind::Write)
    }

    fn begin(&mut self, io: &mut Io<'_>) -> Duration {
        self.follow();
        if self.standing != Standing::Away {
            self.begin_waiting(io);
        }
        let wait = self.expire();
        if self.can_begin() || !self.late.is_empty() { Duration::ZERO } else { wait }
    }

    fn turn(&mut self) -> io::Result<()> {
        match self.standing {
            Standing::Away => self.udp.ignore(),
            _ => self.udp.turn().map(drop),
        }
    }

    fn next_ended(&mut self, io: &mut Io<'_>) -> Option<Ended> {
        let Some((job, result)) = self.next_done() else {
            self.give_up_late();
            let job = self.late.pop_front()?;
            self.declined += 1;
            return Some(job.ended(Outcome::Declined));
        };
        let outcome = match (job.kind, result) {
            (JobKind::Write, Ok(())) => {
                self.pages_out += 1;
                Outcome::Written
            }
            (JobKind::Write, Err(_)) => {
                self.declined += 1;
                Outcome::Declined
            }
            (JobKind::Read { target, .. }, Ok(())) => {
                self.pages_in += 1;
                if io.deliver(target, job.page, content_of(&self.page)) { Outcome::Read } else { Outcome::Undelivered }
            }
            (JobKind::Read { .. }, Err(failure)) => {
                self.note_loss(job.page, failure);
                Outcome::Failed(IoError::Lost)
            }
        };
        Some(job.ended(outcome))
    }

    fn settle(&mut self, chunk: ChunkIdx, gained: PageSet, lost: PageSet) -> Result<(), Errno> {
        let pages = (self.map.of(chunk) - lost) | gained;
        self.map.set(chunk, pages).map_err(errno_of)
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        let pages = self.map.of(chunk) - pages;
        self.map.set(chunk, pages).map_err(errno_of)
    }

    fn clear(&mut self) -> Result<(), Errno> {
        self.map.clear().map_err(errno_of)
    }

    /// The network is not waited for while pages leave DRAM: those that a pin leaves behind get back what is copied here.
    fn keep(&mut self, space: &Space, chunk: ChunkIdx, pages: PageSet) {
        self.kept.keep(space, chunk, pages);
    }

    fn read_back(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.kept.read_back(page, out)
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.fetch(page, out).map_err(|error| {
            tracing::error!(vm = %self.vm, page = page.0, "a page cannot be had from the pool: {error}");
            Errno::IO
        })
    }

    fn handed_over(&self, chunk: ChunkIdx) -> PageSet {
        if self.is_still { self.map.of(chunk) } else { PageSet::EMPTY }
    }

    fn places(&self) -> Places {
        if !self.is_still || self.is_named || self.placing.has_abandoned() || self.is_paused() {
            return Places::No;
        }
        if self.placing.has_room() { Places::Now } else { Places::Later }
    }

    fn place(&mut self, first: PageIdx, content: Vec<u8>) {
        self.placing.add(first, content, Instant::now());
    }

    fn next_placed(&mut self) -> Option<Placed> {
        let now = Instant::now();
        if self.placing.expire(now) {
            self.paused_until = Some(now + WRITE_PAUSE);
            tracing::warn!(vm = %self.vm, "the pool does not take pages of the VM's move: they go over the link");
        }
        self.placing.take_ended()
    }

    fn forget_placing(&mut self) {
        self.placing.forget();
    }

    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        if let Some(pages) = self.handover.take_pages() {
            self.map.replace(&pages).map_err(errno_of)?;
        }
        for chunk in (0..self.map.chunks()).map(ChunkIdx) {
            let pages = self.map.of(chunk);
            if !pages.is_empty() {
                found(chunk, pages);
            }
        }
        Ok(())
    }

    fn maintain(&mut self, written: &mut dyn Iterator<Item = ChunkIdx>) {
        self.follow();
        if self.standing != Standing::Away {
            let now = self.udp.now();
            (self.maintain)(&mut self.udp.client, now);
        }
        if self.standing == Standing::Owner {
            self.return_slabs(written);
        }
    }

    fn counts(&self) -> Counts {
        let RemoteTier { pages_in, pages_out, declined, .. } = *self;
        Counts { pages: self.map.count(), pages_in, pages_out, declined, ..Counts::default() }
    }

    fn add_to(&self, stats: &mut Stats) {
        stats.set(Metric::Remote, self.map.count());
        stats.set(Metric::RemoteIn, self.pages_in);
        stats.set(Metric::RemoteOut, self.pages_out);
        stats.set(Metric::RemoteDeclined, self.declined);
        stats.set(Metric::RemoteWaiting, self.late_pages().map_or(0, |(pages, _)| pages));
    }

    fn waits(&mut self) -> Option<String> {
        self.late_pages().map(|(_, whom)| whom)
    }

    fn remote(&mut self) -> Option<RemoteNumbers> {
        let client = &self.udp.client;
        if self.counted_at.is_none_or(|at| at.elapsed() >= COUNT_EVERY) {
            (self.counted_at, self.counted) = (Some(Instant::now()), client.in_sync(self.space));
        }
        let (whole, held) = self.counted;
        let (stats, servers) = (*client.stats(), client.servers().collect());
        Some(RemoteNumbers { stats, window: client.window(), whole, held, servers })
    }
}

impl RemoteTier {
    /// Reads a page and waits for it, while nothing else is under way.
    fn fetch(&mut self, page: PageIdx, out: &mut Content) -> io::Result<()> {
        let (now, number) = (self.udp.now(), PageNo(page.0));
        self.tokens += 1;
        let token = self.tokens;
        self.udp.client.read(now, self.space, number, Class::Demand, token).map_err(io::Error::other)?;
        loop {
            match self.udp.next(READ_PATIENCE).map_err(io::Error::other)? {
                (Event::Read { token: ended, result }, content) if ended == token => {
                    result.map_err(io::Error::other)?;
                    out.copy_from_slice(&content[..]);
                    return Ok(());
                }
                _ => {}
            }
        }
    }
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
