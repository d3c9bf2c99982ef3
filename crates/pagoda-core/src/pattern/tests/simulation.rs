//! What the decisions cost, against "always the page" and "always the chunk" on the same accesses.
//!
//! The cost model: 25 us for a single page, 450 us for a chunk, whether a fault waits for it or not;
//! resident pages are free. DRAM holds half of the space and evicts whole chunks, the coldest by page-in.

use crate::bits::PageSet;
use crate::pattern::*;
use crate::queues::ChunkQueues;
use crate::units::{CHUNK_PAGES, PageCount};

const PAGE_US: u64 = 25;
const CHUNK_US: u64 = PAGE_US * CHUNK_COST_PAGES;
const SPACE: ChunkCount = ChunkCount(512);
const SPACE_PAGES: u64 = 512 * CHUNK_PAGES;
const DRAM: PageCount = PageCount(SPACE_PAGES / 2);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Adaptive,
    AlwaysPage,
    AlwaysChunk,
}

struct Machine {
    policy: Policy,
    pattern: Pattern,
    queues: ChunkQueues,
    resident: Vec<PageSet>,
    read_ahead: Vec<bool>,
    resident_pages: u64,
    cost_us: u64,
    chunk_reads: u64,
    untouched: u64,
}

impl Machine {
    fn new(policy: Policy) -> Machine {
        Machine {
            policy,
            pattern: Pattern::new(SPACE),
            queues: ChunkQueues::new(SPACE),
            resident: vec![PageSet::EMPTY; SPACE.as_usize()],
            read_ahead: vec![false; SPACE.as_usize()],
            resident_pages: 0,
            cost_us: 0,
            chunk_reads: 0,
            untouched: 0,
        }
    }

    fn touch(&mut self, page: PageIdx) {
        let chunk = page.chunk();
        let decision = if std::mem::take(&mut self.read_ahead[chunk.as_usize()]) {
            self.pattern.on_read_ahead_hit(chunk, Access::Read)
        } else if self.resident[chunk.as_usize()].contains(page.index_in_chunk()) {
            self.queues.touch(chunk);
            return;
        } else {
            match self.policy {
                Policy::Adaptive => self.pattern.on_fault(page, Access::Read),
                Policy::AlwaysPage => PageIn::Page,
                Policy::AlwaysChunk => chunk_alone(chunk, Access::Read),
            }
        };
        match decision {
            PageIn::Page => {
                self.cost_us += PAGE_US;
                self.bring_in(chunk, PageSet::single(page.index_in_chunk()));
            }
            PageIn::Chunk { read_ahead, .. } => {
                self.read_chunk(chunk);
                for ahead in read_ahead.chunks() {
                    assert!(ahead.0 < SPACE.0, "reads ahead beyond the space");
                    if self.resident[ahead.as_usize()].is_empty() {
                        self.read_chunk(ahead);
                        self.read_ahead[ahead.as_usize()] = true;
                    }
                }
            }
        }
    }

    fn read_chunk(&mut self, chunk: ChunkIdx) {
        if !self.resident[chunk.as_usize()].is_full() {
            self.cost_us += CHUNK_US;
            self.chunk_reads += 1;
            self.bring_in(chunk, PageSet::FULL);
        }
    }

    fn bring_in(&mut self, chunk: ChunkIdx, pages: PageSet) {
        let resident = &mut self.resident[chunk.as_usize()];
        self.resident_pages += u64::from((pages - *resident).count());
        *resident |= pages;
        self.queues.insert_tail_last(chunk);
        while self.resident_pages > DRAM.0 {
            let victim = self.queues.victim().expect("something is resident");
            self.queues.remove(victim);
            let out = std::mem::take(&mut self.resident[victim.as_usize()]);
            self.resident_pages -= u64::from(out.count());
            if std::mem::take(&mut self.read_ahead[victim.as_usize()]) {
                self.untouched += 1;
                self.pattern.on_read_ahead_miss(victim);
            }
        }
    }
}

/// xorshift64*: the tests' own source of chance, from a fixed seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(limit)) >> 64) as u64
    }
}

fn cost_us(policy: Policy, pages: &[u64]) -> u64 {
    let mut machine = Machine::new(policy);
    pages.iter().for_each(|&page| machine.touch(PageIdx(page)));
    machine.cost_us
}

