//! The machine's data and its entry point.

use std::collections::VecDeque;

use crate::bits::{PageSet, Run};
use crate::chance::Chance;
use crate::pattern::Pattern;
use crate::queues::ChunkQueues;
use crate::stats::{Metric, Stats};
use crate::units::{ChunkCount, ChunkIdx, PageCount, PageIdx};

use super::action::{Access, Action, Actions, Event, Now, Pages, Served, Stall};
use super::ops::Ops;
use super::state::background::Background;
use super::state::borrow::Borrow;
use super::state::cold::ColdList;
use super::state::curve::CurveWatch;
use super::state::image::Images;
use super::state::predictor::WritePredictor;
use super::state::prefetch::Prefetch;
use super::state::share::{Share, Sharing};
use super::state::watch::Watch;
use super::table::{Chunk, Located, Phase};

/// Faults that can wait for room in DRAM. More threads than a VMM has; beyond it a fault is forgotten and the whole space
/// is woken later, which costs time but loses nothing.
pub(super) const WAITING_MAX: usize = 4096;
/// DRAM beyond the cap that may be used while page-out cannot go on (old direct I/O in flight, swap failing): a direct
/// I/O in flight may itself be waiting for a page-in, and a vCPU must reach the point where QEMU can stop it. QEMU's thread
/// pool has 64 threads with requests of at most 1 MiB.
pub(super) const OVERDRAFT: u64 = 64 * 256;

/// Chunks that wait for room to be read ahead, the oldest forgotten first: what two streams may want.
pub(super) const LATE_AHEAD_MAX: usize = 8;

/// How much comes in for a fault on a page in swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageInPolicy {
    /// As the pattern of faults says: one page, or its chunk and read-ahead.
    #[default]
    Adaptive,
    /// A fault always reads its page alone.
    Page,
    /// Always the whole chunk, which the fault waits for.
    Chunk,
    /// Always the page, and the rest of the chunk behind it (VMemDirect section 4.3).
    PageThenChunk,
}

/// Which chunk is looked at next for page-out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replacement {
    /// The coldest, by the chunk queues.
    #[default]
    Queues,
    /// Any, each as likely as every other: against guests that page by themselves, whose own replacement chooses what the
    /// host just did ("double paging", ESX section 3.3).
    Random,
}

/// What stays the same for the life of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Size of the VM's space.
    pub chunks: ChunkCount,
    /// Large folios are to be had: whole chunks are read straight into holes.
    pub direct: bool,
    /// Pages can be mapped write-protected (`UFFDIO_CONTINUE` does so since Linux 6.4). Without it a page that is mapped
    /// counts as written at once.
    pub protect: bool,
    /// How much comes in for a fault.
    pub page_in: PageInPolicy,
    /// Which chunk leaves next.
    pub replacement: Replacement,
    /// The choice of [`Replacement::Random`] follows from this seed.
    pub seed: u64,
    /// Whether equal pages are looked for.
    pub sharing: Sharing,
}

