//! `check(faults, expected)`: the answer to each fault of a short sequence.

use proptest::prelude::*;

use crate::pattern::*;

const CHUNKS: ChunkCount = ChunkCount(64);

/// `.` for a single page; for a chunk the number of chunks read ahead, upwards `0+`, downwards `2-`.
fn answer(page_in: PageIn) -> String {
    match page_in {
        PageIn::Page => ".".into(),
        PageIn::Chunk { read_ahead, .. } => match read_ahead.direction {
            Direction::Up => format!("{}+", read_ahead.count),
            Direction::Down => format!("{}-", read_ahead.count),
        },
    }
}

fn writable(page_in: PageIn) -> bool {
    matches!(page_in, PageIn::Chunk { writable: true, .. })
}

fn answers(pattern: &mut Pattern, faults: impl IntoIterator<Item = u64>) -> String {
    let answers = faults.into_iter().map(|page| answer(pattern.on_fault(PageIdx(page), Access::Read)));
    answers.collect::<Vec<_>>().join(" ")
}

fn check(faults: &[u64], expected: &str) {
    assert_eq!(answers(&mut Pattern::new(CHUNKS), faults.iter().copied()), expected, "{faults:?}");
}

#[test]
fn two_continuations_switch_to_whole_chunks() {
    check(&[0, 1, 2], ". . 2+");
    check(&[1000, 999, 998], ". . 2-");
    check(&[0, 12, 24], ". . 2+");
    check(&[0, 1, 2, 256 * 3, 256 * 4], ". . 2+ 2+ 1+");
    // A page further than 16 is another entry.
    check(&[0, 17, 34, 51], ". . . .");
    // The next fault may be some pages into the next chunk: those before it were resident.
    check(&[0, 1, 2, 256 * 3 + 15], ". . 2+ 2+");
    check(&[0, 1, 2, 256 * 3 + 16], ". . 2+ .");
}

#[test]
fn a_chunk_must_be_worth_its_price() {
    check(&[0, 16, 32, 48, 64], ". . . . .");
    // At the end of the chunk the stream waits for the next one.
    check(&[250, 251, 252, 253, 254, 255, 256, 257], ". . . . . . 2+ 0+");
    check(&[262, 261, 260, 259, 258, 257, 256, 255], ". . . . . . . 0-");
}

#[test]
fn late_and_repeated_faults_change_nothing() {
    // Two vCPUs on the same page, and on one walk, overtaking each other.
    check(&[5, 5, 6, 6, 7], ". . . . 2+");
    check(&[1, 0, 3, 2, 5], ". . . . .");
    check(&[1, 0, 3, 2, 5, 4, 7], ". . . . . . 2+");
    // A message that was sent before the chunk was mapped.
    check(&[0, 1, 2, 3, 200], ". . 2+ 0+ 0+");
}

#[test]
fn read_ahead_stays_in_the_space() {
    let last = CHUNKS.pages().0 - 256;
    check(&[last, last + 1, last + 2], ". . 0+");
    check(&[last - 256, last - 255, last - 254], ". . 1+");
    check(&[511, 510, 509], ". . 1-");
    let mut pattern = Pattern::new(ChunkCount(1));
    assert_eq!(answers(&mut pattern, [0, 1, 2]), ". . 0+");
    let chunks = |after, direction| -> Vec<u32> {
        ReadAhead { after: ChunkIdx(after), count: 2, direction }.chunks().map(|chunk| chunk.0).collect()
    };
    assert_eq!(chunks(7, Direction::Up), [8, 9]);
    assert_eq!(chunks(7, Direction::Down), [6, 5]);
}

