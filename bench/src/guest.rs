//! The same guest, an unmodified Debian kernel with a verifying program, in QEMU under Pagoda and
//! in plain QEMU in a memory cgroup with kernel swap. For information: where the accelerator is TCG,
//! much of the time is emulation.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_guest::lines::Line;
use pagoda_sys::toy::process;
use testkit::accel::{self, Accelerator};
use testkit::console::{Console, Output};
use testkit::daemon::Daemon;
use testkit::image::{self, Images};
use testkit::peers::cgroup::MemoryCgroup;
use testkit::peers::swap::Swap;
use testkit::results::report::{Bar, Report};
use testkit::undo::{Guard, Undo, start_ticks_of};

use super::Setup;

const QEMU: &str = "qemu-system-x86_64";
const MEMORY_MIB: u64 = 640;
const DRAM_MIB: u64 = 320;
/// What the guest's program touches: the rest is its kernel's.
const WORK_MIB: u64 = 480;
const PHASES: [&str; 3] = ["seq", "random", "zipf"];
const PHASE_SECONDS: f64 = 8.0;
const ROUNDS_MAX: usize = 2;
/// Boot, fill and verify; a guest that needs longer hangs.
const UNTIMED_MAX: Duration = Duration::from_secs(120);
const VM: &str = "bench-guest";

/// Accesses per second by phase and round.
type Speeds = [Vec<f64>; PHASES.len()];

/// Adds a row for each phase.
///
/// # Errors
/// No QEMU or image; a page is wrong; the guest hangs.
pub fn measure(setup: &Setup, daemon: Option<&Daemon>, report: &mut Report) -> Result<()> {
    let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(QEMU, &images, &setup.dir)?;
    let (mut ours, mut kernel) = (Speeds::default(), Speeds::default());
    let swap = Swap::on_file(&setup.dir, (MEMORY_MIB << 20) * 2)?;
    // QEMU's own memory, which a cgroup counts and our cap does not.
    let mut own_bytes = OWN_BYTES_DEFAULT;
    for round in 0..setup.rounds.min(ROUNDS_MAX) {
        eprintln!("overcommit: guest, round {}", round + 1);
        if let Some(daemon) = daemon {
            let words = daemon.cli_words()?;
            let mut command = Command::new(&words[0]);
            let (memory, dram) = (format!("{MEMORY_MIB}M"), format!("{DRAM_MIB}M"));
            command.args(&words[1..]).args(["run", "--name", VM, "--memory", &memory, "--dram", &dram, "--", QEMU]);
            own_bytes = run_guest(setup, command, accelerator, &images, &mut ours)?;
        }
        let cgroup =
            MemoryCgroup::new(&format!("pagoda-bench-guest-{}", std::process::id()), (DRAM_MIB << 20) + own_bytes)?;
        // It joins before it has any memory; `exec` keeps the process.
        let mut command = Command::new("sh");
        let join = format!("echo $$ > {} && exec \"$@\"", cgroup.procs().display());
        command.args(["-c", &join, "sh", QEMU]);
        run_guest(setup, command, accelerator, &images, &mut kernel)?;
    }
    drop(swap);
    for (index, phase) in PHASES.iter().enumerate() {
        let name = format!("guest ({}) {phase} read-write 2x: plain QEMU, kernel swap", accelerator.name());
        report.pair(&name, "op/s", &ours[index], &kernel[index], Bar::None);
    }
    Ok(())
}

/// Without a run of ours to measure it: QEMU 7.2 and 10 under TCG have some 60 MiB (RssAnon, 2026-11-21).
const OWN_BYTES_DEFAULT: u64 = 64 << 20;

/// Runs a guest to its end; gives the anonymous memory that QEMU had beside a RAM file.
fn run_guest(
    setup: &Setup,
    mut command: Command,
    accelerator: Accelerator,
    images: &Images,
    speeds: &mut Speeds,
) -> Result<u64> {
    let seconds = setup.seconds(PHASE_SECONDS);
    let work = PHASES.join(",");
    command.args(["-M", "q35", "-accel", accelerator.name(), "-m", &format!("{MEMORY_MIB}M"), "-smp", "1"]);
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]);
    command.arg("-kernel").arg(&images.kernel).arg("-initrd").arg(&images.initrd).arg("-append").arg(format!(
        "console=ttyS0 quiet panic=-1 pagoda.work={work} pagoda.mib={WORK_MIB} pagoda.threads=1 pagoda.seconds={seconds:.0}"
    ));
    let max = UNTIMED_MAX + Duration::from_secs_f64(seconds * PHASES.len() as f64);
    let mut own_bytes = OWN_BYTES_DEFAULT;
    run_to_end(command, max, |line, pid| {
        let phase = PHASES.iter().position(|phase| line.kind == "done" && line.get("phase") == Some(phase));
        if let (Some(index), Some(ops), Some(us)) = (phase, line.number("ops"), line.number("us")) {
            speeds[index].push(ops as f64 * 1e6 / us.max(1) as f64);
            own_bytes = anonymous_bytes(pid).unwrap_or(own_bytes);
        }
        Ok(())
    })?;
    Ok(own_bytes)
}

/// Runs QEMU until its guest says that all is well. `look` sees each of the guest's lines while it runs, and QEMU's pid.
///
/// # Errors
/// The guest says something else, or nothing within `max`; `look` fails.
pub fn run_to_end(
    mut command: Command,
    max: Duration,
    mut look: impl FnMut(&Line<'_>, u32) -> Result<()>,
) -> Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    process::die_with_parent(&mut command);
    let child = command.spawn().context("start QEMU")?;
    let start_ticks = start_ticks_of(child.id()).unwrap_or(0);
    let _kill = Guard::new(Undo::Process { pid: child.id(), start_ticks })?;
    let mut guest = Guest { child, console: Console::default() };
    guest.console.collect(guest.child.stdout.take().context("take the guest's output")?);
    guest.console.collect(guest.child.stderr.take().context("take QEMU's errors")?);
    let deadline = Instant::now() + max;
    loop {
        let text = match guest.console.next(deadline) {
            Output::Line(text) => text,
            Output::Nothing => bail!("the guest hangs; its console:\n{}", guest.console.text()),
            Output::Ended => bail!("QEMU ended without a verdict; its console:\n{}", guest.console.text()),
        };
        let Some(line) = Line::parse(&text) else { continue };
        look(&line, guest.child.id())?;
        if let Some(verdict) = line.result() {
            ensure!(verdict == "ok", "the guest says {verdict:?}; its console:\n{}", guest.console.text());
            return Ok(());
        }
    }
}

/// A running QEMU. Killed when dropped.
struct Guest {
    child: Child,
    console: Console,
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have ended; either way it has to be reaped before its cgroup is removed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn anonymous_bytes(pid: u32) -> Option<u64> {
    let path = PathBuf::from(format!("/proc/{pid}/status"));
    let status = fs::read_to_string(path).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().split(' ').next()?.parse::<u64>().ok()? * 1024)
}
