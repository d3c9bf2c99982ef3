//! Makes a VM of a snapshot: `pagoda vm restore` and `pagoda vm rollback`.
//!
//! The order: the image is held, so that nobody removes it -> everything that can be wrong is looked for, the image's map and
//! the room for the VM among it, and overlays for its disks are made -> a rollback ends the VM of that name -> the VM is made,
//! whose record names the image and the overlays -> the disks are put back ([`crate::disks`]) -> the caller starts QEMU, which
//! attaches and finds its pages in the image -> the daemon gives QEMU the state ([`super::load()`]) -> the guest goes on. The
//! image stays what it is, so whatever fails after the VM has ended can be tried again.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagoda_api::types::{ApiError, CreateVm, CreatedVm, ErrorCode, RestoreRequest, SnapshotName, VmKind, VmSpec};
use pagoda_api::{in_full, with_advice};
use pagoda_image::{ImageId, Manifest};

use super::disks;
use crate::disks::{Restored, check_restore, keep_aside, names_disk};
use crate::images::source::Source;
use crate::images::{as_refused, refused};
use crate::qmp::state::{self, RunState};
use crate::random;
use crate::record::{Operation, OperationKind, Record};
use crate::registry::Registry;
use crate::registry::operation::{ImageThen, Ready};

/// How long QEMU may take to end when it is told to, and its files to be removed.
const END_MAX: Duration = Duration::from_secs(50);
/// The pause between two looks whether QEMU has ended.
const LOOK: Duration = Duration::from_millis(10);

/// Makes a VM that begins with what a snapshot has.
///
/// # Errors
/// [`ErrorCode::Refused`] and others of a request that is wrong: nothing was changed.
pub fn restore(registry: &Arc<Registry>, request: &RestoreRequest) -> Result<CreatedVm, ApiError> {
    // That a VM has another state than is needed, or the name, is found out before anything is changed.
    make(registry, request).map_err(as_refused)
}

fn make(registry: &Arc<Registry>, request: &RestoreRequest) -> Result<CreatedVm, ApiError> {
    request.check().map_err(|message| ApiError::new(ErrorCode::BadRequest, message, None))?;
    if request.as_name.as_ref().is_some_and(|name| *name != request.from.vm) {
        // A VM by another name is a new one.
        registry.draining.check(request.vm_name())?;
    }
    let source = source_of(registry, &request.from, request.vm_name())?;
    let manifest = source.manifest().clone();
    let vm = vm_of(&manifest, request);
    let running = match request.replace {
        true => registry.ready_if_there(request.vm_name(), OperationKind::Rollback)?,
        false => None,
    };
    let layered = Layered { registry, manifest: &manifest, request };
    match running {
        Some(running) => {
            let but = Some(running.id);
            registry.check_disks_free(request.vm_name(), Some(&manifest.launch), but)?;
            check_disks(&manifest, request)?;
            check_unmoved(&manifest, &running.record, request)?;
            layered.check(Some(&running.record))?;
            roll_back(registry, &running, source, vm, &layered)
        }
        None => {
            let _alone = layered.alone();
            registry.wait_if_over(request.vm_name());
            registry.check_disks_free(request.vm_name(), Some(&manifest.launch), None)?;
            check_disks(&manifest, request)?;
            layered.check_free()?;
            layered.check(None)?;
            let disks = layered.make()?;
            layered.keep_aside()?;
            registry.create_from(vm, Some((source, Some(disks))))
        }
    }
}

/// The disks whose content the snapshot has.
struct Layered<'a> {
    registry: &'a Registry,
    manifest: &'a Manifest,
    request: &'a RestoreRequest,
}

