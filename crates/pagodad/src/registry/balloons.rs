//! Balloon targets of VMs: who has one, and what is kept of it.

use pagoda_api::in_full;
use std::sync::Arc;

use anyhow::{Context, Result};
use pagoda_abi::Token;
use pagoda_abi::record::{Balloon, Record};
use pagoda_core::units::Bytes;
use pagoda_pager::handle::Command;

use super::{Registry, Vm};
use crate::balloon::{Parts, spawn};

impl Vm {
    /// What the guest should keep: what its user says, and no more than the memory policy leaves it. `None`: nobody has said
    /// anything yet.
    fn keeps(&self) -> Option<Bytes> {
        let memory = Bytes(self.record.regions.iter().sum());
        let user = self.record.balloon.map(|balloon| Bytes(balloon.target)).filter(|target| *target < memory);
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

    /// Has a VM's balloon follow its user's wish, once it is attached.
    pub(super) fn drive_balloon(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        let memory = Bytes(vm.record.regions.iter().sum());
        match &vm.balloon {
            Some(handle) => handle.set_target(vm.keeps().unwrap_or(memory)),
            None => self.start_balloon(vm)?,
        }
        Ok(())
    }

    /// Has a VM's balloon follow the policy. The record says that there is something to end before the guest is asked for
    /// anything: the next daemon takes the balloon over, or empties it.
    pub fn follow_plan(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        let memory = Bytes(vm.record.regions.iter().sum());
        if vm.record.balloon.is_none() {
            let balloon = Some(Balloon { target: memory.0, paged_out: false });
            let record = Record { balloon, ..vm.record.clone() };
            self.change_record(vm, record).context("write the VM's record")?;
        }
        match &vm.balloon {
            Some(handle) => handle.follow_target(vm.keeps().unwrap_or(memory)),
            None => self.start_balloon(vm)?,
        }
        Ok(())
    }

    /// Starts the thread of a VM whose record has a balloon. Until somebody says what is wanted, it only looks.
    fn start_balloon(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        let (Some(balloon), true) = (vm.record.balloon, vm.handle.is_some()) else { return Ok(()) };
        if vm.balloon.is_some() {
            return Ok(());
        }
        let (registry, token) = (Arc::clone(self), vm.record.token);
        let (folios, name) = (Arc::clone(self), vm.record.name.clone());
        vm.balloon = Some(spawn(Parts {
            name: vm.record.name.clone(),
            memory: Bytes(vm.record.regions.iter().sum()),
            target: vm.keeps(),
            paging_to: balloon.paged_out.then_some(Bytes(balloon.target)),
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
        let mut vms = self.lock();
        let Some(vm) = vms.values_mut().find(|vm| vm.record.token == token) else { return };
        let Some(balloon) = vm.record.balloon else { return };
        let paged_out = to.is_some() && balloon.target < vm.record.regions.iter().sum();
        let record = Record { balloon: Some(Balloon { paged_out, ..balloon }), ..vm.record.clone() };
        if let Err(error) = self.change_record(vm, record) {
            tracing::warn!(vm = %vm.record.name, "write the VM's record: {error}", error = in_full(error.as_ref()));
        }
    }
}
