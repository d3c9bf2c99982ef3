//! Simulation of moves: two hosts whose daemons crash, a link that is cut, an arbiter that is away, and a guest that numbers what
//! it writes, under a virtual clock, judged by an oracle. No thread and no socket; every run follows from its seed.
//!
//! `PAGODA_MOVE_SIM_SEED=n cargo test --profile ci -p pagoda-move --test sim` replays one seed (with `PAGODA_MOVE_SIM_TRACE=1` it
//! tells all), `PAGODA_MOVE_SIM_SEEDS=10000` runs more of them.

mod daemon;
mod destination;
mod faults;
mod guest;
mod host;
mod link;
mod mistake;
mod oracle;
mod plan;
mod source;
mod traffic;
mod world;

use std::time::Duration;

use pagoda_core::chance::Chance;
use pagoda_move::note::{Decision, Note};
use pagoda_move::units::Moment;

use mistake::Mistake;
use plan::{Fault, MS, Phase, Plan};
use world::{Stats, World};

/// Runs of the main test by default.
const SEEDS: u64 = 1000;
/// Runs of each place of the matrix.
const MATRIX_SEEDS: u64 = 8;
/// Within so many runs a mistake is noticed.
const MISTAKE_SEEDS: u64 = 2000;
/// After all has healed and the link is there, exactly one host runs the VM within this time.
const RUNS_WITHIN: Duration = Duration::from_millis(1000);
/// A VM that is stopped for its last pages is not waiting for a grant. It runs within the time that a stop may take.
const STOP_WITHIN: Duration = Duration::from_millis(6000);
/// After that time a move that goes on for ever is cancelled, and has to be gone in as long again.
const SETTLES_WITHIN: Duration = Duration::from_secs(60);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    match number("PAGODA_MOVE_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PAGODA_MOVE_SIM_SEEDS").unwrap_or(default),
    }
}

fn run(plan: Plan, chance: Chance) -> World {
    let trace = std::env::var_os("PAGODA_MOVE_SIM_TRACE").is_some();
    if trace {
        eprintln!("{plan:#?}");
    }
    let chaos = plan.chaos;
    let mut world = World::new(plan, chance, trace);
    while world.violation.is_none() && world.step(Moment(chaos)) {}
    world.heal();
    wait_until_it_runs(&mut world);
    rest(&mut world);
    world
}

/// Exactly one, within the promised time after the hosts are connected.
fn wait_until_it_runs(world: &mut World) {
    while world.violation.is_none() && world.link.seen[0] != world.link.seen[1] && world.step(world.now + MS * 1000) {}
    let is_granted = (0..2).any(|host| world.is_between(host));
    let within = if is_granted { RUNS_WITHIN } else { STOP_WITHIN };
    let (began, deadline) = (world.now, world.now + within);
    while world.violation.is_none() && !world.is_running() && !world.is_dead() {
        if !world.step(deadline) {
            return world.note_violation(format!("nobody runs the VM {within:?} after all has healed"));
        }
    }
    if is_granted {
        world.stats.idle_ms_max = world.now.since(began).as_millis() as u64;
    }
}

/// What is under way ends, or is cancelled, and leaves nothing.
fn rest(world: &mut World) {
    for is_cancelled in [false, true] {
        if is_cancelled {
            world.cancel();
        }
        let deadline = world.now + SETTLES_WITHIN;
        while world.violation.is_none() && !world.is_settled() && world.step(deadline) {}
    }
    if world.violation.is_none() {
        world.check_rest();
    }
}

fn report(world: &World, totals: &mut Stats) {
    let stats = &world.stats;
    totals.moved += stats.moved;
    totals.given_up += stats.given_up;
    totals.came_back += stats.came_back;
    totals.crashed += stats.crashed;
    totals.freed += stats.freed;
    totals.faults += stats.faults;
    totals.crashes += stats.crashes;
    totals.checked += stats.checked;
    totals.strays += stats.strays;
    totals.slowed += stats.slowed;
    totals.idle_ms_max = totals.idle_ms_max.max(stats.idle_ms_max);
}

