//! Operations on a whole VM, one at a time: a snapshot, a restore, a rollback.
//!
//! The record says that there is one, on the disk, before the VM can stand still for it, and until the VM runs again. So if this
//! daemon dies in the middle, the next one finds the VM by its record, ends what was begun and lets the guest run
//! ([`Registry::resume_operation`]). Meanwhile nothing else stops the VM, lets it run or changes its settings.
//!
//! What the guest sees: it stands until a daemon is there, and its agent has come back to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_abi::Token;
use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode, VmKind};
use pagoda_core::policy::VmId;
use pagoda_image::ImageId;
use pagoda_pager::handle::Handle;

use super::shim_gate::ShimGate;
use super::{Registry, Vm, internal, no_such_vm};
use crate::qmp::Monitor;
use crate::qmp::state::{RunState, run_state, undo};
use crate::record::{Operation, OperationKind, Record};

/// Between two tries to end an operation at first: QEMU may be busy, or the agent on its way.
const PAUSE: Duration = Duration::from_secs(1);
/// So many are made at that pace.
const TRIES: u32 = 12;
/// Between two tries from then on, as long as the VM lives.
const PAUSE_LATER: Duration = Duration::from_secs(30);

/// What becomes of the image of an operation that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageThen {
    /// It has begun: the VM holds pages for it until it is filled.
    Kept,
    /// No image has come of it.
    Gone,
}

/// That no operation is under way.
///
/// # Errors
/// One is; in words for the user.
pub(super) fn refuse_meanwhile(record: &Record) -> Result<(), ApiError> {
    let Some(operation) = &record.operation else { return Ok(()) };
    let kind = operation.kind.name();
    let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    let problem = format!("{article} {kind} of {} is under way", record.name);
    Err(ApiError::new(ErrorCode::WrongState, problem, Some("try again when it is over")))
}

/// A VM that an operation can begin on.
#[derive(Debug)]
pub struct Ready {
    pub id: VmId,
    pub record: Record,
    pub handle: Arc<Handle>,
    pub qmp: Arc<Monitor>,
}

impl Registry {
    /// The VM of this name, if an operation could begin on it now.
    ///
    /// # Errors
    /// No such VM; it is not in a state for it.
    pub fn ready_for(&self, name: &str, kind: OperationKind) -> Result<Ready, ApiError> {
        let vms = self.lock();
        let vm = vms.get(name).ok_or_else(|| no_such_vm(name))?;
        check_ready(vm, kind)?;
        let handle = vm.handle.clone().ok_or_else(gone)?;
        Ok(Ready { id: vm.governed.id, record: vm.record.clone(), handle, qmp: Arc::clone(&vm.qmp) })
    }

    /// As [`Self::ready_for`]; `None`: there is no such VM.
    ///
    /// # Errors
    /// It is not in a state for it.
    pub fn ready_if_there(&self, name: &str, kind: OperationKind) -> Result<Option<Ready>, ApiError> {
        match self.ready_for(name, kind) {
            Err(error) if error.code == ErrorCode::NoSuchVm => Ok(None),
            ready => ready.map(Some),
        }
    }

    /// Begins an operation on a VM: it is on the disk when this returns. Of a snapshot, so is that the VM has an image.
    ///
    /// # Errors
    /// The VM is not in a state for it; another operation or an image is under way; the disk's. Nothing is changed then.
    pub fn begin_operation(&self, id: VmId, operation: Operation) -> Result<(), ApiError> {
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| {
            check_ready(vm, operation.kind)?;
            let image = match operation.kind {
                OperationKind::Snapshot => Some(operation.image),
                _ => vm.record.image,
            };
            Ok(Record { operation: Some(operation), image, ..vm.record.clone() })
        };
        let commit = |_: &mut Vm, written: Result<()>| {
            written.map_err(|cause| internal("write the VM's record", in_full(cause.as_ref())))
        };
        self.change(id, plan, commit).unwrap_or_else(|| Err(gone()))
    }

    /// Begins to give a VM to another host that runs it already: whatever else is the matter with it, but for another operation.
    ///
    /// # Errors
    /// Another operation is under way; the disk's. Nothing is changed then.
    pub fn begin_handover(&self, id: VmId, operation: Operation) -> Result<(), ApiError> {
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| {
            refuse_meanwhile(&vm.record)?;
            Ok(Record { operation: Some(operation), ..vm.record.clone() })
        };
        let commit = |_: &mut Vm, written: Result<()>| {
            written.map_err(|cause| internal("write the VM's record", in_full(cause.as_ref())))
        };
        self.change(id, plan, commit).unwrap_or_else(|| Err(gone()))
    }

