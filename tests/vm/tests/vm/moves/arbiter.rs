//! etcd decides about a VM whose link is cut in the moment of the grant: one host runs it within ten seconds, and the link stays cut.
//!
//! The guest's own word counts: it works with its disk and its memory while the link is cut, at the host that was named. A second one
//! that ran would have written to the same disk.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::{MoveOutcome, MovePhase, MoveStatus};
use rustix::process::Signal;
use vm_tests::control::Control;
use vm_tests::{Lab, wait};

use super::faults::{Fault, HOW, Held, MOVED, Moment, Scene, UNDECIDED, pass};
use super::moving::{begin, end, move_of, settled};
use super::network::Way;
use super::{GIVEN_UP, etcd};

/// The promise of `docs/move-failures.md`: etcd decides within this time.
const DECIDES_WITHIN: Duration = Duration::from_secs(10);
/// A source asks for the VM 5 s after its grant.
const PAST_TAKE_BACK: Duration = Duration::from_secs(7);
/// Nobody has a reason to run it by then, were it to.
const LONG_ENOUGH: Duration = Duration::from_secs(12);

/// A move that was held at a moment, whose link is cut, and that goes on now.
struct Cut {
    moving: Child,
    since: Instant,
    there: Option<Control>,
}

fn run(name: &str, test: impl FnOnce(&mut Scene) -> Result<()>) -> Result<()> {
    let _alone = etcd::alone();
    Lab::run(name, 1, |lab| {
        let mut scene = Scene::start_with_etcd(lab)?;
        test(&mut scene)?;
        scene.end()
    })
}

/// Begins a move, cuts the link when it is there, and does something else before it goes on.
fn cut_at(scene: &mut Scene, moment: Moment, way: Way, meanwhile: impl FnOnce(&Scene) -> Result<()>) -> Result<Cut> {
    scene.begin_work(moment, Fault::Late(Duration::ZERO))?;
    let (from, to) = (scene.host(scene.at), scene.host(1 - scene.at));
    let moving = begin(from, to, &HOW)?;
    let (held, there): (Held<'_>, _) = match scene.reach(moment) {
        Ok(reached) => reached,
        Err(error) => {
            let said = end(moving, &[MOVED]).unwrap_or_else(|error| format!("{error:#}"));
            return Err(error.context(said));
        }
    };
    let shown = move_of(from).context("nothing is known of it")?;
    ensure!(shown.arbiter.as_ref().is_some_and(|arbiter| arbiter.decides), "{shown:?}");
    scene.hosts.network.cut(way)?;
    meanwhile(scene)?;
    drop(held);
    Ok(Cut { moving, since: Instant::now(), there })
}

/// The host that runs it, as both say. None so far: neither does.
fn runs_at(scene: &Scene) -> Result<Option<usize>> {
    let came_back = |of: MoveStatus| of.outcome == MoveOutcome::CameBack;
    let source = move_of(scene.host(scene.at)).is_some_and(came_back);
    let destination = move_of(scene.host(1 - scene.at)).is_some_and(|of| of.phase == MovePhase::Settling);
    ensure!(!(source && destination), "both hosts say that it runs there");
    Ok(if source { Some(scene.at) } else { destination.then_some(1 - scene.at) })
}

/// While the link is cut: which host runs it. Its guest works there and is right.
fn decided(scene: &mut Scene, cut: &mut Cut) -> Result<usize> {
    let at = wait::until("a host runs it", wait::HANG, || runs_at(scene))?;
    let took = cut.since.elapsed();
    println!("{} runs it {took:?} after the cut", scene.host(at).name);
    ensure!(took <= DECIDES_WITHIN, "it took {took:?}");
    let has_moved = at != scene.at;
    scene.finish_work(at, cut.there.take().filter(|_| has_moved)).context("while the link is cut")?;
    Ok(at)
}

/// The link is back, and exactly one host has it, the same as before.
fn heals(scene: &Scene, cut: Cut, way: Way, at: usize) -> Result<()> {
    scene.hosts.network.heal(way)?;
    let found = settled(&scene.hosts)?;
    ensure!(found.index == at, "it is on {}", found.name);
    println!("{}", end(cut.moving, &[MOVED, GIVEN_UP, UNDECIDED])?);
    scene.host(1 - at).ensure_nothing_left()?;
    ensure!(scene.hosts.qemus().len() == 1, "{:?}", scene.hosts.qemus());
    scene.hosts.wait_connected()
}