/// The cost of adapting in percent of the better fixed choice.
fn percent_of_better(pages: &[u64]) -> u64 {
    let better = cost_us(Policy::AlwaysPage, pages).min(cost_us(Policy::AlwaysChunk, pages));
    (cost_us(Policy::Adaptive, pages) * 100).div_ceil(better)
}

fn sweep(stride: u64) -> Vec<u64> {
    (0..SPACE_PAGES).step_by(stride as usize).collect()
}

fn random(count: u64, seed: u64) -> Vec<u64> {
    let mut chance = Chance(seed);
    (0..count).map(|_| chance.below(SPACE_PAGES)).collect()
}

/// Runs of `len` pages that start anywhere.
fn records(count: u64, len: u64) -> Vec<u64> {
    let mut chance = Chance(count + len);
    (0..count)
        .flat_map(|_| {
            let start = chance.below(SPACE_PAGES - len);
            start..start + len
        })
        .collect()
}

/// `walks` vCPUs, each through its own part of the space, taking turns at random.
fn interleaved(walks: u64) -> Vec<u64> {
    let part = SPACE_PAGES / walks;
    let mut chance = Chance(walks);
    let mut next: Vec<u64> = (0..walks).map(|walk| walk * part).collect();
    let mut pages = Vec::new();
    while let Some(walk) = (0..walks).map(|_| chance.below(walks)).find(|&walk| next[walk as usize] < (walk + 1) * part)
    {
        pages.push(next[walk as usize]);
        next[walk as usize] += 1;
    }
    pages
}

/// A walk with `others` random accesses between two steps.
fn disturbed(others: usize) -> Vec<u64> {
    let mut chance = Chance(7);
    sweep(1)
        .into_iter()
        .flat_map(|page| {
            let noise: Vec<u64> = (0..others).map(|_| chance.below(SPACE_PAGES)).collect();
            std::iter::once(page).chain(noise)
        })
        .collect()
}

fn check(name: &str, pages: &[u64], percent_max: u64) {
    let percent = percent_of_better(pages);
    assert!(percent <= percent_max, "{name}: {percent} % of the better fixed choice");
}

#[test]
fn sequential_costs_what_whole_chunks_cost() {
    check("sweep", &sweep(1), 101);
    check("sweep downwards", &sweep(1).into_iter().rev().collect::<Vec<_>>(), 101);
    check("three sweeps", &[sweep(1), sweep(1), sweep(1)].concat(), 101);
    for walks in [2, 4, 8] {
        check(&format!("{walks} walks"), &interleaved(walks), 107);
    }
}

#[test]
fn strides_cost_the_better_of_both() {
    for stride in 2..=20 {
        check(&format!("stride {stride}"), &sweep(stride), 101);
    }
}

#[test]
fn random_costs_what_single_pages_cost() {
    for seed in 1..=5 {
        check(&format!("seed {seed}"), &random(100_000, seed), 103);
    }
}

#[test]
fn mixed_loads_cost_less_than_either() {
    let phases = [random(100_000, 1), sweep(1), random(100_000, 2), sweep(1)].concat();
    check("phases", &phases, 50);
    check("random before a sweep", &[random(50_000, 3), sweep(1)].concat(), 60);
    for others in [1, 2, 4, 7, 10, 20] {
        check(&format!("a walk with {others} random accesses a step"), &disturbed(others), 101);
    }
}

#[test]
fn short_records_stay_single_and_long_ones_do_not() {
    for len in [2, 3, 4, 8, 16] {
        check(&format!("records of {len}"), &records(200_000 / len, len), 101);
    }
    for len in [256, 300, 512, 1000, 2000] {
        check(&format!("records of {len}"), &records(200_000 / len, len), 110);
    }
}

/// Runs between the price of a chunk and its size: the two faults that find them are a ninth of the
/// chunk's price already, and the end of one teaches nothing about the next.
#[test]
fn records_near_the_price_of_a_chunk_cost_a_fifth_more() {
    for len in [20, 24, 32, 48, 64, 100, 128] {
        check(&format!("records of {len}"), &records(200_000 / len, len), 120);
    }
}
