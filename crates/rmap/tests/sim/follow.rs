//! Hosts that read what others write, while all kinds of things go wrong: what was acknowledged before a read began is what it
//! returns, or something newer.

use rmap::client::{Failure, SpaceSpec};
use rmap::control::{ControlReply, ControlRequest};
use rmap::crypto::KEY_SIZE;
use rmap::units::{Class, Page, PageNo, SpaceId};

use super::*;
use crate::node::{Ask, Asked};
use crate::oracle::Begun;

/// How many seeds a run takes unless it is told another number.
const FOLLOWED_SEEDS: u64 = SEEDS / 2;
/// Beyond these: a reader that was paused took a slab for lost that had been given back.
const FOUND_FOLLOWED: [u64; 1] = [717];
/// Happenings from read to read.
const EVERY: usize = 6;
/// For so long, whatever the host's clock, a reader waits for what it has read before.
const SEEN_PATIENCE_NS: u64 = 800_000_000;
/// Reads of one host at a time.
const READS_MAX: usize = 8;

impl World {
    /// A host reads a page of a space, whoever owns that.
    fn follow(&mut self, node: usize, space: u64, page: u64) {
        let now = self.nodes[node].local(self.now_ns);
        let spec = SpaceSpec {
            id: SpaceId(space),
            pages: self.plan.pages,
            copies: self.plan.copies,
            reserve: 0,
            key: [7; KEY_SIZE],
        };
        let ControlReply::Seen(today) = self.registry.answer(&ControlRequest::Look { space: spec.id }) else { return };
        let Program::Host(host) = &mut self.nodes[node].program else { return };
        let Host { client, follows, .. } = &mut **host;
        let reference =
            *follows.entry(space).or_insert_with(|| client.attach_reader(&spec, &today).expect("the limits are kept"));
        host.tokens += 1;
        let token = host.tokens;
        let begun = self.oracle.begin_follow(space, page);
        if host.client.read(now, reference, PageNo(page), Class::Demand, token).is_ok() {
            let asked = Asked::Follow(begun);
            let ask = Ask { space, page, generation: 0, asked, reads_sealed: false, since_ns: self.now_ns };
            host.asks.insert(token, ask);
        }
        self.pump(node);
    }

    /// Whether that was right.
    pub fn judge_followed(
        &mut self,
        node: usize,
        Ask { space, page, since_ns, .. }: Ask,
        begun: Begun,
        result: Result<(), Failure>,
        got: &Page,
    ) -> Result<(), String> {
        match result {
            Ok(()) => {}
            Err(Failure::Lost) if self.kills > 0 => return Ok(()),
            Err(Failure::Silent) if self.plan.error_after.is_some() && !self.all_heard => return Ok(()),
            Err(failure) => return Err(format!("a read of what another host writes: {failure:?}")),
        }
        let nth = self.oracle.end_follow(space, page, begun, got)?;
        let Program::Host(host) = &mut self.nodes[node].program else { return Ok(()) };
        if let Some(nth) = nth {
            let before = host.followed.insert((space, page), nth);
            // The owner of today undoes nothing.
            let kept = before.filter(|before| before.0 == self.registry.generation(SpaceId(space)));
            // Nor does a reader take anything older without waiting for it.
            let is_early = self.now_ns - since_ns < SEEN_PATIENCE_NS;
            if kept.is_some_and(|before| nth < before) && is_early {
                return Err(format!("a host read {nth:?} after {before:?}"));
            }
        }
        Ok(())
    }
}

fn run_followed(seed: u64, plan: Option<Plan>, sabotage: Sabotage) -> World {
    let trace = std::env::var_os("RMAP_SIM_TRACE").is_some();
    let mut world = World::new(seed, plan, None, sabotage, trace);
    let mut rng = Rng::new(seed);
    let (servers, hosts) = (world.plan.servers, world.plan.hosts);
    for step in 0..world.plan.steps * 20 {
        if world.violation.is_some() || !world.step() {
            break;
        }
        if step % EVERY == 0 {
            let node = rng.within(servers, servers + hosts - 1);
            let (space, page) = (rng.below(world.plan.spaces) as u64, rng.below(world.plan.pages as usize) as u64);
            let can = matches!(&world.nodes[node].program, Program::Host(host) if host.asks.len() < READS_MAX);
            if can && world.nodes[node].paused_until_ns <= world.now_ns {
                world.follow(node, space, page);
            }
        }
    }
    // Readers wait for somebody to see to what has no copy.
    for space in 0..world.plan.spaces as u64 {
        while world.violation.is_none() && !world.has_owner(space) && world.step() {
            world.hand_over(space);
        }
    }
    if world.violation.is_none() {
        world.rest();
    }
    // Now nothing is under way: there is one right answer.
    for space in 0..world.plan.spaces as u64 {
        for page in world.oracle.pages_of(space) {
            for node in servers..servers + hosts {
                if world.violation.is_none() {
                    world.follow(node, space, page);
                }
            }
            world.run_until_quiet();
        }
    }
    world
}

#[test]
fn readers_see_what_was_acknowledged() {
    let (mut failed, mut verified, mut sealed) = (0, 0, 0);
    let again = if number("RMAP_SIM_SEED").is_none() { &FOUND_FOLLOWED[..] } else { &[] };
    for seed in seeds(FOLLOWED_SEEDS).chain(again.iter().copied()) {
        let mut rng = Rng::new(seed);
        // Every other run with errors where nobody answers.
        let error_after = (seed % 2 == 1).then_some(std::time::Duration::from_millis(200));
        let plan = Plan { error_after, ..Plan::any(&mut rng) };
        let world = run_followed(seed, Some(plan), Sabotage::default());
        if let Some(what) = &world.violation {
            failed += 1;
            eprintln!("{what}\nreplay: RMAP_SIM_SEED={seed} cargo test --profile ci -p rmap --test sim readers_see");
            assert!(failed < 5, "enough");
        }
        let bad: u64 = clients(&world).map(|stats| stats.bad_pages).sum();
        assert_eq!(bad, 0, "RMAP_SIM_SEED={seed}");
        verified += world.oracle.verified;
        sealed += world.sealed.len();
    }
    assert_eq!(failed, 0);
    assert!(number("RMAP_SIM_SEED").is_some() || (verified > 0 && sealed > 0));
}

/// Without a look at the map, readers see what is old.
#[test]
fn readers_that_do_not_look_are_noticed() {
    let sabotage = Sabotage { client: Some(ClientFault::FollowsOldMaps), ..Sabotage::default() };
    let mut found =
        (0..SABOTAGED_SEEDS).filter_map(|seed| run_followed(seed, None, sabotage).violation.map(|what| (seed, what)));
    // One that is old, not only one that is not there.
    let old = found.find(|(_, what)| what.contains("zeros: false"));
    let (seed, what) = old.expect("it is not noticed");
    eprintln!("{sabotage:?}: seed {seed}: {what}");
}
