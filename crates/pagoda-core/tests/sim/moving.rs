//! A move of the VM to another host: looks at what was written, and copies, which together are what the VM holds.

use std::collections::{BTreeMap, BTreeSet};

use pagoda_core::bits::Run;
use pagoda_core::fault::{Access, Event, FaultKind, Pages};
use pagoda_core::stats::Metric;
use pagoda_core::units::PageIdx;

use crate::image::Mistake;
use crate::pager::Pager;
use crate::rng::Rng;
use crate::vmm::Vmm;
use crate::world::{CHUNK, GARBAGE, World};

/// Steps within which all that is wanted is copied when nothing else happens.
const COPY_STEPS: usize = 200_000;

/// What the other host has, and what it is still to get.
#[derive(Debug)]
pub struct Moving {
    /// By page: what was copied last.
    mirror: Vec<u64>,
    /// Pages to be copied, each when all direct I/O in flight began at this epoch or later.
    wanted: BTreeMap<usize, u64>,
    /// Asked for, and not answered.
    asked: BTreeSet<usize>,
    pub looks: usize,
    /// Known as such before they were answered.
    pub first_writes: usize,
}

impl Moving {
    pub fn new(pages: usize) -> Moving {
        Moving {
            mirror: vec![GARBAGE; pages],
            wanted: BTreeMap::new(),
            asked: BTreeSet::new(),
            looks: 0,
            first_writes: 0,
        }
    }

    /// It was asked for, and not answered.
    pub fn is_asked(&self, page: usize) -> bool {
        self.asked.contains(&page)
    }

    /// A copy was made: for whoever waits for one, or for an order that was given up, such as on a connection that was lost. Then it
    /// counts as well for whoever wants one now.
    pub fn take(&mut self, page: usize, content: u64, oldest_io: u64) {
        let is_wanted = self.wanted.get(&page).is_some_and(|epoch| oldest_io >= *epoch);
        if self.asked.remove(&page) || is_wanted {
            self.wanted.remove(&page);
            self.mirror[page] = content;
        }
    }

    /// No copy was made. `forgets`: nobody asks again.
    pub fn answer_nothing(&mut self, page: usize, forgets: bool) {
        match forgets {
            true => self.take(page, GARBAGE, 0),
            false => self.put_off(page),
        }
    }

    /// What was asked for comes for nobody, and is wanted again.
    fn lose_link(&mut self) {
        for page in std::mem::take(&mut self.asked) {
            self.wanted.entry(page).or_insert(0);
        }
    }

    /// No copy was made.
    fn put_off(&mut self, page: usize) {
        assert!(self.asked.remove(&page), "page {page} is put off, and nobody has asked for it");
        self.wanted.entry(page).or_insert(0);
    }

    /// What the other host has of a page, if it is to be right.
    pub fn settled(&self, page: usize) -> Option<u64> {
        let is_settled = self.looks > 0 && !self.wanted.contains_key(&page) && !self.asked.contains(&page);
        is_settled.then(|| self.mirror[page])
    }

    /// A run of pages that may be copied now.
    fn any_run(&mut self, oldest_io: u64, mistake: Option<Mistake>, rng: &mut Rng) -> Option<Pages> {
        let trusts = mistake == Some(Mistake::CopiesUnderIo);
        let may = |(page, epoch): (&usize, &u64)| {
            (!self.asked.contains(page) && (trusts || oldest_io >= *epoch)).then_some(*page)
        };
        let ready: Vec<usize> = self.wanted.iter().filter_map(may).collect();
        if ready.is_empty() {
            return None;
        }
        let at = rng.below(ready.len());
        let first = ready[at];
        let most = rng.within(1, 64);
        let is_next = |(count, page): &(usize, &usize)| **page == first + count && *page / CHUNK == first / CHUNK;
        let len = ready[at..].iter().take(most).enumerate().take_while(is_next).count();
        for page in first..first + len {
            self.wanted.remove(&page);
            self.asked.insert(page);
        }
        let page = PageIdx(first as u64);
        Some(Pages { chunk: page.chunk(), run: Run { start: page.index_in_chunk(), len: len as u16 } })
    }
}

impl crate::Sim {
    /// From now on there are moves, and no images.
    pub fn prepare_to_move(&mut self) {
        self.images = 0;
        self.moves = *self.rng.pick(&[20, 200, 1000]);
        self.pace.chaos = *self.rng.pick(&[0, 1]);
    }

