//! A move whose cold part goes into the VM's remote tier: which chunks that is, and which of their pages are there.
//!
//! A page counts as there when the tier has acknowledged a copy of it, and no look has found it written since. What was written once goes
//! over the link: it may be written again. Nothing here waits or decides when a look is made; the rounds do.

use pagoda_api::types::VmInfo;
use pagoda_core::bits::PageSet;
use pagoda_core::units::{ChunkIdx, PageCount};
use pagoda_move::map::{PageMap, PageRun};

/// How much of a VM would go into its remote tier, bytes: content that does not fit into so much DRAM, and is not there yet.
pub fn to_pool(vm: &VmInfo, dram: u64) -> u64 {
    let in_pool = vm.remote.as_ref().map_or(0, |remote| remote.pool_bytes);
    vm.memory_bytes.saturating_sub(vm.zero_bytes).saturating_sub(in_pool).saturating_sub(dram)
}

/// What becomes of pages that are to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// These pages go over the link.
    Link(PageRun),
    /// These pages go into the tier.
    Tier(PageRun),
    /// The tier has these pages already.
    There(PageRun),
}

/// The order of the chunks, which of them are cold, and what the tier has of these.
#[derive(Clone, Debug)]
pub struct Split {
    /// The order in which chunks are copied, each once.
    order: Vec<ChunkIdx>,
    /// By chunk: it does not fit into the DRAM at the destination.
    is_cold: Vec<bool>,
    there: PageMap,
    /// Pages that were written since the first look.
    written: PageMap,
}

impl Split {
    /// `hot_first` has each chunk once, and `content` says how many of its pages may hold something else than zeros. The first of
    /// them go into DRAM of so many pages, and the rest is cold. Both parts take turns, since they go different ways.
    pub fn new(hot_first: &[ChunkIdx], content: &PageMap, dram: PageCount) -> Split {
        let mut room = dram;
        let mut is_cold = vec![false; content.pages().chunks_ceil().as_usize()];
        let count = |chunk: ChunkIdx| PageCount(content.chunk(chunk).count().into());
        let fits = |chunk: &ChunkIdx| {
            let needed = count(*chunk);
            let fits = needed <= room;
            room = if fits { room.saturating_sub(needed) } else { PageCount::ZERO };
            fits
        };
        // What has no content needs no room.
        let (hot, cold): (Vec<ChunkIdx>, Vec<ChunkIdx>) = hot_first.iter().copied().partition(fits);
        cold.iter().for_each(|chunk| is_cold[chunk.as_usize()] = true);
        let empty = PageMap::empty(content.pages());
        Split { order: take_turns(&hot, &cold, count), is_cold, there: empty.clone(), written: empty }
    }

    pub fn order(&self) -> &[ChunkIdx] {
        &self.order
    }

    /// Where pages go that are to be copied while the VM runs, or when it stands still.
    pub fn parts(&self, run: PageRun, is_stopped: bool) -> Vec<Part> {
        let PageRun { chunk, .. } = run;
        let there = run.set() & self.there.chunk(chunk);
        let may_go = self.is_cold[chunk.as_usize()] && !is_stopped;
        let tier = if may_go { run.set() - there - self.written.chunk(chunk) } else { PageSet::EMPTY };
        let link = run.set() - there - tier;
        let runs = |pages: PageSet, part: fn(PageRun) -> Part| -> Vec<Part> {
            pages.runs().map(|run| part(PageRun { chunk, run })).collect()
        };
        [runs(link, Part::Link), runs(tier, Part::Tier), runs(there, Part::There)].concat()
    }

    /// The tier has acknowledged copies of these pages. Those that count.
    pub fn placed(&mut self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let there = pages - self.written.chunk(chunk);
        self.there.insert_in(chunk, there);
        there
    }

    /// A look has found these pages written.
    pub fn written(&mut self, pages: &PageMap) {
        self.there.remove_all(pages);
        self.written.insert_all(pages);
    }

    /// Pages that the tier has for the destination.
    #[cfg(test)]
    pub const fn there(&self) -> &PageMap {
        &self.there
    }
}

