//! In which order the pages of a record come in.

use std::collections::BTreeMap;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{ChunkIdx, PageIdx};
use pagoda_image::{BlockIdx, Touched};

use super::recorder::by_chunk;

/// Pages that are sorted together, 16 MiB. What was needed first comes first by batches; in a batch the disk's order is better.
const BATCH_PAGES: u32 = 4096;

/// Where pages are: which image of a chain, and where in its file.
pub type Place = Option<(u8, BlockIdx)>;

/// The pages of a record by chunk: batch by batch, in each in the order in which they are in the files. `held`: the pages of a
/// chunk that the image has.
pub fn order(
    record: &Touched,
    held: impl Fn(ChunkIdx) -> PageSet,
    mut place: impl FnMut(PageIdx) -> Place,
) -> Vec<(ChunkIdx, PageSet)> {
    let mut ordered = Vec::new();
    let mut batch: BTreeMap<ChunkIdx, PageSet> = BTreeMap::new();
    let mut count = 0;
    let mut close = |batch: &mut BTreeMap<ChunkIdx, PageSet>| {
        let held = std::mem::take(batch).into_iter().map(|(chunk, pages)| (chunk, pages & held(chunk)));
        let placed = held.filter_map(|(chunk, pages)| {
            let first = chunk.page(pages.first_set()?);
            Some((place(first), chunk, pages))
        });
        let mut placed: Vec<_> = placed.collect();
        // What has no place comes last: its read finds out why.
        placed.sort_by_key(|(place, chunk, _)| (place.is_none(), *place, *chunk));
        ordered.extend(placed.into_iter().map(|(_, chunk, pages)| (chunk, pages)));
    };
    for (chunk, pages) in by_chunk(record.runs()) {
        *batch.entry(chunk).or_default() |= pages;
        count += u32::from(pages.count());
        if count >= BATCH_PAGES {
            close(&mut batch);
            count = 0;
        }
    }
    close(&mut batch);
    ordered
}

#[cfg(test)]
mod tests {
    use pagoda_image::TouchedRun;

    use super::*;

    fn record(runs: &[(u64, u32)]) -> Touched {
        Touched::new(runs.iter().map(|(first, count)| TouchedRun { first: PageIdx(*first), count: *count }).collect())
    }

    #[test]
    fn a_batch_is_in_the_order_of_the_files() {
        // Chunks are in the file the other way round; chunk 3 is in a parent, chunk 4 nowhere.
        let place = |page: PageIdx| match page.chunk().0 {
            3 => Some((1, BlockIdx(0))),
            4 => None,
            chunk => Some((0, BlockIdx(1000 - chunk))),
        };
        let record = record(&[(256, 2), (1030, 1), (770, 1), (5, 1), (260, 1), (600, 1)]);
        let found = order(&record, |_| PageSet::FULL, place);
        let chunks: Vec<u32> = found.iter().map(|(chunk, _)| chunk.0).collect();
        assert_eq!(chunks, [2, 1, 0, 3, 4]);
        assert_eq!(found[1].1, PageSet::range(0, 2) | PageSet::single(4), "a chunk is named once");
    }

    #[test]
    fn what_was_needed_first_comes_first_and_zeros_do_not_come() {
        let record = record(&[(40 * 256, BATCH_PAGES), (0, 256), (300, 1)]);
        let held = |chunk: ChunkIdx| if chunk.0 == 0 { PageSet::EMPTY } else { PageSet::FULL };
        let found = order(&record, held, |page| Some((0, BlockIdx(page.0 as u32))));
        let chunks: Vec<u32> = found.iter().map(|(chunk, _)| chunk.0).collect();
        assert_eq!(chunks, (40..56).chain([1]).collect::<Vec<u32>>());
    }
}
