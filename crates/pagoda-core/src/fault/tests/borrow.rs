//! Chunks that are borrowed, and how they become the VM's own.

use super::*;

/// The first chunk is borrowed, and `private` of it is; all of the others is in swap.
fn bench(limit: u64, private: PageSet) -> Bench {
    let mut bench = Bench::new(limit, false, [(EMPTY, PageSet::FULL); CHUNKS as usize]);
    bench.machine.armed(|chunk| {
        let borrowed = chunk == ChunkIdx(0);
        let private = if borrowed { private } else { EMPTY };
        Located { swap: PageSet::FULL, borrowed, private, ..Located::default() }
    });
    bench
}

fn unprotect(page: u64) -> Action {
    Action::Unprotect { pages: pages(page, 1) }
}

fn fence(op: u16) -> Action {
    Action::Fence { op: OpId(op), chunk: ChunkIdx(0) }
}

fn own(op: u16) -> Action {
    Action::Own { op: OpId(op), chunk: ChunkIdx(0) }
}

fn fenced(op: u16, epoch: u64) -> Event {
    Event::Fenced { op: OpId(op), epoch: Some(epoch) }
}

fn owned(op: u16, kept: PageSet) -> Event {
    Event::OwnDone { op: OpId(op), kept: Some(kept) }
}

#[test]
fn a_page_that_is_only_read_costs_nothing_and_one_that_is_written_costs_one_page() {
    let mut bench = bench(1000, EMPTY);
    assert_eq!((bench.count(Metric::Borrowed), bench.count(Metric::Resident)), (256, 0));
    assert_eq!(bench.count(Metric::Swapped), 768, "what is read in the template is not out");
    bench.protected(7, &[unprotect(7)]);
    bench.protected(7, &[unprotect(7)]);
    let counts = [Metric::Borrowed, Metric::PrivatePages, Metric::Resident, Metric::FaultsBorrowed];
    assert_eq!(counts.map(|metric| bench.count(metric)), [255, 1, 1, 2]);
    bench.fault(9, Read, &[Action::Wake { pages: pages(9, 1) }]);
    assert_eq!(bench.count(Metric::Resident), 1);
}

#[test]
fn a_write_waits_for_room_unless_its_page_has_it_already() {
    let mut bench = bench(1, low(1));
    bench.protected(0, &[unprotect(0)]);
    // The only page that could leave is in a chunk that is borrowed.
    bench.protected(1, &[fence(0)]);
    assert_eq!(bench.count(Metric::Waiting), 1);
    bench.protected(0, &[unprotect(0)]);
    assert_eq!(bench.count(Metric::OwnsGivenUp), 1);
    bench.check(fenced(0, 5), &[]);
    // Not before the writer has gone on.
    bench.check(Event::Tick, &[fence(0)]);
    bench.check(fenced(0, 6), &[own(0)]);
    // Now also a write to a private page waits.
    bench.protected(0, &[]);
    bench.check(owned(0, low(1)), &[Action::Zap { op: OpId(0) }]);
    assert_eq!((bench.count(Metric::Waiting), bench.count(Metric::Borrowed)), (2, 0));
}

#[test]
fn a_chunk_becomes_the_vms_own_when_no_older_direct_io_is_in_flight_and_then_only_with_what_differs() {
    let mut bench = bench(1000, low(3));
    bench.oldest_io = 4;
    let discard = Event::Discard { token: 9, first: PageIdx(1), count: PageCount(1) };
    bench.check(discard, &[fence(0)]);
    bench.check(fenced(0, 5), &[]);
    assert!(bench.machine.is_pin_blocked());
    bench.check(Event::Tick, &[]);
    bench.oldest_io = 5;
    bench.check(Event::Tick, &[own(0)]);
    assert!(!bench.machine.is_pin_blocked());
    let done = [
        Action::SwapPunch { pages: pages(1, 1) },
        Action::RamPunch { pages: pages(1, 1) },
        Action::DiscardDone { token: 9 },
    ];
    bench.check(owned(0, low(2)), &done);
    let chunk = bench.machine.chunk(ChunkIdx(0));
    assert_eq!((chunk.borrowed, chunk.ram, chunk.private), (false, low(1), EMPTY));
    assert_eq!((chunk.mapped, chunk.open, chunk.clean), (EMPTY, EMPTY, EMPTY));
    // What the VMM read in the template is in swap now, as it always was.
    bench.fault(100, Read, &[read_page(0, 100)]);
}

