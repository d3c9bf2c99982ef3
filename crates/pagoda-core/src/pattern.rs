//! Page-in adapts: a single page, or its whole chunk with read-ahead, from the pattern of faults alone.
//!
//! VMemDirect (section 5.4) lost 20 % of a sequential load by deferring the rest of each chunk, and whole
//! chunks make a random load 40 times slower, so neither is right for all. [`Pattern`] remembers
//! [`STREAMS`] entries of recent faults. Faults that go on within [`CONTINUES_WITHIN`] pages make an entry a
//! *stream*, up or down; two of them in a row switch it to whole chunks. Filling a zero page asks the same
//! question and takes the same answer.
//!
//! **What keeps it close to the better fixed choice.**
//! - A whole chunk must be worth its price ([`CHUNK_COST_PAGES`]) at the stream's stride, in what is left
//!   of the chunk: a stride of 16, or the last pages of a chunk, stay single.
//! - Whether two continuations promise more is learnt ([`Promise`]): where runs end early (16 KiB records
//!   at random), a stream must first have paid for single pages what its chunk costs.
//! - Random use of one chunk continues some fault by chance. An entry in a chunk where others are
//!   remembered needs more evidence, and a chunk can hold [`STREAMS_PER_CHUNK`] entries only.
//! - Read-ahead is paid from a budget that only use fills again ([`Budget`]), so what is read in vain is at
//!   most a twelfth of what was used, plus the initial budget.
//! - Streams of whole chunks fault seldom, and are not driven out by random faults in between.
//!
//! In the simulation of the tests (25 us a page, 450 us a chunk) sweeps, strides, random and mixed loads and
//! records up to 16 or from 256 pages cost at most 10 % more than the better fixed choice, mixed loads less
//! than either. Records of 20 to 128 pages cost up to 20 % more: finding each takes two faults already.
//!
//! Everything here is a hint: a wrong answer costs time, never content. One instance per VM (or per shard
//! of it), owned by its engine; no clock, nothing allocated, nothing stored.

mod stream;
#[cfg(test)]
mod tests;

use crate::units::{ChunkCount, ChunkIdx, PageIdx};
pub use stream::{Access, CHUNK_COST_PAGES, CONTINUES_WITHIN, Direction};
use stream::{Entry, Relation, Sequence, Whole};

/// Remembered entries (measured: `adaptive rule`, 2 vCPUs, virtio disk; sweeps and random use both within
/// noise of the better fixed choice).
pub const STREAMS: usize = 8;
/// Two entries in one chunk allow for two vCPUs that walk it; more would match random faults by chance.
const STREAMS_PER_CHUNK: usize = 2;
/// Faults after which an idle stream of whole chunks gives its entry to a new one. A stream comes back
/// once a chunk, so this allows four random faults to each of its pages; a dead one costs newcomers at most
/// 25 ms.
const IDLE_FAULTS_MAX: u32 = 1024;

/// What to bring in for a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageIn {
    /// The faulting page alone.
    Page,
    /// The whole chunk, and chunks after it that no fault waits for.
    Chunk {
        read_ahead: ReadAhead,
        /// Map it writable at once: the stream writes what it reads, and a write-protection fault a chunk
        /// is saved.
        writable: bool,
    },
}

impl PageIn {
    /// The answer of somebody who always brings in the whole chunk.
    pub fn at_least_chunk(self, chunk: ChunkIdx, access: Access) -> PageIn {
        match self {
            PageIn::Page => chunk_alone(chunk, access),
            chunk @ PageIn::Chunk { .. } => chunk,
        }
    }
}

/// Chunks to read ahead of a stream, and to leave unmapped so that the first touch is seen. Those that are
/// resident already, or have no room, are passed over without a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAhead {
    /// The chunk before the first one to read, seen from the stream.
    pub after: ChunkIdx,
    pub count: u8,
    pub direction: Direction,
}

impl ReadAhead {
    /// In the order the stream will come to them.
    pub fn chunks(self) -> impl Iterator<Item = ChunkIdx> {
        (1..=u32::from(self.count)).map(move |step| match self.direction {
            Direction::Up => self.after + ChunkCount(step),
            Direction::Down => self.after - ChunkCount(step),
        })
    }
}

/// The pattern of one VM's faults.
#[derive(Debug)]
pub struct Pattern {
    chunks: ChunkCount,
    entries: [Option<Entry>; STREAMS],
    /// Counts faults, and wraps: only differences matter.
    now: u32,
    promise: Promise,
    budget: Budget,
}

impl Pattern {
    /// For a space of `chunks` chunks, beyond which nothing is read ahead.
    pub fn new(chunks: ChunkCount) -> Pattern {
        Pattern { chunks, entries: [None; STREAMS], now: 0, promise: Promise::new(), budget: Budget::new() }
    }

