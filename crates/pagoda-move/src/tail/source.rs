//! The source's part of a post-copy: which page is sent next, and which can be forgotten.

use std::collections::VecDeque;

use pagoda_core::units::{ChunkIdx, PageCount, PageIdx};

use crate::map::{PageMap, PageRun};

#[derive(Clone, Debug)]
pub struct TailSource {
    /// Pages that the destination does not have for good. Nobody else has them.
    held: PageMap,
    /// Of these, the ones that have not been sent by this connection.
    unsent: PageMap,
    /// Asked for and unsent, the longest first. Each page once.
    demanded: VecDeque<PageIdx>,
    is_demanded: PageMap,
    hot_first: Vec<ChunkIdx>,
    at: usize,
    /// The connection is a later one, and the destination has not said what it lacks.
    awaits_map: bool,
}

impl TailSource {
    /// Pages that are missing at the destination, of a VM with these chunks.
    pub fn new(missing: PageMap, hot_first: Vec<ChunkIdx>) -> TailSource {
        let none = PageMap::empty(missing.pages());
        TailSource {
            unsent: missing.clone(),
            held: missing,
            demanded: VecDeque::new(),
            is_demanded: none,
            hot_first,
            at: 0,
            awaits_map: false,
        }
    }

    /// After a restart of the daemon: everything is held until the destination has said what it lacks.
    pub fn recover(pages: PageCount, hot_first: Vec<ChunkIdx>) -> TailSource {
        let mut tail = TailSource::new(PageMap::full(pages), hot_first);
        tail.lost_link();
        tail
    }

    /// Pages of this run that are unsent come before all others. What was sent is on its way; what is not held is there.
    pub fn demand(&mut self, run: PageRun) {
        for page in run.iter().filter(|page| page.0 < self.held.pages().0) {
            if self.unsent.contains(page) && !self.is_demanded.contains(page) {
                self.is_demanded.insert(page);
                self.demanded.push_back(page);
            }
        }
    }

    /// Pages that were given out by this connection, and of which the destination has not said that it has them.
    pub fn on_the_way(&self) -> PageCount {
        PageCount(self.held.count().0 - self.unsent.count().0)
    }

    /// The destination has these pages for good. Gives those that can be forgotten.
    pub fn kept(&mut self, runs: &[PageRun]) -> PageMap {
        let pages = self.held.pages();
        let mut there = PageMap::empty(pages);
        for run in runs.iter().filter(|run| run.chunk.0 < pages.chunks_ceil().0) {
            let pages = run.set() & self.held.chunk(run.chunk);
            there.insert_in(run.chunk, pages);
            self.held.remove_in(run.chunk, pages);
            self.unsent.remove_in(run.chunk, pages);
        }
        there
    }

    /// The destination's map of what it lacks, first on a later connection. All else it has for good. Gives what can be forgotten.
    pub fn receive_missing(&mut self, missing: &PageMap) -> PageMap {
        let mut there = self.held.clone();
        there.remove_all(missing);
        self.forget(&there);
        self.unsent = self.held.clone();
        self.awaits_map = false;
        there
    }

    pub fn lost_link(&mut self) {
        self.awaits_map = true;
        self.demanded.clear();
        self.is_demanded.take();
    }

    /// What a thread at the destination waits for, the longest first. It counts as sent.
    pub fn take_demanded(&mut self) -> Option<PageRun> {
        if self.awaits_map {
            return None;
        }
        while let Some(page) = self.demanded.pop_front() {
            self.is_demanded.remove(page);
            if self.unsent.contains(page) {
                let run = pagoda_core::bits::Run { start: page.index_in_chunk(), len: 1 };
                return Some(self.take(PageRun { chunk: page.chunk(), run }));
            }
        }
        None
    }

    /// The hottest of what nobody has asked for. It counts as sent.
    pub fn take_pushed(&mut self) -> Option<PageRun> {
        if self.awaits_map || self.unsent.is_empty() {
            return None;
        }
        for _ in 0..=self.hot_first.len() {
            let chunk = self.hot_first[self.at % self.hot_first.len()];
            if let Some(run) = self.unsent.chunk(chunk).runs().next() {
                return Some(self.take(PageRun { chunk, run }));
            }
            self.at = (self.at + 1) % self.hot_first.len();
        }
        unreachable!("an unsent page is in some chunk")
    }

    /// These pages, which were given out, could not be sent: they are to be sent still. Of which connection they are does not matter.
    pub fn put_back(&mut self, run: PageRun) {
        let pages = run.set() & self.held.chunk(run.chunk);
        self.unsent.insert_in(run.chunk, pages);
    }

    /// Pages that the destination does not have for good.
    pub const fn held(&self) -> &PageMap {
        &self.held
    }

    fn take(&mut self, run: PageRun) -> PageRun {
        self.unsent.remove_in(run.chunk, run.set());
        run
    }

    fn forget(&mut self, pages: &PageMap) {
        self.held.remove_all(pages);
        self.unsent.remove_all(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_core::bits::Run;

    fn run(chunk: u32, start: u8, len: u16) -> PageRun {
        PageRun { chunk: ChunkIdx(chunk), run: Run { start, len } }
    }

    fn tail() -> TailSource {
        TailSource::new(PageMap::full(PageCount(512)), vec![ChunkIdx(1), ChunkIdx(0)])
    }

    #[test]
    fn what_is_asked_for_comes_before_hot_and_hot_before_cold() {
        let mut tail = tail();
        tail.demand(run(0, 7, 2));
        tail.demand(run(0, 8, 1));
        assert_eq!(tail.take_demanded(), Some(run(0, 7, 1)));
        assert_eq!(tail.take_demanded(), Some(run(0, 8, 1)));
        assert_eq!(tail.take_pushed(), Some(run(1, 0, 256)));
        tail.demand(run(1, 3, 1));
        assert_eq!(tail.take_pushed(), Some(run(0, 0, 7)));
        assert_eq!(tail.take_pushed(), Some(run(0, 9, 247)));
        assert_eq!((tail.take_pushed(), tail.held().count()), (None, PageCount(512)));
    }

    #[test]
    fn a_page_is_forgotten_once_and_only_when_it_is_there_for_good() {
        let mut tail = tail();
        tail.take_pushed();
        assert_eq!(tail.kept(&[run(1, 0, 3)]).count(), PageCount(3));
        assert_eq!(tail.kept(&[run(1, 0, 4), run(3, 0, 256)]).count(), PageCount(1));
        tail.lost_link();
        tail.demand(run(0, 1, 1));
        assert_eq!(tail.take_pushed(), None);
        let mut missing = PageMap::empty(PageCount(512));
        (300..310).for_each(|page| missing.insert(PageIdx(page)));
        assert_eq!(tail.receive_missing(&missing).count(), PageCount(512 - 4 - 10));
        assert_eq!(tail.take_pushed(), Some(run(1, 44, 10)));
    }
}
