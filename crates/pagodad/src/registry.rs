//! The VMs of this daemon: who exists, what each was promised, how it is reached.
//!
//! Owns the records ([`crate::record::store`]), the swap directory (one file a VM) and a handle for each engine. The lock is
//! held for bookkeeping, never while an engine or a monitor is waited for, and not while a VM's files are made ([`create`]) or
//! its record is written ([`change`]).
//!
//! Order of locks: a VM's writing lock ([`change`]), the registry's (`vms`), `making`, the policy's
//! ([`crate::policy::Governor`]).

mod admission;
mod arriving;
mod balloons;
mod change;
mod create;
mod describe;
mod disks;
mod draining;
mod end;
mod groups;
mod life;
mod making;
pub mod operation;
mod outboxes;
mod patch;
mod process;
mod reading;
mod sampling;
mod shim_gate;
pub mod templates;
mod vm;
mod writing;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pagoda_abi::Token;
use pagoda_api::types::{ApiError, ErrorCode, vm_file_name};
use pagoda_api::with_advice;
use pagoda_core::policy::VmId;
use pagoda_pager::handle::{Command, Notice};
use pagoda_pager::share::Group;

use self::draining::Draining;
use self::making::Making;
pub use self::process::{Starter, Taken, has_ended};
pub use self::vm::Vm;
use crate::config::Config;
use crate::crashes::Crashes;
use crate::disks::{LayerSizes, Unsettled};
use crate::images::Images;
use crate::moves::Moves;
use crate::outboxes::Outboxes;
use crate::parts::Parts;
use crate::policy::{Governor, settings};
use crate::programs::Programs;
use crate::record::store::RecordStore;
use crate::timetables::Timetables;

/// What the start-up self-test found.
#[derive(Debug)]
pub struct HostFacts {
    /// Large folios for whole chunks are to be had.
    pub direct: bool,
    /// The kernel maps pages write-protected when asked to.
    pub protect: bool,
    /// How this daemon may use userfaultfd.
    pub permission: String,
    /// What limits this process and should not.
    pub limits: Vec<String>,
}

/// All VMs of this daemon, and what they have in common.
#[derive(Debug)]
pub struct Registry {
    pub config: Config,
    pub records: RecordStore,
    /// Large folios for whole chunks are to be had.
    pub direct: bool,
    /// The kernel maps pages write-protected when asked to.
    pub protect: bool,
    /// How this daemon may use userfaultfd.
    pub permission: String,
    /// Decides who has how much memory.
    pub governor: Governor,
    /// What does not work and is not needed for paging.
    pub parts: Arc<Parts>,
    pub images: Images,
    /// VMs that move between hosts.
    pub moves: Moves,
    /// VMs that have crashed.
    pub crashes: Crashes,
    /// Versions of QEMU programs.
    pub programs: Programs,
    pub draining: Draining,
    pub outboxes: Outboxes,
    /// VMs of which snapshots are taken by themselves.
    pub timetables: Timetables,
    vms: Mutex<BTreeMap<String, Vm>>,
    /// VMs that are being made or removed.
    making: Making,
    /// VMs that have ended, and whose disks do not have their names yet.
    unsettled: Unsettled,
    pub layer_sizes: Arc<LayerSizes>,
    /// Held while a VM is made of a snapshot, from when its disks are looked at until the VM is known.
    pub restoring: Mutex<()>,
    /// Share groups with a name, as long as one of their VMs is there.
    groups: Mutex<BTreeMap<String, Weak<Group>>>,
    notices: Sender<(Token, Notice)>,
}

