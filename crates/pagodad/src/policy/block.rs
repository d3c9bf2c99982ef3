//! Stops VMs for want of memory, and lets them run again (QMP `stop` and `cont`).
//!
//! Stop: the record says `blocked`, on the disk -> QMP `stop`. Release: QMP `cont` -> the record no longer says so. So
//! whichever daemon there is knows every VM that was stopped here, and a VM that it lets run for nothing runs already.
//!
//! While there is an operation on a VM (the record's `operation`), it is neither stopped nor released here.
//!
//! A VM that its user or a stall has paused is left alone; one that is stalled while it is blocked stays paused, for
//! `pagoda vm cont`. QEMU knows one pause only: who pauses a blocked VM as well finds it running when it is released.

use pagoda_api::in_full;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pagoda_api::types::VmKind;
use pagoda_core::policy::{Run, VmId};

use crate::record::Record;
use crate::registry::{Registry, Vm};

/// Brings a VM to where the plan wants it, or leaves that to the next round.
pub fn follow(registry: &Arc<Registry>, vm: &mut Vm, run: Run) {
    let is_wanted = run == Run::Block;
    // Whoever does something to the VM as a whole has stopped it, or is about to.
    if vm.record.operation.is_some() {
        return;
    }
    if vm.record.kind == VmKind::Plain || is_wanted == vm.record.blocked || (is_wanted && vm.stalled.is_some()) {
        return;
    }
    if vm.governed.block.is_busy.swap(true, Ordering::AcqRel) {
        return;
    }
    let (registry, id, is_busy) = (Arc::clone(registry), vm.governed.id, Arc::clone(&vm.governed.block.is_busy));
    let done = Arc::clone(&is_busy);
    let act = move || {
        if is_wanted {
            stop(&registry, id);
        } else {
            release(&registry, id);
        }
        done.store(false, Ordering::Release);
    };
    if let Err(error) = std::thread::Builder::new().name("block".into()).spawn(act) {
        is_busy.store(false, Ordering::Release);
        tracing::warn!(vm = %vm.record.name, "block it: {error}");
    }
}

fn stop(registry: &Registry, id: VmId) {
    let Some(qmp) = registry.find_by_id(id, |vm| Arc::clone(&vm.qmp)) else { return };
    // Not paused by anybody, as far as QEMU says: an answer that does not come is no.
    if !qmp.is_running() {
        return;
    }
    if !set_blocked(registry, id, true) {
        return;
    }
    if let Err(error) = qmp.execute("stop") {
        // It may still take effect, so the record stays as it is: the release is harmless.
        tracing::warn!("block a VM: {error}", error = in_full(error.as_ref()));
    }
}

fn release(registry: &Registry, id: VmId) {
    let Some((qmp, is_stalled)) = registry.find_by_id(id, |vm| (Arc::clone(&vm.qmp), vm.stalled.is_some())) else {
        return;
    };
    if !is_stalled && let Err(error) = qmp.execute("cont") {
        tracing::warn!("release a blocked VM, tried again: {error}", error = in_full(error.as_ref()));
        return;
    }
    set_blocked(registry, id, false);
}

/// Whether the record says so now.
fn set_blocked(registry: &Registry, id: VmId, blocked: bool) -> bool {
    let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| match vm.record.operation {
        // It began meanwhile, and would find the VM stopped for another reason.
        Some(_) if blocked => Err(()),
        _ => Ok(Record { blocked, ..vm.record.clone() }),
    };
    let commit = |vm: &mut Vm, written: anyhow::Result<()>| {
        if let Err(error) = written {
            let error = in_full(error.as_ref());
            tracing::warn!(vm = %vm.record.name, "write the VM's record: {error}");
            return Ok(false);
        }
        match blocked {
            true => tracing::warn!(vm = %vm.record.name, "blocked: stopped until memory is found"),
            false => tracing::info!(vm = %vm.record.name, "released: it runs again"),
        }
        vm.governed.block.since = blocked.then(Instant::now);
        Ok(true)
    };
    registry.change(id, plan, commit) == Some(Ok(true))
}