/// The state of one VM's memory. See [`super`].
#[derive(Debug)]
pub struct Machine {
    pub(super) config: Config,
    pub(super) chunks: Vec<Chunk>,
    pub(super) queues: ChunkQueues,
    pub(super) chance: Chance,
    pub(super) pattern: Pattern,
    pub(super) ops: Ops,
    pub(super) limit: u64,
    /// What page-out leaves in DRAM.
    pub(super) min: u64,
    pub(super) pinned: bool,
    pub(super) armed: bool,
    /// Its pages are on their way from another host: it is not armed before they are there.
    pub(super) awaits_pages: bool,
    /// An `Arm` or `Disarm` was asked for and not answered yet.
    pub(super) arming: bool,
    pub(super) resident: u64,
    /// Pages that reads under way will add to `resident`.
    pub(super) reserved: u64,
    pub(super) swapped: u64,
    /// Of these, what is still on its way from another host.
    pub(super) missing: u64,
    pub(super) images: Images,
    /// What the last look of a move has found.
    pub(super) written: Vec<(ChunkIdx, PageSet)>,
    /// Moves have looked so often; the count wraps around.
    pub(super) looks: u32,
    pub(super) waiting: VecDeque<(PageIdx, Access)>,
    pub(super) waiting_overflow: bool,
    /// Chunks that a stream will want and that had no room when it said so, and whether to map them writable.
    pub(super) late_ahead: VecDeque<(ChunkIdx, bool)>,
    /// Faults whose read failed; they wait for [`Event::Continue`].
    pub(super) failed: VecDeque<(PageIdx, Access)>,
    pub(super) discards: VecDeque<(u64, PageIdx, PageCount)>,
    pub(super) cold: ColdList,
    /// Page-out found nothing but chunks that old direct I/O may hold pinned.
    pub(super) pin_blocked: bool,
    /// Headroom is that of a stream of chunks ...
    pub(super) wide: bool,
    /// ... until then, and longer when a whole chunk came in since the last look.
    pub(super) wide_until_ms: u64,
    pub(super) chunk_came: bool,
    pub(super) stall: Option<(Stall, u64)>,
    pub(super) background: Background,
    pub(super) prefetch: Prefetch,
    pub(super) predictor: WritePredictor,
    pub(super) watch: Watch,
    pub(super) curve: Option<Box<CurveWatch>>,
    pub(super) share: Share,
    pub(super) borrow: Borrow,
    pub(super) stats: Stats,
}

impl Machine {
    /// A machine of zeros, unarmed, with a cap of its whole size.
    pub fn new(config: Config) -> Machine {
        let chunks = config.chunks.as_usize();
        Machine {
            config,
            chunks: vec![Chunk::EMPTY; chunks],
            queues: ChunkQueues::new(config.chunks),
            chance: Chance::new(config.seed),
            pattern: Pattern::new(config.chunks),
            ops: Ops::new(),
            limit: config.chunks.pages().0,
            min: 0,
            pinned: false,
            armed: false,
            awaits_pages: false,
            arming: false,
            resident: 0,
            reserved: 0,
            swapped: 0,
            missing: 0,
            images: Images::default(),
            written: Vec::new(),
            looks: 0,
            waiting: VecDeque::with_capacity(WAITING_MAX),
            waiting_overflow: false,
            late_ahead: VecDeque::with_capacity(LATE_AHEAD_MAX),
            failed: VecDeque::with_capacity(super::ops::OPS_MAX),
            discards: VecDeque::new(),
            cold: ColdList::new(chunks),
            pin_blocked: false,
            wide: false,
            wide_until_ms: 0,
            chunk_came: false,
            stall: None,
            background: Background::default(),
            prefetch: Prefetch::default(),
            predictor: WritePredictor::default(),
            watch: Watch::default(),
            curve: None,
            share: Share::new(chunks),
            borrow: Borrow::default(),
            stats: Stats::default(),
        }
    }

    /// What page-out leaves in DRAM, before anything is planned: as [`Event::SetMin`] later.
    pub fn set_min(&mut self, min: PageCount) {
        self.min = min.0;
    }

    /// The VM's pages are on their way from another host, or are there. Its guest does not run before, and it is unarmed until
    /// then, whatever its limit.
    pub fn await_pages(&mut self, on: bool) {
        self.awaits_pages = on;
    }