    /// A fault on a page whose content is elsewhere (or zero). Call it for demand faults only.
    pub fn on_fault(&mut self, page: PageIdx, access: Access) -> PageIn {
        self.now = self.now.wrapping_add(1);
        let Some((index, relation)) = self.find(page) else {
            self.remember(page);
            return PageIn::Page;
        };
        let entry = self.entries[index].as_mut().expect("found entries are taken");
        entry.used_at = self.now;
        match &mut entry.sequence {
            Sequence::Whole(_) if relation == Relation::Within => chunk_alone(page.chunk(), access),
            Sequence::Whole(whole) => {
                let redeemed = whole.advance(page.chunk());
                self.come_to_next(index, redeemed, access)
            }
            Sequence::Single(single) => {
                single.add(page);
                let early = self.promise.is_good();
                let Some(whole) = single.switch(page, early) else { return PageIn::Page };
                if !early {
                    self.promise.kept_late();
                }
                entry.sequence = Sequence::Whole(whole);
                self.bring_in(index, access)
            }
        }
    }

    /// The first touch of a chunk that was read ahead, also while that read is under way (the touch clears
    /// its mark). The answer is always [`PageIn::Chunk`]: how to map it, and what to read ahead next.
    pub fn on_read_ahead_hit(&mut self, chunk: ChunkIdx, access: Access) -> PageIn {
        let stream = self.stream_towards(chunk);
        let Some(index) = stream else { return chunk_alone(chunk, access) };
        let redeemed = whole_in(&mut self.entries[index], self.now).hit(chunk);
        self.come_to_next(index, redeemed, access)
    }

    /// A chunk that was read ahead is evicted untouched: its stream has stopped, and starts over with
    /// single pages if it comes back.
    pub fn on_read_ahead_miss(&mut self, chunk: ChunkIdx) {
        if let Some(index) = self.stream_towards(chunk) {
            self.forget(index);
        }
    }

    /// The first write to a chunk that a stream had brought in not writable.
    pub fn on_chunk_written(&mut self, chunk: ChunkIdx) {
        let whole = self.entries.iter_mut().flatten().find_map(|entry| match &mut entry.sequence {
            Sequence::Whole(whole) if whole.has_passed(chunk) => Some(whole),
            _ => None,
        });
        if let Some(whole) = whole {
            whole.writes.seen();
        }
    }

    /// A stream came to another chunk; `redeemed` of those it passed had been read ahead.
    fn come_to_next(&mut self, index: usize, redeemed: u8, access: Access) -> PageIn {
        self.budget.used(redeemed);
        if std::mem::take(&mut whole_in(&mut self.entries[index], self.now).on_trial) {
            self.promise.kept_early();
        }
        self.bring_in(index, access)
    }

    /// Answers for the chunk that the stream is at, and fills its window.
    fn bring_in(&mut self, index: usize, access: Access) -> PageIn {
        let last = self.chunks.0.saturating_sub(1);
        let whole = whole_in(&mut self.entries[index], self.now);
        let room = match whole.direction {
            Direction::Up => last.saturating_sub(whole.frontier.0),
            Direction::Down => whole.frontier.0,
        };
        let wanted = u32::from(whole.wanted()).min(room);
        let count = self.budget.stake(wanted as u8);
        let read_ahead = ReadAhead { after: whole.frontier, count, direction: whole.direction };
        whole.extend(count);
        PageIn::Chunk { read_ahead, writable: whole.writes.decide(access) }
    }

    /// The place that a fault belongs to: streams of whole chunks first, then the latest.
    fn find(&self, page: PageIdx) -> Option<(usize, Relation)> {
        let related = self.entries.iter().enumerate().filter_map(|(index, entry)| {
            let entry = entry.as_ref()?;
            let relation = entry.sequence.relation(page)?;
            Some((entry.is_whole(), self.idle_faults(entry), index, relation))
        });
        let best = related.min_by_key(|&(whole, idle, ..)| (!whole, idle));
        best.map(|(_, _, index, relation)| (index, relation))
    }

    /// The stream that has read `chunk` ahead and not come to it.
    fn stream_towards(&self, chunk: ChunkIdx) -> Option<usize> {
        self.entries.iter().position(|entry| match entry {
            Some(Entry { sequence: Sequence::Whole(whole), .. }) => whole.has_ahead(chunk),
            _ => false,
        })
    }

    fn idle_faults(&self, entry: &Entry) -> u32 {
        self.now.wrapping_sub(entry.used_at)
    }

