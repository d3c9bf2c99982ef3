//! Ends of serial ports, monitors and displays: where QEMU makes a file or a socket for others, each clone makes its own.

use super::super::error::ArgError;
use super::super::words::{Opt, Props, is_on};
use super::target::{Target, listens, shown, suffixed, unknown};

/// Back ends that are nobody else's. The clone's `stdio` is its log.
pub const OWN: [&str; 6] = ["memory", "null", "pty", "ringbuf", "stdio", "vc"];
/// The same back ends in the short notation.
pub const OWN_SHORT: [&str; 5] = ["none", "null", "pty", "stdio", "vc"];
/// Of the short notation, what another VM can have as well, by its beginning.
pub const OWN_PREFIXES: [&str; 2] = ["chardev:", "vc:"];
/// Sockets on an address, in the short notation.
pub const ADDRESSES: [&str; 2] = ["tcp:", "telnet:"];

/// Settings of every back end.
pub const COMMON_KEYS: [&str; 5] = ["backend", "id", "logappend", "logfile", "mux"];
/// Those of the back ends that are a clone's own: of windows, and of the terminal.
pub const OWN_KEYS: [&str; 6] = ["cols", "height", "rows", "signal", "size", "width"];
pub const FILE_KEYS: [&str; 2] = ["append", "path"];
pub const SOCKET_KEYS: [&str; 11] =
    ["delay", "host", "ipv4", "ipv6", "nodelay", "nowait", "path", "port", "server", "telnet", "wait"];
/// Settings of a socket in the short notation.
pub const SOCKET_SETTINGS: [&str; 10] =
    ["ipv4", "ipv4=on", "ipv6", "ipv6=on", "nodelay", "nodelay=on", "nowait", "server", "server=on", "wait=off"];
/// Settings of a VNC server.
pub const VNC_SETTINGS: [&str; 5] = ["lossy", "lossy=on", "password", "password=on", "share=ignore"];

/// The `-chardev` of a clone, if it has to differ from its source's.
pub fn changed(option: &Opt<'_>, target: Target<'_>) -> Result<Option<String>, ArgError> {
    let mut props = Props::parse(option.name, option.value, "backend")?;
    let more: &[&str] = match props.get("backend").as_deref() {
        Some("file") => &FILE_KEYS,
        Some("socket") => &SOCKET_KEYS,
        _ => &OWN_KEYS,
    };
    if props.keys().iter().any(|key| !COMMON_KEYS.contains(key) && !more.contains(key)) {
        return Err(unknown(&shown(option)));
    }
    let mut is_changed = false;
    if let Some(log) = props.get("logfile") {
        props.set_text("logfile", &suffixed(&log, target.name));
        is_changed = true;
    }
    match props.get("backend").as_deref() {
        Some(kind) if OWN.contains(&kind) => {}
        Some("file") => {
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
    // What is behind a comma would be a part of the file's name.
    if let Some(path) = value.strip_prefix("file:").filter(|path| !path.contains(',')) {
        return Ok(Some(format!("{mux}file:{}", suffixed(path, target.name))));
    }
    let (address, settings) = value.split_once(',').unwrap_or((value, ""));
    check_settings(option, settings, &SOCKET_SETTINGS)?;
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

/// The `-vnc` of a clone, if it has to differ from its source's.
pub fn changed_vnc(option: &Opt<'_>, target: Target<'_>) -> Result<Option<String>, ArgError> {
    if option.value == "none" {
        return Ok(None);
    }
    let (address, settings) = match option.value.split_once(',') {
        Some((address, settings)) => (address, format!(",{settings}")),
        None => (option.value, String::new()),
    };
    check_settings(option, settings.trim_start_matches(','), &VNC_SETTINGS)?;
    match address.strip_prefix("unix:") {
        Some(path) => Ok(Some(format!("unix:{}{settings}", suffixed(path, target.name)))),
        None => listens(option, target.net),
    }
}

/// Refuses any setting but these.
fn check_settings(option: &Opt<'_>, settings: &str, known: &[&str]) -> Result<(), ArgError> {
    let is_known = settings.is_empty() || settings.split(',').all(|setting| known.contains(&setting));
    is_known.then_some(()).ok_or_else(|| unknown(&shown(option)))
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
