//! Tables of events and the actions that must follow, for the orders that lose nothing. The simulation in `tests/sim`
//! tries the others.

use super::*;
use crate::bits::{PageSet, Run};
use crate::stats::Metric;
use crate::units::{ChunkCount, ChunkIdx, PageCount, PageIdx};
use Access::{Read, Write};

const EMPTY: PageSet = PageSet::EMPTY;
const CHUNKS: u32 = 4;
const FREEZE: Event = Event::Freeze { has_parent: false };
const READ_ERROR: Result<(), IoError> = Err(IoError::Failed(5));

mod borrow;
mod moving;
mod parents;
mod prefetch;

struct Bench {
    machine: Machine,
    oldest_io: u64,
    ms: u64,
}

impl Bench {
    /// An armed VM; `content`: what is in RAM and in swap of each chunk.
    fn new(limit: u64, direct: bool, content: [(PageSet, PageSet); CHUNKS as usize]) -> Bench {
        Self::with_shared(limit, direct, content.map(|(ram, swap)| (ram, swap, EMPTY)))
    }

    /// The same with shared pages.
    fn with_shared(limit: u64, direct: bool, content: [(PageSet, PageSet, PageSet); CHUNKS as usize]) -> Bench {
        Self::with_sharing(Sharing::Off, limit, direct, content)
    }

    fn with_sharing(
        sharing: Sharing,
        limit: u64,
        direct: bool,
        content: [(PageSet, PageSet, PageSet); CHUNKS as usize],
    ) -> Bench {
        let machine = Machine::new(Config {
            chunks: ChunkCount(CHUNKS),
            direct,
            protect: true,
            page_in: Default::default(),
            replacement: Default::default(),
            seed: 0,
            sharing,
        });
        let mut bench = Bench { machine, oldest_io: u64::MAX, ms: 0 };
        bench.check(Event::SetLimit { limit: PageCount(limit) }, &[Action::Arm]);
        bench.machine.armed(|chunk| {
            let (ram, swap, shared) = content[chunk.as_usize()];
            Located { ram, swap, shared, ..Located::default() }
        });
        bench
    }

    fn apply(&mut self, event: Event) -> Actions {
        let mut out = Actions::new();
        self.machine.apply(event, Now { ms: self.ms, oldest_io: self.oldest_io }, &mut out);
        self.machine.check();
        out
    }

    fn check(&mut self, event: Event, expected: &[Action]) {
        assert_eq!(self.apply(event), expected, "{event:?}");
    }

    fn limit(&mut self, limit: u64, expected: &[Action]) {
        self.check(Event::SetLimit { limit: PageCount(limit) }, expected);
    }

    fn fault(&mut self, page: u64, access: Access, expected: &[Action]) {
        self.check(Event::Fault { page: PageIdx(page), access, kind: FaultKind::Unmapped }, expected);
    }

    fn protected(&mut self, page: u64, expected: &[Action]) {
        let kind = FaultKind::WriteProtected;
        self.check(Event::Fault { page: PageIdx(page), access: Write, kind }, expected);
    }

    fn read_done(&mut self, op: u16, result: Result<(), IoError>, expected: &[Action]) {
        self.check(Event::ReadDone { op: OpId(op), result }, expected);
    }

    /// Brings a page in from swap for reading.
    fn read_in(&mut self, op: u16, page: u64) {
        self.fault(page, Read, &[read_page(op, page)]);
        self.read_done(op, Ok(()), &[copy(op, page, true), Action::Release { op: OpId(op) }]);
    }

    fn count(&self, metric: Metric) -> u64 {
        self.machine.stats().get(metric)
    }
}

fn pages(first: u64, len: u16) -> Pages {
    Pages { chunk: PageIdx(first).chunk(), run: Run { start: PageIdx(first).index_in_chunk(), len } }
}

fn read_page(op: u16, page: u64) -> Action {
    Action::ReadPage { op: OpId(op), page: PageIdx(page), demand: true }
}

fn copy(op: u16, page: u64, protect: bool) -> Action {
    Action::Copy { op: OpId(op), pages: pages(page, 1), protect }
}

fn map(first: u64, len: u16, protect: bool) -> Action {
    Action::Map { pages: pages(first, len), protect }
}

fn release(op: u16) -> Action {
    Action::Release { op: OpId(op) }
}

fn zap(op: u16) -> Action {
    Action::Zap { op: OpId(op) }
}

fn zap_done(op: u16, epoch: u64) -> Event {
    Event::ZapDone { op: OpId(op), epoch: Some(epoch) }
}

fn write_out(op: u16, chunk: u32, pages: PageSet) -> Action {
    Action::WriteOut { op: OpId(op), chunk: ChunkIdx(chunk), pages }
}

