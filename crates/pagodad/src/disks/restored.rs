//! The disks of a VM that is made of a snapshot: each gets a new overlay on its layer.
//!
//! Order: all is looked for -> overlays are made beside the disks -> the new VM's record names them, as if a VM had ended that wrote
//! to them -> they get the disks' names ([`super::settle()`]) -> QEMU starts. Who dies in between leaves a record by which the
//! next daemon does the rest for all disks.

use std::path::Path;

use anyhow::{Context, Result, bail};
use pagoda_api::types::Launch;
use pagoda_image::{DiskFile, ImageId, Manifest};
use rustix::io::Errno;

use super::dir::{Dir, split};
use super::layer::NotedLayer;
use super::limits::ASIDE_MAX;
use super::overlay::{self, New, tag};
use super::qemu_img::QemuImg;
use super::user::User;
use super::words;
use crate::record::{FileId, MovedDisk, Record, TopFile};

/// New overlays, which are removed with this unless a record names them.
#[derive(Debug)]
pub struct Restored {
    user: User,
    disks: Vec<Disk>,
    is_kept: bool,
}

#[derive(Debug)]
struct Disk {
    file: String,
    dir: Dir,
    name: String,
    top: TopFile,
}

impl Restored {
    /// Makes the overlays. `id` is a new one.
    ///
    /// # Errors
    /// A layer or a file behind it is missing; no room. Nothing is left.
    pub fn make(manifest: &Manifest, id: ImageId) -> Result<Restored> {
        let user = User::of(&manifest.launch);
        let mut restored = Restored { user, disks: Vec::new(), is_kept: false };
        let layers = NotedLayer::of(manifest);
        if layers.is_empty() {
            return Ok(restored);
        }
        let img = QemuImg::new(&manifest.launch.program, user)?;
        let tag = tag(id);
        for (index, layer) in layers.iter().enumerate() {
            let made = user.act(|| Disk::make(&img, layer, &tag, index));
            restored.disks.push(made.with_context(|| format!("the disk {}", layer.disk.file))?);
        }
        Ok(restored)
    }

    /// What the new VM's record says of its disks. No QEMU has them open.
    ///
    /// # Errors
    /// A disk cannot be looked at.
    pub fn moved(&self) -> Result<Vec<MovedDisk>> {
        let moved = |disk: &Disk| {
            let was = disk.dir.id(&disk.name)?.unwrap_or(FileId::NONE);
            Ok(MovedDisk::new(disk.file.clone(), was, vec![disk.top.clone()]))
        };
        self.user.act(|| self.disks.iter().map(moved).collect())
    }

    /// The overlays stay from now on, because a record names them.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let remove = || {
            self.disks.iter().for_each(|disk| disk.dir.unlink(&disk.top.name, disk.top.id));
            Ok(())
        };
        if let Err(error) = self.user.act(remove) {
            tracing::warn!("remove the overlays of a restore: {}", pagoda_api::in_full(error.as_ref()));
        }
    }
}

impl Disk {
    fn make(img: &QemuImg, layer: &NotedLayer, tag: &str, index: usize) -> Result<Disk> {
        let NotedLayer { disk, name: layer, .. } = layer;
        let (parent, name) = split(Path::new(&disk.file))?;
        let dir = Dir::open(parent)?;
        let like = dir.stat(layer)?.with_context(|| format!("its layer {} is gone", dir.join(layer).display()))?;
        // All files behind it have to be there too, or QEMU would not start.
        let chain = img.chain(&dir.join(layer)).with_context(|| format!("look at its layer {layer}"))?;
        let bytes =
            chain.first().and_then(|file| file.get("virtual-size")?.as_u64()).context("the size of its layer")?;
        let top = overlay::make(img, &dir, &New { name, tag, index, backing: layer, bytes, like: &like })?;
        Ok(Disk { file: disk.file.clone(), name: name.to_owned(), dir, top })
    }
}

/// Checks that the disks can be put back without losing content that no snapshot has. `layers` are those of all snapshots: a disk
/// that is the same file as one of them loses nothing. With `force`, what would be lost is kept aside. In a rollback the VM's own disks
/// are given up by its user's wish.
///
/// # Errors
/// Why not.
pub fn check_restore(
    manifest: &Manifest,
    layers: &[NotedLayer],
    force: bool,
    rolled_back: Option<&Record>,
) -> Result<()> {
    let to_restore = NotedLayer::of(manifest);
    if to_restore.is_empty() {
        return Ok(());
    }
    let user = User::of(&manifest.launch);
    let img = QemuImg::new(&manifest.launch.program, user)?;
    let check = |layer: &NotedLayer| {
        let dir = layer.dir()?;
        layer.check(&dir)?;
        if rolled_back.is_some_and(|record| is_its_own(&dir, &layer.disk, record)) {
            return Ok(());
        }
        // A rollback keeps nothing aside.
        check_disk(&img, &dir, &layer.disk, layers, force && rolled_back.is_none())
    };
    user.act(|| to_restore.iter().try_for_each(check))
}

/// Whether a VM has one of the disks whose content a snapshot has, by its record or its command line. If they cannot be looked at,
/// nothing is said here.
pub fn names_disk(manifest: &Manifest, record: &Record) -> bool {
    let layers = NotedLayer::of(manifest);
    let is_its = |layer: &NotedLayer| layer.dir().is_ok_and(|dir| is_its_own(&dir, &layer.disk, record));
    User::of(&manifest.launch).act(|| Ok(layers.iter().any(is_its))).unwrap_or(false)
}

