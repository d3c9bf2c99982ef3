//! Ends of serial ports, monitors and displays. A monitor can start programs, so nobody may reach one over the network.

use super::super::cloned::chardevs::{
    ADDRESSES, COMMON_KEYS, FILE_KEYS, OWN, OWN_KEYS, OWN_PREFIXES, OWN_SHORT, SOCKET_KEYS, SOCKET_SETTINGS,
    VNC_SETTINGS,
};
use super::super::cloned::target::shown;
use super::super::words::{Opt, is_on};
use super::parts::{props, unknown};

/// Options that are monitors.
const MONITORS: [&str; 3] = ["monitor", "qmp", "qmp-pretty"];

/// Refuses a `-chardev` that is not known to be safe.
pub fn check(option: &Opt<'_>, all: &[Opt<'_>]) -> Result<(), String> {
    let props = props(option, "backend")?;
    let backend = props.get("backend").unwrap_or_default();
    let more: &[&str] = match backend.as_str() {
        "file" => &FILE_KEYS,
        "socket" => &SOCKET_KEYS,
        kind if OWN.contains(&kind) => &OWN_KEYS,
        _ => return unknown(option),
    };
    if props.keys().iter().any(|key| !COMMON_KEYS.contains(key) && !more.contains(key)) {
        return unknown(option);
    }
    if backend != "socket" {
        return Ok(());
    }
    let on = |key: &str, default: bool| props.get(key).map_or(default, |value| is_on(&value));
    if on("server", false) && on("wait", true) && !on("nowait", false) {
        return Err(waits(option));
    }
    let id = props.get("id").unwrap_or_default();
    if props.get("path").is_none() && is_monitor(&id, all) {
        return Err(reached(option));
    }
    Ok(())
}

/// `-mon`, `-serial`, `-monitor` and others in the short notation.
pub fn check_short(option: &Opt<'_>) -> Result<(), String> {
    if option.name == "mon" {
        let is_known = |key: &&str| matches!(*key, "chardev" | "id" | "mode" | "pretty");
        return if props(option, "chardev")?.keys().iter().all(is_known) { Ok(()) } else { unknown(option) };
    }
    let (has_monitor, value) = match option.value.strip_prefix("mon:") {
        Some(rest) => (true, rest),
        None => (MONITORS.contains(&option.name), option.value),
    };
    let is_own = OWN_SHORT.contains(&value) || OWN_PREFIXES.iter().any(|prefix| value.starts_with(prefix));
    if is_own || value.starts_with("file:") {
        return Ok(());
    }
    let (address, settings) = value.split_once(',').unwrap_or((value, ""));
    if !settings.is_empty() && !settings.split(',').all(|setting| SOCKET_SETTINGS.contains(&setting)) {
        return unknown(option);
    }
    let has = |names: [&str; 2]| settings.split(',').any(|setting| names.contains(&setting));
    if has(["server", "server=on"]) && !has(["nowait", "wait=off"]) {
        return Err(waits(option));
    }
    match address.starts_with("unix:") {
        true => Ok(()),
        false if !ADDRESSES.iter().any(|prefix| address.starts_with(prefix)) => unknown(option),
        false if has_monitor => Err(reached(option)),
        false => Ok(()),
    }
}

/// Refuses a `-vnc` that is not known to be safe, or shows a monitor to the network.
pub fn check_vnc(option: &Opt<'_>, all: &[Opt<'_>]) -> Result<(), String> {
    let (address, settings) = option.value.split_once(',').unwrap_or((option.value, ""));
    if !settings.is_empty() && !settings.split(',').all(|setting| VNC_SETTINGS.contains(&setting)) {
        return unknown(option);
    }
    let is_near = address == "none" || address.starts_with("unix:");
    match !is_near && all.iter().any(|option| is_console_monitor(option, all)) {
        true => Err(reached(option)),
        false => Ok(()),
    }
}

/// QEMU would make a monitor by itself, on a console of its display (see `console.rs`).
pub fn has_default_monitor(all: &[Opt<'_>]) -> bool {
    let ends_it = ["mon", "nodefaults", "nographic"];
    !all.iter().any(|option| MONITORS.contains(&option.name) || ends_it.contains(&option.name))
}

/// Whether a monitor is on a console of the display.
fn is_console_monitor(option: &Opt<'_>, all: &[Opt<'_>]) -> bool {
    let is_vc = |value: &str| value == "vc" || value.starts_with("vc:");
    match option.name {
        "chardev" => props(option, "backend").is_ok_and(|props| {
            let id = props.get("id").unwrap_or_default();
            props.get("backend").as_deref() == Some("vc") && is_monitor(&id, all)
        }),
        name if MONITORS.contains(&name) => is_vc(option.value.trim_start_matches("mon:")),
        _ => option.value.strip_prefix("mon:").is_some_and(is_vc),
    }
}

/// Whether a monitor has this `-chardev`.
fn is_monitor(id: &str, all: &[Opt<'_>]) -> bool {
    let names_it = |option: &Opt<'_>| match option.name {
        // One that cannot be read is refused anyway.
        "mon" => props(option, "chardev").map_or(true, |props| props.get("chardev").as_deref() == Some(id)),
        name if MONITORS.contains(&name) => option.value.trim_start_matches("mon:") == format!("chardev:{id}"),
        _ => option.value.strip_prefix("mon:chardev:") == Some(id),
    };
    all.iter().any(names_it)
}

fn reached(option: &Opt<'_>) -> String {
    format!("{} lets whoever reaches it over the network use a monitor, which can start programs", shown(option))
}

fn waits(option: &Opt<'_>) -> String {
    format!("{} would have QEMU wait for a client before the VM runs: write wait=off", shown(option))
}
