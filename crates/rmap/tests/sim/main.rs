//! Simulation of pools: servers, clients, a bad network and a slow control plane under a virtual clock, judged by an oracle.
//! No thread and no socket; every run follows from its seed.
//!
//! `RMAP_SIM_SEED=n cargo test --profile ci -p rmap --test sim` replays one seed (with `RMAP_SIM_TRACE=1` it tells all),
//! `RMAP_SIM_SEEDS=10000` runs more of them. `RMAP_SIM_DIGEST=1` prints a digest of each run's datagrams, questions and
//! results: a change that is to keep behaviour leaves all of them as they were.

mod cold;
mod digest;
mod follow;
mod hints;
mod lives;
mod network;
mod node;
mod oracle;
mod parity;
mod registry;
mod rest;
mod rng;
mod silence;
mod trims;
mod world;

use rmap::client::{ClientStats, Fault as ClientFault};
use rmap::server::Fault;

use network::Weather;
use node::{Host, Program};
use rng::Rng;
use world::{Plan, Sabotage, World};

/// Runs by default: two minutes of a core, where the compiler optimizes.
const SEEDS: u64 = 1000;
/// Beyond these, runs that have found something: a copy of a server's new life was taken for one of its last (and is again, without
/// `check_again`); a group that was lost could not be said to be; parity got into the map after the loss of what it stands for.
const FOUND: [u64; 3] = [1032, 1445, 2134];
/// Within so many runs a mistake is noticed.
const SABOTAGED_SEEDS: u64 = 400;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    match number("RMAP_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("RMAP_SIM_SEEDS").unwrap_or(default),
    }
}

fn run(seed: u64, plan: Option<Plan>, weather: Option<Weather>, sabotage: Sabotage) -> World {
    let trace = std::env::var_os("RMAP_SIM_TRACE").is_some();
    let mut world = World::new(seed, plan, weather, sabotage, trace);
    let steps = world.plan.steps * 20;
    for _ in 0..steps {
        if world.violation.is_some() || !world.step() {
            break;
        }
    }
    if world.violation.is_none() {
        world.rest();
    }
    if sabotage.server.is_none() {
        let bad: u64 = clients(&world).map(|stats| stats.bad_pages + stats.scrub_bad).sum();
        if bad > 0 {
            world.violation.get_or_insert(format!("{bad} pages came back in a version that was never acknowledged"));
        }
    }
    world
}

fn clients(world: &World) -> impl Iterator<Item = ClientStats> {
    world.nodes.iter().filter_map(|node| match &node.program {
        Program::Host(host) => Some(*host.client.stats()),
        _ => None,
    })
}

#[test]
fn every_page_is_a_register() {
    let (mut verified, mut acked, mut lost, mut kills, mut delivered) = (0, 0, 0, 0, 0);
    let (mut failed, mut sealed, mut virtual_seconds) = (0, 0, 0.0);
    let mut totals = ClientStats::default();
    let again = if number("RMAP_SIM_SEED").is_none() { &FOUND[..] } else { &[] };
    for seed in seeds(SEEDS).chain(again.iter().copied()) {
        let world = run(seed, None, None, Sabotage::default());
        if let Some(what) = &world.violation {
            failed += 1;
            eprintln!("{what}\nreplay: RMAP_SIM_SEED={seed} cargo test --profile ci -p rmap --test sim every_page");
            assert!(failed < 5, "enough");
        }
        verified += world.oracle.verified;
        virtual_seconds += world.now_ns as f64 / 1e9;
        acked += world.oracle.acked;
        lost += world.oracle.lost;
        kills += world.kills;
        sealed += world.sealed.len();
        delivered += world.network.delivered;
        for stats in clients(&world) {
            totals.copies_left += stats.copies_left;
            totals.copies_joined += stats.copies_joined;
            totals.hedged += stats.hedged;
            totals.resent_timeout += stats.resent_timeout;
            totals.resent_overtaken += stats.resent_overtaken;
            totals.slabs_lost += stats.slabs_lost;
            totals.slabs_given_back += stats.slabs_given_back;
            totals.sessions += stats.sessions;
            totals.dropped += stats.dropped;
            totals.pages_copied += stats.pages_copied;
            totals.slabs_transferred += stats.slabs_transferred;
            totals.transfers_refused += stats.transfers_refused;
            totals.scrubbed += stats.scrubbed;
            totals.spaces_kept += stats.spaces_kept;
            totals.unmapped += stats.unmapped;
            totals.degraded += stats.degraded;
            totals.groups_made += stats.groups_made;
            totals.groups_dissolved += stats.groups_dissolved;
            totals.notified_again += stats.notified_again;
            totals.leftovers += stats.leftovers;
        }
    }
    eprintln!(
        "{verified} reads verified, {acked} writes, {delivered} datagrams, {kills} servers killed, {lost} lost, {sealed} spaces sealed, {virtual_seconds:.0} s virtual"
    );
    eprintln!("{totals:?}");
    assert_eq!(failed, 0);
    assert!(verified > 0 && acked > 0);
    let whole = number("RMAP_SIM_SEED").is_none();
    let kept = [totals.hedged, totals.scrubbed, sealed as u64, totals.spaces_kept];
    let parity = [totals.degraded, totals.groups_made, totals.groups_dissolved];
    let rare = [&kept[..], &parity, &[totals.unmapped, totals.slabs_given_back, totals.leftovers]].concat();
    assert!(!whole || rare.iter().all(|count| *count > 0), "{rare:?}");
}

