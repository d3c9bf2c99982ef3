//! What the miss-ratio curve of the real machine predicts, against what the same machine then does: a VM and a pager that
//! follow it at once, but for reads, writes and zaps, which take virtual time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use pagoda_core::bits::PageSet;
use pagoda_core::chance::Chance;
use pagoda_core::fault::{
    Access, Action, Actions, Config, Event, FaultKind, Machine, Now, PageInPolicy, Pages, Replacement, Sharing,
};
use pagoda_core::stats::Metric;
use pagoda_core::units::{ChunkCount, PageCount, PageIdx};

const MIB: u64 = 256;
const MEMORY: u64 = 192 * MIB;
/// Where the curve is taken.
const DRAM: u64 = 96 * MIB;
/// The curve predicts the misses at these sizes.
const OTHERS: [u64; 2] = [64 * MIB, 128 * MIB];
/// Accesses of a run: some ten of each page.
const ACCESSES: u64 = 600_000;
/// As the bench of real VMs asks for.
const ERROR_MAX: f64 = 0.25;

/// Times of a VM that is not the fastest.
const ACCESS_US: u64 = 40;
const FAULT_US: u64 = 8;
const READ_PAGE_US: u64 = 45;
const READ_CHUNK_US: u64 = 450;
const WRITE_CHUNK_US: u64 = 500;
const ZAP_US: u64 = 50;
const TICK_US: u64 = 50_000;

#[derive(Clone, Copy, Debug)]
enum Workload {
    Random,
    /// Popular pages scattered over all chunks.
    Zipf,
    /// In turns the next page of a sweep over the first half and a random page of the second.
    Mixed,
}

impl Workload {
    /// Whole chunks for the sweep alone: that chance faults look like a stream now and then is no matter of the curve.
    fn page_in(self) -> PageInPolicy {
        match self {
            Workload::Random | Workload::Zipf => PageInPolicy::Page,
            Workload::Mixed => PageInPolicy::Adaptive,
        }
    }

    fn page(self, turn: u64, chance: &mut Chance) -> PageIdx {
        let half = MEMORY / 2;
        PageIdx(match self {
            Workload::Random => chance.below(MEMORY),
            Workload::Zipf => {
                let rank = (MEMORY as f64).powf(chance.below(1 << 32) as f64 / (1u64 << 32) as f64) as u64 - 1;
                // By a prime that does not divide it, each rank has a page of its own.
                rank * 2_654_435_761 % MEMORY
            }
            Workload::Mixed if turn.is_multiple_of(2) => turn / 2 % half,
            Workload::Mixed => half + chance.below(half),
        })
    }
}

struct Vm {
    machine: Machine,
    mapped: Vec<bool>,
    /// The page that the one thread waits for.
    wanted: Option<usize>,
    us: u64,
    tick_us: u64,
    /// What ends when: the operation's place in `ends`.
    due: BinaryHeap<Reverse<(u64, usize)>>,
    ends: Vec<Event>,
    at_once: VecDeque<Event>,
}

impl Vm {
    /// All of it was written once.
    fn new(page_in: PageInPolicy) -> Vm {
        let config = Config {
            chunks: ChunkCount((MEMORY / 256) as u32),
            direct: false,
            protect: true,
            page_in,
            replacement: Replacement::Queues,
            seed: 1,
            sharing: Sharing::Off,
        };
        let mut vm = Vm {
            machine: Machine::new(config),
            mapped: vec![false; MEMORY as usize],
            wanted: None,
            us: 0,
            tick_us: 0,
            due: BinaryHeap::new(),
            ends: Vec::new(),
            at_once: VecDeque::new(),
        };
        vm.send_event(Event::SetLimit { limit: PageCount(DRAM) });
        (0..MEMORY).for_each(|page| vm.access(PageIdx(page)));
        vm
    }

    fn send_event(&mut self, event: Event) {
        self.at_once.push_back(event);
        while let Some(event) = self.at_once.pop_front() {
            let mut out = Actions::new();
            self.machine.apply(event, Now { ms: self.us / 1000, oldest_io: u64::MAX }, &mut out);
            out.into_iter().for_each(|action| self.execute(action));
        }
    }

    fn later(&mut self, us: u64, event: Event) {
        self.due.push(Reverse((self.us + us, self.ends.len())));
        self.ends.push(event);
    }

