//! How long pages of an unarmed VM stay unused, which makes its miss-ratio curve ([`pagoda_core::policy::mrc::footprint`]).
//!
//! Once a second some pages are chosen and unmapped, as those of the sample are ([`super::sampling`]), and all that are followed
//! are looked for in the page tables; they count when they are due. That says something of a page only if it has an entry of its
//! own: in a huge mapping a use of any page is one of all 512, and rates came out 23 times too high (measured). So a few blocks of
//! 2 MiB are mapped page by page for ten minutes each, in place of all that are mapped huge, and pages of these are chosen from
//! them; the rest stays as it is. Which blocks those are is chance, as it is when they end.
//!
//! Before Linux 6.7 (PAGEMAP_SCAN) nobody can tell how pages are mapped, and all blocks without a hole are taken to be huge.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pagoda_abi::attach::{Packet, RANGES_MAX, Range, Ranges};
use pagoda_core::chance::Chance;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::policy::mrc::footprint::{Age, Footprint};
use pagoda_core::units::{PAGE_SIZE, PageCount, PageIdx};
use pagoda_sys::pagemap::Mapped;

use super::Engine;
use super::agent::Asked;

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
    /// For a VM of this size.
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

impl Engine {
    /// Looks at what is followed, counts what is due, and chooses the next pages. Once a second.
    pub(super) fn turn_ages(&mut self, now: Instant) {
        if self.machine.is_armed() || self.frozen.is_some() || !self.agent.is_connected() {
            return;
        }
        self.look_at_ages();
        // Before anything below maps or unmaps its pages.
        self.look_at_sample();
        let Some(mut ages) = self.ages.take() else { return };
        match ages.turned.replace(now) {
            Some(turned) => ages.footprint.pass((now - turned).as_secs_f64()),
            None => self.forget_splits(),
        }
        ages.followed.retain_mut(|followed| {
            // The clock of turns is not exact.
            let seconds = (now - followed.since).as_secs_f64().round() as u64;
            !followed.age.is_due(seconds) || ages.footprint.look(&mut followed.age, seconds)
        });
        if let Some((block, _)) = ages.blocks.first().filter(|(_, since)| now - *since > BLOCK_LIFE).copied() {
            ages.blocks.remove(0);
            ages.followed.retain(|followed| block_of(followed.page) != block);
            self.tell_of_blocks(&[block], |seq, ranges| Packet::Join { seq, ranges });
        }
        let before = ages.blocks.len();
        // What the agent is unmapping for the sample is not mapped meanwhile.
        let chooses = !ages.asked && !self.is_unmapping_sample();
        let mut pages = if chooses { self.choose(&mut ages, now) } else { Vec::new() };
        let split: Vec<u64> = ages.blocks[before..].iter().map(|(block, _)| *block).collect();
        self.unmap_sample(|page| split.contains(&block_of(page)));
        if !ages.asked {
            let again = ages.followed.iter().filter(|followed| followed.shown && !followed.age.is_used());
            pages.extend(again.map(|followed| followed.page));
            pages.truncate(RANGES_MAX);
        }
        ages.asked |= !pages.is_empty();
        self.ages = Some(ages);
        if !pages.is_empty() {
            self.sampling.zaps += pages.len() as u64;
            self.zap_pages(Asked::Age { pages, at: now });
        }
    }