fn punch_out(op: u16, chunk: u32, pages: PageSet, alone: bool) -> Action {
    Action::PunchOut { op: OpId(op), chunk: ChunkIdx(chunk), pages, alone }
}

fn low(len: u16) -> PageSet {
    PageSet::range(0, len)
}

#[test]
fn a_page_comes_from_swap_protected_and_its_first_write_is_seen() {
    let mut bench = Bench::new(1000, false, [(EMPTY, low(1)), (EMPTY, EMPTY), (EMPTY, EMPTY), (EMPTY, EMPTY)]);
    bench.read_in(0, 0);
    assert!(bench.machine.chunk(ChunkIdx(0)).clean.contains(0));
    bench.protected(0, &[Action::Unprotect { pages: pages(0, 1) }]);
    assert!(bench.machine.chunk(ChunkIdx(0)).clean.is_empty());
}

#[test]
fn a_write_joins_the_read_of_its_page() {
    let mut bench = Bench::new(1000, false, [(EMPTY, low(1)), (EMPTY, EMPTY), (EMPTY, EMPTY), (EMPTY, EMPTY)]);
    bench.fault(0, Read, &[read_page(0, 0)]);
    bench.fault(0, Write, &[]);
    bench.read_done(0, Ok(()), &[copy(0, 0, false), release(0)]);
    assert_eq!((bench.count(Metric::FaultsSwapPage), bench.count(Metric::FaultsJoined)), (1, 1));
}

#[test]
fn the_state_decides_and_not_the_message() {
    let mut bench = Bench::new(1000, false, [(low(2), EMPTY), (EMPTY, low(1)), (EMPTY, EMPTY), (EMPTY, EMPTY)]);
    // The page is in swap by now, so it is read.
    bench.protected(256, &[read_page(0, 256)]);
    // Never protected: unprotecting does no harm, and wakes.
    bench.protected(1, &[Action::Unprotect { pages: pages(1, 1) }]);
    // Mapped already: mapping it again does no harm, and wakes.
    bench.fault(0, Read, &[map(0, 1, false)]);
    bench.fault(0, Read, &[map(0, 2, false)]);
    bench.fault(512, Read, &[Action::Zero { pages: pages(512, 1) }]);
}

/// A sweep over zeros reads the next chunk ahead, straight into the hole.
fn read_ahead_bench() -> Bench {
    let mut bench = Bench::new(1000, true, [(EMPTY, EMPTY), (EMPTY, PageSet::FULL), (EMPTY, EMPTY), (EMPTY, EMPTY)]);
    bench.fault(0, Read, &[Action::Zero { pages: pages(0, 1) }]);
    bench.fault(1, Read, &[Action::Zero { pages: pages(1, 1) }]);
    let read = Action::ReadChunk { op: OpId(0), chunk: ChunkIdx(1), demand: false };
    bench.fault(2, Read, &[Action::Zero { pages: pages(2, 254) }, read]);
    bench
}

#[test]
fn a_chunk_read_ahead_is_mapped_when_it_is_touched() {
    let mut bench = read_ahead_bench();
    bench.read_done(0, Ok(()), &[Action::ChunkComplete { op: OpId(0) }]);
    bench.fault(300, Read, &[map(256, 256, true)]);
    assert_eq!(bench.count(Metric::ReadAheadHits), 1);
}

/// The same, where there is no room for it.
fn late_read_ahead_bench() -> Bench {
    let mut bench = Bench::new(520, true, [(EMPTY, EMPTY), (EMPTY, PageSet::FULL), (EMPTY, EMPTY), (EMPTY, EMPTY)]);
    for (page, zeros) in [(0, 1), (1, 1), (2, 254)] {
        bench.fault(page, Read, &[Action::Zero { pages: pages(page, zeros) }]);
    }
    bench
}

#[test]
fn a_chunk_is_read_ahead_as_soon_as_there_is_room() {
    let mut bench = late_read_ahead_bench();
    bench.limit(540, &[]);
    bench.limit(1000, &[Action::ReadChunk { op: OpId(0), chunk: ChunkIdx(1), demand: false }]);
    assert_eq!(bench.count(Metric::ReadAheadChunks), 1);
    bench.limit(900, &[]);
}

#[test]
fn a_chunk_that_was_asked_for_meanwhile_is_not_read_ahead() {
    let mut bench = late_read_ahead_bench();
    let read = Action::ReadChunk { op: OpId(0), chunk: ChunkIdx(1), demand: true };
    bench.fault(256, Read, &[read, zap(1)]);
    bench.limit(1000, &[]);
    assert_eq!(bench.count(Metric::ReadAheadChunks), 0);
}

