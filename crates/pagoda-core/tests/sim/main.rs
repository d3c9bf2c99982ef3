//! Simulation of the fault state machine: guests that verify what they read, direct I/O, a pager that is slow, fails and
//! dies, against a naive model of the kernel. No clock and no thread; every run follows from its seed.
//!
//! `PAGODA_SIM_SEED=n cargo test -p pagoda-core --test sim` replays one seed (with `PAGODA_SIM_TRACE=1` it tells all),
//! `PAGODA_SIM_SEEDS=10000` runs more of them.

mod borrow;
mod image;
mod job;
mod mistake;
mod moving;
mod oracle;
mod pager;
mod ram;
mod rng;
mod share;
mod vmm;
mod weather;
mod world;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use pagoda_core::fault::{Event, PageInPolicy, Replacement, Sharing};
use pagoda_core::stats::{CATALOGUE, METRICS, Metric, MetricKind};
use pagoda_core::units::{PageCount, PageIdx};

use image::{ImageRequest, Mistake};
use pager::{Crash, Pager};
use rng::Rng;
use vmm::Vmm;
use weather::Weather;
use world::{CHUNK, World};

/// Runs of each of the two main tests by default: six seconds of a core each.
const SEEDS: u64 = 500;
const CHUNKS_MAX: usize = 8;
const LIMIT_MIN: usize = 8;
/// Steps in which everything that is under way has to end once nothing fails any more.
const DRAIN_STEPS: usize = 400_000;

/// Runs and steps of the test for starvation. A task lasts some hundred steps of the VMM where the disk is slow.
const STARVATION_SEEDS: u64 = 40;
const STARVATION_STEPS: usize = 40_000;
const STARVATION_AGE: u32 = 10_000;

const HOME_SEEDS: u64 = 100;
const HOME_ROUNDS: usize = 20;
const HOME_STEPS: usize = 300;
const HOME_HINTS: usize = 30;
/// So few that all that are out may be shared.
const HOME_OUT_MAX: usize = 60;

/// Steps between two looks at all that images hold.
const IMAGE_STEPS: usize = 64;
/// Steps of filling at one tick.
const FILLS_MAX: usize = 8;

const CHAIN_SEEDS: u64 = 100;
const CHAIN_ROUNDS: usize = 8;
const CHAIN_STEPS: usize = 800;
/// Images that are left, each but the oldest the child of another.
const CHAIN_IMAGES: usize = 4;

const MOVE_SEEDS: u64 = 300;

const CROWD_SEEDS: u64 = 100;
const CROWD_STEPS: usize = 10_000;

/// How often each kind of step is taken.
#[derive(Debug)]
struct Pace {
    thread: usize,
    message: usize,
    job: usize,
    tick: usize,
    chaos: usize,
}

#[derive(Debug)]
struct Sim {
    world: World,
    vmm: Vmm,
    /// `None` while the daemon is dead.
    pager: Option<Pager>,
    weather: Weather,
    pace: Pace,
    rng: Rng,
    limit: usize,
    pinned: bool,
    pins: usize,
    discards: usize,
    /// Sampling periods begin at so many ticks of a thousand.
    samples: usize,
    /// At so many ticks of a thousand there is something else to be prefetched.
    prefetches: usize,
    /// So many of a thousand such steps take the template back.
    recalls: usize,
    /// So many of a thousand steps in which something odd happens are about images.
    images: usize,
    /// The same about a move to another host. Then there are no images.
    moves: usize,
    now_ms: u64,
    /// Zaps that a dead daemon asked for.
    stray_zaps: Vec<Vec<pagoda_core::units::ChunkIdx>>,
}

fn tracing() -> bool {
    thread_local!(static TRACE: bool = std::env::var_os("PAGODA_SIM_TRACE").is_some());
    TRACE.with(|trace| *trace)
}

