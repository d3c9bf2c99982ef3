//! Hosts that do not wait for servers that are silent: what they are told is an error, nothing is lost, and a write that failed lands
//! before any later one to its page or not at all.

use std::time::Duration;

use rmap::units::PageNo;

use super::*;
use crate::node::{Ask, Asked};

/// After a server is found silent. Most cuts and pauses are shorter, some are longer.
const ERROR_AFTER: Duration = Duration::from_millis(10);
/// How many seeds a run takes unless it is told another number.
const SILENT_SEEDS: u64 = SEEDS / 4;

fn impatient(seed: u64) -> Plan {
    Plan { error_after: Some(ERROR_AFTER), ..Plan::any(&mut Rng::new(seed)) }
}

#[test]
fn silence_loses_nothing() {
    let (mut failed, mut unanswered, mut unmapped, mut verified) = (0, [0; 2], 0, 0);
    for seed in seeds(SILENT_SEEDS) {
        let world = run(seed, Some(impatient(seed)), None, Sabotage::default());
        if let Some(what) = &world.violation {
            failed += 1;
            eprintln!("{what}\nreplay: RMAP_SIM_SEED={seed} cargo test --profile ci -p rmap --test sim silence_loses");
            assert!(failed < 5, "enough");
        }
        verified += world.oracle.verified;
        (0..2).for_each(|kind| unanswered[kind] += world.unanswered[kind]);
        unmapped += clients(&world).map(|stats| stats.unmapped).sum::<u64>();
    }
    eprintln!(
        "{verified} reads verified, {} reads and {} writes unanswered, {unmapped} for want of the control plane's answer",
        unanswered[0], unanswered[1]
    );
    assert_eq!(failed, 0);
    let rare = [&unanswered[..], &[unmapped]].concat();
    assert!(number("RMAP_SIM_SEED").is_some() || rare.iter().all(|count| *count > 0), "{rare:?}");
}

/// Nobody dies; all servers are silent together, for longer than any host waits, again and again.
#[test]
fn a_network_that_is_away_loses_nothing() {
    let mut unanswered = [0; 2];
    for seed in seeds(SILENT_SEEDS / 2) {
        let plan = Plan { kills: 0, seals: 0, steps: 300, ..impatient(seed) };
        let mut world = written(seed, plan, Sabotage::default());
        world.all_heard = false;
        let mut rng = Rng::new(seed);
        for _ in 0..3 {
            for server in 0..world.plan.servers {
                world.nodes[server].paused_until_ns = world.now_ns + 1_000_000 * rng.within(60, 300) as u64;
            }
            // Before that is noticed, while nobody answers, and when some do again.
            for _ in 0..4 {
                let pages: Vec<(u64, usize)> = (0..world.plan.pages).map(|page| (page, rng.within(0, 9))).collect();
                let owner = world.owner_of(0);
                owner
                    .into_iter()
                    .for_each(|node| pages.iter().for_each(|(page, kind)| world.ask(node, 0, *page, *kind)));
                world.run_for(1_000_000 * rng.within(1, 120) as u64);
            }
        }
        world.rest();
        assert!(world.violation.is_none(), "RMAP_SIM_SEED={seed}: {:?}", world.violation);
        let lost: u64 = clients(&world).map(|stats| stats.slabs_lost).sum();
        assert_eq!((lost, world.oracle.lost), (0, 0), "RMAP_SIM_SEED={seed}");
        (0..2).for_each(|kind| unanswered[kind] += world.unanswered[kind]);
    }
    eprintln!("{} reads and {} writes unanswered", unanswered[0], unanswered[1]);
    assert!(number("RMAP_SIM_SEED").is_some() || unanswered.iter().all(|count| *count > 0), "{unanswered:?}");
}

/// The mistake that all of this is about has to be found.
#[test]
fn a_write_that_is_forgotten_is_noticed() {
    let sabotage = Sabotage { client: Some(ClientFault::ForgetsUnanswered), ..Sabotage::default() };
    let what = (0..SABOTAGED_SEEDS).find_map(|seed| run(seed, Some(impatient(seed)), None, sabotage).violation);
    eprintln!("{}", what.expect("it is not noticed"));
}

/// So has an owner of the past that says of a hole that it was trimmed, though there may be something by now.
#[test]
fn a_trim_by_an_owner_of_the_past_is_noticed() {
    let sabotage = Sabotage { client: Some(ClientFault::TrustsItself), ..Sabotage::default() };
    let what = (0..SABOTAGED_SEEDS).find_map(|seed| run(seed, Some(impatient(seed)), None, sabotage).violation);
    eprintln!("{}", what.expect("it is not noticed"));
}

impl World {
    /// What is a hole, and is not being written, is trimmed without any server being asked: so disks do. `false` if this is none.
    pub fn trims_nothing(&mut self, node: usize, space: u64, page: u64) -> bool {
        let now = self.nodes[node].local(self.now_ns);
        let Program::Host(host) = &mut self.nodes[node].program else { return false };
        let Some(&(reference, generation)) = host.owns.get(&space) else { return false };
        let writes = |ask: &Ask| (ask.space, ask.page) == (space, page) && matches!(ask.asked, Asked::Write(_));
        let is_held = host.asks.values().any(writes);
        let hole = host.client.page_run(reference, PageNo(page), 1).hole;
        if self.plan.error_after.is_none() || is_held || !hole {
            return false;
        }
        host.tokens += 1;
        let token = host.tokens;
        let nth = self.oracle.trim_hole(space, page, generation);
        let asked = Asked::Write(nth);
        // There is always a place for one: no host has so many operations under way.
        host.client.confirm(now, reference, token).expect("it may ask");
        let since_ns = self.now_ns;
        host.asks.insert(token, Ask { space, page, generation, asked, reads_sealed: false, since_ns });
        self.say(|| format!("{node} {space}/{page} {asked:?} begins, as a hole"));
        self.pump(node);
        true
    }
}