impl Layered<'_> {
    fn refused(&self, error: &anyhow::Error) -> ApiError {
        refused(format!("{} cannot be restored: {}", self.request.from, in_full(error.as_ref())), None)
    }

    /// Two at a time would give a disk to both. Who has none waits for nobody.
    fn alone(&self) -> Option<MutexGuard<'_, ()>> {
        let has_layers = self.manifest.disks.iter().any(|disk| disk.layer.is_some());
        has_layers.then(|| self.registry.restoring.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Checks that nothing is lost when the disks are put back.
    fn check(&self, rolled_back: Option<&Record>) -> Result<(), ApiError> {
        let layers = self.registry.images.layers()?;
        check_restore(self.manifest, &layers, self.request.force, rolled_back).map_err(|error| self.refused(&error))
    }

    /// That no VM has been made whose command line names one of the disks: it may not have opened them yet.
    fn check_free(&self) -> Result<(), ApiError> {
        let others: Vec<Record> = self.registry.lock().values().map(|vm| vm.record.clone()).collect();
        match others.iter().find(|record| names_disk(self.manifest, record)) {
            None => Ok(()),
            Some(other) => Err(refused(
                format!(
                    "{} cannot be restored: {} has one of its disks, and has not ended",
                    self.request.from, other.name
                ),
                Some("end that VM first"),
            )),
        }
    }

    fn make(&self) -> Result<Restored, ApiError> {
        let made = random::bytes().map_err(anyhow::Error::from);
        let made = made.and_then(|id| Restored::make(self.manifest, ImageId(u128::from_le_bytes(id))));
        made.map_err(|error| self.refused(&error))
    }

    /// With `--force`, gives what the disks have now a second name.
    fn keep_aside(&self) -> Result<(), ApiError> {
        if !self.request.force {
            return Ok(());
        }
        keep_aside(&self.manifest.launch, self.manifest).map_err(|error| self.refused(&error))
    }
}

/// The snapshot's image, which nobody removes from now on, with all that can be wrong with it looked for.
pub(super) fn source_of(registry: &Registry, from: &SnapshotName, vm: &str) -> Result<Source, ApiError> {
    let (image, reading) = registry.images.hold(from, vm)?;
    let unusable = |why: String| {
        let what = format!("{from} cannot be restored: {}", with_advice(why));
        refused(what, Some("see `pagoda snapshot verify`"))
    };
    let unique: [u8; 16] = random::bytes().map_err(|error| unusable(format!("make a name: {error}")))?;
    let unique = format!("{:032x}", u128::from_le_bytes(unique));
    let prefetches = registry.images.prefetches().then_some(vm);
    Source::new(Arc::new(image), reading, &registry.image_map_path(vm), &unique, prefetches).map_err(unusable)
}

/// Why the disks that there are keep a snapshot from being restored without force, if they do.
pub fn changed_disks(registry: &Registry, manifest: &Manifest) -> Option<String> {
    let of_layers = || match registry.images.layers() {
        Ok(layers) => check_restore(manifest, &layers, false, None).err().map(|error| in_full(error.as_ref())),
        Err(error) => Some(error.message),
    };
    disks::changed(manifest).or_else(of_layers)
}

/// A snapshot without the content of disks fits only the disks of its moment.
fn check_disks(manifest: &Manifest, request: &RestoreRequest) -> Result<(), ApiError> {
    match disks::changed(manifest).filter(|_| !request.force) {
        None => Ok(()),
        Some(why) => {
            let hint = "the memory of that moment does not fit these disks; --force restores it all the same";
            Err(refused(format!("{} cannot be restored: {why}", request.from), Some(hint)))
        }
    }
}

/// The file that a disk's name stands for is as it was, and QEMU may write to an overlay of it since.
fn check_unmoved(manifest: &Manifest, running: &Record, request: &RestoreRequest) -> Result<(), ApiError> {
    let has_moved = |file: &str| running.disks.iter().any(|moved| moved.file == file);
    match manifest.disks.iter().find(|disk| disk.layer.is_none() && has_moved(&disk.file)) {
        Some(disk) if !request.force => {
            let what = format!("{} cannot be restored: the disk {} has gone on since", request.from, disk.file);
            Err(refused(what, Some("the memory of that moment does not fit it; --force restores it all the same")))
        }
        _ => Ok(()),
    }
}

fn vm_of(manifest: &Manifest, request: &RestoreRequest) -> CreateVm {
    let Manifest { launch, regions, spec, .. } = manifest.clone();
    let spec = VmSpec { dram: request.dram.or(spec.dram), ..spec };
    CreateVm {
        name: request.vm_name().to_owned(),
        memory: regions,
        kind: VmKind::Qemu,
        spec,
        launch: Some(launch),
        outbox: None,
    }
}

/// What its user has set for the VM that runs. What was found out of its memory ends with that, and the guest of the snapshot may have
/// a balloon that somebody has to empty.
fn rolled_back_spec(running: &Record, manifest: &Manifest, dram: Option<u64>) -> VmSpec {
    let spec = running.spec.clone();
    let emptied = manifest.spec.balloon_target.map(|_| manifest.regions.iter().sum());
    VmSpec {
        dram: dram.or(spec.dram),
        balloon_target: spec.balloon_target.or(emptied),
        pinned: manifest.spec.pinned.clone(),
        ..spec
    }
}

