//! The peer of the `queues` bench: 8-bit access histories, scanned for each decision.
//!
//! This is the LRU approximation of S-memV, which VMemDirect compares its chunk queues with (section 5.5,
//! figure 9): a byte per chunk, shifted right once a period, its highest bit set on access; the victim is
//! the resident chunk with the smallest byte. The daemon does not use it.

use pagoda_core::queues::Heat;
use pagoda_core::units::{ChunkCount, ChunkIdx};

const ACCESSED: u8 = 0x80;

/// An access history per chunk of a space, all resident at first.
#[derive(Debug)]
pub struct Histories {
    histories: Box<[u8]>,
    resident: Box<[bool]>,
}

impl Histories {
    pub fn new(chunks: ChunkCount) -> Histories {
        let len = chunks.as_usize();
        Histories { histories: vec![0; len].into(), resident: vec![true; len].into() }
    }

    /// Ends a period: every history moves on by one, O(chunks).
    pub fn age(&mut self) {
        for history in &mut self.histories {
            *history >>= 1;
        }
    }

    /// The chunk was used in this period.
    pub fn touch(&mut self, chunk: ChunkIdx) {
        self.histories[chunk.as_usize()] |= ACCESSED;
    }

    /// The chunk was paged in.
    pub fn insert(&mut self, chunk: ChunkIdx) {
        self.resident[chunk.as_usize()] = true;
        self.histories[chunk.as_usize()] = ACCESSED;
    }

    /// The chunk was paged out.
    pub fn remove(&mut self, chunk: ChunkIdx) {
        self.resident[chunk.as_usize()] = false;
    }

    /// The resident chunk with the smallest history, the lowest number among equals, O(chunks).
    pub fn victim(&self) -> Option<ChunkIdx> {
        self.resident_histories().min_by_key(|&(_, history)| history).map(|(chunk, _)| chunk)
    }

    /// Splits the resident chunks so that `hot` of them stay in physical memory: one pass counts the
    /// histories and finds the limit, the second, lazy one assigns. In the order of chunk numbers.
    pub fn divide(&self, hot: ChunkCount) -> impl Iterator<Item = (ChunkIdx, Heat)> + '_ {
        let mut counts = [0u32; 256];
        for (_, history) in self.resident_histories() {
            counts[usize::from(history)] += 1;
        }
        let mut cold_left = counts.iter().sum::<u32>().saturating_sub(hot.0);
        let mut cold_of = counts;
        for cold in &mut cold_of {
            *cold = (*cold).min(cold_left);
            cold_left -= *cold;
        }
        self.resident_histories().map(move |(chunk, history)| {
            let cold = &mut cold_of[usize::from(history)];
            let heat = if *cold > 0 { Heat::Cold } else { Heat::Hot };
            *cold = cold.saturating_sub(1);
            (chunk, heat)
        })
    }

    fn resident_histories(&self) -> impl Iterator<Item = (ChunkIdx, u8)> + '_ {
        let numbered = self.histories.iter().zip(&self.resident).zip(0..);
        numbered.filter(|&((_, &resident), _)| resident).map(|((&history, _), chunk)| (ChunkIdx(chunk), history))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_chunk_is_the_victim() {
        let mut peer = Histories::new(ChunkCount(4));
        [0, 2, 3].into_iter().for_each(|chunk| peer.touch(ChunkIdx(chunk)));
        peer.age();
        [0, 1].into_iter().for_each(|chunk| peer.touch(ChunkIdx(chunk)));
        let mut order = Vec::new();
        while let Some(victim) = peer.victim() {
            order.push(victim.0);
            peer.remove(victim);
        }
        assert_eq!(order, [2, 3, 1, 0]);
        peer.insert(ChunkIdx(2));
        assert_eq!(peer.victim(), Some(ChunkIdx(2)));
    }

    #[test]
    fn division_keeps_the_most_recently_used() {
        let mut peer = Histories::new(ChunkCount(6));
        peer.remove(ChunkIdx(5));
        [1, 2, 3].into_iter().for_each(|chunk| peer.touch(ChunkIdx(chunk)));
        let hot = |hot: u32| -> Vec<u32> {
            let sides = peer.divide(ChunkCount(hot));
            sides.filter(|&(_, heat)| heat == Heat::Hot).map(|(chunk, _)| chunk.0).collect()
        };
        assert_eq!(hot(0), [0; 0]);
        assert_eq!(hot(2), [2, 3]);
        assert_eq!(hot(4), [1, 2, 3, 4]);
        assert_eq!(hot(9), [0, 1, 2, 3, 4]);
    }
}