    /// Takes an event in and appends what has to be done. Says what became of a fault.
    ///
    /// # Panics
    /// When the pager reports an operation that is not under way, or a page outside the space: a broken invariant.
    pub fn apply(&mut self, event: Event, now: Now, out: &mut Actions) -> Option<Served> {
        let answers = matches!(event, Event::Fault { .. } | Event::ReadDone { .. });
        let ops = self.ops.len();
        let mut served = None;
        match event {
            // The kernel serves this VM again. Unregistering woke whoever waited, but not a thread that began to wait behind
            // that wake-up: its message is all that is left of it.
            Event::Fault { page, .. } if !self.armed => {
                let run = Run { start: page.index_in_chunk(), len: 1 };
                out.push(Action::Wake { pages: Pages { chunk: page.chunk(), run } });
            }
            Event::Fault { page, access, kind } => {
                let answer = self.fault(page, access, kind, out);
                self.stats.add(answer.cause, 1);
                served = Some(answer);
            }
            Event::ReadDone { op, result } => self.read_done(op, result, now, out),
            Event::WriteDone { op, zero, result } => self.write_done(op, zero, result, now, out),
            Event::PunchDone { op, left } => self.punch_done(op, left),
            Event::ZapDone { op, epoch } => self.zap_done(op, epoch, now),
            Event::PagesZapped { ticket, done } => self.pages_zapped(ticket, done, out),
            Event::Discard { token, first, count } => self.discards.push_back((token, first, count)),
            Event::Abandon { token } => self.discards.retain(|(other, ..)| *other != token),
            Event::SetLimit { limit } => self.limit = limit.0.min(self.config.chunks.pages().0),
            Event::SetMin { min } => self.set_min(min),
            Event::Pin => self.pin(out),
            Event::Prepare { on } => {
                self.background.to_learn = if on { self.background.to_learn } else { 0 };
                self.prepare(on, out);
            }
            Event::LearnHeat => self.learn_heat(),
            Event::Freeze { has_parent } => self.freeze(has_parent, now, out),
            Event::ProtectFailed { pages } => self.protect_failed(pages),
            Event::Thaw => self.thaw(),
            Event::Forget => self.forget(),
            Event::Continue => {
                self.stall = None;
                self.chunks.iter_mut().for_each(|chunk| chunk.read_singly = false);
                self.waiting.append(&mut self.failed);
            }
            Event::Tick => self.tick(now, out),
            Event::ShareDone { op, found } => self.share_done(op, &found, out),
            Event::Look => self.look(out),
            Event::CopyOut { pages } => self.copy_out(pages, out),
            Event::Scan | Event::Fill => {}
            Event::TakeBack { page } => self.take_back(page, out),
            Event::LookAgain { page } => self.look_again(page),
            Event::Charge { pages } => self.set_charge(pages.0),
            Event::Fenced { op, epoch } => self.fenced(op, epoch),
            Event::OwnDone { op, kept } => self.own_done(op, kept),
            Event::OwnAll => self.borrow.is_unwanted = true,
            Event::Came { chunk, pages } => self.came(chunk, pages),
            Event::KeepBorrowed => self.keep_borrowed(),
        }
        self.retry_discards(out);
        self.serve_waiting(out);
        self.read_ahead_late(out);
        self.plan_arming(out);
        self.plan_learning(out);
        // A thread that has just been answered may share its CPU with the pager, which is to make way: page-out is planned while
        // the next page-in keeps the disk busy and the thread asleep.
        let woke = answers && self.ops.len() <= ops;
        if !(woke && self.has_time()) {
            self.plan_reclaim(now, out);
        }
        if !self.plan_prefetch(now, out) {
            self.plan_restore(out);
        }
        self.plan_copy_back(out);
        self.plan_owning(now, out);
        if event == Event::Scan {
            self.plan_scan(now, out);
        }
        if event == Event::Fill {
            self.plan_fill(out);
        }
        served
    }

    /// The answer to [`Action::Arm`]: the VM's memory is registered, and its pages are there. `chunk` is called for each chunk
    /// in order.
    pub fn armed(&mut self, mut chunk: impl FnMut(ChunkIdx) -> Located) {
        (self.armed, self.arming) = (true, false);
        self.watch.clear();
        self.borrow.is_paused = false;
        self.images.begin_sweeps();
        if let Some(curve) = &mut self.curve {
            curve.restart();
        }
        for index in self.config.chunks.iter() {
            let Located { ram, swap, missing, shared, frozen, borrowed, private } = chunk(index);
            // What is mapped is not known, but a frozen page was protected before it was frozen, and is until it is not.
            let open = ram - frozen;
            let sets = Chunk { ram, swap, missing, shared, frozen, open, borrowed, private, ..Chunk::EMPTY };
            self.edit(index, |c| *c = sets);
            if !self.chunk(index).dram().is_empty() {
                self.chunks[index.as_usize()].phase = Phase::Hot;
                self.queues.insert_first(index);
            }
        }
    }

    /// The answer to [`Action::Disarm`]: the kernel serves the VM's faults again and swap is empty.
    pub fn disarmed(&mut self) {
        (self.armed, self.arming) = (false, false);
        self.watch.clear();
        for index in self.config.chunks.iter() {
            self.edit(index, |c| *c = Chunk::EMPTY);
            self.queues.remove(index);
        }
        self.cold.clear();
        self.prefetch.clear();
        self.share.forget_queue();
    }

