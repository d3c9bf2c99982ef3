//! The owner of a disk is paused (SIGSTOP) with writes under way, another exporter takes the disk over, and the first
//! one is resumed: how many of its writes land? Every page is compared with what the new owner found and wrote.
//!
//! There is no peer. The time of the hand-over is from starting the new exporter to its first page.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::process::Signal;
use testkit::link::Ethernet;
use testkit::pool::{Lend, Pool};
use testkit::results::report::{Bar, Report};

use super::load::{Connection, Load, PAGE, Tally, ms};
use super::{Setup, svg};

const SERVERS: u32 = 2;
const COPIES: usize = 2;
const DISK_BYTES: u64 = 256 << 20;
const SERVER: &str = "300M";
/// All operations that a client has: the paused owner has as many to finish.
const DEPTH: usize = 256;
const NEW_DEPTH: usize = 16;
/// The load runs so long before the pause, and the new owner's before and after the other one is resumed.
const BEFORE: Duration = Duration::from_millis(300);
/// Long enough for any answer of an owner that runs.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct Measured {
    /// Of the one that was paused, and of the new one.
    landed: u64,
    tally: Tally,
    under_way: Vec<f64>,
    handover_ms: Vec<f64>,
    end_ms: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A program does not start; the old owner does not end.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let mut measured = Measured::default();
    for round in 0..setup.rounds {
        measured.round(setup, round)?;
        let Measured { handover_ms, under_way, .. } = &measured;
        eprintln!("handover: {:.1} ms, {} requests under way", handover_ms[round], under_way[round]);
    }
    let mut report = setup.report("handover");
    let Measured { landed, tally, under_way, handover_ms, end_ms } = &measured;
    report.single("late writes that land, all rounds", "pages", &[*landed as f64], Bar::AtMost(0.0));
    tally.figures(&mut report);
    report.single("requests under way when the owner was paused", "requests", under_way, Bar::None);
    report.single("hand-over, 256 MiB: start of the new owner to its first page", "ms", handover_ms, Bar::None);
    report.single("from being resumed to the old owner's end", "ms", end_ms, Bar::None);
    let bars = |name: &str, values: &[f64]| (name.to_owned(), vec![svg::Bar::of(values)]);
    let plot = svg::bar_chart(&svg::BarChart {
        title: "A disk of 256 MiB goes to another owner while the first is paused".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["time".to_owned()],
        groups: vec![bars("first page", handover_ms), bars("end of the old owner", end_ms)],
    });
    Ok((report, plot))
}

impl Measured {
    fn round(&mut self, setup: &Setup, round: usize) -> Result<()> {
        let _link = Ethernet::new()?;
        let pool = Pool::new(&setup.dir)?;
        let blocking = ["--spin", "0"];
        let _servers = pool.serve_listed(SERVERS, &Lend { more: &blocking, ..Lend::over_ethernet(SERVER) })?;
        pool.create("bench", DISK_BYTES, COPIES)?;
        let mut old = pool.export("bench", "old.sock", None, &blocking)?;
        let mut load = Load::new(&old.socket)?;
        self.tally.add(&load.fill());
        load.set_patience(PATIENCE)?;
        let seed = 2 * round as u64;
        let (paused, (new, took)) = load.during(DEPTH, seed, || {
            std::thread::sleep(BEFORE);
            old.process.signal(Signal::STOP)?;
            let began = Instant::now();
            let new = pool.export("bench", "new.sock", None, &[&blocking[..], &["--take-over"]].concat())?;
            read_page(&mut Connection::open(&new.socket)?, 0)?;
            Ok((new, began.elapsed()))
        })?;
        ensure!(paused.cut_off.is_some() && paused.errors > 0, "nothing was under way when the owner was paused");
        ensure!(paused.wrong == 0, "{} wrong pages before the pause", paused.wrong);
        self.under_way.push(paused.errors as f64);
        self.handover_ms.push(ms(took));
        // The old connection stays open, or its requests would be gone with it.
        let left = load.move_to(&new.socket)?;
        // Here it is decided which of those writes have happened: from now on none may.
        self.tally.add(&load.check());
        let (during, end) = load.during(NEW_DEPTH, seed + 1, || {
            std::thread::sleep(BEFORE);
            let resumed = Instant::now();
            old.process.signal(Signal::CONT)?;
            ensure!(old.process.wait()? == Some(1), "the old owner did not say why it ends");
            let end = resumed.elapsed();
            std::thread::sleep(BEFORE);
            Ok(end)
        })?;
        drop(left);
        self.end_ms.push(ms(end));
        let after = load.check();
        self.landed += during.wrong + after.wrong;
        self.tally.add(&during);
        self.tally.add(&after);
        Ok(())
    }
}

fn read_page(connection: &mut Connection, page: u64) -> Result<()> {
    connection.ask(0, page * PAGE as u64, PAGE as u32, None)?;
    let answer = connection.answer()?;
    ensure!(answer.error == 0, "page {page} cannot be read: error {}", answer.error);
    connection.content(&mut [0; PAGE])
}