impl Registry {
    /// # Errors
    /// What is configured of the memory policy cannot be used.
    pub fn new(config: Config, host: HostFacts, notices: Sender<(Token, Notice)>) -> anyhow::Result<Registry> {
        let HostFacts { direct, protect, permission, limits } = host;
        let governor = Governor::new(config.policy.clone())?;
        let (vms, making, groups) = (Mutex::default(), Making::default(), Mutex::default());
        let parts = Arc::new(Parts::default());
        if !limits.is_empty() {
            parts.failed("limits", &limits.join("; "));
        }
        let records = RecordStore::new(config.state_dir.join("vms"));
        let crashes = Crashes::new(config.state_dir.join("vms"));
        let images = Images::new(config.snapshots.clone(), Arc::clone(&parts));
        let outboxes = Outboxes::new(&config.state_dir, config.outbox_period);
        let moves = Moves::new(&config.state_dir, &config.hosts.dir);
        Ok(Registry {
            config,
            records,
            direct,
            protect,
            permission,
            governor,
            parts,
            images,
            moves,
            crashes,
            programs: Programs::default(),
            draining: Draining::default(),
            outboxes,
            timetables: Timetables::default(),
            vms,
            making,
            unsettled: Unsettled::default(),
            layer_sizes: Arc::default(),
            restoring: Mutex::default(),
            groups,
            notices,
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Vm>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an engine's notices go.
    pub fn notices(&self) -> Sender<(Token, Notice)> {
        self.notices.clone()
    }

    pub fn swap_path(&self, name: &str) -> PathBuf {
        self.config.swap_dir.join(vm_file_name(name) + ".swap")
    }

    /// Which pages of the VM are in remote memory; its engine's file.
    pub fn remote_path(&self, name: &str) -> PathBuf {
        self.records_dir().join(vm_file_name(name) + ".far")
    }

    /// Which pages of the VM are in the image that it was made of; its engine's file.
    pub fn image_map_path(&self, name: &str) -> PathBuf {
        self.records_dir().join(vm_file_name(name) + ".image")
    }

    /// Where each VM's record is, and small files beside it.
    pub fn records_dir(&self) -> PathBuf {
        self.config.state_dir.join("vms")
    }

    pub fn monitor_path(&self, name: &str) -> PathBuf {
        self.records_dir().join(vm_file_name(name) + ".qmp")
    }

    /// The number of the VM that has this name now.
    fn id_of(&self, name: &str) -> Result<VmId, ApiError> {
        let id = self.lock().get(name).map(|vm| vm.governed.id);
        id.ok_or_else(|| self.missing(name))
    }

    /// That there is no VM of this name. Of one that has just ended it is said when its files are gone: then they may be made
    /// anew. The caller holds no lock.
    fn missing(&self, name: &str) -> ApiError {
        self.making.wait_until_removed(name);
        no_such_vm(name)
    }

    /// Sends a VM's engine its limit, unless it has that already.
    pub fn send_limit(&self, vm: &mut Vm) {
        let limit = vm.limit();
        if let Some(handle) = vm.handle.as_ref().filter(|_| limit != vm.governed.round.sent()) {
            handle.send(Command::SetLimit(limit));
            vm.governed.round.limit_sent(limit);
        }
    }

    /// Tells a VM's engine what the VM is guaranteed.
    pub fn send_min(&self, vm: &Vm) {
        if let Some(handle) = &vm.handle {
            handle.send(Command::SetMin(settings::caps_of(&vm.record).min));
        }
    }

    /// Does something with the VM of this number, if it is still there.
    pub fn find_by_id<T>(&self, id: VmId, act: impl FnOnce(&mut Vm) -> T) -> Option<T> {
        self.lock().values_mut().find(|vm| vm.governed.id == id).map(act)
    }

    /// The number of the VM with this token.
    pub fn id_by(&self, token: Token) -> Option<VmId> {
        self.lock().values().find(|vm| vm.record.token == token).map(|vm| vm.governed.id)
    }
}

fn no_such_vm(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NoSuchVm, format!("there is no VM named {name}"), Some("see `pagoda ls`"))
}

fn internal(what: &str, cause: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, with_advice(format!("{what}: {cause}")), None)
}

#[cfg(test)]
pub mod tests;
