//! What an init does before and after the workloads: file systems, modules, command line, end.

use std::fs::{self, File};
use std::io;
use std::process::ExitCode;

use anyhow::{Context, Result};
use rustix::mount::MountFlags;
use rustix::system::RebootCommand;

use crate::session::End;

/// Written by `cargo xtask image`: one file name a line, dependencies first.
const MODULE_ORDER: &str = "/modules/order";
const MODULE_DIR: &str = "/modules";

/// MODULE_INIT_COMPRESSED_FILE of linux/module.h: the kernel decompresses.
const MODULE_COMPRESSED: i32 = 4;

pub fn mount_file_systems() -> Result<()> {
    for (kind, target) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/dev/shm"), ("tmpfs", "/tmp")]
    {
        fs::create_dir_all(target).with_context(|| format!("create {target}"))?;
        rustix::mount::mount(kind, target, kind, MountFlags::empty(), None)
            .with_context(|| format!("mount {kind} on {target}"))?;
    }
    Ok(())
}

pub fn load_modules() -> Result<()> {
    let order = match fs::read_to_string(MODULE_ORDER) {
        Ok(order) => order,
        // A kernel with everything built in needs none.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context("read the list of modules"),
    };
    for name in order.lines() {
        let module = File::open(format!("{MODULE_DIR}/{name}")).with_context(|| format!("open module {name}"))?;
        let flags = if name.ends_with(".ko") { 0 } else { MODULE_COMPRESSED };
        match rustix::system::finit_module(&module, c"", flags) {
            // PERM: the kernel's own `module_blacklist=` says so.
            Ok(()) | Err(rustix::io::Errno::EXIST | rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error).with_context(|| format!("load module {name}")),
        }
    }
    Ok(())
}

pub fn command_line() -> Result<String> {
    fs::read_to_string("/proc/cmdline").context("read /proc/cmdline")
}

/// A field of /proc/meminfo in KiB.
pub fn meminfo_kib(field: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':')?.split_ascii_whitespace().next()?.parse().ok())
        .with_context(|| format!("no {field} in /proc/meminfo"))
}

pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub fn describe() -> Result<String> {
    let kernel = rustix::system::uname();
    let release = kernel.release().to_string_lossy();
    Ok(format!("kernel={release} cpus={} mem_kib={}", cpus(), meminfo_kib("MemTotal")?))
}

/// Does not return when the kernel obeys.
pub fn leave(end: End) -> ExitCode {
    // The last line is still in the serial port's queue.
    let _ = rustix::termios::tcdrain(rustix::stdio::stdout());
    let command = match end {
        End::PowerOff => RebootCommand::PowerOff,
        End::Reboot => RebootCommand::Restart,
    };
    if let Err(error) = rustix::system::reboot(command) {
        eprintln!("pagoda-guest: reboot system call: {error}");
    }
    ExitCode::FAILURE
}
