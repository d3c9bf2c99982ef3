//! Notes which pages of its image a VM needs that was made of it a moment ago. No I/O happens here, and nothing is allocated once
//! it has begun.

use pagoda_core::bits::PageSet;
use pagoda_core::units::{ChunkCount, ChunkIdx, PageCount};
use pagoda_image::limits::TOUCHED_RUNS_MAX;
use pagoda_image::{Touched, TouchedRun};

/// This part of the VM's memory is noted at most: a VM that needs more of it at once sweeps over it, which read-ahead is for.
const RECORD_PART: u64 = 4;
/// A record is made anew when more pages were needed that it lacks than this part of those that it has.
const LACKING_PART: u64 = 8;

/// Collects pages in the order in which the VM needs them.
#[derive(Debug)]
pub struct Recorder {
    /// Pages that were noted, or are in the record that was read.
    seen: Vec<PageSet>,
    runs: Vec<TouchedRun>,
    pages: u64,
    pages_max: u64,
    is_full: bool,
}

impl Recorder {
    /// Notes what is not known already.
    pub fn new(chunks: ChunkCount, known: &Touched) -> Recorder {
        let mut seen = vec![PageSet::EMPTY; chunks.as_usize()];
        for (chunk, pages) in by_chunk(known.runs()) {
            seen[chunk.as_usize()] |= pages;
        }
        let runs = Vec::with_capacity(TOUCHED_RUNS_MAX);
        Recorder { seen, runs, pages: 0, pages_max: chunks.pages().0 / RECORD_PART, is_full: false }
    }

    /// The VM needs these pages.
    pub fn note(&mut self, chunk: ChunkIdx, pages: PageSet) {
        let new = pages - self.seen[chunk.as_usize()];
        for run in new.runs() {
            let (first, count) = (chunk.page(run.start), u32::from(run.len));
            self.is_full |= self.pages + u64::from(count) > self.pages_max || self.runs.len() == TOUCHED_RUNS_MAX;
            if self.is_full {
                return;
            }
            self.pages += u64::from(count);
            match self.runs.last_mut() {
                Some(last) if last.first.0 + u64::from(last.count) == first.0 => last.count += count,
                _ => self.runs.push(TouchedRun { first, count }),
            }
        }
        self.seen[chunk.as_usize()] |= new;
    }

    /// Whether nothing more is noted.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// The record that is to be kept in place of the `known` one, if one is.
    pub fn into_record(self, known: Touched) -> Option<Touched> {
        let is_due = self.pages > 0 && self.pages > known.pages().0 / LACKING_PART;
        is_due.then(|| known.and(Touched::new(self.runs), PageCount(self.pages_max)))
    }

    /// Bytes of memory that it takes.
    pub fn memory_bytes(&self) -> u64 {
        (self.seen.capacity() * size_of::<PageSet>() + self.runs.capacity() * size_of::<TouchedRun>()) as u64
    }
}

/// The runs, cut where chunks begin.
pub fn by_chunk(runs: &[TouchedRun]) -> impl Iterator<Item = (ChunkIdx, PageSet)> + '_ {
    runs.iter().flat_map(|run| {
        let (mut at, end) = (run.first, run.first.0 + u64::from(run.count));
        std::iter::from_fn(move || {
            let (chunk, index) = (at.chunk(), at.index_in_chunk());
            let len = (end - at.0).min(256 - u64::from(index)) as u16;
            at.0 += u64::from(len);
            (len > 0).then(|| (chunk, PageSet::range(index, len)))
        })
    })
}

#[cfg(test)]
mod tests {
    use pagoda_core::units::PageIdx;

    use super::*;

    const CHUNKS: ChunkCount = ChunkCount(8);

    fn run(first: u64, count: u32) -> TouchedRun {
        TouchedRun { first: PageIdx(first), count }
    }

    fn noted(known: &Touched, notes: &[(u32, PageSet)]) -> Recorder {
        let mut recorder = Recorder::new(CHUNKS, known);
        notes.iter().for_each(|(chunk, pages)| recorder.note(ChunkIdx(*chunk), *pages));
        recorder
    }

    #[test]
    fn pages_are_noted_once_and_in_their_order() {
        let one = PageSet::single;
        let notes = [
            (2, one(9)),
            (2, one(10)),
            (0, one(255)),
            (1, one(0)),
            (2, one(9)),
            (2, PageSet::range(8, 4)),
            (0, one(3)),
        ];
        let record = noted(&Touched::default(), &notes).into_record(Touched::default()).unwrap();
        assert_eq!(record.runs(), [run(521, 2), run(255, 2), run(520, 1), run(523, 1), run(3, 1)]);
        assert_eq!(noted(&Touched::default(), &[]).into_record(Touched::default()), None);
    }

    #[test]
    fn a_record_is_made_anew_when_it_lacks_much() {
        let known = Touched::new(vec![run(250, 80)]);
        let with = |lacking: u16| noted(&known, &[(0, PageSet::range(240, 16)), (3, PageSet::range(0, lacking))]);
        // Ten of the first chunk are not known.
        assert_eq!(with(0).into_record(known.clone()), None);
        let record = with(1).into_record(known.clone()).unwrap();
        assert_eq!(record.runs(), [run(250, 80), run(240, 10), run(768, 1)]);
    }

    #[test]
    fn a_part_of_the_memory_is_noted_and_no_more() {
        let all: Vec<(u32, PageSet)> = (0..8).map(|chunk| (chunk, PageSet::FULL)).collect();
        let mut full = noted(&Touched::default(), &all[..2]);
        assert!(!full.is_full());
        full.note(ChunkIdx(2), PageSet::single(0));
        assert!(full.is_full());
        assert_eq!(full.into_record(Touched::default()).unwrap().pages(), PageCount(512));
        // What a new one needs takes the place of what the one before needed last.
        let known = Touched::new(vec![run(0, 300), run(300, 212)]);
        let record = noted(&known, &[(3, PageSet::range(0, 100))]).into_record(known).unwrap();
        assert_eq!(record.runs(), [run(0, 300), run(768, 100)]);
    }

    #[test]
    fn runs_are_cut_where_chunks_begin() {
        let cut: Vec<_> = by_chunk(&[run(250, 300), run(5, 1)]).collect();
        let expected =
            [(0, PageSet::range(250, 6)), (1, PageSet::FULL), (2, PageSet::range(0, 38)), (0, PageSet::single(5))];
        assert_eq!(cut, expected.map(|(chunk, pages)| (ChunkIdx(chunk), pages)));
    }
}
