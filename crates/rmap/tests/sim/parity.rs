//! Sealed spaces with parity instead of second copies.

use rmap::client::{Fault as ClientFault, ParityView};
use rmap::server::Fault;

use crate::node::Program;
use crate::rng::Rng;
use crate::world::{Plan, Sabotage, World};
use crate::{SEEDS, assert_nothing_lost, clients, kill_host, seeds, written};

/// For what is missing to be missed, for nobody to see to it, and for a reader to do it: then the next server may go.
const REPAIR_NS: u64 = 1_500_000_000;

/// A sealed space, written all over, at six or seven servers, one of whose readers was asked for parity.
fn shared(seed: u64, sabotage: Sabotage) -> (World, Rng) {
    let mut rng = Rng::new(seed);
    let plan = Plan::any(&mut rng).with_parity(&mut rng);
    // Room for two copies of each slab, for parity and for what moves.
    let pages = rng.within(2, 64) as u64;
    let plan = Plan { copies: 2, servers: rng.within(6, 7), spaces: 1, pages, overflow_disk: false, ..plan };
    // Who makes parity has no other place for the list of versions.
    let plan = Plan { elsewhere: false, ..plan };
    let plan = Plan { kills: 0, hand_overs: 0, seals: 0, parity: 0, steps: 300, ..plan };
    let mut world = written(seed, plan, sabotage);
    world.seal(0);
    world.make_parity(0);
    world.run_for(REPAIR_NS);
    world.run_until_quiet();
    (world, rng)
}

/// As the readers see it.
fn views(world: &World) -> Vec<ParityView> {
    let view = |program: &Program| match program {
        Program::Host(host) => host.owns.get(&0).map(|(space, _)| host.client.parity(*space)),
        _ => None,
    };
    world.nodes.iter().filter_map(|node| view(&node.program)).collect()
}

fn is_whole(world: &World) -> bool {
    views(world).iter().any(|view| view.groups > 0 && view.whole == view.groups)
}

/// Servers and readers go, one server at a time: nothing is lost, and one copy of each slab is enough for that.
#[test]
fn parity_outlives_its_servers() {
    let (mut degraded, mut whole, mut all) = (0, 0, 0);
    for seed in seeds(SEEDS / 5) {
        let (mut world, mut rng) = shared(seed, Sabotage::default());
        assert!(world.sealed.contains_key(&0), "RMAP_SIM_SEED={seed}: nothing is under way");
        whole += usize::from(is_whole(&world));
        all += 1;
        for _ in 0..3 {
            let server = rng.below(world.plan.servers);
            world.kill(server);
            if rng.per_mille(300) {
                kill_host(&mut world, &mut rng);
            }
            // At once: not from a copy that somebody makes.
            if let Some(reader) = world.owner_of(0) {
                (0..world.plan.pages).for_each(|page| world.ask(reader, 0, page, 0));
            }
            world.run_for(REPAIR_NS);
        }
        world.run_until_quiet();
        assert_nothing_lost(seed, &mut world);
        degraded += clients(&world).map(|stats| stats.degraded).sum::<u64>();
    }
    eprintln!("{degraded} pages put together, {whole} of {all} spaces whole");
    // Where there was no room some keep their second copies.
    assert!(all == 1 || (degraded > 0 && whole * 10 > all * 9), "{degraded}, {whole} of {all}");
}

/// A server whose pages are all damaged: what it has is put together from the others, and never believed.
#[test]
fn a_server_that_flips_bits_harms_no_reader() {
    let mut degraded = 0;
    for seed in seeds(SEEDS / 10) {
        let (mut world, mut rng) = shared(seed, Sabotage::default());
        let liar = rng.below(world.plan.servers);
        if let Program::Server(workers) = &mut world.nodes[liar].program {
            workers[0].inject(Some(Fault::FlipsBits));
        }
        if !is_whole(&world) {
            continue;
        }
        assert_nothing_lost(seed, &mut world);
        degraded += clients(&world).map(|stats| stats.degraded).sum::<u64>();
    }
    assert!(degraded > 0 || seeds(2).end != 2);
}

/// Mistakes of who makes parity or reads by it are noticed, and end in errors: no page is ever wrong.
#[test]
fn mistakes_in_parity_are_errors() {
    for fault in [ClientFault::ParityEarly, ClientFault::LeavesMembersOut] {
        let mut noticed = 0;
        for seed in seeds(SEEDS / 100) {
            let (mut world, mut rng) = shared(seed, Sabotage { client: Some(fault), ..Sabotage::default() });
            let server = rng.below(world.plan.servers);
            world.kill(server);
            if let Some(reader) = world.owner_of(0) {
                (0..world.plan.pages).for_each(|page| world.ask(reader, 0, page, 0));
            }
            world.run_for(REPAIR_NS);
            for page in world.oracle.pages_of(0) {
                if let Some(node) = world.owner_of(0) {
                    world.ask(node, 0, page, 0);
                    world.run_until_quiet();
                }
            }
            let what = world.violation.take().unwrap_or_default();
            assert!(!what.contains("read"), "{fault:?}, RMAP_SIM_SEED={seed}: {what}");
            noticed += u32::from(what.contains("Corrupt"));
        }
        assert!(noticed > 0, "{fault:?} is not noticed");
    }
}
