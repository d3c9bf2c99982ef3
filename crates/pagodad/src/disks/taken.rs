//! The disks of a snapshot that is being taken.
//!
//! Order: links and overlays are made, on the disk -> the VM's record names the overlays -> QEMU opens them -> the VM stands still,
//! and QEMU puts all of them on top in one transaction -> the manifest names the layers. Until the transaction everything can be
//! undone. Whether one that was not answered took place is not known, so that everything stays then.

use anyhow::{Context, Result, anyhow};
use pagoda_api::types::Launch;
use pagoda_image::{DiskFile, ImageId};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::dir::{Dir, split};
use super::found::Found;
use super::overlay::{self, New, layer_name, tag};
use super::qemu_img::QemuImg;
use super::stat::Stat;
use super::user::User;
use crate::qmp::{Monitor, Refused};
use crate::record::{Below, FileId, MovedDisk, TopFile};

/// The layers and overlays of one snapshot.
#[derive(Debug)]
pub struct Taking {
    user: User,
    layers: Vec<Layer>,
    /// QEMU was told to write to the overlays, and has not refused.
    is_switched: bool,
}

#[derive(Debug)]
struct Layer {
    disk: Found,
    dir: Dir,
    layer: String,
    top: TopFile,
}

impl Taking {
    /// What is taken of a VM's disks without any of them.
    pub fn none(launch: &Launch) -> Taking {
        Taking { user: User::of(launch), layers: Vec::new(), is_switched: false }
    }

    /// Makes the files, which outlive the host when this returns.
    ///
    /// # Errors
    /// No room, no permission, a file system without links. Nothing is left.
    pub fn make(disks: &[Found], launch: &Launch, image: ImageId) -> Result<Taking> {
        let user = User::of(launch);
        let mut taking = Taking::none(launch);
        if disks.is_empty() {
            return Ok(taking);
        }
        let img = QemuImg::new(&launch.program, user)?;
        let tag = tag(image);
        for (index, disk) in disks.iter().enumerate() {
            match user.act(|| Layer::make(&img, disk, &tag, index)) {
                Ok(layer) => taking.layers.push(layer),
                Err(error) => {
                    taking.remove_files();
                    return Err(error).with_context(|| format!("the disk {}", disk.device));
                }
            }
        }
        Ok(taking)
    }

    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// What the VM's record says of its disks from now on.
    pub fn moved(&self, before: &[MovedDisk]) -> Vec<MovedDisk> {
        let mut moved = before.to_vec();
        for Layer { disk, top, .. } in &self.layers {
            let file = disk.file.to_string_lossy().into_owned();
            // What was put in order may be in a record of before all the same.
            moved.retain(|of| of.file != file || !of.is_settled(disk.named_id));
            match moved.iter_mut().find(|of| of.file == file) {
                Some(of) => of.tops.push(top.clone()),
                None => moved.push(MovedDisk::new(file, disk.named_id, vec![top.clone()])),
            }
        }
        moved
    }

    /// Has QEMU open the overlays, while the VM runs.
    ///
    /// # Errors
    /// QEMU's.
    pub fn open(&self, monitor: &Monitor) -> Result<()> {
        self.layers.iter().try_for_each(|layer| {
            let added = monitor.execute_with("blockdev-add", layer.node());
            added.map(drop).with_context(|| format!("have QEMU open the overlay of {}", layer.disk.device))
        })
    }

    /// Has QEMU write to the overlays from now on. The VM stands still.
    ///
    /// # Errors
    /// QEMU's.
    pub fn switch(&mut self, monitor: &Monitor) -> Result<()> {
        if self.layers.is_empty() {
            return Ok(());
        }
        let action = |layer: &Layer| {
            let data = json!({ "node": layer.disk.node, "overlay": layer.top.node });
            json!({ "type": "blockdev-snapshot", "data": data })
        };
        let actions: Vec<Value> = self.layers.iter().map(action).collect();
        self.is_switched = true;
        monitor.execute_with("transaction", json!({ "actions": actions })).map(drop).map_err(|error| {
            // Without an answer it may be done all the same.
            self.is_switched = !error.is::<Refused>();
            error.context("have QEMU put overlays on the disks")
        })
    }

    /// The same, when QEMU writes to the overlays: with what they are on, which nobody writes from now on.
    ///
    /// # Errors
    /// A layer cannot be looked at, or is another file.
    pub fn moved_for_good(&self, before: &[MovedDisk]) -> Result<Vec<MovedDisk>> {
        let mut moved = self.moved(before);
        for layer in &self.layers {
            let Stat { id, mtime_ns, .. } = layer.look()?;
            let below = Some(Below { id, mtime_ns });
            let tops = moved.iter_mut().flat_map(|disk| &mut disk.tops);
            tops.filter(|top| top.node == layer.top.node).for_each(|top| top.below = below);
        }
        Ok(moved)
    }

    /// What the manifest says of the disks. The VM stands still.
    ///
    /// # Errors
    /// A layer cannot be looked at, or is another file.
    pub fn disks(&self) -> Result<Vec<DiskFile>> {
        self.layers.iter().map(Layer::describe).collect()
    }

    /// Whether QEMU may write to the overlays.
    pub fn may_be_switched(&self) -> bool {
        self.is_switched
    }

    /// QEMU closes the overlays again, which no device has. What fails stays open, and harms nobody.
    pub fn close(&self, monitor: &Monitor) {
        for layer in &self.layers {
            let _ = monitor.execute_with("blockdev-del", json!({ "node-name": layer.top.node }));
        }
    }

