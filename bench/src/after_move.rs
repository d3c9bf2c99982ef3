//! A VM has moved into half of its memory in DRAM: how fast is what runs in it?
//!
//! * **ours**: `pagoda vm move` into half. **ideal**: the same into all. **naive**: QEMU's own pre-copy into a memory cgroup of half of the
//!   guest's memory with kernel swap, as in `migrate`, with which this has hosts, link, guest and peer in common.
//! * **Memory benchmark** (figure 7 of the VMemDirect paper): the guest's program reads all pages that it has filled, more than there is
//!   DRAM, in order, and writes half of them. What counts is the time, which begins after the move.
//! * **Store** (figure 8): memcached with a working set below the DRAM, under load before, during and after the move ([`store`]).

mod store;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_guest::lines::Line;
use testkit::peers::swap::Swap;
use testkit::results::report::{Bar, Report};

use self::store::Recovery;
use super::Setup;
use super::balloon::guest::{QEMU, Start};
use super::migrate::case::{Case, Of, Rows};
use super::migrate::guest::Common;
use super::migrate::hosts::Hosts;
use super::migrate::images;
use super::migrate::leg::Side;
use super::migrate::network::Network;
use super::migrate::options::Setting;
use super::migrate::qemu::{Peer, Way};
use crate::svg;

/// "At least 3.2x naive."
const MEMORY_OF_NAIVE_MAX: f64 = 1.0 / 3.2;
/// "95 % within 2 s; at most 0.2x of naive's time, 1.1x ideal's."
const RECOVERED_S_MAX: f64 = 2.0;
const RECOVERED_OF_NAIVE_MAX: f64 = 0.2;
const RECOVERED_OF_IDEAL_MAX: f64 = 1.1;
/// The memory benchmark, and the same at random.
const SWEEP: &str = "run seq passes=1 write=50";
const RANDOM: &str = "run random passes=1 write=50";
/// The peer's guest breaks now and then (see `migrate`).
const PEER_TRIES: usize = 4;
/// Before the first access: what has moved is at rest.
const QUIET: Duration = Duration::from_secs(2);
const NAIVE: &str = "QEMU's own, kernel swap in a cgroup of half";

/// What was measured of a side after a move of one kind.
#[derive(Default)]
struct After {
    memory: Case<Sweeps>,
    store: Case<Recovery>,
}

/// What the memory benchmark took, in milliseconds.
struct Sweeps {
    in_order_ms: f64,
    random_ms: f64,
}

#[derive(Default)]
struct Measured {
    ideal: After,
    ours: After,
    naive: After,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root; the guest's image or the network cannot be made.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let images = images()?;
    let accelerator = testkit::accel::find(QEMU, &images, &setup.dir)?;
    let start = Start { images: &images, accelerator, disk: None };
    // One link: what runs after a move does not use it.
    let mut settings = setup.moves.settings(true)?;
    if !setup.quick && setup.moves.memory.is_none() {
        settings =
            setup.moves.settings(false)?.into_iter().filter(|setting| setting.link == settings[0].link).collect();
    }
    let mut all = Vec::new();
    for setting in settings {
        let network = Network::new(setting.link)?;
        let bench = Bench { common: setting.common(setup, &network, &start), name: setting.name() };
        let measured = bench.all();
        all.push((setting, measured));
    }
    let mut report = setup.report_of("after-move", accelerator.name());
    for (setting, measured) in &all {
        figures(&mut report, setting, measured);
    }
    Ok((report, plot(&all)))
}

struct Bench<'a> {
    common: Common<'a>,
    name: String,
}

impl Bench<'_> {
    fn all(&self) -> Measured {
        let setup = self.common.setup;
        let mut measured = Measured::default();
        for round in 0..setup.rounds {
            eprintln!("after-move: {}, round {} of {}", self.name, round + 1, setup.rounds);
            let Measured { ideal, ours, naive } = &mut measured;
            if self.wants("memory") {
                self.each(round, [&mut ideal.memory, &mut ours.memory, &mut naive.memory], "memory", sweeps);
            }
            if self.wants("store") {
                self.each(round, [&mut ideal.store, &mut ours.store, &mut naive.store], "store", store::measure);
            }
        }
        measured
    }

    fn wants(&self, what: &str) -> bool {
        self.common.setup.wants(&format!("{}, {what}", self.name))
    }

    /// Measures the same after a move into all, into half and of the peer, with the peer first in each other round.
    fn each<T: std::fmt::Display>(&self, round: usize, cases: [&mut Case<T>; 3], what: &str, measure: Measure<T>) {
        let [ideal, ours, naive] = cases;
        let of_ours = |half: bool| {
            let hosts = Hosts::start(self.common)?;
            let mut vm = hosts.boot()?;
            let done = measure(&mut AnySide(&mut vm), self.common, half)?;
            vm.end()?;
            Ok(done)
        };
        let mut of_naive = || {
            let setup = self.common.setup;
            let swap = || Swap::on_file(&setup.dir, (self.common.size.memory_mib << 20) * 2);
            let one = || {
                let _swap = swap()?;
                measure(&mut AnySide(&mut Peer::boot(self.common, Way::Plain)?), self.common, true)
            };
            let mut done = one();
            for _ in 1..PEER_TRIES {
                let Err(error) = &done else { break };
                eprintln!("after-move: naive, {what}: failed, and is tried again: {error:#}");
                naive.again();
                done = one();
            }
            put(naive, &format!("after-move: naive, {what}"), done);
        };
        if round % 2 == 1 {
            of_naive();
        }
        put(ideal, &format!("after-move: ideal, {what}"), of_ours(false));
        put(ours, &format!("after-move: ours, {what}"), of_ours(true));
        if round.is_multiple_of(2) {
            of_naive();
        }
    }
}