/// Whether a VM has this disk.
fn is_its_own(dir: &Dir, disk: &DiskFile, record: &Record) -> bool {
    let has_moved = record.disks.iter().any(|of| of.file == disk.file);
    let id = split(Path::new(&disk.file)).and_then(|(_, name)| dir.id(name)).ok().flatten();
    let is_named = |launch| id.is_some_and(|id| words::name_any(launch, &|found| found == id));
    has_moved || record.launch.as_ref().is_some_and(is_named)
}

fn check_disk(img: &QemuImg, dir: &Dir, disk: &DiskFile, layers: &[NotedLayer], force: bool) -> Result<()> {
    let (_, name) = split(Path::new(&disk.file))?;
    let Some(id) = dir.id(name)? else { return Ok(()) };
    let path = dir.join(name);
    img.check_unused(&path).with_context(|| format!("somebody may be writing to the disk {}", disk.file))?;
    if force || is_layer(dir, id, layers)? || shows_a_layer(img, dir, &path, layers)? {
        return Ok(());
    }
    bail!(
        "the disk {} has gone on since, and what was written to it since its last snapshot would be lost; --force keeps that in {}",
        disk.file,
        dir.join(&aside_name(name, disk)).display()
    )
}

/// Whether a file of the directory is a layer there, by its name, with the content of that time. The numbers alone may be another
/// file's by now.
fn is_layer(dir: &Dir, id: FileId, layers: &[NotedLayer]) -> Result<bool> {
    for layer in layers.iter().filter(|layer| layer.noted().is(id)) {
        if dir.stat(&layer.name)?.is_some_and(|stat| stat.id == id && layer.is_unchanged(&stat)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether an overlay shows what a layer has, and nothing else. One on any other file shows content that no snapshot has.
fn shows_a_layer(img: &QemuImg, dir: &Dir, overlay: &Path, layers: &[NotedLayer]) -> Result<bool> {
    if !img.is_empty(overlay)? {
        return Ok(false);
    }
    // Ours name a file beside them.
    let Some(behind) = img.backing(overlay)?.filter(|name| !name.contains('/')) else { return Ok(false) };
    match dir.stat(&behind) {
        Ok(Some(stat)) => is_layer(dir, stat.id, layers),
        Ok(None) => Ok(false),
        Err(error) => Err(error),
    }
}

fn aside_name(name: &str, disk: &DiskFile) -> String {
    let of = disk.layer.as_deref().and_then(|layer| layer.rsplit('-').next()).unwrap_or("restore");
    format!("{name}.pagoda-before-{of}")
}

/// Gives what the disks have now a second name each.
///
/// # Errors
/// It cannot have one.
pub fn keep_aside(launch: &Launch, manifest: &Manifest) -> Result<()> {
    let layers = NotedLayer::of(manifest);
    let keep = |NotedLayer { disk, .. }: &NotedLayer| {
        let (parent, name) = split(Path::new(&disk.file))?;
        let dir = Dir::open(parent)?;
        if dir.id(name)?.is_none() {
            return Ok(());
        }
        let first = aside_name(name, disk);
        let names = std::iter::once(first.clone()).chain((2..ASIDE_MAX).map(|number| format!("{first}-{number}")));
        for aside in names {
            match dir.link(name, &aside) {
                Err(Errno::EXIST) => {}
                linked => {
                    linked.with_context(|| format!("keep {} as {aside}", disk.file))?;
                    tracing::info!("what the disk {} had is kept as {aside}", disk.file);
                    return dir.sync();
                }
            }
        }
        bail!("{} has been kept aside {ASIDE_MAX} times: remove some of {first}-*", disk.file)
    };
    User::of(launch).act(|| layers.iter().try_for_each(keep))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::stat::Stat;
    use crate::images::tests::manifest;

    fn layer(file: &Path, name: &str, stat: &Stat) -> DiskFile {
        DiskFile {
            node: "disk0".into(),
            file: file.display().to_string(),
            dev: stat.id.dev,
            ino: stat.id.ino,
            born_ns: stat.id.born_ns,
            size: stat.bytes,
            mtime_ns: stat.mtime_ns,
            layer: Some(name.to_owned()),
        }
    }

    /// What is behind an empty overlay may be what nobody else has.
    #[test]
    fn an_empty_overlay_loses_nothing_on_a_layer_alone() {
        let user = User::own();
        let Ok(img) = QemuImg::new("qemu-system-x86_64", user) else {
            eprintln!("there is no qemu-img");
            return;
        };
        let path = std::env::temp_dir().join(format!("pagodad-restored-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        // A base without a file behind it is made by an overlay on nothing: `qemu-img create -u` looks at no backing file.
        img.create(&path.join("base"), "none", 1 << 20).unwrap();
        img.create(&path.join("disk"), "base", 1 << 20).unwrap();
        let dir = Dir::open(&path).unwrap();
        let base = dir.stat("base").unwrap().unwrap();
        let disk = layer(&path.join("disk"), "base", &base);
        let check =
            |layers: &[NotedLayer], force| check_disk(&img, &dir, &disk, layers, force).map_err(|e| e.to_string());
        let known = NotedLayer::of(&Manifest { disks: vec![disk.clone()], ..manifest(1, "web1", "one") });
        assert_eq!(check(&known, false), Ok(()));
        let why = check(&[], false).unwrap_err();
        assert!(why.contains("has gone on since") && why.contains("--force"), "{why}");
        assert_eq!(check(&[], true), Ok(()));
        std::fs::write(path.join("base"), b"somebody has written to it").unwrap();
        assert!(check(&known, false).is_err(), "it is not the layer any more");
        std::fs::remove_dir_all(&path).unwrap();
    }
}
