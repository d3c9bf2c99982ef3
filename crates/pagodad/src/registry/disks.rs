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
        self.unsettled.lock().insert(name, rest);
    }

    /// A VM ended while no daemon ran. Its disks, and its other files, are looked at by a thread that may wait for them.
    pub(super) fn settle_later(&self, record: Record) {
        self.unsettled.lock().insert(record.name.clone(), record);
    }

    /// Tries again to give the disks of VMs that have ended their names. It may wait for these disks, and holds no lock meanwhile.
    pub fn settle_disks_again(&self) {
        let ended: Vec<Record> = self.unsettled.lock().values().cloned().collect();
        for record in ended {
            let name = &record.name;
            let is_given_up = !self.records.path(name).exists();
            if !is_given_up && disks::settle(record.launch.as_ref(), &record.disks).is_err() {
                continue;
            }
            let mut unsettled = self.unsettled.lock();
            if unsettled.get(name).is_none_or(|of| of.token != record.token) {
                continue;
            }
            unsettled.remove(name);
            if is_given_up {
                continue;
            }
            tracing::info!(vm = %name, "its disks have their newest content under their names");
            // Until the record is gone nobody can have its name.
            self.forget(&Record { disks: Vec::new(), ..record });
        }
    }

    /// That the disks of a new VM are nobody else's, as far as this daemon knows of disks. `but` is about to end.
    ///
    /// # Errors
    /// Whose one is.
    pub fn check_disks_free(&self, name: &str, launch: Option<&Launch>, but: Option<VmId>) -> Result<(), ApiError> {
        self.settle_disks_again();
        let Some(launch) = launch else { return Ok(()) };
        let has_moved = |vm: &&Vm| !vm.record.disks.is_empty() && Some(vm.governed.id) != but;
        let running: Vec<Record> = self.lock().values().filter(has_moved).map(|vm| vm.record.clone()).collect();
        let ended: Vec<Record> = self.unsettled.lock().values().cloned().collect();
        for record in &ended {
            let is_meant = record.name == name || disks::in_use(record, launch).is_some();
            if let Some(why) = is_meant.then(|| disks::settle(record.launch.as_ref(), &record.disks).err()).flatten() {
                let problem = format!(
                    "the disks of {}, which has ended, are not in order: {}",
                    record.name,
                    in_full(why.as_ref())
                );
                return Err(ApiError::new(ErrorCode::Refused, problem, Some("put that right, and try again")));
            }
        }
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
