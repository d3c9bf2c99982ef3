//! A server that lists pages with content as trimmed. No seal shows that this is a lie, because a trim has none.

use rmap::client::Fault as ClientFault;
use rmap::server::Fault;

use crate::node::Program;
use crate::world::Sabotage;
use crate::{SEEDS, in_sync_with, kill_host, seeds};

/// One of three servers lies, and the space changes hands. What was read that must not be; errors are right where the space is
/// sealed. Also how many there were. Who takes the space over asks for what it copies, so there the server keeps to what it has said.
fn lied_to(seed: u64, sabotage: Sabotage) -> (Option<String>, u64) {
    let (mut world, mut rng) = in_sync_with(seed, sabotage);
    let is_sealed = seed.is_multiple_of(2);
    if is_sealed {
        world.seal(0);
        assert!(world.sealed.contains_key(&0), "RMAP_SIM_SEED={seed}: nothing is under way");
    }
    if let Program::Server(workers) = &mut world.nodes[rng.below(3)].program {
        workers[0].inject(Some(if is_sealed { Fault::MakesUpTrims } else { Fault::KeepsToTrims }));
    }
    let mut errors = 0;
    for _ in 0..2 {
        kill_host(&mut world, &mut rng);
        world.run_until_quiet();
        for page in world.oracle.pages_of(0) {
            if let Some(node) = world.owner_of(0) {
                world.ask(node, 0, page, 0);
                world.run_until_quiet();
            }
            match world.violation.take() {
                Some(what) if is_sealed && what.ends_with("Corrupt") => errors += 1,
                Some(what) => return (Some(what), errors),
                None => {}
            }
        }
    }
    let lost = world.oracle.lost;
    ((lost > 0).then(|| format!("{lost} lost")), errors)
}

/// Where the space is sealed that is an error, and otherwise the next owner keeps what was written.
#[test]
fn a_trim_that_nobody_made_is_never_zeros() {
    let mut errors = 0;
    for seed in seeds(SEEDS / 10) {
        let (what, found) = lied_to(seed, Sabotage::default());
        assert!(what.is_none(), "RMAP_SIM_SEED={seed}: {what:?}");
        errors += found;
    }
    eprintln!("{errors} pages were an error");
    assert!(crate::number("RMAP_SIM_SEED").is_some() || errors > 0);
}

/// Both by who takes a space over and by who reads a sealed one.
#[test]
fn who_believes_in_trims_is_noticed() {
    let sabotage = Sabotage { client: Some(ClientFault::BelievesTrims), ..Sabotage::default() };
    for parity in 0..2 {
        let found = (0..40).filter(|seed| seed % 2 == parity).find_map(|seed| lied_to(seed, sabotage).0);
        eprintln!("{}", found.unwrap_or_else(|| panic!("not noticed: {parity}")));
    }
}
