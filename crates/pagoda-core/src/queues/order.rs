//! Reading the chunk queues: victims, the division into hot and cold, and heat for display.

use std::cmp::Ordering;

use super::{ABSENT, ChunkQueues, FIRST, HISTORY_BITS, LAST, QUEUES};
use crate::chance;
use crate::units::{ChunkCount, ChunkIdx};

/// Which side of a division a chunk is on (VMemDirect, section 4.2: "memory division on VM migration").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heat {
    /// The chunk goes to physical memory.
    Hot,
    /// The chunk goes to private swap.
    Cold,
}

/// A limit between hot and cold.
struct Cut {
    /// The queue it goes through; what is in lower queues is cold, in higher ones hot.
    queue: u8,
    /// `listed` has the cold chunks of that queue, else the hot ones.
    lists_cold: bool,
    listed: ChunkSet,
}

/// Chunks of one space, a bit each.
struct ChunkSet(Box<[u64]>);

impl ChunkSet {
    fn new(chunks: ChunkCount) -> ChunkSet {
        ChunkSet(vec![0; chunks.as_usize().div_ceil(64)].into())
    }

    fn insert(&mut self, chunk: ChunkIdx) {
        self.0[chunk.as_usize() / 64] |= 1 << (chunk.0 % 64);
    }

    fn contains(&self, chunk: ChunkIdx) -> bool {
        self.0[chunk.as_usize() / 64] & (1 << (chunk.0 % 64)) != 0
    }
}

/// Draws of [`ChunkQueues::random_victim`] before it takes the coldest chunk instead. With a quarter of
/// the chunks resident, one call in 10^8 does.
const RANDOM_DRAWS_MAX: u32 = 64;

impl ChunkQueues {
    /// The coldest chunk: the head of the first queue that is not empty.
    pub fn victim(&self) -> Option<ChunkIdx> {
        self.head_from(0)
    }

    /// The chunk that follows `after` in the order of eviction, for a caller that has to pass over a busy
    /// one. `None` after the hottest chunk, and if `after` is in no queue.
    pub fn victim_from(&self, after: ChunkIdx) -> Option<ChunkIdx> {
        match self.node(after).next {
            ABSENT => None,
            next if next < self.chunks.0 => Some(ChunkIdx(next)),
            sentinel => self.head_from(sentinel - self.chunks.0 + 1),
        }
    }

    /// All chunks in the order of eviction, coldest first.
    pub fn iter(&self) -> impl Iterator<Item = ChunkIdx> + '_ {
        std::iter::successors(self.victim(), |&chunk| self.victim_from(chunk))
    }

    /// The next `n` victims, as they stand.
    pub fn peek_victims(&self, n: ChunkCount) -> impl Iterator<Item = ChunkIdx> + '_ {
        self.iter().take(n.as_usize())
    }

    /// Splits the chunks so that the `hot` hottest of them stay in physical memory (all, if there are fewer). In the order of
    /// chunk numbers: one pass over the nodes as they lie in memory, because following the lists of a large VM misses the
    /// cache at every step. Only in the queue that the limit cuts, the shorter part of its list is followed.
    pub fn divide(&self, hot: ChunkCount) -> impl Iterator<Item = (ChunkIdx, Heat)> + '_ {
        let cut = self.cut(hot);
        self.chunks.iter().filter_map(move |chunk| {
            let queue = self.queue_of(chunk)?;
            let cold = match queue.cmp(&cut.queue) {
                Ordering::Less => true,
                Ordering::Greater => false,
                Ordering::Equal => cut.listed.contains(chunk) == cut.lists_cold,
            };
            Some((chunk, if cold { Heat::Cold } else { Heat::Hot }))
        })
    }

    /// Where the `hot` hottest chunks begin.
    fn cut(&self, hot: ChunkCount) -> Cut {
        let mut cold = self.len.saturating_sub(hot).0;
        let mut queue = FIRST;
        while queue < LAST && cold >= self.lengths[usize::from(queue)] {
            cold -= self.lengths[usize::from(queue)];
            queue += 1;
        }
        let hot = self.lengths[usize::from(queue)] - cold;
        let lists_cold = cold <= hot;
        let mut listed = ChunkSet::new(self.chunks);
        let mut at = self.sentinel(queue);
        for _ in 0..cold.min(hot) {
            let node = &self.nodes[at as usize];
            at = if lists_cold { node.next } else { node.prev };
            listed.insert(ChunkIdx(at));
        }
        Cut { queue, lists_cold, listed }
    }

    /// A victim without regard to heat, each chunk equally likely: the fallback for when the access
    /// pattern defeats recency (ESX, section 3.3, evicts at random for this reason). `random` is the
    /// caller's, uniform over all of `u64`.
    pub fn random_victim(&self, random: u64) -> Option<ChunkIdx> {
        if self.is_empty() {
            return None;
        }
        let drawn = (0..RANDOM_DRAWS_MAX)
            .map(|draw| {
                let bits = mix(random.wrapping_add(u64::from(draw)));
                // The high half of the product is uniform over the chunks, without a division.
                ChunkIdx(((u128::from(bits) * u128::from(self.chunks.0)) >> 64) as u32)
            })
            .find(|&chunk| self.contains(chunk));
        drawn.or_else(|| self.victim())
    }

    /// The number of chunks in each queue, coldest first.
    pub fn histogram(&self) -> &[u32; QUEUES] {
        &self.lengths
    }

    /// Chunks by when they were last used. Entry 0: in the current period; entry k: k periods ago;
    /// the last entry: not within the history.
    pub fn chunks_by_idle_periods(&self) -> [ChunkCount; HISTORY_BITS as usize + 1] {
        let mut by_periods = [ChunkCount::ZERO; HISTORY_BITS as usize + 1];
        for (queue, &length) in self.lengths.iter().enumerate() {
            // The highest bit set in the queue's number is the last period of use.
            let periods = (queue as u8).leading_zeros();
            by_periods[periods as usize] += ChunkCount(length);
        }
        by_periods
    }

    fn head_from(&self, queue: u32) -> Option<ChunkIdx> {
        let queue = u8::try_from(self.occupied.next_set(queue as u16)).ok()?;
        Some(ChunkIdx(self.nodes[self.sentinel(queue) as usize].next))
    }
}

/// A bijection of `u64` whose values for consecutive arguments look unrelated.
fn mix(seed: u64) -> u64 {
    chance::mix(seed.wrapping_mul(chance::STEP))
}
