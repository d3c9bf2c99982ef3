//! Random VMs that grow, shrink, ignore their balloons, come and go, under random settings. Every VM does what its plan
//! says, more or less; after every plan the promises are looked at.

use super::super::state::{Levels, STATES};
use super::super::*;
use super::plans::{mib, plenty, shares};
use crate::chance::Chance;
use crate::units::PageCount;

const SEEDS: u64 = 60;
const TICKS: u64 = 400;

struct Guest {
    id: VmId,
    /// The guest would use so many pages.
    wants: PageCount,
    resident: PageCount,
    swapped: PageCount,
    balloon: Option<PageCount>,
    obeys: bool,
    pinned: bool,
    watched: u32,
}

struct World {
    chance: Chance,
    policy: Policy,
    guests: Vec<Guest>,
    next_id: u32,
    pool: PageCount,
}

impl World {
    fn new(seed: u64) -> World {
        let pool = mib(2048);
        let policy = Policy::new(HostSettings::new(pool)).unwrap();
        World { chance: Chance::new(seed), policy, guests: Vec::new(), next_id: 0, pool }
    }

    fn settings(&mut self, memory: PageCount) -> VmSettings {
        let min = PageCount(self.chance.below(memory.0 / 2));
        let cap = PageCount(self.chance.within(min.0.max(1), memory.0));
        let shares = shares(self.chance.within(1, 4000) as u32);
        VmSettings { min, cap, shares, ..VmSettings::new(memory) }
    }

    fn event(&mut self) {
        match self.chance.below(12) {
            0..=3 => self.arrive(),
            4 if !self.guests.is_empty() => {
                let gone = self.guests.swap_remove(self.chance.below(self.guests.len() as u64) as usize);
                self.policy.remove(gone.id);
            }
            5 => {
                let tax = TaxRate::new(PerMille(self.chance.below(1000) as u16)).unwrap();
                let host = HostSettings { tax, ..self.policy.host().clone() };
                self.policy.set_host(host, &plenty()).unwrap();
            }
            // The host itself runs short, and recovers.
            6 => self.pool = PageCount(mib(2048).0 * self.chance.within(500, 1000) / 1000),
            7..=8 => {
                let at = self.chance.below(self.guests.len() as u64) as usize;
                let Some(id) = self.guests.get(at).map(|guest| guest.id) else { return };
                let memory = self.policy.settings(id).unwrap().memory;
                let settings = self.settings(memory);
                let before = self.policy.settings(id).unwrap().clone();
                let overhead = self.policy.overhead(id).unwrap();
                if self.policy.set(id, settings, overhead, &plenty()).is_err() {
                    assert_eq!(self.policy.settings(id), Some(&before), "refused, and yet changed");
                }
            }
            _ => {
                let part = self.chance.within(0, 1000);
                let at = self.chance.below(self.guests.len() as u64) as usize;
                let Some(guest) = self.guests.get_mut(at) else { return };
                let memory = self.policy.settings(guest.id).unwrap().memory;
                guest.wants = PageCount(memory.0 * part / 1000);
            }
        }
    }

    fn arrive(&mut self) {
        let memory = mib(self.chance.within(64, 1024));
        let settings = self.settings(memory);
        let overhead = Overhead { overhead: mib(10), reserve: PageCount::ZERO };
        let id = VmId(self.next_id);
        self.next_id += 1;
        let admitted = self.policy.admission(&Change::Add(&settings, overhead), &plenty()).is_admitted();
        assert_eq!(
            self.policy.add(id, settings, overhead, &plenty()).is_ok(),
            admitted,
            "both look at the same promises"
        );
        if admitted {
            let balloon = self.chance.per_mille(600).then_some(PageCount::ZERO);
            self.guests.push(Guest {
                id,
                wants: memory,
                resident: PageCount::ZERO,
                swapped: PageCount::ZERO,
                balloon,
                obeys: self.chance.per_mille(700),
                pinned: self.chance.per_mille(30),
                watched: 0,
            });
        }
    }

    fn used(&self) -> PageCount {
        self.guests.iter().map(|guest| guest.resident + mib(10)).sum()
    }

    fn samples(&mut self) -> Vec<VmSample> {
        let chance = &mut self.chance;
        let sample = |guest: &mut Guest| VmSample {
            id: guest.id,
            resident: guest.resident,
            swapped: guest.swapped,
            shared: PageCount::ZERO,
            is_at_limit: false,
            balloon: guest.balloon.map_or(Balloon::Absent, Balloon::Inflated),
            sample: SampleCount { watched: guest.watched, touched: chance.below(u64::from(guest.watched) + 1) as u32 },
            pinned: guest.pinned,
        };
        self.guests.iter_mut().map(sample).collect()
    }

