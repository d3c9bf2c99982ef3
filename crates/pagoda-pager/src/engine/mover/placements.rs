//! Copies that a tier writes for whoever the VM moves to, until it has said what became of each page.

use std::sync::mpsc::Sender;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::Pages;
use pagoda_core::units::ChunkIdx;

use crate::handle::Copied;
use crate::tier::Placed;

/// A run that was handed to the tier.
#[derive(Debug)]
pub struct Placement {
    pub chunk: ChunkIdx,
    /// Who has asked for it.
    pub to: Sender<Copied>,
    pub there: PageSet,
    pub declined: PageSet,
    left: PageSet,
}

/// Placements that the tier has not finished, each with pages of one chunk.
#[derive(Debug, Default)]
pub struct Placements(Vec<Placement>);

impl Placements {
    /// The tier has begun to write these pages, none of which it was writing.
    pub fn add(&mut self, pages: Pages, to: Sender<Copied>) {
        let Pages { chunk, run } = pages;
        let left = PageSet::range(run.start, run.len);
        assert!(!self.has_any(pages), "a page is placed twice at a time");
        self.0.push(Placement { chunk, to, there: PageSet::EMPTY, declined: PageSet::EMPTY, left });
    }

    /// The tier is writing one of these pages.
    pub fn has_any(&self, pages: Pages) -> bool {
        let Pages { chunk, run } = pages;
        let asked = PageSet::range(run.start, run.len);
        let whole = |placement: &Placement| placement.left | placement.there | placement.declined;
        self.0.iter().any(|placement| placement.chunk == chunk && whole(placement).intersects(asked))
    }

    /// What became of a page. The run, if that was its last one.
    pub fn note(&mut self, placed: Placed) -> Option<Placement> {
        let (chunk, index) = (placed.page.chunk(), placed.page.index_in_chunk());
        let waits = |placement: &Placement| placement.chunk == chunk && placement.left.contains(index);
        let at = self.0.iter().position(waits)?;
        let placement = &mut self.0[at];
        let page = PageSet::single(index);
        placement.left -= page;
        let set = if placed.is_there { &mut placement.there } else { &mut placement.declined };
        *set |= page;
        placement.left.is_empty().then(|| self.0.swap_remove(at))
    }

    /// All that has not ended, with its pages as not there.
    pub fn take_all(&mut self) -> Vec<Placement> {
        let mut all = std::mem::take(&mut self.0);
        for placement in &mut all {
            placement.declined |= placement.left | placement.there;
            (placement.left, placement.there) = (PageSet::EMPTY, PageSet::EMPTY);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use pagoda_core::bits::Run;

    use super::*;

    #[test]
    fn a_run_ends_with_its_last_page() {
        let (to, _copies) = channel();
        let pages = |chunk, start, len| Pages { chunk: ChunkIdx(chunk), run: Run { start, len } };
        let mut placements = Placements::default();
        placements.add(pages(1, 10, 3), to.clone());
        placements.add(pages(2, 10, 1), to);
        assert!(placements.has_any(pages(1, 12, 9)) && !placements.has_any(pages(1, 13, 9)));
        let placed = |chunk, index, is_there| Placed { page: ChunkIdx(chunk).page(index), is_there };
        assert!(placements.note(placed(1, 11, true)).is_none() && placements.note(placed(1, 11, true)).is_none());
        assert!(placements.note(placed(1, 10, false)).is_none() && placements.has_any(pages(1, 11, 1)));
        let ended = placements.note(placed(1, 12, true)).unwrap();
        let there = PageSet::range(11, 2);
        assert_eq!((ended.chunk, ended.there, ended.declined), (ChunkIdx(1), there, PageSet::single(10)));
        let left = placements.take_all();
        assert_eq!((left.len(), left[0].declined), (1, PageSet::single(10)));
        assert!(placements.note(placed(2, 10, true)).is_none());
    }
}
