//! The destination's part of a post-copy: which pages are missing, who waits for them, and which the source may forget.

use pagoda_core::bits::PageSet;
use pagoda_core::units::PageIdx;

use crate::map::{PageMap, PageRun};
use crate::wire::limits::RUNS_MAX;

/// What a touch of a page finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The page is none of the tail's.
    Here,
    /// It is missing. The thread waits until it is stored.
    Wait,
}

#[derive(Clone, Debug)]
pub struct TailDestination {
    /// Not here for good.
    missing: PageMap,
    /// Of these, what has arrived and is being stored.
    storing: PageMap,
    /// Of these, what a thread waits for.
    waited: PageMap,
    /// Of these, what the source was asked for by this connection.
    asked: PageMap,
    /// Here for good, which the source has not been told by this connection.
    kept: PageMap,
}

impl TailDestination {
    /// A VM that lacks these pages: as the source said before the grant, or as this host's own tiers say after a restart.
    pub fn new(missing: PageMap) -> TailDestination {
        let none = PageMap::empty(missing.pages());
        TailDestination { missing, storing: none.clone(), waited: none.clone(), asked: none.clone(), kept: none }
    }

    /// A thread touches a page.
    pub fn fault(&mut self, page: PageIdx) -> Fault {
        if !self.missing.contains(page) {
            return Fault::Here;
        }
        self.waited.insert(page);
        Fault::Wait
    }

    /// What the source is to be asked for: at most one message. Empty if there is nothing to ask.
    pub fn take_demand(&mut self) -> Vec<PageRun> {
        if self.waited.is_empty() {
            return Vec::new();
        }
        let mut wanted = self.waited.clone();
        wanted.remove_all(&self.asked);
        wanted.remove_all(&self.storing);
        let runs = first_runs(&wanted);
        runs.iter().for_each(|run| self.asked.insert_in(run.chunk, run.set()));
        runs
    }

    /// Pages have arrived. Gives those that are to be stored. The others are here, and may have been written since: a second copy
    /// of them is dropped. None if the run is of pages that the VM does not have.
    pub fn arrived(&mut self, run: PageRun) -> Option<PageSet> {
        let is_inside = run.first().0 + run.count().0 <= self.missing.pages().0;
        if !is_inside {
            return None;
        }
        let new = (run.set() & self.missing.chunk(run.chunk)) - self.storing.chunk(run.chunk);
        self.storing.insert_in(run.chunk, new);
        Some(new)
    }

    /// Pages are in their places for good: a crash of the daemon leaves them there. Their threads go on.
    pub fn stored(&mut self, run: PageRun) {
        let pages = run.set() & self.missing.chunk(run.chunk);
        for map in [&mut self.missing, &mut self.storing, &mut self.waited, &mut self.asked] {
            map.remove_in(run.chunk, pages);
        }
        self.kept.insert_in(run.chunk, pages);
    }

    /// The guest gave pages back, whose content nobody needs any more. As good as stored.
    pub fn discarded(&mut self, run: PageRun) {
        self.stored(run);
    }

    /// What the source may forget: at most one message.
    pub fn take_kept(&mut self) -> Vec<PageRun> {
        if self.kept.is_empty() {
            return Vec::new();
        }
        let runs = first_runs(&self.kept);
        runs.iter().for_each(|run| self.kept.remove_in(run.chunk, run.set()));
        runs
    }

    /// The link is there again: the source first gets this map of what is missing. Whatever was on its way is lost.
    pub fn resume(&mut self) -> &PageMap {
        self.asked.take();
        self.kept.take();
        &self.missing
    }

    pub const fn missing(&self) -> &PageMap {
        &self.missing
    }

    /// Pages that threads wait for.
    pub const fn waited(&self) -> &PageMap {
        &self.waited
    }

    /// Every page is here for good.
    pub fn is_whole(&self) -> bool {
        self.missing.is_empty()
    }
}

/// As many runs as one message has room for.
fn first_runs(map: &PageMap) -> Vec<PageRun> {
    let runs = map.filled().flat_map(|(chunk, pages)| pages.runs().map(move |run| PageRun { chunk, run }));
    runs.take(RUNS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_core::bits::Run;
    use pagoda_core::units::{ChunkIdx, PageCount};

    fn run(chunk: u32, start: u8, len: u16) -> PageRun {
        PageRun { chunk: ChunkIdx(chunk), run: Run { start, len } }
    }

    #[test]
    fn a_second_copy_of_a_page_is_dropped() {
        let mut tail = TailDestination::new(PageMap::full(PageCount(300)));
        assert_eq!(tail.fault(PageIdx(5)), Fault::Wait);
        assert_eq!(tail.take_demand(), [run(0, 5, 1)]);
        assert_eq!(tail.take_demand(), []);
        assert_eq!(tail.arrived(run(0, 0, 10)), Some(PageSet::range(0, 10)));
        assert_eq!(tail.arrived(run(0, 5, 1)), Some(PageSet::EMPTY));
        tail.stored(run(0, 0, 10));
        assert_eq!(tail.arrived(run(0, 5, 7)), Some(PageSet::range(10, 2)));
        assert_eq!((tail.fault(PageIdx(5)), tail.take_kept()), (Fault::Here, vec![run(0, 0, 10)]));
        assert_eq!(tail.take_kept(), []);
        assert_eq!(tail.arrived(run(1, 40, 10)), None);
    }

    #[test]
    fn what_is_waited_for_is_asked_again_over_a_new_link() {
        let mut tail = TailDestination::new(PageMap::full(PageCount(256)));
        tail.fault(PageIdx(7));
        assert_eq!(tail.take_demand(), [run(0, 7, 1)]);
        tail.arrived(run(0, 7, 1));
        assert_eq!(tail.resume().count(), PageCount(256));
        // It has arrived and is being stored.
        assert_eq!(tail.take_demand(), []);
        tail.fault(PageIdx(9));
        assert_eq!(tail.take_demand(), [run(0, 9, 1)]);
        assert_eq!(tail.resume().count(), PageCount(256));
        assert_eq!(tail.take_demand(), [run(0, 9, 1)]);
    }
}
