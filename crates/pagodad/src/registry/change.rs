//! Changing what is remembered of a VM: the one path for all who do.
//!
//! The disk decides how long it takes to write a record, and a policy round needs the registry. So a change has three steps: it
//! is planned under the lock, the record is written without it, and the change takes effect under the lock. Until then the VM
//! is what it was, and it stays so if the record cannot be written.
//!
//! Each VM has a *writing lock*. Whoever holds it alone writes or removes the VM's record and takes the VM out of the
//! registry. So a VM that ends while its record is written ends after that, with its record, and a change that comes later
//! finds no VM. A writing lock is taken before all others ([`super`]), and nobody waits for it who holds one of them.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, TryLockError};

use pagoda_core::policy::VmId;

use super::{Registry, Vm};
use crate::record::Record;

impl Registry {
    /// Changes a VM's record. `plan` says what it becomes; it may reserve what the change needs. `commit` takes in how the
    /// writing went, with the record in place if it went well, and gives back what was reserved if it did not.
    ///
    /// `None`: there is no such VM. The caller holds no lock.
    pub fn change<T, E>(
        &self,
        id: VmId,
        plan: impl FnOnce(&BTreeMap<String, Vm>, &Vm) -> Result<Record, E>,
        commit: impl FnOnce(&mut Vm, anyhow::Result<()>) -> Result<T, E>,
    ) -> Option<Result<T, E>> {
        self.while_writing(id, || {
            let (old, planned) = {
                let vms = self.lock();
                let vm = vms.values().find(|vm| vm.governed.id == id)?;
                (vm.record.clone(), plan(&vms, vm))
            };
            let record = match planned {
                Ok(record) => record,
                Err(refused) => return Some(Err(refused)),
            };
            debug_assert_eq!(record.name, old.name, "a record is the record of one VM");
            // A new daemon takes a VM up on a disk that is full or read-only.
            let written = if record == old { Ok(()) } else { self.records.write(&record) };
            let done = self.find_by_id(id, |vm| {
                if written.is_ok() {
                    vm.record = record;
                }
                commit(vm, written)
            });
            debug_assert!(done.is_some(), "a VM is there for as long as its record is written");
            done
        })?
    }

    /// Does something that no change of this VM's record and not its end comes between. `None`: there is no such VM. The
    /// caller holds no lock.
    pub(super) fn while_writing<T>(&self, id: VmId, act: impl FnOnce() -> T) -> Option<T> {
        let writing = self.find_by_id(id, |vm| Arc::clone(&vm.writing))?;
        let _alone = writing.lock().unwrap_or_else(PoisonError::into_inner);
        Some(act())
    }

    /// As [`Self::while_writing`], but nothing is done while somebody else has the lock.
    pub(super) fn unless_writing<T>(&self, id: VmId, act: impl FnOnce() -> T) -> Option<T> {
        let writing = self.find_by_id(id, |vm| Arc::clone(&vm.writing))?;
        let _alone = match writing.try_lock() {
            Err(TryLockError::WouldBlock) => return None,
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(alone)) => alone.into_inner(),
        };
        Some(act())
    }
}

#[cfg(test)]
mod tests;
