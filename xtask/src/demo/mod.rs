//! `make demo`: an unmodified Debian VM in a fraction of the DRAM it was promised, live in the terminal.
//!
//! A private daemon, one VM, and a guest that writes and verifies more than twice its DRAM. All that is started or
//! changed is undone at the end, also on Ctrl-C (`testkit::undo`). Files are in `out/demo`; after a failure the
//! guest's console and the daemon's log stay there.

mod model;
mod screen;
mod verdict;
mod view;
mod vm;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pagoda_api::{Client, ErrorCode, VmState};
use pagoda_guest::lines::Line;
use testkit::accel::{self, Accelerator};
use testkit::console::{Output, printable};
use testkit::daemon::Daemon;
use testkit::image::{self, Images};
use testkit::undo;
use testkit::workspace::{Build, repository};

use self::model::{Model, Plan, Sample};
use self::screen::Screen;
use self::vm::Vm;

const VM_NAME: &str = "demo";
/// Several, so that faults of more than one vCPU meet; more would only compete for a small host.
const VCPUS_MAX: usize = 2;

/// A peak between two samples is not seen.
const SAMPLE_EVERY: Duration = Duration::from_millis(50);
/// Smooth for the eye.
const DRAW_EVERY: Duration = Duration::from_millis(200);

/// Phases that last as long as `--seconds` says.
const TIMED_PHASES: u32 = 3;
const SECONDS_DEFAULT: u64 = 15;
const SECONDS_MAX: u64 = 600;
/// A TiB: no guest of a demo is larger.
const SIZE_MIB_MAX: u64 = 1 << 20;
/// Boot, fill and verify took 5 s together (TCG, 2 CPUs, 2026-11-21); twenty times that is a hang.
const UNTIMED_MAX: Duration = Duration::from_secs(100);
/// From the guest's verdict to the end of QEMU.
const EXIT_MAX: Duration = Duration::from_secs(10);
/// After something ended: its last words arrive, and on Ctrl-C, which ends everything, this process too.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// Lines shown of a console or log.
const TAIL_LINES: usize = 25;

/// Command line of `xtask demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Memory of the VM
    #[arg(long, value_name = "SIZE", default_value = "768M", value_parser = parse_mib)]
    memory: u64,
    /// DRAM it may have
    #[arg(long, value_name = "SIZE", default_value = "192M", value_parser = parse_mib)]
    dram: u64,
    /// QEMU that runs the VM
    #[arg(long, value_name = "PATH", default_value = "qemu-system-x86_64")]
    qemu: String,
    /// Length of each of the phases seq, random and hot
    #[arg(long, value_name = "N", default_value_t = SECONDS_DEFAULT,
          value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    seconds: u64,
    /// One line a second, even on a terminal
    #[arg(long)]
    plain: bool,
}

/// A size such as 768M or 2G, in MiB.
fn parse_mib(text: &str) -> Result<u64, String> {
    let advice = || format!("{text:?} is not a size: write a number and a unit, such as 768M or 2G");
    let (digits, unit_mib) = match text.strip_suffix(['M', 'm']) {
        Some(digits) => (digits, 1),
        None => (text.strip_suffix(['G', 'g']).ok_or_else(advice)?, 1024),
    };
    let mib = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_mib));
    mib.filter(|mib| *mib <= SIZE_MIB_MAX).ok_or_else(advice)
}

/// Runs the demo; `Ok(true)` when the guest found every page right and all that was promised holds.
///
/// # Errors
/// Something cannot be started, or ends before it should.
pub fn main(args: &DemoArgs) -> Result<bool> {
    let plan = Plan::new(args.memory, args.dram, args.seconds).map_err(anyhow::Error::msg)?;
    let dir = repository().join("out/demo");
    undo::start(&dir).context("prepare out/demo; is another demo running?")?;
    let outcome = prepare_and_run(args, plan, &dir);
    undo::undo_all();
    outcome
}

fn prepare_and_run(args: &DemoArgs, plan: Plan, dir: &Path) -> Result<bool> {
    let qemu_version = qemu_version(&args.qemu)?;
    Build::Demo.run()?;
    println!("demo: preparing the guest's kernel and initramfs");
    let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(&args.qemu, &images, dir)?;
    println!("demo: {qemu_version}");
    println!("demo: accelerator {accelerator}");
    println!();
    let daemon = Daemon::start(dir)?;
    let log = daemon.socket().with_file_name("pagodad.log");
    let mut demo = Demo::start(args, plan, &images, accelerator, &daemon)?;
    let outcome = demo.run();
    let failed = !matches!(outcome, Ok(true));
    if failed {
        demo.post_mortem(dir, &log);
    }
    outcome
}

struct Demo {
    vm: Vm,
    client: Client,
    model: Model,
    screen: Screen,
    accelerator: String,
    started: Instant,
    deadline: Instant,
}