#[test]
fn writes_that_go_on_open_twice_as_many_pages_as_before() {
    let mut bench = read_ahead_bench();
    bench.fault(300, Read, &[]);
    bench.read_done(0, Ok(()), &[Action::ChunkComplete { op: OpId(0) }, map(256, 256, true)]);
    for (page, len) in [(100, 1), (0, 1), (1, 2), (3, 6), (9, 18), (27, 54), (81, 162), (243, 13)] {
        bench.protected(256 + page, &[Action::Unprotect { pages: pages(256 + page, len) }]);
    }
    assert!(bench.machine.chunk(ChunkIdx(1)).clean.is_empty());
}

#[test]
fn a_chunk_that_cannot_be_read_is_tried_page_by_page_and_only_the_bad_page_waits() {
    let mut bench = read_ahead_bench();
    bench.fault(300, Read, &[]);
    let stalled = Action::Stalled { stall: Stall::Read(IoError::Failed(5)) };
    let wake = Action::Wake { pages: pages(256, 256) };
    let abandon = Action::ChunkAbandon { op: OpId(0), chunk: ChunkIdx(1) };
    bench.read_done(0, READ_ERROR, &[abandon, wake]);
    bench.fault(300, Read, &[read_page(0, 300)]);
    bench.fault(301, Read, &[read_page(1, 301)]);
    bench.read_done(0, READ_ERROR, &[stalled, release(0)]);
    bench.read_done(1, Ok(()), &[copy(1, 301, true), release(1)]);
    let retried = bench.apply(Event::Continue);
    assert!(matches!(retried[0], Action::ReadPage { .. } | Action::ReadSpan { demand: true, .. }), "{retried:?}");
    assert_eq!(bench.machine.stall(), None);
}

#[test]
fn page_out_stops_at_what_is_guaranteed_also_while_a_chunk_is_on_its_way_in() {
    // 406 pages stay if one of the two half chunks goes.
    for (min, leaves) in [(0, true), (406, true), (407, false)] {
        let mut bench =
            Bench::new(1000, true, [(EMPTY, EMPTY), (EMPTY, PageSet::FULL), (low(150), EMPTY), (low(150), EMPTY)]);
        bench.check(Event::SetMin { min: PageCount(min) }, &[]);
        bench.fault(0, Read, &[Action::Zero { pages: pages(0, 1) }]);
        bench.fault(1, Read, &[Action::Zero { pages: pages(1, 1) }]);
        let ahead = Action::ReadChunk { op: OpId(0), chunk: ChunkIdx(1), demand: false };
        bench.fault(2, Read, &[Action::Zero { pages: pages(2, 254) }, ahead, zap(1)]);
        let actions = bench.apply(zap_done(1, 2));
        let writes = actions.iter().filter(|action| matches!(action, Action::WriteOut { .. })).count();
        assert_eq!(writes, usize::from(leaves), "min {min}: {actions:?}");
        // The chunk is there: what it takes may go.
        let actions = bench.apply(Event::ReadDone { op: OpId(0), result: Ok(()) });
        let writes = writes + actions.iter().filter(|action| matches!(action, Action::WriteOut { .. })).count();
        assert_eq!(writes, 1, "min {min}: {actions:?}");
    }
}

/// Chunk 0 is cold and its 50 dirty pages are being written by operation 1.
fn writing_bench() -> Bench {
    let mut bench = Bench::new(1000, false, [(low(50), EMPTY), (EMPTY, EMPTY), (EMPTY, low(1)), (EMPTY, EMPTY)]);
    bench.limit(40, &[zap(0)]);
    bench.check(zap_done(0, 2), &[write_out(0, 0, low(50))]);
    bench
}

#[test]
fn a_page_that_is_touched_while_it_is_written_stays_and_is_not_clean() {
    let mut bench = writing_bench();
    bench.fault(7, Read, &[map(0, 50, false)]);
    assert_eq!((bench.count(Metric::FaultsCancel), bench.count(Metric::PagesKept)), (1, 50));
    bench.check(Event::WriteDone { op: OpId(0), zero: EMPTY, result: Ok(()) }, &[zap(0)]);
    let chunk = bench.machine.chunk(ChunkIdx(0));
    assert_eq!((chunk.ram, chunk.clean, chunk.swap), (low(50), EMPTY, low(50)));
}

#[test]
fn what_was_written_leaves_after_the_write_and_zeros_leave_nothing_behind() {
    let mut bench = writing_bench();
    let zero = low(5);
    let done = Event::WriteDone { op: OpId(0), zero, result: Ok(()) };
    bench.check(done, &[punch_out(0, 0, low(50), true)]);
    bench.check(Event::PunchDone { op: OpId(0), left: PageSet::single(9) }, &[]);
    let chunk = bench.machine.chunk(ChunkIdx(0));
    assert_eq!((chunk.ram, chunk.clean, chunk.swap), (PageSet::single(9), PageSet::single(9), low(50) - zero));
    bench.fault(0, Read, &[Action::Zero { pages: pages(0, 1) }]);
    bench.fault(9, Read, &[map(9, 1, true)]);
}

