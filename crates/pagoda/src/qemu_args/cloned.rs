//! The command line of a clone: a QEMU that runs beside the one whose snapshot it begins with.
//!
//! Lists of what is known to be right for two VMs at a time decide. What is on none of them is refused by its name.
//! What QEMU makes for others, as a listening socket or a log, gets the clone's name behind its own. What only one of them can have
//! is refused, or needs a network namespace of the clone's own.

pub(super) mod cards;
pub(super) mod chardevs;
pub(super) mod devices;
mod disks;
pub(super) mod target;

pub use self::disks::Overlay;
pub use self::target::{Net, Target};
use self::target::{listens, shown, suffixed, unknown};
use super::error::ArgError;
use super::words::{Opt, Props, scan};

/// The command line of a clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cloned {
    pub words: Vec<String>,
    /// Files that have to be made for it.
    pub overlays: Vec<Overlay>,
}

/// Options that mean the same for both, whatever they say: the machine, files that are only read, and what QEMU does.
pub(super) const KEPT: &[&str] = &[
    "L",
    "M",
    "S",
    "accel",
    "acpitable",
    "action",
    "append",
    "async-teardown",
    "bios",
    "boot",
    "cdrom",
    "compat",
    "cpu",
    "d",
    "dtb",
    "enable-kvm",
    "full-screen",
    "fw_cfg",
    "icount",
    "incoming",
    "initrd",
    "k",
    "kernel",
    "loadvm",
    "m",
    "machine",
    "mon",
    "msg",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-kvm",
    "no-kvm-irqchip",
    "no-kvm-pit",
    "no-kvm-pit-reinjection",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "numa",
    "one-insn-per-tb",
    "only-migratable",
    "overcommit",
    "rtc",
    "rtc-td-hack",
    "sandbox",
    "seed",
    "singlestep",
    "smbios",
    "smp",
    "usb",
    "uuid",
    "vga",
    "watchdog-action",
    "win2k-hack",
];

/// Objects that are the clone's own.
pub(super) const OBJECTS: [&str; 8] = [
    "iothread",
    "memory-backend-file",
    "memory-backend-memfd",
    "memory-backend-ram",
    "rng-builtin",
    "rng-random",
    "secret",
    "throttle-group",
];

/// What `-global` may be about: defaults of devices of the machine itself.
pub(super) const GLOBALS: [&str; 7] = ["ICH9-LPC", "PIIX4_PM", "hpet", "isa-fdc", "kvm-pit", "mc146818rtc", "mch"];

/// The words of a clone, from those of the VM that it is one of. They start it as the other's start the other: that it waits for a
/// state is added by [`super::restored`].
///
/// # Errors
/// The first word that is not known to be right for both, and what to do.
pub fn cloned(words: &[String], target: Target<'_>) -> Result<Cloned, ArgError> {
    let options = scan(words)?;
    let mut out = words.to_vec();
    let mut overlays = Vec::new();
    for option in &options {
        if let Some(value) = changed(option, target, &mut overlays)? {
            out[option.at] = value;
        }
    }
    disks::change_images(&mut out, &options, target, &mut overlays)?;
    cards::check(&options, target.net)?;
    if !options.iter().any(|option| option.name == "name") {
        out.extend(["-name".to_owned(), target.name.to_owned()]);
    }
    Ok(Cloned { words: out, overlays })
}

/// The value that an option gets, if it is another one.
fn changed(option: &Opt<'_>, target: Target<'_>, overlays: &mut Vec<Overlay>) -> Result<Option<String>, ArgError> {
    let props = |implied: &str| Props::parse(option.name, option.value, implied);
    match option.name {
        name if KEPT.contains(&name) => Ok(None),
        "object" => among(option, &props("qom-type")?.get("qom-type").unwrap_or_default(), &OBJECTS),
        "global" => {
            let of = option.value.split('.').next().unwrap_or_default();
            among(option, of, &GLOBALS)
        }
        "audiodev" => among(option, &props("driver")?.get("driver").unwrap_or_default(), &["none"]),
        "usbdevice" => among(option, option.value, &["keyboard", "mouse", "tablet"]),
        "display" => {
            let of = option.value.split(',').next().unwrap_or_default();
            among(option, of, &["egl-headless", "gtk", "none", "sdl"])
        }
        "name" => {
            let mut props = props("guest")?;
            props.set_text("guest", target.name);
            Ok(Some(props.render()))
        }
        "device" => devices::changed(option),
        "netdev" | "net" | "nic" => cards::check_network(option, target.net).map(|()| None),
        "drive" | "hda" | "hdb" | "hdc" | "hdd" => disks::changed(option, target, overlays),
        "blockdev" => disks::check_node(option).map(|()| None),
        "chardev" => chardevs::changed(option, target),
        "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" | "debugcon" => {
            chardevs::changed_short(option, target)
        }
        "vnc" => chardevs::changed_vnc(option, target),
        "pidfile" | "D" => Ok(Some(suffixed(option.value, target.name))),
        "s" => listens(option, target.net),
        "gdb" if option.value != "none" => listens(option, target.net),
        "gdb" => Ok(None),
        _ => Err(unknown(&shown(option))),
    }
}

fn among(option: &Opt<'_>, value: &str, known: &[&str]) -> Result<Option<String>, ArgError> {
    if known.contains(&value) {
        return Ok(None);
    }
    Err(unknown(&shown(option)))
}

#[cfg(test)]
mod tests;
