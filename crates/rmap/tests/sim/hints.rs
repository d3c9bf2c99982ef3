//! Hosts that are told all kinds of things about where servers are: no page gets lost or mistaken by it.

use rmap::client::Hint;
use rmap::units::{BootEpoch, ServerId};

use super::*;
use crate::node::address;

/// How many seeds a run takes unless it is told another number.
const HINTED_SEEDS: u64 = SEEDS / 4;
/// Happenings from hint to hint.
const EVERY: usize = 40;

/// A server is said to be where another node is, or itself; in a life that may be its own.
fn mislead(world: &mut World, rng: &mut Rng) {
    let (servers, nodes) = (world.plan.servers, world.nodes.len());
    let (server, host, node) = (rng.below(servers), rng.within(servers, nodes - 1), rng.below(nodes));
    let epoch = match &world.nodes[server].program {
        Program::Server(workers) if rng.per_mille(500) => workers[0].epoch(),
        _ => BootEpoch(rng.next()),
    };
    let now = world.nodes[host].local(world.now_ns);
    let is_paused = world.nodes[host].paused_until_ns > world.now_ns;
    if let Program::Host(program) = &mut world.nodes[host].program
        && !is_paused
    {
        assert!(program.client.hint(now, &Hint { server: ServerId(server as u32), addr: address(node), epoch }));
        world.pump(host);
    }
}

#[test]
fn hints_mislead_nobody() {
    let (mut failed, mut verified) = (0, 0);
    for seed in seeds(HINTED_SEEDS) {
        let trace = std::env::var_os("RMAP_SIM_TRACE").is_some();
        let mut world = World::new(seed, None, None, Sabotage::default(), trace);
        let mut rng = Rng::new(seed);
        for step in 0..world.plan.steps * 20 {
            if world.violation.is_some() || !world.step() {
                break;
            }
            if step % EVERY == 0 {
                mislead(&mut world, &mut rng);
            }
        }
        if world.violation.is_none() {
            world.rest();
        }
        if let Some(what) = &world.violation {
            failed += 1;
            eprintln!("{what}\nreplay: RMAP_SIM_SEED={seed} cargo test --profile ci -p rmap --test sim hints_mislead");
            assert!(failed < 5, "enough");
        }
        verified += world.oracle.verified;
    }
    assert_eq!(failed, 0);
    assert!(number("RMAP_SIM_SEED").is_some() || verified > 0);
}
