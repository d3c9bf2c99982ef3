//! A VM's far tier: other machines' memory before its own swap file.
//!
//! The page table knows that a page has a swap block; where that block is, is known here. A page of the VM is the page of the
//! same number of a space in the pool, and counts while its bit in the [`FarMap`] is set.
//!
//! * Page-out asks the pool first. The bits are set when every copy has every page, before the pages leave DRAM. What the pool
//!   declines, fails or does not take within [`WRITE_PATIENCE`] goes to the swap file, and has no bit.
//! * A block that is outdated loses its bit at once. The pool is not told: it keeps whole slabs, and a page's next content
//!   replaces the old one. Slabs in which no page has a bit go back to their servers after a while.
//! * A page has one block: in the pool or in the swap file. In between, while it is written out, DRAM has it.
//! * After the daemon's death the rule of `recover` holds, with the bit saying which of both is "swap".
//! * A page that the pool lost stops the VM ([`pagoda_core::fault::IoError::Lost`]). It is never taken for zeros.

mod map;

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use pagoda_core::fault::OpId;
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageIdx};
use rmap::client::{Client, ClientStats, Event, Failure, Reach, Refused, ServerView, SpaceRef};
use rmap::control::{ControlReply, ControlRequest};
use rmap::udp::UdpClient;
use rmap::units::{Class, Page, PageNo, SEALED_SIZE, SealedPage, SlabNo, Time, content_of};

pub use map::FarMap;

/// How the pool's client asks its control plane.
pub type Control = Box<dyn FnMut(&ControlRequest) -> ControlReply + Send>;

/// What else is to be done with the pool's client now and then, such as to make servers known that have come. It never waits.
pub type Tend = Box<dyn FnMut(&mut Client, Time) + Send>;

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
const WAIT_TOLD: Duration = Duration::from_secs(1);
/// How long a new daemon waits for a page that it needs before it can serve the VM: longer than the pool takes to say that it
/// is lost.
const READ_PATIENCE: Duration = Duration::from_secs(60);

/// What is asked of the pool for an operation of the page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// The operation.
    pub op: OpId,
    /// The page.
    pub page: PageIdx,
    /// What is asked.
    pub kind: JobKind,
}

/// See [`Job`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Somebody may wait for it.
    Read {
        /// Somebody does.
        demand: bool,
    },
    /// Page-out.
    Write,
}

/// One look at the pool's client of a VM.
#[derive(Clone, Debug)]
pub struct FarNumbers {
    /// What it counts, since the engine began.
    pub stats: ClientStats,
    /// Pages of answers that may be under way.
    pub window: usize,
    /// Slabs with all their copies in sync.
    pub whole: usize,
    /// Slabs with any.
    pub held: usize,
    /// The servers that it knows.
    pub servers: Vec<ServerView>,
}

#[derive(Clone, Copy, Debug)]
struct Begun {
    job: Job,
    at: Instant,
}

/// See the module.
pub struct Far {
    udp: UdpClient<Control>,
    space: SpaceRef,
    map: FarMap,
    tend: Tend,
    /// Not begun: page-ins that a fault waits for, others, page-outs with the time they were asked for.
    demand: VecDeque<Job>,
    ahead: VecDeque<Job>,
    writes: VecDeque<Begun>,
    /// Begun, by token.
    begun: HashMap<u64, Begun>,
    writes_begun: usize,
    /// Writes that were given up and that the client still tries: none of them counts, but each takes room from page-ins.
    abandoned: HashSet<u64>,
    /// The client would begin no more just now.
    is_refused: bool,
    tokens: u64,
    /// The page that was read last.
    page: Box<SealedPage>,
    /// Content of pages that are being taken out of DRAM.
    kept: Vec<u8>,
    /// The pool takes no page before this.
    paused_until: Option<Instant>,
    pages_in: u64,
    pages_out: u64,
    pages_declined: u64,
    has_lost: bool,
    /// Slabs with all copies in sync and with any, as of then.
    counted: (usize, usize),
    counted_at: Option<Instant>,
    /// Slabs that had nothing at the last look, and when that was.
    idle: Vec<bool>,
    looked_at: Instant,
}