    /// Removes the files. No record has them, and QEMU does not write to them.
    pub fn remove_files(&self) {
        let remove = || {
            for Layer { disk, dir, layer, top } in &self.layers {
                dir.unlink(&top.name, top.id);
                dir.unlink(layer, disk.active_id);
            }
            Ok(())
        };
        if let Err(error) = self.user.act(remove) {
            tracing::warn!(
                "remove the overlays of a snapshot that was given up: {}",
                pagoda_api::in_full(error.as_ref())
            );
        }
    }
}

impl Layer {
    /// The caller acts as the user.
    fn make(img: &QemuImg, disk: &Found, tag: &str, index: usize) -> Result<Layer> {
        let (parent, name) = split(&disk.file)?;
        let dir = Dir::open(parent)?;
        let like = dir.stat(&disk.active)?.with_context(|| format!("{} is gone", dir.join(&disk.active).display()))?;
        let layer = layer_name(name, tag);
        dir.link(&disk.active, &layer).map_err(|error| no_link(error, &dir, &layer))?;
        let made = Layer::make_top(
            img,
            disk,
            &dir,
            &New { name, tag, index, backing: &layer, bytes: disk.bytes, like: &like },
        );
        match made {
            Ok(top) => Ok(Layer { disk: disk.clone(), dir, layer, top }),
            Err(error) => {
                dir.unlink(&layer, disk.active_id);
                Err(error)
            }
        }
    }

    fn make_top(img: &QemuImg, disk: &Found, dir: &Dir, new: &New<'_>) -> Result<TopFile> {
        let linked = dir.id(new.backing)?;
        anyhow::ensure!(linked == Some(disk.active_id), "{} was replaced meanwhile", dir.join(&disk.active).display());
        let top = overlay::make(img, dir, new)?;
        dir.sync().inspect_err(|_| dir.unlink(&top.name, top.id))?;
        Ok(top)
    }

    /// The arguments of `blockdev-add`.
    fn node(&self) -> Value {
        let Found { is_direct, is_flushed, ways, .. } = &self.disk;
        let cache = json!({ "direct": is_direct, "no-flush": !is_flushed });
        let discard = ways.discard.as_deref().unwrap_or("ignore");
        let mut file = json!({
            "driver": "file", "filename": self.dir.join(&self.top.name), "cache": cache, "discard": discard,
        });
        // QEMU refuses it for files that go through the page cache.
        if let Some(aio) = ways.aio.as_deref().filter(|aio| *aio != "native" || *is_direct) {
            file["aio"] = aio.into();
        }
        json!({
            "driver": "qcow2", "node-name": self.top.node, "backing": null, "cache": cache, "discard": discard, "file": file,
        })
    }

    /// What is below the overlay.
    fn look(&self) -> Result<Stat> {
        let Layer { disk, dir, layer, .. } = self;
        let stat = dir.stat(layer)?.with_context(|| format!("{} is gone", dir.join(layer).display()))?;
        anyhow::ensure!(stat.id == disk.active_id, "{} was replaced", dir.join(layer).display());
        Ok(stat)
    }

    fn describe(&self) -> Result<DiskFile> {
        let (disk, stat) = (&self.disk, self.look()?);
        let FileId { dev, ino, born_ns } = stat.id;
        Ok(DiskFile {
            node: disk.device.clone(),
            file: disk.file.to_string_lossy().into_owned(),
            dev,
            ino,
            born_ns,
            size: stat.bytes,
            mtime_ns: stat.mtime_ns,
            layer: Some(self.layer.clone()),
        })
    }
}

fn no_link(error: Errno, dir: &Dir, layer: &str) -> anyhow::Error {
    let what = format!("give the disk the second name {}", dir.join(layer).display());
    match error {
        Errno::PERM | Errno::OPNOTSUPP | Errno::MLINK => {
            anyhow!("{what}: {error}: its file system has no hard links, or does not allow them to its user")
        }
        error => anyhow!("{what}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::words::Ways;

    /// An entry that a restore has left behind says nothing of a disk any more.
    #[test]
    fn what_was_put_in_order_is_not_gone_on_with() {
        let id = |ino| FileId { dev: 1, ino, born_ns: None };
        let top = |node: &str, ino| TopFile { name: node.into(), node: node.into(), id: id(ino), below: None };
        let disk = |named_id| Found {
            device: "d0".into(),
            node: "n".into(),
            file: "/d/disk".into(),
            active: "disk".into(),
            active_id: named_id,
            named_id,
            bytes: 1,
            is_direct: false,
            is_flushed: true,
            ways: Ways::default(),
        };
        let taking = |named_id| {
            let dir = Dir::open(std::path::Path::new("/")).unwrap();
            let layer = Layer { disk: disk(named_id), dir, layer: "layer".into(), top: top("new", 9) };
            Taking { layers: vec![layer], ..Taking::none(&Launch::default()) }
        };
        let before = [MovedDisk::new("/d/disk".into(), id(5), vec![top("restored", 6)])];
        let moved = taking(id(6)).moved(&before);
        assert_eq!(moved, [MovedDisk::new("/d/disk".into(), id(6), vec![top("new", 9)])]);
        // The newest content does not have the disk's name yet.
        let moved = taking(id(5)).moved(&before);
        assert_eq!(moved, [MovedDisk::new("/d/disk".into(), id(5), vec![top("restored", 6), top("new", 9)])]);
    }
}