impl Sim {
    fn new(seed: u64, direct: bool) -> Sim {
        let mut rng = Rng::new(seed);
        let pages = rng.within(2, CHUNKS_MAX) * CHUNK;
        let mut world = World::new(pages);
        let truth = populate(&mut world, &mut rng);
        let vmm = Vmm::new(truth, &mut rng);
        let weather = Weather {
            direct,
            unsplittable: *rng.pick(&[0, 0, 5, 200]),
            io_fails: *rng.pick(&[0, 0, 5, 50]),
            zap_fails: *rng.pick(&[0, 0, 20]),
            crash: *rng.pick(&[0, 0, 1, 10]),
            punch_reported_at_once: rng.coin(),
            protect: *rng.pick(&[true, true, true, false]),
            page_in: *rng.pick(&[
                PageInPolicy::Adaptive,
                PageInPolicy::Adaptive,
                PageInPolicy::Page,
                PageInPolicy::Chunk,
                PageInPolicy::PageThenChunk,
            ]),
            replacement: *rng.pick(&[Replacement::Queues, Replacement::Queues, Replacement::Random]),
            sharing: *rng.pick(&[Sharing::Off, Sharing::PageOut, Sharing::Scan, Sharing::Scan]),
            promotes: *rng.pick(&[30, 900]),
            moves: *rng.pick(&[0, 100, 1000]),
            refers: rng.coin(),
            fills: *rng.pick(&[0, 300, 1000, 1000]),
            parents: *rng.pick(&[0, 500, 1000]),
            protect_fails: *rng.pick(&[0, 0, 2]),
            own_fails: *rng.pick(&[0, 0, 100]),
            image_fails: *rng.pick(&[0, 0, 2]),
            missing: *rng.pick(&[0, 0, 300, 1000]),
            mistake: None,
        };
        let pace = Pace {
            thread: *rng.pick(&[3, 10, 50]),
            message: *rng.pick(&[10, 50]),
            job: *rng.pick(&[2, 20, 100]),
            tick: *rng.pick(&[1, 5]),
            chaos: *rng.pick(&[0, 1, 5]),
        };
        let limit = any_limit(pages, &mut rng);
        let (pins, discards) = (*rng.pick(&[0, 0, 0, 10]), *rng.pick(&[0, 300]));
        let samples = *rng.pick(&[0, 50, 500]);
        let prefetches = *rng.pick(&[0, 50, 500]);
        let images = *rng.pick(&[0, 100, 1000]);
        let recalls = *rng.pick(&[0, 0, 10]);
        let mut sim = Sim {
            world,
            vmm,
            pager: None,
            weather,
            pace,
            rng,
            limit,
            pinned: false,
            pins,
            discards,
            samples,
            prefetches,
            recalls,
            images,
            moves: 0,
            now_ms: 0,
            stray_zaps: Vec::new(),
        };
        if tracing() {
            eprintln!("{:?} {:?} limit {limit} of {pages}", sim.weather, sim.pace);
        }
        while sim.pager.is_none() {
            sim.recover();
        }
        sim
    }

    fn recover(&mut self) {
        let Sim { world, vmm, rng, .. } = self;
        let recovered = Pager::recover(world, vmm, self.weather.clone(), self.now_ms, self.limit, self.pinned, rng);
        // A daemon that dies while it starts has done nothing asynchronous that matters.
        self.pager = recovered.ok();
        oracle::check_recoverable(&self.world, &self.vmm);
    }

    fn crash(&mut self, Crash: Crash) {
        if tracing() {
            eprintln!("  crash");
        }
        self.world.moving = None;
        if let Some(pager) = self.pager.take() {
            self.stray_zaps.extend(pager.die(&mut self.world, &mut self.rng));
        }
        oracle::check_recoverable(&self.world, &self.vmm);
    }

    fn apply(&mut self, event: Event) {
        let Some(pager) = &mut self.pager else { return };
        let result = pager.apply(event, &mut self.world, &mut self.vmm, &mut self.rng);
        result.unwrap_or_else(|crash| self.crash(crash));
    }

    fn step(&mut self, fresh: bool) {
        let Pace { thread, message, job, tick, chaos } = self.pace;
        let mut choice = self.rng.below(thread + message + job + tick + chaos);
        let mut falls_in = |part: usize| {
            let hit = choice < part;
            choice = choice.wrapping_sub(part);
            hit
        };
        if falls_in(thread) {
            self.vmm.step(&mut self.world, &mut self.rng, fresh);
        } else if falls_in(message) {
            self.deliver();
        } else if falls_in(job) {
            if let Some(pager) = &mut self.pager {
                let result = pager.progress(&mut self.world, &mut self.vmm, &mut self.rng);
                result.unwrap_or_else(|crash| self.crash(crash));
            }
        } else if falls_in(tick) {
            self.tick();
        } else if fresh {
            self.chaos();
        }
        if self.rng.per_mille(self.moves) {
            self.step_move();
        }
        if self.pager.is_none() && self.rng.per_mille(100) {
            self.recover();
        }
    }

