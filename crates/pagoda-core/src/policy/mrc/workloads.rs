//! Synthetic traces whose curves have the shapes that occur: smooth, cliff, both, and changing.

use crate::chance::Chance;
use crate::units::PageIdx;

/// What a trace does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Popularity by rank, exponent 1: caches, databases. A smooth curve.
    Zipf,
    /// Over and over from the first page to the last: backups, tables. A cliff at its size.
    Scan,
    /// Two accesses in three by popularity, one of a scan over half of the pages.
    Mixed,
    /// Working sets of an eighth, a half and a quarter of the pages, one after the other.
    Phases,
}

/// The list has every workload.
pub const WORKLOADS: [Workload; 4] = [Workload::Zipf, Workload::Scan, Workload::Mixed, Workload::Phases];

impl Workload {
    /// Gives the workload's name, which is one word.
    pub const fn name(self) -> &'static str {
        match self {
            Workload::Zipf => "zipf",
            Workload::Scan => "scan",
            Workload::Mixed => "mixed",
            Workload::Phases => "phases",
        }
    }

    /// Makes so many accesses to so many pages.
    pub fn trace(self, pages: u64, accesses: usize, seed: u64) -> Vec<PageIdx> {
        let mut chance = Chance::new(seed);
        let ranks = Ranks::new(pages);
        let access = |index: usize| {
            let turn = index as u64;
            PageIdx(match self {
                Workload::Zipf => ranks.draw(&mut chance),
                Workload::Scan => turn % pages,
                Workload::Mixed if turn.is_multiple_of(3) => (turn / 3) % (pages / 2).max(1),
                Workload::Mixed => ranks.draw(&mut chance),
                Workload::Phases => {
                    let part = [8, 2, 4][index * 3 / accesses.max(1)];
                    chance.below((pages / part).max(1)) + if part == 4 { pages / 2 } else { 0 }
                }
            })
        };
        (0..accesses).map(access).collect()
    }
}

/// Zipf's distribution by its cumulative weights.
struct Ranks {
    /// In 2^-40, so that sums are exact.
    sums: Vec<u64>,
    pages: u64,
}

impl Ranks {
    fn new(pages: u64) -> Ranks {
        let weights = (1..=pages).scan(0u64, |sum, rank| {
            *sum += (1 << 40) / rank;
            Some(*sum)
        });
        Ranks { sums: weights.collect(), pages }
    }

    /// A page; neighbours in popularity are no neighbours in memory.
    fn draw(&self, chance: &mut Chance) -> u64 {
        let at = chance.below(self.sums.last().copied().unwrap_or(0));
        let rank = self.sums.partition_point(|sum| *sum <= at) as u64;
        // An odd factor permutes a power of two; for other sizes a few pages stand for two ranks.
        (rank.wrapping_mul(0x9e37_79b1) ^ (rank >> 3)) % self.pages.max(1)
    }
}