#[test]
fn a_failed_write_keeps_everything_in_dram_and_ends_page_out() {
    let mut bench = writing_bench();
    let stalled = Action::Stalled { stall: Stall::Write(IoError::NoSpace) };
    let failed = Event::WriteDone { op: OpId(0), zero: EMPTY, result: Err(IoError::NoSpace) };
    bench.check(failed, &[stalled]);
    bench.check(Event::Tick, &[]);
    assert_eq!(bench.machine.chunk(ChunkIdx(0)).ram, low(50));
    // A stalled VM still gets what it needs to come to a stop.
    bench.fault(512, Read, &[read_page(0, 512)]);
    bench.check(Event::Continue, &[zap(1)]);
}

#[test]
fn a_write_that_fails_after_a_read_ends_page_out_as_well() {
    let mut bench = writing_bench();
    bench.limit(60, &[]);
    bench.fault(512, Read, &[read_page(1, 512)]);
    let stall = |stall| Action::Stalled { stall };
    bench.read_done(1, READ_ERROR, &[stall(Stall::Read(IoError::Failed(5))), release(1)]);
    let failed = Event::WriteDone { op: OpId(0), zero: EMPTY, result: Err(IoError::NoSpace) };
    bench.check(failed, &[stall(Stall::Write(IoError::NoSpace))]);
    bench.limit(20, &[]);
}

#[test]
fn direct_io_older_than_the_zap_holds_page_out_back_but_no_fault() {
    let mut bench = Bench::new(1000, false, [(low(50), EMPTY), (EMPTY, EMPTY), (EMPTY, low(1)), (EMPTY, EMPTY)]);
    bench.limit(40, &[zap(0)]);
    bench.oldest_io = 1;
    bench.check(zap_done(0, 2), &[]);
    assert!(bench.machine.is_pin_blocked());
    // That I/O may itself wait for this page.
    bench.fault(512, Read, &[read_page(0, 512)]);
    bench.oldest_io = 2;
    bench.check(Event::Tick, &[write_out(1, 0, low(50))]);
}

#[test]
fn a_discard_waits_for_the_write_of_its_chunk_and_takes_the_swap_block_first() {
    let mut bench = writing_bench();
    let discard = Event::Discard { token: 7, first: PageIdx(10), count: PageCount(2) };
    bench.fault(10, Read, &[map(0, 50, false)]);
    bench.check(discard, &[]);
    let expected = [
        Action::SwapPunch { pages: pages(10, 2) },
        Action::RamPunch { pages: pages(10, 2) },
        Action::DiscardDone { token: 7 },
        zap(0),
    ];
    bench.check(Event::WriteDone { op: OpId(0), zero: EMPTY, result: Ok(()) }, &expected);
    bench.limit(500, &[]);
    bench.fault(10, Read, &[Action::Zero { pages: pages(10, 1) }]);
}

#[test]
fn a_discard_whose_asker_has_gone_is_not_done() {
    let mut bench = writing_bench();
    bench.fault(10, Read, &[map(0, 50, false)]);
    bench.check(Event::Discard { token: 7, first: PageIdx(10), count: PageCount(2) }, &[]);
    bench.check(Event::Discard { token: 8, first: PageIdx(20), count: PageCount(1) }, &[]);
    bench.check(Event::Abandon { token: 7 }, &[]);
    let expected = [
        Action::SwapPunch { pages: pages(20, 1) },
        Action::RamPunch { pages: pages(20, 1) },
        Action::DiscardDone { token: 8 },
        zap(0),
    ];
    bench.check(Event::WriteDone { op: OpId(0), zero: EMPTY, result: Ok(()) }, &expected);
}

