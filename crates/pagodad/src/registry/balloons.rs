//! Balloon targets of VMs: who has one, and what is kept of it.

use pagoda_api::in_full;
use pagoda_api::types::VmSpec;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use pagoda_abi::Token;
use pagoda_core::policy::VmId;
use pagoda_core::units::Bytes;
use pagoda_pager::handle::Command;

use super::{Registry, Vm};
use crate::balloon::{Parts, spawn};
use crate::record::Record;

impl Vm {
    /// What the guest should keep: what its user says, and no more than the memory policy leaves it. `None`: nobody has said
    /// anything yet.
    fn keeps(&self) -> Option<Bytes> {
        let memory = Bytes(self.record.memory());
        let user = self.record.spec.balloon_target.map(Bytes).filter(|target| *target < memory);
        match (user, self.governed.round.keeps()) {
            (Some(user), policy) => Some(policy.map_or(user, |policy| policy.min(user))),
            (None, policy) => policy,
        }
    }
}

impl Registry {
    /// Goes on with the balloon of a VM that has just attached, if it has a target.
    pub fn resume_balloon(self: &Arc<Self>, name: &str) {
        if let Some(vm) = self.lock().get_mut(name)
            && let Err(error) = self.start_balloon(vm)
        {
            tracing::error!(vm = %name, "drive its balloon: {error}", error = in_full(error.as_ref()));
        }
    }

    /// Has a VM's balloon follow its user's target, once it is attached.
    pub(super) fn drive_balloon(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        let memory = Bytes(vm.record.memory());
        match &vm.balloon {
            Some(handle) => handle.set_target(vm.keeps().unwrap_or(memory)),
            None => self.start_balloon(vm)?,
        }
        Ok(())
    }

    /// Has a VM's balloon follow the policy. The record says that there is something to end before the guest is asked for
    /// anything: the next daemon takes the balloon over, or empties it. It is written on a thread of its own, for the caller has
    /// the registry's lock.
    pub fn follow_plan(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        // Nothing is asked of a guest that may stand still; afterwards the plan is caught up with.
        if vm.record.operation.is_some() {
            return Ok(());
        }
        if vm.record.spec.balloon_target.is_some() {
            return self.drive_by_plan(vm);
        }
        if vm.is_balloon_noted.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let (registry, id, is_noted) = (Arc::clone(self), vm.governed.id, Arc::clone(&vm.is_balloon_noted));
        let note = move || {
            registry.note_balloon(id);
            is_noted.store(false, Ordering::Release);
        };
        let spawned = std::thread::Builder::new().name("balloon-note".into()).spawn(note);
        spawned.map(drop).inspect_err(|_| vm.is_balloon_noted.store(false, Ordering::Release))?;
        Ok(())
    }

    /// Follows the plan of rounds that were made during an operation.
    pub(super) fn catch_up_with_plan(self: &Arc<Self>, vm: &mut Vm) {
        if vm.governed.round.keeps().is_some()
            && let Err(error) = self.follow_plan(vm)
        {
            tracing::warn!(vm = %vm.record.name, "drive its balloon: {error}", error = in_full(error.as_ref()));
        }
    }

    /// Writes down that a VM has a balloon, and has it follow the plan that is in force then.
    pub(super) fn note_balloon(self: &Arc<Self>, id: VmId) {
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| {
            let target = vm.record.spec.balloon_target.unwrap_or(vm.record.memory());
            let spec = VmSpec { balloon_target: Some(target), ..vm.record.spec.clone() };
            Ok::<_, Infallible>(Record { spec, ..vm.record.clone() })
        };
        let commit = |vm: &mut Vm, written: Result<()>| {
            let written = written.context("write the VM's record").inspect(|()| self.send_limit(vm));
            if let Err(error) = written.and_then(|()| self.drive_by_plan(vm)) {
                let error = in_full(error.as_ref());
                tracing::warn!(vm = %vm.record.name, "drive its balloon: {error}");
            }
            Ok(())
        };
        self.change(id, plan, commit);
    }

    fn drive_by_plan(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        let memory = Bytes(vm.record.memory());
        match &vm.balloon {
            Some(handle) => handle.follow_target(vm.keeps().unwrap_or(memory)),
            None => self.start_balloon(vm)?,
        }
        Ok(())
    }

    /// Starts the thread of a VM whose record has a balloon. Until somebody says what is wanted, it only looks.
    fn start_balloon(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        if vm.record.spec.balloon_target.is_none() || vm.handle.is_none() || vm.balloon.is_some() {
            return Ok(());
        }
        let (registry, token) = (Arc::clone(self), vm.record.token);
        let (folios, name) = (Arc::clone(self), vm.record.name.clone());
        vm.balloon = Some(spawn(Parts {
            name: vm.record.name.clone(),
            memory: Bytes(vm.record.memory()),
            target: vm.keeps(),
            paging_to: vm.record.paged_out_to().map(Bytes),
            monitor: Arc::clone(&vm.qmp),
            page_out: Box::new(move |to| registry.page_out(token, to)),
            allow_large_folios: Box::new(move |large| {
                let vms = folios.lock();
                let vm = vms.get(&name).filter(|vm| vm.record.token == token);
                let handle = vm.and_then(|vm| vm.handle.as_ref());
                handle.map(|handle| handle.send(Command::LargeFolios(large))).is_some()
            }),
        })?);
        Ok(())
    }

    /// Pages a VM out to its user's target in its balloon's place, or no longer. The record remembers it for the next
    /// daemon. Where the policy alone wants the balloon, it pages out by itself.
    fn page_out(&self, token: Token, to: Option<Bytes>) {
        let Some(id) = self.id_by(token) else { return };
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| {
            let target = vm.record.spec.balloon_target.ok_or(())?;
            let paged_out = to.is_some() && target < vm.record.memory();
            Ok::<_, ()>(Record { paged_out, ..vm.record.clone() })
        };
        let commit = |vm: &mut Vm, written: Result<()>| {
            match written {
                Ok(()) => self.send_limit(vm),
                Err(error) => {
                    let error = in_full(error.as_ref());
                    tracing::warn!(vm = %vm.record.name, "write the VM's record: {error}");
                }
            }
            Ok(())
        };
        self.change(id, plan, commit);
    }
}
