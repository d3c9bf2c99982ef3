//! The layers of disks of a snapshot that was removed: who may need them, and what becomes of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use pagoda_api::types::{RemovedLayer, RemovedSnapshot};
use pagoda_image::Manifest;

use crate::disks::{Claim, NotedLayer, User, named_files, release, why_kept};
use crate::record::Record;
use crate::registry::Registry;

/// How long a removal waits for the file systems of disks. What takes longer goes on, and is not waited for.
const RELEASE_MAX: Duration = Duration::from_secs(60);

/// Removes the layers of a snapshot that is gone, those that are known to be needed by nobody. What an imported one says of files is
/// another host's word.
pub fn release_all(registry: &Arc<Registry>, manifest: &Manifest) -> RemovedSnapshot {
    let layers = NotedLayer::of(manifest);
    if layers.is_empty() || manifest.imported.is_some() {
        return RemovedSnapshot::default();
    }
    let paths: Vec<String> = layers.iter().map(path).collect();
    let (done, outcome) = channel();
    let (registry, program) = (Arc::clone(registry), manifest.launch.program.clone());
    let in_thread = move || {
        let released = layers.iter().map(|layer| release_one(&registry, layer, &program)).collect();
        // Nobody may be there any more.
        let _ = done.send(RemovedSnapshot { layers: released });
    };
    let started = std::thread::Builder::new().name("layers".into()).spawn(in_thread);
    let outcome = started.map_err(|error| format!("start a thread: {error}")).and_then(|_| {
        let too_long = |_| format!("its file system has not answered for {} s", RELEASE_MAX.as_secs());
        outcome.recv_timeout(RELEASE_MAX).map_err(too_long)
    });
    outcome.unwrap_or_else(|why| {
        let kept = |file| RemovedLayer { file, freed_bytes: None, kept: Some(why.clone()) };
        RemovedSnapshot { layers: paths.into_iter().map(kept).collect() }
    })
}

fn path(layer: &NotedLayer) -> String {
    Path::new(&layer.disk.file).with_file_name(&layer.name).display().to_string()
}

fn release_one(registry: &Registry, layer: &NotedLayer, program: &str) -> RemovedLayer {
    let claims = claims(registry, layer);
    let released = claims.and_then(|claims| release(layer, program, &claims).map_err(|error| why_kept(&error)));
    let file = path(layer);
    match released {
        Ok(freed) => {
            tracing::info!("the layer {file} is removed: nobody needs it");
            RemovedLayer { file, freed_bytes: Some(freed.unwrap_or(0)), kept: None }
        }
        Err(why) => {
            tracing::info!("the layer {file} is kept: {why}");
            RemovedLayer { file, freed_bytes: None, kept: Some(why) }
        }
    }
}

/// The files of all VMs and of all snapshots that there are.
///
/// # Errors
/// Why they are not known.
fn claims(registry: &Registry, layer: &NotedLayer) -> Result<Vec<Claim>, String> {
    // A VM that is made or ends is in one of both, or in the third.
    let making = registry.is_making_any();
    let mut records = registry.records_of_ended();
    records.extend(registry.lock().values().map(|vm| vm.record.clone()));
    if making || registry.is_making_any() {
        return Err("a VM is being made or removed at the moment, and may need it".to_owned());
    }
    if let Some(record) = registry.images.readers().unknown().first() {
        return Err(format!("the record {record} cannot be read, and its VM may need it"));
    }
    let mut claims: Vec<Claim> = records.iter().filter_map(of_vm).collect();
    let (manifests, unreadable) = registry.images.manifests().map_err(|error| error.message)?;
    if let Some(id) = unreadable.first() {
        return Err(format!("the image {id} cannot be read, and may need it"));
    }
    claims.extend(manifests.iter().map(of_snapshot));
    claims.push(Claim { who: "the disk".to_owned(), user: layer.user, files: vec![layer.disk.file.clone().into()] });
    Ok(claims)
}

fn of_vm(record: &Record) -> Option<Claim> {
    let launch = record.launch.as_ref()?;
    let user = User::of(launch);
    let of_moved = record.disks.iter().flat_map(|disk| {
        let file = PathBuf::from(&disk.file);
        let tops = disk.tops.iter().map(|top| file.with_file_name(&top.name)).collect::<Vec<_>>();
        std::iter::once(file).chain(tops)
    });
    let files = of_moved.chain(named_files(launch)).collect();
    Some(Claim { who: format!("the VM {}", record.name), user, files })
}

fn of_snapshot(manifest: &Manifest) -> Claim {
    let of_disk = |disk: &pagoda_image::DiskFile| {
        let file = Path::new(&manifest.launch.cwd).join(&disk.file);
        let layer = disk.layer.as_ref().map(|layer| file.with_file_name(layer));
        [Some(file), layer].into_iter().flatten()
    };
    let who = format!("the snapshot {}/{}", manifest.vm, manifest.name);
    Claim { who, user: User::of(&manifest.launch), files: manifest.disks.iter().flat_map(of_disk).collect() }
}
