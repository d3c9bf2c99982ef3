//! Ballooning: a guest ballooned down against a guest that was made smaller (figure 2 of the ESX paper), and how long it
//! takes to get memory from an idle VM.
//!
//! The work is a file server's: files of a set larger than memory, read and rewritten through the guest's page cache. The
//! disk is slowed down to the same speed for all, so that what is measured is how much the guest can keep, and not a disk
//! that others use too.

pub(super) mod guest;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_guest::DISK_SEED_DEFAULT;
use pagoda_guest::pattern::write_disk_pattern;
use testkit::accel;
use testkit::daemon::Daemon;
use testkit::image;
use testkit::results::report::{Bar, Report};
use testkit::undo::{Guard, Undo};

use super::Setup;
use super::svg;
use guest::{Guest, Shape, Start};

/// The paper's VM had 256 MB and was ballooned down to 128 MB; twice that, for the kernel has grown.
const MEMORY_MIB: u64 = 512;
const SIZES_MIB: [u64; 4] = [256, 320, 384, 448];
const SIZES_QUICK_MIB: [u64; 2] = [256, 384];
/// Larger than any of the guests.
const FILES_MIB: u64 = 640;
/// A disk of the class the paper's VM had a few of; below what the host's disk does.
const DISK_BYTES_PER_S: u64 = 40 << 20;
/// The page cache is full and has its files by then.
const WARM_UP_SECONDS: f64 = 12.0;
const SECONDS: f64 = 8.0;
const ROUNDS_MAX: usize = 3;
/// The bar; the paper's overhead was 1.4 to 4.4 %.
const RATIO_MIN: f64 = 0.95;
const WRITE_PERCENT: u32 = 20;

/// Memory that is taken from an idle VM, and how long that may take.
const TAKEN_MIB: u64 = 256;
const BALLOON_SECONDS_MAX: f64 = 5.0;
const PAGE_OUT_SECONDS_MAX: f64 = 2.0;
/// pvestatd's AutoBalloon: at most 100 MiB a VM and cycle of 10 s.
const PROXMOX_SECONDS: f64 = TAKEN_MIB as f64 / 100.0 * 10.0;
/// An idle VM: its memory is full of files that were read, or of a program's pages.
const IDLE_MEMORY_MIB: u64 = 512;
const IDLE_FILL_MIB: u64 = 400;
/// A guest that frees much: Linux keeps about as much as the difference unreported, until more is freed.
const REPORTING_MEMORY_MIB: u64 = 768;
const REPORTING_FILL_MIB: u64 = 600;
/// What is not reported by then is not going to be.
const REPORTING_MAX: Duration = Duration::from_secs(30);
/// Longer is not a figure but a failure.
const TAKE_MAX: Duration = Duration::from_secs(120);
const VM: &str = "bench-balloon";

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest cannot be started or is wrong.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(guest::QEMU, &images, &setup.dir)?;
    let mut report = setup.report_of("balloon", accelerator.name());
    let disk = FileSet::make(&setup.dir)?;
    let daemon = Daemon::start(&setup.dir)?;
    let host = Host { setup, daemon: &daemon, start: Start { images: &images, accelerator, disk: Some(&disk.path) } };
    let sizes = if setup.quick { &SIZES_QUICK_MIB[..] } else { &SIZES_MIB };
    let speeds = host.compare_sizes(sizes)?;
    for (size, speeds) in sizes.iter().zip(&speeds) {
        let name = format!("{MEMORY_MIB} MiB ballooned to {size} MiB: VM of {size} MiB, files");
        report.pair(&name, "MiB/s", &speeds.ballooned, &speeds.smaller, Bar::AtLeast(RATIO_MIN));
    }
    Ok((report, plot(sizes, &speeds)))
}

/// Takes memory from an idle VM.
///
/// # Errors
/// As [`run`]; memory does not come.
pub fn reclaim(setup: &Setup) -> Result<(Report, String)> {
    let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(guest::QEMU, &images, &setup.dir)?;
    let mut report = setup.report_of("reclaim", accelerator.name());
    let disk = FileSet::make(&setup.dir)?;
    let daemon = Daemon::start(&setup.dir)?;
    let host = Host { setup, daemon: &daemon, start: Start { images: &images, accelerator, disk: Some(&disk.path) } };
    let taken = host.take_memory(&mut report)?;
    let plot = svg::bar_chart(&svg::BarChart {
        title: format!("Taking {TAKEN_MIB} MiB from an idle VM"),
        y_label: "s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["Pagoda".to_owned()],
        groups: ["balloon", "page-out", "reporting"]
            .into_iter()
            .zip(&taken)
            .map(|(name, seconds)| (name.to_owned(), vec![svg::Bar::of(seconds)]))
            .collect(),
    });
    Ok((report, plot))
}

