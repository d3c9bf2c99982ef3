//! How VMs begin and end: found again after a restart, attached, stalled, gone.

use pagoda_api::{in_full, with_advice};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use pagoda_abi::Token;
use pagoda_abi::record::{Kind, RECORD_MAX, Record};
use pagoda_pager::handle::{Command, Notice};
use pagoda_sys::process::Life;

use super::{Registry, Vm};
use crate::far;
use crate::qmp::Monitor;

/// The look for other mappers, in health.
const STRANGERS: &str = "other mappers";
/// How long a VM may be made without a `pagoda run` that fetches its monitor, which is its next step.
const ATTACH_WAIT: Duration = Duration::from_secs(60);
/// How long engines may take to let go when the daemon ends: their I/O in flight, at a slow disk's pace.
const DETACH_WAIT: Duration = Duration::from_secs(10);

impl Registry {
    /// Reads the records of VMs that a previous daemon served. Those whose process still runs wait for its agent.
    pub fn load(&self) -> std::io::Result<()> {
        let owed = far::owed_of_before(&self.config);
        let mut all_known = true;
        for entry in std::fs::read_dir(self.config.state_dir.join("vms"))? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "vm") {
                continue;
            }
            match read_record(&path) {
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
            far::give_back_of_before(&self.config, &owed, &vms);
        } else {
            self.never_settle();
            // One of them may be that of a VM that could not be read.
            owed.iter().for_each(|debtor| tracing::warn!(vm = %debtor.name, "what it owes to a pool is left alone"));
        }
        Ok(())
    }

    fn find_again(&self, record: Record) {
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

    /// The VM with this token.
    pub fn name_of(&self, token: Token) -> Option<String> {
        self.lock().values().find(|vm| vm.record.token == token).map(|vm| vm.record.name.clone())
    }

    /// Handles what engines say, until the last sender is gone.
    pub fn listen(self: &Arc<Self>, notices: &Receiver<(Token, Notice)>) {
        while let Ok((token, notice)) = notices.recv() {
            let Some(name) = self.name_of(token) else { continue };
            match notice {
                Notice::Stalled(reason) => self.stall(&name, reason),
                Notice::NearLimit => self.governor.doorbell.ring(),
                Notice::Exited => {
                    tracing::info!(vm = %name, "its process ended");
                    // The files first: a new VM of this name has files of the same names.
                    let record = self.lock().get(&name).map(|vm| vm.record.clone());
                    record.iter().for_each(|record| self.forget(record));
                    self.remove(&mut self.lock(), &name);
                }
                Notice::Detached => {
                    if let Some(vm) = self.lock().get_mut(&name) {
                        vm.handle = None;
                    }
                }
            }
        }
    }

    fn stall(self: &Arc<Self>, name: &str, reason: String) {
        let mut vms = self.lock();
        let Some(vm) = vms.get_mut(name) else { return };
        vm.stalled = Some((with_advice(reason), Instant::now()));
        if vm.record.kind == Kind::Qemu {
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
    /// started and takes its time is left alone.
    pub fn reap(&self) {
        let mut vms = self.lock();
        let late: Vec<Record> = vms
            .values()
            .filter(|vm| vm.record.pid.0 == 0 && vm.handle.is_none())
            .filter(|vm| {
                // Who has the RAM counts, for a program may be a child of the process that `pagoda run` was.
                match vm.taken.map(|taken| taken.by).or(vm.started_by) {
                    Some(by) => by.has_ended(&vm.record.name),
                    None => vm.created.elapsed() > ATTACH_WAIT,
                }
            })
            .map(|vm| vm.record.clone())
            .collect();
        for record in late {
            tracing::info!(vm = %record.name, "no program attached to it");
            self.remove(&mut vms, &record.name);
            self.forget(&record);
        }
        // A VM that waits for its agent and whose process ended.
        let ended: Vec<Record> = vms
            .values()
            .filter(|vm| vm.handle.is_none() && vm.record.pid.0 != 0)
            .filter(|vm| has_ended(&vm.record.name, vm.record.pid.0, vm.record.pid.1))
            .map(|vm| vm.record.clone())
            .collect();
        for record in ended {
            tracing::info!(vm = %record.name, "its process ended");
            self.remove(&mut vms, &record.name);
            self.forget(&record);
        }
    }

    /// Looks for processes that map a VM's RAM without a userfaultfd of ours: they would read what is out as zeros. What the
    /// shim saw leaving is pinned before that; this is for what it could not see.
    pub fn find_strangers(&self) {
        let attached: Vec<_> = {
            let vms = self.lock();
            let attached = vms.values().filter(|vm| vm.handle.is_some() && vm.record.pinned.is_none());
            attached.map(|vm| (vm.record.name.clone(), vm.record.pid.0, vm.inodes.clone())).collect()
        };
        for (name, pid, inodes) in attached {
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
                    self.pin(&name, &format!("process {stranger} maps its memory too, without Pagoda"));
                }
            }
        }
    }

    fn pin(&self, name: &str, reason: &str) {
        let mut vms = self.lock();
        let Some(vm) = vms.get_mut(name).filter(|vm| vm.record.pinned.is_none()) else { return };
        vm.record.pinned = Some(reason.to_owned());
        if let Err(error) = self.save(&vm.record) {
            tracing::warn!(vm = %name, "write the VM's record: {error}", error = in_full(error.as_ref()));
        }
        if let Some(handle) = &vm.handle {
            handle.send(Command::Pin(reason.to_owned()));
        }
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

/// Reads a VM's record.
///
/// # Errors
/// It is not there, or none that this version writes.
pub fn read_record(path: &std::path::Path) -> anyhow::Result<Record> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?.take(RECORD_MAX as u64 + 1).read_to_string(&mut text)?;
    anyhow::ensure!(text.len() <= RECORD_MAX, "longer than a record can be");
    Ok(Record::from_text(&text)?)
}