/// A pool of three servers with two copies of everything, all in sync.
fn in_sync(seed: u64) -> (World, Rng) {
    in_sync_with(seed, Sabotage::default())
}

fn in_sync_with(seed: u64, sabotage: Sabotage) -> (World, Rng) {
    let mut rng = Rng::new(seed);
    // What found no room for two copies has one: there is room.
    let whole = Plan {
        copies: 2,
        servers: 3,
        spaces: 1,
        overflow_disk: false,
        elsewhere: false,
        ..Plan::with_copies(&mut rng)
    };
    let plan = Plan { kills: 0, hand_overs: 0, seals: 0, steps: 300, ..whole };
    (written(seed, plan, sabotage), rng)
}

/// A pool at rest, all pages of whose spaces were written.
fn written(seed: u64, plan: Plan, sabotage: Sabotage) -> World {
    let trace = std::env::var_os("RMAP_SIM_TRACE").is_some();
    let mut world = World::new(seed, Some(plan), Some(Weather::calm()), sabotage, trace);
    world.network.weather = Weather::calm();
    world.resting = false;
    world.rest();
    // Servers that nobody knows yet decline more than one slab.
    for _ in 0..2 {
        write_all(&mut world);
        world.run_until_quiet();
    }
    world
}

fn write_all(world: &mut World) {
    for page in 0..world.plan.pages {
        if let Some(node) = world.owner_of(0) {
            world.ask(node, 0, page, 9);
        }
    }
}

fn assert_nothing_lost(seed: u64, world: &mut World) {
    for page in world.oracle.pages_of(0) {
        if let Some(node) = world.owner_of(0) {
            world.ask(node, 0, page, 0);
            world.run_until_quiet();
        }
    }
    let lost = world.oracle.lost;
    assert!(world.violation.is_none() && lost == 0, "RMAP_SIM_SEED={seed}: {:?}, {lost} lost", world.violation);
}

/// Two copies and one server killed at a time when both are in sync: nothing is lost.
#[test]
fn one_of_two_copies_is_enough() {
    for seed in seeds(SEEDS / 5) {
        let (mut world, mut rng) = in_sync(seed);
        world.kill(rng.below(3));
        assert_nothing_lost(seed, &mut world);
    }
}

/// One server pauses and another is killed, before either of them is given up: nothing is lost, whichever is given up first.
#[test]
fn a_pause_is_no_death() {
    for seed in seeds(SEEDS / 5) {
        let (mut world, mut rng) = in_sync(seed);
        let paused = rng.below(3);
        let killed = (paused + 1 + rng.below(2)) % 3;
        let pause_first = rng.per_mille(500);
        for step in 0..2 {
            if pause_first == (step == 0) {
                world.nodes[paused].paused_until_ns = world.now_ns + 1_000_000 * rng.within(60, 300) as u64;
            } else {
                world.kill(killed);
            }
            write_all(&mut world);
            world.run_for(1_000 * rng.within(0, 20_000) as u64);
        }
        world.run_until_quiet();
        assert_nothing_lost(seed, &mut world);
    }
}

/// A host dies. Somebody goes on reading, or nobody would see to the copies.
fn kill_host(world: &mut World, rng: &mut Rng) {
    world.kill(rng.within(world.plan.servers, world.nodes.len() - 1));
    while world.owner_of(0).is_none() {
        world.hand_over(0);
    }
}

