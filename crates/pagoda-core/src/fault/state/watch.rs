//! The pages whose next use is to be noticed. See `fault/watch.rs`.

use std::collections::HashMap;

use crate::bits::PageSet;
use crate::policy::SampleCount;
use crate::units::{ChunkIdx, PageIdx};

/// Why a page is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It stands for a part of the VM in this period's estimate of the working set.
    Sample,
    /// Its uses make the miss-ratio curve.
    Curve,
}

/// Watched pages of a chunk, by purpose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Marks {
    /// These are watched for [`Purpose::Sample`].
    pub sample: PageSet,
    /// These are watched for [`Purpose::Curve`].
    pub curve: PageSet,
}

impl Marks {
    fn of(&mut self, purpose: Purpose) -> &mut PageSet {
        match purpose {
            Purpose::Sample => &mut self.sample,
            Purpose::Curve => &mut self.curve,
        }
    }

    /// Gives the pages that are watched for any purpose.
    pub fn all(self) -> PageSet {
        self.sample | self.curve
    }
}

/// The watched pages of a VM.
#[derive(Debug, Default)]
pub struct Watch {
    /// Pages that only their own fault may map.
    pub hidden: HashMap<ChunkIdx, Marks>,
    /// Wait until nothing is under way on their chunk and the agent is free.
    pub pending: Vec<(PageIdx, Purpose)>,
    /// Hidden, and the zap is on its way.
    pub zapping: Vec<(PageIdx, Purpose)>,
    /// Tells the zap under way from those before it, whose answers mean nothing any more.
    pub ticket: u32,
    /// Sampled pages that were used in this period.
    pub touched: u32,
    /// Sampled pages of borrowed chunks: nobody can tell whether they are read, and they take no DRAM of the VM's.
    pub borrowed: u32,
}

impl Watch {
    /// Pages of a chunk that may be mapped by nothing but their own fault.
    pub fn hidden(&self, chunk: ChunkIdx) -> PageSet {
        if self.hidden.is_empty() {
            return PageSet::EMPTY;
        }
        self.hidden.get(&chunk).map_or(PageSet::EMPTY, |marks| marks.all())
    }

    /// Counts the hidden pages.
    pub fn len(&self) -> usize {
        self.hidden.values().map(|marks| usize::from(marks.all().count())).sum()
    }

    /// Watches nothing. A zap on its way does no harm.
    pub fn clear(&mut self) {
        *self = Watch { ticket: self.ticket.wrapping_add(1), ..Watch::default() };
    }

    /// Takes up pages, which are unmapped when they can be.
    pub fn add(&mut self, pages: impl IntoIterator<Item = PageIdx>, purpose: Purpose) {
        self.pending.extend(pages.into_iter().map(|page| (page, purpose)));
    }

    /// Forgets all pages of one purpose.
    pub fn drop_all(&mut self, purpose: Purpose) {
        self.pending.retain(|(_, other)| *other != purpose);
        self.zapping.retain(|(_, other)| *other != purpose);
        self.hidden.retain(|_, marks| {
            *marks.of(purpose) = PageSet::EMPTY;
            !marks.all().is_empty()
        });
    }

    /// From now on nothing maps the page.
    pub fn hide(&mut self, page: PageIdx, purpose: Purpose) {
        self.hidden.entry(page.chunk()).or_default().of(purpose).set(page.index_in_chunk());
    }

    /// The page is borrowed, and not watched.
    pub fn note_borrowed(&mut self, purpose: Purpose) {
        self.borrowed += u32::from(purpose == Purpose::Sample);
    }

    /// It may be mapped again.
    pub fn unhide(&mut self, page: PageIdx, purpose: Purpose) {
        let Some(marks) = self.hidden.get_mut(&page.chunk()) else { return };
        marks.of(purpose).clear(page.index_in_chunk());
        if marks.all().is_empty() {
            self.hidden.remove(&page.chunk());
        }
    }

    /// Ends the watch of a page that is mapped without having been used.
    pub fn forget(&mut self, page: PageIdx) {
        self.show(page);
    }

    /// Ends the watch of a page; says why it was watched.
    pub fn show(&mut self, page: PageIdx) -> Option<Marks> {
        let (chunk, index) = (page.chunk(), page.index_in_chunk());
        let marks = self.hidden.get_mut(&chunk).filter(|marks| marks.all().contains(index))?;
        let was = Marks { sample: marks.sample & PageSet::single(index), curve: marks.curve & PageSet::single(index) };
        marks.sample.clear(index);
        marks.curve.clear(index);
        if marks.all().is_empty() {
            self.hidden.remove(&chunk);
        }
        self.zapping.retain(|(other, _)| *other != page);
        Some(was)
    }

    /// Counts this period's sampled pages. One is watched from the moment its zap is done.
    pub fn sample_count(&self) -> SampleCount {
        let hidden: u32 = self.hidden.values().map(|marks| u32::from(marks.sample.count())).sum();
        let untouched = hidden - self.zapping.iter().filter(|(_, purpose)| *purpose == Purpose::Sample).count() as u32;
        SampleCount { watched: untouched + self.touched + self.borrowed, touched: self.touched }
    }
}