#[test]
fn exactly_one_runs_and_every_page_is_right() {
    let (mut totals, mut failed) = (Stats::default(), 0);
    for seed in seeds(SEEDS) {
        let mut chance = Chance::new(seed);
        let world = run(Plan::new(&mut chance), chance);
        report(&world, &mut totals);
        if let Some(what) = &world.violation {
            failed += 1;
            eprintln!("seed {seed}: {what}");
            assert!(failed < 5, "enough");
        }
    }
    eprintln!("{totals:?}");
    assert_eq!(failed, 0);
    let all =
        [totals.moved, totals.given_up, totals.came_back, totals.freed, totals.crashes, totals.strays, totals.slowed];
    assert!(number("PAGODA_MOVE_SIM_SEED").is_some() || all.iter().all(|count| *count > 0), "{totals:?}");
}

/// Each thing that can go wrong, at each step of a move.
#[test]
fn whatever_fails_at_whatever_step() {
    let (mut totals, mut failed) = (Stats::default(), 0);
    for (at, phase) in Phase::ALL.into_iter().enumerate() {
        for (index, fault) in Fault::ALL.into_iter().enumerate() {
            for seed in seeds(MATRIX_SEEDS) {
                let mut chance = Chance::new(seed << 16 | (at << 8 | index) as u64);
                let world = run(Plan::of_matrix(phase, fault, &mut chance), chance);
                report(&world, &mut totals);
                if let Some(what) = &world.violation {
                    failed += 1;
                    eprintln!("{phase:?}, {fault:?}, seed {seed}: {what}");
                    assert!(failed < 5, "enough");
                }
            }
        }
    }
    eprintln!("{totals:?}");
    assert_eq!(failed, 0);
}

#[test]
fn mistakes_are_noticed() {
    for mistake in Mistake::ALL {
        let noticed = (0..MISTAKE_SEEDS).find_map(|seed| {
            let mut chance = Chance::new(seed);
            let mut plan = Plan { mistake: Some(mistake), ..Plan::new(&mut chance) };
            plan.triggers.extend(mistake.trigger());
            if mistake == Mistake::RunsUnanswered {
                plan = plan.with_arbiter();
            }
            run(plan, chance).violation.filter(|what| mistake.shows(what)).map(|what| (seed, what))
        });
        let (seed, what) = noticed.unwrap_or_else(|| panic!("{mistake:?} is not noticed"));
        eprintln!("{mistake:?}: seed {seed}: {what}");
    }
}

/// The link is cut for good when the grant is sent. If the arbiter decides, exactly one runs within ten seconds all the same. It decides
/// unless it was silent for a second before the VM was stopped.
#[test]
fn an_arbiter_decides_while_the_link_is_cut() {
    let (mut runs, mut silent) = ([0; 2], 0);
    for seed in 0..200 {
        let mut chance = Chance::new(seed);
        let phase = [Phase::GrantSent, Phase::GrantHere, Phase::Note][seed as usize % 3];
        let mut plan = Plan::of_matrix(phase, Fault::CutBoth, &mut chance).with_arbiter();
        plan.chaos = MS * 100_000;
        let mut world = World::new(plan, chance, std::env::var_os("PAGODA_MOVE_SIM_TRACE").is_some());
        while world.violation.is_none() && !world.link.is_cut() && world.step(Moment(MS * 100_000)) {}
        world.never_heals = true;
        let deadline = world.now + Duration::from_secs(10);
        while world.violation.is_none() && world.step(deadline) {}
        assert_eq!(world.violation, None, "seed {seed}");
        if world.hosts.iter().any(|host| matches!(host.note, Some(Note::Given(_, Decision::Grant)))) {
            silent += 1;
            continue;
        }
        let runner = (0..2).find(|host| world.hosts[*host].is_running());
        runs[runner.unwrap_or_else(|| panic!("seed {seed}: nobody runs the VM"))] += 1;
    }
    assert!(runs.iter().all(|count| *count > 10) && silent < 20, "{runs:?} {silent}");
}