    /// The operation is over: the guest runs again if it is to run, and QEMU is as before. Counts at once, also if the disk does
    /// not take it: the next daemon then ends an operation that has ended.
    pub fn end_operation(self: &Arc<Self>, id: VmId, image: ImageThen) {
        let ended = |record: &Record| Record {
            operation: None,
            image: record.image.filter(|_| image == ImageThen::Kept),
            ..record.clone()
        };
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| Ok::<_, std::convert::Infallible>(ended(&vm.record));
        let commit = |vm: &mut Vm, written: Result<()>| {
            note_unwritten(vm, written, ended);
            vm.is_cut_off = false;
            self.catch_up_with_plan(vm);
            Ok(())
        };
        self.change(id, plan, commit);
        self.governor.doorbell.ring();
    }

    /// The VM is about to run before all of its memory has come: the next daemon has to know that. It is on the disk when this returns.
    ///
    /// # Errors
    /// It is not; or the VM has ended.
    pub fn note_source_tier(&self, id: VmId) -> Result<()> {
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| Ok(Record { has_source_tier: true, ..vm.record.clone() });
        let commit = |_: &mut Vm, written: Result<()>| written.context("write the VM's record");
        self.change(id, plan, commit).context("it has ended")?
    }

    /// The guest of a restored VM was let run: whatever the disk takes, no later daemon lets it run for the restore's sake.
    pub fn note_let_run(&self, id: VmId) {
        self.find_by_id(id, |vm| {
            if let Some(shared) = &vm.shared {
                shared.mark_let_run();
            }
        });
    }

    /// Whether somebody is taking the snapshot of this image, and still writes its manifest. An operation that was cut off is
    /// nobody's: it may last for as long as the VM.
    pub fn is_taking(&self, id: VmId, image: ImageId) -> bool {
        let is_its = |vm: &mut Vm| vm.record.operation.is_some_and(|operation| operation.image == image);
        self.find_by_id(id, |vm| !vm.is_cut_off && is_its(vm)).unwrap_or(false)
    }

    /// The VM holds no page any more for this image.
    pub fn forget_image(&self, id: VmId, image: ImageId) {
        let without = |record: &Record| Record { image: record.image.filter(|one| *one != image), ..record.clone() };
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| Ok::<_, std::convert::Infallible>(without(&vm.record));
        let commit = |vm: &mut Vm, written: Result<()>| {
            note_unwritten(vm, written, without);
            Ok(())
        };
        self.change(id, plan, commit);
    }

    /// An image has all pages, and its files say so by now: whichever VM held pages for it.
    pub fn image_is_filled(&self, image: ImageId) {
        let id = self.lock().values().find(|vm| vm.record.image == Some(image)).map(|vm| vm.governed.id);
        if let Some(id) = id {
            self.forget_image(id, image);
        }
    }

    /// The gate of an attached VM's shim.
    pub fn gate_of(&self, id: VmId) -> Option<ShimGate> {
        self.find_by_id(id, |vm| vm.handle.clone())?.map(ShimGate::new)
    }

    /// Nobody carries the VM's operation out any more, and what it began could not be undone: that is tried until it succeeds.
    pub fn abandon_operation(self: &Arc<Self>, id: VmId) {
        let token = self.find_by_id(id, |vm| {
            vm.is_cut_off = true;
            vm.record.token
        });
        let registry = Arc::clone(self);
        let resume = move || token.into_iter().for_each(|token| registry.resume_operation(token));
        if let Err(error) = thread::Builder::new().name("operation".into()).spawn(resume) {
            tracing::error!("end an operation that was cut off: {error}; it is ended by the next daemon");
        }
    }

    /// Ends an operation that was cut off, if there is one: by the end of an earlier daemon, or by [`Self::abandon_operation`].
    /// Tries again until QEMU and the agent have answered. Its image, if there is one, stays.
    ///
    /// The caller has a thread for it.
    pub fn resume_operation(self: &Arc<Self>, token: Token) {
        for tries in 1_u32.. {
            let Some(id) = self.id_by(token) else { return };
            let Some(left) = self.find_by_id(id, Left::of).flatten() else { return };
            let (name, kind) = (left.name.clone(), left.operation.kind.name());
            match left.end() {
                Ok(()) => {
                    tracing::info!(vm = %name, "a {kind} that was cut off has ended; the VM is as it was before");
                    if left.operation.kind == OperationKind::Restore {
                        self.note_let_run(id);
                    }
                    if left.operation.kind == OperationKind::Snapshot {
                        self.remove_unused_overlays(id, left.operation.image);
                    }
                    return self.end_operation(id, ImageThen::Kept);
                }
                Err(error) if tries == 1 || tries == TRIES => {
                    let error = in_full(error.as_ref());
                    tracing::warn!(vm = %name, "end a {kind} that was cut off, tried again: {error}");
                }
                Err(_) => {}
            }
            thread::sleep(if tries < TRIES { PAUSE } else { PAUSE_LATER });
        }
    }
}