    fn map(&mut self, pages: Pages) {
        let first = pages.first().0 as usize;
        let range = first..first + usize::from(pages.run.len);
        if self.wanted.is_some_and(|page| range.contains(&page)) {
            self.wanted = None;
        }
        self.mapped[range].fill(true);
    }

    fn execute(&mut self, action: Action) {
        match action {
            Action::Map { pages, .. } | Action::Zero { pages } | Action::Copy { pages, .. } => self.map(pages),
            Action::ReadPage { op, .. } => self.later(READ_PAGE_US, Event::ReadDone { op, result: Ok(()) }),
            Action::ReadSpan { op, .. } => self.later(READ_CHUNK_US, Event::ReadDone { op, result: Ok(()) }),
            Action::Zap { op } => {
                for chunk in self.machine.zap_chunks(op) {
                    self.mapped[chunk.as_usize() * 256..][..256].fill(false);
                }
                self.later(ZAP_US, Event::ZapDone { op, epoch: Some(1) });
            }
            Action::ZapPages { ticket } => {
                self.machine.watch_zaps().for_each(|page| self.mapped[page.0 as usize] = false);
                self.later(ZAP_US, Event::PagesZapped { ticket, done: true });
            }
            Action::WriteOut { op, .. } => {
                self.later(WRITE_CHUNK_US, Event::WriteDone { op, zero: PageSet::EMPTY, result: Ok(()) });
            }
            Action::PunchOut { op, chunk, pages, .. } => {
                pages.iter().for_each(|index| self.mapped[chunk.page(index).0 as usize] = false);
                self.at_once.push_back(Event::PunchDone { op, left: PageSet::EMPTY });
            }
            Action::Arm => self.machine.armed(|_| Default::default()),
            Action::ZeroChunk { .. } | Action::ReadChunk { .. } | Action::Stalled { .. } => panic!("{action:?}"),
            // Swap and RAM hold nothing here, and a thread looks again by itself.
            _ => {}
        }
    }

    fn end_what_is_due(&mut self) {
        while let Some(Reverse((at, end))) = self.due.peek().copied()
            && at <= self.us
        {
            self.due.pop();
            self.send_event(self.ends[end]);
        }
        if self.us >= self.tick_us {
            self.tick_us = self.us + TICK_US;
            self.send_event(Event::Tick);
        }
    }

    fn access(&mut self, page: PageIdx) {
        self.us += ACCESS_US;
        self.end_what_is_due();
        if self.mapped[page.0 as usize] {
            return;
        }
        self.us += FAULT_US;
        self.wanted = Some(page.0 as usize);
        self.send_event(Event::Fault { page, access: Access::Read, kind: FaultKind::Unmapped });
        // It may be unmapped again by the time that the thread is looked at.
        while self.wanted.is_some() {
            self.us = self.due.peek().map_or(self.tick_us, |Reverse((at, _))| *at);
            self.end_what_is_due();
        }
    }

    /// Pages read from swap meanwhile.
    fn run(&mut self, workload: Workload, seed: u64) -> f64 {
        let before = self.machine.counter(Metric::PagesIn);
        let mut chance = Chance::new(seed);
        (0..ACCESSES).for_each(|turn| self.access(workload.page(turn, &mut chance)));
        (self.machine.counter(Metric::PagesIn) - before) as f64
    }
}

#[test]
fn the_curve_predicts_what_the_pager_does() {
    let mut wrong = Vec::new();
    for workload in [Workload::Random, Workload::Zipf, Workload::Mixed] {
        let mut vm = Vm::new(workload.page_in());
        vm.machine.watch_curve(true);
        vm.run(workload, 1);
        let now = vm.run(workload, 2);
        let curve = vm.machine.curve().expect("much was used");
        println!("{workload:?}: {now} read at the same size");
        vm.machine.watch_curve(false);
        for size in OTHERS {
            vm.send_event(Event::SetLimit { limit: PageCount(size) });
            vm.run(workload, 3);
            let measured = vm.run(workload, 4);
            // As `pagoda whatif` does.
            let predicted = now * curve.misses(PageCount(size)) / curve.misses(PageCount(DRAM));
            let error = predicted / measured - 1.0;
            println!("  {:3} MiB: {predicted:.0} predicted, {measured} measured", size / MIB);
            if error.abs() > ERROR_MAX {
                wrong.push(format!("{workload:?} at {} MiB: {:+.0} %", size / MIB, error * 100.0));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
