//! From a command to a guest that goes on where a snapshot was taken: put back while it runs, and started from a cold file.
//!
//! * **Roll-back.** From the start of the command to QEMU's own time stamp of RESUME, with all that lies between: the old QEMU
//!   ends, the new one starts and attaches, and gets its state. The peer is `loadvm` of QEMU alone, from a qcow2 file in the
//!   page cache: it reads all memory, into the process that is there.
//! * **Restore into a quarter of the DRAM.** From the start of the command to the guest's first reply, when nothing of the
//!   snapshot is in the page cache. The peer is the time that a sweep over the snapshot's file takes, past the page cache.
//! * **The same with a record** of what the guest needed first, by turns with restores without one: the first reply, and the page
//!   faults up to then for which something was read or being read.
//!
//! All guests verify their memory afterwards.

use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::CreateSnapshot;
use pagoda_sys::swapfile::DirectBuffer;
use serde_json::{Value, json};
use testkit::daemon::Daemon;
use testkit::qmp::Qmp;
use testkit::results::report::{Bar, Report};

use super::balloon::guest::{Guest, Shape, Start};
use super::snapshot::{SIZES_MIB, append, of_each_size, wait_durable};
use super::{Setup, svg};

/// Roll-backs and restores in a round.
const REPEATS: usize = 3;
/// What the guest does in between, so that it has something to lose.
const WORK: &str = "run random passes=1 write=100";
/// The guest answers at once.
const REPLY: &str = "idle 0";
const VM: &str = "bench-restore";
const SNAPSHOT: &str = "here";
pub const END_MAX: Duration = Duration::from_secs(30);
/// The file is read in pieces of this size.
const PIECE: usize = 1 << 20;
/// The bars of the issue, each in the unit of its name or as a ratio.
const ROLL_BACK_MS_MAX: f64 = 150.0;
const OF_LOADVM_MAX: f64 = 0.1;
const OF_READING_ALL_MAX: f64 = 1.0 / 3.0;
const OF_FAULTS_WITHOUT_MAX: f64 = 0.1;
const OF_REPLY_WITHOUT_MAX: f64 = 1.0 / 3.0;
/// The faults that wait for the disk.
const WAITS: [&str; 3] = ["faults_swap_page", "faults_swap_chunk", "faults_joined"];
/// The record of what a VM of the snapshot needed first.
const RECORD: &str = "touched";

/// What was measured of one size.
#[derive(Default)]
struct Size {
    roll_back_ms: Vec<f64>,
    loadvm_ms: Vec<f64>,
    reply_ms: Vec<f64>,
    read_all_ms: Vec<f64>,
    waits: Vec<f64>,
    recorded_reply_ms: Vec<f64>,
    recorded_waits: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest does not boot, or finds a wrong page; a snapshot fails.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let round = |start: &Start<'_>, shape: (u64, u64), size: &mut Size| {
        load_vm(setup, start, shape, size)?;
        pagoda(setup, start, shape, size)
    };
    let (accelerator, measured) = of_each_size(setup, "restore", round)?;
    let mut report = setup.report_of("restore", accelerator);
    for (memory_mib, size) in &measured {
        add_figures(&mut report, *memory_mib, size);
    }
    Ok((report, plot(&measured)))
}

fn add_figures(report: &mut Report, memory_mib: u64, size: &Size) {
    let name = format!("{memory_mib} MiB");
    let command = format!("{name}, roll-back, command to first instruction");
    report.single(&command, "ms", &size.roll_back_ms, Bar::AtMost(ROLL_BACK_MS_MAX));
    let is_bar = memory_mib == SIZES_MIB[1].0;
    let bar = if is_bar { Bar::AtMost(OF_LOADVM_MAX) } else { Bar::None };
    report.pair(&format!("{command}: QEMU's loadvm"), "ms", &size.roll_back_ms, &size.loadvm_ms, bar);
    report.pair(
        &format!("{name}, restore from a cold file into a quarter, first reply: reading all of it"),
        "ms",
        &size.reply_ms,
        &size.read_all_ms,
        Bar::AtMost(OF_READING_ALL_MAX),
    );
    let recorded = format!("{name}, restore with a record of what was needed first");
    report.pair(
        &format!("{recorded}, page faults that waited: without"),
        "faults",
        &size.recorded_waits,
        &size.waits,
        Bar::AtMost(OF_FAULTS_WITHOUT_MAX),
    );
    report.pair(
        &format!("{recorded}, first reply: without"),
        "ms",
        &size.recorded_reply_ms,
        &size.reply_ms,
        Bar::AtMost(OF_REPLY_WITHOUT_MAX),
    );
}

