//! A VM that an operator has let its destination take over, while this host went on with it.
//!
//! It was offered there and not granted, and the destination had all of it. Now both run it. The larger generation is right, so this
//! host gives its own away after all:
//!
//! | step | what is done | a daemon that starts finds |
//! |---|---|---|
//! | 1 | the record says that the VM moves: nothing else lets it run | owned: the VM is let go, and the destination says so again |
//! | 2 | QEMU stops the guest | the same |
//! | 3 | the note says that the VM is given to that host | given: it goes on with that |
//! | 4 | the machine grants, and the destination says once more that it runs all of it | the same |
//! | 5 | QEMU is ended here, and then the note goes | given, no VM: the note goes |
//!
//! A destination that refuses in step 4 gives the VM back, and it runs on here. What the guest sees: nothing more.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::in_full;
use pagoda_core::policy::VmId;
use pagoda_image::ImageId;
use pagoda_link::PublicKey;
use pagoda_move::note::{Decision, Note, Offered, Owned};
use pagoda_move::owner::Source;
use pagoda_move::units::Moment;

use super::go_on;
use crate::moves::claims::Claim;
use crate::qmp::Monitor;
use crate::qmp::state::{RunState, run_state};
use crate::record::{Operation, OperationKind};
use crate::registry::Registry;
use crate::registry::operation::ImageThen;
use crate::remote::handover;

/// The pause between two tries of a step.
const PAUSE: Duration = Duration::from_secs(1);

/// Gives a VM away that its destination runs. The peer of this offer has said so, by a stream on which it has shown its key. Returns at
/// once if somebody is at it, or at something else with this VM: the destination repeats what it says.
///
/// # Errors
/// Nobody can tell how the VM stands, or no thread can be had. Nothing is changed.
pub fn supersede(registry: &Arc<Registry>, vm: &str, offered: Offered) -> Result<()> {
    let Some(claim) = registry.moves.claims.claim(vm) else { return Ok(()) };
    // Looked at once more, for nobody else writes it now.
    let proof = Some(Note::Owned(Owned::Offered(offered)));
    if registry.moves.notes().read(vm)? != proof {
        return Ok(());
    }
    let found = registry.lock().get(vm).map(|vm| (vm.governed.id, Arc::clone(&vm.qmp)));
    let Some((id, qmp)) = found else {
        // The VM has ended here.
        return registry.moves.notes().write(vm, None);
    };
    let resume = run_state(&qmp)? == RunState::Running;
    let operation = Operation { kind: OperationKind::Move, image: ImageId(offered.attempt.0.into()), resume };
    if let Err(error) = registry.begin_handover(id, operation) {
        tracing::debug!(%vm, "its destination runs it, which waits: {}", error.message);
        return Ok(());
    }
    tracing::error!(
        %vm,
        "an operator has let the host with the key {:?} take it over, to which it was moving, and it runs there at generation {}: what is \
         here is stopped and ended",
        PublicKey(offered.peer.0),
        offered.generation.0
    );
    let (host, vm) = (Arc::clone(registry), vm.to_owned());
    let hand = move || hand_over(&host, &vm, (id, &qmp), offered, claim);
    let thread = thread::Builder::new().name("superseded".into()).spawn(hand);
    thread.map(drop).context("start a thread").inspect_err(|_| registry.end_operation(id, ImageThen::Kept))
}

/// Each step is tried until it succeeds, or until the VM has ended.
fn hand_over(registry: &Arc<Registry>, vm: &str, (id, qmp): (VmId, &Monitor), offered: Offered, claim: Claim) {
    let is_here = || registry.find_by_id(id, |_| ()).is_some();
    let until_done = |what: &str, step: &dyn Fn() -> Result<()>| {
        for tries in 0_u32.. {
            match step() {
                Ok(()) => return,
                Err(error) if tries == 0 => {
                    tracing::error!(%vm, "{what}, tried again: {}", in_full(error.as_ref()));
                }
                Err(_) => {}
            }
            thread::sleep(PAUSE);
        }
    };
    let stop = || if is_here() { stop(registry, id, qmp) } else { Ok(()) };
    until_done("stop it, for it runs at another host", &stop);
    // What it has in a remote tier is that host's, too.
    if let Some(record) = registry.find_by_id(id, |vm| vm.record.clone()) {
        handover::lose(&record);
    }
    let given = Some(Note::Given(offered, Decision::Grant));
    until_done("note that it runs at another host", &|| registry.moves.notes().write(vm, given));
    drop(claim);
    let me = registry.moves.me();
    until_done("hand it over", &|| {
        let source = Source::supersede(me, offered, Moment::default());
        go_on(registry, vm, PublicKey(offered.peer.0), (source, Vec::new()))
    });
}

/// Nobody lets it run from here on: the record has the operation, and the memory policy has ended what it was at before.
fn stop(registry: &Registry, id: VmId, qmp: &Monitor) -> Result<()> {
    let is_busy = registry.find_by_id(id, |vm| vm.governed.block.is_under_way()).unwrap_or(false);
    ensure!(!is_busy, "the memory policy is about to stop it or let it run");
    qmp.execute("stop")?;
    let state = run_state(qmp)?;
    ensure!(state != RunState::Running, "it runs still");
    Ok(())
}

#[cfg(test)]
mod tests;
