//! What is told about images.

use std::path::Path;

use pagoda_api::types::{
    HostSnapshots, Snapshot, SnapshotDamage, SnapshotDisk, SnapshotImport, SnapshotLaunch, SnapshotList, SnapshotQemu,
    SnapshotStage, UnreadableImage,
};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_image::{Damage, DiskFile, Import, Listed, Listing, Manifest, Qemu, Stage};

/// Snapshots by VM, the oldest first, and what cannot be read.
pub fn list(listing: &Listing, boot_id: &str) -> SnapshotList {
    let mut list = SnapshotList::default();
    for listed in &listing.images {
        match &listed.manifest {
            Some(manifest) => list.snapshots.push(snapshot(listed, manifest, boot_id)),
            None => list.unreadable.push(UnreadableImage {
                id: listed.id.to_string(),
                own_bytes: listed.own.0,
                damage: listed.damage.as_ref().map_or_else(String::new, Damage::to_string),
            }),
        }
    }
    list.snapshots.sort_by(|a, b| (&a.vm, a.taken_unix_ms, &a.id).cmp(&(&b.vm, b.taken_unix_ms, &b.id)));
    list
}

/// All that is told of a snapshot, but for who reads it.
pub fn snapshot(listed: &Listed, manifest: &Manifest, boot_id: &str) -> Snapshot {
    let (stage, why) = stage_of(manifest, boot_id);
    Snapshot {
        id: listed.id.to_string(),
        vm: manifest.vm.clone(),
        name: manifest.name.clone(),
        taken_unix_ms: manifest.taken_unix_ms,
        stage,
        why,
        damage: listed.damage.as_ref().map(Damage::to_string),
        memory_bytes: memory(manifest).0,
        missing_bytes: None,
        own_bytes: listed.own.0,
        shared_bytes: PageCount(manifest.inherited_pages.unwrap_or(0)).bytes().0,
        parent: manifest.parent.map(|parent| parent.to_string()),
        state_bytes: manifest.state.bytes,
        pause_us: manifest.pause_us,
        running: manifest.running,
        qemu: qemu(&manifest.qemu),
        uid: manifest.launch.uid,
        gid: manifest.launch.gid,
        disks: manifest.disks.iter().map(disk).collect(),
        automatic: manifest.automatic,
        readers: Vec::new(),
        prefetch_bytes: None,
        template_bytes: 0,
        imported: manifest.imported.map(import),
    }
}

pub fn launch(manifest: Manifest) -> SnapshotLaunch {
    let Manifest { launch, regions, spec, qemu: of, .. } = manifest;
    SnapshotLaunch { launch, memory: regions, spec, qemu: qemu(&of), shim: None, program_version: None }
}

/// The stage, whatever its files say: what was not durable is lost with the host's life.
pub fn stage_of(manifest: &Manifest, boot_id: &str) -> (SnapshotStage, Option<String>) {
    let is_of_before = manifest.boot_id != boot_id;
    match manifest.stage {
        Stage::Lost => (SnapshotStage::Lost, manifest.why.clone()),
        Stage::Begun | Stage::Filled if is_of_before => {
            (SnapshotStage::Lost, Some("the host was restarted before it was durable".to_owned()))
        }
        Stage::Begun => (SnapshotStage::Begun, None),
        Stage::Filled => (SnapshotStage::Filled, None),
        Stage::Durable => (SnapshotStage::Durable, None),
    }
}

/// Each image once: one that is damaged, as that alone.
pub fn count(listing: &Listing, boot_id: &str, dir: &Path) -> HostSnapshots {
    let mut counted = HostSnapshots { dir: dir.to_owned(), own_bytes: listing.own().0, ..HostSnapshots::default() };
    for listed in &listing.images {
        let stage = listed.manifest.as_ref().filter(|_| listed.damage.is_none()).map(|of| stage_of(of, boot_id).0);
        let count = match stage {
            None | Some(SnapshotStage::Unknown) => &mut counted.damaged,
            Some(SnapshotStage::Begun) => &mut counted.begun,
            Some(SnapshotStage::Filled) => &mut counted.filled,
            Some(SnapshotStage::Durable) => &mut counted.durable,
            Some(SnapshotStage::Lost) => &mut counted.lost,
        };
        *count += 1;
    }
    counted
}

pub fn memory(manifest: &Manifest) -> Bytes {
    manifest.pages().bytes()
}

pub fn damage(damage: &Damage) -> SnapshotDamage {
    SnapshotDamage {
        file: damage.file.to_string(),
        page: damage.page.map(|page| page.0),
        offset_bytes: damage.offset.0,
        what: damage.what.clone(),
    }
}

pub fn qemu(qemu: &Qemu) -> SnapshotQemu {
    SnapshotQemu { version: qemu.version.clone(), machine: qemu.machine.clone() }
}

fn import(import: Import) -> SnapshotImport {
    match import {
        Import::Waiting => SnapshotImport::Waiting,
        Import::Accepted => SnapshotImport::Accepted,
    }
}

fn disk(disk: &DiskFile) -> SnapshotDisk {
    let DiskFile { node, file, size, layer, .. } = disk.clone();
    SnapshotDisk { node, file, size_bytes: size, layer, layer_bytes: None }
}
