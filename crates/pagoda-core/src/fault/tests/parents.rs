//! Images that refer to the one before them: which pages keep the bit `same`, and what is not copied for them.

use super::*;

const ON_PARENT: Event = Event::Freeze { has_parent: true };
const ALL: u64 = CHUNKS as u64 * 256;

/// As [`with_image`], and the image is filled.
fn with_filled() -> Bench {
    let mut bench = filling_bench();
    bench.check(Event::Fill, &[preserve(512, 256, Source::Zero)]);
    bench.check(Event::Fill, &[preserve(768, 256, Source::Zero)]);
    bench.read_done(0, Ok(()), &[preserve(256, 256, Source::Buffer(OpId(0))), release(0)]);
    assert_eq!((bench.machine.frozen(), same(&bench)), (0, ALL), "filling changes nothing");
    bench
}

fn same(bench: &Bench) -> u64 {
    bench.machine.same()
}

/// An image begins now; pages that it copies are those.
fn check_copied(bench: &mut Bench, copied: &[u64]) {
    bench.apply(ON_PARENT);
    for page in 0..ALL {
        let c = bench.machine.chunk(PageIdx(page).chunk());
        let is_inherited = c.inherited.contains(PageIdx(page).index_in_chunk());
        assert_eq!(is_inherited, !copied.contains(&page), "page {page}");
    }
    assert_eq!((bench.machine.frozen(), same(bench)), (ALL, ALL));
}

#[test]
fn what_has_not_changed_is_the_parents_and_is_not_read() {
    let mut bench = with_filled();
    bench.check(ON_PARENT, &[Action::BeginImage]);
    // Two chunks that are in swap or busy are no matter.
    for first in [0, 256, 512, 768] {
        bench.check(Event::Fill, &[preserve(first, 256, Source::Parent)]);
    }
    assert_eq!((bench.machine.frozen(), same(&bench)), (0, ALL));
    // A write, a read and a discard before an image has them.
    bench.check(ON_PARENT, &[Action::BeginImage]);
    bench.fault(5, Write, &[preserve(5, 1, Source::Parent), map(5, 1, false), map(0, 5, true), map(6, 10, true)]);
    bench.fault(300, Write, &[read_page(0, 300)]);
    bench.read_done(0, Ok(()), &[preserve(300, 1, Source::Parent), copy(0, 300, false), release(0)]);
    let discard = Event::Discard { token: 7, first: PageIdx(256), count: PageCount(4) };
    let expected = [
        preserve(256, 4, Source::Parent),
        Action::SwapPunch { pages: pages(256, 4) },
        Action::DiscardDone { token: 7 },
    ];
    bench.check(discard, &expected);
    assert_eq!(same(&bench), ALL - 6);
}

#[test]
fn each_kind_of_change_ends_that_a_page_is_the_same() {
    // A first write; reads leave it.
    let mut bench = with_filled();
    bench.fault(5, Read, &[map(0, 16, true)]);
    bench.protected(5, &[Action::Unprotect { pages: pages(5, 1) }]);
    check_copied(&mut bench, &[5]);
    // A write to what is in swap, and one that comes while the page is read for reading.
    let mut bench = with_filled();
    bench.fault(300, Write, &[read_page(0, 300)]);
    bench.fault(310, Read, &[read_page(1, 310)]);
    bench.fault(310, Write, &[]);
    bench.read_done(0, Ok(()), &[copy(0, 300, false), release(0)]);
    bench.read_done(1, Ok(()), &[copy(1, 310, false), release(1)]);
    check_copied(&mut bench, &[300, 310]);
    // Zeros where nothing was are writable at once.
    let mut bench = with_filled();
    bench.fault(600, Read, &[Action::Zero { pages: pages(600, 1) }]);
    check_copied(&mut bench, &[600]);
    // What the guest gives back; what is zero stays so.
    let mut bench = with_filled();
    bench.apply(Event::Discard { token: 1, first: PageIdx(254), count: PageCount(4) });
    bench.apply(Event::Discard { token: 2, first: PageIdx(700), count: PageCount(4) });
    check_copied(&mut bench, &[254, 255, 256, 257]);
}