impl Demo {
    fn start(args: &DemoArgs, plan: Plan, images: &Images, accelerator: Accelerator, daemon: &Daemon) -> Result<Self> {
        let vcpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(VCPUS_MAX));
        let vm = Vm::start(&daemon.socket(), &args.qemu, accelerator, images, &plan, vcpus)?;
        let started = Instant::now();
        let deadline = started + UNTIMED_MAX + Duration::from_secs(args.seconds) * TIMED_PHASES;
        Ok(Self {
            vm,
            client: Client::new(daemon.socket()),
            model: Model::new(plan),
            screen: Screen::new(args.plain),
            accelerator: accelerator.name().to_uppercase(),
            started,
            deadline,
        })
    }

    /// Follows the guest to its end, then judges.
    fn run(&mut self) -> Result<bool> {
        let followed = self.follow();
        let end = self.started.elapsed();
        self.screen.show(&self.model, &self.accelerator, end);
        self.screen.print(&view::summary(&self.model, end, !self.screen.is_live()));
        followed?;
        let status = self.vm.wait(EXIT_MAX)?;
        let status = status.with_context(|| format!("QEMU still runs {} s after the verdict", EXIT_MAX.as_secs()))?;
        let checks = verdict::checks(&self.model);
        self.screen.print(&verdict::rows(&self.model, &checks, &self.accelerator));
        ensure!(status.success(), "QEMU ended with {status}");
        Ok(checks.iter().all(|check| check.holds))
    }

    /// Until the guest's verdict.
    fn follow(&mut self) -> Result<()> {
        let mut next_sample = Instant::now();
        let mut next_draw = Instant::now();
        while self.model.verdict.is_none() {
            match self.vm.console.next(next_sample) {
                Output::Line(text) => self.take_line(&text)?,
                Output::Nothing => {
                    next_sample = Instant::now() + SAMPLE_EVERY;
                    self.sample()?;
                }
                Output::Ended => {
                    std::thread::sleep(LAST_WORDS);
                    bail!("{}", self.how_qemu_ended()?);
                }
            }
            let now = Instant::now();
            if now >= next_draw {
                next_draw = now + DRAW_EVERY;
                self.screen.show(&self.model, &self.accelerator, self.started.elapsed());
            }
            if now >= self.deadline {
                let at = self.model.current().map_or("the end", |(step, _)| step.name);
                let seconds = (self.deadline - self.started).as_secs();
                bail!("the guest is still at {at:?} after {seconds} s: it hangs, or this machine is too busy");
            }
        }
        Ok(())
    }

    fn take_line(&mut self, text: &str) -> Result<()> {
        let Some(line) = Line::parse(text) else { return Ok(()) };
        // Counters as of the end of a phase belong to it, not to the next.
        if matches!(line.kind, "ready" | "done") {
            self.sample()?;
        }
        self.model.apply_line(self.started.elapsed(), &line);
        Ok(())
    }

    fn sample(&mut self) -> Result<()> {
        match self.client.vm(VM_NAME) {
            Ok(vm) => {
                if let VmState::Stalled { reason, .. } = &vm.state {
                    bail!("Pagoda has stopped the VM: {reason}");
                }
                let at = self.started.elapsed();
                self.model.apply_sample(Sample { at, vm, ram_bytes: self.vm.ram_bytes() });
                Ok(())
            }
            // Not made yet, or QEMU just ended; its console says which.
            Err(error) if error.code() == Some(ErrorCode::NoSuchVm) => Ok(()),
            Err(error) => {
                std::thread::sleep(LAST_WORDS);
                let gone = error.is_unreachable();
                let what = if gone { "the demo's pagodad has ended or hangs" } else { "ask pagodad about the VM" };
                Err(error).context(what)
            }
        }
    }

    fn how_qemu_ended(&mut self) -> Result<String> {
        Ok(match self.vm.wait(EXIT_MAX)? {
            Some(status) => format!("QEMU ended with {status} before the guest gave its verdict"),
            None => "QEMU closed its console before the guest gave its verdict, and still runs".to_owned(),
        })
    }

    /// Shows and keeps what the guest and the daemon said last.
    fn post_mortem(&mut self, dir: &Path, log: &Path) {
        let read = |path: &Path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let log_text = read(log).unwrap_or_else(|error| format!("(cannot be read: {error})"));
        for (what, name, text) in
            [("guest's console", "console.log", self.vm.console.text()), ("daemon's log", "pagodad.log", log_text)]
        {
            let path = dir.join(name);
            let kept = match fs::write(&path, &text) {
                Ok(()) => format!("all of it: {}", path.display()),
                Err(error) => format!("not kept: {error}"),
            };
            eprintln!("\n--- the {what}, at its end ({kept})");
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
                eprintln!("{}", printable(line));
            }
        }
        eprintln!();
    }
}

/// The first line of `--version`.
fn qemu_version(qemu: &str) -> Result<String> {
    let output = Command::new(qemu).arg("--version").output();
    let output = output.with_context(|| {
        format!("start {qemu}: install the package qemu-system-x86, or name another QEMU with --qemu")
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && text.contains("QEMU"),
        "{qemu} --version says {text:?}: this is no QEMU that runs"
    );
    Ok(printable(text.lines().next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, expected) in
            [("768M", Some(768)), ("2g", Some(2048)), ("1025G", None), ("768", None), ("M", None), ("-1M", None)]
        {
            assert_eq!(parse_mib(text).ok(), expected, "{text}");
        }
    }
}
