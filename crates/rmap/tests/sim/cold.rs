//! Spaces that are written, and get parity where they are cold.

use std::time::Duration;

use rmap::client::Fault as ClientFault;
use rmap::wire::message::Pressure;

use crate::network::Weather;
use crate::node::Program;
use crate::rng::Rng;
use crate::world::{Plan, SLAB_PAGES, Sabotage, World};
use crate::{SEEDS, clients, number, run, seeds, written};

/// Of each span of time this long, hosts write in a part, and hardly ever in the rest: groups become cold then.
const SPAN_NS: u64 = 100_000_000;
const BUSY_NS: u64 = 25_000_000;
/// Chance per thousand of a write in the rest.
const RARE: usize = 50;
/// For what is missing to be missed and made anew, and for groups to get parity.
const REPAIR_NS: u64 = 1_500_000_000;
/// Beyond those that run by default, runs that have found something. Servers going one at a time: what another owner took went
/// on counting as being made; a copy that had joined the map was released; an owner took a server's new life for its last one.
const FOUND_LOSSES: [u64; 3] = [231, 549, 805];
/// While one slab of a group moved to a server, another dropped the copy that it had elsewhere, and both were there alone.
const FOUND_SILENCES: [u64; 1] = [1749];
/// A keeper that was replaced kept the place of a page that it was copying. (And 420: a read that was asked again when its page had been
/// written and had parity was put together as what the page had been.)
const FOUND_IN_BAD_TIMES: [u64; 1] = [750];

impl Plan {
    /// When slabs of this plan are cold: in a third of those with servers enough. Without a draw, which would make other runs
    /// of the known seeds.
    pub fn parity_after(&self) -> Option<Duration> {
        let is_cold = self.servers >= 5 && self.copies == 2 && self.steps % 3 == 2;
        is_cold.then(|| Duration::from_micros([500, 2000, 8000][self.steps / 3 % 3]))
    }
}

impl World {
    /// Whether hosts do little now, where that makes groups cold.
    pub fn is_quiet_time(&self) -> bool {
        self.plan.parity_after().is_some() && self.now_ns % SPAN_NS > BUSY_NS
    }

    /// Whether nobody writes now.
    pub fn is_left_alone(&mut self) -> bool {
        self.is_quiet_time() && !self.rng.per_mille(RARE)
    }
}

/// A space that is written all over at six or seven servers, with parity where that is done. A world at rest.
fn cold(seed: u64, sabotage: Sabotage) -> (World, Rng) {
    let mut rng = Rng::new(seed);
    // Room for two copies of each slab, for parity and the ledger, and for what moves.
    let pages = rng.within(9, 40) as u64;
    let plan =
        Plan { copies: 2, servers: rng.within(6, 7), spaces: 1, pages, overflow_disk: false, ..Plan::any(&mut rng) };
    let steps = 302 + 3 * rng.below(3);
    let plan = Plan { elsewhere: false, kills: 0, hand_overs: 0, seals: 0, parity: 0, steps, ..plan };
    assert!(plan.parity_after().is_some());
    let mut world = written(seed, plan, sabotage);
    world.run_for(REPAIR_NS);
    world.run_until_quiet();
    (world, rng)
}

/// What somebody does to a space with parity.
fn disturb(world: &mut World, rng: &mut Rng) {
    let Some(owner) = world.owner_of(0) else { return };
    let page = rng.below(world.plan.pages as usize) as u64;
    match rng.below(8) {
        0 => world.empty_slab(owner, 0, page),
        1 => world.ask(owner, 0, page, 5),
        2 => {
            let first = page - page % u64::from(4 * SLAB_PAGES);
            let end = world.plan.pages.min(first + u64::from(4 * SLAB_PAGES));
            (first..end).for_each(|page| world.ask(owner, 0, page, 9));
        }
        3 => {
            let level = *rng.pick(&[Pressure::None, Pressure::Orange]);
            let server = rng.below(world.plan.servers);
            if let Program::Server(workers) = &mut world.nodes[server].program {
                workers[0].set_pressure(level);
            }
        }
        4 => world.hand_over(0),
        _ => world.ask(owner, 0, page, 9),
    }
}

