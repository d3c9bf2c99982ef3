//! Chooses pages, looks at those that are followed, and counts what is due.

use std::collections::HashMap;
use std::time::Instant;

use pagoda_abi::attach::{Packet, RANGES_MAX, Range, Ranges};
use pagoda_core::policy::mrc::Curve;
use pagoda_core::policy::mrc::footprint::Age;
use pagoda_core::units::{PAGE_SIZE, PageCount, PageIdx};
use pagoda_sys::pagemap::Mapped;

use super::{
    Ages, BLOCK_LIFE, BLOCK_PAGES, BLOCKS_MAX, BLOCKS_PART, Followed, PAGES_PER_CHOSEN, PAGES_PER_S_MAX, block_of,
};
use crate::engine::broken::Broken;
use crate::engine::link::agent::Asked;
use crate::engine::paging::Paging;
use crate::engine::sampler::{Context, Sampler};

impl Sampler {
    /// Looks at what is followed, counts what is due, and chooses the next pages. Once a second.
    pub fn turn_ages(&mut self, now: Instant, context: &mut Context<'_>) -> Result<(), Broken> {
        let paging = &*context.paging;
        if paging.machine().is_armed() || paging.is_halted() || !context.agent.is_connected() {
            return Ok(());
        }
        self.look_at_ages(paging);
        // The sample is looked at before anything below maps or unmaps its pages.
        self.look_at_sample(paging);
        let Some(mut ages) = self.ages.take() else { return Ok(()) };
        match ages.turned.replace(now) {
            Some(turned) => ages.footprint.pass((now - turned).as_secs_f64()),
            None => forget_splits(context),
        }
        ages.followed.retain_mut(|followed| {
            // The clock of turns is not exact.
            let seconds = (now - followed.since).as_secs_f64().round() as u64;
            !followed.age.is_due(seconds) || ages.footprint.look(&mut followed.age, seconds)
        });
        if let Some((block, _)) = ages.blocks.first().filter(|(_, since)| now - *since > BLOCK_LIFE).copied() {
            ages.blocks.remove(0);
            ages.followed.retain(|followed| block_of(followed.page) != block);
            send_blocks(context, &[block], |seq, ranges| Packet::Join { seq, ranges });
        }
        let before = ages.blocks.len();
        // What the agent is unmapping for the sample is not mapped meanwhile.
        let chooses = !ages.asked && !context.agent.is_unmapping_sample();
        let mut pages = if chooses { self.choose(&mut ages, now, context) } else { Vec::new() };
        let split: Vec<u64> = ages.blocks[before..].iter().map(|(block, _)| *block).collect();
        let unmapped = self.unmap_sample(|page| split.contains(&block_of(page)), context);
        if !ages.asked {
            let again = ages.followed.iter().filter(|followed| followed.shown && !followed.age.is_used());
            pages.extend(again.map(|followed| followed.page));
            pages.truncate(RANGES_MAX);
        }
        ages.asked |= !pages.is_empty();
        self.ages = Some(ages);
        unmapped?;
        if pages.is_empty() {
            return Ok(());
        }
        self.zaps += pages.len() as u64;
        self.zap_pages(Asked::Age { pages, at: now }, context)
    }