    /// The chunks of a zap under way.
    pub fn zap_chunks(&self, op: super::OpId) -> &[ChunkIdx] {
        match &self.ops.get(op).kind {
            super::ops::OpKind::Zap { chunks, len } => &chunks[..usize::from(*len)],
            _ => &[],
        }
    }

    /// Gives what the page table knows of a chunk.
    pub fn chunk(&self, index: ChunkIdx) -> &Chunk {
        &self.chunks[index.as_usize()]
    }

    /// The chunk queues, for heat displays and the division of a VM.
    pub fn queues(&self) -> &ChunkQueues {
        &self.queues
    }

    /// Why the VM does not go on, and since when (milliseconds of the caller's clock).
    pub fn stall(&self) -> Option<(Stall, u64)> {
        self.stall
    }

    /// Registered with userfaultfd, or about to be.
    pub fn is_armed(&self) -> bool {
        self.armed
    }

    /// Pages in DRAM, those on their way in included, and the limit they grow to; `None` where nothing limits them.
    pub fn growth(&self) -> Option<(PageCount, PageCount)> {
        let is_limited = self.armed && !self.pinned && self.limit < self.config.chunks.pages().0;
        is_limited.then(|| (PageCount(self.resident + self.reserved), PageCount(self.limit)))
    }

    /// Page-out is waiting for direct I/O, or a borrowed chunk is: call again soon.
    pub fn is_pin_blocked(&self) -> bool {
        self.pin_blocked || self.borrow.is_pin_blocked
    }

    /// Something is under way or waiting.
    pub fn is_busy(&self) -> bool {
        self.ops.len() > 0 || !self.waiting.is_empty() || !self.failed.is_empty() || !self.discards.is_empty()
    }

    /// One counter; gauges are only in [`Machine::stats`].
    pub fn counter(&self, metric: Metric) -> u64 {
        self.stats.get(metric)
    }

    /// Bytes of the tables that grow with the VM.
    pub fn table_bytes(&self) -> u64 {
        let chunks = self.chunks.capacity() * size_of::<Chunk>();
        (chunks + self.cold.bytes() + self.queues.bytes()) as u64
    }

