//! How VMs end: their process ended, no program attached to them, or their user gave them up.
//!
//! A VM and its files are removed by whoever has its writing lock ([`super::change`]), and only on a fact: what a running VM
//! has on disk is its memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::MutexGuard;
use std::time::Duration;

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, Crash, ErrorCode};
use pagoda_core::policy::VmId;
use pagoda_pager::tier::source::ArrivalFiles;

use super::process::has_ended;
use super::{Registry, Vm, no_such_vm};
use crate::crashes::crash_of;
use crate::record::{OperationKind, Record};
use crate::remote::{self, Dirs};

/// How long a VM may be made without a `pagoda run` that fetches its monitor, which is its next step.
const ATTACH_WAIT: Duration = Duration::from_secs(60);

impl Registry {
    /// A VM's process has ended.
    pub fn exited(&self, id: VmId) {
        self.while_writing(id, || {
            let of = |vm: &mut Vm| (vm.record.clone(), vm.shared.as_ref().and_then(|shared| shared.ended_with()));
            let Some((record, status)) = self.find_by_id(id, of) else { return };
            tracing::info!(vm = %record.name, ?status, "its process ended");
            // Before its record goes: whichever daemon there is next knows of it by one of the two.
            // One that was given away, or has not come, is the other host's.
            if let Some(crash) = crash_of(&record, status).filter(|_| !self.is_of_another(&record)) {
                self.crashes.note(&record, crash);
            }
            // The files first: a new VM of this name has files of the same names.
            self.forget(&record);
            self.wait_until_settled(&record.name);
            let ended = self.remove(&mut self.lock(), id);
            drop(ended);
        });
    }

    /// A VM that a move has given to another host, or that has not run here by the time its move here is over.
    fn is_of_another(&self, record: &Record) -> bool {
        let arrives = record.operation.is_some_and(|operation| operation.kind == OperationKind::Arrival);
        self.was_given_away(record) || arrives && !self.moves.has_accepted(&record.name)
    }

    /// A VM that a move has given to another host. Others are not looked for: a note is read from the disk.
    pub(super) fn was_given_away(&self, record: &Record) -> bool {
        record.operation.is_some_and(|operation| operation.kind.is_move()) && self.moves.is_given(&record.name)
    }

    /// Forgets VMs that were made and whose process ended before it attached, or that no process ever came for. One that is
    /// started and takes its time is left alone. One whose record is being written is looked at again the next time.
    pub fn reap(&self) {
        let over: Vec<VmId> =
            self.lock().values().filter(|vm| why_over(vm).is_some()).map(|vm| vm.governed.id).collect();
        for id in over {
            self.unless_writing(id, || self.end_if_over(id));
        }
    }

    /// As [`Self::reap`], for the VM of this name alone, and waits for whoever writes its record or ends it.
    pub(super) fn reap_name(&self, name: &str) {
        let id = self.lock().get(name).filter(|vm| why_over(vm).is_some()).map(|vm| vm.governed.id);
        if let Some(id) = id {
            self.while_writing(id, || self.end_if_over(id));
        }
    }

    /// The same, and waits until its files are gone: a VM of that name is there or not.
    pub fn wait_if_over(&self, name: &str) {
        self.reap_name(name);
        self.making.wait_until_removed(name);
    }

    /// The caller has the VM's writing lock.
    fn end_if_over(&self, id: VmId) {
        let vms = self.lock();
        let vm = vms.values().find(|vm| vm.governed.id == id);
        // It may have been attached meanwhile.
        let Some((record, why)) = vm.and_then(|vm| Some((vm.record.clone(), why_over(vm)?))) else { return };
        tracing::info!(vm = %record.name, "{why}");
        let was_attached = record.pid.0 != 0;
        // The reaper sees to all VMs, and waits for the disks of none.
        let is_lost = was_attached && !self.is_of_another(&record);
        self.end(vms, id, &record, is_lost.then_some(Crash::Unseen));
    }

    /// Gives up a VM that no program attached to.
    ///
    /// # Errors
    /// No such VM; one that runs.
    pub fn delete(&self, name: &str) -> Result<(), ApiError> {
        let id = self.id_of(name)?;
        let end = || {
            let vms = self.lock();
            let vm = vms.get(name).filter(|vm| vm.governed.id == id).ok_or_else(|| no_such_vm(name))?;
            if vm.record.pid.0 != 0 {
                let hint = "stop its program instead; it is forgotten when that ends";
                return Err(ApiError::new(ErrorCode::WrongState, format!("{name} is attached"), Some(hint)));
            }
            if let Some(by) = vm.taken.map(|taken| taken.by).filter(|by| !by.has_ended(name)) {
                let hint = "it attaches within seconds or ends; then try again";
                let problem = format!("process {} has the memory of {name}", by.pid);
                return Err(ApiError::new(ErrorCode::WrongState, problem, Some(hint)));
            }
            let record = vm.record.clone();
            self.end(vms, id, &record, None);
            Ok(())
        };
        self.while_writing(id, end).ok_or_else(|| no_such_vm(name))??;
        self.wait_until_settled(name);
        Ok(())
    }

