//! One remembered place: single pages that may become a stream, or a stream of whole chunks.

use crate::units::{ChunkCount, ChunkIdx, PageCount, PageIdx};

/// A fault this many pages after an entry continues it (measured: `adaptive rule`, 2 vCPUs, virtio disk).
pub const CONTINUES_WITHIN: u64 = 16;
/// The price of a whole chunk in single-page faults: 450 us against 25 us, measured on the same machine.
pub const CHUNK_COST_PAGES: u64 = 18;

/// How the guest touched the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Up,
    Down,
}

/// Continuations after which a run may switch ("two such faults").
const RUN_EARLY: i16 = 2;
/// More of them where other faults of the same chunk are remembered: by chance these come as one in seven
/// each, and the chunk must not be read whole for it.
const RUN_SCATTERED: i16 = 5;
/// Without a promise: the run has paid for single pages what the chunk costs.
const RUN_LATE: i16 = CHUNK_COST_PAGES as i16;

/// Chunks read ahead: at the switch, and at most after as many hits. Wider brought nothing (measured: 1,
/// 4 and 8 within noise, 0 is 7 % slower).
const WINDOW_MIN: u8 = 2;
pub(super) const WINDOW_MAX: u8 = 4;

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// The fault count at the last use.
    pub used_at: u32,
    pub sequence: Sequence,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Sequence {
    Single(Single),
    Whole(Whole),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    /// Where the sequence has been: another vCPU, or a late message.
    Within,
    /// The sequence goes on.
    Ahead,
}

impl Entry {
    pub fn new(page: PageIdx, scattered: bool, now: u32) -> Entry {
        let needed = if scattered { RUN_SCATTERED } else { RUN_EARLY };
        let single = Single { low: page, high: page, faults: 1, net: 0, needed };
        Entry { used_at: now, sequence: Sequence::Single(single) }
    }

    pub fn is_whole(&self) -> bool {
        matches!(self.sequence, Sequence::Whole(_))
    }
}

impl Sequence {
    pub fn relation(&self, page: PageIdx) -> Option<Relation> {
        match self {
            Sequence::Single(single) => single.relation(page),
            Sequence::Whole(whole) => whole.relation(page),
        }
    }

    pub fn is_single_in(&self, chunk: ChunkIdx) -> bool {
        match self {
            Sequence::Single(single) => single.low.chunk() <= chunk && chunk <= single.high.chunk(),
            Sequence::Whole(_) => false,
        }
    }
}

/// A run of faults answered page by page. Only faults beyond its ends are progress, so that vCPUs which
/// share a walk may overtake each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Single {
    pub low: PageIdx,
    pub high: PageIdx,
    faults: u16,
    /// Continuations upwards less those downwards.
    net: i16,
    needed: i16,
}

impl Single {
    fn relation(&self, page: PageIdx) -> Option<Relation> {
        if self.low <= page && page <= self.high {
            return Some(Relation::Within);
        }
        let distance = if page > self.high { page - self.high } else { self.low - page };
        (distance.0 <= CONTINUES_WITHIN).then_some(Relation::Ahead)
    }

    /// Takes a related fault in.
    pub fn add(&mut self, page: PageIdx) {
        self.faults = self.faults.saturating_add(1);
        if page > self.high {
            self.high = page;
            self.net = self.net.saturating_add(1);
        } else if page < self.low {
            self.low = page;
            self.net = self.net.saturating_sub(1);
        }
    }

    /// The stream this run has become with the fault on `page`, if it is time.
    pub fn switch(&self, page: PageIdx, early: bool) -> Option<Whole> {
        let needed = if early { self.needed } else { RUN_LATE };
        if self.net.abs() < needed || !self.pays_from(page) {
            return None;
        }
        let direction = self.direction();
        let chunk = page.chunk();
        let writes = Writes::default();
        Some(Whole { at: chunk, frontier: chunk, direction, window: WINDOW_MIN, on_trial: early, writes })
    }

    /// Whether the run could have switched early, and then ended before a chunk would have paid.
    pub fn ended_short(&self) -> bool {
        (RUN_EARLY..RUN_LATE).contains(&self.net.abs())
    }

    fn direction(&self) -> Direction {
        if self.net >= 0 { Direction::Up } else { Direction::Down }
    }