#[test]
fn direct_io_that_is_waited_for_may_write_to_the_chunk_itself() {
    let mut bench = bench(1000, low(3));
    bench.oldest_io = 4;
    bench.check(Event::OwnAll, &[fence(0)]);
    bench.check(fenced(0, 5), &[]);
    bench.protected(2, &[unprotect(2)]);
    assert_eq!(bench.count(Metric::OwnsGivenUp), 1);
    bench.oldest_io = u64::MAX;
    bench.check(Event::Tick, &[fence(0)]);
    bench.check(fenced(0, 6), &[own(0)]);
    bench.check(owned(0, low(3)), &[]);
    assert_eq!(bench.machine.borrowed_chunks(), 0);
}

#[test]
fn what_cannot_be_protected_or_moved_stays_borrowed_and_is_tried_again() {
    let mut bench = bench(1000, low(3));
    bench.check(Event::OwnAll, &[fence(0)]);
    bench.check(Event::Fenced { op: OpId(0), epoch: None }, &[]);
    bench.check(Event::Tick, &[fence(0)]);
    bench.check(fenced(0, 2), &[own(0)]);
    bench.check(Event::OwnDone { op: OpId(0), kept: None }, &[]);
    assert_eq!((bench.machine.borrowed_chunks(), bench.count(Metric::PrivatePages)), (1, 3));
    bench.check(Event::Tick, &[fence(0)]);
}

#[test]
fn no_image_begins_while_chunks_are_borrowed() {
    let mut bench = bench(1000, EMPTY);
    bench.check(FREEZE, &[Action::RefuseImage { why: Refusal::Borrowed }]);
    assert!(bench.apply(Event::Prepare { on: true }).contains(&fence(0)));
    bench.check(fenced(0, 2), &[own(0)]);
    bench.check(owned(0, EMPTY), &[]);
    assert_eq!(bench.machine.chunk(ChunkIdx(0)).phase, table::Phase::Absent);
    bench.check(FREEZE, &[Action::BeginImage]);
}

#[test]
fn a_vm_that_may_have_all_its_memory_brings_in_nothing_that_it_borrows() {
    let mut bench = bench(1000, low(3));
    bench.machine.prefetch(vec![(ChunkIdx(0), PageSet::FULL)]);
    let actions = bench.apply(Event::SetLimit { limit: PageCount(1024) });
    let reads = |action: &Action| matches!(action, Action::ReadSpan { span, .. } if span.chunk == ChunkIdx(0));
    assert!(!actions.is_empty() && !actions.iter().any(reads), "{actions:?}");
    assert!(!actions.contains(&Action::Disarm));
}

#[test]
fn pages_of_borrowed_chunks_count_as_looked_at_and_not_used() {
    let mut bench = bench(1000, EMPTY);
    bench.machine.start_sample(&[PageIdx(3), PageIdx(300)]);
    bench.check(Event::Tick, &[]);
    assert_eq!(bench.machine.watched(), [PageIdx(300)]);
    assert_eq!((bench.machine.sample_count().watched, bench.machine.sample_count().touched), (2, 0));
}

#[test]
fn nothing_is_moved_once_direct_io_goes_unseen() {
    let mut bench = bench(1000, low(3));
    bench.oldest_io = 4;
    bench.check(Event::OwnAll, &[fence(0)]);
    bench.check(fenced(0, 5), &[]);
    bench.check(Event::KeepBorrowed, &[]);
    bench.oldest_io = u64::MAX;
    bench.check(Event::Tick, &[]);
    assert!(!bench.machine.is_pin_blocked());
    // The guest is told, and the pages stay.
    let discard = Event::Discard { token: 9, first: PageIdx(0), count: PageCount(256) };
    bench.check(discard, &[Action::DiscardDone { token: 9 }]);
    bench.protected(2, &[unprotect(2)]);
    assert_eq!((bench.count(Metric::PrivatePages), bench.machine.borrowed_chunks()), (3, 1));
}