impl std::fmt::Debug for Far {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Far").field("space", &self.space).field("pages", &self.map.count()).finish_non_exhaustive()
    }
}

impl AsFd for Far {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.udp.port().as_fd()
    }
}

impl Far {
    /// `space` of the client has a page for each of the VM.
    pub fn new(udp: UdpClient<Control>, space: SpaceRef, map: FarMap, tend: Tend) -> Far {
        Far {
            udp,
            space,
            map,
            tend,
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            writes: VecDeque::with_capacity(2 * WAITING_MAX),
            begun: HashMap::with_capacity(rmap::client::OPS_MAX),
            writes_begun: 0,
            abandoned: HashSet::with_capacity(WRITES_MAX),
            is_refused: false,
            tokens: 0,
            page: Box::new([0; SEALED_SIZE]),
            kept: vec![0; CHUNK_SIZE as usize],
            paused_until: None,
            pages_in: 0,
            pages_out: 0,
            pages_declined: 0,
            has_lost: false,
            counted: (0, 0),
            counted_at: None,
            idle: Vec::new(),
            looked_at: Instant::now(),
        }
    }

    /// Which pages the pool has.
    pub fn map(&self) -> &FarMap {
        &self.map
    }

    /// The same, to be changed.
    pub fn map_mut(&mut self) -> &mut FarMap {
        &mut self.map
    }

    /// The page that the last [`Far::next_done`] brought.
    pub fn page(&self) -> &[u8] {
        content_of(&self.page)
    }

    /// Room for the content of a chunk.
    pub fn kept_mut(&mut self) -> &mut [u8] {
        &mut self.kept
    }

    /// A page of the chunk whose content was put there.
    pub fn kept(&self, index: u8) -> &[u8] {
        let start = usize::from(index) * PAGE_SIZE as usize;
        &self.kept[start..start + PAGE_SIZE as usize]
    }

    /// Whether page-out may ask the pool.
    pub fn takes_writes(&self) -> bool {
        self.abandoned.is_empty() && self.paused_until.is_none_or(|until| Instant::now() >= until)
    }

    /// Whether so much waits for the pool that nothing more should.
    pub fn is_full(&self) -> bool {
        self.writes.len() >= WAITING_MAX
    }

    /// Whether a page could be asked for at once that was not.
    pub fn can_begin(&self) -> bool {
        !self.is_refused && !self.writes.is_empty() && self.writes_begun < WRITES_MAX
    }

    /// Asks for a page to be read or written; it begins with one of the next [`Far::begin`].
    pub fn ask(&mut self, job: Job) {
        match job.kind {
            JobKind::Read { demand: true } => self.demand.push_back(job),
            JobKind::Read { demand: false } => self.ahead.push_back(job),
            JobKind::Write => self.writes.push_back(Begun { job, at: Instant::now() }),
        }
    }

    /// Begins what can begin, and sends it. `content` gives a page that is written.
    pub fn begin(&mut self, mut content: impl FnMut(PageIdx, &mut [u8])) {
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
            let put = |room: &mut Page| content(page, room);
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
        self.udp.flush();
    }

