//! A VM that comes: made, started, given its state, let run, and removed.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_api::in_full;
use pagoda_api::types::{ApiError, CreateVm, SnapshotLaunch, SnapshotQemu, VmKind};
use pagoda_core::bits::PageSet;
use pagoda_core::policy::VmId;
use pagoda_core::units::{Bytes, ChunkIdx};
use pagoda_image::ImageId;
use pagoda_move::arrival::Arrival;
use pagoda_move::map::PageMap;
use pagoda_move::owner::Qemu;
use pagoda_move::units::AttemptId;
use pagoda_pager::handle::Command;
use pagoda_pager::tier::source::Arrivals;

use super::exports::Exports;
use super::tail::Tail;
use crate::disks::check_all_open;
use crate::moves::channel::STREAMS;
use crate::moves::sessions::Arriving;
use crate::moves::specification::Specification;
use crate::moves::start;
use crate::moves::store::Store;
use crate::qmp::Held;
use crate::qmp::state::{self, RunState, run_state};
use crate::record::{Operation, OperationKind};
use crate::registry::operation::ImageThen;
use crate::registry::{Registry, Vm};
use crate::remote::{Dirs, handover};

/// How long QEMU may take from its start until it waits for its state.
const START_MAX: Duration = Duration::from_secs(30);
/// How long it may take to load its state. Its source gives up after as long.
const LOAD_MAX: Duration = Duration::from_secs(5);
/// How long it may take to end when it is told to. Then it is killed.
const QUIT_MAX: Duration = Duration::from_secs(3);
/// The pause between two looks whether QEMU has attached, or has ended.
const LOOK: Duration = Duration::from_millis(5);
/// The pause between two tries to let the guest run.
const RUN_AGAIN: Duration = Duration::from_millis(200);

/// What an attempt says of the VM it brings.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub name: String,
    pub attempt: AttemptId,
    pub specification: Specification,
}

impl Wanted {
    fn operation(&self) -> Operation {
        let image = ImageId(self.attempt.0.into());
        Operation { kind: OperationKind::Arrival, image, resume: self.specification.running }
    }

    /// What the program is told that starts its QEMU. Its disks are at the same paths here.
    fn launch_of(&self, registry: &Registry) -> SnapshotLaunch {
        let Specification { launch, spec, memory, qemu, .. } = self.specification.clone();
        SnapshotLaunch {
            program_version: registry.programs.version_of(Path::new(&launch.program)),
            launch,
            memory,
            spec,
            qemu: SnapshotQemu { version: qemu.version, machine: qemu.machine },
            shim: Some(registry.config.shim.clone()),
        }
    }