    /// Counters and gauges as of now.
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.set(Metric::Resident, self.resident);
        stats.set(Metric::Swapped, self.swapped);
        stats.set(Metric::Shared, self.share.pages);
        stats.set(Metric::SharedPart, self.share.charged);
        stats.set(Metric::Borrowed, self.borrow.lent);
        stats.set(Metric::BorrowedChunks, self.borrow.chunks);
        stats.set(Metric::PrivatePages, self.borrow.private);
        stats.set(Metric::Limit, self.limit);
        stats.set(Metric::Waiting, self.waiting.len() as u64);
        stats.set(Metric::InFlight, self.ops.len() as u64);
        stats.set(Metric::Cold, self.cold.count() as u64);
        stats.set(Metric::Watched, self.watch.len() as u64);
        stats
    }

    /// The cap that page-out works towards: a pinned VM has none.
    pub(super) fn cap(&self) -> u64 {
        if self.pinned { self.config.chunks.pages().0 } else { self.limit }
    }

    /// Free pages below the cap.
    pub(super) fn free(&self) -> u64 {
        self.cap().saturating_sub(self.resident + self.reserved + self.charge())
    }

    /// Pages that a demand fault may take, the overdraft included.
    pub(super) fn room(&self) -> u64 {
        let overdraft = if self.is_pin_blocked() || self.stall.is_some() { OVERDRAFT } else { 0 };
        (self.cap() + overdraft).saturating_sub(self.resident + self.reserved + self.charge())
    }

    /// Changes a chunk and keeps the sums right.
    pub(super) fn edit<R>(&mut self, index: ChunkIdx, change: impl FnOnce(&mut Chunk) -> R) -> R {
        let shared = self.share.pages;
        let chunk = &mut self.chunks[index.as_usize()];
        self.borrow.leave(chunk);
        self.resident -= u64::from(chunk.dram().count());
        self.swapped -= u64::from(chunk.swapped().count());
        self.missing -= u64::from(chunk.missing.count());
        self.share.pages -= u64::from(chunk.shared.count());
        self.images.frozen -= u64::from(chunk.frozen.count());
        self.images.same -= u64::from(chunk.same.count());
        let result = change(chunk);
        chunk.prefetched &= chunk.ram;
        chunk.missing &= chunk.swapped();
        self.borrow.enter(chunk);
        self.resident += u64::from(chunk.dram().count());
        self.swapped += u64::from(chunk.swapped().count());
        self.missing += u64::from(chunk.missing.count());
        self.share.pages += u64::from(chunk.shared.count());
        self.images.frozen += u64::from(chunk.frozen.count());
        self.images.same += u64::from(chunk.same.count());
        if self.share.pages < shared {
            self.uncharge(shared - self.share.pages, shared);
        }
        result
    }

    /// A page of the chunk came into DRAM, or one that was there was used.
    pub(super) fn touch(&mut self, index: ChunkIdx) {
        let chunk = &mut self.chunks[index.as_usize()];
        match chunk.phase {
            Phase::Absent => {
                if !chunk.dram().is_empty() {
                    chunk.phase = Phase::Hot;
                    self.queues.insert_tail_last(index);
                }
            }
            Phase::Hot => {
                self.queues.touch(index);
            }
            Phase::Zapping { .. } => chunk.phase = Phase::Zapping { touched: true },
            Phase::Cold { .. } => {
                chunk.phase = Phase::Hot;
                self.cold.leave();
                self.queues.insert_tail_last(index);
                self.note_rescue();
            }
            Phase::Leaving => {}
        }
    }

    /// Panics when something is untrue that holds after every event. For tests.
    #[doc(hidden)]
    pub fn check(&self) {
        let (mut resident, mut swapped, mut missing, mut shared, mut frozen, mut same) = (0, 0, 0, 0, 0, 0);
        let mut borrow = Borrow::default();
        for index in self.config.chunks.iter() {
            let chunk = self.chunk(index);
            chunk.check();
            borrow.enter(chunk);
            resident += u64::from(chunk.dram().count());
            swapped += u64::from(chunk.swapped().count());
            missing += u64::from(chunk.missing.count());
            frozen += u64::from(chunk.frozen.count());
            same += u64::from(chunk.same.count());
            assert!(!chunk.mapped.intersects(self.watch.hidden(index)), "{index:?}: a watched page is mapped");
            shared += u64::from(chunk.shared.count());
            assert_eq!(self.queues.contains(index), chunk.phase == Phase::Hot, "{index:?} {:?}", chunk.phase);
        }
        assert_eq!((resident, swapped, shared), (self.resident, self.swapped, self.share.pages));
        assert_eq!(missing, self.missing);
        assert_eq!((frozen, same), (self.images.frozen, self.images.same));
        assert_eq!(borrow.counts(), self.borrow.counts());
        assert!(borrow.counts().0 == 0 || self.armed, "an unarmed VM writes unseen");
        assert!(same == 0 || self.armed, "an unarmed VM writes unseen");
        self.check_scan_queue();
        assert!(self.resident + self.reserved <= self.cap().max(self.resident) + OVERDRAFT);
    }

    fn plan_arming(&mut self, out: &mut Actions) {
        if self.arming || self.awaits_pages {
            return;
        }
        let total = self.config.chunks.pages().0;
        // Unarmed, a page would be written unseen that is frozen, or that the next image would take for its parent's.
        let is_imaged = self.images.frozen > 0 || self.images.same > 0;
        let needed = self.cap() < total || self.scans() || self.images.is_preparing() || is_imaged;
        // So would a page be that is borrowed, and nobody would know that it takes DRAM.
        let needed = needed || self.borrow.chunks > 0;
        let is_home = self.swapped == 0 && self.share.pages == 0;
        if !self.armed && needed {
            self.arming = true;
            out.push(Action::Arm);
        } else if self.armed && !needed && is_home && !self.is_busy() && self.stall.is_none() {
            self.arming = true;
            out.push(Action::Disarm);
        }
    }
}
