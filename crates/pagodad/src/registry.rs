//! The VMs of this daemon: who exists, what each was promised, how it is reached.
//!
//! Owns the records ([`crate::record::store`]), the swap directory (one file a VM) and a handle for each engine. The lock is
//! held for bookkeeping, never while an engine or a monitor is waited for, and not while a VM's files are made ([`create`]) or
//! its record is written ([`change`]).
//!
//! Order of locks: a VM's writing lock ([`change`]), the registry's (`vms`), `making`, the policy's
//! ([`crate::policy::Governor`]).

mod admission;
mod balloons;
mod change;
mod create;
mod describe;
mod groups;
mod life;
mod sampling;
mod writing;

use create::{Absent, Making};
pub use groups::sharing_of;
use writing::WritingLock;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use anyhow::Context;
use pagoda_abi::Token;
use pagoda_api::types::{ApiError, ErrorCode, VmInfo, VmKind, VmPatch, vm_file_name};
use pagoda_api::{in_full, with_advice};
use pagoda_core::policy::VmId;
use pagoda_core::units::{Bytes, PageCount};
use pagoda_pager::handle::{Command, Handle, Notice};
use pagoda_pager::share::Group;
use pagoda_sys::ram::RamFile;
use pagoda_sys::socket::Peer;
use pagoda_sys::swapfile::SwapFile;

use crate::config::Config;
use crate::parts::Parts;
use crate::policy::Governor;
use crate::policy::rounds::{Governed, caps_of};
use crate::qmp::Monitor;
use crate::record::Record;
use crate::record::store::RecordStore;
use crate::{balloon, remote};

/// VMs of one daemon: each has a thread, a ring and some twenty file descriptors.
pub const VMS_MAX: usize = 1024;

/// A process of a VM that is not attached yet.
#[derive(Debug, Clone, Copy)]
pub struct Starter {
    pub pid: u32,
    pub uid: u32,
    /// When it started; `None` if /proc did not say.
    pub start: Option<u64>,
}

impl Starter {
    pub fn of(peer: Peer) -> Self {
        Self { pid: peer.pid, uid: peer.uid, start: pagoda_sys::process::start_time(peer.pid).ok() }
    }

    /// Whether it is a fact that it has ended.
    pub fn has_ended(&self, vm: &str) -> bool {
        self.start.is_some_and(|start| life::has_ended(vm, self.pid, start))
    }
}

/// A VM's RAM is in a process.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    pub by: Starter,
    pub at: Instant,
}

/// A VM.
#[derive(Debug)]
pub struct Vm {
    /// What is on the disk, except for a pin that could not be written. Only [`Registry::change`] changes it.
    pub record: Record,
    writing: WritingLock,
    /// Its engine, once a VMM attached to this daemon.
    pub handle: Option<Arc<Handle>>,
    /// Made at creation, given to the VMM and the engine.
    pub ram: Vec<RamFile>,
    pub swap: Option<SwapFile>,
    /// Device and inode of each RAM file, once attached.
    pub inodes: Vec<(u64, u64)>,
    /// QEMU's monitor socket, until `pagoda run` fetches it.
    pub monitor: Option<OwnedFd>,
    pub created: Instant,
    /// The `pagoda run` that becomes its program.
    pub started_by: Option<Starter>,
    /// The process that has its RAM; it attaches next.
    pub taken: Option<Taken>,
    /// Why its agent was refused last: it waits until that is put right.
    pub refused: Option<String>,
    /// What the engine said when it stalled.
    pub stalled: Option<(String, Instant)>,
    pub accelerator: Option<String>,
    /// QEMU's monitor.
    pub qmp: Arc<Monitor>,
    /// Since it first had a target.
    pub balloon: Option<balloon::Handle>,
    /// A thread writes down that it has one.
    is_balloon_noted: Arc<AtomicBool>,
    /// With whom it shares equal pages; `None` for a VM whose shim cannot keep what that needs.
    pub group: Option<Arc<Group>>,
    /// Its table of shared pages, until it is attached.
    pub table: Option<RamFile>,
    /// What the memory policy remembers of it.
    pub governed: Governed,
}

impl Vm {
    /// A VM that no program is attached to, with nothing of its own yet but its record and a place in the policy.
    fn new(record: Record, id: VmId, qmp: Monitor, group: Option<Arc<Group>>) -> Vm {
        Vm {
            record,
            writing: WritingLock::default(),
            handle: None,
            ram: Vec::new(),
            swap: None,
            inodes: Vec::new(),
            monitor: None,
            created: Instant::now(),
            started_by: None,
            taken: None,
            refused: None,
            stalled: None,
            accelerator: None,
            qmp: Arc::new(qmp),
            balloon: None,
            is_balloon_noted: Arc::default(),
            governed: Governed::new(id),
            group,
            table: None,
        }
    }

    /// The limit that its engine is to enforce: the least of its user's, what stands in for its balloon, and the policy's.
    pub fn limit(&self) -> PageCount {
        self.governed.round.engine_limit(&caps_of(self))
    }
}

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