    /// One step of a move: it begins, looks, copies, or is given up.
    pub fn step_move(&mut self) {
        let Some(pager) = &self.pager else { return };
        let can_look = pager.machine.can_look().is_ok();
        match &mut self.world.moving {
            None => {
                self.world.moving = Some(Moving::new(self.world.pages()));
                self.apply(Event::Prepare { on: true });
                if self.rng.coin() {
                    self.apply(Event::LearnHeat);
                }
            }
            Some(_) if self.rng.per_mille(5) => self.end_move(),
            Some(moving) if self.rng.per_mille(20) => moving.lose_link(),
            Some(moving) if can_look && (moving.looks == 0 || self.rng.per_mille(100)) => self.look_for_writes(),
            Some(moving) if moving.looks > 0 => {
                let oldest = self.world.loan.is_io_unseen.then_some(0);
                let oldest = oldest.or(self.world.slots.iter().copied().min()).unwrap_or(u64::MAX);
                if let Some(pages) = moving.any_run(oldest, self.weather.mistake, &mut self.rng) {
                    self.apply(Event::CopyOut { pages });
                }
            }
            Some(_) => self.apply(Event::Prepare { on: true }),
        }
    }

    /// A fault comes to the machine, however late. One that is known as a first write needs nothing but its answer.
    pub fn answer(&mut self, page: PageIdx, access: Access, kind: FaultKind) {
        let counters = [Metric::FaultsMinor, Metric::FaultsWriteProtect];
        let answered = |pager: &Pager| counters.map(|metric| pager.machine.counter(metric)).iter().sum::<u64>();
        let before = self.pager.as_ref().map(answered);
        let is_first_write = self.pager.as_ref().is_some_and(|pager| pager.machine.is_first_write(page, access));
        self.apply(Event::Fault { page, access, kind });
        let Some((after, before)) = self.pager.as_ref().map(answered).zip(before).filter(|_| is_first_write) else {
            return;
        };
        assert_eq!(after, before + 1, "page {} was to need nothing but an answer", page.0);
        // An image knows as much of its pages.
        if let Some(moving) = &mut self.world.moving {
            moving.first_writes += 1;
        }
    }

    fn look_for_writes(&mut self) {
        self.apply(Event::Look);
        let Some(pager) = &mut self.pager else { return };
        let written = pager.machine.take_written();
        // The clock moves on behind the protection.
        self.world.epoch += 1;
        let Some(moving) = &mut self.world.moving else { return };
        moving.looks += 1;
        for (chunk, pages) in written {
            for index in pages.iter() {
                let page = chunk.0 as usize * CHUNK + usize::from(index);
                // One that is on its way was asked for before the look.
                moving.asked.remove(&page);
                moving.wanted.insert(page, self.world.epoch);
            }
        }
    }

    fn end_move(&mut self) {
        self.world.moving = None;
        self.apply(Event::Prepare { on: false });
        self.apply(Event::Forget);
    }

    /// The VM stands still: a last look, and all that it brings.
    pub fn finish_move(&mut self) -> bool {
        if self.world.moving.is_none() || self.pager.as_ref().is_none_or(|pager| pager.machine.can_look().is_err()) {
            return false;
        }
        assert!(self.world.slots.is_empty(), "the VM stands still");
        self.look_for_writes();
        for _ in 0..COPY_STEPS {
            let Some(moving) = &mut self.world.moving else { panic!("nothing crashes any more") };
            if moving.wanted.is_empty() && moving.asked.is_empty() {
                check_moved(&self.world, &self.vmm);
                return true;
            }
            if let Some(pages) = moving.any_run(u64::MAX, None, &mut self.rng) {
                self.apply(Event::CopyOut { pages });
            }
            let pager = self.pager.as_mut().expect("nothing crashes any more");
            let progressed = pager.progress(&mut self.world, &mut self.vmm, &mut self.rng);
            assert!(progressed.is_ok(), "nothing crashes any more");
        }
        panic!("a move is never over");
    }
}

/// The other host has what the VM holds.
fn check_moved(world: &World, vmm: &Vmm) {
    let moving = world.moving.as_ref().expect("it moves");
    for page in (0..world.pages()).filter(|page| !vmm.is_given_back(*page)) {
        assert_eq!(moving.mirror[page], vmm.truth[page], "page {page} has moved");
    }
}
