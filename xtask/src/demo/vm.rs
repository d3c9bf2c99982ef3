//! The demo's VM: QEMU under `pagoda run`, what it prints, and what the kernel says of its RAM.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_sys::toy::process;
use testkit::accel::Accelerator;
use testkit::console::Console;
use testkit::image::Images;
use testkit::undo::{Guard, Undo, start_ticks_of};
use testkit::workspace::programs_dir;

use super::VM_NAME;
use super::model::Plan;

/// Between two looks whether a process has ended.
const POLL_EVERY: Duration = Duration::from_millis(10);

/// The running VM. Killed when dropped.
#[derive(Debug)]
pub struct Vm {
    pub console: Console,
    child: Child,
    _kill: Guard,
}

impl Vm {
    /// Starts QEMU under the daemon that listens on `socket`.
    ///
    /// # Errors
    /// It cannot be started; what `pagoda run` refuses shows on the console.
    pub fn start(
        socket: &Path,
        qemu: &str,
        accelerator: Accelerator,
        images: &Images,
        plan: &Plan,
        vcpus: usize,
    ) -> Result<Self> {
        let pagoda = programs_dir()?.join("pagoda");
        let mut command = Command::new(&pagoda);
        let memory = format!("{}M", plan.memory_mib);
        command.arg("--socket").arg(socket).args(["run", "--name", VM_NAME, "--memory", &memory]);
        command.args(["--dram", &format!("{}M", plan.dram_mib), "--", qemu]);
        command.args(["-M", "q35", "-accel", accelerator.name(), "-m", &memory, "-smp", &vcpus.to_string()]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.arg("-kernel").arg(&images.kernel).arg("-initrd").arg(&images.initrd);
        command.arg("-append").arg(format!("console=ttyS0 quiet panic=-1 {}", plan.guest_words()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is for the demo, which ends the VM itself.
        command.process_group(0);
        process::die_with_parent(&mut command);
        let mut child = command.spawn().with_context(|| format!("start {}", pagoda.display()))?;
        let pid = child.id();
        let start_ticks = start_ticks_of(pid).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid, start_ticks })?;
        let console = Console::default();
        console.collect(child.stdout.take().context("take the VM's output")?);
        console.collect(child.stderr.take().context("take the VM's errors")?);
        Ok(Self { console, child, _kill: kill })
    }

    /// DRAM in the VM's RAM file by the kernel's own account; `None` before QEMU has it and after it ended.
    pub fn ram_bytes(&self) -> Option<u64> {
        /// Unit of `st_blocks`, whatever the file system (stat(2)).
        const BLOCK_BYTES: u64 = 512;
        let entries = fs::read_dir(format!("/proc/{}/fd", self.child.id())).ok()?;
        let file = entries.flatten().map(|entry| entry.path()).find(|path| {
            let name = format!("/memfd:{VM_NAME} ");
            fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with(&name))
        })?;
        Some(fs::metadata(file).ok()?.blocks() * BLOCK_BYTES)
    }

    /// Waits for the end of QEMU; `None` when it goes on after `max`.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn wait(&mut self, max: Duration) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait().context("look after QEMU")?;
            if status.is_some() || start.elapsed() > max {
                return Ok(status);
            }
            std::thread::sleep(POLL_EVERY);
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // It may be gone already; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
