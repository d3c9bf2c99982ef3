//! VMs between their beginning and their end: found again after a restart, stalled, continued, pinned, let go.

use pagoda_api::{in_full, with_advice};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_abi::Token;
use pagoda_api::types::{ApiError, Crash, ErrorCode, VmInfo, VmKind, VmSpec};
use pagoda_core::policy::VmId;
use pagoda_move::note::Note;
use pagoda_pager::handle::Command;

use super::operation::refuse_meanwhile;
use super::process::has_ended;
use super::{Registry, Vm, internal, no_such_vm};
use crate::images::source;
use crate::qmp::Monitor;
use crate::qmp::state::{self, PauseKind, pause_of};
use crate::record::Record;
use crate::remote::{self, Dirs};

/// The look for other mappers, in health.
const STRANGERS: &str = "other mappers";
/// How long engines may take to let go when the daemon ends: their I/O in flight, at a slow disk's pace.
const DETACH_WAIT: Duration = Duration::from_secs(10);

impl Registry {
    /// Reads the records of VMs that a previous daemon served. Those whose process still runs wait for its agent.
    pub fn load(&self) -> std::io::Result<()> {
        let dirs = Dirs::of(&self.config);
        let pending = remote::pending_of_before(&dirs);
        source::clean(&self.records_dir());
        remove_monitors_of_nobody(&self.records_dir());
        let mut unknown = Vec::new();
        for (path, record) in self.records.list()? {
            match record {
                Ok(record) => self.find_again(record),
                Err(error) => {
                    tracing::error!("{}: {error}; it is left alone", path.display());
                    unknown.push(path.display().to_string());
                }
            }
        }
        self.say_what_is_short();
        if unknown.is_empty() {
            let vms: Vec<Record> = self.lock().values().map(|vm| vm.record.clone()).collect();
            self.images.set_held(vms.iter().filter_map(|vm| vm.image).collect());
            remote::give_back_of_before(&dirs, &pending, &vms);
        } else {
            self.images.readers().set_unknown(unknown);
            self.never_settle();
            // One of them may be that of a VM that could not be read.
            pending.iter().for_each(|debtor| tracing::warn!(vm = %debtor.name, "its pending release is left alone"));
        }
        Ok(())
    }

    pub fn find_again(&self, record: Record) {
        let name = record.name.clone();
        let (pid, start) = record.pid;
        if record.ended {
            return self.unsettled.insert(record);
        }
        if pid != 0 && has_ended(&name, pid, start) {
            tracing::info!(vm = %name, "its process ended while no daemon ran");
            // One that was given away is the other host's, where it runs.
            if !self.was_given_away(&record) {
                self.crashes.note(&record, Crash::Unseen);
            }
            return self.forget(&record);
        }
        tracing::info!(vm = %name, pid, "waits for the agent in its process");
        let qmp = Monitor::new(&self.monitor_path(&name));
        let id = {
            let mut policy = self.governor.lock();
            let id = policy.new_id();
            policy.readmit(id, &record);
            id
        };
        let group = self.old_group(&record);
        let is_cut_off = record.operation.is_some();
        // Before anybody can ask for an image to be removed.
        let reading = record.reads.and_then(|image| self.images.readers().begin(image, &name));
        let vm = Vm { is_cut_off, reading, ..Vm::new(record, id, qmp, group) };
        self.lock().insert(name, vm);
    }

    /// A VM has to be stopped, and why.
    pub fn stall(&self, id: VmId, reason: String) {
        let mut vms = self.lock();
        let Some(vm) = vms.values_mut().find(|vm| vm.governed.id == id) else { return };
        vm.stalled = Some((with_advice(reason), Instant::now()));
        if vm.record.kind == VmKind::Qemu {
            let qmp = Arc::clone(&vm.qmp);
            // QEMU answers when its vCPUs stand still, which may take until a fault is answered: nobody waits for it here.
            let stop = move || {
                if let Err(error) = qmp.execute("stop") {
                    tracing::warn!("stop a stalled VM: {error}", error = in_full(error.as_ref()));
                }
            };
            let _ = std::thread::Builder::new().name("qmp-stop".into()).spawn(stop);
        }
    }

