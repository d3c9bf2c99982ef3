//! What may be among the words of a QEMU that another host wants to have started here.
//!
//! QEMU does much for its words: it starts programs, opens any file of its user's, and listens for somebody who tells it to do so. So
//! lists of what is known to do none of this decide; what is on no list is refused by its name. A full path has to be below one of
//! the directories that the host allows, and a relative one may not leave the VM's own. Links are not followed here, and what the
//! content of a file refers to is not known: for both the rights of QEMU's user are the border.
//!
//! It has no terminal and no desktop. What QEMU would say on a terminal is in its log.

mod ends;
mod files;
mod parts;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use self::parts::{props, unknown};
use super::cloned::{GLOBALS, KEPT, OBJECTS, cards, devices, target::shown};
use super::words::{Opt, scan};

/// On the list of a clone, and looked at here.
const LOOKED_AT: [&str; 3] = ["cdrom", "mon", "sandbox"];
/// Displays without a desktop.
const DISPLAYS: [&str; 2] = ["egl-headless", "none"];

/// The words that start it here, from those that its user gave at the other host. `paths`: directories below which its files are.
///
/// # Errors
/// All that is not known to be safe.
pub fn arrived(words: &[String], paths: &[PathBuf]) -> Result<Vec<String>, Vec<String>> {
    let options = scan(words).map_err(|error| vec![error.to_string()])?;
    let mut reasons: Vec<String> = options
        .iter()
        .filter_map(|option| check(option, &options).and_then(|()| files::check(option, paths)).err())
        .collect();
    reasons.extend(images(words, &options).filter_map(|image| files::check_image(image, paths).err()));
    if !reasons.is_empty() {
        return Err(reasons);
    }
    let has = |names: &[&str]| options.iter().any(|option| names.contains(&option.name));
    // It is in the background already, and its end would not be seen.
    let is_daemonize = |at: usize| options.iter().any(|option| option.name == "daemonize" && option.at == at);
    let kept = words.iter().enumerate().filter(|(at, _)| !is_daemonize(*at));
    let mut out: Vec<String> = kept.map(|(_, word)| word.clone()).collect();
    let mut add = |words: [&str; 2]| out.extend(words.map(str::to_owned));
    if !has(&["display", "nographic"]) {
        add(["-display", "none"]);
    }
    if ends::has_default_monitor(&options) {
        // Whoever reaches its display would reach that, and it can start programs.
        add(["-monitor", "none"]);
    }
    Ok(out)
}

/// Words that belong to no option are disks.
fn images<'a>(words: &'a [String], options: &[Opt<'_>]) -> impl Iterator<Item = &'a str> {
    let of_option = |option: &Opt<'_>| option.at - usize::from(!option.is_alone)..=option.at;
    let taken: Vec<usize> = options.iter().flat_map(of_option).collect();
    words.iter().enumerate().filter(move |(at, _)| !taken.contains(at)).map(|(_, word)| word.as_str())
}

fn check(option: &Opt<'_>, all: &[Opt<'_>]) -> Result<(), String> {
    let among = |value: Option<String>, known: &[&str]| match value {
        Some(value) if known.contains(&value.as_str()) => Ok(()),
        _ => unknown(option),
    };
    match option.name {
        name if KEPT.contains(&name) && !LOOKED_AT.contains(&name) => Ok(()),
        "daemonize" | "pidfile" | "D" => Ok(()),
        "cdrom" | "hda" | "hdb" | "hdc" | "hdd" | "drive" | "blockdev" => files::check_disk(option),
        "name" => Ok(()),
        "object" => among(props(option, "qom-type")?.get("qom-type"), &OBJECTS),
        "global" => among(option.value.split('.').next().map(str::to_owned), &GLOBALS),
        "audiodev" => among(props(option, "driver")?.get("driver"), &["none"]),
        "usbdevice" => among(Some(option.value.to_owned()), &["keyboard", "mouse", "tablet"]),
        "display" => among(option.value.split(',').next().map(str::to_owned), &DISPLAYS),
        "sandbox" => match props(option, "enable")?.get("enable").as_deref() {
            Some("on") => Ok(()),
            _ => Err(format!("{} takes a protection off", shown(option))),
        },
        "device" => {
            let driver = props(option, "driver")?.get("driver").unwrap_or_default();
            if devices::is_known(&driver) || cards::is_card(&driver) { Ok(()) } else { unknown(option) }
        }
        "netdev" | "net" | "nic" => check_network(option),
        "chardev" => ends::check(option, all),
        "mon" | "monitor" | "qmp" | "qmp-pretty" | "serial" | "parallel" | "debugcon" => ends::check_short(option),
        "vnc" => ends::check_vnc(option, all),
        "gdb" if option.value == "none" => Ok(()),
        "gdb" | "s" => Err(format!("{} lets whoever reaches it rule QEMU", shown(option))),
        _ => unknown(option),
    }
}

fn check_network(option: &Opt<'_>) -> Result<(), String> {
    let props = props(option, "type")?;
    let of_card = |key: &str| option.name == "nic" && matches!(key, "model" | "mac" | "macaddr");
    match props.get("type").unwrap_or_default().as_str() {
        "none" | "nic" if option.name != "netdev" => Ok(()),
        "user" => {
            let is_known = |key: &&str| cards::USER_KEYS.contains(key) || *key == "hostfwd" || of_card(key);
            if props.keys().iter().all(is_known) { Ok(()) } else { unknown(option) }
        }
        "tap" => {
            let is_known = |key: &&str| cards::TAP_KEYS.contains(key) || of_card(key);
            if !props.keys().iter().all(is_known) {
                return unknown(option);
            }
            match ["script", "downscript"].iter().all(|key| props.get(key).as_deref() == Some("no")) {
                true => Ok(()),
                false => Err(format!("{} runs scripts of the host: write script=no,downscript=no", shown(option))),
            }
        }
        _ => unknown(option),
    }
}