    fn tick(&mut self) {
        self.now_ms += self.rng.within(0, 1500) as u64;
        if let Some(pager) = &mut self.pager {
            pager.now_ms = self.now_ms;
            if self.rng.per_mille(self.samples) {
                let (count, total) = (self.rng.within(1, 300), self.world.pages());
                let pages: BTreeSet<usize> = (0..count).map(|_| self.rng.below(total)).collect();
                pager.sample(&pages.into_iter().map(|page| PageIdx(page as u64)).collect::<Vec<_>>());
            }
            if self.rng.per_mille(self.prefetches) {
                pager.prefetch(self.world.pages() / CHUNK, &mut self.rng);
            }
            for event in pager.any_come(&mut self.rng) {
                self.apply(event);
            }
        }
        if let Some(pager) = &mut self.pager {
            if self.rng.per_mille(self.samples / 5) {
                let on = self.rng.per_mille(700);
                pager.watch_curve(on);
            }
            self.apply(Event::Tick);
        }
        if self.rng.coin()
            && let Some(event) =
                self.pager.as_mut().and_then(|pager| pager.any_share_event(&mut self.world, &mut self.rng))
        {
            self.apply(event);
        }
        if self.pager.as_ref().is_some_and(|pager| pager.is_preparing) && self.rng.coin() {
            self.apply(Event::Prepare { on: true });
        }
        let fills = if self.rng.per_mille(self.weather.fills) { self.rng.within(1, FILLS_MAX) } else { 0 };
        for _ in 0..fills {
            if self.pager.as_ref().is_some_and(|pager| pager.machine.has_pages_to_fill()) {
                self.apply(Event::Fill);
            }
        }
        if self.rng.coin() {
            self.world.move_stray(&self.weather);
        }
        if self.rng.coin()
            && let Some(chunks) = self.stray_zaps.pop()
        {
            pager::zap(&chunks, &mut self.world);
        }
    }

    fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        self.apply(Event::SetLimit { limit: PageCount(limit as u64) });
        let min = if self.rng.coin() { self.rng.within(0, limit) } else { 0 };
        self.apply(Event::SetMin { min: PageCount(min as u64) });
    }

    fn deliver(&mut self) {
        if self.world.messages.is_empty() || self.pager.is_none() {
            return;
        }
        let index = if self.rng.coin() { 0 } else { self.rng.below(self.world.messages.len()) };
        let message = self.world.messages.remove(index);
        if self.weather.mistake == Some(Mistake::OpensBeforeCharge) && self.world.loan.has(message.page) {
            self.world.open_borrowed(message.page..message.page + 1);
        }
        self.answer(PageIdx(message.page as u64), message.access, message.kind);
    }

    fn chaos(&mut self) {
        match self.rng.below(8) {
            0 => self.vmm.interrupt(&mut self.rng),
            1 => vmm::drop_entries(&mut self.world, &mut self.rng),
            2 if self.rng.per_mille(200) => {
                let pages = self.world.pages();
                self.limit = match self.rng.per_mille(300) {
                    true => any_limit(pages, &mut self.rng),
                    false => (self.limit + self.rng.within(0, 24)).saturating_sub(12).clamp(LIMIT_MIN, pages),
                };
                self.set_limit(self.limit);
            }
            3 if self.rng.per_mille(self.pins) => {
                self.pinned = true;
                if self.rng.coin() {
                    // The clock first: the daemon may be away.
                    self.world.loan.is_io_unseen = true;
                    self.apply(Event::KeepBorrowed);
                }
                self.apply(Event::Pin);
            }
            4 if self.rng.per_mille(self.discards) => {
                if let Some(discard) = self.vmm.give_back(&mut self.rng)
                    && let Some(pager) = &mut self.pager
                {
                    let (world, vmm, rng) = (&mut self.world, &mut self.vmm, &mut self.rng);
                    let result = pager.discard(discard.token, discard.first, discard.count, world, vmm, rng);
                    result.unwrap_or_else(|crash| self.crash(crash));
                }
            }
            5 if self.rng.per_mille(200) => self.apply(Event::Continue),
            6 if self.rng.per_mille(self.images) && self.pager.is_some() => self.request_image(),
            7 if self.rng.per_mille(self.recalls) => self.apply(Event::OwnAll),
            _ => {}
        }
    }

    fn request_image(&mut self) {
        match image::any_request(&self.world, &mut self.rng) {
            ImageRequest::Prepare { on } => self.apply(Event::Prepare { on }),
            ImageRequest::Begin => {
                let has_parent = self.rng.per_mille(self.weather.parents);
                self.apply(Event::Freeze { has_parent });
            }
            ImageRequest::Forget => self.apply(Event::Forget),
            ImageRequest::RemoveOldest if self.world.may_remove_oldest() => self.world.remove_images(1),
            ImageRequest::RemoveOldest => {}
            ImageRequest::RemoveAll => {
                self.world.remove_images(self.world.images.len());
                self.apply(Event::Thaw);
            }
        }
    }

    fn check(&self) {
        oracle::check_recoverable(&self.world, &self.vmm);
        if let Some(pager) = &self.pager {
            oracle::check_table(pager, &self.world, &self.vmm);
            oracle::check_frames(pager, &self.world);
        }
    }

    fn run(&mut self) {
        for step in 0..self.rng.within(500, 6000) {
            self.step(true);
            if self.rng.per_mille(3) {
                self.vmm.change_phase(&mut self.rng);
            }
            if step % 8 == 0 {
                self.check();
            }
            if step % IMAGE_STEPS == 0 {
                self.world.check_images();
            }
        }
        self.drain();
        self.world.check_images();
        if self.rng.coin() {
            self.fill();
            self.world.check_images();
        }
        if self.rng.per_mille(250) {
            self.vmm.sweep_all(&mut self.rng);
            let verified = self.vmm.verified + 2 * self.world.pages() as u64;
            for _ in 0..DRAIN_STEPS {
                self.step(true);
                if self.vmm.verified >= verified {
                    break;
                }
            }
            assert!(self.vmm.verified >= verified, "the sweep does not end: {:?}", self.vmm.oldest());
            self.drain();
        }
    }

    /// Everything that the newest image lacks is copied.
    fn fill(&mut self) {
        for _ in 0..DRAIN_STEPS {
            let Some(pager) = &self.pager else { panic!("nothing crashes any more") };
            if pager.machine.frozen() == 0 {
                assert!((0..self.world.pages()).all(|page| !self.world.is_frozen(page)));
                return;
            }
            self.apply(Event::Fill);
            self.step(false);
        }
        panic!("an image is never filled");
    }

    /// Nothing fails any more: everything that was begun has to end.
    fn drain(&mut self) {
        (self.weather.io_fails, self.weather.zap_fails, self.weather.crash) = (0, 0, 0);
        (self.weather.unsplittable, self.weather.protect_fails, self.weather.image_fails) = (0, 0, 0);
        self.weather.own_fails = 0;
        self.moves = 0;
        self.pace = Pace { thread: 30, message: 30, job: 30, tick: 1, chaos: 0 };
        if self.pager.is_none() {
            self.recover();
        }
        let pager = self.pager.as_mut().expect("nothing crashes any more");
        pager.weather = self.weather.clone();
        self.apply(Event::Continue);
        let quiet = |sim: &Sim| {
            let pager = sim.pager.as_ref().expect("nothing crashes any more");
            sim.vmm.idle() && pager.jobs() == 0 && sim.world.messages.is_empty() && !pager.machine.is_busy()
        };
        for step in 0..DRAIN_STEPS {
            if quiet(self) {
                self.check();
                return;
            }
            self.step(false);
            if step % 64 == 0 {
                self.check();
            }
        }
        panic!("does not come to rest: {:?}, {:?}", self.vmm.oldest(), self.pager.as_ref().map(|p| p.machine.stats()));
    }
}

/// Fills both files somehow, as an earlier life left them. Returns the truth.
fn populate(world: &mut World, rng: &mut Rng) -> Vec<u64> {
    let mut truth = vec![0; world.pages()];
    if rng.per_mille(300) {
        return truth;
    }
    world.registered = true;
    if rng.per_mille(400) {
        borrow::populate(world, &mut truth, rng);
        return truth;
    }
    for chunk in 0..world.pages() / CHUNK {
        let (ram, swap) = (*rng.pick(&[0, 500, 1000]), *rng.pick(&[0, 500, 1000]));
        for (page, truth) in truth.iter_mut().enumerate().skip(chunk * CHUNK).take(CHUNK) {
            if rng.per_mille(swap) {
                *truth = page as u64 + 1;
                let block = world.blocks.target(page, false, None);
                world.blocks.write(block, *truth);
                world.blocks.give(page, block);
            }
            if rng.per_mille(ram) {
                *truth = if rng.per_mille(100) { 0 } else { page as u64 + 100_000 };
                world.ram[page] = Some(Rc::new(Cell::new(*truth)));
            }
        }
    }
    truth
}

