//! A disk in the memory of another machine, over a link of 1 Gbit/s with Ethernet's frames, against this machine's disk:
//! round trip, sequential reading and writing, and how latencies are distributed. Table 1 and figure 5 of the MemX paper, as
//! far as no guest is needed: its way "Linux" and the disk.
//!
//! Both ends are network namespaces of this machine, so their processes share its cores. The peer is a file read and
//! written with O_DIRECT; what its host keeps in memory is the host's.

mod cold;

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_guest::rng::Rng;
use testkit::link::{CLIENT, Link, SERVER as SERVER_END, SERVER_ADDR};
use testkit::pool::{Exporter, Lend, Pool, Server};
use testkit::results::report::{Bar, Report};
use testkit::undo::{Guard, Undo};

use super::load::{Connection, PAGE};
use super::nbd::{Target, fio};
use super::{Setup, svg};

const RATE: &str = "1gbit";
const DISK: &str = "512M";
const DISK_BYTES: u64 = 512 << 20;
const SERVER: &str = "600M";
/// Reads of 4 KiB measured one by one, per round and order.
const READS: usize = 5_000;
/// Requests of 256 KiB under way in the sequential cases.
const SEQUENTIAL_DEPTH: u32 = 8;
const SEQUENTIAL: &str = "--bs=256k";
/// Points of a distribution.
const QUANTILES: [f64; 14] = [0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 0.999];

/// The bars of issue 4: the rate, and how alike reading and writing are.
const MBIT_MIN: f64 = 900.0;
const ALIKE_MIN: f64 = 0.9;

/// What one side reached.
#[derive(Debug, Default)]
struct Side {
    write_mbit: Vec<f64>,
    read_mbit: Vec<f64>,
    random: Reads,
    sequential: Reads,
}

/// Reads of 4 KiB, one at a time: the middle of each round, and all of them.
#[derive(Debug, Default)]
struct Reads {
    p50_us: Vec<f64>,
    all_us: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root, no room, or a program is missing.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let (mut ours, mut peer) = (Side::default(), Side::default());
    let (mut first_ms, mut next_ms) = (Vec::new(), Vec::new());
    let file = DiskFile::new(&setup.dir)?;
    for round in 0..setup.rounds {
        peer.measure(setup, &Target::File(&file.path), &mut |page, into| file.read(page, into))?;
        if setup.ours {
            let remote = Remote::start(&setup.dir)?;
            let mut connection = Connection::open(&remote.exporter.socket)?;
            ours.measure(setup, &Target::Nbd(&remote.exporter.uri), &mut |page, into| {
                connection.ask(0, page * PAGE as u64, PAGE as u32, None)?;
                ensure!(connection.answer()?.error == 0, "page {page} cannot be read");
                connection.content(into)
            })?;
            let (write, read) = (ours.write_mbit[round], ours.read_mbit[round]);
            eprintln!("disk: {write:.0} Mbit/s written, {read:.0} read, {:.1} us", ours.random.p50_us[round]);
            drop((connection, remote));
            let writes = cold::measure(&setup.dir)?;
            eprintln!(
                "disk: {:.0} ms for the first write to a cold part, {:.2} ms for the next",
                writes.first_ms, writes.next_ms
            );
            first_ms.push(writes.first_ms);
            next_ms.push(writes.next_ms);
        }
    }
    let mut report = setup.report("disk");
    if setup.ours {
        report.single("sequential write over 1 Gbit/s", "Mbit/s", &ours.write_mbit, Bar::AtLeast(MBIT_MIN));
        report.single("sequential read over 1 Gbit/s", "Mbit/s", &ours.read_mbit, Bar::AtLeast(MBIT_MIN));
        let alike: Vec<f64> =
            ours.write_mbit.iter().zip(&ours.read_mbit).map(|(write, read)| (write / read).min(read / write)).collect();
        report.single("the slower of the two to the faster", "ratio", &alike, Bar::AtLeast(ALIKE_MIN));
        let name = "first write to four parts with parity, which get second copies again, against the next";
        report.pair(name, "ms", &first_ms, &next_ms, Bar::None);
    }
    for (name, ours, peer) in [
        ("random read of 4 KiB, p50", &ours.random, &peer.random),
        ("sequential read of 4 KiB, p50", &ours.sequential, &peer.sequential),
    ] {
        report.pair(name, "us", &ours.p50_us, &peer.p50_us, Bar::None);
    }
    report.pair("sequential write against a disk", "Mbit/s", &ours.write_mbit, &peer.write_mbit, Bar::None);
    report.pair("sequential read against a disk", "Mbit/s", &ours.read_mbit, &peer.read_mbit, Bar::None);
    let lines = [
        ("memory of another machine, random", &ours.random),
        ("the same, sequential", &ours.sequential),
        ("disk, random", &peer.random),
        ("the same, sequential", &peer.sequential),
    ];
    let plot = svg::line_chart(&svg::LineChart {
        title: "Reads of 4 KiB, one at a time".to_owned(),
        x_label: "us".to_owned(),
        y_label: "% of reads that take no longer".to_owned(),
        x_scale: svg::Scale::Log,
        y_scale: svg::Scale::Linear,
        series: lines.map(|(name, reads)| (name.to_owned(), reads.distribution())).into(),
    });
    Ok((report, plot))
}