#[test]
fn a_fault_that_waited_does_not_keep_a_page_whose_punch_was_asked_for() {
    let page = 512;
    let swap = PageSet::from_iter([0, 100, 200]);
    let mut bench = Bench::new(100, false, [(EMPTY, swap), (low(50), EMPTY), (EMPTY, low(1)), (EMPTY, EMPTY)]);
    [0, 100, 200].into_iter().for_each(|page| bench.read_in(0, page));
    bench.limit(53, &[zap(0)]);
    // Two threads wait for one page; there is room for one page, so one of them goes on waiting, for nothing.
    bench.fault(page, Read, &[]);
    bench.fault(page, Read, &[]);
    bench.check(zap_done(0, 2), &[write_out(0, 1, low(50))]);
    bench.limit(54, &[read_page(1, page)]);
    bench.read_done(1, Ok(()), &[copy(1, page, true), release(1), zap(1)]);
    bench.check(zap_done(1, 3), &[]);
    // While others wait for room, a page-out is not cancelled.
    bench.fault(256, Read, &[]);
    bench.check(Event::WriteDone { op: OpId(0), zero: EMPTY, result: Ok(()) }, &[punch_out(0, 1, low(50), true)]);
    // The big chunk cannot leave, so the two clean ones have to go at once.
    let punches = [punch_out(0, 0, swap, true), punch_out(1, 2, low(1), true), zap(2)];
    bench.check(Event::PunchDone { op: OpId(0), left: low(50) }, &punches);
    // After the first there is room for the faults that wait, but the second punch is under way.
    bench.check(Event::PunchDone { op: OpId(0), left: EMPTY }, &[map(256, 16, true)]);
    bench.check(Event::PunchDone { op: OpId(1), left: EMPTY }, &[read_page(1, page)]);
}

#[test]
fn a_restart_takes_ram_for_the_truth_and_what_swap_has_besides_for_outdated() {
    let mut bench = Bench::new(1000, false, [(low(2), low(4)), (EMPTY, EMPTY), (EMPTY, EMPTY), (EMPTY, EMPTY)]);
    assert_eq!((bench.count(Metric::Resident), bench.count(Metric::Swapped)), (2, 2));
    assert_eq!(bench.machine.chunk(ChunkIdx(0)).stale(), low(2));
    // Mapped by the VMM or not, protected or not: both end well.
    bench.protected(0, &[Action::Unprotect { pages: pages(0, 1) }]);
    bench.fault(1, Write, &[map(1, 1, false)]);
    bench.fault(2, Read, &[read_page(0, 2)]);
}

#[test]
fn a_cap_of_the_whole_size_brings_everything_back_and_disarms() {
    let mut bench = Bench::new(1000, false, [(low(2), low(4)), (EMPTY, EMPTY), (EMPTY, EMPTY), (EMPTY, EMPTY)]);
    let span = Action::ReadSpan { op: OpId(0), span: pages(2, 2), wanted: PageSet::range(2, 2), demand: false };
    bench.limit(1024, &[span]);
    // Nobody waits for it: it tries again later, not at once.
    bench.read_done(0, READ_ERROR, &[release(0)]);
    bench.check(Event::Fault { page: PageIdx(2), access: Read, kind: FaultKind::Unmapped }, &[read_page(0, 2)]);
    bench.read_done(0, Ok(()), &[copy(0, 2, true), release(0)]);
    let mut out = Actions::new();
    bench.machine.apply(Event::Tick, Now { ms: 5000, oldest_io: u64::MAX }, &mut out);
    let span = Action::ReadSpan { op: OpId(0), span: pages(3, 1), wanted: PageSet::range(3, 1), demand: false };
    assert_eq!(out.last(), Some(&span));
    let stored = Action::Store { op: OpId(0), pages: pages(3, 1) };
    bench.read_done(0, Ok(()), &[stored, release(0), Action::Disarm]);
    bench.machine.disarmed();
    bench.fault(0, Read, &[Action::Wake { pages: pages(0, 1) }]);
    assert_eq!(bench.machine.stats().faults(), 1);
}

#[test]
fn a_vm_below_its_min_gets_its_pages_back_up_to_that() {
    let mut bench = Bench::new(1000, false, [(low(2), low(4)), (low(100), EMPTY), (EMPTY, low(2)), (EMPTY, EMPTY)]);
    // A chunk more than the 102 pages that it has would be above it.
    bench.check(Event::SetMin { min: PageCount(357) }, &[]);
    let read = |op, first, start| Action::ReadSpan {
        op: OpId(op),
        span: pages(first, 2),
        wanted: PageSet::range(start, 2),
        demand: false,
    };
    bench.check(Event::SetMin { min: PageCount(358) }, &[read(0, 2, 2)]);
    bench.check(Event::SetMin { min: PageCount(494) }, &[read(1, 512, 0)]);
}

#[test]
fn a_fault_that_comes_after_disarming_is_woken() {
    let mut bench = Bench::new(1000, false, [(EMPTY, EMPTY); CHUNKS as usize]);
    bench.limit(CHUNKS as u64 * 256, &[Action::Disarm]);
    bench.machine.disarmed();
    bench.fault(256, Read, &[Action::Wake { pages: pages(256, 1) }]);
}

