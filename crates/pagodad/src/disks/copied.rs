//! The writable disks of a running QEMU, and whether they can be copied to another host.
//!
//! What QEMU may write has to be qcow2 and raw files of this host, each alone: nothing behind it, and nothing in it that a copy of what the
//! guest sees would not have.

use anyhow::{Context, Result, ensure};
use pagoda_api::types::Launch;
use serde_json::Value;

use super::found::{Found, Inserted, find_by};
use super::new_image::{Format, NewImage};
use super::stat::Stat;
use crate::qmp::Monitor;
use crate::record::Record;

/// Entries of tables and counts for each cluster of a qcow2 file, bytes: 8 and 2.
const TABLES: u64 = 10;
/// What is in a qcow2 file beside that.
const HEADERS: u64 = 1 << 20;

/// A disk that can be copied.
#[derive(Clone, Debug)]
pub struct CopiedDisk {
    found: Found,
    /// The image that is made for it at the other host.
    pub image: NewImage,
    /// What there is to be copied, about.
    pub content: u64,
}

impl CopiedDisk {
    /// The node that the device writes to.
    pub fn node(&self) -> &str {
        &self.found.node
    }
}

/// The disks. An error says which one cannot be copied, and why.
///
/// # Errors
/// One cannot be; QEMU does not say what it writes to.
pub fn find_copied(monitor: &Monitor, record: &Record, launch: &Launch) -> Result<Vec<CopiedDisk>> {
    find_by(monitor, record, launch, copied, |copied| &copied.found)
}

fn copied(device: &Value, record: &Record, launch: &Launch) -> Result<CopiedDisk> {
    let disk = Inserted::of(device)?;
    let (name, image) = (&disk.name, disk.image()?);
    let format = check(&disk, image)?;
    let found = disk.found(record, launch)?;
    let stat = Stat::of_path(&found.file).with_context(|| format!("look at the disk {name}"))?;
    ensure!(stat.id == found.active_id, "the disk {name}: its file was moved or replaced");
    let cluster = match format {
        Format::Qcow2 => {
            Some(image.get("cluster-size").and_then(Value::as_u64).with_context(|| format!("the clusters of {name}"))?)
        }
        Format::Raw => None,
    };
    let content = stat.allocated_bytes.min(found.bytes);
    // Zeros take room in a raw file, unless its user has said otherwise at the other host.
    let room = cluster.map_or(found.bytes, |cluster| {
        stat.allocated_bytes
            .saturating_add((found.bytes / cluster.max(1)).saturating_mul(TABLES))
            .saturating_add(HEADERS)
    });
    let file = found.file.to_str().with_context(|| format!("the path of the disk {name} is no text"))?.to_owned();
    let image = NewImage { file, format, bytes: found.bytes, cluster, room };
    image.check().map_err(|why| anyhow::anyhow!("{why}"))?;
    Ok(CopiedDisk { found, image, content })
}

/// That what the guest sees is all that is in it.
fn check(disk: &Inserted<'_>, image: &Value) -> Result<Format> {
    let (name, driver) = (&disk.name, disk.text("drv")?);
    let format = Format::of(driver);
    let format =
        format.with_context(|| format!("the disk {name} is {driver}, and qcow2 and raw files can be copied"))?;
    ensure!(!disk.is_encrypted(), "the disk {name} is encrypted, and its copy would not be");
    ensure!(
        disk.depth()? == 0,
        "the disk {name} has other files behind it: `qemu-img convert -O qcow2` makes it one file when the VM has ended"
    );
    let is_some = |value: Option<&Value>| value.and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    ensure!(!is_some(image.get("snapshots")), "the disk {name} has snapshots inside, which a copy would not have");
    let data = image.get("format-specific").and_then(|of| of.get("data"));
    let of_data = |field: &str| data.and_then(|data| data.get(field));
    // Those of the file, and those that QEMU has in memory.
    ensure!(
        !is_some(of_data("bitmaps")) && !disk.has_bitmaps(),
        "the disk {name} has bitmaps of what was written, which a copy would not have"
    );
    ensure!(of_data("data-file").is_none(), "the disk {name} has its content in another file");
    Ok(format)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(change: impl FnOnce(&mut Value)) -> Value {
        let mut device = json!({ "device": "d0", "inserted": {
            "drv": "qcow2", "node-name": "#block1", "ro": false, "encrypted": false, "backing_file_depth": 0, "file": "/srv/a",
            "image": { "virtual-size": 1 << 20, "cluster-size": 65536, "format-specific": { "type": "qcow2", "data": {} } },
        }});
        change(&mut device["inserted"]);
        device
    }

    fn said(change: impl FnOnce(&mut Value)) -> Result<Format, String> {
        let device = device(change);
        let disk = Inserted::of(&device).unwrap();
        check(&disk, disk.image().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_a_copy_would_not_have_is_refused_by_name() {
        assert_eq!(said(|_| ()), Ok(Format::Qcow2));
        assert_eq!(said(|of| of["drv"] = json!("raw")), Ok(Format::Raw));
        type Change = fn(&mut Value);
        let table: [(Change, &str); 8] = [
            (|of| of["drv"] = json!("nbd"), "d0 is nbd"),
            (|of| of["drv"] = json!("host_device"), "d0 is host_device"),
            (|of| of["drv"] = json!("vmdk"), "d0 is vmdk"),
            (|of| of["encrypted"] = json!(true), "d0 is encrypted"),
            (|of| of["backing_file_depth"] = json!(1), "d0 has other files behind it"),
            (|of| of["image"]["snapshots"] = json!([{ "id": "1" }]), "d0 has snapshots inside"),
            (|of| of["image"]["format-specific"]["data"]["bitmaps"] = json!([{ "name": "b" }]), "d0 has bitmaps"),
            (|of| of["image"]["format-specific"]["data"]["data-file"] = json!("x"), "d0 has its content in another"),
        ];
        for (change, expected) in table {
            let why = said(change).unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }
}
