//! A disk in another process's memory over NBD, one encrypted hop behind the exporter, against nbdkit's memory plugin over
//! TCP. The client is fio in both cases, the machine the same, the rounds interleaved.
//!
//! The server stands for another machine, but shares two CPUs with the client and the exporter, which it would not there. So the
//! random reads are measured twice: wherever the kernel puts everybody, and with the server, ours and the peer's, on a CPU of its own
//! and everybody else on the others.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use testkit::link::{ETHERNET_ADDR, ETHERNET_SERVER, Ethernet};
use testkit::pool::{Apart, Lend, Pool};
use testkit::results::report::{Bar, Report};

use super::{Setup, svg};

/// More than the caches hold, little enough to be filled in a moment.
const DISK: &str = "256M";
const DISK_BYTES: u64 = 256 << 20;
const SERVER: &str = "400M";
/// Requests under way in the sequential cases.
const SEQUENTIAL_DEPTH: u32 = 8;
/// nbdkit listens by then.
const START: Duration = Duration::from_secs(60);

/// The bars of issue 4: operations per second, and the ratio to the peer.
const DEPTH_1_MIN: f64 = 30_000.0;
const DEPTH_32_MIN: f64 = 120_000.0;
const PEER_RATIO_MIN: f64 = 1.0;
/// Issue 4: reading and writing within 10 % of each other.
const WRITE_TO_READ_MIN: f64 = 0.9;

/// What one side reached, one value a round.
#[derive(Debug, Default)]
struct Side {
    depth_1: Vec<f64>,
    depth_32: Vec<f64>,
    apart_1: Vec<f64>,
    apart_32: Vec<f64>,
    write_mib: Vec<f64>,
    read_mib: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A program is missing or fails.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let (mut ours, mut peer) = (Side::default(), Side::default());
    let seconds = setup.seconds(4.0);
    let _link = Ethernet::new()?;
    for _ in 0..setup.rounds {
        let nbdkit = Nbdkit::over_ethernet(DISK)?;
        peer.measure(&nbdkit.uri, seconds, &[nbdkit.program.0.id()])?;
        drop(nbdkit);
        if setup.ours {
            let pool = Pool::new(&setup.dir)?;
            let servers = pool.serve_listed(1, &Lend::over_ethernet(SERVER))?;
            pool.create("bench", DISK_BYTES, 1)?;
            let export = pool.export("bench", "bench.sock", None, &[])?;
            ours.measure(&export.uri, seconds, &[servers[0].process.pid(), export.process.pid()])?;
        }
    }
    let mut report = setup.report("nbd");
    let ratio = Bar::AtLeast(PEER_RATIO_MIN);
    report.pair("random 4 KiB reads, depth 1", "1/s", &ours.depth_1, &peer.depth_1, ratio);
    report.pair("random 4 KiB reads, depth 32", "1/s", &ours.depth_32, &peer.depth_32, ratio);
    report.pair(&apart("depth 1"), "1/s", &ours.apart_1, &peer.apart_1, ratio);
    report.pair(&apart("depth 32"), "1/s", &ours.apart_32, &peer.apart_32, ratio);
    report.pair("sequential write", "MiB/s", &ours.write_mib, &peer.write_mib, Bar::None);
    report.pair("sequential read", "MiB/s", &ours.read_mib, &peer.read_mib, Bar::None);
    if setup.ours {
        report.single("random 4 KiB reads, depth 1", "1/s", &ours.depth_1, Bar::AtLeast(DEPTH_1_MIN));
        report.single("random 4 KiB reads, depth 32", "1/s", &ours.depth_32, Bar::AtLeast(DEPTH_32_MIN));
        report.single(&apart("depth 1"), "1/s", &ours.apart_1, Bar::AtLeast(DEPTH_1_MIN));
        report.single(&apart("depth 32"), "1/s", &ours.apart_32, Bar::AtLeast(DEPTH_32_MIN));
        let write_to_read: Vec<f64> = ours.write_mib.iter().zip(&ours.read_mib).map(|(w, r)| w / r).collect();
        report.single("sequential write to read", "ratio", &write_to_read, Bar::AtLeast(WRITE_TO_READ_MIN));
    }
    let group =
        |name: &str, ours: &[f64], peer: &[f64]| (name.to_owned(), vec![svg::Bar::of(ours), svg::Bar::of(peer)]);
    let chart = svg::BarChart {
        title: "Random 4 KiB reads of a disk over NBD".to_owned(),
        y_label: "1/s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["pagoda disk, one encrypted hop".to_owned(), "nbdkit memory, TCP".to_owned()],
        groups: vec![
            group("depth 1", &ours.depth_1, &peer.depth_1),
            group("depth 32", &ours.depth_32, &peer.depth_32),
            group("depth 1, server apart", &ours.apart_1, &peer.apart_1),
            group("depth 32, server apart", &ours.apart_32, &peer.apart_32),
        ],
    };
    Ok((report, svg::bar_chart(&chart)))
}