/// Both lists as one, such that at each point about the same part of the content of both has come.
fn take_turns(a: &[ChunkIdx], b: &[ChunkIdx], count: impl Fn(ChunkIdx) -> PageCount) -> Vec<ChunkIdx> {
    let sum = |list: &[ChunkIdx]| u128::from(list.iter().map(|chunk| count(*chunk).0).sum::<u64>());
    let (whole, other_whole) = (sum(a), sum(b));
    let (mut first, mut second) = (a.iter().peekable(), b.iter().peekable());
    let (mut taken, mut other) = (0, 0);
    let mut order = Vec::with_capacity(a.len() + b.len());
    while first.peek().is_some() || second.peek().is_some() {
        let is_behind = taken * other_whole <= other * whole;
        let takes_first = second.peek().is_none() || first.peek().is_some() && is_behind;
        let (list, taken) = if takes_first { (&mut first, &mut taken) } else { (&mut second, &mut other) };
        if let Some(chunk) = list.next() {
            *taken += u128::from(count(*chunk).0);
            order.push(*chunk);
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use pagoda_core::bits::Run;
    use pagoda_core::chance::Chance;

    use super::*;

    const PAGES: PageCount = PageCount(6 * 256);

    fn chunks(numbers: &[u32]) -> Vec<ChunkIdx> {
        numbers.iter().copied().map(ChunkIdx).collect()
    }

    /// Chunk 2 is hot, with half of its pages; chunk 4 is empty.
    fn split(dram: u64) -> Split {
        let mut content = PageMap::full(PAGES);
        content.remove_in(ChunkIdx(2), PageSet::range(128, 128));
        content.remove_in(ChunkIdx(4), PageSet::FULL);
        Split::new(&chunks(&[2, 0, 1, 3, 5, 4]), &content, PageCount(dram))
    }

    #[test]
    fn what_does_not_fit_into_dram_is_cold() {
        let check = |dram, expected: &[u32]| {
            let split = split(dram);
            let cold: Vec<u32> = (0..6).filter(|chunk| split.is_cold[*chunk as usize]).collect();
            assert_eq!(cold, expected, "{dram}");
            let mut all = split.order().to_vec();
            all.sort_unstable();
            assert!(all.into_iter().eq(PAGES.chunks_ceil().iter()), "each chunk once");
        };
        check(PAGES.0, &[]);
        check(128 + 4 * 256, &[]);
        check(128 + 4 * 256 - 1, &[5]);
        check(128 + 256, &[1, 3, 5]);
        // A colder one does not take the room that a hotter one is too large for.
        check(127, &[0, 1, 2, 3, 5]);
        check(0, &[0, 1, 2, 3, 5]);
    }

    #[test]
    fn both_ways_are_used_all_the_time() {
        assert_eq!(split(128 + 256).order()[..4], chunks(&[2, 1, 0, 3]));
        let content = PageMap::full(PageCount(20 * 256));
        let all: Vec<ChunkIdx> = (0..20).map(ChunkIdx).collect();
        let split = Split::new(&all, &content, PageCount(4 * 256));
        let hot_at: Vec<usize> = (0..20).filter(|at| split.order()[*at].0 < 4).collect();
        assert_eq!(hot_at, [0, 5, 10, 15]);
    }

    /// Pages, the tier and the looks as they are, against what the split says.
    #[test]
    fn only_what_nobody_has_written_since_counts() {
        for seed in 1..300 {
            let mut chance = Chance::new(seed);
            let mut split = split(128 + 256);
            // What each page holds, what the tier has of it, copies under way, what was written since the last look.
            let mut ram = vec![0_u32; PAGES.0 as usize];
            let mut tier: Vec<Option<u32>> = vec![None; PAGES.0 as usize];
            let mut ways: Vec<(PageRun, Vec<u32>)> = Vec::new();
            let mut unseen = PageMap::empty(PAGES);
            for _ in 0..400 {
                let chunk = ChunkIdx(chance.within(0, 5) as u32);
                let start = chance.within(0, 247) as u8;
                let run = PageRun { chunk, run: Run { start, len: chance.within(1, 8) as u16 } };
                match chance.within(0, 3) {
                    0 => run.iter().take(1).for_each(|page| {
                        ram[page.0 as usize] += 1;
                        unseen.insert(page);
                    }),
                    1 => split.written(&unseen.take()),
                    // Whoever copies has looked before, and writes are seen at the next look.
                    2 => {
                        for part in split.parts(run, false) {
                            if let Part::Tier(run) = part {
                                ways.push((run, run.iter().map(|page| ram[page.0 as usize]).collect()));
                            }
                        }
                    }
                    _ if !ways.is_empty() => {
                        let (run, held) = ways.swap_remove(chance.within(0, ways.len() as u64 - 1) as usize);
                        for (page, held) in run.iter().zip(held) {
                            tier[page.0 as usize] = Some(held);
                        }
                        split.placed(run.chunk, run.set());
                    }
                    _ => {}
                }
            }
            // It stands still. What was under way has ended, in any order, and writes are looked at a last time.
            for (run, held) in ways {
                run.iter().zip(held).for_each(|(page, held)| tier[page.0 as usize] = Some(held));
                split.placed(run.chunk, run.set());
            }
            split.written(&unseen);
            for page in split.there().iter() {
                let at = page.0 as usize;
                assert_eq!(tier[at], Some(ram[at]), "seed {seed}: page {at}");
            }
            for run in split.there().filled().map(|(chunk, pages)| PageRun { chunk, run: pages.runs().next().unwrap() })
            {
                assert_eq!(split.parts(run, true), [Part::There(run)]);
            }
        }
    }
}