    /// Pages that have content: what a page without any does next is no use of memory.
    fn choose(&mut self, ages: &mut Ages, now: Instant, context: &mut Context<'_>) -> Vec<PageIdx> {
        let memory = context.paging.space().chunks().pages().0;
        let count = (memory / PAGES_PER_CHOSEN).clamp(1, PAGES_PER_S_MAX);
        let blocks_max = (memory / BLOCK_PAGES / BLOCKS_PART).clamp(1, BLOCKS_MAX) as usize;
        let mut chosen = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let page = PageIdx(ages.chance.below(memory));
            if !has_content(page, context.paging) {
                continue;
            }
            let huge = !ages.has_block(block_of(page)) && self.may_be_huge(block_of(page), context.paging);
            if !huge {
                chosen.push(page);
            } else if ages.blocks.len() < blocks_max {
                ages.blocks.push((block_of(page), now));
                send_blocks(context, &[block_of(page)], |seq, ranges| Packet::Split { seq, ranges });
                chosen.push(page);
            } else {
                chosen.extend(ages.any_of_blocks());
            }
        }
        chosen.retain(|page| has_content(*page, context.paging));
        chosen
    }

    /// Whether a block is mapped huge, or may be at its next use: one with a hole never is.
    fn may_be_huge(&mut self, block: u64, paging: &Paging) -> bool {
        let location = paging.space().locate_page(PageIdx(block * BLOCK_PAGES));
        let (addr, len) = (location.addr, BLOCK_PAGES * PAGE_SIZE);
        let whole = location.region.ram.next_hole(location.offset).is_ok_and(|hole| hole >= location.offset + len);
        // Whom nobody can tell apart may be.
        let mapped = self.pagemap().and_then(|pagemap| pagemap.mapped(addr, len).ok()).unwrap_or(Mapped::Huge);
        whole && mapped != Mapped::Small
    }

    /// The agent has unmapped pages that are followed from now on, if it is `done`.
    pub fn complete_age(&mut self, pages: Vec<PageIdx>, done: bool, paging: &Paging) {
        let armed = paging.machine().is_armed();
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

    /// Looks which pages were used since the last look. One fault maps many pages: the 64 KiB around it
    /// (`fault_around_bytes`), and since Linux 6.18 all of a large folio. So of a block's pages that are mapped now
    /// chance decides which one was used; the others are unmapped again and count as unused.
    pub fn look_at_ages(&mut self, paging: &Paging) {
        let Some(mut ages) = self.ages.take() else { return };
        let mut seen: HashMap<u64, Vec<usize>> = HashMap::new();
        let unseen = |(_, followed): &(usize, &Followed)| !followed.shown && !followed.age.is_used();
        for (location, followed) in ages.followed.iter().enumerate().filter(unseen) {
            if self.is_mapped(followed.page, paging) != Some(false) {
                seen.entry(block_of(followed.page)).or_default().push(location);
            }
        }
        for places in seen.into_values() {
            let used = places[ages.chance.below(places.len() as u64) as usize];
            places.iter().for_each(|location| ages.followed[*location].shown = true);
            ages.followed[used].age.note_use();
            self.uses += 1;
        }
        self.ages = Some(ages);
    }

    /// Nothing is followed any more: the VM is armed, and its faults say more; or nobody wants to know.
    pub fn stop_ages(&mut self, context: &mut Context<'_>) {
        let Some(ages) = &mut self.ages else { return };
        ages.followed.clear();
        ages.turned = None;
        let blocks: Vec<u64> = std::mem::take(&mut ages.blocks).into_iter().map(|(block, _)| block).collect();
        if !blocks.is_empty() {
            send_blocks(context, &blocks, |seq, ranges| Packet::Join { seq, ranges });
        }
    }

    /// The curve, once enough was seen.
    pub fn curve_of_ages(&self, paging: &Paging) -> Option<Curve> {
        let content = PageCount(paging.space().allocated() / PAGE_SIZE);
        let lru = self.ages.as_ref()?.footprint.curve(content)?;
        Some(paging.machine().curve_of(&lru))
    }
}

fn has_content(page: PageIdx, paging: &Paging) -> bool {
    let location = paging.space().locate_page(page);
    location.region.ram.next_data(location.offset) == Ok(Some(location.offset))
}

/// Blocks of a daemon before this one are mapped huge again, unless a balloon wants all of it small.
fn forget_splits(context: &mut Context<'_>) {
    if !context.agent.wants_small_folios() {
        context.agent.send(context.ring, &Packet::Folios { large: true });
    }
}

fn send_blocks(context: &mut Context<'_>, blocks: &[u64], packet: impl FnOnce(u64, Ranges) -> Packet) {
    let mut ranges = Ranges::default();
    for block in blocks {
        let location = context.paging.space().locate_page(PageIdx(block * BLOCK_PAGES));
        ranges.push(Range { addr: location.addr, len: BLOCK_PAGES * PAGE_SIZE });
    }
    context.agent.send_numbered(context.ring, |seq| packet(seq, ranges));
}