    /// Ends a VM that no engine serves, with its files. The disk decides how long it takes to remove a swap file, and a policy
    /// round needs the registry: so the files are removed without its lock, and the VM's name is taken until they are gone.
    /// The caller has the VM's writing lock.
    fn end(&self, mut vms: MutexGuard<'_, BTreeMap<String, Vm>>, id: VmId, record: &Record, crash: Option<Crash>) {
        let Some(vm) = self.remove(&mut vms, id) else { return };
        self.making.begin_removal(&record.name, id, &vm.writing);
        drop(vms);
        if let Some(image) = record.image {
            self.images.lose_unfilled(image, "its VM ended before it was filled");
        }
        if let Some(crash) = crash {
            self.crashes.note(record, crash);
        }
        self.forget(record);
        drop(vm);
        self.making.end(&record.name);
    }

    /// Takes a VM out, its files excepted. The caller has its writing lock, and drops the VM without the registry's: what it
    /// holds may be the last descriptor of gigabytes.
    fn remove(&self, vms: &mut BTreeMap<String, Vm>, id: VmId) -> Option<Vm> {
        let name = vms.values().find(|vm| vm.governed.id == id).map(|vm| vm.record.name.clone());
        let vm = vms.remove(&name?)?;
        vm.leave_group();
        self.governor.lock().rounds.remove(id);
        self.governor.doorbell.ring();
        Some(vm)
    }

    /// Who looks for a VM that has ended finds its disks in order, if they can be. If not, that is said, and tried again.
    fn wait_until_settled(&self, name: &str) {
        let _ = self.settle_ended(name);
    }

    /// Removes a VM's files, and has what it borrowed given back. The record of one with moved disks stays until these are settled.
    /// Its memory goes with the last descriptor. The caller has the VM's writing lock, or nobody else knows the VM.
    pub(super) fn forget(&self, record: &Record) {
        let name = &record.name;
        // The record last: if this daemon dies in the middle, the next one ends by it what was begun.
        let compressed = record.compressed.as_ref().map(|tier| tier.files(name));
        remove_files([
            self.swap_path(name),
            self.image_map_path(name),
            self.monitor_path(name),
            self.remote_path(name),
        ]);
        remove_files(compressed.into_iter().flatten());
        remove_files(ArrivalFiles::beside(&self.swap_path(name)).paths().map(Path::to_owned));
        self.moves.forget(name);
        self.forget_outbox(record.token);
        let dirs = Dirs::of(&self.config);
        if record.disks.is_empty() {
            // Its record is a pending release from now on.
            remote::end_of(&dirs, record, &self.records.path(name));
            if let Err(error) = self.records.remove(name) {
                tracing::warn!("remove {}: {error}", self.records.path(name).display());
            }
        } else {
            // There is no moment without a record that has the disks.
            if let Err(error) = remote::note_end(&dirs, record) {
                let error = in_full(error.as_ref());
                tracing::warn!(vm = %name, "the next daemon does not know what it has to give back: {error}");
            }
            self.leave_to_settle(record);
            // Also what is not noted: its process has ended, and this daemon knows the space.
            remote::give_back_noted(&dirs, record);
        }
    }
}

fn remove_files(paths: impl IntoIterator<Item = PathBuf>) {
    for path in paths {
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("remove {}: {error}", path.display());
        }
    }
}

/// Why a VM that no engine serves is over, if that is a fact.
fn why_over(vm: &Vm) -> Option<&'static str> {
    if vm.handle.is_some() {
        return None;
    }
    let (pid, start) = vm.record.pid;
    if pid != 0 {
        // One that waits for its agent.
        return has_ended(&vm.record.name, pid, start).then_some("its process ended");
    }
    // Who has the RAM counts, for a program may be a child of the process that `pagoda run` was.
    let is_over = match vm.taken.map(|taken| taken.by).or(vm.started_by) {
        Some(by) => by.has_ended(&vm.record.name),
        None => vm.created.elapsed() > ATTACH_WAIT,
    };
    is_over.then_some("no program attached to it")
}
