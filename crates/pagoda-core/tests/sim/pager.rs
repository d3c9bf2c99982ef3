//! The pager: executes actions exactly as they are documented, with delays, in any order, with failures and crashes.

mod content;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{
    Action, Actions, Config, Event, IoError, Located, Machine, Now, OpId, Pages, Refusal, Source,
};
use pagoda_core::units::{ChunkCount, ChunkIdx, PageCount, PageIdx};

use crate::image::Mistake;
use crate::job::{Job, JobKind};
use crate::rng::Rng;
use crate::share::Looking;
use crate::vmm::Vmm;
use crate::weather::Weather;
use crate::world::{CHUNK, Pte, World};

/// Instead of the number of an image: what is read is for a move.
const FOR_A_MOVE: usize = usize::MAX;

/// The daemon died here, and what was left to do is not done.
#[derive(Debug)]
pub struct Crash;

#[derive(Debug)]
pub struct Pager {
    pub machine: Machine,
    pub weather: Weather,
    pub jobs: Vec<Job>,
    /// Zaps of single pages on their way, in order.
    page_zaps: VecDeque<(u32, Vec<usize>)>,
    /// Watched pages as of the last event: nobody has reached them since.
    unused: BTreeSet<usize>,
    pub buffers: BTreeMap<u16, BTreeMap<usize, u64>>,
    actions: VecDeque<Action>,
    pub punched: VecDeque<Event>,
    /// Answers to zaps of single pages.
    zapped: VecDeque<Event>,
    pub pinned: bool,
    /// At some event since the last look.
    pub was_pin_blocked: bool,
    /// Fault messages applied while the VM was armed.
    messages: u64,
    pub now_ms: u64,
    pub events: u64,
    /// The most pages that may be in DRAM or on their way into it.
    bound: usize,
    /// References to each frame, by the tables.
    pub refs: Vec<usize>,
    pub looks: VecDeque<Looking>,
    /// Images that have begun.
    pub images: usize,
    /// What pages held when a read for a move of them began.
    held_before: BTreeMap<u16, Vec<(usize, u64)>>,
    /// Blocks that are on their way from another host, by chunk.
    missing: Vec<PageSet>,
    /// An image is to begin soon.
    pub is_preparing: bool,
    /// What could not be done in this list of actions; the machine hears of it behind the list.
    failed: VecDeque<Event>,
    /// A `Protect` of this list has failed.
    is_unprotected: bool,
    /// There is no image that would take a page.
    is_void: bool,
    /// The image that is to begin has the one before it as its parent.
    has_parent: bool,
    /// Pages that a mistaken pager takes for the newest image's, and for its parent's.
    pub mistaken: BTreeSet<usize>,
    mistaken_before: BTreeSet<usize>,
    /// What a mistaken pager still has to preserve, and whether it does so now.
    late: Vec<Action>,
    is_late: bool,
}

pub fn chunk_pages(chunk: ChunkIdx) -> Range<usize> {
    let first = chunk.0 as usize * CHUNK;
    first..first + CHUNK
}

pub fn range(pages: Pages) -> Range<usize> {
    let first = pages.first().0 as usize;
    first..first + usize::from(pages.run.len)
}

pub fn set(pages: PageSet, chunk: ChunkIdx) -> Vec<usize> {
    pages.iter().map(|index| chunk.page(index).0 as usize).collect()
}

impl Pager {
    pub fn new(world: &World, weather: Weather, now_ms: u64) -> Pager {
        let chunks = ChunkCount((world.pages() / CHUNK) as u32);
        Pager {
            machine: Machine::new(Config {
                chunks,
                direct: weather.direct,
                protect: weather.protect,
                page_in: weather.page_in,
                replacement: weather.replacement,
                seed: 0,
                sharing: weather.sharing,
            }),
            weather,
            jobs: Vec::new(),
            page_zaps: VecDeque::new(),
            unused: BTreeSet::new(),
            buffers: BTreeMap::new(),
            actions: VecDeque::new(),
            punched: VecDeque::new(),
            zapped: VecDeque::new(),
            pinned: false,
            was_pin_blocked: false,
            messages: 0,
            now_ms,
            events: 0,
            bound: world.pages(),
            refs: world.count_references(),
            looks: VecDeque::new(),
            images: 0,
            held_before: BTreeMap::new(),
            missing: vec![PageSet::EMPTY; chunks.as_usize()],
            is_preparing: false,
            failed: VecDeque::new(),
            is_unprotected: false,
            is_void: false,
            has_parent: false,
            mistaken: BTreeSet::new(),
            mistaken_before: BTreeSet::new(),
            late: Vec::new(),
            is_late: false,
        }
    }