/// The disk image with the file set. Removed when dropped.
struct FileSet {
    path: PathBuf,
    _remove: Guard,
}

impl FileSet {
    fn make(dir: &Path) -> Result<FileSet> {
        let path = dir.join(format!("balloon-files-{}.img", std::process::id()));
        let remove = Guard::new(Undo::File { path: path.clone() })?;
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        write_disk_pattern(BufWriter::with_capacity(1 << 20, file), FILES_MIB << 20, DISK_SEED_DEFAULT)
            .with_context(|| format!("write {}", path.display()))?;
        Ok(FileSet { path, _remove: remove })
    }
}

/// MiB/s of files, by round.
#[derive(Default)]
struct Speeds {
    ballooned: Vec<f64>,
    smaller: Vec<f64>,
}

struct Host<'a> {
    setup: &'a Setup,
    daemon: &'a Daemon,
    start: Start<'a>,
}

impl Host<'_> {
    fn compare_sizes(&self, sizes: &[u64]) -> Result<Vec<Speeds>> {
        let mut all: Vec<Speeds> = sizes.iter().map(|_| Speeds::default()).collect();
        for round in 0..self.setup.rounds.min(ROUNDS_MAX) {
            for (size_mib, speeds) in sizes.iter().zip(&mut all) {
                eprintln!("balloon: round {}, {size_mib} MiB", round + 1);
                speeds.ballooned.push(self.serve_files(MEMORY_MIB, Some(*size_mib))?);
                speeds.smaller.push(self.serve_files(*size_mib, None)?);
            }
        }
        Ok(all)
    }

    /// The speed of a file server with so much memory, ballooned before it begins.
    fn serve_files(&self, memory_mib: u64, target_mib: Option<u64>) -> Result<f64> {
        let mut guest = self.boot(memory_mib, Some(DISK_BYTES_PER_S))?;
        if let Some(target_mib) = target_mib {
            self.daemon.set_balloon(VM, target_mib)?;
            self.wait_reached(memory_mib, target_mib)?;
        }
        let work = |seconds: f64| format!("run files seconds={seconds:.0} threads=4 write={WRITE_PERCENT}");
        guest.command(&work(self.setup.seconds(WARM_UP_SECONDS)))?;
        let lines = guest.command(&work(self.setup.seconds(SECONDS)))?;
        let done = lines.iter().find(|line| line.contains("done phase=files")).context("the end of the work")?;
        let line = pagoda_guest::lines::Line::parse(done).context("a line of the guest")?;
        let (bytes, us) = (line.number("bytes").context("bytes")?, line.number("us").context("us")?);
        if let Some(target_mib) = target_mib {
            // It worked with what was meant to be measured.
            self.wait_reached(memory_mib, target_mib)?;
        }
        self.end(guest)?;
        Ok(bytes as f64 / f64::from(1 << 20) / (us.max(1) as f64 / 1e6))
    }

    fn boot(&self, memory_mib: u64, bytes_per_s: Option<u64>) -> Result<Guest> {
        Guest::boot(self.daemon, &Shape { name: VM, memory_mib, bytes_per_s, ..Shape::default() }, &self.start)
    }

    fn end(&self, guest: Guest) -> Result<()> {
        guest.power_off()?;
        self.daemon.wait_gone(VM, TAKE_MAX)
    }

    fn wait_reached(&self, memory_mib: u64, target_mib: u64) -> Result<()> {
        let given = (memory_mib - target_mib) << 20;
        let reached = |info: &pagoda_api::VmInfo| {
            info.balloon.as_ref().is_some_and(|balloon| balloon.state == "reached" && balloon.ballooned_bytes == given)
        };
        self.daemon.wait_for_vm(VM, TAKE_MAX, reached).map(drop)
    }

    /// Seconds by balloon, by page-out and by reporting, by round.
    fn take_memory(&self, report: &mut Report) -> Result<[Vec<f64>; 3]> {
        let (mut ballooned, mut paged, mut reported) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..self.setup.rounds.min(ROUNDS_MAX) {
            eprintln!("balloon: taking {TAKEN_MIB} MiB, round {}", round + 1);
            ballooned.push(self.take_by_balloon()?);
            paged.push(self.take_by_page_out()?);
            reported.push(self.given_by_reporting()?);
        }
        let taking = format!("taking {TAKEN_MIB} MiB from an idle VM");
        let bar = Bar::AtMost(BALLOON_SECONDS_MAX);
        report.single(&format!("{taking}, by balloon, full of files"), "s", &ballooned, bar);
        let marks = vec![PROXMOX_SECONDS; ballooned.len()];
        report.pair(
            &format!("{taking}, by balloon: Proxmox' 100 MiB in 10 s"),
            "s",
            &ballooned,
            &marks,
            Bar::AtMost(1.0),
        );
        let bar = Bar::AtMost(PAGE_OUT_SECONDS_MAX);
        report.single(&format!("{taking}, by page-out, full of a program's pages"), "s", &paged, bar);
        let name = format!("{taking}, by free page reporting, after it freed {REPORTING_FILL_MIB} MiB");
        report.single(&name, "s", &reported, Bar::AtMost(BALLOON_SECONDS_MAX));
        Ok([ballooned, paged, reported])
    }

    /// From the request until the memory is the host's: out of the RAM file, and nowhere else.
    fn take_by_balloon(&self) -> Result<f64> {
        let mut guest = self.boot(IDLE_MEMORY_MIB, None)?;
        guest.command("run files passes=3 threads=2 write=0")?;
        let before = self.daemon.vm(VM)?;
        let start = Instant::now();
        self.daemon.set_balloon(VM, IDLE_MEMORY_MIB - TAKEN_MIB)?;
        let taken = |info: &pagoda_api::VmInfo| {
            let ballooned = info.balloon.as_ref().is_some_and(|balloon| balloon.ballooned_bytes == TAKEN_MIB << 20);
            ballooned && info.resident_bytes + info.swapped_bytes <= (IDLE_MEMORY_MIB - TAKEN_MIB) << 20
        };
        let after = self.daemon.wait_for_vm(VM, TAKE_MAX, taken)?;
        let seconds = start.elapsed().as_secs_f64();
        let mib = |info: &pagoda_api::VmInfo| info.resident_bytes >> 20;
        eprintln!("balloon: {} MiB in DRAM before, {} after {seconds:.2} s", mib(&before), mib(&after));
        self.end(guest)?;
        Ok(seconds)
    }

    fn take_by_page_out(&self) -> Result<f64> {
        let mut guest = self.boot(IDLE_MEMORY_MIB, None)?;
        guest.command(&format!("fill {IDLE_FILL_MIB}"))?;
        let cap_mib = (self.daemon.vm(VM)?.resident_bytes >> 20).saturating_sub(TAKEN_MIB);
        let start = Instant::now();
        self.daemon.set_dram(VM, cap_mib)?;
        self.daemon.wait_for_vm(VM, TAKE_MAX, |info| info.armed && info.resident_bytes <= cap_mib << 20)?;
        let seconds = start.elapsed().as_secs_f64();
        self.end(guest)?;
        Ok(seconds)
    }

    fn given_by_reporting(&self) -> Result<f64> {
        let mut guest = self.boot(REPORTING_MEMORY_MIB, None)?;
        guest.command(&format!("fill {REPORTING_FILL_MIB}"))?;
        let left = self.daemon.vm(VM)?.resident_bytes.saturating_sub(TAKEN_MIB << 20);
        let start = Instant::now();
        guest.command("drop")?;
        if let Err(error) = self.daemon.wait_for_vm(VM, REPORTING_MAX, |info| info.resident_bytes <= left) {
            // The time it had stands for it, and misses the bar.
            eprintln!("balloon: not reported: {error:#}");
        }
        let seconds = start.elapsed().as_secs_f64();
        self.end(guest)?;
        Ok(seconds)
    }
}

fn plot(sizes: &[u64], speeds: &[Speeds]) -> String {
    let group = |(size, speeds): (&u64, &Speeds)| {
        (format!("{size} MiB"), vec![svg::Bar::of(&speeds.smaller), svg::Bar::of(&speeds.ballooned)])
    };
    svg::bar_chart(&svg::BarChart {
        title: format!("File server: VM of that size, and VM of {MEMORY_MIB} MiB ballooned to it (ESX, figure 2)"),
        y_label: "MiB/s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["made that small".to_owned(), "ballooned".to_owned()],
        groups: sizes.iter().zip(speeds).map(group).collect(),
    })
}