/// Fills a guest that has just booted, moves it into half or all, and measures.
type Measure<T> = fn(&mut dyn Moves, Common<'_>, bool) -> Result<T>;

/// What is asked of a side, whichever it is.
pub trait Moves {
    fn command(&mut self, text: &str) -> Result<Vec<String>>;
    /// Gives when it ran at its destination, microseconds since 1970, and what the guest said of the command that it began meanwhile.
    fn moves(&mut self, half: bool, during: Option<&str>) -> Result<(f64, Vec<String>)>;
}

struct AnySide<'a, S>(&'a mut S);

impl<S: Side> Moves for AnySide<'_, S> {
    fn command(&mut self, text: &str) -> Result<Vec<String>> {
        self.0.control().command(text)
    }

    fn moves(&mut self, half: bool, during: Option<&str>) -> Result<(f64, Vec<String>)> {
        let moved = self.0.only_move(half, during)?;
        moved.show(S::NAME);
        Ok((moved.resumed_us, self.0.said().to_vec()))
    }
}

fn put<T: std::fmt::Display>(case: &mut Case<T>, name: &str, done: Result<T>) {
    match done {
        Ok(done) => {
            eprintln!("{name}: {done}");
            case.add(done);
        }
        Err(error) => case.fail(name, &error),
    }
}

impl std::fmt::Display for Sweeps {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:.0} ms in order, {:.0} ms at random", self.in_order_ms, self.random_ms)
    }
}

/// Its program has filled two thirds when it has booted.
fn sweeps(side: &mut dyn Moves, _common: Common<'_>, half: bool) -> Result<Sweeps> {
    side.moves(half, None)?;
    std::thread::sleep(QUIET);
    let in_order_ms = done_ms(&side.command(SWEEP)?)?;
    let random_ms = done_ms(&side.command(RANDOM)?)?;
    side.command("verify").context("its memory is right")?;
    Ok(Sweeps { in_order_ms, random_ms })
}

/// By the guest's clock.
fn done_ms(lines: &[String]) -> Result<f64> {
    let done = lines.iter().filter_map(|line| Line::parse(line)).find(|line| line.kind == "done");
    Ok(done.and_then(|line| line.number("us")).context("how long the guest took")? as f64 / 1e3)
}

fn figures(report: &mut Report, setting: &Setting, measured: &Measured) {
    let Measured { ideal, ours, naive } = measured;
    let size = setting.size;
    let name =
        format!("{}, memory benchmark of {} MiB in {} MiB of DRAM", setting.name(), size.work_mib(), size.half_mib());
    let mut rows = Rows { report, name };
    if !ours.memory.is_empty() {
        const IN_ORDER: Of<Sweeps> = |sweeps| sweeps.in_order_ms;
        const RANDOM: Of<Sweeps> = |sweeps| sweeps.random_ms;
        let (ours, ideal, naive) = (&ours.memory, &ideal.memory, &naive.memory);
        let bar = Bar::AtMost(MEMORY_OF_NAIVE_MAX);
        rows.pair(&format!("in order: {NAIVE}"), "ms", (ours, IN_ORDER), (naive, IN_ORDER), bar);
        rows.pair(&format!("then at random: {NAIVE}"), "ms", (ours, RANDOM), (naive, RANDOM), Bar::None);
        rows.pair("in order: all in DRAM", "ms", (ours, IN_ORDER), (ideal, IN_ORDER), Bar::None);
        rows.pair("then at random: all in DRAM", "ms", (ours, RANDOM), (ideal, RANDOM), Bar::None);
    }
    if !ours.store.is_empty() {
        rows.name =
            format!("{}, memcached with {} MiB in {} MiB of DRAM", setting.name(), store::mib(size), size.half_mib());
        const RECOVERED: Of<Recovery> = |recovery| recovery.recovered_s;
        const FIRST: Of<Recovery> = |recovery| recovery.first_s_share;
        const TEN: Of<Recovery> = |recovery| recovery.ten_s_share;
        let (ours, ideal, naive) = (&ours.store, &ideal.store, &naive.store);
        rows.single("95 % of its speed again", "s", (ours, RECOVERED), Bar::AtMost(RECOVERED_S_MAX));
        let what = format!("the same: {NAIVE}");
        rows.pair(&what, "s", (ours, RECOVERED), (naive, RECOVERED), Bar::AtMost(RECOVERED_OF_NAIVE_MAX));
        let bar = Bar::AtMost(RECOVERED_OF_IDEAL_MAX);
        rows.pair("the same: into all DRAM", "s", (ours, RECOVERED), (ideal, RECOVERED), bar);
        let what = format!("speed in the first second against before the move: {NAIVE}");
        rows.pair(&what, "share", (ours, FIRST), (naive, FIRST), Bar::None);
        let what = format!("speed in ten seconds against before the move: {NAIVE}");
        rows.pair(&what, "share", (ours, TEN), (naive, TEN), Bar::None);
        let what = "speed in ten seconds against before the move: into all DRAM";
        rows.pair(what, "share", (ours, TEN), (ideal, TEN), Bar::None);
    }
}

/// Speed by time after the move, of the last round.
fn plot(all: &[(Setting, Measured)]) -> String {
    let series = all.iter().flat_map(|(setting, Measured { ideal, ours, naive })| {
        [("into all DRAM", ideal), ("into half", ours), ("QEMU's own, into half", naive)].map(|(who, after)| {
            let points = after.store.last().map_or(Vec::new(), |recovery| recovery.points.clone());
            (format!("{}, {who}", setting.name()), points)
        })
    });
    svg::line_chart(&svg::LineChart {
        title: "memcached after a move".to_owned(),
        x_label: "s after the guest runs there".to_owned(),
        y_label: "speed against before the move".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series: series.collect(),
    })
}
