//! How pages in the RAM file are mapped: writable, or write-protected so that their first write is seen.

use crate::bits::PageSet;
use crate::stats::Metric;
use crate::units::ChunkIdx;

use super::action::{Access, Action, Actions, Pages};
use super::machine::Machine;
use super::table::Chunk;

/// The first write to a page of an image takes the frozen pages of its aligned block of so many along. A fault for each would
/// take the guest 20 us; the copies for which a write waits so take less than 100.
const BLOCK: u16 = 16;
/// Pages written one behind the other, from which on a guess may open pages that the next image would not have to copy. A
/// guest that writes here and there so makes its next image by no page larger than what it wrote.
const SWEEP_PAGES: u16 = 4;

impl Machine {
    /// Makes pages in the RAM file reachable, the one that was asked for first. `writable`: all of them.
    pub(super) fn map(
        &mut self,
        chunk: ChunkIdx,
        pages: PageSet,
        first: Option<(u8, Access)>,
        writable: bool,
        out: &mut Actions,
    ) {
        let c = self.chunk(chunk);
        let kept = c.clean | c.imaged();
        let touched = match first {
            Some((index, Access::Write)) => pages & opened_by_write(c, c.ram - kept, index),
            _ => PageSet::EMPTY,
        };
        let written = match () {
            () if !self.config.protect => pages,
            // A guess is no reason to take a copy of a page, now or for the next image.
            () if writable => (pages - c.imaged()) | touched,
            () => touched,
        };
        let (open, protected) = ((pages - kept) | written, (pages & kept) - written);
        self.open(chunk, open, out);
        let c = &mut self.chunks[chunk.as_usize()];
        c.clean -= open;
        c.mapped |= pages;
        let used = c.prefetched & pages;
        c.prefetched -= used;
        self.stats.add(Metric::PrefetchedUsed, u64::from(used.count()));
        let mut push = |pages: PageSet, protect: bool| {
            out.extend(pages.runs().map(|run| Action::Map { pages: Pages { chunk, run }, protect }));
        };
        match first {
            Some((index, _)) if protected.contains(index) => {
                push(single(protected, index), true);
                push(protected - single(protected, index), true);
                push(open, false);
            }
            Some((index, _)) if open.contains(index) => {
                push(single(open, index), false);
                push(open - single(open, index), false);
                push(protected, true);
            }
            _ => {
                push(open, false);
                push(protected, true);
            }
        }
    }

    /// A protected page was written: it and, where the guest writes on, what follows are protected no more.
    pub(super) fn end_protection(&mut self, chunk: ChunkIdx, index: u8, out: &mut Actions) {
        let c = self.chunk(chunk);
        let mapped = c.ram & c.mapped;
        // A page that an image had protected is no page that was expected not to be written.
        let is_surprise = c.clean.contains(index) || c.open.contains(index);
        let extent = (opened_by_write(c, mapped & c.open, index) & mapped) | PageSet::single(index);
        self.open(chunk, extent, out);
        let c = &mut self.chunks[chunk.as_usize()];
        c.clean -= extent;
        c.mapped |= extent;
        out.extend(extent.runs().map(|run| Action::Unprotect { pages: Pages { chunk, run } }));
        if is_surprise {
            self.predictor.note_write();
        }
        self.pattern.on_chunk_written(chunk);
    }
}

/// The maximal run around a page as a set; just the page when it is not in `pages`.
pub fn single(pages: PageSet, index: u8) -> PageSet {
    pages.run_around(index).map_or(PageSet::single(index), |run| PageSet::range(run.start, run.len))
}

/// Pages that a write to `index` opens at once: as many as were written right before it, doubled, and downwards the same. A
/// sweep over a chunk so costs some eight faults in either direction, a lone write one page.
fn write_extent(written: PageSet, index: u8) -> PageSet {
    let run = |neighbour: Option<u8>| neighbour.and_then(|page| written.run_around(page));
    let before = run(index.checked_sub(1)).map_or(0, |run| u16::from(index) - u16::from(run.start));
    let after = run(index.checked_add(1)).map_or(0, |run| run.end() - u16::from(index) - 1);
    let up = (before * 2).max(1).min(256 - u16::from(index));
    let down = (after * 2).max(1).min(u16::from(index) + 1);
    PageSet::range(index, up) | PageSet::range((u16::from(index) + 1 - down) as u8, down)
}