fn any_limit(pages: usize, rng: &mut Rng) -> usize {
    match rng.below(8) {
        0 => pages,
        1..=3 => rng.within(LIMIT_MIN, 100),
        4 => rng.within(100, 600).min(pages),
        _ => rng.within(pages / 4, pages),
    }
}

/// Says which seed failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed: PAGODA_SIM_SEED={}", self.0);
        }
    }
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    match number("PAGODA_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PAGODA_SIM_SEEDS").unwrap_or(default),
    }
}

fn simulate(direct: bool) {
    let (mut verified, mut events, mut images, mut inherited) = (0, 0, 0, 0);
    let mut totals = [0; METRICS];
    for seed in seeds(SEEDS) {
        let named = Seed(seed);
        let mut sim = Sim::new(seed, direct);
        sim.run();
        verified += sim.vmm.verified;
        events += sim.pager.as_ref().map_or(0, |pager| pager.events);
        inherited += sim.world.inherited;
        images += sim.pager.as_ref().map_or(0, |pager| pager.images);
        for (total, value) in totals.iter_mut().zip(sim.pager.iter().flat_map(|pager| *pager.machine.stats().values()))
        {
            *total += value;
        }
        drop(named);
    }
    eprintln!("{verified} reads verified; {events} events, {images} images since the last crashes");
    eprintln!("{inherited} pages were referred to in parents");
    let is_one = std::env::var_os("PAGODA_SIM_SEED").is_some();
    assert!(inherited > 0 || is_one, "no image has had a parent");
    let is_used = [Metric::PagesPrefetched, Metric::PrefetchedUsed, Metric::FaultsBorrowed, Metric::OwnedChunks]
        .iter()
        .all(|metric| totals[*metric as usize] > 0);
    assert!(is_used || is_one, "no page was prefetched and used, or none borrowed and made the VM's own");
    for (def, total) in CATALOGUE.iter().zip(totals).filter(|(def, _)| def.kind == MetricKind::Counter) {
        eprintln!("{:24} {total}", def.name);
    }
}

/// A thread that waits is served, however busy the others are with the pages that are in DRAM, and however slow the disk.
#[test]
fn nobody_starves() {
    for seed in seeds(STARVATION_SEEDS) {
        let named = Seed(seed);
        let mut sim = Sim::new(seed, seed % 2 == 0);
        sim.drain();
        sim.pace = Pace { thread: 100, message: 100, job: *sim.rng.pick(&[2, 10, 50]), tick: 1, chaos: 0 };
        for _ in 0..STARVATION_STEPS {
            if sim.rng.per_mille(1) {
                sim.vmm.change_phase(&mut sim.rng);
            }
            sim.step(true);
            let (age, task) = sim.vmm.oldest();
            assert!(age < STARVATION_AGE, "waits for {age} steps: {task}");
        }
        sim.drain();
        drop(named);
    }
}

/// Many threads wait for the same few pages, and there is room for fewer: waiting faults become stale, and page-outs come
/// in bunches.
#[test]
fn a_crowd_in_little_room() {
    for seed in seeds(CROWD_SEEDS) {
        let named = Seed(seed);
        let mut sim = Sim::new(seed, seed % 2 == 0);
        sim.drain();
        sim.pace = Pace { thread: 50, message: 50, job: *sim.rng.pick(&[5, 20, 50]), tick: 1, chaos: 0 };
        let pages = sim.world.pages();
        let wanted: Vec<usize> = (0..sim.rng.within(3, 12)).map(|_| sim.rng.below(pages)).collect();
        sim.vmm.crowd(&wanted, &mut sim.rng);
        for step in 0..CROWD_STEPS {
            if sim.rng.per_mille(5) {
                let limit = sim.rng.within(1, wanted.len() + 4);
                sim.set_limit(limit);
            }
            sim.step(true);
            if step % 16 == 0 {
                sim.check();
            }
        }
        sim.drain();
        drop(named);
    }
}

