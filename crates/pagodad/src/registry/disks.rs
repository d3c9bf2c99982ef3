//! Disks of VMs whose newest content does not have their names ([`crate::disks`]): noted while QEMU lives, settled when it has
//! ended, and nobody else's until then.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode, Launch};
use pagoda_core::policy::VmId;

use super::{Registry, Vm};
use crate::disks;
use crate::record::{MovedDisk, Record};

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

    /// A VM has ended, and not all of its disks have their names: its record stays for that. Its name is taken until then.
    pub(super) fn keep_unsettled(&self, record: &Record, why: &anyhow::Error) {
        let why = in_full(why.as_ref());
        tracing::error!(
            vm = %record.name,
            "its disks do not have their newest content under their names, tried again: {why}; if you do not want it, remove {}",
            self.records.path(&record.name).display()
        );
        let Record { name, token, kind, regions, pid, launch, disks, .. } = record.clone();
        let rest = Record { pid, launch, disks, ..Record::new(&name, token, kind, &regions, Default::default()) };
        if let Err(error) = self.records.write(&rest).and_then(|()| self.sync_records()) {
            tracing::warn!(vm = %name, "write what is left of its record: {}", in_full(error.as_ref()));
        }
        self.unsettled.insert(rest, false, Some(why));
    }

    /// A VM ended while no daemon ran. Its disks, and its other files, are seen to by a thread that may wait for them.
    pub(super) fn settle_later(&self, record: Record) {
        self.unsettled.insert(record, true, None);
    }

    /// Tries again to give the disks of VMs that have ended their names. For a thread of its own: it may wait for these disks.
    pub fn settle_disks_again(&self) {
        for name in self.unsettled.due() {
            // What fails is said when it fails first.
            let _ = self.settle_ended(&name);
        }
    }

    /// Gives the disks of a VM that has ended their names, if there is one of this name. It waits for these disks.
    ///
    /// # Errors
    /// Why they do not have them.
    pub fn settle_ended(&self, name: &str) -> Result<(), String> {
        let Some(ended) = self.unsettled.begin(name)? else { return Ok(()) };
        let (record, path) = (&ended.record, self.records.path(name));
        let without_disks = || Record { disks: Vec::new(), ..record.clone() };
        // Its user has removed the record, and does not want the content.
        let is_given_up = !path.exists();
        let mut why = None;
        match (is_given_up, ended.has_files) {
            (true, false) => {}
            (true, true) => self.forget(&without_disks()),
            // It says what fails, and keeps what is left.
            (false, true) => self.forget(record),
            (false, false) => match disks::settle(record.launch.as_ref(), &record.disks) {
                Ok(()) => self.forget(&without_disks()),
                Err(error) => why = Some(in_full(error.as_ref())),
            },
        }
        let is_over = !path.exists();
        if is_over && !is_given_up {
            tracing::info!(vm = %name, "its disks have their newest content under their names");
        }
        self.unsettled.end(name, is_over, why)
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
