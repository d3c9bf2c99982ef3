//! Changing a VM's settings at a user's request.

use std::collections::BTreeMap;
use std::sync::Arc;

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode, VmInfo, VmKind, VmPatch};

use super::operation::refuse_meanwhile;
use super::{Registry, Vm, internal, no_such_vm};
use crate::record::Record;

impl Registry {
    /// Changes settings; they take effect at once.
    ///
    /// # Errors
    /// No such VM; an operation on it; a cap or a balloon target that does not fit it; the disk's. Then nothing is changed.
    pub fn patch(self: &Arc<Self>, name: &str, patch: &VmPatch) -> Result<VmInfo, ApiError> {
        let id = self.id_of(name)?;
        let plan = |vms: &BTreeMap<String, Vm>, vm: &Vm| {
            refuse_meanwhile(&vm.record)?;
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
            self.send_min(vm);
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
}

/// A VM's record with other settings.
fn patched(record: &Record, patch: &VmPatch) -> Result<Record, ApiError> {
    let spec = patch.applied_to(&record.spec, record.memory());
    let spec = spec.map_err(|text| ApiError::new(ErrorCode::BadRequest, text, None))?;
    if patch.balloon_target.is_some() && record.kind == VmKind::Plain {
        let hint = "page it out instead: pagoda vm set --dram";
        let problem = format!("{} is no QEMU and has no balloon", record.name);
        return Err(ApiError::new(ErrorCode::WrongState, problem, Some(hint)));
    }
    Ok(Record { spec, ..record.clone() })
}
