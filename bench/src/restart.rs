//! A VM over restarts of the daemon that meet faults: is it alive with all its pages, and how soon is it served?
//!
//! `restart` is about faults that keep a daemon from knowing whether the VM's process runs. It must never conclude that it
//! has ended: a wrong daemon removes the swap file of a VM that runs. `optional` is about parts that paging does not
//! need. There is no peer: the kernel's swap cannot be restarted.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use testkit::daemon::Daemon;
use testkit::peers::disk::DirectFile;
use testkit::results::report::{Bar, Report, median};
use testkit::stepped::SteppedToy;
use testkit::undo::{Guard, Undo};

use super::crash::recovery_s;

use super::{Setup, svg};

const MEMORY_MIB: u64 = 512;
const DRAM_MIB: u64 = 128;
const RESTARTS: usize = 20;
const RESTARTS_QUICK: usize = 3;
/// The load runs so long before each kill.
const BEFORE: Duration = Duration::from_millis(100);
/// No daemon is there for so long: longer than any page-in.
const WITHOUT: Duration = Duration::from_millis(300);
/// A daemon that meets a fault runs so long: its reaper looks every second.
const FAULTY: Duration = Duration::from_millis(1500);
/// The load goes on for so long in all: longer than a kill and a recovery as the bar wants it.
const RUN: &str = "--workload random --mode read --seconds 1.0";
const SERVICE_MS_MAX: f64 = 200.0;
const VM: &str = "bench-restart";
/// An address of documentation (RFC 5737), which no host has.
const ABSENT: &str = "192.0.2.7:9464";

/// Without the right to lift a limit again, if this machine gives it.
const UNPRIVILEGED: [&str; 5] = ["setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"];

fn restarts(setup: &Setup) -> usize {
    if setup.quick { RESTARTS_QUICK } else { RESTARTS }
}

/// A toy with its pages in swap.
fn paged(daemon: &Daemon, options: &[&str]) -> Result<SteppedToy> {
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, DRAM_MIB, options)?;
    toy.fill()?;
    Ok(toy)
}

/// How many of the restarts the VM survived, and the wrong pages after them.
#[derive(Debug, Default)]
struct Survived {
    alive: f64,
    wrong: f64,
}

/// Kills the daemon, has `fault` start one that meets it, kills that, and starts one that meets none.
fn survive(
    setup: &Setup,
    toy_options: &[&str],
    mut fault: impl FnMut(&mut Daemon, u32, usize) -> Result<()>,
) -> Result<Survived> {
    let mut daemon = Daemon::start(&setup.dir)?;
    let mut toy = paged(&daemon, toy_options)?;
    let mut survived = Survived::default();
    for number in 0..restarts(setup) {
        daemon.kill9()?;
        fault(&mut daemon, toy.pid(), number)?;
        daemon.change_start(&[], &[]);
        daemon.restart()?;
        // Every page: most of them are in the swap file alone.
        let done = toy.go_unverified("--workload seq --mode read --passes 1 --no-latency")?;
        survived.alive += f64::from(u8::from(daemon.vm(VM).is_ok()));
        survived.wrong += done.bad_pages as f64;
    }
    toy.quit()?;
    Ok(survived)
}

/// The daemon meets a fault for a while.
fn meets(daemon: &mut Daemon, wrapper: &[&str]) -> Result<()> {
    daemon.change_start(&[], wrapper);
    daemon.restart_unanswered()?;
    std::thread::sleep(FAULTY);
    daemon.kill9()
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A daemon does not come back, or the toy dies.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let mut report = setup.report("restart");
    let odd_name = survive(setup, &["--odd-name"], |daemon, _, _| meets(daemon, &[]))?;
    // From too few to start at all up to enough for everything but the last steps.
    let few = survive(setup, &[], |daemon, _, number| {
        let limit = format!("--nofile={0}:{0}", 8 + 3 * number);
        meets(daemon, &[&UNPRIVILEGED[..], &["prlimit", &limit]].concat())
    })?;
    let hidden = survive(setup, &[], |daemon, pid, _| {
        let hide = format!("mount -t tmpfs none /proc/{pid} && exec \"$@\"");
        meets(daemon, &["unshare", "--mount", "sh", "-c", &hide, "sh"])
    })?;
    let cases = [
        ("a name in /proc that is no text", odd_name),
        ("8 to 65 descriptors", few),
        ("/proc hides the process", hidden),
    ];
    let count = restarts(setup);
    let mut groups = Vec::new();
    for (case, Survived { alive, wrong }) in cases {
        report.single(&format!("{case}: alive, of {count}"), "restarts", &[alive], Bar::AtLeast(count as f64));
        report.single(&format!("{case}: wrong pages"), "pages", &[wrong], Bar::AtMost(0.0));
        groups.push((case.to_owned(), vec![svg::Bar::of(&[alive])]));
    }
    Ok((report, chart(&format!("A VM over {count} restarts of a daemon that cannot look at it"), "alive", groups)))
}

fn chart(title: &str, y_label: &str, groups: Vec<(String, Vec<Option<svg::Bar>>)>) -> String {
    svg::bar_chart(&svg::BarChart {
        title: title.to_owned(),
        y_label: y_label.to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec![y_label.to_owned()],
        groups,
    })
}

