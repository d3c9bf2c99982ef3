//! A set of pages of a whole VM: one bit a page, in chunks.

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::units::{ChunkIdx, PageCount, PageIdx};

/// Pages of a VM of a fixed size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMap {
    chunks: Vec<PageSet>,
    pages: PageCount,
    count: PageCount,
}

impl PageMap {
    /// No page of a VM of so many.
    pub fn empty(pages: PageCount) -> PageMap {
        PageMap { chunks: vec![PageSet::EMPTY; pages.chunks_ceil().as_usize()], pages, count: PageCount::ZERO }
    }

    /// Every page of a VM of so many.
    pub fn full(pages: PageCount) -> PageMap {
        let mut map = PageMap::empty(pages);
        for chunk in pages.chunks_ceil().iter() {
            map.insert_in(chunk, map.valid(chunk));
        }
        map
    }

    /// Pages of the VM, in the set or not.
    pub const fn pages(&self) -> PageCount {
        self.pages
    }

    pub const fn count(&self) -> PageCount {
        self.count
    }

    pub const fn is_empty(&self) -> bool {
        self.count.0 == 0
    }

    /// The pages of a chunk that the VM has. The last chunk may end early.
    pub fn valid(&self, chunk: ChunkIdx) -> PageSet {
        let left = self.pages.0.saturating_sub(chunk.first_page().0);
        PageSet::range(0, left.min(PageSet::FULL.count().into()) as u16)
    }

    pub fn contains(&self, page: PageIdx) -> bool {
        self.chunk(page.chunk()).contains(page.index_in_chunk())
    }

    /// The set's pages of one chunk. Panics for a chunk that the VM does not have.
    pub fn chunk(&self, chunk: ChunkIdx) -> PageSet {
        self.chunks[chunk.as_usize()]
    }

    /// Adds pages of one chunk, all of which the VM has to have.
    pub fn insert_in(&mut self, chunk: ChunkIdx, pages: PageSet) {
        assert!(self.valid(chunk).contains_all(pages), "{chunk:?} has pages beyond the VM's end");
        self.put(chunk, self.chunk(chunk) | pages);
    }

    pub fn remove_in(&mut self, chunk: ChunkIdx, pages: PageSet) {
        self.put(chunk, self.chunk(chunk) - pages);
    }

    pub fn insert(&mut self, page: PageIdx) {
        self.insert_in(page.chunk(), PageSet::single(page.index_in_chunk()));
    }

    pub fn remove(&mut self, page: PageIdx) {
        self.remove_in(page.chunk(), PageSet::single(page.index_in_chunk()));
    }

    pub fn insert_all(&mut self, other: &PageMap) {
        assert_eq!(self.pages, other.pages, "maps of two VMs");
        other.filled().for_each(|(chunk, pages)| self.insert_in(chunk, pages));
    }

    pub fn remove_all(&mut self, other: &PageMap) {
        assert_eq!(self.pages, other.pages, "maps of two VMs");
        other.filled().for_each(|(chunk, pages)| self.remove_in(chunk, pages));
    }

    /// Removes what the other has not.
    pub fn retain(&mut self, other: &PageMap) {
        assert_eq!(self.pages, other.pages, "maps of two VMs");
        for chunk in self.pages.chunks_ceil().iter() {
            self.put(chunk, self.chunk(chunk) & other.chunk(chunk));
        }
    }

    /// The set, which is empty afterwards.
    pub fn take(&mut self) -> PageMap {
        std::mem::replace(self, PageMap::empty(self.pages))
    }

    /// Chunks with at least one page of the set, in order.
    pub fn filled(&self) -> impl Iterator<Item = (ChunkIdx, PageSet)> + '_ {
        let all = self.pages.chunks_ceil().iter().zip(self.chunks.iter().copied());
        all.filter(|(_, pages)| !pages.is_empty())
    }

    pub fn iter(&self) -> impl Iterator<Item = PageIdx> + '_ {
        self.filled().flat_map(|(chunk, pages)| pages.iter().map(move |index| chunk.page(index)))
    }

    fn put(&mut self, chunk: ChunkIdx, pages: PageSet) {
        let before = std::mem::replace(&mut self.chunks[chunk.as_usize()], pages);
        self.count += PageCount(pages.count().into());
        self.count -= PageCount(before.count().into());
    }
}

/// Consecutive pages of one chunk. Never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    pub chunk: ChunkIdx,
    pub run: Run,
}

impl PageRun {
    pub const fn first(self) -> PageIdx {
        self.chunk.page(self.run.start)
    }

    pub const fn count(self) -> PageCount {
        PageCount(self.run.len as u64)
    }

    pub fn set(self) -> PageSet {
        PageSet::range(self.run.start, self.run.len)
    }

    pub fn iter(self) -> impl Iterator<Item = PageIdx> {
        self.set().iter().map(move |index| self.chunk.page(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_vm_may_end_within_a_chunk() {
        let map = PageMap::full(PageCount(300));
        assert_eq!((map.count(), map.chunk(ChunkIdx(1)).count()), (PageCount(300), 44));
        assert!(std::panic::catch_unwind(move || map.clone().insert(PageIdx(300))).is_err());
    }

    proptest! {
        #[test]
        fn a_map_is_a_set(steps in proptest::collection::vec((0..3u8, 0..600u64, 1..40u64), 0..60)) {
            let mut map = PageMap::empty(PageCount(600));
            let mut model = BTreeSet::new();
            for (what, first, len) in steps {
                let range = first..(first + len).min(600);
                match what {
                    0 => range.for_each(|page| { map.insert(PageIdx(page)); model.insert(page); }),
                    1 => range.for_each(|page| { map.remove(PageIdx(page)); model.remove(&page); }),
                    _ => {
                        let mut other = PageMap::empty(PageCount(600));
                        range.clone().for_each(|page| other.insert(PageIdx(page)));
                        map.insert_all(&other);
                        model.extend(range);
                    }
                }
                prop_assert_eq!(map.count().0 as usize, model.len());
            }
            prop_assert!(map.iter().map(|page| page.0).eq(model.iter().copied()));
            let taken = map.take();
            prop_assert!(map.is_empty());
            map.insert_all(&taken);
            map.remove_all(&taken);
            prop_assert!(map.is_empty() && taken.count().0 as usize == model.len());
        }
    }
}