impl Side {
    /// Fills the target first, so that what is read is there.
    fn measure(
        &mut self,
        setup: &Setup,
        target: &Target<'_>,
        read: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mbit = |mib: f64| mib * f64::from(1 << 20) * 8.0 / 1e6;
        fio(target, DISK, "write", SEQUENTIAL_DEPTH, &[SEQUENTIAL])?;
        let time = format!("--runtime={}", setup.seconds(4.0));
        let timed = [SEQUENTIAL, "--time_based", &time];
        self.write_mbit.push(mbit(fio(target, DISK, "write", SEQUENTIAL_DEPTH, &timed)?.mib_per_second));
        self.read_mbit.push(mbit(fio(target, DISK, "read", SEQUENTIAL_DEPTH, &timed)?.mib_per_second));
        let pages = DISK_BYTES / PAGE as u64;
        let mut rng = Rng::new(self.random.p50_us.len() as u64);
        self.random.measure(setup, &mut |_| rng.below(pages), read)?;
        self.sequential.measure(setup, &mut |at| at % pages, read)
    }
}

impl Reads {
    fn measure(
        &mut self,
        setup: &Setup,
        page: &mut dyn FnMut(u64) -> u64,
        read: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let count = if setup.quick { READS / 4 } else { READS };
        // O_DIRECT wants a buffer at a page's boundary.
        let mut room = vec![0; 2 * PAGE];
        let begin = room.as_ptr().align_offset(PAGE);
        let into = &mut room[begin..begin + PAGE];
        let mut times = Vec::with_capacity(count);
        for at in 0..count as u64 {
            let began = Instant::now();
            read(page(at), into)?;
            times.push(micros(began.elapsed()));
        }
        times.sort_unstable_by(f64::total_cmp);
        self.p50_us.push(times[times.len() / 2]);
        self.all_us.extend(times);
        Ok(())
    }

    /// Microseconds, and per cent of all reads that take no longer.
    fn distribution(&self) -> Vec<[f64; 2]> {
        let mut sorted = self.all_us.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| Some([*sorted.get((share * sorted.len() as f64) as usize)?, share * 100.0]);
        QUANTILES.into_iter().filter_map(at).collect()
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// A server and an exporter on two ends of a link.
struct Remote {
    exporter: Exporter,
    _server: Server,
    _pool: Pool,
    _link: Link,
}

impl Remote {
    fn start(dir: &Path) -> Result<Remote> {
        let link = Link::new(RATE)?;
        let pool = Pool::new(dir)?;
        let lend = Lend { size: SERVER, listen: SERVER_ADDR, inside: Some(SERVER_END), more: &[] };
        let server = pool.serve(1, &lend)?;
        pool.list([(&server, server.addr)].into_iter())?;
        pool.create("bench", DISK_BYTES, 1)?;
        let exporter = pool.export("bench", "bench.sock", Some(CLIENT), &[])?;
        Ok(Remote { exporter, _server: server, _pool: pool, _link: link })
    }
}

/// A file on the disk of this machine, read past the page cache; deleted when dropped.
struct DiskFile {
    path: PathBuf,
    file: File,
    _remove: Guard,
}

impl DiskFile {
    fn new(dir: &Path) -> Result<DiskFile> {
        let path = dir.join("bench.direct");
        let remove = Guard::new(Undo::File { path: path.clone() })?;
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).context("O_DIRECT")?;
        let mut options = File::options();
        let open = options.read(true).write(true).create(true).truncate(true).custom_flags(direct).open(&path);
        let file = open.with_context(|| format!("open {} with O_DIRECT", path.display()))?;
        // As long as it will be: fio makes a shorter one anew.
        file.set_len(DISK_BYTES).context("make it as long as the disk")?;
        Ok(DiskFile { path, file, _remove: remove })
    }

    fn read(&self, page: u64, into: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(into, page * PAGE as u64).context("read the disk")
    }
}