#[test]
fn a_shared_page_whose_frame_goes_needs_no_room() {
    const NOTHING: (PageSet, PageSet, PageSet) = (EMPTY, EMPTY, EMPTY);
    let shared = (EMPTY, EMPTY, PageSet::range(0, 44));
    let fault = |page| Event::Fault { page: PageIdx(page), access: Read, kind: FaultKind::Unmapped };
    // The others have left their frames to this VM: it is charged for all of them, and has no room left.
    let mut bench = Bench::with_shared(300, false, [(PageSet::FULL, EMPTY, EMPTY), shared, NOTHING, NOTHING]);
    bench.apply(Event::Charge { pages: PageCount(44) });
    let out = bench.apply(fault(256));
    assert!(out.contains(&Action::CopyBack { pages: pages(256, 1) }), "{out:?}");
    assert_eq!((bench.count(Metric::FaultsWaited), bench.count(Metric::SharedPart)), (0, 43));
    // A page that is nowhere else has no frame that goes.
    bench.apply(fault(512));
    assert_eq!(bench.count(Metric::FaultsWaited), 1);

    // What is in DRAM alone fills the cap.
    let full = (PageSet::FULL, EMPTY, EMPTY);
    let mut bench = Bench::with_shared(300, false, [full, shared, (PageSet::range(0, 44), EMPTY, EMPTY), NOTHING]);
    bench.apply(Event::Charge { pages: PageCount(44) });
    bench.apply(fault(256));
    assert_eq!(bench.count(Metric::FaultsWaited), 1);

    // The others still have their part: a page that comes back takes room.
    let mut bench = Bench::with_shared(278, false, [full, shared, NOTHING, NOTHING]);
    bench.apply(Event::Charge { pages: PageCount(22) });
    bench.apply(fault(256));
    assert_eq!(bench.count(Metric::FaultsWaited), 1);
}

#[test]
fn nothing_is_shared_by_a_vm_that_is_being_disarmed() {
    let content = [(low(50), EMPTY, EMPTY), (low(40), EMPTY, EMPTY), (EMPTY, EMPTY, low(1)), (EMPTY, EMPTY, EMPTY)];
    let mut bench = Bench::with_sharing(Sharing::PageOut, 91, false, content);
    bench.check(Event::Tick, &[zap(0)]);
    // Its pages are cold, and stay: there is room for all of them again.
    bench.limit(1000, &[]);
    bench.check(zap_done(0, 2), &[]);
    bench.check(Event::LookAgain { page: PageIdx(0) }, &[]);
    // The last that is out comes back, and the next event finds that all is home.
    bench.limit(1024, &[Action::CopyBack { pages: pages(512, 1) }]);
    bench.ms = 1000;
    bench.check(Event::Scan, &[Action::Disarm]);
}

/// A VM with chunk 0 in RAM and chunk 1 in swap, and an image of both.
fn with_image() -> Bench {
    let mut bench = Bench::new(600, false, [(PageSet::FULL, EMPTY), (EMPTY, PageSet::FULL), NONE, NONE]);
    bench.check(FREEZE, &[Action::Protect { pages: pages(0, 256) }, Action::BeginImage]);
    bench
}

const NONE: (PageSet, PageSet) = (EMPTY, EMPTY);

fn preserve(first: u64, len: u16, from: Source) -> Action {
    Action::Preserve { pages: pages(first, len), from }
}

#[test]
fn a_frozen_page_is_preserved_before_it_can_be_written() {
    let mut bench = with_image();
    assert_eq!(bench.machine.frozen(), u64::from(CHUNKS) * 256);
    bench.fault(5, Read, &[map(0, 16, true)]);
    // A fault for each of its neighbours would cost more than their copies.
    bench.protected(5, &[preserve(0, 16, Source::Ram), Action::Unprotect { pages: pages(0, 16) }]);
    bench.protected(5, &[Action::Unprotect { pages: pages(0, 15) }]);
    // In swap: what was read for the VM is what the image gets.
    bench.fault(300, Write, &[read_page(0, 300)]);
    bench.read_done(0, Ok(()), &[preserve(300, 1, Source::Buffer(OpId(0))), copy(0, 300, false), release(0)]);
    // Nowhere: the image has to know that it was zero.
    bench.fault(600, Read, &[preserve(600, 1, Source::Zero), Action::Zero { pages: pages(600, 1) }]);
}

#[test]
fn an_image_gets_a_page_from_where_it_is_when_it_leaves_or_changes() {
    let shared = (EMPTY, low(8), low(8));
    let mut bench = Bench::with_shared(600, false, [shared, (low(4), low(4), EMPTY), (EMPTY, EMPTY, EMPTY), shared]);
    bench.check(FREEZE, &[Action::Protect { pages: pages(256, 4) }, Action::BeginImage]);
    // The blocks of shared pages, and of pages in RAM that are not clean, are outdated.
    let back = Action::CopyBack { pages: pages(3, 1) };
    bench.fault(3, Read, &[preserve(3, 1, Source::Frame), back]);
    bench.fault(257, Write, &[preserve(256, 4, Source::Ram), map(256, 4, false)]);
    let discard = Event::Discard { token: 7, first: PageIdx(768), count: PageCount(8) };
    let expected = [
        preserve(768, 8, Source::Frame),
        Action::SwapPunch { pages: pages(768, 8) },
        Action::DropShared { pages: pages(768, 8) },
        Action::DiscardDone { token: 7 },
    ];
    bench.check(discard, &expected);
}

