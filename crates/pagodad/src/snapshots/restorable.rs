//! What a VM that is not there any more can be restored from, and which VMs have crashed.

use pagoda_api::types::{ApiError, Candidate, CrashedVm, ErrorCode, Restorable, Snapshot};

use super::restore::changed_disks;
use crate::registry::Registry;

/// The snapshots of a VM from the newest on, up to the first that can be restored without force.
///
/// # Errors
/// The directory of images cannot be used; the VM has no snapshot.
pub fn restorable(registry: &Registry, vm: &str) -> Result<Restorable, ApiError> {
    // What a VM of this name wrote last has the disk's name by then, or a reason why not is in its log.
    let _ = registry.settle_ended(vm);
    let all = registry.images.list()?.snapshots;
    let of_vm: Vec<&Snapshot> = all.iter().filter(|snapshot| snapshot.vm == vm).collect();
    if of_vm.is_empty() {
        let what = format!("there is no snapshot of a VM named {vm}");
        return Err(ApiError::new(ErrorCode::NoSuchSnapshot, what, Some("see `pagoda snapshot ls`")));
    }
    Ok(Restorable { candidates: candidates(registry, of_vm) })
}

/// The oldest comes first in `snapshots`.
fn candidates(registry: &Registry, snapshots: Vec<&Snapshot>) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    for snapshot in snapshots.into_iter().rev() {
        let (refused, changed) = match registry.images.usable(&snapshot.full_name()) {
            Err(error) => (Some(error.message), None),
            Ok(found) => (None, changed_disks(registry, &found.manifest)),
        };
        let is_last = refused.is_none() && changed.is_none();
        let Snapshot { name, taken_unix_ms, .. } = snapshot.clone();
        candidates.push(Candidate { name, taken_unix_ms, refused, changed });
        if is_last {
            break;
        }
    }
    candidates
}

/// VMs that have crashed, were not started again and have a snapshot. Where images cannot be listed, all that have crashed.
pub fn crashed(registry: &Registry) -> Vec<CrashedVm> {
    let mut notes = registry.crashes.list();
    notes.retain(|note| !registry.lock().contains_key(&note.name));
    if notes.is_empty() {
        return notes;
    }
    let Ok(list) = registry.images.list() else { return notes };
    let with_newest = |note: CrashedVm| {
        let of_vm: Vec<&Snapshot> = list.snapshots.iter().filter(|snapshot| snapshot.vm == note.name).collect();
        if of_vm.is_empty() {
            return None;
        }
        let candidates = candidates(registry, of_vm);
        Some(CrashedVm { snapshot: Restorable { candidates }.newest(false).0.cloned(), ..note })
    };
    notes.into_iter().filter_map(with_newest).collect()
}

/// The VM of this name that has crashed.
///
/// # Errors
/// There is none.
pub fn crashed_one(registry: &Registry, name: &str) -> Result<CrashedVm, ApiError> {
    crashed(registry).into_iter().find(|note| note.name == name).ok_or_else(|| no_note(name))
}

/// Removes the note that a VM has crashed.
///
/// # Errors
/// There is none; the disk's.
pub fn forget_crashed(registry: &Registry, name: &str) -> Result<(), ApiError> {
    match registry.crashes.remove(name) {
        Ok(true) => Ok(()),
        Ok(false) => Err(no_note(name)),
        Err(error) => {
            Err(ApiError::new(ErrorCode::Internal, format!("remove the note that {name} has crashed: {error}"), None))
        }
    }
}

fn no_note(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NoSuchVm, format!("there is no VM named {name} that has crashed"), Some("see `pagoda ls`"))
}
