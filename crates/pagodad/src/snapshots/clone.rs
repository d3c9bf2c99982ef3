//! Makes several VMs of one snapshot: `pagoda vm clone`.
//!
//! A clone is a VM of its own that begins with what the snapshot has, as one of [`super::restore()`] does. It differs in its name
//! and in the words of its QEMU, which the caller has changed so that both can run ([`CloneRequest`]). All are made or none. Until
//! the reply nobody has a token, so no program can have attached to one that is given up. If this daemon dies in the middle,
//! the next one finds VMs that no process ever came for, and removes them.

use std::sync::Arc;

use pagoda_abi::Token;
use pagoda_api::types::{
    ApiError, CloneRequest, CreateVm, CreatedClones, CreatedVm, ErrorCode, NewClone, SnapshotLaunch, SnapshotQemu,
    VmKind, VmSpec,
};
use pagoda_image::{Image, Manifest};

use super::restore::source_of;
use crate::disks::names_disk;
use crate::images::{as_refused, refused};
use crate::record::Record;
use crate::registry::Registry;

/// VMs that were made. Dropped before all are, they are removed.
struct Made<'a> {
    registry: &'a Registry,
    vms: Vec<CreatedVm>,
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        for vm in &self.vms {
            if let Err(error) = self.registry.delete(&vm.name) {
                tracing::error!(vm = %vm.name, "remove a clone that is not wanted: {}", error.message);
            }
        }
    }
}

/// Makes VMs that begin with what a snapshot has, all or none.
///
/// # Errors
/// Which one cannot be made, and why: nothing was changed.
pub fn clone_vms(registry: &Arc<Registry>, request: &CloneRequest) -> Result<CreatedClones, ApiError> {
    request.check().map_err(|message| ApiError::new(ErrorCode::BadRequest, message, None))?;
    let mut made = Made { registry, vms: Vec::with_capacity(request.clones.len()) };
    let mut image = None;
    for clone in &request.clones {
        let (vm, of) = one(registry, request, clone).map_err(|error| none_made(request, clone, error))?;
        made.vms.push(vm);
        image = Some(of);
    }
    // Nobody has their tokens yet, so nothing can have attached to them.
    if let Some(image) = image {
        let names: Vec<&str> = made.vms.iter().map(|vm| vm.name.as_str()).collect();
        registry.lend(&names, &image);
    }
    Ok(CreatedClones { vms: std::mem::take(&mut made.vms) })
}

fn one(registry: &Registry, request: &CloneRequest, clone: &NewClone) -> Result<(CreatedVm, Arc<Image>), ApiError> {
    registry.draining.check(&clone.name)?;
    let source = source_of(registry, &request.from, &clone.name)?;
    let vm = vm_of(source.manifest(), request, clone);
    check_disks(source.manifest(), &vm)?;
    let image = Arc::clone(source.image());
    let made = registry.create_from(vm, Some((source, None)))?;
    Ok((made, image))
}

fn vm_of(manifest: &Manifest, request: &CloneRequest, clone: &NewClone) -> CreateVm {
    let Manifest { mut launch, regions, spec, .. } = manifest.clone();
    launch.words.clone_from(&clone.words);
    // Its snapshots by a timetable would be its source's.
    let spec = VmSpec { dram: request.dram.or(spec.dram), autosnapshot: None, ..spec };
    CreateVm { name: clone.name.clone(), memory: regions, kind: VmKind::Qemu, spec, launch: Some(launch), outbox: None }
}

/// No two VMs write to one disk, and none to a layer.
fn check_disks(manifest: &Manifest, vm: &CreateVm) -> Result<(), ApiError> {
    if let Some(disk) = manifest.disks.iter().find(|disk| disk.layer.is_none()) {
        let hint = "clone a snapshot that was taken with --disks, or a VM whose disks are read-only";
        return Err(refused(format!("the snapshot does not have what is on the disk {}", disk.file), Some(hint)));
    }
    let record = Record::new(&vm.name, Token([0; 16]), vm.kind, &vm.memory, vm.spec.clone());
    if names_disk(manifest, &Record { launch: vm.launch.clone(), ..record }) {
        return Err(refused("its command line names a disk of the VM that it is a clone of", None));
    }
    Ok(())
}

/// The refusal of all because of one.
fn none_made(request: &CloneRequest, clone: &NewClone, error: ApiError) -> ApiError {
    let error = as_refused(error);
    let none = match request.clones.len() {
        1 => "no clone was made".to_owned(),
        count => format!("none of {count} clones was made"),
    };
    ApiError { message: format!("{none}: {}: {}", clone.name, error.message), ..error }
}

/// What starts the QEMU of a VM again.
///
/// # Errors
/// No such VM; it is not known how it was started.
pub fn launch(registry: &Registry, name: &str) -> Result<SnapshotLaunch, ApiError> {
    registry.get(name)?;
    let record = registry.lock().get(name).map(|vm| vm.record.clone());
    let launch = record.and_then(|record| Some((record.launch.clone()?, record)));
    let unknown =
        || refused(format!("it is not known how {name} was started"), Some("start it again with `pagoda run`"));
    let (launch, Record { regions, spec, .. }) = launch.ok_or_else(unknown)?;
    let shim = Some(registry.config.shim.clone());
    Ok(SnapshotLaunch { launch, memory: regions, spec, qemu: SnapshotQemu::default(), shim, program_version: None })
}

#[cfg(test)]
mod tests {
    use pagoda_api::types::SnapshotName;

    use super::*;

    #[test]
    fn one_that_fails_is_named_for_all() {
        let clone = |name: &str| NewClone { name: name.to_owned(), words: Vec::new() };
        let of = |names: &[&str]| CloneRequest {
            from: SnapshotName::new("web1", "one"),
            clones: names.iter().copied().map(clone).collect(),
            dram: None,
        };
        let check = |names: &[&str], code: ErrorCode, expected: (ErrorCode, &str)| {
            let error = none_made(&of(names), &clone("job-2"), ApiError::new(code, "why", Some("hint")));
            assert_eq!(
                (error.code, error.message.as_str(), error.hint.as_deref()),
                (expected.0, expected.1, Some("hint"))
            );
        };
        let two = "none of 2 clones was made: job-2: why";
        check(&["job-1", "job-2"], ErrorCode::NameTaken, (ErrorCode::Refused, two));
        check(&["job-1", "job-2"], ErrorCode::NoRoom, (ErrorCode::NoRoom, two));
        check(&["job-2"], ErrorCode::Internal, (ErrorCode::Internal, "no clone was made: job-2: why"));
    }
}
