//! Looks and copies for a move to another host.

use super::*;
use crate::fault::COPY_READS_MAX;
use crate::fault::action::Source;

const WHOLE: Pages = Pages { chunk: ChunkIdx(0), run: Run { start: 0, len: 256 } };

/// Chunk 0 has 3 pages in RAM and the next 2 in swap.
fn bench() -> Bench {
    let swapped = PageSet::range(3, 2);
    let mut bench = Bench::new(600, false, [(low(3), swapped), NONE, NONE, NONE]);
    let looked = bench.apply(Event::Look);
    assert!(looked.contains(&Action::Protect { pages: pages(0, 3) }), "{looked:?}");
    let written = bench.machine.take_written();
    assert_eq!((written.len(), written[0]), (CHUNKS as usize, (ChunkIdx(0), PageSet::FULL)));
    bench
}

fn copied(first: u64, len: u16, from: Source) -> Action {
    Action::CopyOut { pages: pages(first, len), from }
}

fn keep() -> Action {
    Action::Keep { op: OpId(0), chunk: ChunkIdx(0), pages: PageSet::range(3, 2) }
}

#[test]
fn a_copy_is_made_from_wherever_the_page_is() {
    let mut bench = bench();
    let expected = [copied(0, 3, Source::Ram), copied(5, 251, Source::Zero), keep()];
    bench.check(Event::CopyOut { pages: WHOLE }, &expected);
    // No page is read twice at a time.
    let again = Pages { chunk: ChunkIdx(0), run: Run { start: 4, len: 1 } };
    bench.check(Event::CopyOut { pages: again }, &[Action::CopyLater { pages: again }]);
    bench.read_done(0, Ok(()), &[copied(3, 2, Source::Buffer(OpId(0))), release(0)]);
    assert_eq!(bench.machine.chunk(ChunkIdx(0)).ram, low(3), "nothing has come into DRAM");
}

#[test]
fn a_look_has_what_was_written_since_and_nothing_else() {
    let mut bench = bench();
    bench.protected(1, &[Action::Unprotect { pages: pages(1, 1) }]);
    bench.apply(Event::Look);
    assert_eq!(bench.machine.take_written(), [(ChunkIdx(0), PageSet::single(1))]);
    bench.check(Event::Look, &[]);
    assert!(bench.machine.take_written().is_empty());
}

#[test]
fn what_a_read_has_brought_is_not_used_behind_a_look() {
    // The page may have come in, changed and gone out again before the look, and its block been read before that.
    let mut bench = bench();
    bench.apply(Event::CopyOut { pages: WHOLE });
    bench.apply(Event::Look);
    bench.read_done(0, Ok(()), &[Action::CopyLater { pages: pages(3, 2) }, release(0)]);
}

#[test]
fn what_came_in_meanwhile_is_asked_for_again() {
    let mut bench = bench();
    bench.apply(Event::CopyOut { pages: WHOLE });
    bench.fault(3, Read, &[read_page(1, 3)]);
    bench.read_done(1, Ok(()), &[copy(1, 3, true), release(1)]);
    let buffer = copied(4, 1, Source::Buffer(OpId(0)));
    bench.read_done(0, Ok(()), &[buffer, Action::CopyLater { pages: pages(3, 1) }, release(0)]);
}

#[test]
fn a_page_that_cannot_be_read_is_named() {
    let mut bench = bench();
    bench.apply(Event::CopyOut { pages: WHOLE });
    let failed = Action::CopyFailed { pages: pages(3, 2), error: IoError::Failed(5) };
    bench.read_done(0, READ_ERROR, &[failed, release(0)]);
    assert_eq!(bench.machine.stall(), None, "no guest waits for it");
}

#[test]
fn several_parts_of_a_chunk_are_read_at_once() {
    let mut bench = Bench::new(600, false, [(EMPTY, PageSet::FULL), NONE, NONE, NONE]);
    bench.apply(Event::Look);
    for op in 0..COPY_READS_MAX as u16 {
        let part = pages(u64::from(op) * 8, 8);
        assert!(bench.machine.has_copy_room(part.chunk, PageSet::range(part.run.start, 8)));
        let keep = Action::Keep { op: OpId(op), chunk: part.chunk, pages: PageSet::range(part.run.start, 8) };
        bench.check(Event::CopyOut { pages: part }, &[keep]);
    }
    let more = pages(COPY_READS_MAX as u64 * 8, 8);
    assert!(!bench.machine.has_copy_room(more.chunk, PageSet::range(more.run.start, 8)));
    bench.check(Event::CopyOut { pages: more }, &[Action::CopyLater { pages: more }]);
    bench.read_done(1, Ok(()), &[copied(8, 8, Source::Buffer(OpId(1))), release(1)]);
    bench.apply(Event::CopyOut { pages: more });
}

#[test]
fn what_is_hot_is_learned_of_a_vm_that_nothing_was_known_of() {
    let mut bench = Bench::new(600, false, [(low(3), EMPTY), (low(3), EMPTY), (low(3), EMPTY), NONE]);
    bench.apply(Event::Prepare { on: true });
    bench.limit(1024, &[]);
    let zapped = bench.apply(Event::LearnHeat);
    assert_eq!(zapped.last(), Some(&zap(0)), "{zapped:?}");
    bench.apply(zap_done(0, 1));
    // The guest reads a page of chunk 1.
    bench.apply(Event::Fault { page: PageIdx(256), access: Read, kind: FaultKind::Unmapped });
    assert_eq!(bench.machine.chunk_order().in_dram[0], ChunkIdx(1));
    // Each chunk is zapped once.
    let ticked = bench.apply(Event::Tick);
    assert!(!ticked.iter().any(|action| matches!(action, Action::Zap { .. })), "{ticked:?}");

    // Of a VM that has to page it is known already.
    let mut bench = Bench::new(600, false, [(low(3), EMPTY), NONE, NONE, NONE]);
    bench.apply(Event::Prepare { on: true });
    assert!(!bench.apply(Event::LearnHeat).iter().any(|action| matches!(action, Action::Zap { .. })));
}