    /// A daemon that starts on what another one left.
    pub fn recover(
        world: &mut World,
        vmm: &mut Vmm,
        weather: Weather,
        now_ms: u64,
        limit: usize,
        pinned: bool,
        rng: &mut Rng,
    ) -> Result<Pager, Crash> {
        while let Some((_, pages)) = world.intents.first().cloned() {
            for page in pages {
                world.settle(page, rng.per_mille(weather.unsplittable));
                if rng.per_mille(weather.crash / 8) {
                    return Err(Crash);
                }
            }
            world.intents.remove(0);
        }
        world.take_over_loan(&weather, rng)?;
        // What the RAM file has is the page: it was copied back, or not taken out yet.
        for page in 0..world.pages() {
            if world.ram[page].is_some() {
                world.entries[page] = None;
            }
        }
        world.free_frames();
        world.blocks.collect();
        let mut pager = Pager::new(world, weather, now_ms);
        if world.registered {
            pager.armed(world);
        }
        let limit = Event::SetLimit { limit: PageCount(limit as u64) };
        pager.apply(limit, world, vmm, rng)?;
        if world.loan.is_io_unseen {
            pager.apply(Event::KeepBorrowed, world, vmm, rng)?;
        }
        if pinned {
            pager.apply(Event::Pin, world, vmm, rng)?;
        }
        for discard in vmm.discards.clone() {
            pager.discard(discard.token, discard.first, discard.count, world, vmm, rng)?;
        }
        world.woken.push(0..world.pages());
        Ok(pager)
    }

    pub fn discard(
        &mut self,
        token: u64,
        first: usize,
        count: usize,
        world: &mut World,
        vmm: &mut Vmm,
        rng: &mut Rng,
    ) -> Result<(), Crash> {
        let event = Event::Discard { token, first: PageIdx(first as u64), count: PageCount(count as u64) };
        self.apply(event, world, vmm, rng)
    }

    /// Half of so small a VM is watched for the curve, or none of it.
    pub fn watch_curve(&mut self, on: bool) {
        self.machine.watch_curve(on);
        self.unused.clear();
    }

    pub fn jobs(&self) -> usize {
        self.jobs.len() + self.looks.len()
    }

    /// One event, and everything that follows from it at once.
    pub fn apply(&mut self, event: Event, world: &mut World, vmm: &mut Vmm, rng: &mut Rng) -> Result<(), Crash> {
        for action in std::mem::take(&mut self.late) {
            self.is_late = true;
            self.execute(action, world, vmm, rng)?;
            self.is_late = false;
        }
        self.send_event(event, world);
        loop {
            if self.actions.is_empty()
                && let Some(event) = self.failed.pop_front()
            {
                (self.is_unprotected, self.is_void) = (false, false);
                self.send_event(event, world);
                continue;
            }
            if (self.weather.punch_reported_at_once || self.actions.is_empty())
                && let Some(event) = self.punched.pop_front()
            {
                self.send_event(event, world);
                continue;
            }
            let Some(action) = self.actions.pop_front() else { break };
            if rng.per_mille(self.weather.crash) {
                return Err(Crash);
            }
            if crate::tracing() {
                eprintln!("    {action:?}");
            }
            self.execute(action, world, vmm, rng)?;
        }
        crate::oracle::check_residency(self, world);
        self.unused = crate::oracle::check_watched(&self.unused, &self.machine, world);
        Ok(())
    }

    /// A sampling period begins.
    pub fn sample(&mut self, pages: &[PageIdx]) {
        self.machine.start_sample(pages);
        self.unused.clear();
        assert_eq!(self.machine.sample_count(), Default::default());
    }

    /// Any pages are to be prefetched, some of them chunk by chunk, some twice.
    pub fn prefetch(&mut self, chunks: usize, rng: &mut Rng) {
        let list = (0..rng.below(2 * chunks)).map(|_| {
            let kept = *rng.pick(&[20, 500, 1000]);
            let pages = (0..=u8::MAX).filter(|_| rng.per_mille(kept)).collect();
            // One more than there are.
            (ChunkIdx(rng.below(chunks + 1) as u32), pages)
        });
        self.machine.prefetch(list.collect());
    }