#[test]
fn pages_that_an_image_owns_are_preserved_before_they_are_given_back() {
    let mut bench = with_image();
    let discard = Event::Discard { token: 7, first: PageIdx(254), count: PageCount(4) };
    // What a block alone has is read first.
    let expected = [preserve(254, 2, Source::Ram), Action::RamPunch { pages: pages(254, 2) }, keep(0, 1, low(2))];
    bench.check(discard, &expected);
    bench.check(Event::Tick, &[]);
    let expected = [
        preserve(256, 2, Source::Buffer(OpId(0))),
        release(0),
        Action::SwapPunch { pages: pages(256, 2) },
        Action::DiscardDone { token: 7 },
    ];
    bench.read_done(0, Ok(()), &expected);
    // They are zero, and stay so: nothing to preserve.
    bench.check(FREEZE, &[Action::BeginImage]);
    let again = Event::Discard { token: 8, first: PageIdx(254), count: PageCount(4) };
    bench.check(again, &[Action::DiscardDone { token: 8 }]);
}

/// The image has all of chunk 0, and operation 0 reads chunk 1 for it.
fn filling_bench() -> Bench {
    let mut bench = with_image();
    for first in [0, 64, 128, 192] {
        bench.check(Event::Fill, &[preserve(first, 64, Source::Ram)]);
    }
    bench.check(Event::Fill, &[keep(0, 1, PageSet::FULL)]);
    bench
}

fn keep(op: u16, chunk: u32, pages: PageSet) -> Action {
    Action::Keep { op: OpId(op), chunk: ChunkIdx(chunk), pages }
}

#[test]
fn an_image_is_filled_until_it_lacks_nothing() {
    let mut bench = filling_bench();
    bench.check(Event::Fill, &[preserve(512, 256, Source::Zero)]);
    bench.check(Event::Fill, &[preserve(768, 256, Source::Zero)]);
    bench.check(Event::Fill, &[]);
    assert!(bench.machine.has_pages_to_fill() && bench.machine.is_fill_blocked());
    bench.read_done(0, Ok(()), &[preserve(256, 256, Source::Buffer(OpId(0))), release(0)]);
    assert_eq!((bench.machine.frozen(), bench.machine.has_pages_to_fill()), (0, false));
    // It is protected still, and its first write copies nothing.
    bench.protected(5, &[Action::Unprotect { pages: pages(5, 1) }]);
}

#[test]
fn what_has_changed_while_it_was_read_for_an_image_is_not_used() {
    let mut bench = filling_bench();
    bench.fault(300, Write, &[read_page(1, 300)]);
    bench.read_done(1, Ok(()), &[preserve(300, 1, Source::Buffer(OpId(1))), copy(1, 300, false), release(1)]);
    let rest = [preserve(256, 44, Source::Buffer(OpId(0))), preserve(301, 211, Source::Buffer(OpId(0))), release(0)];
    bench.read_done(0, Ok(()), &rest);

    let mut bench = filling_bench();
    bench.check(Event::Thaw, &[]);
    bench.check(FREEZE, &[Action::BeginImage]);
    bench.read_done(0, Ok(()), &[release(0)]);
    assert_eq!(bench.machine.frozen(), u64::from(CHUNKS) * 256);
}

#[test]
fn an_image_that_cannot_be_read_from_swap_is_lost_and_the_vm_runs_on() {
    let mut bench = filling_bench();
    for _ in 0..2 {
        bench.read_done(0, READ_ERROR, &[release(0)]);
        bench.check(Event::Fill, &[keep(0, 1, PageSet::FULL)]);
    }
    // A page that has changed may be why it failed.
    bench.fault(300, Write, &[read_page(1, 300)]);
    bench.read_done(1, Ok(()), &[preserve(300, 1, Source::Buffer(OpId(1))), copy(1, 300, false), release(1)]);
    bench.read_done(0, READ_ERROR, &[release(0)]);
    bench.check(Event::Fill, &[keep(0, 1, PageSet::FULL - PageSet::single(44))]);
    bench.read_done(0, READ_ERROR, &[Action::LoseImages, release(0)]);
    assert_eq!((bench.machine.frozen(), bench.machine.stall()), (0, None));
}