/// A sealed space outlives its servers and its readers, one at a time: whoever reads it sees to its copies.
#[test]
fn readers_keep_what_is_sealed() {
    let mut kept = 0;
    for seed in seeds(SEEDS / 10) {
        let (mut world, mut rng) = in_sync(seed);
        world.seal(0);
        assert!(world.sealed.contains_key(&0), "RMAP_SIM_SEED={seed}: nothing is under way");
        for _ in 0..3 {
            world.kill(rng.below(3));
            if rng.per_mille(300) {
                kill_host(&mut world, &mut rng);
            }
            // For the copy to be missed, for nobody to make a new one, and for a reader to do it: then the next may go.
            world.run_for(3_000_000_000);
        }
        world.run_until_quiet();
        assert_nothing_lost(seed, &mut world);
        kept += clients(&world).map(|stats| stats.spaces_kept).sum::<u64>();
    }
    assert!(kept > 0);
}

/// An oracle that never complains is worth nothing: each of these mistakes has to be found.
#[test]
fn mistakes_are_noticed() {
    let server = |fault| Sabotage { server: Some(fault), ..Sabotage::default() };
    let client = |fault| Sabotage { client: Some(fault), ..Sabotage::default() };
    let both = |fault, client| Sabotage { client: Some(client), ..server(fault) };
    for sabotage in [
        server(Fault::NoFence),
        server(Fault::NoVersions),
        server(Fault::LosesWrites),
        client(ClientFault::AcksEarly),
        client(ClientFault::OpensUnreconciled),
        client(ClientFault::JoinsEmpty),
        // Neither shows alone: only what the target has counts.
        both(Fault::CopiesHalf, ClientFault::TrustsSources),
        // Nor these: the client takes no version that it does not expect, and no server in another life.
        both(Fault::ZerosForUnknown, ClientFault::TrustsServers),
        Sabotage { seals_early: true, ..Sabotage::default() },
    ] {
        let found =
            (0..SABOTAGED_SEEDS).find_map(|seed| run(seed, None, None, sabotage).violation.map(|what| (seed, what)));
        let (seed, what) = found.unwrap_or_else(|| panic!("{sabotage:?} is not noticed"));
        eprintln!("{sabotage:?}: seed {seed}: {what}");
    }
}

/// Servers that are asked to copy slabs to each other, and do it badly, do no harm.
#[test]
fn sources_that_lie_are_of_no_use() {
    let (mut transferred, mut refused) = (0, 0);
    // A keeper that had begun parity in an earlier term ended with a panic.
    let again = number("RMAP_SIM_SEED").is_none().then_some(2717);
    for fault in [Fault::CopiesHalf, Fault::MakesUpVersions] {
        for seed in seeds(SEEDS / 10).chain(again) {
            let world = run(seed, None, None, Sabotage { server: Some(fault), ..Sabotage::default() });
            assert!(world.violation.is_none(), "{fault:?}, RMAP_SIM_SEED={seed}: {:?}", world.violation);
            transferred += clients(&world).map(|stats| stats.slabs_transferred).sum::<u64>();
            refused += clients(&world).map(|stats| stats.transfers_refused).sum::<u64>();
        }
    }
    assert!(number("RMAP_SIM_SEED").is_some() || (transferred > 0 && refused > 0), "{transferred}, {refused}");
}

/// Servers that say once to each reader that they do not know it, and have what is asked for: nothing is lost, and nothing waits for
/// ever.
#[test]
fn a_server_that_does_not_know_a_reader_loses_nothing() {
    let mut reported = 0;
    for seed in seeds(SEEDS / 5) {
        let (mut world, mut rng) = in_sync(seed);
        world.seal(0);
        assert!(world.sealed.contains_key(&0), "RMAP_SIM_SEED={seed}: nothing is under way");
        for node in &mut world.nodes {
            if let Program::Server(workers) = &mut node.program {
                workers[0].inject(Some(Fault::ForgetsOwners));
            }
        }
        for _ in 0..2 {
            kill_host(&mut world, &mut rng);
            world.run_until_quiet();
        }
        assert_nothing_lost(seed, &mut world);
        let bad: u64 = clients(&world).map(|stats| stats.bad_pages + stats.scrub_bad + stats.copies_left).sum();
        assert_eq!(bad, 0, "RMAP_SIM_SEED={seed}");
        reported += clients(&world).map(|stats| stats.notified_again).sum::<u64>();
    }
    eprintln!("{reported} times told again");
    assert!(number("RMAP_SIM_SEED").is_some() || reported > 0);
}

/// The same seed does the same, or a failure could not be replayed.
#[test]
fn runs_are_reproducible() {
    for seed in [1, 2, 3] {
        let one = run(seed, None, None, Sabotage::default());
        let other = run(seed, None, None, Sabotage::default());
        let sum = |world: &World| (world.now_ns, world.network.delivered, world.oracle.verified, world.oracle.acked);
        assert_eq!(sum(&one), sum(&other), "seed {seed}");
    }
}