    /// Some of what is on its way from another host comes, and something that was not, too.
    pub fn any_come(&mut self, rng: &mut Rng) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, missing) in (0..).map(ChunkIdx).zip(&mut self.missing) {
            let come: PageSet = if rng.coin() { *missing } else { missing.iter().filter(|_| rng.coin()).collect() };
            *missing -= come;
            if !come.is_empty() || rng.per_mille(10) {
                events.push(Event::Came { chunk: index, pages: come | PageSet::single(rng.below(CHUNK) as u8) });
            }
        }
        events
    }

    fn send_event(&mut self, event: Event, world: &World) {
        if crate::tracing() {
            eprintln!("  {event:?}");
        }
        self.pinned |= event == Event::Pin;
        if let Event::Prepare { on } = event {
            self.is_preparing = on;
        }
        if matches!(event, Event::Fault { .. }) && self.machine.is_armed() {
            self.messages += 1;
        }
        let is_freeze = matches!(event, Event::Freeze { .. });
        if let Event::Freeze { has_parent } = event {
            self.has_parent = has_parent;
        }
        let is_blind = match self.weather.mistake {
            Some(Mistake::MissesDirectIo) => is_freeze,
            Some(Mistake::MovesUnderIo) => matches!(event, Event::Fenced { .. }),
            _ => false,
        };
        let oldest_io = if is_blind { u64::MAX } else { world.oldest_io() };
        let now = Now { ms: self.now_ms, oldest_io };
        let mut out = Actions::new();
        self.machine.apply(event, now, &mut out);
        self.machine.check();
        self.was_pin_blocked |= self.machine.is_pin_blocked();
        self.actions.extend(out);
        self.events += 1;
        assert_eq!(self.machine.stats().faults(), self.messages, "every fault has exactly one cause");
    }

    fn execute(&mut self, action: Action, world: &mut World, vmm: &mut Vmm, rng: &mut Rng) -> Result<(), Crash> {
        self.mistake_change(action);
        match action {
            Action::Map { pages, protect } => {
                range(pages).for_each(|page| world.map(page, protect));
                world.woken.push(range(pages));
            }
            Action::Unprotect { pages } if world.loan.has(range(pages).start) => {
                world.open_borrowed(range(pages));
                world.woken.push(range(pages));
            }
            Action::Unprotect { pages } => {
                range(pages).for_each(|page| world.unprotect(page));
                world.woken.push(range(pages));
            }
            Action::Wake { pages } => world.woken.push(range(pages)),
            Action::Zero { pages } => self.zero(range(pages), world),
            Action::ZeroChunk { chunk } => {
                assert!(self.weather.direct, "large folios are not to be had");
                self.zero(chunk_pages(chunk), world);
            }
            Action::ReadPage { op, page, .. } => {
                let page = page.0 as usize;
                self.read(op, page..page + 1, world);
            }
            Action::ReadSpan { op, span, wanted, .. } => {
                let missing = self.machine.chunk(span.chunk).missing;
                assert!(!wanted.intersects(missing), "a read of many pages waits for another host");
                let pages = range(span).filter(|page| wanted.contains(PageIdx(*page as u64).index_in_chunk()));
                self.read(op, pages, world);
            }
            Action::Keep { op, chunk, pages } => {
                assert!(self.buffers.insert(op.0, BTreeMap::new()).is_none(), "the buffer of {op:?} is in use");
                let pages = set(pages, chunk);
                let begun = if world.moving.is_some() { FOR_A_MOVE } else { world.begun };
                self.held_before.insert(op.0, pages.iter().map(|page| (*page, vmm.truth[*page])).collect());
                self.start(op, JobKind::Keep { pages: pages.clone(), begun }, pages);
            }
            Action::CopyOut { pages, from } => {
                for page in range(pages) {
                    let content = self.content_of(page, from, world);
                    let oldest = world.oldest_io();
                    if let Some(moving) = &mut world.moving {
                        moving.take(page, content, oldest);
                    }
                }
            }
            Action::CopyLater { pages } | Action::CopyFailed { pages, .. } => {
                let forgets = self.weather.mistake == Some(Mistake::ForgetsCopies);
                for page in range(pages) {
                    let moving = world.moving.as_mut().filter(|moving| moving.is_asked(page));
                    moving.into_iter().for_each(|moving| moving.answer_nothing(page, forgets));
                }
            }
            Action::ReadChunk { op, chunk, .. } => {
                assert!(self.machine.chunk(chunk).missing.is_empty(), "a read of a chunk waits for another host");
                self.fill(op, chunk, world);
            }
            Action::ChunkComplete { op } => self.withdraw(op, world),
            Action::ChunkAbandon { op, chunk } => {
                chunk_pages(chunk).for_each(|page| world.punch(page));
                self.withdraw(op, world);
            }
            Action::Copy { op, pages, protect } => {
                for page in range(pages) {
                    world.put(page, self.buffers[&op.0][&page]);
                    world.map(page, protect);
                }
                world.woken.push(range(pages));
            }
            Action::Store { op, pages } => range(pages).for_each(|page| world.put(page, self.buffers[&op.0][&page])),
            Action::Release { op } => {
                self.buffers.remove(&op.0).expect("the operation has a buffer");
            }
            Action::Zap { op } => {
                let chunks = self.machine.zap_chunks(op).to_vec();
                self.start(op, JobKind::Zap { chunks, epoch: None }, Vec::new());
            }
            Action::ZapPages { ticket } => {
                let pages = self.machine.watch_zaps().map(|page| page.0 as usize).collect();
                self.page_zaps.push_back((ticket, pages));
            }
            Action::WriteOut { op, chunk, pages } => {
                let mut zero = PageSet::EMPTY;
                let mut left = Vec::new();
                for page in set(pages, chunk) {
                    if world.ram[page].as_ref().expect("a page that is written is in RAM").get() == 0 {
                        world.blocks.drop_page(page, self.weather.mistake);
                        zero.set((page % CHUNK) as u8);
                    } else {
                        left.push(page);
                    }
                }
                self.start(op, JobKind::Write { zero, targets: BTreeMap::new() }, left);
            }
            Action::PunchOut { op, chunk, pages, alone } => self.punch_out(op, chunk, pages, alone, world, rng)?,
            Action::Fence { op, chunk } => self.fence(op, chunk, world, rng),
            Action::Own { op, chunk } => self.own(op, chunk, world),
            Action::Share { op, chunk, pages } => self.share(op, chunk, pages, world, rng)?,
            Action::CopyBack { pages } => self.copy_back(range(pages), world, rng)?,
            Action::DropShared { pages } => {
                for page in range(pages) {
                    assert!(!world.blocks.has(page), "an outdated swap block would be the page");
                    self.drop_entry(page, world);
                }
            }
            Action::SwapPunch { pages } => {
                range(pages).for_each(|page| world.blocks.drop_page(page, self.weather.mistake));
            }
            Action::Protect { pages } if rng.per_mille(self.weather.protect_fails) => {
                self.is_unprotected = true;
                self.failed.push_back(Event::ProtectFailed { pages });
            }
            Action::Protect { .. } if self.weather.mistake == Some(Mistake::ProtectsNothing) => {}
            Action::Protect { pages } => range(pages).for_each(|page| world.protect(page)),
            Action::Preserve { .. } if self.is_void => {}
            Action::Preserve { .. } if rng.per_mille(self.weather.image_fails) => self.lose_image(world),
            Action::Preserve { .. } if self.weather.mistake == Some(Mistake::PreservesLate) && !self.is_late => {
                self.late.push(action);
            }
            Action::Preserve { pages, from } => {
                for page in range(pages) {
                    if self.weather.mistake.is_some() && !world.is_frozen(page) {
                        continue;
                    }
                    if from == Source::Parent || self.mistaken_before.contains(&page) {
                        world.inherit(page);
                        continue;
                    }
                    let content = self.content_of(page, from, world);
                    let refers = self.weather.refers && !self.is_written(page, world);
                    world.preserve(page, content, refers);
                    self.may_die(rng)?;
                }
            }
            // The machine hears of the failed protection, and that thaws.
            Action::BeginImage if self.is_unprotected => {
                world.lose_images();
                self.is_void = true;
            }
            Action::BeginImage if rng.per_mille(self.weather.image_fails) => self.lose_image(world),
            Action::BeginImage => {
                assert!(world.slots.is_empty() || self.weather.mistake == Some(Mistake::MissesDirectIo));
                let is_whole = world.is_newest_whole();
                world.begin_image(self.has_parent && is_whole, vmm);
                self.images += 1;
                self.mistaken_before = match self.has_parent && is_whole {
                    true => std::mem::take(&mut self.mistaken),
                    false => BTreeSet::new(),
                };
                self.mistaken.clear();
                self.is_preparing = false;
            }
            Action::RefuseImage { why } => {
                let is_true = match why {
                    Refusal::Unarmed => !world.registered,
                    Refusal::Pinned => self.pinned,
                    Refusal::DirectIo => !world.slots.is_empty(),
                    // Or its last chunk has been moved, and the machine is yet to hear of it.
                    Refusal::Borrowed => world.loan.has_any() || self.machine.borrowed_chunks() > 0,
                };
                assert!(is_true, "an image is refused for nothing: {why:?}");
            }
            Action::LoseImages => world.lose_images(),
            Action::RamPunch { pages } => {
                for page in range(pages) {
                    match self.weather.direct && rng.per_mille(self.weather.unsplittable) {
                        true => world.punch_in_place(page),
                        false => world.punch(page),
                    }
                }
            }
            Action::DiscardDone { token } => {
                let pages = vmm.gave_back(token);
                // What stays borrowed for ever keeps its content.
                pages.filter(|page| world.loan.has(*page)).for_each(|page| vmm.truth[page] = world.loan.content(page));
            }
            Action::Arm => {
                world.registered = true;
                if rng.per_mille(self.weather.crash) {
                    return Err(Crash);
                }
                self.armed(world);
            }
            Action::Disarm => {
                assert!((0..world.pages()).all(|page| world.ram[page].is_some() || world.swapped_content(page) == 0));
                assert!(world.entries.iter().all(Option::is_none), "shared pages would be lost");
                world.blocks.drop_all();
                if rng.per_mille(self.weather.crash) {
                    return Err(Crash);
                }
                world.registered = false;
                world.woken.push(0..world.pages());
                self.machine.disarmed();
            }
            Action::Stalled { .. } => {}
        }
        Ok(())
    }

    fn armed(&mut self, world: &World) {
        let data = |chunk, there: &dyn Fn(usize) -> bool| -> PageSet {
            chunk_pages(chunk).filter(|page| there(*page)).map(|page| (page % CHUNK) as u8).collect()
        };
        // A hash of the page decides, as if by chance.
        let is_missing = |page: usize| page.wrapping_mul(2_654_435_761) >> 7 & 1023 < self.weather.missing;
        self.missing = (0..(world.pages() / CHUNK) as u32)
            .map(|chunk| data(ChunkIdx(chunk), &|page| world.blocks.has(page) && is_missing(page)))
            .collect();
        self.machine.armed(|chunk| Located {
            ram: data(chunk, &|page| world.ram[page].is_some()),
            swap: data(chunk, &|page| world.blocks.has(page)),
            missing: self.missing[chunk.as_usize()],
            shared: data(chunk, &|page| world.entries[page].is_some()),
            frozen: match self.weather.mistake {
                Some(Mistake::ForgetsFrozen) => PageSet::EMPTY,
                _ => data(chunk, &|page| world.is_frozen(page)),
            },
            borrowed: world.loan.has(chunk_pages(chunk).start),
            private: match self.weather.mistake {
                Some(Mistake::ForgetsPrivate) => PageSet::EMPTY,
                _ => data(chunk, &|page| world.loan.is_anonymous(page)),
            },
        });
        self.machine.check();
    }

    pub fn start(&mut self, op: OpId, kind: JobKind, left: Vec<usize>) {
        assert!(self.jobs.iter().all(|job| job.op != op), "{op:?} is under way already");
        self.jobs.push(Job { op, kind, left });
    }

    /// The machine is told this before anything else.
    pub fn share_ended(&mut self, event: Event) {
        self.punched.push_front(event);
    }

    /// A job gets on, or ends.
    pub fn progress(&mut self, world: &mut World, vmm: &mut Vmm, rng: &mut Rng) -> Result<(), Crash> {
        if rng.coin()
            && let Some((ticket, pages)) = self.page_zaps.pop_front()
        {
            let done = !rng.per_mille(self.weather.zap_fails);
            if done {
                assert!(pages.iter().all(|page| !world.loan.has(*page)), "what is borrowed is lost by a zap");
                pages.iter().for_each(|page| world.pte[*page] = Pte::Absent);
                world.epoch += 1;
            }
            // The answer takes a while, and faults may come before it.
            self.zapped.push_back(Event::PagesZapped { ticket, done });
            return Ok(());
        }
        if rng.coin()
            && let Some(event) = self.zapped.pop_front()
        {
            return self.apply(event, world, vmm, rng);
        }
        if (rng.coin() || self.jobs.is_empty()) && !self.looks.is_empty() {
            return match self.look_on(world, rng)? {
                Some(event) => self.apply(event, world, vmm, rng),
                None => Ok(()),
            };
        }
        if self.jobs.is_empty() {
            return Ok(());
        }
        let index = rng.below(self.jobs.len());
        if matches!(self.jobs[index].kind, JobKind::Own { .. }) {
            return match self.own_on(index, world, rng) {
                Some(event) => self.apply(event, world, vmm, rng),
                None => Ok(()),
            };
        }
        let fails = rng.per_mille(self.weather.io_fails);
        let job = &mut self.jobs[index];
        match &mut job.kind {
            JobKind::Zap { chunks, epoch: epoch @ None } if !rng.per_mille(self.weather.zap_fails) => {
                zap(chunks, world);
                *epoch = Some(world.epoch);
                return Ok(());
            }
            _ if !job.left.is_empty() && !fails => {
                let share = rng.within(1, job.left.len());
                job.advance(share, &mut self.buffers, world, &self.weather, rng);
                if !job.left.is_empty() || rng.coin() {
                    return Ok(());
                }
            }
            _ => {}
        }
        let mut job = self.jobs.swap_remove(index);
        if fails {
            job.spoil(&mut self.buffers, world, &self.weather, rng);
        }
        let error = if rng.coin() { IoError::NoSpace } else { IoError::Failed(5) };
        let result = if fails { Err(error) } else { Ok(()) };
        let op = job.op;
        let event = match job.kind {
            JobKind::Keep { pages, begun } => {
                if !fails {
                    match begun {
                        FOR_A_MOVE => self.garble_changed(op, vmm),
                        _ => {
                            self.garble(op, &pages, begun, world);
                            self.mistake_keep(op, &pages, begun, world);
                        }
                    }
                }
                Event::ReadDone { op, result }
            }
            JobKind::Read { .. } | JobKind::Fill(_) => Event::ReadDone { op, result },
            JobKind::Write { zero, targets } => {
                // Of a failed write nobody can say which blocks hold what.
                for (page, block) in targets {
                    match !fails || rng.coin() {
                        true => world.blocks.give(page, block),
                        false => world.blocks.free(block),
                    }
                }
                Event::WriteDone { op, zero, result }
            }
            JobKind::Zap { epoch, .. } => Event::ZapDone { op, epoch },
            JobKind::Own { .. } => unreachable!("it ends by itself"),
        };
        self.apply(event, world, vmm, rng)
    }

    /// The daemon is gone: what was under way ends somehow, and nobody is told. Zaps not executed yet are returned, for
    /// the agent lives on.
    pub fn die(mut self, world: &mut World, rng: &mut Rng) -> Vec<Vec<ChunkIdx>> {
        let mut zaps = Vec::new();
        world.loan.is_stale = true;
        for page in self.page_zaps.drain(..).flat_map(|(_, pages)| pages) {
            world.pte[page] = Pte::Absent;
        }
        for mut job in std::mem::take(&mut self.jobs) {
            if let JobKind::Zap { chunks, epoch: None } = job.kind {
                zaps.push(chunks);
                continue;
            }
            let share = rng.within(0, job.left.len());
            job.advance(share, &mut self.buffers, world, &self.weather, rng);
        }
        let kept = rng.below(1000);
        world.messages.retain(|_| rng.per_mille(kept));
        zaps
    }

    /// Pages on their way into DRAM through a buffer.
    pub fn arriving(&self, world: &World) -> usize {
        let missing = self.jobs.iter().filter_map(|job| match &job.kind {
            JobKind::Read { missing } => Some(missing),
            _ => None,
        });
        let missing: BTreeSet<usize> = missing.flatten().copied().collect();
        missing.into_iter().filter(|page| world.ram[*page].is_none()).count()
    }

    /// The bound so far, and the new one.
    pub fn swap_bound(&mut self, bound: usize) -> usize {
        std::mem::replace(&mut self.bound, bound)
    }
}

pub fn zap(chunks: &[ChunkIdx], world: &mut World) {
    for chunk in chunks {
        assert!(!world.loan.has(chunk_pages(*chunk).start), "what a borrowed chunk has of its own is lost by a zap");
        world.pte[chunk_pages(*chunk)].fill(crate::world::Pte::Absent);
    }
    world.epoch += 1;
}
