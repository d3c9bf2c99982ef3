//! What a snapshot that was cut off has left beside the disks.

use std::path::PathBuf;

use anyhow::{Context, Result};
use pagoda_api::types::Launch;
use pagoda_image::ImageId;
use serde_json::{Value, json};

use super::dir::{Dir, split};
use super::overlay::{TOP, layer_name, tag};
use super::user::User;
use crate::qmp::Monitor;
use crate::record::{FileId, MovedDisk, Record};

/// The overlays and layers of one such snapshot, none of which QEMU writes.
#[derive(Debug)]
pub struct Unused {
    /// What the record has without it.
    pub kept: Vec<MovedDisk>,
    user: User,
    tag: String,
    disks: Vec<Disk>,
}

#[derive(Debug)]
struct Disk {
    file: PathBuf,
    active_id: FileId,
}

/// The overlays of this snapshot, if QEMU writes to none of them. `None`: it does.
///
/// # Errors
/// QEMU does not say; disks cannot be looked at.
pub fn unused(monitor: &Monitor, record: &Record, launch: &Launch, image: ImageId) -> Result<Option<Unused>> {
    let tag = tag(image);
    let answer = monitor.execute("query-block")?;
    let devices = answer.as_array().context("the list of block devices")?;
    let node = |device: &Value| Some(device.get("inserted")?.get("node-name")?.as_str()?.to_owned());
    if devices.iter().filter_map(node).any(|node| node.starts_with(&format!("pagoda-{tag}-"))) {
        return Ok(None);
    }
    let found = super::find(monitor, record, launch)?;
    let disks = found.into_iter().map(|disk| Disk { file: disk.file, active_id: disk.active_id }).collect();
    let mut kept = record.disks.clone();
    kept.iter_mut().for_each(|disk| disk.tops.retain(|top| !top.node.starts_with(&format!("pagoda-{tag}-"))));
    kept.retain(|disk| !disk.tops.is_empty());
    Ok(Some(Unused { kept, user: User::of(launch), tag, disks }))
}

impl Unused {
    /// The record does not have them any more.
    pub fn remove(&self, monitor: &Monitor) {
        for index in 0..self.disks.len() {
            let _ =
                monitor.execute_with("blockdev-del", json!({ "node-name": format!("pagoda-{}-{index}", self.tag) }));
        }
        let remove = || {
            for Disk { file, active_id } in &self.disks {
                let (parent, name) = split(file)?;
                let dir = Dir::open(parent)?;
                let top = format!("{name}{TOP}{}", self.tag);
                if let Some(id) = dir.id(&top)? {
                    dir.unlink(&top, id);
                }
                dir.unlink(&layer_name(name, &self.tag), *active_id);
            }
            Ok(())
        };
        if let Err(error) = self.user.act(remove) {
            tracing::warn!("remove overlays that are not used: {}", pagoda_api::in_full(error.as_ref()));
        }
    }
}
