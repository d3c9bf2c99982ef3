//! Which pages are missing, and who waits for what: between the tier and the threads that bring pages. No I/O happens here.

use std::collections::{BTreeMap, VecDeque};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::Pages;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};

use crate::tier::Content;

/// The content of a page that a read waits for.
#[derive(Debug)]
pub struct Delivery {
    pub page: PageIdx,
    pub content: Box<Content>,
}

/// Reads of a chunk's missing pages.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    /// A read waits for them.
    waited: PageSet,
    /// Subset of these: the source was asked for them by this connection.
    asked: PageSet,
}

/// The missing pages, the reads that wait for them, and what has come.
#[derive(Debug)]
pub struct State {
    /// The tier has these pages, and their content has not come.
    missing: Vec<PageSet>,
    count: u64,
    waits: BTreeMap<ChunkIdx, Waits>,
    /// What began to be waited for, the oldest first. It may have come since.
    to_ask: VecDeque<(ChunkIdx, PageSet)>,
    deliveries: VecDeque<Delivery>,
    /// Pages that are missing no more although they have not come, which the session has not heard of.
    dropped: BTreeMap<ChunkIdx, PageSet>,
    /// Pages that have come, which the engine has not heard of, in their order.
    came: VecDeque<(ChunkIdx, PageSet)>,
    /// Pages that the tier does not have any more. Their blocks are of no use.
    unused: BTreeMap<ChunkIdx, PageSet>,
}

impl State {
    pub fn new(missing: Vec<PageSet>) -> State {
        let count = count_of(&missing);
        State {
            missing,
            count,
            waits: BTreeMap::new(),
            to_ask: VecDeque::new(),
            deliveries: VecDeque::new(),
            dropped: BTreeMap::new(),
            came: VecDeque::new(),
            unused: BTreeMap::new(),
        }
    }

    /// From now on these pages are missing.
    pub fn begin(&mut self, missing: Vec<PageSet>) {
        assert_eq!(missing.len(), self.missing.len(), "of another VM");
        self.count = count_of(&missing);
        self.missing = missing;
    }

    pub fn missing_of(&self, chunk: ChunkIdx) -> PageSet {
        self.missing[chunk.as_usize()]
    }

    /// Every chunk that lacks something, in order.
    pub fn missing(&self) -> Vec<(ChunkIdx, PageSet)> {
        let all = (0..).map(ChunkIdx).zip(self.missing.iter().copied());
        all.filter(|(_, pages)| !pages.is_empty()).collect()
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// A read wants these pages. Those of them that are missing are waited for from now on: they are returned.
    pub fn want(&mut self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let missing = pages & self.missing_of(chunk);
        if !missing.is_empty() {
            let waits = self.waits.entry(chunk).or_default();
            let new = missing - waits.waited;
            waits.waited |= new;
            if !new.is_empty() {
                self.to_ask.push_back((chunk, new));
            }
        }
        missing
    }

    /// There is something to ask the source for.
    pub fn has_demands(&self) -> bool {
        !self.to_ask.is_empty()
    }

    /// What the source is to be asked for, which counts as asked.
    pub fn take_demands(&mut self) -> Vec<Pages> {
        let mut demands = Vec::new();
        for (chunk, pages) in std::mem::take(&mut self.to_ask) {
            let Some(waits) = self.waits.get_mut(&chunk) else { continue };
            let new = pages & (waits.waited - waits.asked);
            waits.asked |= new;
            demands.extend(new.runs().map(|run| Pages { chunk, run }));
        }
        demands
    }

    /// Whatever the source was asked for is lost.
    pub fn forget_demands(&mut self) {
        let mut again: Vec<_> = Vec::new();
        for (chunk, waits) in &mut self.waits {
            if !waits.asked.is_empty() {
                again.push((*chunk, std::mem::take(&mut waits.asked)));
            }
        }
        // They have waited longer than what nobody was asked for yet.
        again.into_iter().rev().for_each(|demand| self.to_ask.push_front(demand));
    }

    /// Content of pages is here, for good or not yet: who waits for some of them gets it. `content_of` gives a page's. True if
    /// somebody does.
    pub fn deliver(&mut self, chunk: ChunkIdx, pages: PageSet, content_of: impl Fn(u8) -> Box<Content>) -> bool {
        let Some(waits) = self.waits.get_mut(&chunk) else { return false };
        let wanted = waits.waited & pages;
        self.forget_waits(chunk, wanted);
        let delivery = |index| Delivery { page: chunk.page(index), content: content_of(index) };
        self.deliveries.extend(wanted.iter().map(delivery));
        !wanted.is_empty()
    }

    /// The content of these pages has come for good. Returns those of them that were missing until now; of the others the blocks
    /// are of no use.
    pub fn came(&mut self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let new = pages & self.missing_of(chunk);
        self.remove(chunk, new);
        match self.came.back_mut() {
            _ if new.is_empty() => {}
            Some((last, came)) if *last == chunk => *came |= new,
            _ => self.came.push_back((chunk, new)),
        }
        self.note_unused(chunk, pages - new);
        new
    }

    /// The tier does not have these pages any more. True if some of them were missing.
    pub fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> bool {
        let gone = pages & self.missing_of(chunk);
        self.remove(chunk, gone);
        self.forget_waits(chunk, gone);
        if !gone.is_empty() {
            *self.dropped.entry(chunk).or_default() |= gone;
        }
        self.note_unused(chunk, pages - gone);
        !gone.is_empty()
    }

    /// What was dropped before it came.
    pub fn take_dropped(&mut self) -> Vec<Pages> {
        let dropped = std::mem::take(&mut self.dropped).into_iter();
        dropped.flat_map(|(chunk, pages)| pages.runs().map(move |run| Pages { chunk, run })).collect()
    }

    pub fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    pub fn take_deliveries(&mut self, into: &mut VecDeque<Delivery>) {
        into.append(&mut self.deliveries);
    }

    pub fn take_came(&mut self) -> VecDeque<(ChunkIdx, PageSet)> {
        std::mem::take(&mut self.came)
    }

    pub fn take_unused(&mut self) -> BTreeMap<ChunkIdx, PageSet> {
        std::mem::take(&mut self.unused)
    }

    /// An engine has ended, and nobody waits for what it wanted.
    pub fn forget_engine(&mut self) {
        self.waits.clear();
        self.to_ask.clear();
        self.deliveries.clear();
        // The next one looks for itself.
        self.came.clear();
    }

    /// Bytes of content on its way to the engine.
    pub fn delivery_bytes(&self) -> u64 {
        self.deliveries.len() as u64 * PAGE_SIZE
    }

    fn note_unused(&mut self, chunk: ChunkIdx, pages: PageSet) {
        if !pages.is_empty() {
            *self.unused.entry(chunk).or_default() |= pages;
        }
    }

    fn forget_waits(&mut self, chunk: ChunkIdx, pages: PageSet) {
        if let Some(waits) = self.waits.get_mut(&chunk) {
            waits.waited -= pages;
            waits.asked -= pages;
            if waits.waited.is_empty() {
                self.waits.remove(&chunk);
            }
        }
    }

    fn remove(&mut self, chunk: ChunkIdx, pages: PageSet) {
        let missing = &mut self.missing[chunk.as_usize()];
        assert!(missing.contains_all(pages), "pages come once");
        *missing -= pages;
        self.count -= u64::from(pages.count());
    }
}

fn count_of(missing: &[PageSet]) -> u64 {
    missing.iter().map(|pages| u64::from(pages.count())).sum()
}
