//! The client takes snapshots here, lists, verifies, exports, imports and removes them, and makes VMs of them.

use std::io::{self, Read};

use super::{Client, ClientError, LONG_WAIT_MAX, WAIT_MAX, parse, refusal, vm_path};
use crate::http::{self, Download, HttpError};
use crate::types::{
    AcceptRequest, ApiError, CloneRequest, CrashedVm, CreateSnapshot, CreatedClones, CreatedVm, EXPORT_DONE,
    EXPORT_FAILED, ExportReport, ExportRequest, RemovedSnapshot, Restorable, RestoreRequest, Snapshot, SnapshotDiff,
    SnapshotLaunch, SnapshotList, SnapshotName, VerifyReport, check_snapshot_name, check_vm_name, vm_file_name,
};

impl Client {
    /// Lists all snapshots of this host, and images that cannot be read.
    pub fn snapshots(&self) -> Result<SnapshotList, ClientError> {
        self.get("/v1/snapshots")
    }

    pub fn snapshot(&self, name: &SnapshotName) -> Result<Snapshot, ClientError> {
        self.get(&snapshot_path(name, "")?)
    }

    /// How much of the memory differs between this snapshot and another one of the same VM.
    pub fn snapshot_diff(&self, name: &SnapshotName, other: &str) -> Result<SnapshotDiff, ClientError> {
        check_snapshot_name(other).map_err(ClientError::BadName)?;
        self.get(&snapshot_path(name, &format!("/diff/{}", vm_file_name(other)))?)
    }

    /// What a VM that has ended can be restored from.
    pub fn restorable(&self, vm: &str) -> Result<Restorable, ClientError> {
        self.get(&path_of_name("/v1/restorable", vm)?)
    }

    /// A VM that has crashed and was not started again.
    pub fn crashed(&self, vm: &str) -> Result<CrashedVm, ClientError> {
        self.get(&path_of_name("/v1/crashed", vm)?)
    }

    /// Removes the note that a VM has crashed.
    pub fn forget_crashed(&self, vm: &str) -> Result<(), ClientError> {
        self.exchange("DELETE", &path_of_name("/v1/crashed", vm)?, None).map(drop)
    }

    /// What starts its QEMU again.
    pub fn snapshot_launch(&self, name: &SnapshotName) -> Result<SnapshotLaunch, ClientError> {
        self.get(&snapshot_path(name, "/launch")?)
    }

    /// Takes a snapshot of a VM. It exists when this returns, and is volatile still.
    pub fn take_snapshot(&self, vm: &str, request: &CreateSnapshot) -> Result<Snapshot, ClientError> {
        request.check().map_err(ClientError::BadName)?;
        self.send("POST", &vm_path(vm, "/snapshots")?, request)
    }

    /// Removes a snapshot, and says what became of the layers of its disks.
    pub fn remove_snapshot(&self, name: &SnapshotName) -> Result<RemovedSnapshot, ClientError> {
        self.remove_at(&snapshot_path(name, "")?)
    }

    /// Removes an image by its id, also one that cannot be read.
    pub fn remove_image(&self, id: &str) -> Result<RemovedSnapshot, ClientError> {
        self.remove_at(&format!("/v1/snapshots/{}", vm_file_name(id)))
    }

    fn remove_at(&self, path: &str) -> Result<RemovedSnapshot, ClientError> {
        let response = self.exchange_within(LONG_WAIT_MAX, "DELETE", path, None)?;
        // A daemon of before says nothing of layers.
        if response.body.is_empty() { Ok(RemovedSnapshot::default()) } else { parse(path, &response) }
    }

    /// Begins to verify a snapshot, or asks how far that is.
    pub fn verify_snapshot(&self, name: &SnapshotName) -> Result<VerifyReport, ClientError> {
        self.send("POST", &snapshot_path(name, "/verify")?, &serde_json::json!({}))
    }