/// The grant does not arrive: its source takes the VM back. The destination learns it from the arbiter, or when the link is back.
#[test]
fn the_source_takes_back_what_was_granted_and_did_not_arrive() -> Result<()> {
    run("an arbiter gives a VM back", |scene| {
        for way in [Way::Both, Way::From(scene.at)] {
            let home = scene.at;
            let mut cut = cut_at(scene, Moment::Noting, way, |_| Ok(()))?;
            ensure!(decided(scene, &mut cut)? == home, "it has moved");
            heals(scene, cut, way, home)?;
        }
        // And it moves when nothing is cut.
        Ok(())
    })
}

/// The grant has arrived, and its answer does not: the destination runs the VM, and its source does not.
#[test]
fn the_destination_has_what_was_granted_and_arrived() -> Result<()> {
    run("an arbiter lets a VM go", |scene| {
        let (home, mut registers) = (scene.at, 0);
        let mut cut = cut_at(scene, Moment::Accepting, Way::Both, |_| Ok(()))?;
        ensure!(decided(scene, &mut cut)? == 1 - home, "it has stayed");
        // Its source would ask by now. It hears whose the VM is, and says so.
        let from = scene.host(home);
        pass(PAST_TAKE_BACK)?;
        let status = move_of(from).context("the move is known")?;
        let says = status.arbiter.as_ref().map(|arbiter| arbiter.says.clone()).unwrap_or_default();
        ensure!(status.phase == MovePhase::Granted && says.contains("names host2"), "{status:?}");
        registers += scene.etcd()?.keys("moves/")?.len();
        ensure!(registers == 1, "{registers}");
        heals(scene, cut, Way::Both, 1 - home)?;
        let etcd = scene.etcd()?;
        wait::until("no register is left", wait::HANG, || Ok(etcd.keys("moves/")?.is_empty().then_some(())))
    })
}

/// Two failures: nobody can decide, so nobody runs it. With both back, one does.
#[test]
fn nobody_runs_it_if_etcd_is_gone_too_and_one_does_afterwards() -> Result<()> {
    run("an arbiter is away when the link is cut", |scene| {
        let home = scene.at;
        let stop = |scene: &Scene| scene.etcd()?.signal(Signal::STOP);
        let mut cut = cut_at(scene, Moment::Noting, Way::Both, stop)?;
        pass(LONG_ENOUGH)?;
        ensure!(runs_at(scene)?.is_none(), "it runs, and nobody has decided");
        // The link alone does not bring it back: the source may have been named, as far as the destination knows.
        scene.etcd()?.signal(Signal::CONT)?;
        cut.since = Instant::now();
        let at = decided(scene, &mut cut)?;
        ensure!(at == home, "it has moved without a grant");
        heals(scene, cut, Way::Both, at)
    })
}

/// The source's daemon dies when it has asked, and does not know what came of that.
#[test]
fn a_source_that_has_asked_is_killed() -> Result<()> {
    run("a source that has asked its arbiter is killed", |scene| {
        let home = scene.at;
        let stop = |scene: &Scene| scene.etcd()?.signal(Signal::STOP);
        let mut cut = cut_at(scene, Moment::Noting, Way::Both, stop)?;
        pass(PAST_TAKE_BACK)?;
        let from = scene.host(home);
        from.daemon.kill9()?;
        scene.etcd()?.signal(Signal::CONT)?;
        from.daemon.start_again()?;
        cut.since = Instant::now();
        let at = decided(scene, &mut cut)?;
        ensure!(at == home, "it has moved without a grant");
        heals(scene, cut, Way::Both, at)
    })
}

/// The destination's daemon dies between its note and the arbiter's word.
#[test]
fn a_destination_that_asks_is_killed() -> Result<()> {
    run("a destination that asks its arbiter is killed", |scene| {
        let home = scene.at;
        let stop = |scene: &Scene| scene.etcd()?.signal(Signal::STOP);
        let mut cut = cut_at(scene, Moment::Accepting, Way::Both, stop)?;
        let to = scene.host(1 - home);
        pass(Duration::from_secs(2))?;
        to.daemon.kill9()?;
        scene.etcd()?.signal(Signal::CONT)?;
        to.daemon.start_again()?;
        cut.since = Instant::now();
        // Either host may have been the first at the arbiter.
        let at = decided(scene, &mut cut)?;
        heals(scene, cut, Way::Both, at)
    })
}
