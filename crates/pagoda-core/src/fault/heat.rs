//! In which order the chunks of a VM go to another host.
//!
//! The hot ones go first (VMemDirect, section 4.2), because what comes first gets the DRAM there. Chunks in swap go in
//! the order of their blocks, so that the disk reads forward.

use crate::units::{ChunkCount, ChunkIdx};

use super::machine::Machine;

/// Each chunk of a VM once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkOrder {
    /// Those with pages in DRAM, the hottest first.
    pub in_dram: Vec<ChunkIdx>,
    /// Others with pages in swap, in ascending order.
    pub in_swap: Vec<ChunkIdx>,
    /// All others, of which nothing is known or which are zeros, in ascending order.
    pub others: Vec<ChunkIdx>,
}

impl ChunkOrder {
    /// Gives what is in DRAM first, then what is in swap, then the others.
    pub fn hot_first(&self) -> Vec<ChunkIdx> {
        [&self.in_dram[..], &self.in_swap, &self.others].concat()
    }

    /// Into DRAM of so many chunks: it is filled with the hottest, and with the first of those in swap only if it has room for them
    /// too. Within that, chunks of both kinds take turns, so that the disk reads while the network sends what is in DRAM.
    pub fn into_dram(&self, room: ChunkCount) -> Vec<ChunkIdx> {
        let room = room.as_usize();
        let (hot, warm) = self.in_dram.split_at(room.min(self.in_dram.len()));
        let (first, rest) = self.in_swap.split_at((room - hot.len()).min(self.in_swap.len()));
        let mut order = Vec::with_capacity(self.in_dram.len() + self.in_swap.len() + self.others.len());
        take_turns(hot, first, &mut order);
        take_turns(warm, rest, &mut order);
        order.extend_from_slice(&self.others);
        order
    }
}

/// Appends two lists such that at each point the same part of both has come.
fn take_turns(a: &[ChunkIdx], b: &[ChunkIdx], order: &mut Vec<ChunkIdx>) {
    let (mut taken, mut other) = (0, 0);
    while taken < a.len() || other < b.len() {
        if other == b.len() || taken < a.len() && taken * b.len() <= other * a.len() {
            order.push(a[taken]);
            taken += 1;
        } else {
            order.push(b[other]);
            other += 1;
        }
    }
}

impl Machine {
    /// The VM's chunks by heat, as they stand.
    pub fn chunk_order(&self) -> ChunkOrder {
        let mut order = ChunkOrder::default();
        // In the order of eviction, so the hottest is the last. What is about to leave is in no queue, and colder than all of them.
        order.in_dram.extend(self.queues.iter());
        order.in_dram.reverse();
        for chunk in self.config.chunks.iter().filter(|chunk| !self.queues.contains(*chunk)) {
            let c = self.chunk(chunk);
            let list = match () {
                () if !c.dram().is_empty() || !c.shared.is_empty() => &mut order.in_dram,
                () if !c.swap.is_empty() => &mut order.in_swap,
                () => &mut order.others,
            };
            list.push(chunk);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits::PageSet;
    use crate::fault::{Config, Located, PageInPolicy, Replacement, Sharing};

    fn chunks(numbers: impl IntoIterator<Item = u32>) -> Vec<ChunkIdx> {
        numbers.into_iter().map(ChunkIdx).collect()
    }

    #[test]
    fn a_machine_knows_what_is_hot() {
        let config = Config {
            chunks: ChunkCount(6),
            direct: false,
            protect: true,
            page_in: PageInPolicy::default(),
            replacement: Replacement::default(),
            seed: 1,
            sharing: Sharing::Off,
        };
        let mut machine = Machine::new(config);
        assert_eq!(machine.chunk_order(), ChunkOrder { others: chunks(0..6), ..ChunkOrder::default() });
        machine.armed(|chunk| {
            let (ram, swap) = match chunk.0 {
                1 | 4 | 5 => (PageSet::single(3), PageSet::single(7)),
                0 | 3 => (PageSet::EMPTY, PageSet::single(7)),
                _ => (PageSet::EMPTY, PageSet::EMPTY),
            };
            Located { ram, swap, ..Located::default() }
        });
        machine.touch(ChunkIdx(1));
        let order = machine.chunk_order();
        let expected = ChunkOrder { in_dram: chunks([1, 5, 4]), in_swap: chunks([0, 3]), others: chunks([2]) };
        assert_eq!(order, expected);
        assert_eq!(order.hot_first(), chunks([1, 5, 4, 0, 3, 2]));
    }

    #[test]
    fn dram_is_for_the_hottest() {
        let order = ChunkOrder { in_dram: chunks(0..40), in_swap: chunks(100..120), others: chunks([200]) };
        for room in [0, 1, 30, 40, 45, 60, 100] {
            let plan = order.into_dram(ChunkCount(room));
            let mut all = plan.clone();
            all.sort_unstable();
            assert_eq!(all, order.hot_first(), "each chunk once");
            let hot = (room as usize).min(40);
            assert!((0..hot as u32).all(|chunk| plan[..room.min(61) as usize].contains(&ChunkIdx(chunk))), "{plan:?}");
            for part in [0..40, 100..120] {
                let of_part: Vec<u32> = plan.iter().map(|chunk| chunk.0).filter(|chunk| part.contains(chunk)).collect();
                assert!(of_part.is_sorted(), "{room}: {of_part:?}");
            }
        }
        // All fits: a chunk of swap behind each two that are hot.
        assert_eq!(order.into_dram(ChunkCount(60))[..6], chunks([0, 100, 1, 2, 101, 3]));
        // It does not: the rest takes turns.
        assert_eq!(order.into_dram(ChunkCount(38))[38..43], chunks([38, 100, 101, 102, 103]));
    }
}
