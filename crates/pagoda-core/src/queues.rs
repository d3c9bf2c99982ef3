//! Chunk queues: which chunks of a VM are cold (VMemDirect, section 4.2).
//!
//! 2^m queues hold the resident chunks of one VM, from least recently used (head of the first queue) to
//! most recently used (tail of the last). A page-in appends to the last queue, a touch lifts a chunk from
//! queue i to queue i + 2^(m-1), and aging compresses the 2^m queues into the former 2^(m-1). The queue's
//! number is thus a history of m aging periods, newest in the highest bit, and inside a queue the order
//! of touches is kept: this is what the plain 8-bit histories of earlier work lack.
//!
//! **Cost.** Insert, touch, remove and the next victim are O(1), aging is O(2^m) whatever the size of the
//! VM. For that a chunk stores the queue it was put in and when; each aging since has halved the number.
//! The lists are circular through one sentinel per queue, so unlinking a chunk needs no queue number.
//!
//! **Touched twice in one period.** The paper moves i to i + 2^(m-1) and leaves open what that means in
//! the upper half, where a chunk stands that was already touched, or paged in, since the last aging. Read
//! as a history the bit is set already and the chunk would stay in its queue. But a page-in goes to the
//! last queue, so a chunk that is used again and again within a period would be evicted before every
//! chunk paged in once. Here the sum saturates: the second touch moves the chunk to the tail of the last
//! queue, where it is as recent as a page-in at that moment. Order among such chunks is plain LRU.
//!
//! **Owner.** The engine of the VM alone. Nothing here is stored: after a restart of the daemon all
//! resident chunks begin in the first queue, as in the paper, and the guest sees at worst a few more
//! faults. Nothing allocates after [`ChunkQueues::new`].

mod order;
#[cfg(test)]
mod tests;

pub use order::Heat;

use crate::bits::PageSet;
use crate::units::{ChunkCount, ChunkIdx};

/// The paper's m: bits of history (VMemDirect, section 4.2: "256 queues (m = 8)").
pub const HISTORY_BITS: u32 = 8;
/// 2^m. A queue's number therefore is a `u8`.
pub const QUEUES: usize = 1 << HISTORY_BITS;
/// What a touch adds to the queue's number.
const TOUCHED: u8 = 1 << (HISTORY_BITS - 1);
const FIRST: u8 = 0;
const LAST: u8 = u8::MAX;
const _: () = assert!(LAST as usize == QUEUES - 1);

/// As many bits as a chunk has pages: the set fits the queues, too.
type QueueSet = PageSet;

/// `next` of a chunk that is in no queue.
const ABSENT: u32 = u32::MAX;

/// A chunk's place, or a queue's sentinel.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Node {
    prev: u32,
    next: u32,
    /// The age at which `queue` was true. A difference of 2^32 agings would be misread; with one aging a
    /// second that takes 136 years without a touch.
    stamp: u32,
    queue: u8,
}
// 0.0015 % of the RAM, and four whole nodes a cache line.
const _: () = assert!(size_of::<Node>() == 16);

/// The resident chunks of one VM, ordered by recency of use.
#[derive(Debug)]
pub struct ChunkQueues {
    /// One per chunk, then one sentinel per queue.
    nodes: Box<[Node]>,
    chunks: ChunkCount,
    /// Queues that are not empty.
    occupied: QueueSet,
    lengths: [u32; QUEUES],
    len: ChunkCount,
    age: u32,
}

impl ChunkQueues {
    /// Empty queues for a space of `chunks` chunks.
    pub fn new(chunks: ChunkCount) -> ChunkQueues {
        ChunkQueues::with_age(chunks, 0)
    }

    fn with_age(chunks: ChunkCount, age: u32) -> ChunkQueues {
        let nodes = chunks.0.checked_add(QUEUES as u32).filter(|&nodes| nodes < ABSENT);
        let nodes = nodes.expect("a space has at most SPACE_SIZE_MAX bytes");
        let node = |index| {
            let link = if index < chunks.0 { ABSENT } else { index };
            Node { prev: link, next: link, stamp: age, queue: FIRST }
        };
        ChunkQueues {
            nodes: (0..nodes).map(node).collect(),
            chunks,
            occupied: QueueSet::EMPTY,
            lengths: [0; QUEUES],
            len: ChunkCount::ZERO,
            age,
        }
    }

    /// Bytes that the queues take.
    pub fn bytes(&self) -> usize {
        self.nodes.len() * size_of::<Node>()
    }