fn plot(measured: &[(u64, Size)]) -> String {
    let group = |(memory_mib, size): &(u64, Size)| {
        let sides = [&size.roll_back_ms, &size.loadvm_ms, &size.reply_ms, &size.recorded_reply_ms, &size.read_all_ms];
        (format!("{memory_mib} MiB"), sides.map(|side| svg::Bar::of(side)).to_vec())
    };
    svg::bar_chart(&svg::BarChart {
        title: "From a command to a guest that goes on".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Log,
        series: ["roll-back", "loadvm", "restore, first reply", "the same with a record", "reading all"]
            .map(str::to_owned)
            .to_vec(),
        groups: measured.iter().map(group).collect(),
    })
}

/// A monitor of the bench's own.
fn monitor_words(monitor: &Path) -> [String; 2] {
    ["-qmp".to_owned(), format!("unix:{},server=on,wait=off", monitor.display())]
}

fn pagoda(setup: &Setup, start: &Start<'_>, (memory_mib, work_mib): (u64, u64), size: &mut Size) -> Result<()> {
    let daemon = Daemon::start(&setup.dir)?;
    let monitor = daemon.dir().join("restore.qmp");
    let (append, more) = (append(work_mib), monitor_words(&monitor));
    let shape = Shape { name: VM, memory_mib, min_mib: 64, append: &append, more: &more, ..Shape::default() };
    let mut guest = Guest::boot(&daemon, &shape, start)?;
    guest.command(&format!("fill {work_mib}"))?;
    let request = CreateSnapshot { name: Some(SNAPSHOT.to_owned()), disks: Some(false), wait_durable: false };
    daemon.client().take_snapshot(VM, &request).context("take the snapshot")?;
    wait_durable(&daemon, VM, SNAPSHOT)?;
    for _ in 0..REPEATS {
        guest.command(WORK)?;
        // The new QEMU makes it anew, and nobody is to reach the old one.
        fs::remove_file(&monitor).context("remove the monitor's socket")?;
        let began = epoch_us()?;
        let next = Guest::restore(&daemon, VM, &["vm", "rollback", VM, "--to", SNAPSHOT])?;
        size.roll_back_ms.push((resumed_us(&monitor)? - began) / 1e3);
        guest = next;
        guest.command("verify")?;
    }
    let pages = pages_file(daemon.dir())?;
    let quarter = format!("{}M", memory_mib / 4);
    let record = pages.with_file_name(RECORD);
    for _ in 0..REPEATS {
        for is_recorded in [false, true] {
            guest.power_off()?;
            daemon.wait_gone(VM, END_MAX)?;
            prepare_record(&record, is_recorded)?;
            forget(&pages)?;
            let began = Instant::now();
            guest = Guest::restore(&daemon, VM, &["vm", "restore", VM, "--from", SNAPSHOT, "--dram", &quarter])?;
            guest.command(REPLY)?;
            let reply_ms = began.elapsed().as_secs_f64() * 1e3;
            let counters = daemon.client().vm(VM).context("look at the VM")?.counters;
            let waits: u64 = WAITS.iter().filter_map(|cause| counters.get(*cause)).sum();
            let (replies, all_waits) = match is_recorded {
                true => (&mut size.recorded_reply_ms, &mut size.recorded_waits),
                false => (&mut size.reply_ms, &mut size.waits),
            };
            replies.push(reply_ms);
            all_waits.push(waits as f64);
            guest.command("verify")?;
        }
        size.read_all_ms.push(read_all(&pages)?);
    }
    guest.power_off()
}