    /// Makes the VM, and starts its QEMU.
    ///
    /// # Errors
    /// Why not. What was made is there still, and is removed by [`discard`].
    pub fn prepare(&self, registry: &Arc<Registry>) -> Result<Arriving> {
        let Specification { launch, spec, memory, remote, disks, .. } = &self.specification;
        let files = match disks.is_empty() {
            true => Vec::new(),
            false => registry.moves.copies.make(&self.name, self.attempt, launch, disks)?,
        };
        if let Some(remote) = remote {
            handover::check(&Dirs::of(&registry.config), &self.name, remote)?;
        }
        let request = CreateVm {
            name: self.name.clone(),
            memory: memory.clone(),
            kind: VmKind::Qemu,
            spec: spec.clone(),
            launch: Some(launch.clone()),
            outbox: None,
        };
        let said = |error: ApiError| anyhow!("{}", error.message);
        let (created, pages) = registry.create_arriving(request, self.operation(), remote.clone()).map_err(said)?;
        let count = Bytes(memory.iter().sum()).pages_floor();
        let arrival = Arrival::new(self.attempt, count, STREAMS);
        let arrival = if remote.is_some() { arrival.with_remote_tier() } else { arrival };
        let store = Arc::new(Store::new(pages, arrival));
        let started = start::start(&registry.config, &created, &self.launch_of(registry))?;
        let deadline = Instant::now() + START_MAX;
        loop {
            let found = {
                let vms = registry.lock();
                let Some(vm) = vms.get(&self.name) else {
                    bail!(started.why_ended().unwrap_or_else(|| "its QEMU has ended while it started".to_owned()));
                };
                let ready = vm.handle.clone().filter(|_| vm.keeps_ram);
                ready.map(|handle| (vm.governed.id, handle, Arc::clone(&vm.qmp), vm.record.pid.0))
            };
            if let Some((id, handle, qmp, pid)) = found {
                let before = run_state(&qmp)?;
                ensure!(before == RunState::InMigrate, "its QEMU is {before}, and does not wait for its state");
                state::check_same(&self.specification.qemu, &state::machine(&qmp)?)?;
                state::leave_disks_alone(&qmp, true).context("have it leave its disks alone until it runs")?;
                let dir = registry.moves.notes().dir();
                let exports = match disks.is_empty() {
                    true => None,
                    false => {
                        // Whoever may write to the directory could have put another file in the place of one. Nothing may write to
                        // that: neither QEMU, which opens files again when it serves them, nor the source, whose streams come later.
                        check_all_open(pid, &files)?;
                        let exports = Exports::start(&qmp, &launch.cwd, disks, dir, self.attempt)?;
                        check_all_open(pid, &files)?;
                        Some(Arc::new(exports))
                    }
                };
                return Ok(Arriving { id, store, handle, exports, qmp });
            }
            if let Some(why) = started.why_ended() {
                bail!(why);
            }
            if Instant::now() > deadline {
                started.kill();
                bail!("its QEMU has not attached within {} s", START_MAX.as_secs());
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// The engine of a VM serves it from now on. `missing`: pages that are still at its source; `listener` hears when there is something to
/// be told the source of them.
///
/// # Errors
/// Its files cannot be brought in order: QEMU is good for nothing then.
pub fn serve(
    registry: &Registry,
    vm: &Arriving,
    attempt: AttemptId,
    missing: &PageMap,
    listener: impl Fn() + Send + Sync + 'static,
) -> Result<Option<Tail>> {
    let handed_over: Vec<_> = vm.store.arrival().remote().into_iter().flat_map(PageMap::filled).collect();
    let is_one = |(chunk, pages): &(ChunkIdx, PageSet)| !missing.chunk(*chunk).intersects(*pages);
    ensure!(handed_over.iter().all(is_one), "pages are said to be missing and to be in its remote tier");
    let elsewhere: Vec<_> = missing.filled().chain(handed_over.iter().copied()).collect();
    let mut found = vm.store.shut(&elsewhere).context("bring its pages in order")?;
    for (chunk, pages) in &handed_over {
        let located = &mut found[chunk.as_usize()];
        located.missing -= *pages;
        located.swap |= *pages;
    }
    let record = registry.find_by_id(vm.id, |vm| vm.record.clone()).context("its QEMU has ended")?;
    handover::set_pages(&record, handed_over)?;
    vm.handle.arrived(found).map_err(|why| anyhow!(why)).context("serve its pages")?;
    if missing.is_empty() {
        return Ok(None);
    }
    let arrivals = arrivals_of(registry, vm.id)?;
    registry.note_source_tier(vm.id)?;
    vm.store.begin_tail(Arc::clone(&arrivals));
    arrivals.set_listener(Some(Box::new(listener)));
    Tail::new(attempt, missing.pages(), &arrivals).map(Some)
}

/// Has QEMU load its state, in a thread: pages that it needs for that may have to come first.
///
/// # Errors
/// Nothing was begun.
pub fn load(
    registry: &Registry,
    vm: &Arriving,
    device_state: Vec<u8>,
    report: impl FnOnce(Result<(), String>) + Send + 'static,
) -> Result<()> {
    let gate = registry.gate_of(vm.id).context("its QEMU has ended")?;
    let (qmp, exports) = (Arc::clone(&vm.qmp), vm.exports.clone());
    let load = move || {
        // The source's QEMU has flushed its copies of them, before it saved this state.
        let ended = exports.map_or(Ok(()), |exports| exports.end(&qmp));
        if let Err(error) = ended {
            return report(Err(in_full(error.as_ref())));
        }
        let loaded = state::load(&Held::new(qmp), &gate, &mut &device_state[..], Instant::now() + LOAD_MAX);
        report(loaded.context("load its state").map_err(|error| in_full(error.as_ref())));
    };
    std::thread::Builder::new().name("load".into()).spawn(load).map(drop).context("start a thread")
}

/// What has come of the pages that a VM lacks here.
fn arrivals_of(registry: &Registry, id: VmId) -> Result<Arc<Arrivals>> {
    registry
        .find_by_id(id, |vm| vm.arrivals.clone())
        .context("its QEMU has ended")?
        .context("it has no tier of its source")
}

/// That a VM that is about to be accepted is there, with its state, and stands still.
///
/// # Errors
/// It is not, or nobody can tell.
pub fn check_loaded(registry: &Registry, vm: Option<&Arriving>) -> Result<()> {
    let vm = vm.context("it is not here")?;
    registry.find_by_id(vm.id, |_| ()).context("its QEMU has ended")?;
    let state = run_state(&vm.qmp)?;
    ensure!(state == RunState::Paused, "its QEMU is {state}");
    Ok(())
}

/// The guest runs, or stays paused as its user has left it. It is tried again for as long as the VM lives: it has the grant. A thread
/// does that: pages that QEMU needs first may have to come. `report` is called once: true when QEMU was told to run the guest, whatever
/// it has answered, and false if it had ended before.
pub fn run(registry: &Arc<Registry>, name: &str, report: impl FnOnce(bool) + Send + 'static) {
    let found = registry.lock().get(name).map(|vm| (vm.governed.id, Arc::clone(&vm.qmp), vm.record.operation));
    let Some((id, qmp, operation)) = found else { return report(false) };
    let resume = operation.is_some_and(|operation| operation.resume);
    let (registry, name) = (Arc::clone(registry), name.to_owned());
    let run = move || {
        let monitor = Held::new(Arc::clone(&qmp));
        let is_there = || registry.find_by_id(id, |_| ()).is_some();
        let mut complaint = Some(&name);
        let mut failed = |error: anyhow::Error| {
            if let Some(vm) = complaint.take() {
                tracing::error!(%vm, "let it run, tried again: {}", in_full(error.as_ref()));
            }
            std::thread::sleep(RUN_AGAIN);
        };
        // A QEMU that does not answer is told nothing: if it ends meanwhile, the guest has certainly not run.
        while let Err(error) = run_state(&monitor) {
            if !is_there() {
                return report(false);
            }
            failed(error);
        }
        own_tier(&registry, id);
        let mut report = Some(report);
        loop {
            let told = if resume { monitor.execute("cont").map(drop) } else { Ok(()) };
            tracing::debug!(vm = %name, "pause: its QEMU was told to let it run");
            if let Some(report) = report.take() {
                report(true);
            }
            match told {
                Ok(()) => break,
                Err(_) if !is_there() => return,
                Err(error) => failed(error),
            }
        }
        registry.note_let_run(id);
        // One that its user has paused takes its disks when it runs.
        if resume && let Err(error) = state::leave_disks_alone(&monitor, false) {
            let error = in_full(error.as_ref());
            tracing::warn!(vm = %name, "its QEMU stays set up for a load, and refuses snapshots: {error}");
        }
        registry.end_operation(id, ImageThen::Gone);
        tracing::info!(vm = %name, "has come from another host");
    };
    if let Err(error) = std::thread::Builder::new().name("run".into()).spawn(run) {
        tracing::error!("let a VM run: {error}; the next daemon does");
    }
}

/// The VM is this host's, and so is its remote tier. It is not waited for.
fn own_tier(registry: &Registry, id: VmId) {
    let found = registry.find_by_id(id, |vm| (vm.record.clone(), vm.handle.clone()));
    if let Some((record, Some(engine))) = found {
        handover::own(&Dirs::of(&registry.config), &record, move || engine.send(Command::Refresh));
    }
}

/// Ends a VM that has not run here, or that another host owns, and waits until nothing is left of it. Another one of its name is not
/// this one.
/// `id`: the VM of the attempt, if it is known. Its record may say nothing of the attempt any more.
pub fn discard(registry: &Arc<Registry>, name: &str, attempt: AttemptId, id: Option<VmId>) {
    let begun = Instant::now();
    let mut told = false;
    loop {
        let found = {
            let vms = registry.lock();
            let of_attempt = |operation: &Operation| operation.kind.is_move() && operation.image.0 == attempt.0.into();
            let is_its = |vm: &Vm| Some(vm.governed.id) == id || vm.record.operation.as_ref().is_some_and(of_attempt);
            let vm = vms.get(name).filter(|vm| is_its(vm));
            vm.map(|vm| (vm.handle.is_some(), Arc::clone(&vm.qmp), vm.record.pid))
        };
        let Some((is_attached, qmp, (pid, since))) = found else { return };
        match is_attached {
            // A QEMU that gets a command while it ends may hang.
            true if !told => {
                told = true;
                // It may close the monitor before it answers.
                let _ = qmp.execute("quit");
            }
            true if begun.elapsed() > QUIT_MAX => start::kill(pid, since),
            true => {}
            // Refused while a process has its memory, which attaches next or ends.
            false => drop(registry.delete(name)),
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether the VM's guest runs, stands still, or is not here.
pub fn qemu_of(registry: &Registry, name: &str) -> Qemu {
    let qmp = registry.lock().get(name).map(|vm| Arc::clone(&vm.qmp));
    match qmp.map(|qmp| run_state(&qmp)) {
        None => Qemu::Dead,
        Some(Ok(RunState::Running)) => Qemu::Running,
        // Who does not answer is not known to run, and is asked to by nobody but the machine.
        Some(_) => Qemu::Stopped,
    }
}