    /// Whether the faults to expect in the rest of the chunk, at the stride so far, cost more than the
    /// chunk: rest / stride >= price, without the divisions.
    fn pays_from(&self, page: PageIdx) -> bool {
        let chunk = page.chunk();
        let rest = match self.direction() {
            Direction::Up => chunk.last_page() - page,
            Direction::Down => page - chunk.first_page(),
        };
        let span = self.high - self.low;
        rest.0 * u64::from(self.faults - 1) >= CHUNK_COST_PAGES * span.0
    }
}

/// A stream that brings in whole chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole {
    /// The stream is using this chunk.
    at: ChunkIdx,
    /// The last chunk asked for; `at` if nothing is read ahead.
    pub frontier: ChunkIdx,
    pub direction: Direction,
    window: u8,
    /// Switched early, and has not come to a second chunk yet.
    pub on_trial: bool,
    pub writes: Writes,
}

impl Whole {
    fn relation(&self, page: PageIdx) -> Option<Relation> {
        let within = PageCount(CONTINUES_WITHIN);
        let ahead = match self.direction {
            Direction::Up => page > self.at.last_page() && page <= self.frontier.last_page() + within,
            Direction::Down => page < self.at.first_page() && page + within >= self.frontier.first_page(),
        };
        if page.chunk() == self.at { Some(Relation::Within) } else { ahead.then_some(Relation::Ahead) }
    }

    /// Chunks from `self.at` on to `chunk`, in the stream's direction; negative if behind.
    fn steps_to(&self, chunk: ChunkIdx) -> i64 {
        let steps = i64::from(chunk.0) - i64::from(self.at.0);
        match self.direction {
            Direction::Up => steps,
            Direction::Down => -steps,
        }
    }

    /// Whether the chunk is read ahead and not come to.
    pub fn has_ahead(&self, chunk: ChunkIdx) -> bool {
        (1..=self.steps_to(self.frontier)).contains(&self.steps_to(chunk))
    }

    /// Whether the stream is at the chunk or was there lately; a write may come some chunks after the read.
    pub fn has_passed(&self, chunk: ChunkIdx) -> bool {
        (-i64::from(WINDOW_MAX)..=0).contains(&self.steps_to(chunk))
    }

    /// Moves on to `chunk`, which is ahead. Returns how many of the chunks on the way, the new one
    /// included, had been read ahead.
    pub fn advance(&mut self, chunk: ChunkIdx) -> u8 {
        let (steps, read_ahead) = (self.steps_to(chunk), self.steps_to(self.frontier));
        self.at = chunk;
        if steps > read_ahead {
            self.frontier = chunk;
        }
        steps.min(read_ahead) as u8
    }

    /// Moves on to `chunk`, which was read ahead and is used: more may be.
    pub fn hit(&mut self, chunk: ChunkIdx) -> u8 {
        self.window = (self.window + 1).min(WINDOW_MAX);
        self.advance(chunk)
    }

    /// How many chunks more would fill the window.
    pub fn wanted(&self) -> u8 {
        (i64::from(self.window) - self.steps_to(self.frontier)).max(0) as u8
    }

    /// Notes that `count` chunks more are read ahead.
    pub fn extend(&mut self, count: u8) {
        let count = ChunkCount(u32::from(count));
        match self.direction {
            Direction::Up => self.frontier = self.frontier + count,
            Direction::Down => self.frontier = self.frontier - count,
        }
    }
}

/// Whether a stream writes what it reads. A chunk mapped writable in error is written out in vain (450 us),
/// one not mapped so costs a fault (about 10 us): two chunks in a row must have been written, and the
/// question is asked again now and then.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Writes {
    confidence: u8,
    trusted: u8,
}

impl Writes {
    const SEEN: u8 = 2;
    const TRUSTED_FROM: u8 = 3;
    /// Chunks mapped writable on trust between two that are not.
    const TRUSTED_MAX: u8 = 15;

    /// A chunk of the stream was written.
    pub fn seen(&mut self) {
        self.confidence = (self.confidence + Writes::SEEN).min(Writes::TRUSTED_FROM);
    }

    /// Whether to map the next chunk writable.
    pub fn decide(&mut self, access: Access) -> bool {
        if access == Access::Write {
            self.seen();
            return true;
        }
        let trust = self.confidence >= Writes::TRUSTED_FROM && self.trusted < Writes::TRUSTED_MAX;
        if trust {
            self.trusted += 1;
        } else {
            self.trusted = 0;
            self.confidence = self.confidence.saturating_sub(1);
        }
        trust
    }
}