/// See the module.
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
    pub parts: Parts,
    vms: Mutex<BTreeMap<String, Vm>>,
    /// VMs that are being made or removed. Its lock is taken after that of `vms`.
    making: Mutex<Making>,
    /// Share groups with a name, as long as one of their VMs is there.
    groups: Mutex<BTreeMap<String, Weak<Group>>>,
    notices: Sender<(Token, Notice)>,
}

pub fn error(code: ErrorCode, message: impl Into<String>, hint: Option<&str>) -> ApiError {
    ApiError { code, message: message.into(), hint: hint.map(str::to_owned) }
}

fn internal(what: &str, cause: impl std::fmt::Display) -> ApiError {
    error(ErrorCode::Internal, with_advice(format!("{what}: {cause}")), None)
}

impl Registry {
    /// # Errors
    /// What is configured of the memory policy cannot be used.
    pub fn new(config: Config, host: HostFacts, notices: Sender<(Token, Notice)>) -> anyhow::Result<Registry> {
        let HostFacts { direct, protect, permission, limits } = host;
        let governor = Governor::new(config.policy.clone())?;
        let (vms, making, groups) = (Mutex::default(), Mutex::default(), Mutex::default());
        let parts = Parts::default();
        if !limits.is_empty() {
            parts.failed("limits", &limits.join("; "));
        }
        let records = RecordStore::new(config.state_dir.join("vms"));
        Ok(Registry { config, records, direct, protect, permission, governor, parts, vms, making, groups, notices })
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
        self.config.state_dir.join("vms").join(vm_file_name(name) + ".far")
    }

    pub fn monitor_path(&self, name: &str) -> PathBuf {
        self.config.state_dir.join("vms").join(vm_file_name(name) + ".qmp")
    }

    /// Changes settings; they take effect at once.
    ///
    /// # Errors
    /// No such VM; a cap or a balloon target that does not fit it; the disk's. Then nothing is changed.
    pub fn patch(self: &Arc<Self>, name: &str, patch: &VmPatch) -> Result<VmInfo, ApiError> {
        let id = self.id_of(name)?;
        let plan = |vms: &BTreeMap<String, Vm>, vm: &Vm| {
            let record = patched(&vm.record, patch)?;
            // The policy refuses before anything is changed.
            self.propose(vms, id, &record)?;
            Ok(record)
        };
        let commit = |vm: &mut Vm, written: anyhow::Result<()>| {
            if let Err(cause) = written {
                self.withdraw(id);
                return Err(internal("write the VM's record", in_full(cause.as_ref())));
            }
            self.accept(vm);
            self.send_limit(vm);
            if patch.balloon_target.is_some() {
                self.drive_balloon(vm).map_err(|e| internal("drive the VM's balloon", in_full(e.as_ref())))?;
            }
            Ok(())
        };
        self.change(id, plan, commit).ok_or_else(|| no_such_vm(name))??;
        self.governor.doorbell.ring();
        self.get(name)
    }

    /// The number of the VM that has this name now.
    fn id_of(&self, name: &str) -> Result<VmId, ApiError> {
        let id = self.lock().get(name).map(|vm| vm.governed.id);
        id.ok_or_else(|| self.missing(name))
    }