    /// Pages that have content: what a page without any does next is no use of memory.
    fn choose(&mut self, ages: &mut Ages, now: Instant) -> Vec<PageIdx> {
        let memory = self.space.chunks().pages().0;
        let count = (memory / PAGES_PER_CHOSEN).clamp(1, PAGES_PER_S_MAX);
        let blocks_max = (memory / BLOCK_PAGES / BLOCKS_PART).clamp(1, BLOCKS_MAX) as usize;
        let mut chosen = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let page = PageIdx(ages.chance.below(memory));
            if !self.has_content(page) {
                continue;
            }
            let huge = !ages.has_block(block_of(page)) && self.may_be_huge(block_of(page));
            if !huge {
                chosen.push(page);
            } else if ages.blocks.len() < blocks_max {
                ages.blocks.push((block_of(page), now));
                self.tell_of_blocks(&[block_of(page)], |seq, ranges| Packet::Split { seq, ranges });
                chosen.push(page);
            } else {
                chosen.extend(ages.any_of_blocks());
            }
        }
        chosen.retain(|page| self.has_content(*page));
        chosen
    }

    fn has_content(&self, page: PageIdx) -> bool {
        let place = self.space.place_page(page);
        place.region.ram.next_data(place.offset) == Ok(Some(place.offset))
    }

    /// Whether a block is mapped huge, or may be at its next use: one with a hole never is.
    fn may_be_huge(&mut self, block: u64) -> bool {
        let place = self.space.place_page(PageIdx(block * BLOCK_PAGES));
        let (addr, len) = (place.addr, BLOCK_PAGES * PAGE_SIZE);
        let whole = place.region.ram.next_hole(place.offset).is_ok_and(|hole| hole >= place.offset + len);
        // Whom nobody can tell apart may be.
        let mapped = self.pagemap().and_then(|pagemap| pagemap.mapped(addr, len).ok()).unwrap_or(Mapped::Huge);
        whole && mapped != Mapped::Small
    }

    /// Blocks of a daemon before this one are mapped huge again, unless a balloon wants all of it small.
    fn forget_splits(&mut self) {
        if !self.agent.wants_small_folios() {
            self.tell_agent(&Packet::Folios { large: true });
        }
    }

    fn tell_of_blocks(&mut self, blocks: &[u64], packet: impl FnOnce(u64, Ranges) -> Packet) {
        let mut ranges = Ranges::default();
        for block in blocks {
            let place = self.space.place_page(PageIdx(block * BLOCK_PAGES));
            ranges.push(Range { addr: place.addr, len: BLOCK_PAGES * PAGE_SIZE });
        }
        let packet = packet(self.next_seq(), ranges);
        self.tell_agent(&packet);
    }

    /// The agent has answered.
    pub(super) fn ages_zapped(&mut self, pages: Vec<PageIdx>, at: Instant, done: bool) {
        self.sampling.zap_us += at.elapsed().as_micros() as u64;
        let armed = self.machine.is_armed();
        let Some(ages) = &mut self.ages else { return };
        ages.asked = false;
        if !done || armed {
            return;
        }
        for page in pages {
            match ages.followed.iter_mut().find(|followed| followed.page == page && followed.shown) {
                Some(again) => again.shown = false,
                None => ages.followed.push(Followed { page, since: Instant::now(), age: Age::default(), shown: false }),
            }
        }
    }

    /// Looks which pages were used since the last look. One fault maps many pages: the 64 KiB around it (`fault_around_bytes`),
    /// and since Linux 6.18 all of a large folio. So of a block's pages that are mapped now chance decides which one was used; the
    /// others are unmapped again and count as unused.
    pub(super) fn look_at_ages(&mut self) {
        let Some(mut ages) = self.ages.take() else { return };
        let mut seen: HashMap<u64, Vec<usize>> = HashMap::new();
        let unseen = |(_, followed): &(usize, &Followed)| !followed.shown && !followed.age.is_used();
        for (place, followed) in ages.followed.iter().enumerate().filter(unseen) {
            if self.is_mapped(followed.page) != Some(false) {
                seen.entry(block_of(followed.page)).or_default().push(place);
            }
        }
        for places in seen.into_values() {
            let used = places[ages.chance.below(places.len() as u64) as usize];
            places.iter().for_each(|place| ages.followed[*place].shown = true);
            ages.followed[used].age.note_use();
            self.sampling.uses += 1;
        }
        self.ages = Some(ages);
    }

    /// Nothing is followed any more: the VM is armed, and its faults say more; or nobody wants to know.
    pub(super) fn stop_ages(&mut self) {
        let Some(ages) = &mut self.ages else { return };
        ages.followed.clear();
        ages.turned = None;
        let blocks: Vec<u64> = std::mem::take(&mut ages.blocks).into_iter().map(|(block, _)| block).collect();
        if !blocks.is_empty() {
            self.tell_of_blocks(&blocks, |seq, ranges| Packet::Join { seq, ranges });
        }
    }

    /// The curve, once enough was seen.
    pub(super) fn curve_of_ages(&self) -> Option<Curve> {
        let content = PageCount(self.space.allocated() / PAGE_SIZE);
        let lru = self.ages.as_ref()?.footprint.curve(content)?;
        Some(self.machine.curve_of(&lru))
    }
}