    /// One second: everybody follows its plan, page-out at most by 100 MiB, growth by 50 MiB while there is memory.
    fn follow(&mut self, plan: &Plan) {
        let mut free = self.pool.saturating_sub(self.used());
        for guest in &mut self.guests {
            let vm = plan.vm(guest.id).unwrap();
            let memory = vm.terms.memory;
            if let (Some(size), Some(asked), true) = (guest.balloon, vm.actions.balloon, guest.obeys) {
                guest.balloon = Some(asked.min(size + mib(40)));
            }
            let usable = memory.saturating_sub(guest.balloon.unwrap_or(PageCount::ZERO));
            let given = (guest.resident + guest.swapped).saturating_sub(usable);
            let from_swap = given.min(guest.swapped);
            guest.swapped -= from_swap;
            guest.resident -= given - from_swap;
            let out = guest.resident.saturating_sub(vm.actions.page_out_cap).min(mib(100));
            guest.resident -= out;
            guest.swapped += out;
            if vm.actions.run == Run::Run {
                let room = vm.actions.page_out_cap.min(guest.wants).min(usable).saturating_sub(guest.resident);
                let grow = room.min(mib(50)).min(free);
                free -= grow;
                guest.resident += grow;
                guest.swapped = guest.swapped.saturating_sub(grow);
            }
        }
    }
}

fn check(world: &World, plan: &Plan, before: ReclaimState) {
    let free = world.pool.saturating_sub(world.used());
    assert_eq!(plan.free, free);
    let levels = Levels::of(world.pool, &world.policy.host().thresholds);
    assert_eq!(plan.state, before.next(free, &levels), "the state follows free memory alone");
    let targets: PageCount = plan.vms.iter().map(|vm| vm.terms.target - vm.terms.lent).sum();
    assert!(targets <= plan.budget + plan.shortfall, "targets beyond the pool");
    assert_eq!(plan.vms.len(), world.guests.len());
    for (vm, guest) in plan.vms.iter().map(|vm| (vm, world.guests.iter().find(|guest| guest.id == vm.id).unwrap())) {
        let settings = world.policy.settings(vm.id).unwrap();
        let terms = &vm.terms;
        assert!(terms.min <= terms.target && terms.target <= terms.ceiling.max(terms.min));
        assert!(terms.target <= terms.allowance && terms.allowance <= terms.limit.max(terms.min));
        assert!(terms.target >= settings.min, "{:?} has less than its min", vm.id);
        if guest.pinned {
            assert!(terms.target >= guest.resident.min(terms.ceiling));
            assert_eq!(vm.actions, VmActions { balloon: None, page_out_cap: settings.memory, run: Run::Run });
            continue;
        }
        assert!(terms.target <= settings.cap);
        assert!(vm.actions.page_out_cap <= settings.cap && vm.actions.page_out_cap >= settings.min);
        if vm.actions.page_out_cap < guest.resident && guest.resident <= settings.cap {
            assert!(plan.state > ReclaimState::High, "paged out without need");
            assert!(vm.actions.page_out_cap >= terms.target, "paged out below its target");
        }
        if vm.actions.run == Run::Block {
            assert!(plan.state == ReclaimState::Low && guest.resident > terms.target);
        }
        let size = vm.actions.balloon.unwrap_or(PageCount::ZERO);
        let largest = settings.balloon_max.of_floor(settings.memory).max(guest.balloon.unwrap_or(PageCount::ZERO));
        assert!(size <= largest && vm.actions.balloon.is_some() == guest.balloon.is_some());
    }
}

#[test]
fn promises_hold_whatever_happens() {
    for seed in 0..SEEDS {
        let mut world = World::new(seed);
        let mut visited = [0u32; 4];
        for tick in 0..TICKS {
            if world.chance.per_mille(200) {
                world.event();
            }
            if tick % 30 == 0 {
                for guest in &mut world.guests {
                    guest.watched = world.policy.start_period(guest.id, &mut world.chance).len() as u32;
                }
            }
            let samples = world.samples();
            let before = world.policy.state();
            let host = PoolSample { now_ms: tick * 1000, pool: world.pool, used: world.used() };
            let plan = world.policy.tick(&host, &samples);
            check(&world, &plan, before);
            visited[STATES.iter().position(|state| *state == plan.state).unwrap()] += 1;
            world.follow(&plan);
        }
        // Left alone, with the whole pool and nobody pinned, reclamation comes to its end.
        world.pool = mib(2048);
        world.guests.iter_mut().for_each(|guest| guest.pinned = false);
        let mut last = None;
        for tick in TICKS..TICKS + 200 {
            let samples = world.samples();
            let host = PoolSample { now_ms: tick * 1000, pool: world.pool, used: world.used() };
            let plan = world.policy.tick(&host, &samples);
            world.follow(&plan);
            last = Some(plan);
        }
        let last = last.unwrap();
        assert!(
            last.state <= ReclaimState::Soft && last.stuck.is_none(),
            "seed {seed} ends {} {:?}",
            last.state,
            last.stuck
        );
        assert!(visited[0] > 0, "seed {seed} never had enough memory: {visited:?}");
    }
}