/// Nothing more, where one seed is asked for.
fn again(found: &[u64]) -> impl Iterator<Item = u64> {
    found.iter().copied().filter(|_| number("RMAP_SIM_SEED").is_none())
}

/// No server is short of memory, and what is missing is made anew.
fn recover(world: &mut World) {
    for node in 0..world.plan.servers {
        if let Program::Server(workers) = &mut world.nodes[node].program {
            workers[0].set_pressure(Pressure::None);
        }
    }
    world.run_for(REPAIR_NS);
    world.run_until_quiet();
}

fn read_all(world: &mut World) {
    if let Some(owner) = world.owner_of(0) {
        (0..world.plan.pages).for_each(|page| world.ask(owner, 0, page, 0));
    }
}

/// One space, written to now and then, under several owners; servers go one at a time, whatever is under way. Pages that were lost.
fn ages(seed: u64, sabotage: Sabotage) -> World {
    let (mut world, mut rng) = cold(seed, sabotage);
    // Not so bad that a server seems to be gone while another one is.
    let (loss, stragglers) = (*rng.pick(&[0, 5]), *rng.pick(&[0, 30]));
    let weather = Weather { loss, stragglers, corruption: 0, mtu: Weather::calm().mtu, ..Weather::any(&mut rng) };
    for round in 0..6 {
        world.network.weather = if round % 2 == 0 { Weather::calm() } else { weather.clone() };
        for _ in 0..rng.below(4) {
            disturb(&mut world, &mut rng);
            world.run_for(1000 * rng.within(0, 30_000) as u64);
        }
        if rng.per_mille(600) {
            world.kill(rng.below(world.plan.servers));
        }
        if rng.per_mille(300) {
            world.run_for(1000 * rng.within(0, 60_000) as u64);
            world.hand_over(0);
        }
        read_all(&mut world);
        world.run_for(1000 * rng.within(0, 60_000) as u64);
        disturb(&mut world, &mut rng);
        world.network.weather = Weather::calm();
        recover(&mut world);
        read_all(&mut world);
        world.run_until_quiet();
        if world.violation.is_some() {
            break;
        }
    }
    world
}

#[test]
fn what_is_cold_outlives_its_servers() {
    let (mut made, mut dissolved, mut degraded, mut verified) = (0, 0, 0, 0);
    for seed in seeds(SEEDS / 5).chain(again(&FOUND_LOSSES)) {
        let world = ages(seed, Sabotage::default());
        let lost = world.oracle.lost;
        assert!(world.violation.is_none() && lost == 0, "RMAP_SIM_SEED={seed}: {:?}, {lost} lost", world.violation);
        made += clients(&world).map(|stats| stats.groups_made).sum::<u64>();
        dissolved += clients(&world).map(|stats| stats.groups_dissolved).sum::<u64>();
        degraded += clients(&world).map(|stats| stats.degraded).sum::<u64>();
        verified += world.oracle.verified;
        let bad: u64 = clients(&world).map(|stats| stats.bad_pages + stats.scrub_bad).sum();
        assert_eq!(bad, 0, "RMAP_SIM_SEED={seed}");
    }
    eprintln!("{made} groups made, {dissolved} dissolved, {degraded} pages put together, {verified} reads verified");
    assert!(number("RMAP_SIM_SEED").is_some() || [made, dissolved, degraded].iter().all(|count| *count > 0));
}

