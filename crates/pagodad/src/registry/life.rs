//! How VMs begin and end: found again after a restart, attached, stalled, gone.

use pagoda_api::{in_full, with_advice};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use pagoda_abi::Token;
use pagoda_api::types::{VmKind, VmSpec};
use pagoda_core::policy::VmId;
use pagoda_pager::handle::{Command, Notice};
use pagoda_sys::process::Life;

use super::{Registry, Vm};
use crate::qmp::Monitor;
use crate::record::Record;
use crate::remote;

/// The look for other mappers, in health.
const STRANGERS: &str = "other mappers";
/// How long a VM may be made without a `pagoda run` that fetches its monitor, which is its next step.
const ATTACH_WAIT: Duration = Duration::from_secs(60);
/// How long engines may take to let go when the daemon ends: their I/O in flight, at a slow disk's pace.
const DETACH_WAIT: Duration = Duration::from_secs(10);

impl Registry {
    /// Reads the records of VMs that a previous daemon served. Those whose process still runs wait for its agent.
    pub fn load(&self) -> std::io::Result<()> {
        let pending = remote::pending_of_before(&self.config);
        let mut all_known = true;
        for (path, record) in self.records.list()? {
            match record {
                Ok(record) => self.find_again(record),
                Err(error) => {
                    tracing::error!("{}: {error}; it is left alone", path.display());
                    all_known = false;
                }
            }
        }
        self.say_what_is_short();
        if all_known {
            let vms: Vec<Record> = self.lock().values().map(|vm| vm.record.clone()).collect();
            remote::give_back_of_before(&self.config, &pending, &vms);
        } else {
            self.never_settle();
            // One of them may be that of a VM that could not be read.
            pending.iter().for_each(|debtor| tracing::warn!(vm = %debtor.name, "its pending release is left alone"));
        }
        Ok(())
    }

    pub(super) fn find_again(&self, record: Record) {
        let name = record.name.clone();
        let (pid, start) = record.pid;
        if pid != 0 && has_ended(&name, pid, start) {
            tracing::info!(vm = %name, "its process ended while no daemon ran");
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
        let vm = Vm::new(record, id, qmp, group);
        self.lock().insert(name, vm);
    }

    /// The number of the VM with this token.
    pub(super) fn id_by(&self, token: Token) -> Option<VmId> {
        self.lock().values().find(|vm| vm.record.token == token).map(|vm| vm.governed.id)
    }

    /// Handles what engines say, until the last sender is gone.
    pub fn listen(self: &Arc<Self>, notices: &Receiver<(Token, Notice)>) {
        while let Ok((token, notice)) = notices.recv() {
            let Some(id) = self.id_by(token) else { continue };
            match notice {
                Notice::Stalled(reason) => self.stall(id, reason),
                Notice::NearLimit => self.governor.doorbell.ring(),
                Notice::Exited => {
                    // Its record may be being written, and other VMs' notices do not wait for that.
                    let registry = Arc::clone(self);
                    let end = move || registry.exited(id);
                    if std::thread::Builder::new().name("vm-end".into()).spawn(end).is_err() {
                        self.exited(id);
                    }
                }
                Notice::Detached => drop(self.find_by_id(id, |vm| vm.handle = None)),
            }
        }
    }

    /// A VM's process has ended.
    pub(super) fn exited(&self, id: VmId) {
        self.while_writing(id, || {
            let Some(record) = self.find_by_id(id, |vm| vm.record.clone()) else { return };
            tracing::info!(vm = %record.name, "its process ended");
            // The files first: a new VM of this name has files of the same names.
            self.forget(&record);
            let ended = self.remove(&mut self.lock(), id);
            drop(ended);
        });
    }

    fn stall(&self, id: VmId, reason: String) {
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

    /// Forgets VMs that were made and whose process ended before it attached, or that no process ever came for. One that is
    /// started and takes its time is left alone. One whose record is being written is looked at again the next time.
    pub fn reap(&self) {
        let over: Vec<VmId> =
            self.lock().values().filter(|vm| why_over(vm).is_some()).map(|vm| vm.governed.id).collect();
        for id in over {
            self.unless_writing(id, || self.end_if_over(id));
        }
    }

    /// As [`Self::reap`], for the VM of this name alone, and waits for whoever writes its record or ends it.
    pub(super) fn reap_name(&self, name: &str) {
        let id = self.lock().get(name).filter(|vm| why_over(vm).is_some()).map(|vm| vm.governed.id);
        if let Some(id) = id {
            self.while_writing(id, || self.end_if_over(id));
        }
    }

    /// The caller has the VM's writing lock.
    fn end_if_over(&self, id: VmId) {
        let vms = self.lock();
        let vm = vms.values().find(|vm| vm.governed.id == id);
        // It may have been attached meanwhile.
        let Some((record, why)) = vm.and_then(|vm| Some((vm.record.clone(), why_over(vm)?))) else { return };
        tracing::info!(vm = %record.name, "{why}");
        self.end(vms, id, &record);
    }

    /// Looks for processes that map a VM's RAM without a userfaultfd of ours: they would read what is out as zeros. What the
    /// shim saw leaving is pinned before that; this is for what it could not see.
    pub fn find_strangers(&self) {
        let attached: Vec<_> = {
            let vms = self.lock();
            let attached = vms.values().filter(|vm| vm.handle.is_some() && vm.record.spec.pinned.is_none());
            attached.map(|vm| (vm.governed.id, vm.record.pid.0, vm.inodes.clone())).collect()
        };
        for (id, pid, inodes) in attached {
            for (dev, ino) in inodes {
                let mappers = match pagoda_sys::process::mappers(dev, ino) {
                    Ok(mappers) => mappers,
                    // Nobody was seen, for nobody could be looked at.
                    Err(error) => {
                        let why = format!("other processes that map a VM's memory cannot be looked for: {error}");
                        return self.parts.failed(STRANGERS, &why);
                    }
                };
                self.parts.works(STRANGERS);
                let stranger = mappers.into_iter().find(|mapper| *mapper != pid && *mapper != std::process::id());
                if let Some(stranger) = stranger {
                    self.pin(id, &format!("process {stranger} maps its memory too, without Pagoda"));
                }
            }
        }
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

/// Why a VM that no engine serves is over, if that is a fact.
fn why_over(vm: &Vm) -> Option<&'static str> {
    if vm.handle.is_some() {
        return None;
    }
    let (pid, start) = vm.record.pid;
    if pid != 0 {
        // One that waits for its agent.
        return has_ended(&vm.record.name, pid, start).then_some("its process ended");
    }
    // Who has the RAM counts, for a program may be a child of the process that `pagoda run` was.
    let is_over = match vm.taken.map(|taken| taken.by).or(vm.started_by) {
        Some(by) => by.has_ended(&vm.record.name),
        None => vm.created.elapsed() > ATTACH_WAIT,
    };
    is_over.then_some("no program attached to it")
}

/// Whether it is a fact that the VM's process has ended. If nobody can tell, it is said, and looked at again with the next
/// round of the reaper: what a running VM has on disk must not be removed on a doubt.
pub(super) fn has_ended(vm: &str, pid: u32, start: u64) -> bool {
    match pagoda_sys::process::life(pid, start) {
        Life::Alive => false,
        Life::Ended => true,
        Life::Unknown(error) => {
            tracing::warn!(%vm, pid, "cannot tell whether its process still runs, so it is kept: {error}");
            false
        }
    }
}
