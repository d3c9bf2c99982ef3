//! kill -9 of one of three servers of a disk with two copies, while fio writes and verifies: does it notice, for how long, and
//! when is everything there twice again? fio goes on before, through and after that, and then verifies all of the disk.
//!
//! All processes share this machine's cores and block at once instead of spinning. There is no peer.

mod fio;

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, bail, ensure};
use testkit::link::Ethernet;
use testkit::pool::{Lend, Pool};
use testkit::results::report::{Bar, Report};

use super::load::{Tally, ms};
use super::nbd::{self, Target};
use super::{Setup, svg};

use fio::Disk;

const SERVERS: u32 = 3;
const COPIES: usize = 2;
const DISK_BYTES: u64 = 1 << 30;
/// Either of those that are left has all of the disk in the end.
const SERVER: &str = "1100M";
const DEPTH: usize = 16;
/// While it is filled, with larger requests.
const FILL_DEPTH: u32 = 8;
/// fio runs so long before a server is killed.
const BEFORE: Duration = Duration::from_millis(1000);
/// How often it is looked for the second copies, and for how long.
const LOOK_EVERY: Duration = Duration::from_millis(25);
const WHOLE_MAX: Duration = Duration::from_secs(120);

/// The bar of issue 4 for the longest stall.
const STALL_MS_MAX: f64 = 50.0;

#[derive(Debug, Default)]
struct Measured {
    stall_ms: Vec<f64>,
    /// fio, before anything happened: what this machine does by itself.
    calm_ms: Vec<f64>,
    /// When the longest stall ended, after the kill.
    stall_after_s: Vec<f64>,
    whole_s: Vec<f64>,
    per_second: Vec<f64>,
    tally: Tally,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A program does not start; the second copies do not come.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let mut measured = Measured::default();
    for round in 0..setup.rounds {
        measured.round(setup, round)?;
        let Measured { stall_ms, stall_after_s, whole_s, .. } = &measured;
        let (stall, after) = (stall_ms[round], stall_after_s[round]);
        // A machine that is busy with something else stalls fio long before or after the kill.
        eprintln!("failover: {stall:.1} ms, {after:.3} s after the kill, whole after {:.2} s", whole_s[round]);
    }
    let mut report = setup.report("failover");
    let Measured { stall_ms, calm_ms, whole_s, per_second, tally, .. } = &measured;
    tally.figures(&mut report);
    report.single("longest stall", "ms", stall_ms, Bar::AtMost(STALL_MS_MAX));
    let slowest = stall_ms.iter().copied().fold(0.0, f64::max);
    report.single("longest stall, the slowest round", "ms", &[slowest], Bar::AtMost(STALL_MS_MAX));
    report.single("longest request before the kill", "ms", calm_ms, Bar::None);
    report.single("two copies again, 1 GiB", "s", whole_s, Bar::None);
    report.single("requests of 4 KiB before the kill", "1/s", per_second, Bar::None);
    let bars = |name: &str, values: &[f64]| (name.to_owned(), vec![svg::Bar::of(values)]);
    let plot = svg::bar_chart(&svg::BarChart {
        title: "kill -9 of one of three servers under fio verify".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["longest request".to_owned()],
        groups: vec![bars("before the kill", calm_ms), bars("across it", stall_ms)],
    });
    Ok((report, plot))
}

impl Measured {
    fn round(&mut self, setup: &Setup, round: usize) -> Result<()> {
        let _link = Ethernet::new()?;
        let pool = Pool::new(&setup.dir)?;
        let blocking = ["--spin", "0"];
        let mut servers = pool.serve_listed(SERVERS, &Lend { more: &blocking, ..Lend::over_ethernet(SERVER) })?;
        pool.create("bench", DISK_BYTES, COPIES)?;
        let exporter = pool.export("bench", "bench.sock", None, &blocking)?;
        let size = DISK_BYTES.to_string();
        nbd::fio(&Target::Nbd(&exporter.uri), &size, "write", FILL_DEPTH, &["--bs=256k"])?;
        let disk = Disk { uri: &exporter.uri, bytes: DISK_BYTES, depth: DEPTH, seed: round as u64 };
        let victim = servers.remove(round % SERVERS as usize);
        let (verified, (killed, whole, took)) = disk.verify_during(&setup.dir, || {
            std::thread::sleep(BEFORE);
            // A busy machine pauses processes, and a server that was given up for that is one failure already.
            wait_for(|| Ok(pool.disk_bytes("bench", "short_bytes")? == 0))?;
            let (killed, from) = (SystemTime::now(), Instant::now());
            drop(victim);
            wait_for(|| Ok(pool.disk_bytes("bench", "short_bytes")? > 0))?;
            wait_for(|| Ok(pool.disk_bytes("bench", "short_bytes")? == 0))?;
            Ok((killed, SystemTime::now(), from.elapsed()))
        })?;
        ensure!(verified.wrote_after(whole)?, "fio had written everything before the second copies were there again");
        self.tally.add(&verified.done);
        // Of all that fio did meanwhile, whether before the kill or after it.
        self.stall_ms.push(verified.longest_ms);
        self.stall_after_s.push(verified.longest_after_s(killed)?);
        self.calm_ms.push(verified.longest_before_ms(killed)?);
        self.whole_s.push(ms(took) / 1e3);
        self.per_second.push(verified.per_second_before(killed)?);
        self.tally.add(&disk.verify_all(&setup.dir)?);
        Ok(())
    }
}

fn wait_for(holds: impl Fn() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + WHOLE_MAX;
    while !holds()? {
        if Instant::now() > until {
            bail!("the copies are not what they should be after {WHOLE_MAX:?}");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