#[test]
fn a_chunk_that_leaves_in_the_same_list_is_not_filled() {
    let swap = PageSet::from_iter([0, 100]);
    let mut bench = Bench::new(1000, false, [(EMPTY, swap), NONE, NONE, NONE]);
    bench.read_in(0, 0);
    bench.read_in(0, 100);
    bench.check(FREEZE, &[Action::BeginImage]);
    bench.limit(1, &[zap(0)]);
    bench.oldest_io = 1;
    bench.check(zap_done(0, 2), &[]);
    bench.oldest_io = u64::MAX;
    bench.check(Event::Fill, &[punch_out(0, 0, swap, true), preserve(256, 256, Source::Zero)]);
}

#[test]
fn an_image_begins_at_once_or_not_at_all() {
    let refused = |why| Action::RefuseImage { why };
    let mut bench = Bench::new(600, false, [(PageSet::FULL, EMPTY), NONE, NONE, NONE]);
    bench.oldest_io = 3;
    let out = bench.apply(FREEZE);
    assert_eq!(out.first(), Some(&refused(Refusal::DirectIo)));
    bench.oldest_io = u64::MAX;
    assert!(!bench.apply(Event::Tick).contains(&Action::BeginImage), "nobody waits for it any more");
    assert_eq!(bench.machine.frozen(), 0);

    let mut bench = with_image();
    assert!(bench.apply(Event::Pin).contains(&Action::LoseImages));
    assert_eq!(bench.machine.frozen(), 0);
    assert_eq!(bench.apply(FREEZE).first(), Some(&refused(Refusal::Pinned)));

    // Unarmed, and armed too late.
    let mut bench = Bench::new(600, false, [(low(9), EMPTY), NONE, NONE, NONE]);
    bench.limit(1024, &[Action::Disarm]);
    bench.machine.disarmed();
    bench.check(FREEZE, &[refused(Refusal::Unarmed)]);
    bench.check(Event::Prepare { on: true }, &[Action::Arm]);
    bench.check(FREEZE, &[refused(Refusal::Unarmed)]);
    bench.machine.armed(|_| Located { ram: low(9), ..Located::default() });
    bench.check(Event::Tick, &[]);
}

#[test]
fn preparation_protects_chunk_by_chunk_and_leaves_little_for_the_beginning() {
    let protect = |first, len| Action::Protect { pages: pages(first, len) };
    let strided = |step: usize| (0..=255).step_by(step).map(|page| page as u8).collect::<PageSet>();
    let mut bench = Bench::new(1000, false, [(strided(2), EMPTY), (strided(10), EMPTY), (low(3), EMPTY), NONE]);
    bench.check(Event::Prepare { on: true }, &[protect(0, 255), protect(256, 251), protect(512, 3)]);
    assert_eq!(bench.machine.sweeps(), 1, "a chunk is one call");
    bench.check(Event::Prepare { on: true }, &[]);
    assert_eq!(bench.machine.sweeps(), 2);
    // What is written meanwhile is all that is left to be done. It copies nothing.
    bench.protected(513, &[Action::Unprotect { pages: pages(513, 1) }]);
    bench.fault(514, Write, &[map(514, 1, false), map(512, 1, false)]);
    bench.check(FREEZE, &[protect(512, 3), Action::BeginImage]);
    bench.limit(1024, &[]);
    bench.check(Event::Thaw, &[Action::Disarm]);
}

#[test]
fn a_vm_is_armed_only_as_long_as_it_is_prepared() {
    let mut bench = Bench::new(1000, false, [(low(3), EMPTY), NONE, NONE, NONE]);
    bench.apply(Event::Prepare { on: true });
    bench.limit(1024, &[]);
    bench.check(Event::Prepare { on: false }, &[Action::Disarm]);
}

#[test]
fn what_could_not_be_protected_is_open_and_no_image_begins() {
    let protect = Action::Protect { pages: pages(0, 3) };
    let mut bench = Bench::new(1000, false, [(low(3), EMPTY), NONE, NONE, NONE]);
    bench.check(Event::Prepare { on: true }, &[protect]);
    bench.check(Event::ProtectFailed { pages: pages(0, 3) }, &[]);
    bench.check(FREEZE, &[protect, Action::BeginImage]);
    bench.check(Event::ProtectFailed { pages: pages(0, 3) }, &[]);
    assert_eq!((bench.machine.frozen(), bench.machine.chunk(ChunkIdx(0)).open), (0, low(3)));
}

#[test]
fn a_vm_with_frozen_pages_stays_armed() {
    let mut bench = Bench::new(600, false, [(PageSet::FULL, EMPTY), NONE, NONE, NONE]);
    bench.apply(FREEZE);
    let whole = Event::SetLimit { limit: PageCount(u64::from(CHUNKS) * 256) };
    assert!(!bench.apply(whole).contains(&Action::Disarm));
    assert!(bench.apply(Event::Thaw).contains(&Action::Disarm));
}
