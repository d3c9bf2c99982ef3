//! A server with 1 GiB is told to end (SIGTERM): how fast do its pages move to another one, and does anybody notice?
//! Once under a load on all of them, every page that is read being checked, and once without.
//!
//! There is no peer. All processes share this machine's cores, and every page is checked at the end.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::process::Signal;
use testkit::link::Ethernet;
use testkit::pool::{Lend, Pool};
use testkit::results::report::{Bar, Report};

use super::load::{Load, Tally};
use super::{Setup, svg};

const DISK_BYTES: u64 = 1 << 30;
const SERVER: &str = "1100M";
const DEPTH: usize = 4;
/// The load runs so long before the server is told to end.
const BEFORE: Duration = Duration::from_millis(500);
/// A server that has not moved everything by then ends with the rest, which is an error here.
const PATIENCE: &str = "120";

/// The bar of issue 4, in MB (10^6 bytes) per second.
const MB_PER_SECOND_MIN: f64 = 500.0;

#[derive(Debug, Default)]
struct Measured {
    loaded: Vec<f64>,
    idle: Vec<f64>,
    stall_ms: Vec<f64>,
    /// Of the load: before and during the drain.
    before: Vec<f64>,
    during: Vec<f64>,
    tally: Tally,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A program does not start or end; a page is left behind.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let mut measured = Measured::default();
    for round in 0..setup.rounds {
        for under_load in [true, false] {
            measured.round(setup, round, under_load)?;
        }
        let Measured { loaded, idle, .. } = &measured;
        eprintln!("drain: {:.0} MB/s under load, {:.0} MB/s without", loaded[round], idle[round]);
    }
    let mut report = setup.report("drain");
    let Measured { loaded, idle, stall_ms, before, during, tally } = &measured;
    report.single("drain of 1 GiB under load", "MB/s", loaded, Bar::AtLeast(MB_PER_SECOND_MIN));
    report.single("drain of 1 GiB without load", "MB/s", idle, Bar::None);
    tally.figures(&mut report);
    report.single("longest request during the drain", "ms", stall_ms, Bar::None);
    report.single("requests of 4 KiB before the drain", "1/s", before, Bar::None);
    report.single("requests of 4 KiB during the drain", "1/s", during, Bar::None);
    let bars = |name: &str, values: &[f64]| (name.to_owned(), vec![svg::Bar::of(values)]);
    let plot = svg::bar_chart(&svg::BarChart {
        title: "Drain of a server with 1 GiB".to_owned(),
        y_label: "MB/s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["pages moved".to_owned()],
        groups: vec![bars("under load", loaded), bars("without load", idle)],
    });
    Ok((report, plot))
}

impl Measured {
    fn round(&mut self, setup: &Setup, round: usize, under_load: bool) -> Result<()> {
        let _link = Ethernet::new()?;
        let pool = Pool::new(&setup.dir)?;
        let lend = Lend { more: &["--spin", "0", "--drain", PATIENCE], ..Lend::over_ethernet(SERVER) };
        let mut full = pool.serve_listed(1, &lend)?.remove(0);
        let empty = pool.serve(2, &lend)?;
        pool.create("bench", DISK_BYTES, 1)?;
        // Everything goes to the one server that is known; then the other one is, too.
        let mut exporter = pool.export("bench", "bench.sock", None, &["--spin", "0"])?;
        let mut load = Load::new(&exporter.socket)?;
        self.tally.add(&load.fill());
        exporter.process.signal(Signal::TERM)?;
        exporter.process.wait()?;
        pool.list([&full, &empty].map(|server| (server, server.addr)).into_iter())?;
        let exporter = pool.export("bench", "bench.sock", None, &["--spin", "0"])?;
        drop(load.move_to(&exporter.socket)?);
        // The new owner has looked at all slabs once everything was read.
        self.tally.add(&load.check());
        let mut drain = || -> Result<(Instant, Instant)> {
            let began = Instant::now();
            full.process.signal(Signal::TERM)?;
            full.process.wait()?;
            Ok((began, Instant::now()))
        };
        if under_load {
            let begin = Instant::now();
            let (done, (from, to)) = load.during(DEPTH, round as u64, || {
                std::thread::sleep(BEFORE);
                drain()
            })?;
            self.tally.add(&done);
            self.loaded.push(rate(from, to));
            self.stall_ms.push(done.longest_ms(from, to));
            let per_second = |from: Instant, to: Instant| {
                let answered = done.times.iter().filter(|(_, answered)| (from..to).contains(answered)).count();
                answered as f64 / (to - from).as_secs_f64()
            };
            self.before.push(per_second(begin, from));
            self.during.push(per_second(from, to));
        } else {
            let (from, to) = drain()?;
            self.idle.push(rate(from, to));
        }
        ensure!(pool.disk_bytes("bench", "lost_bytes")? == 0, "pages were left behind");
        self.tally.add(&load.check());
        Ok(())
    }
}

/// In millions of bytes a second, from the signal to the end of the process.
fn rate(from: Instant, to: Instant) -> f64 {
    DISK_BYTES as f64 / 1e6 / (to - from).as_secs_f64()
}
