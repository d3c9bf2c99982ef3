//! Reading the chunk queues: victims, the division into hot and cold, and heat for display.

use super::{ABSENT, ChunkQueues, HISTORY_BITS, QUEUES};
use crate::units::{ChunkCount, ChunkIdx};

/// Which side of a division a chunk is on (VMemDirect, section 4.2: "memory division on VM migration").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heat {
    /// To physical memory.
    Hot,
    /// To private swap.
    Cold,
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

    /// Splits the chunks, coldest first, so that `hot` of them stay in physical memory (all, if there are
    /// fewer).
    pub fn divide(&self, hot: ChunkCount) -> impl Iterator<Item = (ChunkIdx, Heat)> + '_ {
        let cold = self.len.saturating_sub(hot).as_usize();
        self.iter().enumerate().map(move |(nth, chunk)| (chunk, if nth < cold { Heat::Cold } else { Heat::Hot }))
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

/// A bijection of `u64` whose values for consecutive arguments look unrelated: the finalizer of
/// Steele's SplitMix64 generator.
fn mix(seed: u64) -> u64 {
    let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
