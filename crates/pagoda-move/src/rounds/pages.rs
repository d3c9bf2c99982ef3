//! Where each page of a VM stands in a pre-copy.
//!
//! A page is *ready* (it may be copied), *held* (a direct I/O in flight may have begun before its protection), *sent* (and not
//! acknowledged), or at the destination. A write takes it back to held from wherever it was.

use std::collections::VecDeque;

use pagoda_core::units::{ChunkIdx, PageCount};

use crate::map::{PageMap, PageRun};

/// A value of the clock of direct I/O. A page has that to which the clock went on after its protection; an I/O has that at which it
/// began. I/Os of this value or later have found the page protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct IoEpoch(pub u64);

impl IoEpoch {
    /// No direct I/O is in flight.
    pub const IDLE: IoEpoch = IoEpoch(u64::MAX);
}

/// Sets of held pages with epochs of their own. More are merged, which holds the earlier of two for longer than they need.
const HELD_MAX: usize = 8;

#[derive(Clone, Debug)]
pub(super) struct Pages {
    ready: PageMap,
    held: VecDeque<(IoEpoch, PageMap)>,
    sent_now: PageMap,
    /// Sent in rounds that have ended.
    sent_before: PageMap,
    missing: PageMap,
    hot_first: Vec<ChunkIdx>,
    /// The next of `hot_first`.
    at: usize,
}

impl Pages {
    pub fn new(pages: PageCount, hot_first: Vec<ChunkIdx>, protected_at: IoEpoch) -> Pages {
        assert_has_all(&hot_first, pages);
        let empty = PageMap::empty(pages);
        Pages {
            ready: empty.clone(),
            held: VecDeque::from([(protected_at, PageMap::full(pages))]),
            sent_now: empty.clone(),
            sent_before: empty.clone(),
            missing: empty,
            hot_first,
            at: 0,
        }
    }

    pub fn written(&mut self, pages: &PageMap, protected_at: IoEpoch) {
        if pages.is_empty() {
            return;
        }
        self.forget(pages);
        match self.held.back_mut() {
            Some((epoch, held)) if *epoch == protected_at => held.insert_all(pages),
            last => {
                assert!(last.is_none_or(|(epoch, _)| *epoch < protected_at), "the clock of direct I/O goes on");
                self.held.push_back((protected_at, pages.clone()));
            }
        }
        if self.held.len() > HELD_MAX {
            let (_, first) = self.held.pop_front().expect("more than one");
            self.held.front_mut().expect("more than one").1.insert_all(&first);
        }
    }

    pub fn set_oldest_io(&mut self, oldest: IoEpoch) {
        while self.held.front().is_some_and(|(protected_at, _)| oldest >= *protected_at) {
            let (_, held) = self.held.pop_front().expect("looked at");
            self.ready.insert_all(&held);
        }
    }

    /// Hot chunks first. The rest of a chunk comes before the next chunk.
    pub fn take_run(&mut self) -> Option<PageRun> {
        if self.ready.is_empty() {
            return None;
        }
        // What became ready behind is found from the beginning.
        for _ in 0..=self.hot_first.len() {
            let chunk = self.hot_first[self.at % self.hot_first.len()];
            if let Some(run) = self.ready.chunk(chunk).runs().next() {
                let run = PageRun { chunk, run };
                self.ready.remove_in(chunk, run.set());
                self.sent_now.insert_in(chunk, run.set());
                return Some(run);
            }
            self.at = (self.at + 1) % self.hot_first.len();
        }
        unreachable!("a ready page is in some chunk")
    }

    /// What is known of heat has changed.
    pub fn reorder(&mut self, hot_first: Vec<ChunkIdx>) {
        assert_has_all(&hot_first, self.ready.pages());
        (self.hot_first, self.at) = (hot_first, 0);
    }

    pub fn begin_round(&mut self) {
        self.at = 0;
    }

    pub fn end_round(&mut self) {
        let sent = self.sent_now.take();
        self.sent_before.insert_all(&sent);
    }

    /// A round was acknowledged. Pages of earlier ones are known to be there when the last one is.
    pub fn kept(&mut self, is_last: bool) {
        if is_last {
            self.sent_before.take();
        }
    }

    pub fn lost_link(&mut self) {
        for sent in [self.sent_now.take(), self.sent_before.take()] {
            self.ready.insert_all(&sent);
        }
    }

    pub fn stopped(&mut self, written: &PageMap) {
        self.set_oldest_io(IoEpoch::IDLE);
        self.forget(written);
        self.ready.insert_all(written);
    }

    /// Copies of these pages are worth nothing any more.
    fn forget(&mut self, pages: &PageMap) {
        for map in [&mut self.ready, &mut self.sent_now, &mut self.sent_before] {
            map.remove_all(pages);
        }
        self.held.iter_mut().for_each(|(_, held)| held.remove_all(pages));
        self.held.retain(|(_, held)| !held.is_empty());
    }

    /// What was to be sent is missing at the destination instead.
    pub fn leave_missing(&mut self) {
        self.missing = self.ready.take();
    }

    /// What is missing beside these is not.
    pub fn keep_missing(&mut self, these: &PageMap) {
        self.missing.retain(these);
    }

    pub fn missing(&self) -> &PageMap {
        &self.missing
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub fn held(&self) -> PageCount {
        self.held.iter().map(|(_, held)| held.count()).sum()
    }

    pub fn is_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// To be sent, now or later.
    pub fn left(&self) -> PageCount {
        self.ready.count() + self.held()
    }

    /// Something of what the destination needs has not been sent, or not acknowledged.
    pub fn must_send(&self) -> bool {
        self.has_ready() || self.is_held() || !self.sent_now.is_empty() || !self.sent_before.is_empty()
    }
}

fn assert_has_all(order: &[ChunkIdx], pages: PageCount) {
    let mut all = order.to_vec();
    all.sort_unstable();
    assert!(all.into_iter().eq(pages.chunks_ceil().iter()), "the order of chunks has each chunk once");
}
