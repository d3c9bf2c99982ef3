//! Snapshots of a guest that writes all the time: how long does it stand still, and how fast is it in the first second after?
//!
//! The peer is QEMU alone with the same guest and the same load. It saves the state of its devices without RAM through a socket,
//! and is let run as soon as that is complete: a snapshot of no memory, which is the limit. Both sides are measured by QEMU's
//! own time stamps of its events STOP and RESUME, and take turns.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{CreateSnapshot, Snapshot, SnapshotName, SnapshotStage};
use pagoda_guest::lines::Line;
use serde_json::{Value, json};
use testkit::accel;
use testkit::daemon::Daemon;
use testkit::image;
use testkit::peers::faults::{Answer, Order, Placement, bare_userfaultfd};
use testkit::qmp::Qmp;
use testkit::results::report::{Bar, Report, median};

use super::balloon::guest::{self, Guest, Shape, Start};
use super::{Setup, svg};

/// Memory of the guest, and what its program writes to.
pub const SIZES_MIB: [(u64, u64); 3] = [(512, 320), (2048, 1536), (8192, 6144)];
/// Snapshots of each side in a round.
const SNAPSHOTS: usize = 5;
/// The guest writes for so long around each: longer than pages are protected before.
const LOAD: &str = "run random seconds=5 write=100";
/// It writes for so long before the snapshot begins.
const LEAD: Duration = Duration::from_millis(300);
/// The first second after a snapshot, and a second without one.
const SECOND: &str = "run random seconds=1 write=100";
/// The same of a guest that has a hot set: a tenth of its pages get nine tenths of its accesses, and half of them are writes.
const HOT_SECOND: &str = "run hot seconds=1 write=50";
const VM: &str = "bench-snapshot";
/// A snapshot that needs longer to be durable hangs.
const DURABLE_MAX: Duration = Duration::from_secs(300);
const CONT_MAX: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Each page is written once, in order.
const SWEEP: &str = "run seq passes=1 write=100";
/// Pages of the bare peer of a first write.
const BARE_MIB: usize = 128;
/// The bars of the issue, each in the unit of its name or as a ratio.
const ABOVE_STATE_MS_MAX: f64 = 5.0;
const P99_MS_MAX: f64 = 30.0;
const LARGEST_MAX: f64 = 1.3;
const SPEED_MIN: f64 = 0.8;
const FIRST_WRITE_MAX: f64 = 2.0;

/// What was measured of one size.
#[derive(Default)]
struct Size {
    ours_ms: Vec<f64>,
    state_ms: Vec<f64>,
    /// The first second after a snapshot against one without.
    speed: Vec<f64>,
    hot_speed: Vec<f64>,
    /// What writing a page takes longer when it is the first time after a snapshot.
    first_write_us: Vec<f64>,
    bare_write_us: Vec<f64>,
    filled_s: Vec<f64>,
    /// What snapshots take on the disk, against the memory that the guest uses.
    space: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest does not boot, or finds a wrong page; a snapshot fails.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let round = |start: &Start<'_>, shape: (u64, u64), size: &mut Size| {
        state_alone(setup, start, shape, size)?;
        snapshots(setup, start, shape, size)
    };
    let (accelerator, measured) = of_each_size(setup, "snapshot", round)?;
    let mut report = setup.report_of("snapshot", accelerator);
    for (memory_mib, size) in &measured {
        add_figures(&mut report, *memory_mib, size);
    }
    if let [(smallest, first), .., (largest, last)] = &measured[..]
        && let (Some(first), Some(last)) = (median(&first.ours_ms), median(&last.ours_ms))
    {
        let name = format!("pause at {largest} MiB against {smallest} MiB");
        report.single(&name, "ratio", &[last / first], Bar::AtMost(LARGEST_MAX));
    }
    Ok((report, plot(&measured)))
}

