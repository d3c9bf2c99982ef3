//! Balloon targets of VMs: who has one, and what is kept of it.

use std::sync::Arc;

use anyhow::Result;
use pagoda_abi::Token;
use pagoda_abi::record::{Balloon, Record};
use pagoda_core::units::Bytes;

use super::{Registry, Vm};
use crate::balloon::{Parts, spawn};

impl Registry {
    /// Goes on with the balloon of a VM that has just attached, if it has a target.
    pub fn resume_balloon(self: &Arc<Self>, name: &str) {
        if let Some(vm) = self.lock().get_mut(name)
            && let Err(error) = self.drive_balloon(vm)
        {
            tracing::error!(vm = %name, "drive its balloon: {error:#}");
        }
    }

    /// Has a VM's balloon follow its record, once it is attached.
    pub(super) fn drive_balloon(self: &Arc<Self>, vm: &mut Vm) -> Result<()> {
        let (Some(balloon), true) = (vm.record.balloon, vm.handle.is_some()) else { return Ok(()) };
        let target = Bytes(balloon.target);
        if let Some(handle) = &vm.balloon {
            handle.set_target(target);
            return Ok(());
        }
        let (registry, token) = (Arc::clone(self), vm.record.token);
        vm.balloon = Some(spawn(Parts {
            name: vm.record.name.clone(),
            memory: Bytes(vm.record.regions.iter().sum()),
            target,
            paging_to: balloon.paged_out.then_some(target),
            monitor: Arc::clone(&vm.qmp),
            page_out: Box::new(move |to| registry.page_out(token, to)),
        })?);
        Ok(())
    }

    /// Pages a VM out in its balloon's place, or no longer. The record remembers it for the next daemon.
    fn page_out(&self, token: Token, to: Option<Bytes>) {
        let mut vms = self.lock();
        let Some(vm) = vms.values_mut().find(|vm| vm.record.token == token) else { return };
        let Some(balloon) = vm.record.balloon else { return };
        // A target that came meanwhile is told to the balloon too, which then says what holds for it.
        let balloon = match to {
            Some(to) if to.0 != balloon.target => return,
            to => Balloon { paged_out: to.is_some(), ..balloon },
        };
        let record = Record { balloon: Some(balloon), ..vm.record.clone() };
        if let Err(error) = self.change_record(vm, record) {
            tracing::warn!(vm = %vm.record.name, "write the VM's record: {error}");
        }
    }
}