    /// Makes a fault that belongs to no entry a new one.
    fn remember(&mut self, page: PageIdx) {
        let neighbours = || {
            let taken = self.entries.iter().enumerate().filter_map(|(index, entry)| Some((index, entry.as_ref()?)));
            taken.filter(|(_, entry)| entry.sequence.is_single_in(page.chunk()))
        };
        let scattered = neighbours().next().is_some();
        let index = if neighbours().count() >= STREAMS_PER_CHUNK {
            neighbours().max_by_key(|(_, entry)| self.idle_faults(entry)).map(|(index, _)| index)
        } else {
            self.entries.iter().enumerate().max_by_key(|(_, entry)| self.readiness(entry)).map(|(index, _)| index)
        };
        let index = index.expect("there are places");
        self.forget(index);
        self.entries[index] = Some(Entry::new(page, scattered, self.now));
    }

    /// The order in which entries are given up: free ones, idle streams, the longest unused.
    fn readiness(&self, entry: &Option<Entry>) -> (u8, u32) {
        match entry {
            None => (3, 0),
            Some(entry) => match (entry.is_whole(), self.idle_faults(entry)) {
                (true, idle) if idle > IDLE_FAULTS_MAX => (2, idle),
                (false, idle) => (1, idle),
                (true, idle) => (0, idle),
            },
        }
    }

    /// Gives an entry up, and learns from how it ended.
    fn forget(&mut self, index: usize) {
        match self.entries[index].take().map(|entry| entry.sequence) {
            Some(Sequence::Whole(whole)) if whole.on_trial => self.promise.broken_early(),
            Some(Sequence::Single(single)) if single.ended_short() => self.promise.broken_late(),
            _ => {}
        }
    }
}

/// The stream of whole chunks that is known to have this entry, now in use.
fn whole_in(entry: &mut Option<Entry>, now: u32) -> &mut Whole {
    match entry {
        Some(Entry { used_at, sequence: Sequence::Whole(whole) }) => {
            *used_at = now;
            whole
        }
        _ => unreachable!("only a stream of whole chunks comes to a next chunk"),
    }
}

/// The answer that says no more than "this chunk".
fn chunk_alone(chunk: ChunkIdx, access: Access) -> PageIn {
    let read_ahead = ReadAhead { after: chunk, count: 0, direction: Direction::Up };
    PageIn::Chunk { read_ahead, writable: access == Access::Write }
}

/// How likely a run of faults that could switch early goes on for as long as a chunk costs.
///
/// A moving average. Runs that stay single are seen to their end and weigh much. A stream that switched
/// early and never reached its second chunk weighs little: it may have used most of the first. The weights
/// were chosen with the simulation in the tests, for the least cost over records of 2 to 2000 pages.
#[derive(Clone, Copy, Debug)]
struct Promise(u16);

impl Promise {
    const GOOD: u16 = 1 << 15;
    const LATE_KEPT_SHIFT: u32 = 2;
    const LATE_BROKEN_SHIFT: u32 = 3;
    const EARLY_KEPT_SHIFT: u32 = 3;
    const EARLY_BROKEN_SHIFT: u32 = 5;

    /// Good for about a dozen disappointments.
    fn new() -> Promise {
        Promise(Promise::GOOD + Promise::GOOD / 2)
    }

    fn is_good(self) -> bool {
        self.0 >= Promise::GOOD
    }

    fn kept_late(&mut self) {
        self.0 += (u16::MAX - self.0) >> Promise::LATE_KEPT_SHIFT;
    }

    fn kept_early(&mut self) {
        self.0 += (u16::MAX - self.0) >> Promise::EARLY_KEPT_SHIFT;
    }

    fn broken_late(&mut self) {
        self.0 -= self.0 >> Promise::LATE_BROKEN_SHIFT;
    }

    fn broken_early(&mut self) {
        self.0 -= self.0 >> Promise::EARLY_BROKEN_SHIFT;
    }
}

/// What may be read ahead, in twelfths of a chunk: a chunk read ahead is staked, returned when its stream
/// gets there, and every chunk a stream uses earns one.
#[derive(Clone, Copy, Debug)]
struct Budget(u32);

impl Budget {
    /// At most a twelfth is wasted, within the tenth by which we may be worse than the better fixed choice.
    const CHUNK: u32 = 12;
    const INITIAL: u32 = 8 * Budget::CHUNK;
    /// Every stream at its widest.
    const MAX: u32 = STREAMS as u32 * stream::WINDOW_MAX as u32 * Budget::CHUNK;

    fn new() -> Budget {
        Budget(Budget::INITIAL)
    }

    /// Takes as many of `wanted` chunks as there is budget for.
    fn stake(&mut self, wanted: u8) -> u8 {
        let granted = u32::from(wanted).min(self.0 / Budget::CHUNK);
        self.0 -= granted * Budget::CHUNK;
        granted as u8
    }

    /// A stream came to a chunk and used it; `redeemed` of the chunks it passed had been staked.
    fn used(&mut self, redeemed: u8) {
        self.0 = (self.0 + u32::from(redeemed) * Budget::CHUNK + 1).min(Budget::MAX);
    }
}
