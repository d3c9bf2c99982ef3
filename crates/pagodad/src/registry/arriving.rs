//! VMs that come from another host: made with empty files, which the daemon fills before an engine serves them.

use pagoda_api::types::{ApiError, CreateVm, CreatedVm};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_pager::arriving::Arriving;

use super::{Registry, internal};
use crate::record::{Operation, Remote};

/// Of a VM's limit so much stays free, so that its first page-ins find room without page-out.
const HEADROOM_PART: u64 = 32;

impl Registry {
    /// Makes a VM whose pages are to come, and that a program can attach to meanwhile. `remote`: its tier, which is handed over.
    ///
    /// # Errors
    /// As [`Registry::create`]. Nothing is left behind.
    pub fn create_arriving(
        &self,
        request: CreateVm,
        operation: Operation,
        remote: Option<Remote>,
    ) -> Result<(CreatedVm, Arriving), ApiError> {
        let name = request.name.clone();
        let memory = request.memory.clone();
        let created = self.create_new(request, operation, remote)?;
        let filled = self.files_of(&name, &memory);
        match filled {
            Ok(arriving) => Ok((created, arriving)),
            Err(error) => {
                let _ = self.delete(&name);
                Err(error)
            }
        }
    }

    fn files_of(&self, name: &str, memory: &[u64]) -> Result<Arriving, ApiError> {
        let failed = |what: &str, error: &dyn std::fmt::Display| internal(what, error);
        let mut vms = self.lock();
        let vm = vms.get_mut(name).ok_or_else(|| super::no_such_vm(name))?;
        let total = Bytes(memory.iter().sum()).pages_floor();
        // The engine will do the same when it begins.
        let first = self.first_limit(vm);
        vm.governed.round.set_first_limit(first);
        let limit = vm.limit();
        let dram = if limit < total { PageCount(limit.0 - limit.0 / HEADROOM_PART) } else { total };
        let ram: Result<Vec<_>, _> = vm.ram.iter().map(|file| file.duplicate()).collect();
        let ram = ram.map_err(|error| failed("share the VM's RAM", &error))?;
        let swap = vm.swap.as_ref().ok_or_else(|| internal("share the VM's swap file", "it has been taken"))?;
        let swap = swap.duplicate().map_err(|error| failed("share the VM's swap file", &error))?;
        Arriving::new(ram, swap, dram).map_err(|error| failed("fill the VM's files", &error))
    }
}