#[test]
fn a_shared_page_that_comes_back_is_not_known_to_be_the_same() {
    let mut bench = Bench::with_shared(600, false, [(EMPTY, low(8), low(8)), NO, NO, NO]);
    bench.apply(FREEZE);
    for first in [0, 256, 512, 768] {
        bench.apply(Event::Fill);
        assert!(bench.machine.chunk(PageIdx(first).chunk()).frozen.is_empty());
    }
    bench.fault(3, Read, &[Action::CopyBack { pages: pages(3, 1) }]);
    check_copied(&mut bench, &[3]);
}

const NO: (PageSet, PageSet, PageSet) = (EMPTY, EMPTY, EMPTY);

#[test]
fn whatever_loses_count_ends_it_for_all_pages() {
    let check = |name: &str, event: &dyn Fn(&mut Bench)| {
        let mut bench = with_filled();
        event(&mut bench);
        assert_eq!(same(&bench), 0, "{name}");
        bench
    };
    check("removed", &|bench| drop(bench.apply(Event::Forget)));
    check("lost", &|bench| drop(bench.apply(Event::Thaw)));
    check("pinned", &|bench| drop(bench.apply(Event::Pin)));
    let located = |_| Located { ram: PageSet::FULL, ..Located::default() };
    check("another daemon", &|bench| bench.machine.armed(located));
    // Not only part of it, if it ends while the next one is filled: that one keeps what it has inherited.
    let mut bench = with_filled();
    bench.apply(ON_PARENT);
    bench.apply(Event::Forget);
    bench.check(Event::Fill, &[preserve(0, 256, Source::Parent)]);
    assert_eq!((bench.machine.frozen(), same(&bench)), (ALL - 256, 0));
    // An image that could not be protected is lost with all that was the same.
    let mut bench = with_filled();
    bench.fault(5, Write, &[map(5, 1, false), map(0, 5, true), map(6, 10, true)]);
    bench.apply(ON_PARENT);
    bench.check(Event::ProtectFailed { pages: pages(5, 1) }, &[]);
    assert_eq!((bench.machine.frozen(), same(&bench)), (0, 0));
}

#[test]
fn what_could_not_be_protected_in_time_is_not_the_same() {
    let mut bench = with_filled();
    bench.fault(5, Write, &[map(5, 1, false), map(0, 5, true), map(6, 10, true)]);
    bench.fault(8, Write, &[Action::Unprotect { pages: pages(8, 1) }]);
    let out = bench.apply(Event::Prepare { on: true });
    assert_eq!(out, [Action::Protect { pages: pages(5, 4) }]);
    bench.check(Event::ProtectFailed { pages: pages(5, 4) }, &[]);
    assert_eq!(same(&bench), ALL - 4, "those between them may have been protected, or not");
}

#[test]
fn an_image_that_is_not_filled_is_no_parent() {
    let mut bench = filling_bench();
    bench.check(ON_PARENT, &[Action::BeginImage]);
    assert!((0..CHUNKS).all(|chunk| bench.machine.chunk(ChunkIdx(chunk)).inherited.is_empty()));
    // Nor is one that is none.
    let mut bench = with_filled();
    bench.check(FREEZE, &[Action::BeginImage]);
    assert!((0..CHUNKS).all(|chunk| bench.machine.chunk(ChunkIdx(chunk)).inherited.is_empty()));
}

#[test]
fn a_vm_stays_armed_while_pages_are_the_same() {
    let mut bench = Bench::new(1000, false, [(PageSet::FULL, EMPTY), NONE, NONE, NONE]);
    bench.apply(FREEZE);
    (0..8).for_each(|_| drop(bench.apply(Event::Fill)));
    assert_eq!(bench.machine.frozen(), 0);
    bench.limit(ALL, &[]);
    bench.check(Event::Forget, &[Action::Disarm]);
    bench.machine.disarmed();
    bench.check(Event::Tick, &[]);
}