#[test]
fn eight_walks_are_told_apart() {
    let mut pattern = Pattern::new(CHUNKS);
    let walks = || (0..8).map(|walk| walk * 256 * 8);
    assert_eq!(answers(&mut pattern, walks()), ". . . . . . . .");
    assert_eq!(answers(&mut pattern, walks().map(|page| page + 1)), ". . . . . . . .");
    // Eight chunks may be read ahead before any is used.
    assert_eq!(answers(&mut pattern, walks().map(|page| page + 2)), "2+ 2+ 2+ 2+ 0+ 0+ 0+ 0+");
    // A thousand random faults in between drive out one of them, no more.
    let scattered = (0..1000).map(|nth| (nth * 7919 % 8 * 8 + 5) * 256 + nth * 101 % 256);
    answers(&mut pattern, scattered);
    let next = walks().map(|page| answer(pattern.on_fault(PageIdx(page + 256), Access::Read)));
    assert_eq!(next.filter(|answer| answer == ".").count(), 1);
}

#[test]
fn read_ahead_grows_with_use() {
    let mut pattern = Pattern::new(CHUNKS);
    assert_eq!(answers(&mut pattern, [0, 1, 2]), ". . 2+");
    let hits = (1..5).map(|chunk| answer(pattern.on_read_ahead_hit(ChunkIdx(chunk), Access::Read)));
    assert_eq!(hits.collect::<Vec<_>>(), ["2+", "2+", "1+", "1+"]);
    // Not read ahead by a stream that is still known.
    assert_eq!(answer(pattern.on_read_ahead_hit(ChunkIdx(40), Access::Read)), "0+");
}

#[test]
fn read_ahead_in_vain_ends_the_stream() {
    let mut pattern = Pattern::new(CHUNKS);
    assert_eq!(answers(&mut pattern, [0, 1, 2]), ". . 2+");
    pattern.on_read_ahead_miss(ChunkIdx(2));
    assert_eq!(answers(&mut pattern, [256]), ".");
}

#[test]
fn read_ahead_in_vain_is_limited() {
    let mut pattern = Pattern::new(CHUNKS);
    let mut asked = 0;
    for round in 0..1000 {
        let start = (round % 16) * 256 * 4;
        for page in start..start + 20 {
            if let PageIn::Chunk { read_ahead, .. } = pattern.on_fault(PageIdx(page), Access::Read) {
                asked += u32::from(read_ahead.count);
                read_ahead.chunks().for_each(|chunk| pattern.on_read_ahead_miss(chunk));
            }
        }
    }
    assert_eq!(asked, 8, "the initial budget and no more: no stream ever came to its second chunk");
}

#[test]
fn short_runs_teach_to_wait() {
    let mut pattern = Pattern::new(ChunkCount(4096));
    let record = |nth: u64| (nth * 37 % 1024) * 1024;
    let chunks = |pattern: &mut Pattern, records: std::ops::Range<u64>, len: u64| {
        let faults = records.flat_map(|nth| record(nth)..record(nth) + len);
        faults.filter(|&page| pattern.on_fault(PageIdx(page), Access::Read) != PageIn::Page).count()
    };
    let learning = chunks(&mut pattern, 0..100, 4);
    assert!((1..=64).contains(&learning), "{learning} chunks for 100 records");
    assert_eq!(chunks(&mut pattern, 100..500, 4), 0);
    // Runs that go on are believed again, after some of them.
    assert!(chunks(&mut pattern, 500..520, 64) > 0);
    assert_eq!(answers(&mut pattern, [4095 * 256, 4095 * 256 + 1, 4095 * 256 + 2]), ". . 0+");
}

#[test]
fn random_faults_in_one_chunk_stay_single() {
    // Every page of the chunk once, in an order without any: 97 is a primitive root of 257.
    let mut pattern = Pattern::new(CHUNKS);
    let pages = std::iter::successors(Some(1u64), |page| Some(page * 97 % 257)).take(256);
    let faults = pages.map(|page| 20 * 256 + page - 1);
    assert!(!answers(&mut pattern, faults).contains('+'));
}