/// Pages that a write to `index` opens, if `written` could be written before.
fn opened_by_write(chunk: &Chunk, written: PageSet, index: u8) -> PageSet {
    let block = PageSet::range((u16::from(index) / BLOCK * BLOCK) as u8, BLOCK);
    // What the image alone protects is open again without a loss: it is to be copied anyway, and is no clean page.
    let copied = chunk.frozen - chunk.inherited;
    let extent = (write_extent(written, index) - (chunk.frozen - block)) | ((copied & block) - chunk.clean);
    // What would be the parent's in the next image is opened by its own write, or by a sweep.
    let inherited_next = chunk.same - copied - PageSet::single(index);
    extent - if is_sweep(written, index) { inherited_next - block } else { inherited_next }
}

/// Right beside the page, some were written one behind the other.
fn is_sweep(written: PageSet, index: u8) -> bool {
    let is_long = |page: u8| written.run_around(page).is_some_and(|run| run.len >= SWEEP_PAGES);
    [index.checked_sub(1), index.checked_add(1)].into_iter().flatten().any(is_long)
}

#[cfg(test)]
mod tests {
    use super::{Chunk, opened_by_write, write_extent};
    use crate::bits::PageSet;

    /// Faults of a sweep that writes a whole chunk whose pages are all protected.
    fn faults(sweep: impl Iterator<Item = u8>) -> u32 {
        let mut written = PageSet::EMPTY;
        sweep.fold(0, |faults, page| {
            let is_protected = !written.contains(page);
            if is_protected {
                written |= write_extent(written, page);
            }
            faults + u32::from(is_protected)
        })
    }

    #[test]
    fn a_sweep_of_writes_opens_more_and_more_in_either_direction() {
        // 1, 2, 6, 18, 54, 162 pages, and what is left.
        assert_eq!((faults(0..=255), faults((0..=255).rev())), (7, 7));
        let strided = |step: usize| faults((0..=255).step_by(step));
        assert_eq!((strided(2), strided(16)), (128, 16), "what is written here and there opens nothing else");
        let both = PageSet::range(4, 2) | PageSet::range(7, 3);
        assert_eq!(write_extent(both, 6), PageSet::range(6, 4) | PageSet::range(1, 6), "a gap that is closed");
        for index in 0..=255 {
            let all_but_one = PageSet::FULL - PageSet::single(index);
            assert!(write_extent(all_but_one, index).contains(index));
        }
    }

    #[test]
    fn a_guess_makes_the_next_image_larger_only_in_a_sweep() {
        let open = |order: &[u8]| {
            let mut c = Chunk { ram: PageSet::FULL, same: PageSet::FULL, ..Chunk::EMPTY };
            let mut faults = 0;
            for page in order.iter().filter(|page| !c.open.contains(**page)).collect::<Vec<_>>() {
                if c.open.contains(*page) {
                    continue;
                }
                let extent = opened_by_write(&c, c.open, *page);
                assert!(extent.contains(*page) && (extent - c.open).count() <= 16);
                (c.open, c.same, faults) = (c.open | extent, c.same - extent, faults + 1);
            }
            (c.open.count(), faults)
        };
        let all: Vec<u8> = (0..=255).collect();
        // 1, 1, 1, 1, 8 and 4 pages, and the other fifteen blocks.
        assert_eq!(open(&all), (256, 21));
        assert_eq!(open(&all.iter().rev().copied().collect::<Vec<_>>()), (256, 21));
        assert_eq!(open(&[7, 8, 6, 9]), (4, 4), "no page but those that were written");
        assert_eq!(open(&(0..=255).step_by(2).collect::<Vec<_>>()), (128, 128));
    }

    #[test]
    fn no_write_waits_for_more_than_a_few_copies() {
        let mut chunk = Chunk { ram: PageSet::FULL, frozen: PageSet::FULL, ..Chunk::EMPTY };
        let mut copies = Vec::new();
        for page in (0..=255u8).map(|page| page.wrapping_mul(37)) {
            if chunk.frozen.contains(page) {
                let extent = opened_by_write(&chunk, chunk.ram - chunk.frozen, page) & chunk.frozen;
                assert!(extent.contains(page));
                copies.push(extent.count());
                chunk.frozen -= extent;
            }
        }
        assert_eq!(copies, [16; 16]);
    }

    #[test]
    fn a_write_to_a_clean_page_of_an_image_opens_no_other_clean_page() {
        let frozen = PageSet::range(10, 200);
        let chunk = Chunk { ram: PageSet::FULL, frozen, clean: PageSet::range(0, 100), ..Chunk::EMPTY };
        assert_eq!(opened_by_write(&chunk, PageSet::EMPTY, 70), PageSet::single(70));
        assert_eq!(
            opened_by_write(&chunk, PageSet::range(3, 2), 5),
            PageSet::range(5, 4),
            "what is not frozen is not bounded"
        );
    }
}