fn apart(depth: &str) -> String {
    format!("random 4 KiB reads, {depth}, server on its own CPU")
}

impl Side {
    /// `processes`: the server, and what its client talks to, if that is another one.
    fn measure(&mut self, uri: &str, seconds: f64, processes: &[u32]) -> Result<()> {
        let fio = |pattern: &str, depth: u32, more: &[&str]| fio(&Target::Nbd(uri), DISK, pattern, depth, more);
        // The first pass fills the disk, so that what is read later is there.
        self.write_mib.push(fio("write", SEQUENTIAL_DEPTH, &["--bs=256k", "--loops=2"])?.mib_per_second);
        let time = format!("--runtime={seconds}");
        let timed = ["--time_based", &time];
        self.read_mib.push(fio("read", SEQUENTIAL_DEPTH, &[&timed[..], &["--bs=256k"]].concat())?.mib_per_second);
        for (depth, into) in [(1, &mut self.depth_1), (32, &mut self.depth_32)] {
            into.push(fio("randread", depth, &[&timed[..], &["--bs=4k"]].concat())?.per_second);
        }
        let apart = Apart::new()?;
        let (server, users) = processes.split_first().context("a server")?;
        apart.server(*server)?;
        users.iter().try_for_each(|user| apart.user(*user))?;
        for (depth, into) in [(1, &mut self.apart_1), (32, &mut self.apart_32)] {
            let rate = apart.as_user(|| fio("randread", depth, &[&timed[..], &["--bs=4k"]].concat()))?;
            into.push(rate.per_second);
        }
        Ok(())
    }
}

/// How much fio did per second.
#[derive(Debug)]
pub struct Rate {
    pub per_second: f64,
    pub mib_per_second: f64,
}

/// Where fio reads and writes.
#[derive(Debug)]
pub enum Target<'a> {
    /// An export, by its URI.
    Nbd(&'a str),
    /// A file, past the page cache.
    File(&'a Path),
}

/// Runs fio on a target of `size` with so many requests under way.
///
/// # Errors
/// fio is missing or fails.
pub fn fio(target: &Target<'_>, size: &str, pattern: &str, depth: u32, more: &[&str]) -> Result<Rate> {
    let mut command = Command::new("fio");
    match target {
        Target::Nbd(uri) => command.args(["--ioengine=nbd".to_owned(), format!("--uri={uri}")]),
        Target::File(path) => command.args(["--ioengine=libaio", "--direct=1"]).arg("--filename").arg(path),
    };
    let output = command
        .args(["--name=bench", "--output-format=json", "--size", size])
        .args([format!("--rw={pattern}"), format!("--iodepth={depth}")])
        .args(more)
        .output()
        .context("run fio (scripts/install-deps.sh test installs it)")?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("fio: {said}{}", String::from_utf8_lossy(&output.stderr));
    }
    let report: Value =
        serde_json::from_str(&said[said.find('{').context("fio says nothing")?..]).context("read fio")?;
    let side = &report["jobs"][0][if pattern == "write" { "write" } else { "read" }];
    let number = |name: &str| side[name].as_f64().with_context(|| format!("fio says no {name}"));
    Ok(Rate { per_second: number("iops")?, mib_per_second: number("bw_bytes")? / f64::from(1 << 20) })
}

/// A process that ends with this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// nbdkit's memory plugin. Ends with this value.
pub struct Nbdkit {
    pub uri: String,
    program: Running,
}

impl Nbdkit {
    /// A disk of this size, all zeros, at the other end of an [`Ethernet`].
    ///
    /// # Errors
    /// It is not installed, or does not listen.
    pub fn over_ethernet(size: &str) -> Result<Nbdkit> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let addr: Ipv4Addr = ETHERNET_ADDR.parse()?;
        let child = Command::new("ip")
            .args(["netns", "exec", ETHERNET_SERVER, "nbdkit"])
            .args(["-f", "-i", ETHERNET_ADDR, "-p", &port.to_string(), "memory", size])
            .stdin(Stdio::null())
            .spawn()
            .context("run nbdkit (scripts/install-deps.sh test installs it)")?;
        let program = Running(child);
        let until = Instant::now() + START;
        while TcpStream::connect((addr, port)).is_err() {
            if Instant::now() > until {
                bail!("nbdkit does not listen");
            }
            std::thread::yield_now();
        }
        Ok(Nbdkit { uri: format!("nbd://{addr}:{port}"), program })
    }
}