#[test]
fn a_stream_that_writes_is_mapped_writable() {
    let mut pattern = Pattern::new(CHUNKS);
    let step = |pattern: &mut Pattern, chunk: u32, written: bool| {
        let page_in = match chunk {
            0 => {
                answers(pattern, [0, 1]);
                pattern.on_fault(PageIdx(2), Access::Read)
            }
            _ => pattern.on_read_ahead_hit(ChunkIdx(chunk), Access::Read),
        };
        if written && !writable(page_in) {
            pattern.on_chunk_written(ChunkIdx(chunk));
        }
        writable(page_in)
    };
    // Two chunks are seen to be written, then 15 are trusted, then it is asked again.
    let write_all: Vec<bool> = (0..20).map(|chunk| step(&mut pattern, chunk, true)).collect();
    let asked: Vec<usize> = (0..20).filter(|&chunk| !write_all[chunk]).collect();
    assert_eq!(asked, [0, 1, 17]);
    // The stream stops writing: at most 15 more are mapped writable in vain.
    let read_all: Vec<bool> = (20..60).map(|chunk| step(&mut pattern, chunk, false)).collect();
    assert!(read_all.iter().filter(|&&writable| writable).count() <= 15, "{read_all:?}");
    assert!(read_all[16..].iter().all(|&writable| !writable), "{read_all:?}");
}

#[test]
fn a_write_fault_maps_writable() {
    let mut pattern = Pattern::new(CHUNKS);
    answers(&mut pattern, [0, 1]);
    assert!(writable(pattern.on_fault(PageIdx(2), Access::Write)));
    assert!(!writable(pattern.on_read_ahead_hit(ChunkIdx(1), Access::Read)));
    assert!(writable(pattern.on_read_ahead_hit(ChunkIdx(2), Access::Write)));
    assert!(writable(pattern.on_read_ahead_hit(ChunkIdx(50), Access::Write)), "of no stream");
    pattern.on_chunk_written(ChunkIdx(50));
}

#[derive(Clone, Debug)]
enum Op {
    Fault(u64, bool),
    Hit(u32, bool),
    Miss(u32),
    Written(u32),
}

const SMALL: ChunkCount = ChunkCount(6);

fn any_op() -> impl Strategy<Value = Op> {
    let page = 0..SMALL.pages().0;
    let chunk = 0..SMALL.0;
    prop_oneof![
        8 => (page, any::<bool>()).prop_map(|(page, write)| Op::Fault(page, write)),
        2 => (chunk.clone(), any::<bool>()).prop_map(|(chunk, write)| Op::Hit(chunk, write)),
        1 => chunk.clone().prop_map(Op::Miss),
        1 => chunk.prop_map(Op::Written),
    ]
}

proptest! {
    /// Events in any order, as after lost or late messages: never a chunk beyond the space, and never more
    /// staked than there is.
    #[test]
    fn any_events_get_a_sound_answer(starts in prop::collection::vec((any_op(), 1..30u64), 1..80)) {
        let mut pattern = Pattern::new(SMALL);
        let access = |write| if write { Access::Write } else { Access::Read };
        for (op, len) in starts {
            // Faults come in walks of `len`, or streams would be rare.
            for step in 0..len {
                let page_in = match op {
                    Op::Fault(page, write) => {
                        let page = PageIdx((page + step * 7) % SMALL.pages().0);
                        pattern.on_fault(page, access(write))
                    }
                    Op::Hit(chunk, write) => pattern.on_read_ahead_hit(ChunkIdx(chunk), access(write)),
                    Op::Miss(chunk) => {
                        pattern.on_read_ahead_miss(ChunkIdx(chunk));
                        continue;
                    }
                    Op::Written(chunk) => {
                        pattern.on_chunk_written(ChunkIdx(chunk));
                        continue;
                    }
                };
                if let PageIn::Chunk { read_ahead, .. } = page_in {
                    prop_assert!(read_ahead.chunks().all(|chunk| chunk.0 < SMALL.0), "{read_ahead:?}");
                }
                prop_assert!(pattern.budget.0 <= Budget::MAX);
            }
        }
    }
}
