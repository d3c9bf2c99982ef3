//! Ends of serial ports, monitors and displays: where QEMU makes a file or a socket for others, each clone makes its own.

use super::super::error::ArgError;
use super::super::words::{Opt, Props, is_on};
use super::target::{Target, listens, shown, suffixed, unknown};

/// Back ends that are nobody else's. The clone's `stdio` is its log.
const OWN: [&str; 6] = ["memory", "null", "pty", "ringbuf", "stdio", "vc"];
/// The same in the short notation.
const OWN_SHORT: [&str; 5] = ["none", "null", "pty", "stdio", "vc"];
/// Of the short notation, what another VM can have as well, by its beginning.
const OWN_PREFIXES: [&str; 2] = ["chardev:", "vc:"];
/// Of the short notation, sockets on an address.
const ADDRESSES: [&str; 2] = ["tcp:", "telnet:"];

/// `-chardev`.
pub fn changed(option: &Opt<'_>, target: Target<'_>) -> Result<Option<String>, ArgError> {
    let mut props = Props::parse(option.name, option.value, "backend")?;
    let mut is_changed = false;
    if let Some(log) = props.get("logfile") {
        props.set_text("logfile", &suffixed(&log, target.name));
        is_changed = true;
    }
    match props.get("backend").as_deref() {
        Some(kind) if OWN.contains(&kind) => {}
        Some("file") if props.get("input-path").is_none() => {
            let path = props.get("path").ok_or_else(|| unknown(&shown(option)))?;
            props.set_text("path", &suffixed(&path, target.name));
            is_changed = true;
        }
        Some("socket") => {
            let waits = !props.get("nowait").is_some_and(|value| is_on(&value))
                && props.get("wait").is_none_or(|value| is_on(&value));
            check_server(option, props.get("server").is_some_and(|value| is_on(&value)), waits)?;
            match props.get("path") {
                Some(path) => {
                    props.set_text("path", &suffixed(&path, target.name));
                    is_changed = true;
                }
                None => drop(listens(option, target.net)?),
            }
        }
        _ => return Err(unknown(&shown(option))),
    }
    Ok(is_changed.then(|| props.render()))
}

/// `-serial`, `-monitor` and others in the short notation, such as `unix:/run/web1.sock,server=on,wait=off`.
pub fn changed_short(option: &Opt<'_>, target: Target<'_>) -> Result<Option<String>, ArgError> {
    let (mux, value) = match option.value.strip_prefix("mon:") {
        Some(rest) => ("mon:", rest),
        None => ("", option.value),
    };
    if OWN_SHORT.contains(&value) || OWN_PREFIXES.iter().any(|prefix| value.starts_with(prefix)) {
        return Ok(None);
    }
    if let Some(path) = value.strip_prefix("file:") {
        return Ok(Some(format!("{mux}file:{}", suffixed(path, target.name))));
    }
    let (address, settings) = value.split_once(',').unwrap_or((value, ""));
    let has = |names: &[&str]| settings.split(',').any(|setting| names.contains(&setting));
    let (is_server, waits) = (has(&["server", "server=on"]), !has(&["nowait", "wait=off"]));
    if let Some(path) = address.strip_prefix("unix:") {
        check_server(option, is_server, waits)?;
        return Ok(Some(format!("{mux}unix:{},{settings}", suffixed(path, target.name))));
    }
    if ADDRESSES.iter().any(|prefix| address.starts_with(prefix)) {
        check_server(option, is_server, waits)?;
        return listens(option, target.net);
    }
    Err(unknown(&shown(option)))
}

/// `-vnc`.
pub fn changed_vnc(option: &Opt<'_>, target: Target<'_>) -> Result<Option<String>, ArgError> {
    if option.value == "none" {
        return Ok(None);
    }
    let (address, settings) = match option.value.split_once(',') {
        Some((address, settings)) => (address, format!(",{settings}")),
        None => (option.value, String::new()),
    };
    match address.strip_prefix("unix:") {
        Some(path) => Ok(Some(format!("unix:{}{settings}", suffixed(path, target.name)))),
        None => listens(option, target.net),
    }
}

/// That QEMU makes the socket, and does not wait for somebody before the guest runs.
fn check_server(option: &Opt<'_>, is_server: bool, waits: bool) -> Result<(), ArgError> {
    if !is_server {
        return Err(ArgError::new(
            format!("{} connects to what serves its source", shown(option)),
            "let QEMU be the server (server=on,wait=off), or start the VM without that",
        ));
    }
    if waits {
        return Err(ArgError::new(
            format!("{} would have QEMU wait for a client before the clone runs", shown(option)),
            "write wait=off",
        ));
    }
    Ok(())
}