/// A VM of which only shared pages are out gets them back and is disarmed, while others of its group lead to pages of it that
/// still are cold: nothing may be looked at once it is home.
#[test]
fn a_vm_comes_home_while_others_hint() {
    for seed in seeds(HOME_SEEDS) {
        let named = Seed(seed);
        let mut sim = Sim::new(seed, seed % 2 == 0);
        sim.weather.promotes = 1000;
        sim.drain();
        let pages = sim.world.pages();
        for _ in 0..HOME_ROUNDS {
            let out = sim.rng.within(1, HOME_OUT_MAX);
            sim.set_limit(pages - out);
            sim.pace = Pace { thread: 100, message: 50, job: 100, tick: 3, chaos: 0 };
            (0..HOME_STEPS).for_each(|_| sim.step(true));
            for _ in 0..HOME_HINTS {
                let page = PageIdx(sim.rng.below(pages) as u64);
                sim.apply(Event::LookAgain { page });
            }
            sim.now_ms += 2000;
            if let Some(pager) = &mut sim.pager {
                pager.now_ms = sim.now_ms;
            }
            sim.set_limit(pages);
            if sim.pager.as_ref().is_some_and(|pager| pager.machine.has_pages_to_scan(pager.now_ms)) {
                sim.apply(Event::Scan);
            }
        }
        sim.drain();
        drop(named);
    }
}

/// Each image begins when the one before it is filled, and refers to that for what is known not to have changed. The oldest
/// ones are removed on the way.
#[test]
fn images_refer_to_the_ones_before_them() {
    let (mut inherited, mut begun) = (0, 0);
    for seed in seeds(CHAIN_SEEDS) {
        let named = Seed(seed);
        let mut sim = Sim::new(seed, seed % 2 == 0);
        (sim.images, sim.weather.fills, sim.weather.parents) = (0, 0, 1000);
        for _ in 0..CHAIN_ROUNDS {
            sim.drain();
            sim.apply(Event::Prepare { on: true });
            sim.apply(Event::Freeze { has_parent: true });
            sim.world.check_images();
            let chaos = *sim.rng.pick(&[0, 1, 5]);
            sim.pace = Pace { thread: 30, message: 30, job: *sim.rng.pick(&[2, 20, 100]), tick: 2, chaos };
            sim.discards = *sim.rng.pick(&[0, 300]);
            (0..sim.rng.within(0, CHAIN_STEPS)).for_each(|_| sim.step(true));
            sim.check();
            sim.fill();
            sim.world.check_images();
            (0..sim.rng.within(0, CHAIN_STEPS)).for_each(|_| sim.step(true));
            if sim.world.images.len() > CHAIN_IMAGES {
                sim.world.remove_images(1);
            }
        }
        sim.drain();
        sim.world.check_images();
        (inherited, begun) = (inherited + sim.world.inherited, begun + sim.world.begun);
        drop(named);
    }
    eprintln!("{begun} images referred to {inherited} pages of the ones before them");
    let is_one = std::env::var_os("PAGODA_SIM_SEED").is_some();
    assert!(inherited > 100_000 || is_one, "hardly any page is the parent's");
}

/// A VM moves to another host, which then has every page as the guest left it.
#[test]
fn moves_have_every_page() {
    let (mut finished, mut looks, mut first_writes) = (0, 0, 0);
    for seed in seeds(MOVE_SEEDS) {
        let named = Seed(seed);
        let mut sim = Sim::new(seed, seed % 2 == 0);
        sim.prepare_to_move();
        sim.run();
        looks += sim.world.moving.as_ref().map_or(0, |moving| moving.looks);
        first_writes += sim.world.moving.as_ref().map_or(0, |moving| moving.first_writes);
        finished += usize::from(sim.finish_move());
        drop(named);
    }
    eprintln!("{finished} moves finished after {looks} looks and {first_writes} first writes");
    let is_one = std::env::var_os("PAGODA_SIM_SEED").is_some();
    assert!(finished > MOVE_SEEDS as usize / 3 || is_one, "hardly any move was finished");
    assert!(first_writes > MOVE_SEEDS as usize || is_one, "hardly any first write came");
}

#[test]
fn small_folios() {
    simulate(false);
}

#[test]
fn large_folios() {
    simulate(true);
}
