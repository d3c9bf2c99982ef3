//! Pages that come in before anybody asks for them.

use super::*;

const ALL: [(PageSet, PageSet); CHUNKS as usize] = [(EMPTY, PageSet::FULL); CHUNKS as usize];

fn read_span(op: u16, first: u64, len: u16, wanted: PageSet) -> Action {
    Action::ReadSpan { op: OpId(op), span: pages(first, len), wanted, demand: false }
}

fn store(op: u16, first: u64, len: u16) -> Action {
    Action::Store { op: OpId(op), pages: pages(first, len) }
}

/// All in swap, and these pages are to be prefetched.
fn bench(limit: u64, list: &[(u32, PageSet)]) -> Bench {
    let mut bench = Bench::new(limit, false, ALL);
    bench.machine.prefetch(list.iter().map(|(chunk, pages)| (ChunkIdx(*chunk), *pages)).collect());
    bench
}

#[test]
fn what_was_prefetched_is_there_when_it_is_asked_for() {
    let wanted = low(3) | PageSet::range(100, 2);
    let mut bench = bench(1000, &[(2, wanted), (9, wanted)]);
    bench.check(Event::Tick, &[read_span(0, 512, 102, wanted)]);
    bench.read_done(0, Ok(()), &[store(0, 512, 3), store(0, 612, 2), release(0)]);
    let chunk = bench.machine.chunk(ChunkIdx(2));
    assert_eq!((chunk.ram, chunk.clean, chunk.mapped, chunk.ahead), (wanted, wanted, EMPTY, false));
    assert_eq!((bench.count(Metric::PagesPrefetched), bench.count(Metric::PrefetchedUsed)), (5, 0));
    // The first touch maps what is near it; a write is seen as of any clean page.
    bench.fault(513, Read, &[map(512, 3, true)]);
    bench.protected(512, &[Action::Unprotect { pages: pages(512, 1) }]);
    assert_eq!((bench.count(Metric::FaultsMinor), bench.count(Metric::PrefetchedUsed)), (1, 3));
    bench.check(Event::Tick, &[]);
}

#[test]
fn a_fault_goes_before_prefetch_and_joins_the_read_of_its_page() {
    let mut bench = bench(1000, &[(0, low(2)), (1, low(2))]);
    bench.check(Event::Tick, &[read_span(0, 0, 2, low(2)), read_span(1, 256, 2, low(2))]);
    // Of the same chunk, and not of the read.
    bench.fault(7, Read, &[read_page(2, 7)]);
    bench.fault(257, Write, &[]);
    assert_eq!((bench.count(Metric::FaultsJoined), bench.count(Metric::ReadAheadHits)), (1, 0));
    bench.read_done(2, Ok(()), &[copy(2, 7, true), release(2)]);
    bench.read_done(1, Ok(()), &[Action::Copy { op: OpId(1), pages: pages(256, 2), protect: false }, release(1)]);
    bench.read_done(0, Ok(()), &[store(0, 0, 2), release(0)]);
    assert_eq!((bench.count(Metric::PagesPrefetched), bench.count(Metric::PrefetchedUsed)), (4, 2));
}

#[test]
fn prefetch_stops_before_page_out_would_begin() {
    let list: Vec<(u32, PageSet)> = (0..CHUNKS).map(|chunk| (chunk, PageSet::FULL)).collect();
    let read = |op: u16, chunk: u64| read_span(op, chunk * 256, 256, PageSet::FULL);
    for (ms, last) in [(1000, vec![read(1, 2)]), (40_000, vec![])] {
        let mut bench = bench(1000, &list);
        // A third chunk would leave less than page-out keeps free at most, a quarter of so small a cap.
        bench.check(Event::Tick, &[read(0, 0), read(1, 1)]);
        for op in 0..2 {
            bench.read_done(op, Ok(()), &[store(op, u64::from(op) * 256, 256), release(op)]);
        }
        // More DRAM is used, unless it comes too late.
        bench.ms = ms;
        bench.limit(1023, &last);
    }
}

#[test]
fn what_nobody_touched_leaves_first() {
    let mut bench = bench(1000, &[(3, low(200))]);
    bench.fault(0, Read, &[read_page(0, 0), read_span(1, 768, 200, low(200))]);
    bench.read_done(0, Ok(()), &[copy(0, 0, true), release(0)]);
    bench.read_done(1, Ok(()), &[store(1, 768, 200), release(1)]);
    let zapped = bench.apply(Event::SetLimit { limit: PageCount(100) });
    let Some(Action::Zap { op }) = zapped.first() else { panic!("{zapped:?}") };
    assert_eq!(bench.machine.zap_chunks(*op)[0], ChunkIdx(3), "it came last");
}

