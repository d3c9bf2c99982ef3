//! Disks of VMs whose newest content does not have their names ([`crate::disks`]): noted while QEMU lives, settled when it has
//! ended, and nobody else's until then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode, Launch};
use pagoda_core::policy::VmId;

use super::{Registry, Vm};
use crate::disks;
use crate::record::{MovedDisk, Record};

/// Between two looks whether one is due that nobody has asked for.
const SETTLE_LOOK: Duration = Duration::from_secs(5);
/// How long somebody waits for the disks of a VM that has ended: some runs of `qemu-img`, unless their file system hangs.
const SETTLE_MAX: Duration = Duration::from_secs(10);

impl Registry {
    /// Notes where the newest content of a VM's disks is. It outlives the host when this returns. `None`: there is no such VM.
    pub fn set_disks(&self, id: VmId, disks: Vec<MovedDisk>) -> Option<Result<()>> {
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| Ok(Record { disks, ..vm.record.clone() });
        let written = self.change(id, plan, |_: &mut Vm, written| written)?;
        Some(written.and_then(|()| self.sync_records()))
    }

    /// A record is written by renaming, which only the directory's sync has outlive the host.
    pub(super) fn sync_records(&self) -> Result<()> {
        let dir = std::fs::File::open(self.records_dir());
        dir.and_then(|dir| dir.sync_all()).context("write the directory of records to the disk")
    }

    /// A VM has ended, and its files are gone but for its record. That stays for its disks, and its name is taken until they have
    /// theirs. Nobody waits for them here.
    pub(super) fn leave_to_settle(&self, record: &Record) {
        let Record { name, token, kind, regions, pid, launch, disks, .. } = record.clone();
        let rest =
            Record { pid, launch, disks, ended: true, ..Record::new(&name, token, kind, &regions, Default::default()) };
        if let Err(error) = self.records.write(&rest).and_then(|()| self.sync_records()) {
            tracing::warn!(vm = %name, "write what is left of its record: {}", in_full(error.as_ref()));
        }
        self.unsettled.insert(rest);
    }

    /// Gives the disks of VMs that have ended their names, as soon as there are some, and tries again what failed. Never ends. Each
    /// attempt has a thread: it may wait for these disks.
    pub fn settle_disks(self: &Arc<Self>) {
        loop {
            for record in self.unsettled.begin_due(SETTLE_LOOK) {
                let (registry, name) = (Arc::clone(self), record.name.clone());
                let attempt = move || registry.unsettled_ends(&record, registry.settle_one(&record));
                if let Err(error) = std::thread::Builder::new().name("settle".into()).spawn(attempt) {
                    self.unsettled.end(&name, Err(format!("start a thread for them: {error}")));
                }
            }
        }
    }

    fn settle_one(&self, record: &Record) -> Result<(), String> {
        let name = &record.name;
        let path = self.records.path(name);
        if path.symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
            tracing::info!(vm = %name, "its record was removed, and its disks stay what they are");
            return Ok(());
        }
        let settle = || disks::settle(record.launch.as_ref(), &record.disks);
        let settled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(settle));
        settled.map_err(|_| "a thread of this daemon panicked".to_owned())?.map_err(|error| in_full(error.as_ref()))?;
        self.records.remove(name).map_err(|error| format!("its record cannot be removed: {error}"))?;
        tracing::info!(vm = %name, "its disks have their newest content under their names");
        Ok(())
    }

    fn unsettled_ends(&self, record: &Record, outcome: Result<(), String>) {
        let name = &record.name;
        let why = outcome.as_ref().err().cloned();
        let is_new = self.unsettled.end(name, outcome);
        if let Some(why) = why.filter(|_| is_new) {
            tracing::error!(
                vm = %name,
                "its disks do not have their newest content under their names, tried again: {why}; if you do not want it, remove {}",
                self.records.path(name).display()
            );
        }
    }

    /// Gives the disks of a VM that has ended their names, if there is one of this name. It waits for these disks, and not for ever.
    ///
    /// # Errors
    /// Why they do not have them.
    pub fn settle_ended(&self, name: &str) -> Result<(), String> {
        self.unsettled.settle(name, SETTLE_MAX)
    }

    /// That the disks of a new VM are nobody else's, as far as this daemon knows of disks. `but` is about to end.
    ///
    /// # Errors
    /// Whose one is.
    pub fn check_disks_free(&self, name: &str, launch: Option<&Launch>, but: Option<VmId>) -> Result<(), ApiError> {
        let names_one = |record: &Record| launch.is_some_and(|launch| disks::in_use(record, launch).is_some());
        for ended in self.unsettled.all().iter().filter(|ended| ended.name == name || names_one(ended)) {
            self.settle_ended(&ended.name).map_err(|why| {
                let problem = format!("the disks of {}, which has ended, are not in order: {why}", ended.name);
                ApiError::new(ErrorCode::Refused, problem, Some("put that right, and try again"))
            })?;
        }
        let Some(launch) = launch else { return Ok(()) };
        let has_moved = |vm: &&Vm| !vm.record.disks.is_empty() && Some(vm.governed.id) != but;
        let running: Vec<Record> = self.lock().values().filter(has_moved).map(|vm| vm.record.clone()).collect();
        match running.iter().find_map(|record| Some((record, disks::in_use(record, launch)?))) {
            None => Ok(()),
            Some((record, disk)) => {
                let problem = format!("the disk {} is that of {}, which has not ended", disk.file, record.name);
                Err(ApiError::new(ErrorCode::Refused, problem, Some("end that VM first, or use another disk")))
            }
        }
    }

    /// A snapshot was cut off by the end of a daemon. What it made beside the disks, and QEMU does not write to, goes. It does no
    /// harm if it stays.
    pub(super) fn remove_unused_overlays(&self, id: VmId, image: pagoda_image::ImageId) {
        let Some((record, qmp)) = self.find_by_id(id, |vm| (vm.record.clone(), vm.qmp.clone())) else { return };
        let Some(launch) = record.launch.clone() else { return };
        let unused = match disks::unused(&qmp, &record, &launch, image) {
            Ok(Some(unused)) => unused,
            Ok(None) => return,
            Err(error) => {
                return tracing::info!(vm = %record.name, "look for overlays that are not used: {}", in_full(error.as_ref()));
            }
        };
        if unused.kept == record.disks || matches!(self.set_disks(id, unused.kept.clone()), Some(Ok(()))) {
            unused.remove(&qmp);
        }
    }
}
