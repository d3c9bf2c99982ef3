//! Whether KVM boots a guest here. Some machines have a `/dev/kvm` that runs firmware and no more.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_guest::lines::Line;

use crate::console::Console;
use crate::programs::{self, Qemu};

/// Ten times what a guest takes to boot under TCG, and under KVM it takes less; a KVM that hangs costs this once.
const PROBE_MAX: Duration = Duration::from_secs(30);

/// `kvm` or `tcg`, as QEMU's `-accel` takes it. Tried once and remembered beside the tests' files.
///
/// # Errors
/// The images cannot be made, or no QEMU.
pub fn accelerator() -> Result<&'static str> {
    static FOUND: OnceLock<&'static str> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found);
    }
    let memory = programs::work_dir()?.join("accelerator");
    let found = match fs::read_to_string(&memory).as_deref() {
        Ok("kvm") => "kvm",
        Ok("tcg") => "tcg",
        _ => {
            let found = if Path::new("/dev/kvm").exists() && kvm_boots()? { "kvm" } else { "tcg" };
            fs::write(&memory, found).context("remember the accelerator")?;
            found
        }
    };
    eprintln!("accelerator: {found} (delete {} to try again)", memory.display());
    Ok(FOUND.get_or_init(|| found))
}

fn kvm_boots() -> Result<bool> {
    let images = programs::images()?;
    let mut command = Command::new(Qemu::System.require()?);
    command.args(["-M", "q35", "-accel", "kvm", "-m", "256", "-nodefaults", "-no-user-config", "-display", "none"]);
    command.args(["-serial", "stdio", "-no-reboot"]);
    command.arg("-kernel").arg(images.kernel).arg("-initrd").arg(images.initrd);
    command.args(["-append", "console=ttyS0 quiet panic=-1 pagoda.work=idle pagoda.idle=0"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    pagoda_sys::toy::process::die_with_parent(&mut command);
    let mut child = command.spawn().context("start QEMU")?;
    let console = Console::default();
    console.collect(child.stdout.take().context("QEMU's output")?, "");
    let verdict = |line: &str| Line::parse(line)?.result().map(|verdict| verdict == "ok");
    let outcome = console.wait("the verdict", 0, Instant::now() + PROBE_MAX, verdict);
    // It may have ended by itself.
    let _ = child.kill();
    child.wait().context("wait for QEMU")?;
    Ok(outcome.is_ok_and(|(_, good)| good))
}
