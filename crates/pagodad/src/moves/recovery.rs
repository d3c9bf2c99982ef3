//! Moves that were under way when the daemon before this one ended: each VM's note says what becomes of it.
//!
//! A VM of which the note cannot be read is left as it is: it is neither let run nor removed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_api::in_full;
use pagoda_core::policy::VmId;
use pagoda_core::units::{Bytes, PageCount};
use pagoda_link::PublicKey;
use pagoda_move::note::{Note, Offered, Owned};
use pagoda_move::owner::{Qemu, Recovered, recover};
use pagoda_move::units::{AttemptId, Moment};
use pagoda_pager::tier::source::Arrivals;

use super::destination::{self, vm};
use super::source::{self, mirror};
use crate::qmp::state::{RunState, undo};
use crate::qmp::{Held, Monitor};
use crate::record::{Operation, OperationKind};
use crate::registry::Registry;
use crate::registry::operation::ImageThen;

/// Between two looks whether the agent of a VM has come back.
const LOOK: Duration = Duration::from_millis(50);
/// How long a QEMU that has attached may take to answer. One that does not is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// Goes on with all of them, in a thread of its own. Once, when the records have been read.
///
/// # Errors
/// No thread can be had: nothing goes on before the next daemon.
pub fn go_on(registry: &Arc<Registry>) -> std::io::Result<()> {
    registry.moves.copies.settle(registry.moves.notes());
    let mut names = of_records(registry);
    match registry.moves.notes().all() {
        Ok(noted) => names.extend(noted),
        Err(error) => tracing::error!("moves that were under way: {}", in_full(error.as_ref())),
    }
    if names.is_empty() {
        return Ok(());
    }
    registry.moves.set_left(&names);
    let registry = Arc::clone(registry);
    thread::Builder::new().name("moves".into()).spawn(move || settle_all(&registry, names)).map(drop)
}

fn of_records(registry: &Registry) -> BTreeSet<String> {
    let vms = registry.lock();
    let moves = vms.values().filter(|vm| vm.record.operation.is_some_and(|operation| operation.kind.is_move()));
    moves.map(|vm| vm.record.name.clone()).collect()
}

/// Each VM that something was under way with has a thread of its own: what one waits for, no other does.
fn settle_all(registry: &Arc<Registry>, names: BTreeSet<String>) {
    for name in names {
        remove_register(registry, &name);
        // Most have moved at some time, and that is all.
        if settled_before(registry, &name) {
            registry.moves.settle_left(&name);
            continue;
        }
        let (registry, of) = (Arc::clone(registry), name.clone());
        let settle = move || settle_until_done(&registry, &of);
        if let Err(error) = thread::Builder::new().name("moves".into()).spawn(settle) {
            tracing::error!(vm = %name, "go on with a move that was under way: {error}; the next daemon does");
        }
    }
}

/// The daemon before this one may have died before it did so. A note that tells of an offer says that no grant of it was sent.
fn remove_register(registry: &Registry, name: &str) {
    if let Ok(Some(Note::Owned(Owned::Offered(offered)))) = registry.moves.notes().read(name)
        && let Some(register) = offered.register
    {
        registry.moves.arbiter.remove(register, offered.attempt);
    }
}

fn settle_until_done(registry: &Arc<Registry>, name: &str) {
    let mut is_said = false;
    loop {
        match settle(registry, name) {
            Ok(true) => return registry.moves.settle_left(name),
            Ok(false) => thread::sleep(LOOK),
            Err(error) => {
                if !std::mem::replace(&mut is_said, true) {
                    tracing::error!(vm = %name, "a move that was under way, tried again: {}", in_full(error.as_ref()));
                }
                thread::sleep(AGAIN);
            }
        }
    }
}

/// It does not move. False also if nobody can tell.
fn settled_before(registry: &Registry, name: &str) -> bool {
    let is_own = matches!(registry.moves.notes().read(name), Ok(None | Some(Note::Owned(_))));
    is_own && known(registry, name).is_none_or(|known| known.operation.is_none())
}

/// What is known of a VM that was being moved.
struct Known {
    /// An operation that nobody carries out since this daemon started.
    operation: Option<Operation>,
    /// It has an engine, and its QEMU has answered.
    is_attached: bool,
    /// It has an engine.
    is_served: bool,
    /// Its guest has run since it came here.
    was_let_run: bool,
    qmp: Arc<Monitor>,
}

fn known(registry: &Registry, name: &str) -> Option<Known> {
    let vms = registry.lock();
    let vm = vms.get(name)?;
    let operation = vm.operation_cut_off().filter(|operation| operation.kind.is_move());
    let was_let_run = vm.shared.as_ref().is_some_and(|shared| shared.was_let_run());
    // QEMU was asked whether its gate works, which our own migrations need: nothing else asks it anything any more.
    let is_attached = vm.handle.is_some() && vm.keeps_ram;
    let is_served = vm.handle.is_some();
    Some(Known { operation, is_attached, is_served, was_let_run, qmp: Arc::clone(&vm.qmp) })
}