/// The peer of a roll-back.
fn load_vm(setup: &Setup, start: &Start<'_>, (memory_mib, work_mib): (u64, u64), size: &mut Size) -> Result<()> {
    let (monitor, disk) = (setup.dir.join("restore.qmp"), setup.dir.join("restore.qcow2"));
    // Of the run before.
    let _ = fs::remove_file(&monitor);
    let made =
        std::process::Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&disk).arg("64M").status();
    ensure!(made.context("start qemu-img")?.success(), "qemu-img made no {}", disk.display());
    let mut more = monitor_words(&monitor).to_vec();
    more.extend(["-drive".to_owned(), format!("file={},format=qcow2,if=none,id=state", disk.display())]);
    let append = append(work_mib);
    let shape = Shape { name: VM, memory_mib, append: &append, more: &more, ..Shape::default() };
    let mut guest = Guest::boot_alone(&setup.dir, &shape, start)?;
    guest.command(&format!("fill {work_mib}"))?;
    let mut qmp = Qmp::connect(&monitor)?;
    human(&mut qmp, &format!("savevm {SNAPSHOT}"))?;
    for _ in 0..REPEATS {
        guest.command(WORK)?;
        let began = Instant::now();
        human(&mut qmp, &format!("loadvm {SNAPSHOT}"))?;
        size.loadvm_ms.push(began.elapsed().as_secs_f64() * 1e3);
        guest.command("verify")?;
    }
    guest.power_off()?;
    fs::remove_file(&disk).context("remove the peer's disk")
}

/// A command of QEMU's other monitor, which answers nothing unless something is wrong.
fn human(qmp: &mut Qmp, line: &str) -> Result<()> {
    let answer = qmp.execute("human-monitor-command", json!({ "command-line": line }))?;
    let text = answer.as_str().unwrap_or_default().trim();
    ensure!(text.is_empty(), "{line}: {text}");
    Ok(())
}

/// The time of the clock, in microseconds since 1970.
///
/// # Errors
/// The clock is before that.
pub fn epoch_us() -> Result<f64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("read the clock")?.as_secs_f64() * 1e6)
}

/// When QEMU let its guest run, by its own clock. If it did before anybody could listen, now.
fn resumed_us(monitor: &Path) -> Result<f64> {
    let mut qmp = Qmp::connect(monitor)?;
    let is_resumed = |event: &Value| event["event"] == "RESUME";
    let runs = qmp.status()? == "running";
    let event = match qmp.seen(is_resumed) {
        Some(event) => event,
        None if runs => return epoch_us(),
        None => qmp.wait_event(is_resumed)?,
    };
    let part = |name: &str| event["timestamp"][name].as_f64().with_context(|| format!("the time of {event}"));
    Ok(part("seconds")? * 1e6 + part("microseconds")?)
}

/// The content of the only snapshot there is.
fn pages_file(dir: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("look into {}", dir.display()))?;
    for entry in entries {
        let path = entry.context("read a directory")?.path();
        if path.is_dir() {
            if let Ok(found) = pages_file(&path) {
                return Ok(found);
            }
        } else if path.file_name().is_some_and(|name| name == "pages") {
            return Ok(path);
        }
    }
    bail!("no snapshot in {}", dir.display())
}

/// The snapshot has a record, which the VM before it has left, or none.
fn prepare_record(record: &Path, is_recorded: bool) -> Result<()> {
    if !is_recorded {
        let _ = fs::remove_file(record);
        return Ok(());
    }
    let deadline = Instant::now() + END_MAX;
    while !record.exists() {
        ensure!(Instant::now() < deadline, "the VM before has left no record");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Nothing of the snapshot is in the page cache.
fn forget(pages: &Path) -> Result<()> {
    for file in ["pages", "map", "state", RECORD] {
        let path = pages.with_file_name(file);
        if file == RECORD && !path.exists() {
            continue;
        }
        let opened = fs::File::open(path).with_context(|| format!("open {file}"))?;
        opened.sync_all().context("write a snapshot to the disk")?;
        rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::DontNeed).context("drop a snapshot's cache")?;
    }
    Ok(())
}

/// Milliseconds of a sweep.
fn read_all(pages: &Path) -> Result<f64> {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = fs::OpenOptions::new().read(true).custom_flags(direct).open(pages).context("open the content")?;
    let len = file.metadata()?.len();
    let mut piece = DirectBuffer::new(PIECE);
    let began = Instant::now();
    let mut at = 0;
    while at < len {
        let read = file.read_at(&mut piece, at).context("read the content")?;
        ensure!(read > 0, "the content ends at {at}");
        at += read as u64;
    }
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
