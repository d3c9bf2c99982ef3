//! Whether KVM boots a guest here. Some machines have a `/dev/kvm` that runs firmware and no more.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_guest::lines::Line;
use pagoda_sys::toy::process;

use crate::console::{Console, Output};
use crate::image::Images;
use crate::undo::{Guard, Undo, start_ticks_of};

/// The test guest is done two seconds after the start where KVM works.
const PROBE_MAX: Duration = Duration::from_secs(8);
/// Enough for a kernel that does nothing.
const PROBE_MIB: &str = "256";

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    /// As QEMU's `-accel` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG (emulation)",
        })
    }
}

/// Finds the accelerator by booting a guest, and remembers it in `dir` until this machine reboots.
///
/// # Errors
/// No QEMU; the finding cannot be written.
pub fn find(qemu: &str, images: &Images, dir: &Path) -> Result<Accelerator> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(Accelerator::Tcg);
    }
    let memory = dir.join("accelerator");
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("read the boot id")?;
    let entry = |found: Accelerator| format!("{} {} {qemu}\n", boot_id.trim(), found.name());
    let remembered = fs::read_to_string(&memory).unwrap_or_default();
    for found in [Accelerator::Kvm, Accelerator::Tcg] {
        if remembered == entry(found) {
            return Ok(found);
        }
    }
    println!("demo: trying KVM, for at most {} s", PROBE_MAX.as_secs());
    let found = if kvm_boots(qemu, images)? { Accelerator::Kvm } else { Accelerator::Tcg };
    fs::write(&memory, entry(found)).context("remember the accelerator")?;
    Ok(found)
}

fn kvm_boots(qemu: &str, images: &Images) -> Result<bool> {
    let mut command = Command::new(qemu);
    command.args(["-M", "q35", "-accel", "kvm", "-m", PROBE_MIB, "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-serial", "stdio", "-no-reboot"]);
    command.arg("-kernel").arg(&images.kernel).arg("-initrd").arg(&images.initrd);
    command.args(["-append", "console=ttyS0 quiet panic=-1 pagoda.work=idle pagoda.idle=0"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    process::die_with_parent(&mut command);
    let mut child = command.spawn().with_context(|| format!("start {qemu}"))?;
    let start_ticks = start_ticks_of(child.id()).unwrap_or(0);
    let _kill = Guard::new(Undo::Process { pid: child.id(), start_ticks })?;
    let console = Console::default();
    console.collect(child.stdout.take().context("take QEMU's output")?);
    let deadline = Instant::now() + PROBE_MAX;
    let boots = loop {
        match console.next(deadline) {
            Output::Line(text) => match Line::parse(&text).and_then(|line| line.result()) {
                Some(verdict) => break verdict == "ok",
                None => continue,
            },
            Output::Nothing | Output::Ended => break false,
        }
    };
    // It may have ended by itself.
    let _ = child.kill();
    child.wait().context("wait for QEMU")?;
    Ok(boots)
}
