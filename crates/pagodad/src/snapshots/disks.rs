//! Files of a VM's writable disks: what they are when a snapshot is taken, and whether they have changed since.
//!
//! A snapshot without the content of disks fits only disks that are as they were. What cannot be compared, such as a disk on
//! the network, counts as changed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pagoda_image::DiskFile;
use serde_json::{Value, json};

use crate::qmp::Monitor;

/// QEMU's drivers of files and of devices that have a path.
const WITH_PATH: [&str; 3] = ["file", "host_device", "host_cdrom"];
/// Drivers below which there is no file: what is written there is gone with the process.
const WITHOUT_CONTENT: [&str; 2] = ["null-co", "null-aio"];

/// A file that is not to be compared.
const UNKNOWN: (u64, u64, u64, i64) = (0, 0, 0, 0);

/// The files that QEMU may write, and what they are now. Relative paths are from `cwd`.
///
/// # Errors
/// QEMU does not say.
pub fn writable(monitor: &Monitor, cwd: &str) -> Result<Vec<DiskFile>> {
    let answer = monitor.execute_with("query-named-block-nodes", json!({ "flat": true }))?;
    let nodes = answer.as_array().context("the list of block nodes")?;
    nodes.iter().filter_map(|node| disk(node, Path::new(cwd)).transpose()).collect()
}

/// `None`: nothing that is written to a file by this node itself.
fn disk(node: &Value, cwd: &Path) -> Result<Option<DiskFile>> {
    let text = |name: &str| node.get(name).and_then(Value::as_str).with_context(|| format!("{name} of a block node"));
    let driver = text("drv")?;
    let is_read_only = node.get("ro").and_then(Value::as_bool) == Some(true);
    // A format has its file in a node of its own.
    let is_above_another = node.get("children").and_then(Value::as_array).is_some_and(|below| !below.is_empty());
    if is_read_only || is_above_another || WITHOUT_CONTENT.contains(&driver) || is_format(driver) {
        return Ok(None);
    }
    let node = text("node-name")?.to_owned();
    let file = text("file")?.to_owned();
    let (dev, ino, size, mtime_ns) = if WITH_PATH.contains(&driver) { look(&path(&file, cwd)) } else { UNKNOWN };
    Ok(Some(DiskFile { node, file, dev, ino, size, mtime_ns }))
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

fn path(file: &str, cwd: &Path) -> PathBuf {
    cwd.join(file)
}

fn look(path: &Path) -> (u64, u64, u64, i64) {
    let Ok(stat) = std::fs::metadata(path) else { return UNKNOWN };
    // A block device has no time of its last write.
    if !stat.is_file() {
        return UNKNOWN;
    }
    let mtime_ns = stat.mtime().saturating_mul(1_000_000_000).saturating_add(stat.mtime_nsec());
    (stat.dev(), stat.ino(), stat.size(), mtime_ns)
}

/// The first of these that is not known to be as it was; why, for the user.
pub fn changed(disks: &[DiskFile], cwd: &str) -> Option<String> {
    disks.iter().find_map(|disk| {
        let was = (disk.dev, disk.ino, disk.size, disk.mtime_ns);
        if was == UNKNOWN {
            return Some(format!("nobody can tell whether {} has changed since", disk.file));
        }
        (look(&path(&disk.file, Path::new(cwd))) != was).then(|| format!("{} has changed since", disk.file))
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
        let file = of(&node("file", "disk", false)).unwrap();
        assert_eq!((file.size, changed(std::slice::from_ref(&file), cwd)), (7, None));
        let far = of(&node("nbd", "nbd://far", false)).unwrap();
        assert!(changed(&[file.clone(), far], cwd).unwrap().contains("nobody can tell"));
        let lost = of(&node("file", "not-there", false)).unwrap();
        assert!(changed(&[lost], cwd).unwrap().contains("nobody can tell"));
        std::fs::write(dir.join("disk"), b"longer than it was").unwrap();
        assert!(changed(&[file], cwd).unwrap().contains("disk has changed"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