/// Checks that an operation can begin on this VM.
fn check_ready(vm: &Vm, kind: OperationKind) -> Result<(), ApiError> {
    refuse_meanwhile(&vm.record)?;
    let name = &vm.record.name;
    let refuse = |problem: String, hint: &str| Err(ApiError::new(ErrorCode::WrongState, problem, Some(hint)));
    if vm.record.kind == VmKind::Plain {
        return refuse(format!("{name} is no QEMU"), "only QEMU can save the state of a VM's devices");
    }
    if vm.handle.is_none() {
        return refuse(format!("{name} is not attached"), "see `pagoda vm explain`");
    }
    if vm.stalled.is_some() {
        return refuse(format!("{name} is stalled"), "see `pagoda vm explain`");
    }
    if vm.arrivals.as_ref().is_some_and(|arrivals| !arrivals.is_whole()) {
        let problem = format!("a part of the memory of {name} is still at the host that it has come from");
        return refuse(problem, "wait until its move is over: see `pagoda moves`");
    }
    if vm.record.blocked || vm.governed.block.is_under_way() {
        let hint = "it runs again as soon as memory is found: see `pagoda vm explain`";
        return refuse(format!("{name} is blocked by the memory policy"), hint);
    }
    if !vm.keeps_ram {
        let hint = "try again in a moment; a VM that an older `pagoda run` started has to be started anew";
        return refuse(format!("QEMU has not said yet whether {name} keeps its RAM in migrations"), hint);
    }
    if kind != OperationKind::Restore && vm.record.image.is_some() {
        let hint = "wait until its last snapshot is filled: see `pagoda snapshot ls`";
        let problem = format!("{name} still holds memory for a snapshot");
        return Err(ApiError::new(ErrorCode::Refused, problem, Some(hint)));
    }
    Ok(())
}

/// What is left of an operation that was cut off.
struct Left {
    name: String,
    operation: Operation,
    monitor: Arc<Monitor>,
    gate: ShimGate,
    is_stalled: bool,
    /// Its guest has run since it was restored.
    was_let_run: bool,
}

impl Left {
    fn of(vm: &mut Vm) -> Option<Left> {
        // Whether a VM that moves may run here is said by its note (`moves/recovery.rs`).
        let is_move = vm.record.operation.is_some_and(|operation| operation.kind.is_move());
        if !vm.is_cut_off || is_move {
            return None;
        }
        Some(Left {
            name: vm.record.name.clone(),
            operation: vm.record.operation?,
            monitor: Arc::clone(&vm.qmp),
            gate: ShimGate::new(vm.handle.clone()?),
            is_stalled: vm.stalled.is_some(),
            was_let_run: vm.shared.as_ref().is_some_and(|shared| shared.was_let_run()),
        })
    }

    fn end(&self) -> Result<()> {
        let is_restore = self.operation.kind == OperationKind::Restore;
        if is_restore && run_state(&self.monitor)? == RunState::InMigrate {
            // Nobody gives it the rest of its state, and its guest has not run. QEMU may close the monitor before it answers.
            tracing::error!(vm = %self.name, "ended: its restore was cut off; restore it again");
            let _ = self.monitor.execute("quit");
            ensure!(run_state(&self.monitor).is_err(), "QEMU does not end");
            return Ok(());
        }
        let paused: &[RunState] = match (self.operation.resume, self.is_stalled) {
            // A stall is ended by `pagoda vm cont`.
            (false, _) | (true, true) => &[],
            // A VM that is paused in another way was paused by its user.
            (true, false) => match self.operation.kind {
                OperationKind::Snapshot => &[RunState::PostMigrate],
                // It was let run, and only the record does not say so: whoever has paused it since is its user.
                OperationKind::Restore if self.was_let_run => &[],
                // The daemon itself paused it, or had QEMU start so.
                OperationKind::Restore | OperationKind::Rollback => &[RunState::PostMigrate, RunState::Paused],
                OperationKind::Move | OperationKind::Arrival => &[],
            },
        };
        undo(&self.monitor, &self.gate, paused).context("undo what it began")
    }
}

/// A change that counts whether or not the disk takes it.
fn note_unwritten(vm: &mut Vm, written: Result<()>, change: impl Fn(&Record) -> Record) {
    if let Err(error) = written {
        let error = in_full(error.as_ref());
        tracing::warn!(vm = %vm.record.name, "write the VM's record: {error}");
        vm.record = change(&vm.record);
    }
}

fn gone() -> ApiError {
    ApiError::new(ErrorCode::NoSuchVm, "the VM has ended", Some("see `pagoda ls`"))
}
