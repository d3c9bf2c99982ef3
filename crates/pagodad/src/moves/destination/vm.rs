//! A VM that comes: made, started, given its state, let run, and removed.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_api::in_full;
use pagoda_api::types::{ApiError, CreateVm, SnapshotLaunch, SnapshotQemu, VmKind};
use pagoda_core::policy::VmId;
use pagoda_core::units::Bytes;
use pagoda_image::ImageId;
use pagoda_move::arrival::Arrival;
use pagoda_move::owner::Qemu;
use pagoda_move::units::AttemptId;

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

/// How long QEMU may take from its start until it waits for its state.
const START_MAX: Duration = Duration::from_secs(30);
/// How long it may take to load its state. Its source gives up after as long.
const LOAD_MAX: Duration = Duration::from_secs(5);
/// How long it may take to end when it is told to. Then it is killed.
const QUIT_MAX: Duration = Duration::from_secs(3);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(5);
/// Between two tries to let the guest run.
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
        let Specification { launch, spec, memory, .. } = &self.specification;
        let request = CreateVm {
            name: self.name.clone(),
            memory: memory.clone(),
            kind: VmKind::Qemu,
            spec: spec.clone(),
            launch: Some(launch.clone()),
        };
        let said = |error: ApiError| anyhow!("{}", error.message);
        let (created, pages) = registry.create_arriving(request, self.operation()).map_err(said)?;
        let count = Bytes(memory.iter().sum()).pages_floor();
        let store = Arc::new(Store::new(pages, Arrival::new(self.attempt, count, STREAMS)));
        let started = start::start(&registry.config, &created, &self.launch_of(registry))?;
        let deadline = Instant::now() + START_MAX;
        loop {
            let found = {
                let vms = registry.lock();
                let Some(vm) = vms.get(&self.name) else {
                    bail!(started.why_ended().unwrap_or_else(|| "its QEMU has ended while it started".to_owned()));
                };
                let ready = vm.handle.clone().filter(|_| vm.keeps_ram);
                ready.map(|handle| (vm.governed.id, handle, Arc::clone(&vm.qmp)))
            };
            if let Some((id, handle, qmp)) = found {
                let before = run_state(&qmp)?;
                ensure!(before == RunState::InMigrate, "its QEMU is {before}, and does not wait for its state");
                let machine = state::machine(&qmp)?.machine;
                let needed = &self.specification.qemu.machine;
                ensure!(machine == *needed, "its QEMU has the machine {machine}, and its state is of {needed}");
                state::leave_disks_alone(&qmp, true).context("have it leave its disks alone until it runs")?;
                return Ok(Arriving { id, store, handle, qmp });
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

/// Nothing more comes of a VM: its engine serves it from now on, and QEMU has its state.
///
/// # Errors
/// QEMU is good for nothing then.
pub fn load(registry: &Registry, vm: &Arriving, device_state: &[u8]) -> Result<()> {
    let found = vm.store.shut().context("bring its pages in order")?;
    vm.handle.arrived(found).map_err(|why| anyhow!(why)).context("serve its pages")?;
    let gate = registry.gate_of(vm.id).context("its QEMU has ended")?;
    let qmp = Held::new(Arc::clone(&vm.qmp));
    state::load(&qmp, &gate, &mut &device_state[..], Instant::now() + LOAD_MAX).context("load its state")
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

/// The guest runs, or stays paused as its user has left it. It is tried again for as long as the VM lives: it has the grant.
pub fn run(registry: &Arc<Registry>, name: &str) {
    let found = registry.lock().get(name).map(|vm| (vm.governed.id, Arc::clone(&vm.qmp), vm.record.operation));
    let Some((id, qmp, operation)) = found else { return };
    let resume = operation.is_some_and(|operation| operation.resume);
    let (registry, name) = (Arc::clone(registry), name.to_owned());
    let let_run = move |tries: u32| match if resume { qmp.execute("cont").map(drop) } else { Ok(()) } {
        Ok(()) => {
            registry.note_let_run(id);
            if let Err(error) = state::leave_disks_alone(&qmp, false) {
                let error = in_full(error.as_ref());
                tracing::warn!(vm = %name, "its QEMU stays set up for a load, and refuses snapshots: {error}");
            }
            registry.end_operation(id, ImageThen::Gone);
            tracing::info!(vm = %name, "has come from another host");
            true
        }
        Err(error) => {
            if tries == 0 {
                tracing::error!(vm = %name, "let it run, tried again: {}", in_full(error.as_ref()));
            }
            registry.find_by_id(id, |_| ()).is_none()
        }
    };
    if let_run(0) {
        return;
    }
    let again = move || {
        for tries in 1.. {
            std::thread::sleep(RUN_AGAIN);
            if let_run(tries) {
                return;
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("run".into()).spawn(again) {
        tracing::error!("let a VM run: {error}; the next daemon does");
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

/// How QEMU is.
pub fn qemu_of(registry: &Registry, name: &str) -> Qemu {
    let qmp = registry.lock().get(name).map(|vm| Arc::clone(&vm.qmp));
    match qmp.map(|qmp| run_state(&qmp)) {
        None => Qemu::Dead,
        Some(Ok(RunState::Running)) => Qemu::Running,
        // Who does not answer is not known to run, and is asked to by nobody but the machine.
        Some(_) => Qemu::Stopped,
    }
}