    /// Takes in what has come.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn turn(&mut self) -> io::Result<()> {
        self.udp.turn().map(drop)
    }

    /// Does what is due, and says how long nothing more is.
    pub fn expire(&mut self) -> Duration {
        let due = self.udp.expire();
        if self.udp.client.has_event() {
            return Duration::ZERO;
        }
        let due = due.map_or(WRITE_PATIENCE, |due| due.saturating_duration_since(Instant::now()));
        if self.writes.is_empty() && self.writes_begun == 0 { due } else { due.min(WRITE_PATIENCE / 10) }
    }

    /// The next thing that has ended and is still wanted. What was read is [`Far::page`].
    pub fn next_done(&mut self) -> Option<(Job, Result<(), Failure>)> {
        loop {
            let (token, result) = match self.udp.client.swap_event(&mut self.page)? {
                Event::Read { token, result } | Event::Written { token, result } => (token, result),
            };
            let Some(Begun { job, .. }) = self.begun.remove(&token) else {
                self.abandoned.remove(&token);
                continue;
            };
            match (job.kind, result) {
                (JobKind::Read { .. }, Ok(())) => self.pages_in += 1,
                (JobKind::Read { .. }, Err(_)) => {}
                (JobKind::Write, Ok(())) => self.pages_out += 1,
                (JobKind::Write, Err(_)) => self.pages_declined += 1,
            }
            self.writes_begun -= usize::from(job.kind == JobKind::Write);
            return Some((job, result));
        }
    }

    /// Writes that took too long: the swap file gets these pages. What the pool makes of them does not count any more.
    pub fn overdue(&mut self) -> Vec<Job> {
        let now = Instant::now();
        let is_late = |begun: &Begun| begun.job.kind == JobKind::Write && now - begun.at >= WRITE_PATIENCE;
        let oldest_waits = self.writes.front().is_some_and(is_late);
        if !oldest_waits && !self.begun.values().any(is_late) {
            return Vec::new();
        }
        let late: Vec<u64> = self.begun.iter().filter(|(_, begun)| is_late(begun)).map(|(token, _)| *token).collect();
        let mut jobs: Vec<Job> =
            late.iter().filter_map(|token| self.begun.remove(token)).map(|begun| begun.job).collect();
        self.writes_begun -= jobs.len();
        jobs.extend(self.writes.drain(..).map(|begun| begun.job));
        self.abandoned.extend(late);
        self.pages_declined += jobs.len() as u64;
        self.paused_until = Some(now + WRITE_PAUSE);
        jobs
    }

    /// Reads a page and waits for it, while nothing else is under way.
    ///
    /// # Errors
    /// It is lost, or does not come.
    pub fn read_now(&mut self, page: PageIdx, out: &mut [u8]) -> io::Result<()> {
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

    /// Does what is to be done now and then.
    pub fn tend(&mut self) {
        let now = self.udp.now();
        (self.tend)(&mut self.udp.client, now);
    }

    /// Gives slabs back in which no page counts, some at a time. `written` names chunks that are being written out: their pages
    /// will count, and nothing says so yet.
    pub fn return_slabs(&mut self, written: impl Iterator<Item = ChunkIdx>) {
        if self.looked_at.elapsed() < RETURN_EVERY {
            return;
        }
        self.looked_at = Instant::now();
        let mut empty: Vec<bool> = self.map.slabs().iter().map(|pages| *pages == 0).collect();
        let waiting = self.demand.iter().chain(&self.ahead).chain(self.writes.iter().map(|begun| &begun.job));
        let begun = self.begun.values().map(|begun| &begun.job);
        let asked = waiting.chain(begun).map(|job| job.page.chunk());
        asked.chain(written).for_each(|chunk| empty[FarMap::slab_of(chunk)] = false);
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

    /// How many pages are waited for, and in words for whom: `None` where all come in time. Where none is, pages may still go to
    /// the swap file because nothing says which servers are to have them.
    pub fn waits(&self) -> Option<(u64, String)> {
        let pages = self.waits_for_pages();
        let silent = self.udp.client.control_silent_for(self.udp.now()).filter(|silent| *silent >= WAIT_TOLD);
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

    fn waits_for_pages(&self) -> Option<(u64, String)> {
        let (now, at) = (Instant::now(), self.udp.now());
        let is_late = |begun: &&Begun| begun.job.kind != JobKind::Write && now - begun.at >= WAIT_TOLD;
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

    /// Whether no page was lost before this one: where one is lost, many are, and one is worth a line in the log.
    pub fn is_first_loss(&mut self) -> bool {
        !std::mem::replace(&mut self.has_lost, true)
    }

    /// What the pool's client has counted.
    pub fn numbers(&mut self) -> FarNumbers {
        let client = &self.udp.client;
        if self.counted_at.is_none_or(|at| at.elapsed() >= COUNT_EVERY) {
            (self.counted_at, self.counted) = (Some(Instant::now()), client.in_sync(self.space));
        }
        let (whole, held) = self.counted;
        FarNumbers { stats: *client.stats(), window: client.window(), whole, held, servers: client.servers().collect() }
    }

    /// Pages read from the pool, written to it, and those that it did not take.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.pages_in, self.pages_out, self.pages_declined)
    }
}