/// Ends the VM that runs, and makes one of the source with what its user has set.
fn roll_back(
    registry: &Arc<Registry>,
    running: &Ready,
    source: Source,
    vm: CreateVm,
    layered: &Layered<'_>,
) -> Result<CreatedVm, ApiError> {
    let (manifest, image, request) = (layered.manifest, source.id(), layered.request);
    let spec = rolled_back_spec(&running.record, manifest, request.dram);
    let new = registry.prepare(CreateVm { spec, ..vm }, Some(source))?.with_disks(layered.make()?);
    new.check_instead(running.id)?;
    // If QEMU does not say it, a guest that runs would be taken for one that its user has paused.
    let asked = |error: anyhow::Error| refused(format!("ask QEMU: {}", in_full(error.as_ref())), None);
    let resume = state::run_state(&running.qmp).map_err(asked)? == RunState::Running;
    // On the disk before the VM stands still: a daemon that dies from here on is followed by one that lets it run.
    registry.begin_operation(running.id, Operation { kind: OperationKind::Rollback, image, resume })?;
    // Its disks are looked at for the last time when it writes to them no more.
    let stopped = running.qmp.execute("stop");
    let stopped =
        stopped.map_err(|error| refused(format!("stop {}: {}", request.vm_name(), in_full(error.as_ref())), None));
    if let Err(error) = stopped.and_then(|_| check_disks(manifest, request)) {
        let_run_again(registry, running, resume);
        return Err(error);
    }
    // Until the new VM is known, its disks are nobody's.
    let _alone = layered.alone();
    end(registry, running)?;
    // Whatever is wrong from here on, something has changed: the VM has ended.
    check_disks(manifest, request).and_then(|()| new.make()).map_err(|error| {
        let what = format!("{} has ended, and was not made of {}: {}", request.vm_name(), request.from, error.message);
        ApiError::new(ErrorCode::Internal, what, Some("put that right, and use `pagoda vm restore`"))
    })
}

/// A rollback that was refused when the VM stood still.
fn let_run_again(registry: &Arc<Registry>, running: &Ready, resume: bool) {
    if resume && let Err(error) = running.qmp.execute("cont") {
        let error = in_full(error.as_ref());
        tracing::error!(vm = %running.record.name, "let it run again after a rollback that was refused, tried again: {error}");
        return registry.abandon_operation(running.id);
    }
    registry.end_operation(running.id, ImageThen::Kept);
}

/// Has QEMU end, and waits until the VM is gone with all its files.
fn end(registry: &Arc<Registry>, running: &Ready) -> Result<(), ApiError> {
    let name = &running.record.name;
    // QEMU may close the monitor before it answers.
    let _ = running.qmp.execute("quit");
    let deadline = Instant::now() + END_MAX;
    while registry.lock().get(name).is_some_and(|vm| vm.record.token == running.record.token) {
        if Instant::now() > deadline {
            // It is not spoken to any more: a QEMU that gets a command while it ends may hang. What it was told it does when it can.
            let hint = "wait until it has ended, or end it yourself; then use `pagoda vm restore`";
            let what = format!("the QEMU of {name} was told to end, and has not after {} s", END_MAX.as_secs());
            return Err(ApiError::new(ErrorCode::Internal, what, Some(hint)));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pagoda_abi::Token;

    use super::*;
    use crate::images::tests::manifest;

    #[test]
    fn what_is_found_out_of_a_vm_ends_with_it() {
        let of = |running: VmSpec, then: VmSpec, dram: Option<u64>| {
            let manifest = Manifest { spec: then, ..manifest(1, "web1", "one") };
            let running = Record::new("web1", Token([7; 16]), VmKind::Qemu, &manifest.regions, running);
            rolled_back_spec(&running, &manifest, dram)
        };
        let with = |dram: u64, target: Option<u64>| VmSpec {
            dram: Some(dram),
            balloon_target: target,
            share_group: Some("g".into()),
            ..VmSpec::default()
        };
        let memory: u64 = manifest(1, "web1", "one").regions.iter().sum();
        assert_eq!(of(with(5, None), VmSpec::default(), None), with(5, None), "its user's");
        assert_eq!(of(with(5, None), with(9, None), Some(6)), with(6, None));
        assert_eq!(of(with(5, Some(3)), with(9, Some(1)), None), with(5, Some(3)));
        assert_eq!(of(with(5, None), with(9, Some(1)), None), with(5, Some(memory)), "somebody empties the balloon");
        let pinned = VmSpec { pinned: Some("process 1 maps its memory".into()), ..with(5, None) };
        assert_eq!(of(pinned, VmSpec::default(), None), with(5, None), "nobody maps the memory of the new VM");
    }
}