#[test]
fn a_prefetch_that_fails_harms_nobody_and_the_rest_goes_on() {
    let mut bench = bench(1000, &[(0, low(2)), (0, PageSet::range(9, 1))]);
    bench.check(Event::Tick, &[read_span(0, 0, 2, low(2))]);
    bench.read_done(0, READ_ERROR, &[release(0), read_span(0, 9, 1, PageSet::range(9, 1))]);
    assert_eq!(bench.machine.stall(), None);
    bench.read_done(0, Ok(()), &[store(0, 9, 1), release(0)]);
    bench.read_in(0, 0);
    assert_eq!((bench.count(Metric::PagesPrefetched), bench.count(Metric::PrefetchedUsed)), (1, 0));
}

/// All in swap, of which these pages of each chunk are still on their way from another host.
fn lacking(limit: u64, missing: PageSet) -> Bench {
    let mut bench = Bench::new(limit, true, ALL);
    bench.machine.armed(|_| Located { swap: PageSet::FULL, missing, ..Located::default() });
    bench
}

#[test]
fn a_page_that_has_not_come_is_read_for_who_waits_for_it_and_for_nothing_else() {
    let mut bench = lacking(1000, low(200));
    bench.machine.prefetch(vec![(ChunkIdx(2), PageSet::FULL)]);
    bench.check(Event::Tick, &[read_span(0, 512 + 200, 56, PageSet::range(200, 56))]);
    bench.fault(7, Read, &[read_page(1, 7)]);
    bench.fault(7, Write, &[]);
    assert_eq!(bench.count(Metric::FaultsJoined), 1);
    // It has come, and is prefetched: but not while it is being read.
    let came = Event::Came { chunk: ChunkIdx(0), pages: PageSet::range(7, 2) };
    bench.check(came, &[read_span(2, 8, 1, PageSet::range(8, 1))]);
    bench.read_done(1, Ok(()), &[copy(1, 7, false), release(1)]);
    bench.read_done(2, Ok(()), &[store(2, 8, 1), release(2)]);
    // What is dropped need not come.
    bench.check(
        Event::Discard { token: 5, first: PageIdx(0), count: PageCount(7) },
        &[Action::SwapPunch { pages: pages(0, 7) }, Action::DiscardDone { token: 5 }],
    );
    assert_eq!(bench.machine.chunk(ChunkIdx(0)).missing, PageSet::range(9, 191));
    bench.fault(3, Read, &[Action::Zero { pages: pages(3, 1) }]);
}

#[test]
fn a_vm_at_its_full_size_waits_armed_for_what_has_not_come() {
    let mut bench = lacking(1000, low(250));
    let read = |op: u16, first: u64, len: u16, wanted: PageSet| read_span(op, first, len, wanted);
    let rest = PageSet::range(250, 6);
    let reads: Vec<Action> = (0..4).map(|chunk| read(chunk, u64::from(chunk) * 256 + 250, 6, rest)).collect();
    bench.limit(1024, &reads);
    for op in 0..4 {
        bench.read_done(op, Ok(()), &[store(op, u64::from(op) * 256 + 250, 6), release(op)]);
    }
    bench.check(Event::Tick, &[]);
    let came = |chunk| Event::Came { chunk: ChunkIdx(chunk), pages: low(250) };
    let mut actions: Actions = (0..4).flat_map(|chunk| bench.apply(came(chunk))).collect();
    let mut reads = 0;
    while let Some(Action::ReadSpan { op, .. }) =
        actions.iter().find(|action| matches!(action, Action::ReadSpan { .. }))
    {
        let op = *op;
        actions.retain(|action| !matches!(action, Action::ReadSpan { op: other, .. } if *other == op));
        actions.extend(bench.apply(Event::ReadDone { op, result: Ok(()) }));
        reads += 1;
    }
    assert_eq!((reads, actions.last()), (4, Some(&Action::Disarm)));
}

#[test]
fn with_room_for_all_what_is_prefetched_comes_before_the_rest() {
    let mut bench = bench(1000, &[(3, low(2))]);
    bench.limit(1024, &[read_span(0, 768, 2, low(2))]);
    let then = bench.apply(Event::ReadDone { op: OpId(0), result: Ok(()) });
    assert_eq!(then[..2], [store(0, 768, 2), release(0)]);
    assert_eq!(then.len(), 2 + CHUNKS as usize, "all chunks come: {then:?}");
}
