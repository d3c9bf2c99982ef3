//! Files of a VM's writable disks, for snapshots without the content of disks: what they are when one is taken, and whether they
//! have changed since.
//!
//! Such a snapshot fits only disks that are as they were. What cannot be compared counts as changed: a disk on the network, and the
//! file of QEMU's `-snapshot`, which has no name and ends with QEMU.

use std::path::Path;

use anyhow::{Context, Result};
use pagoda_image::{DiskFile, Manifest};
use serde_json::{Value, json};

use crate::disks::{Stat, noted};
use crate::qmp::Monitor;
use crate::record::{FileId, MovedDisk, Same};

/// QEMU's drivers of files and of devices that have a path.
const WITH_PATH: [&str; 3] = ["file", "host_device", "host_cdrom"];
/// Drivers below which there is no file: what is written there is gone with the process.
const WITHOUT_CONTENT: [&str; 2] = ["null-co", "null-aio"];

/// The files that QEMU may write, and what they are now. Relative paths are from `cwd`. An overlay of a `moved` disk is named as
/// it will be when the VM has ended.
///
/// # Errors
/// QEMU does not say.
pub fn writable(monitor: &Monitor, cwd: &str, moved: &[MovedDisk]) -> Result<Vec<DiskFile>> {
    let answer = monitor.execute_with("query-named-block-nodes", json!({ "flat": true }))?;
    let nodes = answer.as_array().context("the list of block nodes")?;
    let files = nodes.iter().filter_map(|node| disk(node, Path::new(cwd)).transpose());
    files.map(|file| file.map(|file| named_later(file, moved))).collect()
}

fn named_later(disk: DiskFile, moved: &[MovedDisk]) -> DiskFile {
    let DiskFile { dev, ino, born_ns, .. } = disk;
    let found = FileId { dev, ino, born_ns };
    let is_newest = |of: &&MovedDisk| of.newest().is_some_and(|top| of.noted(top.id).is(found));
    match moved.iter().find(is_newest) {
        Some(of) => DiskFile { file: of.file.clone(), ..disk },
        None => disk,
    }
}

/// The file that a node itself writes to, as QEMU names it. `None`: it writes to none, or through another node.
///
/// # Errors
/// QEMU says something else.
pub fn written_file(node: &Value) -> Result<Option<String>> {
    let text = |name: &str| node.get(name).and_then(Value::as_str).with_context(|| format!("{name} of a block node"));
    let driver = text("drv")?;
    let is_read_only = node.get("ro").and_then(Value::as_bool) == Some(true);
    // A format has its file in a node of its own.
    let is_above_another = node.get("children").and_then(Value::as_array).is_some_and(|below| !below.is_empty());
    if is_read_only || is_above_another || WITHOUT_CONTENT.contains(&driver) || is_format(driver) {
        return Ok(None);
    }
    Ok(Some(text("file")?.to_owned()))
}

/// `None`: nothing that is written to a file by this node itself.
fn disk(node: &Value, cwd: &Path) -> Result<Option<DiskFile>> {
    let Some(file) = written_file(node)? else { return Ok(None) };
    let text = |name: &str| node.get(name).and_then(Value::as_str).with_context(|| format!("{name} of a block node"));
    let (node, driver) = (text("node-name")?.to_owned(), text("drv")?);
    // A file that is not to be compared has zeros.
    let stat = WITH_PATH.contains(&driver).then(|| look(&cwd.join(&file))).flatten();
    let FileId { dev, ino, born_ns } = stat.map_or(FileId::NONE, |stat| stat.id);
    let (size, mtime_ns) = stat.map_or((0, 0), |stat| (stat.bytes, stat.mtime_ns));
    Ok(Some(DiskFile { node, file, dev, ino, born_ns, size, mtime_ns, layer: None }))
}

/// QEMU's formats and filters, which have a file only through another node.
fn is_format(driver: &str) -> bool {
    const FORMATS: [&str; 14] = [
        "raw",
        "qcow2",
        "qcow",
        "qed",
        "vmdk",
        "vdi",
        "vpc",
        "vhdx",
        "luks",
        "throttle",
        "copy-on-read",
        "blkdebug",
        "preallocate",
        "compress",
    ];
    FORMATS.contains(&driver)
}

/// A block device has no time of its last write.
fn look(path: &Path) -> Option<Stat> {
    Stat::of_path(path).ok().filter(|stat| stat.is_file)
}

/// The first disk whose content the snapshot does not have and that is not known to be as it was; why, for the user.
pub fn changed(manifest: &Manifest) -> Option<String> {
    manifest.disks.iter().filter(|disk| disk.layer.is_none()).find_map(|disk| {
        let DiskFile { file, size, mtime_ns, .. } = disk;
        let unknown = || Some(format!("nobody can tell whether {file} has changed since"));
        if (disk.dev, disk.ino, *size, *mtime_ns) == (0, 0, 0, 0) {
            return unknown();
        }
        let found = look(&Path::new(&manifest.launch.cwd).join(file));
        let found = found.filter(|stat| (stat.bytes, stat.mtime_ns) == (*size, *mtime_ns));
        match found.map_or(Same::No, |stat| noted(disk, manifest).compare(stat.id)) {
            Same::Yes => None,
            Same::No => Some(format!("{file} has changed since")),
            Same::Unknown => unknown(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_cannot_be_compared_has_changed() {
        let dir = std::env::temp_dir().join(format!("pagodad-disks-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("disk"), b"content").unwrap();
        let cwd = dir.to_str().unwrap();
        let node =
            |driver: &str, file: &str, ro: bool| json!({ "drv": driver, "file": file, "node-name": "n", "ro": ro });
        let of = |node: &Value| disk(node, &dir).unwrap();
        assert_eq!(of(&node("file", "disk", true)), None);
        assert_eq!(of(&node("qcow2", "disk", false)), None);
        assert_eq!(of(&node("null-co", "null-co://", false)), None);
        let changed = |disks: &[&DiskFile], boot_id: &str| {
            let mut manifest = crate::images::tests::manifest(1, "web1", "one");
            manifest.launch.cwd = cwd.to_owned();
            manifest.disks = disks.iter().map(|disk| (*disk).clone()).collect();
            manifest.boot_id = boot_id.to_owned();
            super::changed(&manifest).unwrap_or_default()
        };
        let boot_id = crate::boot::id().unwrap();
        let file = of(&node("file", "disk", false)).unwrap();
        assert_eq!((file.size, changed(&[&file], boot_id)), (7, String::new()));
        // The host was restarted, and the device has another number.
        let moved = DiskFile { dev: file.dev + 1, ..file.clone() };
        assert!(changed(&[&moved], boot_id).contains("disk has changed"));
        assert_eq!(changed(&[&moved], "another").is_empty(), file.born_ns.is_some());
        let unborn = DiskFile { born_ns: None, ..moved };
        assert!(changed(&[&unborn], "another").contains("nobody can tell"));
        let far = of(&node("nbd", "nbd://far", false)).unwrap();
        assert!(changed(&[&file, &far], boot_id).contains("nobody can tell"));
        let lost = of(&node("file", "not-there", false)).unwrap();
        assert!(changed(&[&lost], boot_id).contains("nobody can tell"));
        std::fs::write(dir.join("disk"), b"longer than it was").unwrap();
        assert!(changed(&[&file], boot_id).contains("disk has changed"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
