//! The layers of disks of a snapshot that was removed. All of them stay: other files may be on top of one, and nobody can tell for
//! certain that none is (docs/decisions/2026-11-29-layers-of-removed-snapshots.md).

use std::path::Path;

use pagoda_api::types::{RemovedLayer, RemovedSnapshot};
use pagoda_image::Manifest;

use crate::disks::NotedLayer;

/// What its user can do. A running VM's disk does not show its layers by its own name.
const KEPT: &str = "Pagoda removes no layers; when no VM with the disk runs, and `qemu-img info --backing-chain` of no file shows it, you can";

/// What is left of a snapshot that is gone. The log names the layers too: nothing else does from now on.
pub fn kept(manifest: &Manifest) -> RemovedSnapshot {
    let kept = |layer: &NotedLayer| RemovedLayer { file: path(layer), kept: KEPT.to_owned() };
    // What an imported one says of files is another host's word.
    let layers = if manifest.imported.is_some() { Vec::new() } else { NotedLayer::of(manifest) };
    let layers: Vec<RemovedLayer> = layers.iter().map(kept).collect();
    for layer in &layers {
        tracing::info!(vm = %manifest.vm, snapshot = %manifest.name, layer = %layer.file, "the snapshot is removed, its layer stays");
    }
    RemovedSnapshot { layers }
}

fn path(layer: &NotedLayer) -> String {
    Path::new(&layer.disk.file).with_file_name(&layer.name).display().to_string()
}
