//! The layers of disks of a snapshot that was removed. All of them stay: other files may be on top of one, and nobody can tell for
//! certain that none is (docs/decisions/2026-11-29-layers-of-removed-snapshots.md).

use std::path::Path;

use pagoda_api::types::{RemovedLayer, RemovedSnapshot};
use pagoda_image::Manifest;

use crate::disks::NotedLayer;

/// What its user can do.
const KEPT: &str = "Pagoda removes no layers; if `qemu-img info --backing-chain` of no file shows it, and no snapshot and no VM has it, you can";

/// What is left of a snapshot that is gone.
pub fn kept(manifest: &Manifest) -> RemovedSnapshot {
    let kept = |layer: &NotedLayer| RemovedLayer { file: path(layer), freed_bytes: None, kept: Some(KEPT.to_owned()) };
    // What an imported one says of files is another host's word.
    let layers = if manifest.imported.is_some() { Vec::new() } else { NotedLayer::of(manifest) };
    RemovedSnapshot { layers: layers.iter().map(kept).collect() }
}

fn path(layer: &NotedLayer) -> String {
    Path::new(&layer.disk.file).with_file_name(&layer.name).display().to_string()
}
