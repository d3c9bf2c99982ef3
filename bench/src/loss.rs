//! A disk with two copies over a bad network: pages must be right and work must go on.
//!
//! The network loses a fifth of all datagrams, changes a bit of one in a hundred, and lets others overtake one in twenty, in both
//! directions. The peer is the same disk over the same relays in good weather. Every page that is read is checked.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use testkit::link::Ethernet;
use testkit::pool::{Lend, Pool, Server};
use testkit::results::report::{Bar, Report};

use super::load::{Done, Load, Tally};
use super::relay::{Relay, Weather};
use super::{Setup, svg};

const SERVERS: u32 = 2;
const COPIES: usize = 2;
const DISK_BYTES: u64 = 64 << 20;
const SERVER: &str = "140M";
const DEPTH: usize = 16;
const WEATHER: Weather = Weather { lost_percent: 20, corrupt_percent: 1, held_percent: 5 };
/// Whoever waits so long for anything calls it stalled: a hundred times what repetitions cost.
const GAP_MS_MAX: f64 = 100.0;

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A program does not start.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let mut tally = Tally::default();
    let (mut bad, mut good) = (Vec::new(), Vec::new());
    let (mut gap_ms, mut longest_ms) = (Vec::new(), Vec::new());
    for round in 0..setup.rounds {
        let [calm, stormy] = measure(setup, round, &mut tally)?;
        good.push(calm.mib_per_second());
        bad.push(stormy.mib_per_second());
        gap_ms.push(stormy.longest_gap_ms());
        longest_ms.push(longest(&stormy));
        eprintln!("loss: {:.1} of {:.1} MiB/s, {:.1} ms without an answer", bad[round], good[round], gap_ms[round]);
    }
    let mut report = setup.report("loss");
    tally.figures(&mut report);
    report.pair("random reads and writes against no loss", "MiB/s", &bad, &good, Bar::None);
    report.single("longest time without an answer", "ms", &gap_ms, Bar::AtMost(GAP_MS_MAX));
    report.single("longest request", "ms", &longest_ms, Bar::None);
    let bars = |name: &str, values: &[f64]| (name.to_owned(), vec![svg::Bar::of(values)]);
    let plot = svg::bar_chart(&svg::BarChart {
        title: "20 % of all datagrams lost, 1 % damaged, 5 % overtaken".to_owned(),
        y_label: "MiB/s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["random reads and writes of 4 KiB".to_owned()],
        groups: vec![bars("good weather", &good), bars("bad weather", &bad)],
    });
    Ok((report, plot))
}

/// Good weather, then bad.
fn measure(setup: &Setup, round: usize, tally: &mut Tally) -> Result<[Done; 2]> {
    let _link = Ethernet::new()?;
    let pool = Pool::new(&setup.dir)?;
    let blocking = ["--spin", "0"];
    let servers = pool.serve_listed(SERVERS, &Lend { more: &blocking, ..Lend::over_ethernet(SERVER) })?;
    let seed = |server: usize| (round * SERVERS as usize + server) as u64;
    let relay = |(at, server): (usize, &Server)| Relay::start(server.addr, WEATHER, seed(at));
    let relays = servers.iter().enumerate().map(relay).collect::<Result<Vec<_>>>()?;
    pool.list(servers.iter().zip(&relays).map(|(server, relay)| (server, relay.addr)))?;
    pool.create("bench", DISK_BYTES, COPIES)?;
    let exporter = pool.export("bench", "bench.sock", None, &blocking)?;
    let mut load = Load::new(&exporter.socket)?;
    tally.add(&load.fill());
    let span = Duration::from_secs_f64(setup.seconds(5.0));
    let mut run = |bad: bool| {
        relays.iter().for_each(|relay| relay.set_bad(bad));
        let until = Instant::now() + span;
        let done = load.at_random(DEPTH, seed(0), || Instant::now() >= until);
        tally.add(&done);
        done
    };
    let both = [run(false), run(true)];
    relays.iter().for_each(|relay| relay.set_bad(false));
    tally.add(&load.check());
    Ok(both)
}

fn longest(done: &Done) -> f64 {
    let Some((first, last)) = done.times.first().zip(done.times.last()) else { return 0.0 };
    done.longest_ms(first.1, last.1)
}
