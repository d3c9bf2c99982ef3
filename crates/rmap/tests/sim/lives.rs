//! Slabs that are emptied, go back to their servers, and are taken again: what was on its way to an earlier life of a slab must
//! not be found in a later one.

use std::time::Duration;

use rmap::client::Fault as ClientFault;
use rmap::server::Fault;
use rmap::wire::message::Pressure;

use crate::network::Weather;
use crate::node::Program;
use crate::rng::Rng;
use crate::world::{Plan, SLAB_PAGES, Sabotage, World};
use crate::{SEEDS, clients, number, seeds};

/// Between these two, writes come by chance, or hardly any slab would stay empty.
const GIVE_BACK_AFTER: Duration = Duration::from_micros(100);
/// Chance per thousand that a datagram is late by more than it takes to give a slab back and to get it again.
const STRAGGLERS: usize = 30;

impl Plan {
    /// Whether hosts now and then trim a whole slab: in a fifth of all plans. Without a draw, which would make other runs of the
    /// known seeds.
    pub fn empties(&self) -> bool {
        self.operations % 5 == 1
    }

    /// How long a slab of this plan stays empty before it goes back.
    pub fn give_back_after(&self) -> Option<Duration> {
        Some(if self.empties() { GIVE_BACK_AFTER } else { rmap::client::GIVE_BACK_AFTER })
    }

    pub fn stragglers(&self) -> usize {
        if self.empties() { STRAGGLERS } else { 0 }
    }
}

impl World {
    /// Somebody trims all pages of the slab of a page.
    pub fn empty_slab(&mut self, node: usize, space: u64, page: u64) {
        let first = page - page % u64::from(SLAB_PAGES);
        let end = self.plan.pages.min(first + u64::from(SLAB_PAGES));
        (first..end).for_each(|page| self.ask(node, space, page, 5));
    }
}

/// One space whose slabs have one short life after the other, under several owners, on a network that is late.
fn lives(seed: u64, sabotage: Sabotage) -> World {
    let mut rng = Rng::new(seed);
    let (servers, pages) = (rng.within(1, 4), rng.within(2, 16) as u64);
    let whole = Plan { operations: 1, servers, pages, spaces: 1, overflow_disk: false, ..Plan::with_copies(&mut rng) };
    let plan = Plan { copies: whole.copies.min(servers), kills: 0, hand_overs: 0, seals: 0, elsewhere: false, ..whole };
    assert!(plan.empties());
    let weather = Weather { loss: *rng.pick(&[0, 10, 50]), corruption: 0, stragglers: 100, ..Weather::any(&mut rng) };
    let trace = std::env::var_os("RMAP_SIM_TRACE").is_some();
    let mut world = World::new(seed, Some(plan), Some(weather), sabotage, trace);
    // Nobody else does anything.
    world.resting = true;
    world.run_for(10_000_000);
    for _ in 0..20 {
        let Some(owner) = world.owner_of(0) else { break };
        let page = rng.below(pages as usize) as u64;
        for page in 0..pages {
            if rng.per_mille(500) {
                world.ask(owner, 0, page, 9);
            }
        }
        world.run_for(1000 * rng.within(0, 30_000) as u64);
        world.empty_slab(owner, 0, page);
        world.run_for(1000 * rng.within(100, 20_000) as u64);
        // Mostly by a write to another page than those that were on their way.
        world.ask(owner, 0, page, 9);
        // Copies are made, by servers or by the owner, while slabs come and go.
        match rng.below(5) {
            0 => world.kill(rng.below(servers)),
            1 => {
                let level = *rng.pick(&[Pressure::None, Pressure::Orange]);
                if let Program::Server(workers) = &mut world.nodes[rng.below(servers)].program {
                    workers[0].set_pressure(level);
                }
            }
            _ => {}
        }
        world.run_for(1000 * rng.within(100, 40_000) as u64);
        if rng.per_mille(500) {
            world.hand_over(0);
        }
        let Some(owner) = world.owner_of(0) else { break };
        (0..pages).for_each(|page| world.ask(owner, 0, page, 0));
        world.run_for(1000 * rng.within(0, 10_000) as u64);
        if world.violation.is_some() {
            return world;
        }
    }
    world.rest();
    world
}

#[test]
fn a_slab_has_nothing_of_its_earlier_lives() {
    let (mut given_back, mut verified, mut transferred) = (0, 0, 0);
    for seed in seeds(SEEDS / 2) {
        let world = lives(seed, Sabotage::default());
        assert!(world.violation.is_none(), "RMAP_SIM_SEED={seed}: {:?}", world.violation);
        given_back += clients(&world).map(|stats| stats.slabs_given_back).sum::<u64>();
        transferred += clients(&world).map(|stats| stats.slabs_transferred + stats.pages_copied).sum::<u64>();
        verified += world.oracle.verified;
    }
    eprintln!("{given_back} slabs given back, {verified} reads verified, {transferred} slabs and pages copied");
    assert!(number("RMAP_SIM_SEED").is_some() || given_back > 0);
}

/// Servers that forget where a life began, and owners that take the wrong beginning, are found out.
#[test]
fn lives_that_are_mixed_up_are_noticed() {
    let server = Sabotage { server: Some(Fault::NoEpochs), ..Sabotage::default() };
    let client = Sabotage { client: Some(ClientFault::EpochsAtGrants), ..Sabotage::default() };
    for sabotage in [server, client] {
        let found = (0..SEEDS / 2).find_map(|seed| lives(seed, sabotage).violation.map(|what| (seed, what)));
        let (seed, what) = found.unwrap_or_else(|| panic!("{sabotage:?} is not noticed"));
        eprintln!("{sabotage:?}: seed {seed}: {what}");
    }
}