    /// The cause of a stall is gone: tries again what failed, and lets the VM run. So does a VM that its user has paused.
    ///
    /// # Errors
    /// No such VM; one that is neither stalled nor paused; an operation on it.
    pub fn cont(&self, name: &str) -> Result<VmInfo, ApiError> {
        let id = self.id_of(name)?;
        // An operation begins with a record that is written. So none begins between the look for one and QEMU's answer.
        self.while_writing(id, || self.let_run(id, name)).unwrap_or_else(|| Err(no_such_vm(name)))?;
        self.get(name)
    }

    /// The caller has the VM's writing lock.
    fn let_run(&self, id: VmId, name: &str) -> Result<(), ApiError> {
        let wrong = |problem: String, hint: Option<&str>| Err(ApiError::new(ErrorCode::WrongState, problem, hint));
        let found = self.find_by_id(id, |vm| {
            refuse_meanwhile(&vm.record)?;
            let facts = (vm.stalled.is_some(), vm.record.kind, vm.record.blocked, Arc::clone(&vm.qmp));
            Ok((vm.handle.clone(), facts))
        });
        let (handle, (is_stalled, kind, is_blocked, qmp)) = found.unwrap_or_else(|| Err(no_such_vm(name)))?;
        let Some(handle) = handle else { return wrong(format!("{name} is not attached"), None) };
        if is_blocked && !is_stalled {
            let hint = "it runs again as soon as memory is found: see `pagoda vm explain`";
            return wrong(format!("{name} is blocked by the memory policy, not stalled"), Some(hint));
        }
        // A stall that an earlier daemon saw is only known to QEMU, as the pause it led to.
        let pause = if kind == VmKind::Qemu { pause_of(&qmp).unwrap_or(PauseKind::None) } else { PauseKind::None };
        if !is_stalled && handle.status().stalled.is_none() && pause == PauseKind::None {
            return wrong(format!("{name} is neither stalled nor paused, so there is nothing to continue"), None);
        }
        self.check_runs_here(name, pause)?;
        self.find_by_id(id, |vm| vm.stalled.take());
        handle.send(Command::Continue);
        // One that is blocked as well runs when it is released.
        if kind == VmKind::Qemu && !is_blocked {
            state::cont(&qmp).map_err(|error| internal("continue the VM", in_full(error.as_ref())))?;
            if let Err(error) = state::disks_are_taken(&qmp) {
                let error = in_full(error.as_ref());
                tracing::warn!(vm = %name, "its QEMU stays set up for a load, and refuses snapshots while it is paused: {error}");
            }
        }
        Ok(())
    }

    /// That a guest whose state was saved is this host's still: nobody else runs it.
    fn check_runs_here(&self, name: &str, pause: PauseKind) -> Result<(), ApiError> {
        let problem = match pause {
            PauseKind::None | PauseKind::Paused => return Ok(()),
            PauseKind::Elsewhere => "somebody else has migrated it, and it may run there".to_owned(),
            PauseKind::Saved => match self.moves.notes().read(name) {
                Ok(None | Some(Note::Owned(_) | Note::Accepted(..))) => return Ok(()),
                Ok(Some(_)) => {
                    "a move of it between this host and another has not ended: see `pagoda moves`".to_owned()
                }
                Err(error) => in_full(error.as_ref()),
            },
        };
        Err(ApiError::new(ErrorCode::WrongState, format!("{name} is not let run: {problem}"), None))
    }

    /// Looks for processes that map a VM's RAM without a userfaultfd of ours: they would read what is out as zeros. What the
    /// shim saw leaving is pinned before that; this is for what it could not see.
    ///
    /// False: nobody was seen, because nobody could be looked at.
    pub fn find_strangers(&self) -> bool {
        let attached: Vec<_> = {
            let vms = self.lock();
            let attached = vms.values().filter(|vm| vm.handle.is_some() && vm.record.spec.pinned.is_none());
            attached.map(|vm| (vm.governed.id, Own::of(vm), vm.inodes.clone())).collect()
        };
        for (id, own, inodes) in attached {
            for (dev, ino) in inodes {
                let mappers = match pagoda_sys::process::mappers(dev, ino) {
                    Ok(mappers) => mappers,
                    Err(error) => {
                        let why = format!("other processes that map a VM's memory cannot be looked for: {error}");
                        self.parts.failed(STRANGERS, &why);
                        return false;
                    }
                };
                self.parts.works(STRANGERS);
                let stranger = mappers.into_iter().find(|mapper| !is_known(*mapper, &own));
                if let Some(stranger) = stranger {
                    self.pin(id, &format!("process {stranger} maps its memory too, without Pagoda"));
                }
            }
        }
        true
    }

