//! Makes a VM of a snapshot: `pagoda vm restore` and `pagoda vm rollback`.
//!
//! The order: everything that can be wrong is looked for -> a rollback ends the VM of that name -> the VM is made, and the image is
//! poured into its swap file -> the caller starts QEMU, which attaches -> the daemon gives QEMU the state ([`super::load()`]) -> the
//! guest goes on. The image stays what it is, so whatever fails after the VM has ended can be tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, CreateVm, CreatedVm, ErrorCode, RestoreRequest, VmKind, VmSpec};
use pagoda_image::Manifest;

use super::disks;
use crate::images::{Found, refused};
use crate::record::OperationKind;
use crate::registry::Registry;
use crate::registry::operation::Ready;

/// How long QEMU may take to end when it is told to.
const END_MAX: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// Makes a VM that begins with what a snapshot has.
///
/// # Errors
/// [`ErrorCode::Refused`] and others of a request that is wrong: nothing was changed.
pub fn restore(registry: &Arc<Registry>, request: &RestoreRequest) -> Result<CreatedVm, ApiError> {
    request.check().map_err(|message| ApiError::new(ErrorCode::BadRequest, message, None))?;
    let Found { listed, manifest } = registry.images.usable(&request.from)?;
    check_disks(&manifest, request)?;
    let damaged = |error: pagoda_image::ImageError| {
        refused(
            format!("{} cannot be restored: {}", request.from, in_full(&error)),
            Some("see `pagoda snapshot verify`"),
        )
    };
    let image = registry.images.store()?.image(listed.id).map_err(damaged)?;
    image.check_state().map_err(damaged)?;
    let mut vm = vm_of(&manifest, request);
    let ended = if request.replace { end(registry, &manifest, request)? } else { None };
    let Some(spec) = ended else { return registry.create_from(vm, Some(&image)) };
    vm.spec = VmSpec { dram: request.dram.or(spec.dram), ..spec };
    // Whatever is wrong from here on, something has changed: the VM has ended.
    check_disks(&manifest, request).and_then(|()| registry.create_from(vm, Some(&image))).map_err(|error| {
        let what = format!("{} has ended, and was not made of {}: {}", request.vm_name(), request.from, error.message);
        ApiError::new(ErrorCode::Internal, what, Some("put that right, and use `pagoda vm restore`"))
    })
}

/// A snapshot without the content of disks fits only the disks of its moment.
fn check_disks(manifest: &Manifest, request: &RestoreRequest) -> Result<(), ApiError> {
    match disks::changed(&manifest.disks, &manifest.launch.cwd).filter(|_| !request.force) {
        None => Ok(()),
        Some(why) => {
            let hint = "the memory of that moment does not fit these disks; --force restores it all the same";
            Err(refused(format!("{} cannot be restored: {why}", request.from), Some(hint)))
        }
    }
}

fn vm_of(manifest: &Manifest, request: &RestoreRequest) -> CreateVm {
    let Manifest { launch, regions, spec, .. } = manifest.clone();
    let spec = VmSpec { dram: request.dram.or(spec.dram), ..spec };
    CreateVm { name: request.vm_name().to_owned(), memory: regions, kind: VmKind::Qemu, spec, launch: Some(launch) }
}

/// Ends the VM of this name, if there is one. What its user has set. It is stopped before its disks are looked at for the last time.
fn end(registry: &Arc<Registry>, manifest: &Manifest, request: &RestoreRequest) -> Result<Option<VmSpec>, ApiError> {
    let name = request.vm_name();
    if !registry.lock().contains_key(name) {
        return Ok(None);
    }
    let Ready { record, qmp, .. } = registry.ready_for(name, OperationKind::Restore)?;
    if record.image.is_some() {
        let hint = "wait until it is filled: see `pagoda snapshot ls`";
        return Err(refused(format!("{name} still holds memory for a snapshot"), Some(hint)));
    }
    let was_running = qmp.is_running();
    let stopped =
        qmp.execute("stop").map_err(|error| refused(format!("stop {name}: {}", in_full(error.as_ref())), None));
    if let Err(error) = stopped.and_then(|_| check_disks(manifest, request)) {
        if was_running && let Err(left) = qmp.execute("cont") {
            tracing::error!(vm = %name, "let it run again after a rollback that was refused: {}", in_full(left.as_ref()));
        }
        return Err(error);
    }
    // QEMU may close the monitor before it answers.
    let _ = qmp.execute("quit");
    let deadline = Instant::now() + END_MAX;
    while registry.lock().get(name).is_some_and(|vm| vm.record.token == record.token) {
        if Instant::now() > deadline {
            let hint = "end it yourself, and use `pagoda vm restore` then";
            return Err(ApiError::new(
                ErrorCode::Internal,
                format!("the QEMU of {name} was told to end, and does not"),
                Some(hint),
            ));
        }
        std::thread::sleep(LOOK);
    }
    Ok(Some(record.spec))
}
