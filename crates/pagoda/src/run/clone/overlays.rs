//! The disks of clones: each has an overlay of its own on the layer that the snapshot has of a disk.
//!
//! They are made beside the disk by this process, which is of the user whose QEMU it is, and name the layer without its directory.
//! Nobody writes to the layer.

use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use pagoda_api::SnapshotDisk;

use crate::qemu_args::Overlay;
use crate::run::program;

const QEMU_IMG: &str = "qemu-img";

/// New overlays. Dropped before all clones run, they are removed.
#[derive(Debug, Default)]
pub struct Overlays {
    made: Vec<PathBuf>,
}

/// That nobody's file would be written over.
///
/// # Errors
/// There is one.
pub fn check_absent(overlays: &[Overlay]) -> Result<()> {
    for Overlay { file, .. } in overlays {
        ensure!(
            Path::new(file).symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound),
            "{file} is there, the disk of an earlier clone: remove it if you do not need it, or choose another name"
        );
    }
    Ok(())
}

impl Overlays {
    /// Makes the overlays of all clones. `disks` are those of the snapshot.
    ///
    /// # Errors
    /// The command line and the snapshot do not have the same disks; no room. Nothing is left.
    pub fn make<'a>(
        qemu: &Path,
        disks: &[SnapshotDisk],
        of_clones: impl Iterator<Item = &'a [Overlay]>,
    ) -> Result<Overlays> {
        let mut overlays = Overlays::default();
        for of_clone in of_clones {
            let layers = layers_of(disks, of_clone)?;
            for (overlay, layer) in of_clone.iter().zip(layers) {
                overlays.add(qemu, overlay, layer).with_context(|| format!("make {}", overlay.file))?;
            }
        }
        Ok(overlays)
    }

    fn add(&mut self, qemu: &Path, overlay: &Overlay, layer: &str) -> Result<()> {
        let file = std::path::absolute(&overlay.file)?;
        let mode = file.with_file_name(layer).metadata().with_context(|| format!("look at the layer {layer}"))?;
        let mode = mode.permissions().mode();
        // It is this process's own from here on, whoever else makes one.
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file)?;
        self.made.push(file.clone());
        let mut command = Command::new(find_qemu_img(qemu)?);
        command.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", layer, "--"]).arg(&file);
        let done = command.stdin(Stdio::null()).output().with_context(|| format!("start {QEMU_IMG}"))?;
        let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        ensure!(done.status.success(), "{QEMU_IMG} ended with {}: {said}", done.status);
        Ok(std::fs::set_permissions(&file, Permissions::from_mode(mode | 0o600))?)
    }

    /// The clones run: they are theirs.
    pub fn keep(mut self) {
        self.made.clear();
    }
}

impl Drop for Overlays {
    fn drop(&mut self) {
        for file in &self.made {
            if let Err(error) = std::fs::remove_file(file) {
                eprintln!("pagoda: remove {}: {error}", file.display());
            }
        }
    }
}

/// The layer of each overlay. The overlays are for all disks of the snapshot, and for nothing else.
fn layers_of<'a>(disks: &'a [SnapshotDisk], overlays: &[Overlay]) -> Result<Vec<&'a str>> {
    let places: Vec<PathBuf> = overlays.iter().map(|overlay| place(&overlay.disk)).collect::<Result<_>>()?;
    for disk in disks {
        ensure!(
            places.contains(&place(&disk.file)?),
            "the snapshot has the disk {}, and its command line does not name it by -drive file=",
            disk.file
        );
    }
    let layer_of = |place_of: &PathBuf| {
        let disk = disks.iter().find(|disk| place(&disk.file).is_ok_and(|place| place == *place_of));
        let layer = disk.and_then(|disk| disk.layer.as_deref());
        layer.with_context(|| format!("the snapshot does not have what is on the disk {}", place_of.display()))
    };
    places.iter().map(layer_of).collect()
}

/// One path for each file in each directory. The disk itself need not be there.
fn place(file: &str) -> Result<PathBuf> {
    let path = std::path::absolute(file).with_context(|| format!("the path {file}"))?;
    let (dir, name) = path.parent().zip(path.file_name()).with_context(|| format!("{file} is no file"))?;
    let dir = dir.canonicalize().with_context(|| format!("look at {}", dir.display()))?;
    Ok(dir.join(name))
}

/// That of the QEMU if there is one beside it.
fn find_qemu_img(qemu: &Path) -> Result<PathBuf> {
    let beside = qemu.with_file_name(QEMU_IMG);
    if beside.is_file() {
        return Ok(beside);
    }
    program::find(QEMU_IMG).context("overlays need it (Debian: qemu-utils)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_and_overlays_are_the_same() {
        let disk = |file: &str, layer: Option<&str>| SnapshotDisk {
            node: "n".into(),
            file: file.into(),
            size_bytes: 1,
            layer: layer.map(str::to_owned),
            layer_bytes: None,
        };
        let overlay = |disk: &str| Overlay { disk: disk.into(), file: format!("{disk}.pagoda-clone-a") };
        let check = |disks: &[SnapshotDisk], overlays: &[&str], expected: Result<&[&str], &str>| {
            let overlays: Vec<Overlay> = overlays.iter().map(|disk| overlay(disk)).collect();
            match (layers_of(disks, &overlays), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
                (found, expected) => panic!("{found:?}, not {expected:?}"),
            }
        };
        let two = [disk("/tmp/a.qcow2", Some("la")), disk("/tmp/b.qcow2", Some("lb"))];
        check(&two, &["/tmp/../tmp/b.qcow2", "/tmp/a.qcow2"], Ok(&["lb", "la"]));
        check(&two, &["/tmp/a.qcow2"], Err("has the disk /tmp/b.qcow2"));
        check(&two[..1], &["/tmp/a.qcow2", "/tmp/c.qcow2"], Err("does not have what is on the disk /tmp/c.qcow2"));
        check(&[disk("/tmp/a", None)], &["/tmp/a"], Err("does not have what is on the disk /tmp/a"));
        check(&[], &[], Ok(&[]));
    }
}
