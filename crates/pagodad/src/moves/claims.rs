//! Whoever works with the note of a VM has a claim on its name: the driver of a move from here, or the session of one to here. So a
//! note has one writer at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The names of the VMs whose notes somebody has a claim on.
#[derive(Clone, Debug, Default)]
pub struct Claims(Arc<Mutex<BTreeSet<String>>>);

/// Nobody else has the note of this VM until it is dropped.
#[derive(Debug)]
pub struct Claim {
    vm: String,
    claims: Claims,
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a name, unless somebody has it.
    #[must_use]
    pub fn claim(&self, vm: &str) -> Option<Claim> {
        let is_new = self.lock().insert(vm.to_owned());
        is_new.then(|| Claim { vm: vm.to_owned(), claims: self.clone() })
    }

    pub fn has(&self, vm: &str) -> bool {
        self.lock().contains(vm)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.lock().remove(&self.vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_claim_at_a_time() {
        let claims = Claims::default();
        let claim = claims.claim("web1").unwrap();
        assert!(claims.claim("web1").is_none() && claims.has("web1") && claims.claim("web2").is_some());
        drop(claim);
        assert!(!claims.has("web1") && claims.claim("web1").is_some());
    }
}