/// One space, written to now and then; one server at a time says nothing more, whatever is under way, for longer than anybody waits.
fn silences(seed: u64, sabotage: Sabotage) -> World {
    let (mut world, mut rng) = cold(seed, sabotage);
    for _ in 0..6 {
        for _ in 0..rng.below(4) {
            disturb(&mut world, &mut rng);
            world.run_for(1000 * rng.within(0, 30_000) as u64);
        }
        let server = rng.below(world.plan.servers);
        world.nodes[server].paused_until_ns = u64::MAX;
        for _ in 0..rng.within(1, 3) {
            disturb(&mut world, &mut rng);
            world.run_for(1000 * rng.within(0, 60_000) as u64);
        }
        read_all(&mut world);
        world.run_until_answered();
        world.nodes[server].paused_until_ns = 0;
        recover(&mut world);
        if world.violation.is_some() {
            break;
        }
    }
    world
}

/// Of what is written too, though its group has to be dissolved before.
#[test]
fn what_is_cold_waits_for_no_silent_server() {
    let (mut dissolved, mut degraded, mut verified) = (0, 0, 0);
    for seed in seeds(SEEDS / 5).chain(again(&FOUND_SILENCES)) {
        let world = silences(seed, Sabotage::default());
        let lost = world.oracle.lost;
        assert!(world.violation.is_none() && lost == 0, "RMAP_SIM_SEED={seed}: {:?}, {lost} lost", world.violation);
        dissolved += clients(&world).map(|stats| stats.groups_dissolved).sum::<u64>();
        degraded += clients(&world).map(|stats| stats.degraded).sum::<u64>();
        verified += world.oracle.verified;
    }
    eprintln!("{dissolved} groups dissolved, {degraded} pages put together, {verified} reads verified");
    assert!(number("RMAP_SIM_SEED").is_some() || [dissolved, degraded].iter().all(|count| *count > 0));
}

/// Everything goes wrong at once, in spaces whose groups become cold over and over, and are sealed now and then.
fn bad_times(seed: u64, sabotage: Sabotage) -> World {
    let mut rng = Rng::new(seed);
    let plan = Plan::any(&mut rng).with_parity(&mut rng);
    let steps = plan.steps + 2 - plan.steps % 3;
    let (kills, hand_overs, seals) = (*rng.pick(&[0, 20, 100]), *rng.pick(&[0, 30, 200]), *rng.pick(&[0, 0, 0, 20]));
    let overflow_disk = rng.per_mille(200);
    let plan = Plan { copies: 2, steps, kills, hand_overs, seals, overflow_disk, ..plan };
    run(seed, Some(plan), None, sabotage)
}

#[test]
fn what_is_cold_is_right_in_bad_times() {
    let (mut made, mut dissolved, mut degraded, mut lost, mut verified) = (0, 0, 0, 0, 0);
    for seed in seeds(SEEDS / 2).chain(again(&FOUND_IN_BAD_TIMES)) {
        let world = bad_times(seed, Sabotage::default());
        assert!(world.violation.is_none(), "RMAP_SIM_SEED={seed}: {:?}", world.violation);
        made += clients(&world).map(|stats| stats.groups_made).sum::<u64>();
        dissolved += clients(&world).map(|stats| stats.groups_dissolved).sum::<u64>();
        degraded += clients(&world).map(|stats| stats.degraded).sum::<u64>();
        (lost, verified) = (lost + world.oracle.lost, verified + world.oracle.verified);
    }
    eprintln!(
        "{made} groups made, {dissolved} dissolved, {degraded} pages put together, {lost} lost, {verified} reads verified"
    );
    assert!(number("RMAP_SIM_SEED").is_some() || [made, dissolved, degraded].iter().all(|count| *count > 0));
}

/// Who writes while there is parity is found out.
#[test]
fn writes_that_do_not_wait_are_noticed() {
    let sabotage = Sabotage { client: Some(ClientFault::WritesToFrozen), ..Sabotage::default() };
    let found = (0..SEEDS / 5).find_map(|seed| {
        let world = ages(seed, sabotage);
        let what = world.violation.clone().or_else(|| (world.oracle.lost > 0).then(|| "pages are lost".to_owned()));
        what.map(|what| (seed, what))
    });
    let (seed, what) = found.expect("writes that do not wait are not noticed");
    eprintln!("seed {seed}: {what}");
}
