//! Tries whether a new QEMU keeps RAM in its migrations, whatever it is told.
//!
//! QEMU is told that RAM is a shared file, and with `x-ignore-shared` it would leave such RAM out. The shim hides that name
//! from it (the shim's `gate`) by a hook on a function of libc's, which a QEMU that is built in another way might not call. So
//! a new QEMU is asked to switch the capability off, which changes nothing. One that knows the name is ended: its guest
//! has hardly begun, and could be lost by a migration later. A QEMU that attaches again was tried when it was new, or was
//! started by an older version, which told it that RAM is private.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pagoda_abi::Token;
use pagoda_api::types::VmKind;
use serde_json::{Value, json};

use crate::qmp::Refused;
use crate::registry::Registry;

/// What the shim hides.
const CAPABILITY: &str = "x-ignore-shared";
/// QEMU is asked so often: it may not answer while it starts, or while it takes no such command.
const TRIES: u32 = 12;
/// Between two of them. No answer takes 5 s besides.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, PartialEq, Eq)]
enum Gate {
    /// QEMU does not know the name.
    Shut,
    /// QEMU knows it.
    Open,
    /// QEMU did not look at it.
    Unknown,
}

/// Asks a new QEMU, and ends it if it could lose its guest.
pub fn check(registry: &Registry, name: &str, token: Token) {
    let monitor = || {
        let vms = registry.lock();
        let vm = vms.get(name).filter(|vm| vm.record.token == token && vm.record.kind == VmKind::Qemu)?;
        vm.handle.is_some().then(|| Arc::clone(&vm.qmp))
    };
    for _ in 0..TRIES {
        let Some(qmp) = monitor() else { return };
        let arguments = json!({ "capabilities": [{ "capability": CAPABILITY, "state": false }] });
        match judge(&qmp.execute_with("migrate-set-capabilities", arguments)) {
            Gate::Shut => return,
            Gate::Unknown => std::thread::sleep(PAUSE),
            Gate::Open => {
                tracing::error!(
                    vm = %name,
                    "ended: this build of QEMU finds migration capabilities in a way that the shim does not see, and \
                     could leave guest RAM out of a migration; use a QEMU that calls strcmp of libc, as distributions' do"
                );
                let _ = qmp.execute("quit");
                return;
            }
        }
    }
    tracing::warn!(vm = %name, "QEMU did not say whether it could leave guest RAM out of a migration: do not set {CAPABILITY}");
}

fn judge(answer: &Result<Value>) -> Gate {
    match answer {
        Ok(_) => Gate::Open,
        Err(error) => match error.downcast_ref::<Refused>() {
            Some(refused) if refused.desc.contains(CAPABILITY) => Gate::Shut,
            _ => Gate::Unknown,
        },
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn only_a_qemu_that_does_not_know_the_name_passes() {
        let refused = |desc: &str| {
            let refused = Refused { class: "GenericError".into(), desc: desc.into() };
            Err::<Value, _>(refused).context("execute migrate-set-capabilities")
        };
        assert_eq!(judge(&Ok(json!({}))), Gate::Open);
        let unknown_name = "Parameter 'capability' does not accept value 'x-ignore-shared'";
        assert_eq!(judge(&refused(unknown_name)), Gate::Shut);
        assert_eq!(judge(&refused("There's a migration process in progress")), Gate::Unknown);
        assert_eq!(judge(&Err(anyhow!("the monitor was closed"))), Gate::Unknown);
    }
}