    /// That there is no VM of this name. Of one that has just ended it is said when its files are gone: then they may be made
    /// anew. The caller holds no lock.
    fn missing(&self, name: &str) -> ApiError {
        self.wait_until_removed(name);
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

    /// Does something with the VM of this number, if it is still there.
    pub fn find_by_id<T>(&self, id: VmId, act: impl FnOnce(&mut Vm) -> T) -> Option<T> {
        self.lock().values_mut().find(|vm| vm.governed.id == id).map(act)
    }

    /// Takes a VM out, its files excepted. The caller has its writing lock, and drops the VM without the registry's: what it
    /// holds may be the last descriptor of gigabytes.
    fn remove(&self, vms: &mut BTreeMap<String, Vm>, id: VmId) -> Option<Vm> {
        let name = vms.values().find(|vm| vm.governed.id == id).map(|vm| vm.record.name.clone());
        let vm = vms.remove(&name?)?;
        vm.leave_group();
        self.governor.lock().rounds.remove(id);
        self.governor.doorbell.ring();
        Some(vm)
    }

    /// Ends a VM that no engine serves, with its files. The disk decides how long it takes to remove a swap file, and a policy
    /// round needs the registry: so the files are removed without its lock, and the VM's name is taken until they are gone.
    /// The caller has the VM's writing lock.
    fn end(&self, mut vms: MutexGuard<'_, BTreeMap<String, Vm>>, id: VmId, record: &Record) {
        let Some(vm) = self.remove(&mut vms, id) else { return };
        self.making().insert(record.name.clone(), Absent { id, removal: Some(Arc::clone(&vm.writing)) });
        drop(vms);
        self.forget(record);
        drop(vm);
        self.making().remove(&record.name);
    }

    /// The cause of a stall is gone: tries again what failed, and lets the VM run.
    ///
    /// # Errors
    /// No such VM; one that is not stalled.
    pub fn cont(&self, name: &str) -> Result<VmInfo, ApiError> {
        let mut vms = self.lock();
        let vm = vms.get_mut(name).ok_or_else(|| no_such_vm(name))?;
        let Some(handle) = vm.handle.clone() else {
            return Err(error(ErrorCode::WrongState, format!("{name} is not attached"), None));
        };
        if vm.record.blocked && vm.stalled.is_none() {
            let hint = "it runs again as soon as memory is found: see `pagoda vm explain`";
            return Err(error(
                ErrorCode::WrongState,
                format!("{name} is blocked by the memory policy, not stalled"),
                Some(hint),
            ));
        }
        let stalled = vm.stalled.take();
        let (kind, qmp) = (vm.record.kind, Arc::clone(&vm.qmp));
        let is_blocked = vm.record.blocked;
        drop(vms);
        // A stall that an earlier daemon saw is only known to QEMU, as the pause it led to.
        let paused = kind == VmKind::Qemu && qmp.is_paused();
        if stalled.is_none() && handle.status().stalled.is_none() && !paused {
            return Err(error(
                ErrorCode::WrongState,
                format!("{name} is not stalled, so there is nothing to continue"),
                None,
            ));
        }
        handle.send(Command::Continue);
        // One that is blocked as well runs when it is released.
        if kind == VmKind::Qemu && !is_blocked {
            qmp.execute("cont").map_err(|e| internal("continue the VM", in_full(e.as_ref())))?;
        }
        self.get(name)
    }

    /// Gives up a VM that no program attached to.
    ///
    /// # Errors
    /// No such VM; one that runs.
    pub fn delete(&self, name: &str) -> Result<(), ApiError> {
        let id = self.id_of(name)?;
        let end = || {
            let vms = self.lock();
            let vm = vms.get(name).filter(|vm| vm.governed.id == id).ok_or_else(|| no_such_vm(name))?;
            if vm.record.pid.0 != 0 {
                let hint = "stop its program instead; it is forgotten when that ends";
                return Err(error(ErrorCode::WrongState, format!("{name} is attached"), Some(hint)));
            }
            if let Some(by) = vm.taken.map(|taken| taken.by).filter(|by| !by.has_ended(name)) {
                let hint = "it attaches within seconds or ends; then try again";
                let problem = format!("process {} has the memory of {name}", by.pid);
                return Err(error(ErrorCode::WrongState, problem, Some(hint)));
            }
            let record = vm.record.clone();
            self.end(vms, id, &record);
            Ok(())
        };
        self.while_writing(id, end).ok_or_else(|| no_such_vm(name))?
    }

    /// Removes a VM's files, and has what it borrowed given back. Its memory goes with the last descriptor. The caller has the
    /// VM's writing lock, or nobody else knows the VM.
    fn forget(&self, record: &Record) {
        let name = &record.name;
        // Its record is a pending release from now on.
        remote::end_of(self, record);
        if let Err(error) = self.records.remove(name) {
            tracing::warn!("remove {}: {error}", self.records.path(name).display());
        }
        let compressed = record.compressed.as_ref().map(|tier| tier.files(name));
        let own = [self.swap_path(name), self.remote_path(name), self.monitor_path(name)];
        for path in own.into_iter().chain(compressed.into_iter().flatten()) {
            if let Err(error) = std::fs::remove_file(&path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!("remove {}: {error}", path.display());
            }
        }
    }
}

/// A VM's record with other settings.
fn patched(record: &Record, patch: &VmPatch) -> Result<Record, ApiError> {
    let spec = patch.applied_to(&record.spec, record.memory());
    let spec = spec.map_err(|text| error(ErrorCode::BadRequest, text, None))?;
    if patch.balloon_target.is_some() && record.kind == VmKind::Plain {
        let hint = "page it out instead: pagoda vm set --dram";
        let problem = format!("{} is no QEMU and has no balloon", record.name);
        return Err(error(ErrorCode::WrongState, problem, Some(hint)));
    }
    Ok(Record { spec, ..record.clone() })
}

pub fn no_such_vm(name: &str) -> ApiError {
    error(ErrorCode::NoSuchVm, format!("there is no VM named {name}"), Some("see `pagoda ls`"))
}

/// A VM's cap in pages, rounded down so that it is kept: that of its user, or what stands in for its balloon.
pub fn limit_of(record: &Record) -> PageCount {
    let bytes = record.paged_out_to().map_or(record.dram(), |target| record.dram().min(target));
    Bytes(bytes).pages_floor()
}

/// A listening Unix socket for its owner alone: the directory it is in is.
fn listen(path: &Path) -> anyhow::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => std::os::unix::net::UnixListener::bind(path),
    }
    .map(Into::into)
    .with_context(|| path.display().to_string())
}