/// Runs the bench of optional parts.
///
/// # Errors
/// A daemon does not serve, or the toy dies.
pub fn optional(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let taken = TcpListener::bind("127.0.0.1:0").context("take a port")?;
    let port = taken.local_addr()?.to_string();
    let limit = [&UNPRIVILEGED[..], &["prlimit", "--fsize=600000000:600000000"]].concat();
    let nothing = |_: &Path| Ok(None);
    let cases: [(&str, &[&str], &[&str], &Break); 6] = [
        ("nothing broken", &[], &[], &nothing),
        ("metrics port taken", &["--metrics", &port], &[], &nothing),
        ("metrics address not of this host", &["--metrics", ABSENT], &[], &nothing),
        ("control socket not to be had", &[], &[], &take_control_path),
        ("directory of records full", &[], &[], &fill_records),
        ("files may have 600 MB, swap has 512 MiB", &[], &limit, &nothing),
    ];
    let mut report = setup.report("optional");
    let mut groups = Vec::new();
    for (case, options, wrapper, broken) in cases {
        let Served { service_ms, disk_ms, wrong } =
            serve(setup, options, wrapper, broken).with_context(|| case.to_owned())?;
        let worst = service_ms.iter().copied().fold(0.0, f64::max);
        eprintln!("optional: {case}: {worst:.1} ms at worst");
        report.single(&format!("{case}: service again, the slowest"), "ms", &[worst], Bar::AtMost(SERVICE_MS_MAX));
        report.note(said(&service_ms, &disk_ms));
        report.single(&format!("{case}: wrong pages"), "pages", &[wrong], Bar::AtMost(0.0));
        groups.push((case.to_owned(), vec![svg::Bar::of(&service_ms)]));
    }
    Ok((report, chart("A new daemon with a part that does not work", "ms until service", groups)))
}

/// Breaks something in the daemon's directory, until what it gives is dropped.
type Break = dyn Fn(&Path) -> Result<Option<Taken>>;

/// Of each restart: how long until the VM is served, and the slowest read of a page that the disk did meanwhile.
struct Served {
    service_ms: Vec<f64>,
    disk_ms: Vec<f64>,
    wrong: f64,
}

/// The middle of all restarts, and what the disk did in the one that was the slowest.
fn said(service_ms: &[f64], disk_ms: &[f64]) -> String {
    let slowest = service_ms.iter().zip(disk_ms).max_by(|(a, _), (b, _)| a.total_cmp(b));
    let disk = slowest.map_or(0.0, |(_, disk_ms)| *disk_ms);
    let middle = median(service_ms).unwrap_or(0.0);
    format!("median {middle:.0} ms; in the slowest restart the disk took {disk:.0} ms for a direct read of 4 KiB")
}

/// Restarts under a load, with a part broken.
fn serve(setup: &Setup, options: &[&str], wrapper: &[&str], broken: &Break) -> Result<Served> {
    let disk = DirectFile::new(&setup.dir)?;
    let mut daemon = Daemon::start(&setup.dir)?;
    let records = Records::mount(&daemon.dir().join("vms"))?;
    let mut toy = paged(&daemon, &[])?;
    let (mut service_ms, mut disk_ms, mut wrong) = (Vec::new(), Vec::new(), 0);
    for _ in 0..restarts(setup) {
        toy.start_run(RUN)?;
        std::thread::sleep(BEFORE);
        daemon.kill9()?;
        daemon.change_start(options, wrapper);
        let fault = broken(daemon.dir())?;
        // Every thread's longest access is then the one that waits for the new daemon.
        std::thread::sleep(WITHOUT);
        let probe = disk.probe()?;
        daemon.restart_unanswered()?;
        let done = toy.finish_run()?;
        disk_ms.push(probe.slowest()?.as_secs_f64() * 1000.0);
        let last = recovery_s(&done, daemon.started_ns(), Duration::ZERO);
        ensure!(last > 0.0, "no access waited for the new daemon");
        service_ms.push(last * 1000.0);
        wrong += done.bad_pages;
        drop(fault);
        daemon.kill9()?;
        daemon.change_start(&[], &[]);
        daemon.restart()?;
    }
    toy.quit()?;
    // Its directory can be removed when nothing is mounted in there.
    daemon.kill9()?;
    drop(records);
    Ok(Served { service_ms, disk_ms, wrong: wrong as f64 })
}

/// A small file system for the VMs' records, mounted while no VM is there.
struct Records(#[allow(dead_code)] Guard);

impl Records {
    fn mount(path: &Path) -> Result<Records> {
        let guard = Guard::new(Undo::Mount { path: path.to_owned() })?;
        let status = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k,mode=700", "none"])
            .arg(path)
            .status();
        ensure!(status.context("run mount")?.success(), "no file system for the records");
        Ok(Records(guard))
    }
}

/// What stands in the way, until it is dropped.
struct Taken(std::path::PathBuf);

impl Drop for Taken {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

/// A directory is where the control socket should be.
fn take_control_path(dir: &Path) -> Result<Option<Taken>> {
    let path = dir.join("pagoda.sock");
    fs::remove_file(&path).and_then(|()| fs::create_dir(&path)).context("take the control socket's path")?;
    Ok(Some(Taken(path)))
}

fn fill_records(dir: &Path) -> Result<Option<Taken>> {
    let path = dir.join("vms/filler");
    let mut file = fs::File::create(&path).context("fill the records' file system")?;
    for block in [65536, 4096, 512, 1] {
        while file.write_all(&vec![1; block]).is_ok() {}
    }
    Ok(Some(Taken(path)))
}
