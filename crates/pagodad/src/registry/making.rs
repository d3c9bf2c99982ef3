//! VMs that are being made or removed. Their names are taken, but nobody finds them in the registry.
//!
//! A name is entered under the registry's lock, before the VM's files are made or after the VM was taken out. It goes when the
//! VM is there, or its files are gone. The lock in here is held for bookkeeping only, and is taken after the registry's.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagoda_core::policy::VmId;

use super::writing::WritingLock;

/// The names that are taken by VMs which nobody finds.
#[derive(Debug, Default)]
pub struct Making(Mutex<BTreeMap<String, Absent>>);

/// A VM that is not there yet or no more.
#[derive(Debug)]
struct Absent {
    /// Its number in the policy.
    id: VmId,
    /// Held until it is removed, if that is what happens.
    removal: Option<WritingLock>,
}

impl Making {
    /// A VM is being made.
    pub fn begin(&self, name: &str, id: VmId) {
        self.lock().insert(name.to_owned(), Absent { id, removal: None });
    }

    /// A VM is being removed. The caller has its writing lock until that is done.
    pub fn begin_removal(&self, name: &str, id: VmId, writing: &WritingLock) {
        self.lock().insert(name.to_owned(), Absent { id, removal: Some(Arc::clone(writing)) });
    }

    /// The VM is made or removed, or could not be made.
    pub fn end(&self, name: &str) {
        self.lock().remove(name);
    }

    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Each VM's name, and its number in the policy.
    pub fn all(&self) -> Vec<(String, VmId)> {
        self.lock().iter().map(|(name, absent)| (name.clone(), absent.id)).collect()
    }

    /// Waits for whoever removes a VM of this name. The caller holds no lock.
    pub fn wait_until_removed(&self, name: &str) {
        let removal = self.lock().get(name).and_then(|absent| absent.removal.clone());
        if let Some(removal) = removal {
            drop(removal.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Absent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