    /// Makes a VM of a snapshot; fetch its monitor with [`crate::attach::fetch`], or give it up with [`Client::delete`].
    pub fn restore(&self, request: &RestoreRequest) -> Result<CreatedVm, ClientError> {
        request.check().map_err(ClientError::BadName)?;
        self.send_within(LONG_WAIT_MAX, "POST", "/v1/restores", request)
    }

    /// What starts the QEMU of a VM that is there again. The version of its QEMU is not known.
    pub fn vm_launch(&self, vm: &str) -> Result<SnapshotLaunch, ClientError> {
        self.get(&vm_path(vm, "/launch")?)
    }

    /// Makes VMs of a snapshot, all or none; each goes on as one of [`Client::restore`] does.
    pub fn clone_vms(&self, request: &CloneRequest) -> Result<CreatedClones, ClientError> {
        request.check().map_err(ClientError::BadName)?;
        self.send_within(LONG_WAIT_MAX, "POST", "/v1/clones", request)
    }

    /// Hands all of an exported snapshot to `sink`, piece by piece. What it got is a whole file only if this returns a report.
    pub fn export_snapshot(
        &self,
        name: &SnapshotName,
        request: &ExportRequest,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<ExportReport, ClientError> {
        request.check().map_err(ClientError::BadName)?;
        let path = snapshot_path(name, "/export")?;
        let unread = |source| ClientError::Reply { request: path.clone(), source };
        let body = serde_json::to_vec(request).map_err(unread)?;
        let mut stream = self.connect(WAIT_MAX)?;
        match http::download(&mut stream, &path, &body, sink).map_err(|source| self.failed(source, WAIT_MAX))? {
            Download::Other(response) => Err(ClientError::Refused(refusal(&format!("POST {path}"), &response))),
            Download::Done(fields) => {
                let of = |wanted: &str| fields.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
                if let Some(why) = of(EXPORT_FAILED) {
                    let why: ApiError = serde_json::from_str(why).map_err(unread)?;
                    return Err(ClientError::Refused(why));
                }
                let done = of(EXPORT_DONE).ok_or_else(|| self.failed(HttpError::Truncated, WAIT_MAX))?;
                serde_json::from_str(done).map_err(unread)
            }
        }
    }

    /// Makes a snapshot of an exported file. Without a name it has that of the file.
    pub fn import_snapshot(&self, name: Option<&SnapshotName>, file: &mut dyn Read) -> Result<Snapshot, ClientError> {
        let path = match name {
            None => "/v1/imports".to_owned(),
            Some(name) => snapshot_path(name, "")?.replacen("/v1/snapshots", "/v1/imports", 1),
        };
        let mut stream = self.connect(WAIT_MAX)?;
        let response = http::upload(&mut stream, &path, file).map_err(|source| self.failed(source, WAIT_MAX))?;
        if response.status >= 300 {
            return Err(ClientError::Refused(refusal(&format!("POST {path}"), &response)));
        }
        parse(&path, &response)
    }

    /// What starts its QEMU again, also if it may not be started.
    pub fn snapshot_program(&self, name: &SnapshotName) -> Result<SnapshotLaunch, ClientError> {
        self.get(&snapshot_path(name, "/program")?)
    }

    /// From now on what an imported snapshot starts may be started here.
    pub fn accept_snapshot(&self, name: &SnapshotName, id: &str) -> Result<Snapshot, ClientError> {
        self.send("POST", &snapshot_path(name, "/accept")?, &AcceptRequest { id: id.to_owned() })
    }
}

fn path_of_name(route: &str, vm: &str) -> Result<String, ClientError> {
    check_vm_name(vm).map_err(ClientError::BadName)?;
    Ok(format!("{route}/{}", vm_file_name(vm)))
}

fn snapshot_path(name: &SnapshotName, tail: &str) -> Result<String, ClientError> {
    name.check().map_err(ClientError::BadName)?;
    Ok(format!("/v1/snapshots/{}/{}{tail}", vm_file_name(&name.vm), vm_file_name(&name.name)))
}