/// Measures guests of each size round by round. The accelerator's name, and what was measured by MiB of memory.
///
/// # Errors
/// The guest's image cannot be made, or a round fails.
pub fn of_each_size<S: Default>(
    setup: &Setup,
    bench: &str,
    measure: impl Fn(&Start<'_>, (u64, u64), &mut S) -> Result<()>,
) -> Result<(&'static str, Vec<(u64, S)>)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(guest::QEMU, &images, &setup.dir)?;
    let start = Start { images: &images, accelerator, disk: None };
    let sizes = if setup.quick { &SIZES_MIB[..2] } else { &SIZES_MIB };
    let wanted = |(memory_mib, _): &&(u64, u64)| setup.wants(&format!("{memory_mib} MiB"));
    let mut measured = Vec::new();
    for &(memory_mib, work_mib) in sizes.iter().filter(wanted) {
        let mut size = S::default();
        for round in 0..setup.rounds {
            eprintln!("{bench}: {memory_mib} MiB, round {} of {}", round + 1, setup.rounds);
            measure(&start, (memory_mib, work_mib), &mut size)?;
        }
        measured.push((memory_mib, size));
    }
    Ok((accelerator.name(), measured))
}

fn add_figures(report: &mut Report, memory_mib: u64, size: &Size) {
    let name = format!("{memory_mib} MiB");
    report.pair(&format!("{name}, pause: QEMU's state alone"), "ms", &size.ours_ms, &size.state_ms, Bar::None);
    if let (Some(ours), Some(state)) = (median(&size.ours_ms), median(&size.state_ms)) {
        report.single(
            &format!("{name}, pause beyond the state alone, p50"),
            "ms",
            &[ours - state],
            Bar::AtMost(ABOVE_STATE_MS_MAX),
        );
    }
    let longest = size.ours_ms.iter().copied().fold(0.0, f64::max);
    // Of fewer than a hundred the longest stands for it.
    report.single(&format!("{name}, pause, p99"), "ms", &[longest], Bar::AtMost(P99_MS_MAX));
    let speed = format!("{name}, speed in the first second after");
    report.single(&format!("{speed}, all pages written at random"), "ratio", &size.speed, Bar::AtLeast(SPEED_MIN));
    report.single(&format!("{speed}, a hot set half written"), "ratio", &size.hot_speed, Bar::AtLeast(SPEED_MIN));
    report.pair(
        &format!("{name}, first write after it, per page: a bare protection fault and a copy of the page"),
        "us",
        &size.first_write_us,
        &size.bare_write_us,
        Bar::AtMost(FIRST_WRITE_MAX),
    );
    report.single(&format!("{name}, until it is durable"), "s", &size.filled_s, Bar::None);
    report.single(&format!("{name}, room on the disk for a byte in use"), "bytes", &size.space, Bar::None);
}

fn plot(measured: &[(u64, Size)]) -> String {
    let group = |(memory_mib, size): &(u64, Size)| {
        (format!("{memory_mib} MiB"), vec![svg::Bar::of(&size.ours_ms), svg::Bar::of(&size.state_ms)])
    };
    svg::bar_chart(&svg::BarChart {
        title: "How long a guest stands still for a snapshot".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["snapshot".to_owned(), "QEMU's state alone".to_owned()],
        groups: measured.iter().map(group).collect(),
    })
}

/// What a guest is told that writes to so much.
pub fn append(work_mib: u64) -> String {
    format!("pagoda.mib={work_mib} pagoda.threads=1 pagoda.write=100")
}

/// Has the guest write while `act` does something.
fn under_load<T>(guest: &mut Guest, act: impl FnOnce() -> Result<T>) -> Result<T> {
    guest.begin(LOAD)?;
    std::thread::sleep(LEAD);
    let done = act()?;
    let (lines, bad_pages) = guest.end(LOAD)?;
    ensure!(bad_pages == 0, "{lines:#?}");
    Ok(done)
}

/// How fast a phase of the guest is right after a snapshot, against the same without one.
fn speed_after(daemon: &Daemon, guest: &mut Guest, snapshot: &str, phase: &str) -> Result<f64> {
    let speed = |guest: &mut Guest| done(guest, phase).map(|(ops, us)| ops / us);
    let without = speed(guest)?;
    take(daemon, snapshot)?;
    Ok(speed(guest)? / without)
}

/// How many accesses a phase made, and its microseconds.
fn done(guest: &mut Guest, phase: &str) -> Result<(f64, f64)> {
    let lines = guest.command(phase)?;
    let done = lines.iter().filter_map(|line| Line::parse(line)).find(|line| line.kind == "done");
    let ops = done.and_then(|line| line.number("ops").zip(line.number("us")));
    let (ops, us) = ops.with_context(|| format!("how much the guest did: {lines:#?}"))?;
    Ok((ops as f64, us.max(1) as f64))
}

fn snapshots(setup: &Setup, start: &Start<'_>, (memory_mib, work_mib): (u64, u64), size: &mut Size) -> Result<()> {
    let daemon = Daemon::start(&setup.dir)?;
    let append = append(work_mib);
    let shape = Shape { name: VM, memory_mib, min_mib: 64, append: &append, ..Shape::default() };
    let mut guest = Guest::boot(&daemon, &shape, start)?;
    guest.command(&format!("fill {work_mib}"))?;
    let used = daemon.vm(VM)?.resident_bytes;
    for number in 0..SNAPSHOTS {
        let name = format!("s{number}");
        let snapshot = under_load(&mut guest, || take(&daemon, &name))?;
        let pause_us = snapshot.pause_us.context("how long the guest stood still")?;
        size.ours_ms.push(pause_us as f64 / 1e3);
        wait_durable(&daemon, VM, &name)?;
        remove(&daemon, &name)?;
        size.hot_speed.push(speed_after(&daemon, &mut guest, "hot", HOT_SECOND)?);
        wait_durable(&daemon, VM, "hot")?;
        remove(&daemon, "hot")?;
        let began = Instant::now();
        size.speed.push(speed_after(&daemon, &mut guest, "after", SECOND)?);
        let whole = wait_durable(&daemon, VM, "after")?;
        size.filled_s.push(began.elapsed().as_secs_f64());
        size.space.push(whole.own_bytes as f64 / used as f64);
        remove(&daemon, "after")?;
        let pages = (work_mib << 20) as f64 / 4096.0;
        let without = done(&mut guest, SWEEP)?.1;
        take(&daemon, "swept")?;
        let after = done(&mut guest, SWEEP)?.1;
        size.first_write_us.push((after - without) / pages);
        wait_durable(&daemon, VM, "swept")?;
        remove(&daemon, "swept")?;
    }
    guest.power_off()?;
    let bare = bare_userfaultfd(Answer::CopyAndUnprotect, Placement::Free, Order::LoneAtRandom, BARE_MIB, 1)?;
    size.bare_write_us.push(bare.mean_us);
    Ok(())
}

fn take(daemon: &Daemon, name: &str) -> Result<Snapshot> {
    let request = CreateSnapshot { name: Some(name.to_owned()), disks: Some(false), wait_durable: false };
    daemon.client().take_snapshot(VM, &request).with_context(|| format!("take the snapshot {name}"))
}

/// Waits until a snapshot outlives the host.
///
/// # Errors
/// It is lost, or that takes too long.
pub fn wait_durable(daemon: &Daemon, vm: &str, name: &str) -> Result<Snapshot> {
    let (began, full_name) = (Instant::now(), SnapshotName::new(vm, name));
    loop {
        let snapshot = daemon.client().snapshot(&full_name)?;
        match snapshot.stage {
            SnapshotStage::Durable => return Ok(snapshot),
            SnapshotStage::Lost => bail!("{snapshot:?}"),
            _ => ensure!(began.elapsed() < DURABLE_MAX, "{snapshot:?}"),
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn remove(daemon: &Daemon, name: &str) -> Result<()> {
    let removed = daemon.client().remove_snapshot(&SnapshotName::new(VM, name));
    removed.map(drop).with_context(|| format!("remove {name}"))
}

/// The peer: QEMU alone saves its state without RAM.
fn state_alone(setup: &Setup, start: &Start<'_>, (memory_mib, work_mib): (u64, u64), size: &mut Size) -> Result<()> {
    let (monitor, stream) = (setup.dir.join("snapshot.qmp"), setup.dir.join("snapshot.stream"));
    let more = [
        "-qmp".to_owned(),
        format!("unix:{},server=on,wait=off", monitor.display()),
        "-object".to_owned(),
        format!("memory-backend-memfd,id=ram0,size={memory_mib}M,share=on"),
        "-machine".to_owned(),
        "memory-backend=ram0".to_owned(),
    ];
    let append = append(work_mib);
    let shape = Shape { name: VM, memory_mib, append: &append, more: &more, ..Shape::default() };
    let mut guest = Guest::boot_alone(&setup.dir, &shape, start)?;
    guest.command(&format!("fill {work_mib}"))?;
    let mut qmp = Qmp::connect(&monitor)?;
    let on = |name: &str| json!({ "capability": name, "state": true });
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": [on("events"), on("x-ignore-shared")] }))?;
    for _ in 0..SNAPSHOTS {
        size.state_ms.push(under_load(&mut guest, || save_state(&mut qmp, &stream))?);
    }
    guest.power_off()
}

/// How long the guest stood still for it, in milliseconds.
fn save_state(qmp: &mut Qmp, path: &Path) -> Result<f64> {
    let listener = listen(path)?;
    let reader = std::thread::spawn(move || -> std::io::Result<usize> {
        let mut state = Vec::new();
        listener.accept()?.0.read_to_end(&mut state)?;
        Ok(state.len())
    });
    qmp.execute("migrate", json!({ "uri": format!("unix:{}", path.display()) }))?;
    let stopped = qmp.wait_event(is("STOP"))?;
    qmp.wait_event(|event| event["event"] == "MIGRATION" && event["data"]["status"] == "completed")?;
    // Refused for a moment, until QEMU has put its migration away.
    let began = Instant::now();
    while let Err(error) = qmp.execute("cont", json!({})) {
        ensure!(began.elapsed() < CONT_MAX, "{error:#}");
    }
    let resumed = qmp.wait_event(is("RESUME"))?;
    let bytes = reader.join().map_err(|_| anyhow::anyhow!("the reader of the state panicked"))??;
    ensure!(bytes > 0, "QEMU sent no state");
    Ok((time_us(&resumed)? - time_us(&stopped)?) / 1e3)
}

fn is(name: &'static str) -> impl Fn(&Value) -> bool {
    move |event| event["event"] == name
}

/// When it happened, by QEMU's clock: microseconds since 1970.
///
/// # Errors
/// It says no time.
pub fn time_us(event: &Value) -> Result<f64> {
    let part = |name: &str| event["timestamp"][name].as_f64().with_context(|| format!("the time of {event}"));
    Ok(part("seconds")? * 1e6 + part("microseconds")?)
}

fn listen(path: &Path) -> Result<UnixListener> {
    // Of the save before.
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path).with_context(|| format!("listen on {}", path.display()))
}