    /// The number of chunks in the queues.
    pub fn len(&self) -> ChunkCount {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == ChunkCount::ZERO
    }

    pub fn contains(&self, chunk: ChunkIdx) -> bool {
        self.node(chunk).next != ABSENT
    }

    /// The queue the chunk is in: 0 is the coldest, 255 the hottest.
    pub fn queue_of(&self, chunk: ChunkIdx) -> Option<u8> {
        let node = self.node(chunk);
        (node.next != ABSENT).then(|| self.queue_now(node))
    }

    /// A chunk that is resident from the start, of which nothing is known: the tail of the first queue.
    /// A chunk that was in the queues already is moved.
    pub fn insert_first(&mut self, chunk: ChunkIdx) {
        self.remove(chunk);
        self.link_tail(chunk, FIRST);
    }

    /// A chunk that was paged in: the tail of the last queue. A chunk that was there already is moved.
    pub fn insert_tail_last(&mut self, chunk: ChunkIdx) {
        self.remove(chunk);
        self.link_tail(chunk, LAST);
    }

    /// The chunk was used since it was last looked at. Does nothing, and says so, if it is in no queue:
    /// the sample may be older than the page-out.
    pub fn touch(&mut self, chunk: ChunkIdx) -> bool {
        let Some(queue) = self.queue_of(chunk) else { return false };
        self.unlink(chunk);
        self.link_tail(chunk, queue.saturating_add(TOUCHED));
        true
    }

    /// Takes the chunk out, because it is paged out. False if it was in no queue.
    pub fn remove(&mut self, chunk: ChunkIdx) -> bool {
        let present = self.contains(chunk);
        if present {
            self.unlink(chunk);
        }
        present
    }

    /// Ends a period: queues 2i and 2i + 1 become queue i, in this order.
    pub fn age(&mut self) {
        self.age = self.age.wrapping_add(1);
        self.append(1, 0);
        for to in 1..TOUCHED {
            self.append(2 * to, to);
            self.append(2 * to + 1, to);
        }
    }

    fn node(&self, chunk: ChunkIdx) -> &Node {
        assert!(chunk.0 < self.chunks.0, "chunk {chunk} is beyond the space of {} chunks", self.chunks);
        &self.nodes[chunk.as_usize()]
    }

    fn queue_now(&self, node: &Node) -> u8 {
        node.queue.checked_shr(self.age.wrapping_sub(node.stamp)).unwrap_or(FIRST)
    }

    fn sentinel(&self, queue: u8) -> u32 {
        self.chunks.0 + u32::from(queue)
    }

    fn link_tail(&mut self, chunk: ChunkIdx, queue: u8) {
        let sentinel = self.sentinel(queue);
        let tail = self.nodes[sentinel as usize].prev;
        self.nodes[chunk.as_usize()] = Node { prev: tail, next: sentinel, stamp: self.age, queue };
        self.nodes[tail as usize].next = chunk.0;
        self.nodes[sentinel as usize].prev = chunk.0;
        self.occupied.set(queue);
        self.lengths[usize::from(queue)] += 1;
        self.len += ChunkCount(1);
    }

    fn unlink(&mut self, chunk: ChunkIdx) {
        let node = self.nodes[chunk.as_usize()];
        let queue = self.queue_now(&node);
        self.nodes[node.prev as usize].next = node.next;
        self.nodes[node.next as usize].prev = node.prev;
        self.nodes[chunk.as_usize()].next = ABSENT;
        // Only a sentinel can be on both sides.
        if node.prev == node.next {
            self.occupied.clear((node.next - self.chunks.0) as u8);
        }
        self.lengths[usize::from(queue)] -= 1;
        self.len -= ChunkCount(1);
    }

    /// Moves all of `from` behind the tail of `to`.
    fn append(&mut self, from: u8, to: u8) {
        if !self.occupied.contains(from) {
            return;
        }
        let (source, target) = (self.sentinel(from), self.sentinel(to));
        let Node { next: head, prev: tail, .. } = self.nodes[source as usize];
        let before = self.nodes[target as usize].prev;
        self.nodes[before as usize].next = head;
        self.nodes[head as usize].prev = before;
        self.nodes[tail as usize].next = target;
        self.nodes[target as usize].prev = tail;
        self.nodes[source as usize].next = source;
        self.nodes[source as usize].prev = source;
        self.occupied.clear(from);
        self.occupied.set(to);
        self.lengths[usize::from(to)] += std::mem::take(&mut self.lengths[usize::from(from)]);
    }
}
