//! How long pages of an unarmed VM stay unused, which makes its miss-ratio curve ([`pagoda_core::policy::mrc::footprint`]).
//!
//! Once a second some pages are chosen and unmapped, as those of the sample are ([`super`]), and all that are followed
//! are looked for in the page tables; they count when they are due. That says something of a page only if it has an
//! entry of its own: in a huge mapping a use of any page is one of all 512, and rates came out 23 times too high
//! (measured). So a few blocks of 2 MiB are mapped page by page for ten minutes each, in place of all that are mapped
//! huge, and pages of these are chosen from them; the rest stays as it is. Which blocks those are is chance, as it is
//! when they end.
//!
//! Before Linux 6.7 (PAGEMAP_SCAN) nobody can tell how pages are mapped, and all blocks without a hole are taken to be huge.

mod turn;

use std::time::{Duration, Instant};

use pagoda_core::chance::Chance;
use pagoda_core::policy::mrc::footprint::{Age, Footprint};
use pagoda_core::units::{PageCount, PageIdx};

/// Pages chosen a second: after five minutes chance is 2 % of the memory.
const PAGES_PER_S_MAX: u64 = 8;
/// Of a small VM fewer are, one for so many of its pages. Some 56 are followed at a time for each chosen a second.
const PAGES_PER_CHOSEN: u64 = 1 << 14;
/// Pages of a huge page.
const BLOCK_PAGES: u64 = 512;
/// Blocks that are mapped page by page at a time: what they cost the guest's TLB should not be felt.
const BLOCKS_MAX: u64 = 16;
/// And at most this part of the memory.
const BLOCKS_PART: u64 = 12;
/// How long a block is: longer than the oldest page is followed.
const BLOCK_LIFE: Duration = Duration::from_secs(600);
/// Which pages are chosen need not be secret.
const SEED: u64 = 0x61_67_65_73;

/// What is known of one VM.
#[derive(Debug)]
pub struct Ages {
    footprint: Footprint,
    followed: Vec<Followed>,
    /// Blocks that are mapped page by page, by their number, the oldest first.
    blocks: Vec<(u64, Instant)>,
    chance: Chance,
    /// Pages are on their way to the agent.
    asked: bool,
    /// `None` while nothing is followed.
    turned: Option<Instant>,
}

#[derive(Debug)]
struct Followed {
    page: PageIdx,
    since: Instant,
    age: Age,
    /// Mapped by another page's use: nothing is seen of its own until it is unmapped again.
    shown: bool,
}

fn block_of(page: PageIdx) -> u64 {
    page.0 / BLOCK_PAGES
}

impl Ages {
    /// The ages in a VM of this size, of which nothing is followed yet.
    pub fn new(memory: PageCount) -> Ages {
        Ages {
            footprint: Footprint::new(memory, SEED),
            followed: Vec::new(),
            blocks: Vec::new(),
            chance: Chance::new(SEED),
            asked: false,
            turned: None,
        }
    }

    fn has_block(&self, block: u64) -> bool {
        self.blocks.iter().any(|(other, _)| *other == block)
    }

    /// A page of the blocks, each as likely as every other.
    fn any_of_blocks(&mut self) -> Option<PageIdx> {
        let (block, _) = *self.blocks.get(self.chance.below(self.blocks.len() as u64) as usize)?;
        Some(PageIdx(block * BLOCK_PAGES + self.chance.below(BLOCK_PAGES)))
    }
}
