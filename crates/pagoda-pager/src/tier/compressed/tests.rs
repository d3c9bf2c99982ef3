//! The tier against a map of what was stored, over restarts.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const CHUNKS: ChunkCount = ChunkCount(2);

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("pagoda-compressed-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn open(&self, room: u64, taken_over: bool) -> io::Result<CompressedTier> {
        CompressedTier::open(&CompressedTier::files(&self.0, "vm"), CHUNKS, Bytes(room), taken_over)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// A page of which so many bytes do not compress.
fn page(noise: usize, seed: u64) -> Content {
    let mut content = [7; PAGE_SIZE as usize];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for byte in &mut content[..noise] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state as u8;
    }
    content
}

fn load(tier: &CompressedTier, index: u64) -> Content {
    let mut out = [0; PAGE_SIZE as usize];
    tier.load(PageIdx(index), &mut out).unwrap();
    out
}

#[test]
fn what_does_not_compress_is_declined_and_keeps_no_block() {
    let dir = Dir::new("declined");
    let mut tier = dir.open(1 << 20, false).unwrap();
    assert!(tier.store(PageIdx(3), &page(500, 1)).unwrap());
    assert!(!tier.store(PageIdx(4), &page(PAGE_SIZE as usize, 2)).unwrap());
    assert_eq!((tier.holds(ChunkIdx(0)), tier.counts().pages), (PageSet::single(3), 1));
    assert_eq!(load(&tier, 3), page(500, 1));
}

#[test]
fn a_full_tier_takes_no_more_and_what_is_dropped_makes_room() {
    let dir = Dir::new("full");
    let mut tier = dir.open(SEGMENT, false).unwrap();
    // Some 2.6 KiB each: a segment has room for 24.
    let stored = (0..100).take_while(|index| tier.store(PageIdx(*index), &page(2600, *index)).unwrap()).count() as u64;
    assert!((20..=25).contains(&stored), "{stored}");
    assert_eq!(tier.takes(false), Takes::No);
    tier.drop_pages(ChunkIdx(0), PageSet::FULL).unwrap();
    assert_eq!((tier.counts().pages, tier.counts().memory_bytes), (0, 0));
    assert!(matches!(tier.takes(false), Takes::Now(_)));
    // The segment serves another size now.
    assert!(tier.store(PageIdx(1), &page(100, 9)).unwrap());
    assert_eq!(load(&tier, 1), page(100, 9));
}

#[test]
fn free_blocks_of_segments_in_use_are_room() {
    let dir = Dir::new("pieces");
    let mut tier = dir.open(2 * SEGMENT, false).unwrap();
    // Two units each: every segment is in use, and full.
    for index in 0..CHUNKS.pages().0 {
        assert!(tier.store(PageIdx(index), &page(190, index)).unwrap());
    }
    assert_eq!(tier.takes(false), Takes::No);
    // Three of four go, so that no segment becomes free.
    let going: PageSet = (0..=u8::MAX).filter(|index| index % 4 != 0).collect();
    CHUNKS.iter().for_each(|chunk| tier.drop_pages(chunk, going).unwrap());
    assert_eq!(tier.counts().memory_bytes, 2 * SEGMENT);
    assert!(matches!(tier.takes(false), Takes::Now(_)));
    assert!(tier.store(PageIdx(1), &page(190, 9)).unwrap());
    assert_eq!(load(&tier, 1), page(190, 9));
}

#[test]
fn a_map_that_says_what_cannot_be_is_refused() {
    let dir = Dir::new("nonsense");
    drop(dir.open(1 << 20, false).unwrap());
    let [_, map] = CompressedTier::files(&dir.0, "vm");
    let entry = |unit: u64, len: u16| Block { unit, len }.to_entry();
    // No length, too long, over a segment's end, between two blocks; two blocks of which one is in the other.
    for entries in [
        vec![entry(5, 0)],
        vec![entry(0, 4000)],
        vec![entry(SEGMENT_UNITS - 1, 200)],
        vec![entry(3, 200)],
        vec![entry(2, 200), entry(3, 100)],
        vec![entry(2, 200), entry(2, 200)],
    ] {
        let mut blocks = BlockMap::create(&map, CHUNKS).unwrap();
        for (page, entry) in (0..).map(PageIdx).zip(entries.clone()) {
            blocks.set(page, entry).unwrap();
        }
        assert!(dir.open(1 << 20, true).is_err(), "{entries:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pages_are_what_was_stored_last(
        steps in prop::collection::vec((0..512_u64, 0..4000_usize, 0..10_u8), 1..200),
        room in 1..6_u64,
    ) {
        let dir = Dir::new("model");
        let mut tier = dir.open(room * SEGMENT, false).unwrap();
        let mut model: HashMap<u64, Content> = HashMap::new();
        for (seed, (index, noise, what)) in (0..).zip(steps) {
            let at = PageIdx(index);
            match what {
                0 => {
                    // The daemon is killed.
                    tier = dir.open(room * SEGMENT, true).unwrap();
                }
                1 | 2 => {
                    tier.drop_pages(at.chunk(), PageSet::single(at.index_in_chunk())).unwrap();
                    model.remove(&index);
                }
                _ => {
                    let content = page(noise, seed);
                    if tier.store(at, &content).unwrap() {
                        model.insert(index, content);
                    }
                }
            }
            prop_assert_eq!(tier.counts().pages, model.len() as u64);
            prop_assert!(tier.counts().memory_bytes <= room * SEGMENT);
        }
        for (index, content) in &model {
            prop_assert!(load(&tier, *index) == *content, "page {} is wrong", index);
        }
    }
}
