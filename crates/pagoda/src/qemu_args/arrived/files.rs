//! Refuses options that name files outside of what the host allows, or ways to a disk that are not known.

use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::super::cloned::target::shown;
use super::super::words::{Opt, Props};

/// Paths of the host that everybody may have, and only read.
const ALWAYS: [&str; 5] = ["/usr/share", "/dev/kvm", "/dev/null", "/dev/random", "/dev/urandom"];
/// Text for the guest, or for people.
const TEXT: [&str; 2] = ["append", "name"];
/// Formats and ways to a disk that start nothing.
const DRIVERS: [&str; 10] =
    ["copy-on-read", "file", "host_cdrom", "host_device", "luks", "nbd", "null-aio", "null-co", "qcow2", "raw"];
/// What may stand before the colon of a disk's name.
const PROTOCOLS: [&str; 2] = ["file", "nbd"];
/// An address of NBD, up to its host.
const NBD: &str = "nbd://";
/// Where a path may begin within a value.
const BEFORE_PATHS: [char; 4] = [',', '=', ':', ';'];

/// That no path among the properties leaves what is allowed.
pub fn check(option: &Opt<'_>, paths: &[PathBuf]) -> Result<(), String> {
    if TEXT.contains(&option.name) {
        return Ok(());
    }
    let refused = |path: &str| Err(format!("{}: {path} is not below a directory of [moves] paths", shown(option)));
    // As a whole too, for not every option's value is a list of properties.
    let whole = (String::new(), option.value.to_owned());
    for (key, value) in leaves(option).into_iter().chain([whole]) {
        // What has no key is its own key, with the value `on`.
        for text in [key.as_str(), value.as_str()] {
            if let Some(path) = outside(text, paths) {
                return refused(&path);
            }
        }
    }
    Ok(())
}

/// A disk that is a word by itself.
pub fn check_image(image: &str, paths: &[PathBuf]) -> Result<(), String> {
    if !has_known_protocol(image) {
        return Err(format!("{image}: no disk of that kind is known to be safe in a VM of another host"));
    }
    match outside(image, paths) {
        Some(path) => Err(format!("{path} is not below a directory of [moves] paths")),
        None => Ok(()),
    }
}

/// `-drive`, `-blockdev` and others: how the disk is read.
pub fn check_disk(option: &Opt<'_>) -> Result<(), String> {
    let refused =
        |what: &str| Err(format!("{}: {what} is not known to be safe in a VM of another host", shown(option)));
    if !matches!(option.name, "drive" | "blockdev") {
        return if has_known_protocol(option.value) { Ok(()) } else { refused(option.value) };
    }
    for (key, value) in leaves(option) {
        let last = key.rsplit('.').next().unwrap_or(&key);
        let is_known = match last {
            "driver" | "format" => DRIVERS.contains(&value.as_str()),
            "file" | "filename" | "backing" => has_known_protocol(&value),
            _ => true,
        };
        if !is_known {
            return refused(&format!("{key}={value}"));
        }
    }
    Ok(())
}

/// As QEMU tells a protocol from a file's name: a colon before any slash.
fn has_known_protocol(disk: &str) -> bool {
    match disk.find([':', '/']) {
        Some(at) if disk[at..].starts_with(':') => PROTOCOLS.contains(&&disk[..at]),
        _ => true,
    }
}

/// The first path in a text that is not allowed.
fn outside(text: &str, paths: &[PathBuf]) -> Option<String> {
    // An address of NBD is no path. What follows it has to be as good as any other.
    let text = text.replace(NBD, "nbd:");
    text.split(BEFORE_PATHS).find(|piece| !is_allowed(piece, paths)).map(str::to_owned)
}

fn is_allowed(piece: &str, paths: &[PathBuf]) -> bool {
    let path = Path::new(piece);
    if path.components().any(|part| part == Component::ParentDir) {
        return false;
    }
    !path.is_absolute()
        || paths.iter().any(|dir| path.starts_with(dir))
        || ALWAYS.iter().any(|always| path.starts_with(always))
}

/// All properties of an option, also of those within others.
pub fn leaves(option: &Opt<'_>) -> Vec<(String, String)> {
    match Props::parse(option.name, option.value, "") {
        Ok(Props::Keyval(props)) => props,
        Ok(Props::Json(map)) => {
            let mut found = Vec::new();
            map.iter().for_each(|(key, value)| collect(key.clone(), value, &mut found));
            found
        }
        // What is no such list is looked at as a whole.
        Err(_) => Vec::new(),
    }
}

fn collect(key: String, value: &Value, found: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, value)| collect(format!("{key}.{name}"), value, found)),
        Value::Array(values) => values.iter().for_each(|value| collect(key.clone(), value, found)),
        Value::String(text) => found.push((key, text.clone())),
        other => found.push((key, other.to_string())),
    }
}
