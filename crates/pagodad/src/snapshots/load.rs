//! Gives the QEMU of a restored VM its state, once it has attached and its monitor answers.

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use pagoda_abi::Token;
use pagoda_api::in_full;
use pagoda_image::{Manifest, Qemu};

use crate::images::describe;
use crate::qmp::{Held, state};
use crate::record::{Operation, OperationKind};
use crate::registry::Registry;
use crate::registry::operation::ImageThen;

/// How long QEMU may take to load its state, page faults included.
const LOAD_MAX: Duration = Duration::from_secs(120);

/// How long the shim may take to open its gate, which begins the load.
const GATE_MAX: Duration = Duration::from_secs(60);

/// Between two attempts to end a QEMU that may be busy.
const QUIT_AGAIN: Duration = Duration::from_secs(1);

/// Loads the state of a VM that was just made of a snapshot, and lets the guest run. Of others nothing is done. The caller has a
/// thread for it, and QEMU was asked whether its gate works.
///
/// If QEMU cannot have its state, it is ended: its guest has not run, and the snapshot is what it was.
pub fn load(registry: &Arc<Registry>, token: Token) {
    let of_token = |vm: &&crate::registry::Vm| vm.record.token == token;
    let found = registry
        .lock()
        .values()
        .find(of_token)
        .map(|vm| (vm.governed.id, vm.record.name.clone(), vm.record.operation, vm.keeps_ram, Arc::clone(&vm.qmp)));
    let Some((id, name, Some(operation), keeps_ram, qmp)) = found else { return };
    if operation.kind != OperationKind::Restore {
        return;
    }
    // Events come only to who is connected, and this says when the guest ran.
    let qmp = Held::new(qmp);
    let pid = registry.find_by_id(id, |vm| vm.record.pid.0).unwrap_or(0);
    let loaded = match registry.gate_of(id).map(|gate| gate.patient(GATE_MAX)) {
        Some(gate) if keeps_ram => load_through(registry, &gate, &qmp, pid, operation),
        _ => Err(anyhow!("QEMU has not said whether it keeps RAM in migrations")),
    };
    if let Err(error) = loaded {
        tracing::error!(vm = %name, "ended, for its state could not be loaded: {}", in_full(error.as_ref()));
        // It must not go on with half a state, or with RAM left out of its migrations.
        while registry.lock().values().any(|vm| vm.record.token == token) {
            let _ = qmp.execute("quit");
            std::thread::sleep(QUIT_AGAIN);
        }
        return;
    }
    if operation.resume
        && let Err(error) = qmp.execute("cont")
    {
        // It may run by now, or soon. It has all its state, so it is not ended: that it is to run is tried again.
        tracing::warn!(vm = %name, "let the guest of a restored VM run, tried again: {}", in_full(error.as_ref()));
        return registry.abandon_operation(id);
    }
    let resumed = qmp.events().last_resume.filter(|_| operation.resume);
    registry.find_by_id(id, |vm| vm.resumed_unix_us = resumed.map(|at| at.0));
    registry.note_let_run(id);
    registry.lend_to_others(id);
    tracing::info!(vm = %name, image = %operation.image, "restored");
    registry.end_operation(id, ImageThen::Kept);
}

fn load_through(
    registry: &Registry,
    gate: &dyn state::Gate,
    qmp: &crate::qmp::Monitor,
    pid: u32,
    operation: Operation,
) -> Result<()> {
    let store = registry.images.store().map_err(|error| anyhow!(error.message))?;
    let image = store.image(operation.image)?;
    image.check_state()?;
    let found = state::machine(qmp)?;
    registry.programs.note(pid, &found.version);
    check_qemu(image.manifest(), &found)?;
    let (file, len) = image.state()?;
    state::load(qmp, gate, &mut file.take(len.0), Instant::now() + LOAD_MAX)
}

/// Whoever started QEMU may have another one than its user thinks. It would refuse the state as well, in words of its own.
fn check_qemu(manifest: &Manifest, found: &Qemu) -> Result<()> {
    describe::qemu(&manifest.qemu).check_loaded_by(&found.version).map_err(|why| anyhow!(why))?;
    state::check_same(&manifest.qemu, found)
}
