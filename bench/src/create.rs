//! VMs with reserved swap are made while the memory policy makes rounds: how long does a round wait for the daemon's locks?
//!
//! A VM of 16 GiB whose swap is reserved needs 16 GiB allocated on the disk before it is there. The peer is the same daemon
//! while nothing is made: what a round waits for anyway. Each side has a daemon of its own, because the daemon gives the
//! longest wait since it started. Both sides are asked for a round as often as the policy makes them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{CreateVm, HostPatch, RoundWait, VmKind, VmSpec};
use testkit::daemon::Daemon;
use testkit::results::report::{Bar, Report};

use super::{Setup, svg};

const MEMORY: u64 = 16 << 30;
/// Made and removed in turn, in each round of the bench. Fewer are over before the policy has made enough rounds.
const VMS: usize = 20;
/// More often no round is made: the policy's shortest period is 100 ms.
const ASK_EVERY: Duration = Duration::from_millis(50);
/// Fewer rounds would say nothing of the longest.
const ROUNDS_MIN: u64 = 5;
/// The side that makes no VM waits at least so long.
const IDLE_MIN: Duration = Duration::from_secs(3);
const WAIT_MS_MAX: f64 = 5.0;

/// One side of one round of the bench.
#[derive(Debug)]
struct Side {
    wait: RoundWait,
    /// Of all that was done meanwhile.
    took: Duration,
    /// For one VM each.
    creations_ms: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// The disk has no room for a VM of 16 GiB; a daemon does not answer.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let (mut making, mut idle) = (Vec::new(), Vec::new());
    for round in 0..setup.rounds {
        eprintln!("create: round {}", round + 1);
        let side = measure(setup, make_vms)?;
        let time = side.took.max(IDLE_MIN);
        making.push(side);
        idle.push(measure(setup, |_| {
            std::thread::sleep(time);
            Ok(Vec::new())
        })?);
    }
    let mut report = setup.report("create");
    let longest = |sides: &[Side]| sides.iter().map(|side| side.wait.max_us / 1e3).collect::<Vec<f64>>();
    let (ours, peer) = (longest(&making), longest(&idle));
    let worst = ours.iter().copied().fold(0.0, f64::max);
    let name = "VMs of 16 GiB made with reserved swap";
    report.single(&format!("{name}: longest wait of a policy round"), "ms", &[worst], Bar::AtMost(WAIT_MS_MAX));
    let rounds = |sides: &[Side]| sides.iter().map(|side| side.wait.rounds).sum::<u64>();
    report.note(format!("{} rounds of the policy, {} without", rounds(&making), rounds(&idle)));
    report.pair(&format!("{name}, longest wait of a round: nothing made"), "ms", &ours, &peer, Bar::None);
    let creations: Vec<f64> = making.iter().flat_map(|side| side.creations_ms.iter().copied()).collect();
    report.single("one such VM: time until it is made", "ms", &creations, Bar::None);
    let groups = vec![
        ("VMs are made".to_owned(), vec![svg::Bar::of(&ours)]),
        ("nothing is made".to_owned(), vec![svg::Bar::of(&peer)]),
    ];
    let chart = svg::BarChart {
        title: "Longest wait of a policy round for the daemon's locks".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["wait".to_owned()],
        groups,
    };
    Ok((report, svg::bar_chart(&chart)))
}

/// Has a daemon make rounds as often as it does, while `work` goes on.
fn measure(setup: &Setup, work: impl FnOnce(&Daemon) -> Result<Vec<f64>>) -> Result<Side> {
    let daemon = Daemon::start(&setup.dir)?;
    let over = AtomicBool::new(false);
    let began = Instant::now();
    let creations_ms = std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask_for_rounds(&daemon, &over));
        let worked = work(&daemon);
        over.store(true, Ordering::Relaxed);
        match asking.join() {
            Ok(asked) => asked.and(worked),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    let took = began.elapsed();
    let wait = daemon.host()?.round_wait;
    ensure!(wait.rounds >= ROUNDS_MIN, "the policy made {} rounds in {:.1} s", wait.rounds, took.as_secs_f64());
    Ok(Side { wait, took, creations_ms })
}

/// Each change of the host's settings calls for a round; this one changes nothing.
fn ask_for_rounds(daemon: &Daemon, over: &AtomicBool) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        daemon.set_host(&HostPatch::default())?;
        std::thread::sleep(ASK_EVERY);
    }
    Ok(())
}

/// Gives the time that each took, in milliseconds.
fn make_vms(daemon: &Daemon) -> Result<Vec<f64>> {
    let client = daemon.client();
    let mut took = Vec::new();
    for number in 0..VMS {
        let name = format!("bench-create-{number}");
        let spec = VmSpec { reserve_swap: true, ..VmSpec::default() };
        let vm = CreateVm {
            name: name.clone(),
            memory: vec![MEMORY],
            kind: VmKind::Plain,
            spec,
            launch: None,
            outbox: None,
        };
        let began = Instant::now();
        client.create(&vm).context("make a VM with 16 GiB of reserved swap")?;
        took.push(began.elapsed().as_secs_f64() * 1e3);
        client.delete(&name).with_context(|| format!("remove {name}"))?;
    }
    Ok(took)
}
