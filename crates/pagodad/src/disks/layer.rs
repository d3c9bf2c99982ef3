//! The layers of a snapshot, as its manifest has noted them.

use std::path::Path;

use anyhow::{Context, Result, bail};
use pagoda_image::{DiskFile, Manifest};

use super::dir::{Dir, split};
use super::stat::Stat;
use super::user::User;
use crate::boot::Life;
use crate::record::{FileId, Noted, Same};

/// A file that has the content of a disk at the moment of a snapshot.
#[derive(Clone, Debug)]
pub struct NotedLayer {
    /// What the manifest says.
    pub disk: DiskFile,
    /// Its name in the directory of the disk.
    pub name: String,
    /// The user as whom the VM's QEMU ran.
    pub user: User,
    when: Life,
}

/// A manifest's file, as it was noted.
pub fn noted(disk: &DiskFile, manifest: &Manifest) -> Noted {
    let DiskFile { dev, ino, born_ns, .. } = *disk;
    FileId { dev, ino, born_ns }.noted(Life::of(Some(&manifest.boot_id)))
}

impl NotedLayer {
    pub fn of(manifest: &Manifest) -> Vec<NotedLayer> {
        let when = Life::of(Some(&manifest.boot_id));
        let user = User::of(&manifest.launch);
        let of = |disk: &DiskFile| Some(NotedLayer { name: disk.layer.clone()?, disk: disk.clone(), user, when });
        manifest.disks.iter().filter_map(of).collect()
    }

    pub fn noted(&self) -> Noted {
        let DiskFile { dev, ino, born_ns, .. } = self.disk;
        FileId { dev, ino, born_ns }.noted(self.when)
    }

    /// The directory of the disk, which is its own.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn dir(&self) -> Result<Dir> {
        Dir::open(split(Path::new(&self.disk.file))?.0)
    }

    /// Whether this is what was noted, with the content of that time.
    pub fn is_unchanged(&self, stat: &Stat) -> bool {
        self.noted().is(stat.id) && self.has_content_of_then(stat)
    }

    fn has_content_of_then(&self, stat: &Stat) -> bool {
        (stat.bytes, stat.mtime_ns) == (self.disk.size, self.disk.mtime_ns)
    }

    /// That nobody has written to it. Memory of that moment fits nothing else.
    ///
    /// # Errors
    /// It is gone, or another file; somebody has; that is not known.
    pub fn check(&self, dir: &Dir) -> Result<Stat> {
        let path = dir.join(&self.name);
        let path = path.display();
        let stat = dir.stat(&self.name)?.with_context(|| format!("the layer {path} of a disk is gone"))?;
        match self.noted().compare(stat.id) {
            Same::Yes if self.has_content_of_then(&stat) => Ok(stat),
            Same::Unknown => bail!(
                "nobody can tell whether {path} is still the layer that was noted: its file system has another device number since the \
                 host was restarted, and does not keep when a file was made. If you know that it is, `qemu-img create -f qcow2 -F \
                 qcow2 -b {path} NEW` makes a disk of its content, to be used without the memory"
            ),
            _ => bail!("the layer {path} of a disk has changed since"),
        }
    }
}

/// Has the layers of a snapshot outlive the host.
///
/// # Errors
/// The disk's; a layer is not there.
pub fn sync_layers(manifest: &Manifest) -> Result<()> {
    let layers = NotedLayer::of(manifest);
    if layers.is_empty() {
        return Ok(());
    }
    let sync = || layers.iter().try_for_each(sync_layer);
    User::of(&manifest.launch).act(sync)
}

fn sync_layer(layer: &NotedLayer) -> Result<()> {
    let dir = layer.dir()?;
    let file = dir.open_file(&layer.name, layer.noted())?;
    file.sync_all().with_context(|| format!("write {} to the disk", dir.join(&layer.name).display()))?;
    dir.sync()
}
