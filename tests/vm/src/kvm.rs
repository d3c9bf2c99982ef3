//! The toy VMM on KVM (`toy-vmm kvm`) under `pagoda run --plain`: pages faulted in by KVM itself.

use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_sys::toy::skip::skipped;
use serde_json::Value;

use crate::console::Console;
use crate::daemon::Daemon;
use crate::{programs, wait};

/// `toy-vmm kvm` ends with it where KVM does not run its guest.
const SKIPPED_STATUS: i32 = 77;
/// It probes KVM first, for at most 20 s.
const START_MAX: Duration = crate::wait::HANG;
/// From the end of its input: a batch of pages, and a look at all of them.
const FINISH_MAX: Duration = crate::wait::LIFE;

/// Whether this machine's KVM runs the guest; where it does not, the test counts as skipped. Tried once.
///
/// # Errors
/// The guest runs, and found wrong pages without any pager.
pub fn runs_here() -> Result<bool> {
    static FOUND: OnceLock<Result<Option<String>, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| try_it().map_err(|error| format!("{error:#}")));
    let why_not = found.clone().map_err(|error| anyhow::anyhow!("{error}"))?;
    if let Some(why) = &why_not {
        skipped(why);
    }
    Ok(why_not.is_none())
}

/// Why it does not run.
fn try_it() -> Result<Option<String>> {
    let mut command = Command::new(programs::bin_dir()?.join("toy-vmm"));
    command.args(["kvm", "--mib", "8", "--seconds", "0.1"]).stdin(Stdio::null());
    let output = command.output().context("run toy-vmm kvm")?;
    let said = String::from_utf8_lossy(&output.stdout);
    match output.status.code() {
        Some(0) => {
            eprintln!("KVM: {}", said.trim());
            Ok(None)
        }
        Some(SKIPPED_STATUS) => Ok(Some(said.trim().to_owned())),
        _ => bail!("{}: {said}{}", output.status, String::from_utf8_lossy(&output.stderr)),
    }
}

/// A toy VMM whose guest runs under KVM.
#[derive(Debug)]
pub struct KvmToy {
    child: Child,
    input: Option<ChildStdin>,
    output: Console,
}

impl KvmToy {
    /// Starts one; its guest walks all of its memory until `finish`.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(daemon: &Daemon, name: &str, memory_mib: u64, dram_mib: u64, vcpus: u32) -> Result<Self> {
        let mut command = daemon.cli()?;
        command.args(["run", "--plain", "--name", name]);
        command.args(["--memory", &format!("{memory_mib}M"), "--dram", &format!("{dram_mib}M"), "--"]);
        command.arg(programs::bin_dir()?.join("toy-vmm")).args(["kvm", "--until-input-ends", "--json"]);
        command.args(["--vcpus", &vcpus.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        pagoda_sys::toy::process::die_with_parent(&mut command);
        let mut child = command.spawn().context("start the toy on KVM")?;
        let output = Console::default();
        output.collect(child.stdout.take().context("the toy's output")?, "");
        output.collect(child.stderr.take().context("the toy's errors")?, "stderr: ");
        let toy = Self { input: child.stdin.take(), child, output };
        let started = |line: &str| line.contains("the guest starts").then_some(());
        let found = toy.output.wait("the start of the guest", 0, Instant::now() + START_MAX, started);
        found.with_context(|| toy.output.tail())?;
        Ok(toy)
    }

    /// Stops the guest and gives its report.
    ///
    /// # Errors
    /// A page was wrong, seen by the guest or afterwards by user space; or it ended in another way.
    pub fn finish(mut self) -> Result<Value> {
        drop(self.input.take());
        let status = wait::until("the end of the toy on KVM", FINISH_MAX, || {
            self.child.try_wait().context("look after the toy on KVM")
        });
        let status = status.with_context(|| self.output.tail())?;
        let deadline = Instant::now() + START_MAX;
        let report = self.output.wait("its report", 0, deadline, |line| serde_json::from_str::<Value>(line).ok());
        let (_, report) = report.with_context(|| format!("{status}: {}", self.output.tail()))?;
        eprintln!("KVM: {report}");
        ensure!(status.success(), "it ended with {status}: {}", self.output.tail());
        ensure!(report["accelerator"] == "kvm", "{report}");
        for wrong in ["wrong_in_guest", "wrong_at_end"] {
            ensure!(report[wrong] == 0, "{wrong}: {report}");
        }
        Ok(report)
    }
}

impl Drop for KvmToy {
    fn drop(&mut self) {
        // It may be gone already; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