    /// Has nothing of a VM leave DRAM any more, also if that cannot be written down.
    pub(super) fn pin(&self, id: VmId, reason: &str) {
        let pinned = |record: &Record| {
            let spec = VmSpec { pinned: Some(reason.to_owned()), ..record.spec.clone() };
            Record { spec, ..record.clone() }
        };
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| match vm.record.spec.pinned {
            None => Ok(pinned(&vm.record)),
            Some(_) => Err(()),
        };
        let commit = |vm: &mut Vm, written: anyhow::Result<()>| {
            if let Err(error) = written {
                let error = in_full(error.as_ref());
                tracing::warn!(vm = %vm.record.name, "write the VM's record: {error}");
                vm.record = pinned(&vm.record);
            }
            if let Some(handle) = &vm.handle {
                handle.send(Command::Pin(reason.to_owned()));
            }
            Ok(())
        };
        // Pages that leave while the disk is waited for would be missing for whoever reaches them.
        self.find_by_id(id, |vm| vm.handle.iter().for_each(|handle| handle.send(Command::Pin(reason.to_owned()))));
        // The engine hears of it again: it may be one that was attached meanwhile.
        self.change(id, plan, commit);
    }

    /// Lets every VM go, for the next daemon.
    pub fn detach_all(&self) {
        self.lock().values().filter_map(|vm| vm.handle.as_ref()).for_each(|handle| handle.send(Command::Detach));
        let start = Instant::now();
        while start.elapsed() < DETACH_WAIT && self.lock().values().any(|vm| vm.handle.is_some()) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Removes the sockets of monitors of which no VM has a record: a daemon died while it made one. No process can have attached to
/// such a VM.
fn remove_monitors_of_nobody(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    let paths = entries.flatten().map(|entry| entry.path());
    for path in paths.filter(|path| path.extension().is_some_and(|extension| extension == "qmp")) {
        // A record that is not there for certain is one that nobody has written.
        if path.with_extension("vm").symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!("remove {}: {error}", path.display());
        }
    }
}

impl Registry {
    /// The inode of the first RAM file of the VM with this token.
    pub fn first_inode(&self, token: Token) -> Option<u64> {
        let vms = self.lock();
        let vm = vms.values().find(|vm| vm.record.token == token)?;
        let given = vm.inodes.first().copied();
        given.or_else(|| vm.ram.first().map(|ram| ram.inode())).map(|(_, inode)| inode)
    }
}

/// A process that maps memory and is no stranger: known, a child of a mapper, which has its shim, or one that has ended since.
fn is_known(pid: u32, own: &Own) -> bool {
    if pid == own.vmm || pid == std::process::id() || own.mappers.contains(&pid) {
        return true;
    }
    match pagoda_sys::process::parent(pid) {
        Ok(parent) => own.mappers.contains(&parent),
        Err(_) => !std::path::Path::new(&format!("/proc/{pid}")).exists(),
    }
}

/// Processes that map a VM's memory and are known to.
struct Own {
    vmm: u32,
    mappers: Vec<u32>,
}

impl Own {
    fn of(vm: &Vm) -> Own {
        let runs = |(_, pid, start, _): (usize, u32, u64, bool)| {
            pagoda_sys::process::start_time(pid).is_ok_and(|now| now == start).then_some(pid)
        };
        let mappers = vm.shared.iter().flat_map(|shared| shared.known_mappers()).filter_map(runs).collect();
        Own { vmm: vm.record.pid.0, mappers }
    }
}

#[cfg(test)]
mod tests;
