//! A VM leaves by two ways at once: its hot part by the link to its destination, and the rest into its remote tier.
//!
//! Both hosts and the pool's server are network namespaces behind one switch. Each host has one network card, by which it reaches the
//! other one and the pool: 1 Gbit/s, or an eighth of that for the destination. So nobody has more of a network in one case than in the
//! other. Encrypted, all of it; what goes to the other host may be compressed, what goes to the pool is not.
//!
//! * **single**: `pagoda vm move` into as much DRAM as the VM has memory. **split**: `--split pool:` into a part of that.
//! * A new VM in each round: all of it is in DRAM, and nothing in its tier. It moves to the other host and back, first as a whole, then
//!   split. Its guest is idle, and verifies its memory after each move.
//!
//! The source is empty when its QEMU has ended and nothing of the VM is there.

mod pool;

use anyhow::{Context, Result, ensure};
use pagoda_api::{MoveRequest, MoveSplit};
use testkit::results::report::{Bar, Report};

use self::pool::Lent;
use super::Setup;
use super::balloon::guest::{QEMU, Start};
use super::migrate::case::{Case, Of, Rows};
use super::migrate::guest::{Common, Moved};
use super::migrate::hosts::{Hosts, Vm};
use super::migrate::images;
use super::migrate::leg::Side;
use super::migrate::network::Network;
use crate::svg;

/// "Split against our single move (13-30 % slower): at most 1.10x."
const SPLIT_OF_SINGLE_MAX: f64 = 1.10;
/// "Source empty, destination's link at 1/8: at least 4x sooner than pre-copy."
const EMPTY_OF_SINGLE_MAX: f64 = 0.25;
const RATE: &str = "1gbit";
const EIGHTH: &str = "125mbit";
const MS: Of = |moved| moved.ms;
const EMPTY_MS: Of = |moved| moved.whole_ms;
const STILL_MS: Of = |moved| moved.downtime_ms;
const SENT_MIB: Of = |moved| moved.sent_bytes as f64 / f64::from(1 << 20);

/// One way to leave against the other.
struct Pair {
    name: &'static str,
    /// Of the destination's card.
    rate: &'static str,
    /// The VM's memory, divided by the DRAM that it has when it is split.
    part: u64,
    single: Case,
    split: Case,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root; no etcd; the guest's image or the network cannot be made.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let images = images()?;
    let accelerator = testkit::accel::find(QEMU, &images, &setup.dir)?;
    let start = Start { images: &images, accelerator, disk: None };
    let setting = setup.moves.settings(true)?.into_iter().next().context("no size")?;
    let pair = |name, rate, part| Pair { name, rate, part, single: Case::default(), split: Case::default() };
    let mut pairs = [pair("1 Gbit/s, into half", RATE, 2), pair("destination at 1/8, into 1/8", EIGHTH, 8)];
    for round in 0..setup.rounds {
        for pair in &mut pairs {
            eprintln!("split: {}, round {} of {}", pair.name, round + 1, setup.rounds);
            let network = Network::behind_a_switch([RATE, pair.rate])?;
            one(setting.common(setup, &network, &start), pair);
        }
    }
    let mut report = setup.report_of("split", accelerator.name());
    for pair in &pairs {
        let name = format!("{} MiB, {}, QEMU {}", setting.size.memory_mib, pair.name, setting.version);
        pair.add_to(&mut Rows { report: &mut report, name });
    }
    Ok((report, plot(&pairs)))
}

/// Both moves of a new VM. What fails is said in the rows.
fn one(common: Common<'_>, pair: &mut Pair) {
    let Pair { part, single, split, .. } = pair;
    let (mut whole, mut parts) = (None, None);
    let done = both(common, *part, &mut whole, &mut parts);
    let failed = |case: &mut Case, what: &str| match &done {
        Err(error) => case.fail(what, error),
        Ok(()) => unreachable!("nothing failed, and nothing was measured"),
    };
    match whole {
        Some(moved) => single.add(moved),
        None => failed(single, "split: single"),
    }
    match parts {
        Some(moved) => split.add(moved),
        None => failed(split, "split: split"),
    }
}

fn both(common: Common<'_>, part: u64, whole: &mut Option<Moved>, parts: &mut Option<Moved>) -> Result<()> {
    let lent = Lent::start(common)?;
    let hosts = Hosts::start_with(common, &lent.settings())?;
    let mut vm = hosts.boot_with(&["--remote", "pool:"])?;
    let memory_mib = common.size.memory_mib;
    let moved = moves(&mut vm, &|to| MoveRequest { dram: Some(memory_mib << 20), ..MoveRequest::new(to) })?;
    moved.show("single");
    *whole = Some(moved);
    // Back to where the way is the same.
    moves(&mut vm, &|to| MoveRequest { dram: Some(memory_mib << 20), ..MoveRequest::new(to) })?;
    let dram = Some((memory_mib / part) << 20);
    let moved = moves(&mut vm, &|to| MoveRequest { dram, split: Some(MoveSplit::default()), ..MoveRequest::new(to) })?;
    moved.show("split");
    *parts = Some(moved);
    vm.end()
}

fn moves(vm: &mut Vm<'_>, request: &dyn Fn(&str) -> MoveRequest) -> Result<Moved> {
    let moved = vm.moves_by(request, None)?;
    vm.control().command("verify").context("its memory is right")?;
    Ok(moved)
}

impl Pair {
    fn add_to(&self, rows: &mut Rows<'_>) {
        let Pair { single, split, .. } = self;
        let is_slow = self.rate != RATE;
        let bar = |is_measured: bool, max: f64| if is_measured { Bar::AtMost(max) } else { Bar::None };
        rows.pair("time, split: single", "ms", (split, MS), (single, MS), bar(!is_slow, SPLIT_OF_SINGLE_MAX));
        let empty = bar(is_slow, EMPTY_OF_SINGLE_MAX);
        rows.pair("source empty, split: single", "ms", (split, EMPTY_MS), (single, EMPTY_MS), empty);
        rows.pair("pause, split: single", "ms", (split, STILL_MS), (single, STILL_MS), Bar::None);
        rows.pair("sent to the destination, split: single", "MiB", (split, SENT_MIB), (single, SENT_MIB), Bar::None);
    }
}

fn plot(pairs: &[Pair]) -> String {
    let group = |pair: &Pair| {
        let bars = [&pair.single, &pair.split].map(|case| svg::Bar::of(&case.values(EMPTY_MS)));
        (pair.name.to_owned(), bars.to_vec())
    };
    svg::bar_chart(&svg::BarChart {
        title: "A VM leaves its host".to_owned(),
        y_label: "ms until the source is empty".to_owned(),
        y_scale: svg::Scale::Linear,
        series: ["all of it to the other host", "split with a pool"].map(str::to_owned).to_vec(),
        groups: pairs.iter().map(group).collect(),
    })
}
