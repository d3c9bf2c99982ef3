//! A guest that swaps by itself while the host pages out: double paging (ESX sections 3.1 and 3.3).
//!
//! The guest has less memory than its program, and the host less DRAM than the guest's memory. By paging alone both
//! choose: the chunk queues are compared with random replacement, which no guest's choice can defeat. By its balloon the
//! guest alone chooses, and nothing of it is read from the host's swap.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::accel::{self, Accelerator};
use testkit::daemon::Daemon;
use testkit::image::{self, Images};
use testkit::results::report::{Bar, Report};
use testkit::undo::{Guard, Undo};

use super::Setup;
use super::balloon::guest::{self, Guest, Shape, Start};
use super::svg;

const MEMORY_MIB: u64 = 256;
/// What the host leaves to the guest.
const DRAM_MIB: u64 = 176;
/// What the guest's program works on: more than its memory.
const WORK_MIB: u64 = 288;
const SWAP_MIB: u64 = 512;
/// The guest's kernel has found its own balance by then.
const WARM_UP_SECONDS: f64 = 10.0;
const SECONDS: f64 = 20.0;
/// "not more than 10 % worse".
const RATIO_MIN: f64 = 0.9;
/// What the balloon holds, of what was asked.
const GIVEN_MIN: f64 = 0.95;
/// What the host still reads, of what it reads by paging alone.
const READ_RATIO_MAX: f64 = 0.1;
const REACHED_MAX: Duration = Duration::from_secs(180);
const VM: &str = "bench-paging";

/// How the guest is brought down to [`DRAM_MIB`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Queues,
    Random,
    Balloon,
}

/// What was measured, with one value for each round.
#[derive(Default)]
struct Runs {
    pages_per_s: Vec<f64>,
    host_reads_per_s: Vec<f64>,
    /// What the balloon holds at the end, of what was asked for.
    given: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest cannot be started or is wrong.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let wanted = image::ImageArgs { tools: true, ..image::ImageArgs::default() };
    let mut images = image::build(&wanted).context("make the guest's image")?;
    images.initrd = images.tools_initrd.clone().context("the tools image")?;
    let accelerator = accel::find(guest::QEMU, &images, &setup.dir)?;
    let mut report = setup.report_of("paging", accelerator.name());
    let (mut queues, mut random, mut balloon) = (Runs::default(), Runs::default(), Runs::default());
    for round in 0..setup.rounds {
        for (by, runs) in [(By::Queues, &mut queues), (By::Random, &mut random), (By::Balloon, &mut balloon)] {
            eprintln!("paging: round {}, {}", round + 1, name_of(by));
            measure(setup, &images, accelerator, by, runs)?;
        }
    }
    let guest = "guest that swaps by itself";
    let name = format!("{guest}, paged out: chunk queues against random replacement");
    report.pair(&name, "pages/s", &queues.pages_per_s, &random.pages_per_s, Bar::AtLeast(RATIO_MIN));
    let name = format!("{guest}: what its balloon holds while it swaps, of what was asked");
    report.single(&name, "", &balloon.given, Bar::AtLeast(GIVEN_MIN));
    let name = format!("{guest}, read from the host's swap: ballooned against paged out");
    let bar = Bar::AtMost(READ_RATIO_MAX);
    report.pair(&name, "pages/s", &balloon.host_reads_per_s, &queues.host_reads_per_s, bar);
    let name = format!("{guest}: ballooned against paged out");
    report.pair(&name, "pages/s", &balloon.pages_per_s, &queues.pages_per_s, Bar::None);
    let plot = svg::bar_chart(&svg::BarChart {
        title: format!("Program of {WORK_MIB} MiB in a guest of {MEMORY_MIB} MiB with {DRAM_MIB} MiB of DRAM"),
        y_label: "pages/s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["worked on".to_owned(), "read from the host's swap".to_owned()],
        groups: [(By::Queues, &queues), (By::Random, &random), (By::Balloon, &balloon)]
            .map(|(by, runs)| {
                let bars = vec![svg::Bar::of(&runs.pages_per_s), svg::Bar::of(&runs.host_reads_per_s)];
                (name_of(by).to_owned(), bars)
            })
            .to_vec(),
    });
    Ok((report, plot))
}

fn name_of(by: By) -> &'static str {
    match by {
        By::Queues => "chunk queues",
        By::Random => "random",
        By::Balloon => "balloon",
    }
}

fn measure(setup: &Setup, images: &Images, accelerator: Accelerator, by: By, runs: &mut Runs) -> Result<()> {
    let options: &[&str] = if by == By::Random { &["--replacement", "random"] } else { &[] };
    let daemon = Daemon::start_with(&setup.dir, "daemon", options)?;
    let swap = SwapDisk::make(&setup.dir)?;
    let start = Start { images, accelerator, disk: Some(&swap.path) };
    let mut guest = Guest::boot(&daemon, &Shape { name: VM, memory_mib: MEMORY_MIB, ..Shape::default() }, &start)?;
    guest.command("swapon vda")?;
    match by {
        By::Queues | By::Random => daemon.set_dram(VM, DRAM_MIB)?,
        By::Balloon => {
            daemon.set_balloon(VM, DRAM_MIB)?;
            daemon.wait_for_vm(VM, REACHED_MAX, |info| {
                info.balloon.as_ref().is_some_and(|balloon| balloon.state == "reached")
            })?;
        }
    }
    guest.command(&format!("fill {WORK_MIB}"))?;
    let work = |seconds: f64| format!("run random seconds={seconds:.0} threads=2 write=30");
    guest.command(&work(setup.seconds(WARM_UP_SECONDS)))?;
    let before = *daemon.vm(VM)?.counters.get("pages_in").context("pages_in")?;
    let lines = guest.command(&work(setup.seconds(SECONDS)))?;
    let after = daemon.vm(VM)?;
    let read = after.counters.get("pages_in").context("pages_in")? - before;
    let held = after.balloon.map_or(0, |balloon| balloon.ballooned_bytes);
    runs.given.push(held as f64 / ((MEMORY_MIB - DRAM_MIB) << 20) as f64);
    let done = lines.iter().find(|line| line.contains("done phase=random")).context("the end of the work")?;
    let line = pagoda_guest::lines::Line::parse(done).context("a line of the guest")?;
    let (ops, us) = (line.number("ops").context("ops")?, line.number("us").context("us")?);
    guest.power_off()?;
    daemon.wait_gone(VM, REACHED_MAX)?;
    let seconds = us.max(1) as f64 / 1e6;
    runs.pages_per_s.push(ops as f64 / seconds);
    runs.host_reads_per_s.push(read as f64 / seconds);
    Ok(())
}

/// The guest's swap disk. Removed when dropped.
struct SwapDisk {
    path: PathBuf,
    _remove: Guard,
}

impl SwapDisk {
    fn make(dir: &Path) -> Result<SwapDisk> {
        let path = dir.join(format!("guest-swap-{}.img", std::process::id()));
        let remove = Guard::new(Undo::File { path: path.clone() })?;
        let file = std::fs::File::create(&path).with_context(|| format!("create {}", path.display()))?;
        file.set_len(SWAP_MIB << 20).with_context(|| format!("size {}", path.display()))?;
        let made = Command::new("/sbin/mkswap").arg("--quiet").arg(&path).output().context("run mkswap")?;
        ensure!(made.status.success(), "mkswap: {}", String::from_utf8_lossy(&made.stderr).trim());
        Ok(SwapDisk { path, _remove: remove })
    }
}