/// False: it cannot be told yet.
fn settle(registry: &Arc<Registry>, name: &str) -> Result<bool> {
    let note = registry.moves.notes().read(name)?;
    let known = known(registry, name);
    // One that has moved before, and does not move now.
    let is_own = matches!(note, None | Some(Note::Owned(_)));
    if is_own && known.as_ref().is_none_or(|known| known.operation.is_none()) {
        return Ok(true);
    }
    // Its agent is on its way, or its process has ended, which is found out. One that lacks pages may not answer before they come.
    let lacks =
        matches!(note, Some(Note::Accepted(..))) && lacking(registry, name).is_some_and(|(_, lacks)| lacks.is_some());
    if known.as_ref().is_some_and(|known| if lacks { !known.is_served } else { !known.is_attached }) {
        return Ok(false);
    }
    match (note, &known) {
        (None | Some(Note::Owned(_)), None) => Ok(true),
        (None | Some(Note::Owned(_)), Some(known)) => settle_own(registry, name, note, known),
        (Some(Note::Given(offered, _)), _) => go_on_as_source(registry, name, note, offered),
        (Some(Note::Incoming(offered) | Note::Accepted(offered, _) | Note::Refused(offered)), _) => {
            go_on_as_destination(registry, name, (note, offered), known.as_ref(), lacks)
        }
    }
}

/// Nothing was granted, or all is over. The VM is this host's.
fn settle_own(registry: &Arc<Registry>, name: &str, note: Option<Note>, known: &Known) -> Result<bool> {
    let Some(operation) = known.operation else { return Ok(true) };
    let id = registry.lock().get(name).map(|vm| vm.governed.id).context("it has ended")?;
    match (operation.kind, note) {
        // Its note comes before it, and goes after it.
        (OperationKind::Arrival, None) => {
            vm::discard(registry, name, AttemptId(operation.image.0 as u64), Some(id));
            return Ok(true);
        }
        // The grant was its, and its guest could not be let run so far.
        (OperationKind::Arrival, _) if operation.resume && !known.was_let_run => {
            vm::run(registry, name, drop);
            return Ok(true);
        }
        // Whoever has paused it since it ran is its user.
        (OperationKind::Arrival, _) => {}
        _ => {
            let gate = registry.gate_of(id).context("it has ended")?;
            let paused: &[RunState] = if operation.resume { &[RunState::PostMigrate] } else { &[] };
            undo(&known.qmp, &gate, paused).context("let it run again, for it was not given away")?;
            mirror::clear(&Held::new(&*known.qmp)).context("end what was left of copying its disks")?;
            tracing::info!(vm = %name, "its move was cut off before it was given away, and it runs here");
        }
    }
    registry.end_operation(id, ImageThen::Gone);
    Ok(true)
}

fn go_on_as_source(registry: &Arc<Registry>, name: &str, note: Option<Note>, offered: Offered) -> Result<bool> {
    let qemu = vm::qemu_of(registry, name);
    let mut actions = Vec::new();
    let recovered = recover(registry.moves.me(), note, qemu, Moment::default(), &mut actions);
    if let Recovered::Source(owner) = recovered {
        source::go_on(registry, name, PublicKey(offered.peer.0), (*owner, actions))?;
    }
    Ok(true)
}

/// What has come of the pages that a VM lacks, of so many.
type Lacks = (Arc<Arrivals>, PageCount);

/// A VM that was accepted, and what it lacks. None: all is here.
fn lacking(registry: &Registry, name: &str) -> Option<(VmId, Option<Lacks>)> {
    let vms = registry.lock();
    let vm = vms.get(name)?;
    let lacks = vm.arrivals.clone().filter(|arrivals| !arrivals.is_whole());
    let pages = Bytes(vm.record.memory()).pages_floor();
    Some((vm.governed.id, lacks.map(|arrivals| (arrivals, pages))))
}

fn go_on_as_destination(
    registry: &Arc<Registry>,
    name: &str,
    (note, offered): (Option<Note>, Offered),
    known: Option<&Known>,
    lacks: bool,
) -> Result<bool> {
    // One that lacks pages is not asked: its answer may wait for them.
    let mut qemu = if lacks { Qemu::Stopped } else { vm::qemu_of(registry, name) };
    let has_run = known.is_some_and(|known| known.was_let_run || known.operation.is_none()) || qemu == Qemu::Running;
    if matches!(note, Some(Note::Accepted(..))) && has_run && qemu != Qemu::Dead {
        // Whoever has paused it since is its user.
        qemu = Qemu::Running;
        let id = registry.lock().get(name).map(|vm| vm.governed.id);
        if let Some(id) = id.filter(|_| known.is_some_and(|known| known.operation.is_some())) {
            registry.note_let_run(id);
            registry.end_operation(id, ImageThen::Gone);
        }
    }
    let mut actions = Vec::new();
    let now = Instant::now();
    let recovered = recover(registry.moves.me(), note, qemu, Moment(now.elapsed()), &mut actions);
    if let Recovered::Destination(owner) = recovered {
        let is_accepted = matches!(note, Some(Note::Accepted(..)));
        if owner.is_running()
            && let Err(error) = registry.moves.copies.keep(name)
        {
            // Its own note says the same.
            tracing::warn!(vm = %name, "note that its disks are its own: {}", in_full(error.as_ref()));
        }
        let claim = registry.moves.claims.claim(name).context("another move of it is under way")?;
        // No other VM gets the name of one that was accepted, as long as its note says so.
        let found = if is_accepted { lacking(registry, name) } else { None };
        let (made, lacks) = found.map_or((None, None), |(id, lacks)| (Some(id), lacks));
        let is_whole = is_accepted && lacks.is_none();
        let begun = destination::Begun { owner: *owner, actions, wanted: None, made, lacks, link: None, claim };
        let begun = destination::begin(registry, name, PublicKey(offered.peer.0), begun)?;
        if is_whole {
            let _ = begun.inputs.send(super::sessions::Input::Whole);
        }
    }
    Ok(true)
}
