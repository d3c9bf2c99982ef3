//! Tries whether a QEMU keeps RAM in its migrations, whatever it is told.
//!
//! QEMU is told that RAM is a shared file, and with `x-ignore-shared` it would leave such RAM out. The shim hides that name
//! from it (the shim's `gate`) by a hook on a function of libc's, which a QEMU that is built in another way might not call. So
//! QEMU is asked to switch the capability off, which changes nothing. A new one that knows the name is ended: its guest
//! has hardly begun, and could be lost by a migration later. One that attaches again is asked too, for the daemon may have died
//! before it had an answer. It is not ended, for its guest has begun; the log says what must not be done to it.
//!
//! A new VM without a launch specification was made by an older `pagoda run`, which tells QEMU that RAM is private, or by
//! another client, of which nobody knows: it is asked and not ended. One that attaches again without one was started by an
//! older version, and is not asked.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use pagoda_abi::Token;
use pagoda_api::types::VmKind;
use serde_json::{Value, json};

use crate::qmp::{Held, Monitor, Refused};
use crate::registry::Registry;
use crate::snapshots::load;

/// The capability that the shim hides from QEMU.
const CAPABILITY: &str = "x-ignore-shared";
/// Between two questions at first: QEMU may not answer while it starts, or while it takes no such command. No answer takes
/// 5 s besides.
const PAUSE: Duration = Duration::from_secs(1);
/// So many questions are asked at that pace. After them the log warns.
const TRIES: u32 = 12;
/// Between two questions from then on, as long as the VM lives.
const PAUSE_LATER: Duration = Duration::from_secs(30);

#[derive(Debug, PartialEq, Eq)]
enum Gate {
    /// QEMU does not know the name.
    Shut,
    /// QEMU knows the name: it could leave RAM out of a migration.
    Open,
    /// QEMU did not look at it.
    Unknown,
}

/// Asks QEMU in a thread of its own, until it answers; then an operation that an earlier daemon began is ended, and a
/// VM that was made of a snapshot is given its state: both need the gate for themselves. One that `is_new`, that this version of
/// `pagoda run` started and that could lose its guest is ended.
///
/// `held` keeps the monitor's connection as long as QEMU answers.
///
/// # Errors
/// No thread can be had.
pub fn check(
    registry: &Arc<Registry>,
    name: &str,
    token: Token,
    is_new: bool,
    mut held: Option<Held<Arc<Monitor>>>,
) -> std::io::Result<()> {
    let (registry, name) = (Arc::clone(registry), name.to_owned());
    let run = move || {
        until_answered(&registry, &name, token, is_new, &mut held);
        if !is_new {
            // What an earlier daemon began may take long to end, and others may want the monitor between the tries.
            held = None;
        }
        registry.resume_operation(token);
        load(&registry, token);
    };
    thread::Builder::new().name("gate".into()).spawn(run).map(drop)
}

fn until_answered(registry: &Registry, name: &str, token: Token, is_new: bool, held: &mut Option<Held<Arc<Monitor>>>) {
    let monitor = || {
        let vms = registry.lock();
        let vm = vms.get(name).filter(|vm| vm.record.token == token && vm.record.kind == VmKind::Qemu)?;
        let is_ours = vm.record.launch.is_some();
        let engine = vm.handle.clone().filter(|_| is_new || is_ours)?;
        Some((Arc::clone(&vm.qmp), engine, is_new && is_ours))
    };
    for tries in 1_u32.. {
        let Some((qmp, engine, may_end)) = monitor() else { return };
        // An earlier daemon may have died while it had the gate open.
        let gate = match is_new || engine.shut_gate().is_ok() {
            true => {
                let arguments = json!({ "capabilities": [{ "capability": CAPABILITY, "state": false }] });
                judge(&qmp.execute_with("migrate-set-capabilities", arguments))
            }
            false => Gate::Unknown,
        };
        if gate == Gate::Unknown {
            // Others may want the monitor meanwhile.
            *held = None;
        }
        match gate {
            Gate::Shut => {
                if let Some(vm) = registry.lock().get_mut(name).filter(|vm| vm.record.token == token) {
                    vm.keeps_ram = true;
                }
                return;
            }
            Gate::Open if may_end => {
                tracing::error!(
                    vm = %name,
                    "ended: this build of QEMU finds migration capabilities in a way that the shim does not see, and \
                     could leave guest RAM out of a migration; use a QEMU that calls strcmp of libc, as distributions' do"
                );
                let _ = qmp.execute("quit");
                return;
            }
            Gate::Open => {
                tracing::warn!(vm = %name, "QEMU may leave guest RAM out of a migration: do not set {CAPABILITY}");
                return;
            }
            Gate::Unknown if tries < TRIES => thread::sleep(PAUSE),
            Gate::Unknown => {
                if tries == TRIES {
                    tracing::warn!(
                        vm = %name,
                        "QEMU does not say whether it could leave guest RAM out of a migration: do not set {CAPABILITY}"
                    );
                }
                thread::sleep(PAUSE_LATER);
            }
        }
    }
}

fn judge(answer: &Result<Value>) -> Gate {
    match answer {
        Ok(_) => Gate::Open,
        Err(error) => match error.downcast_ref::<Refused>() {
            Some(refused) if refused.desc.contains(CAPABILITY) => Gate::Shut,
            // Said once the name was found.
            Some(refused) if refused.desc.contains("migration process in progress") => Gate::Open,
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
        assert_eq!(judge(&refused("There's a migration process in progress")), Gate::Open);
        assert_eq!(judge(&refused("Command not found")), Gate::Unknown);
        assert_eq!(judge(&Err(anyhow!("the monitor was closed"))), Gate::Unknown);
    }
}
