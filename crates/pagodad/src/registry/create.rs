//! Making a VM: its place in the policy, its swap file, RAM, monitor and record.
//!
//! The disk decides how long it takes to make a swap file, and a policy round needs the registry. So a VM is made in three
//! steps: its name and what it needs are reserved under the lock, its files are made without it, and the VM is entered under
//! the lock. Until then nobody can attach to it, change it or end it, and its name is taken.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use pagoda_abi::Token;
use pagoda_api::in_full;
use pagoda_api::types::{ApiError, CreateVm, CreatedVm, ErrorCode, Launch, RemoteRequest, VmKind};
use pagoda_core::policy::VmId;
use pagoda_core::units::Bytes;
use pagoda_move::note::Note;
use pagoda_pager::tier::source::ArrivalFiles;
use pagoda_sys::ram::RamFile;
use pagoda_sys::swapfile::{Reserve, SwapFile};

use super::admission::configure_sampling;
use super::{Registry, Vm, internal};
use crate::disks::Restored;
use crate::images::source::Source;
use crate::outboxes::Outbox;
use crate::qmp::Monitor;
use crate::record::{Operation, Record, Remote};
use crate::remote::NewTier;
use crate::{random, remote};

/// VMs of one daemon: each has a thread, a ring and some twenty file descriptors.
const VMS_MAX: usize = 1024;

/// What is reserved for a VM that is being made. Dropped, it is free again.
struct Reservation<'a> {
    registry: &'a Registry,
    name: &'a str,
    id: VmId,
    vm_token: Token,
}

impl Reservation<'_> {
    /// Enters the VM, which everybody finds from now on.
    fn commit(self, vm: Vm) {
        let mut vms = self.registry.lock();
        // The configuration may have been read again since it was admitted.
        configure_sampling(&mut self.registry.governor.lock(), &vm);
        vms.insert(self.name.to_owned(), vm);
        // Under the lock: there is no moment in which its name is free.
        self.registry.making.end(self.name);
        std::mem::forget(self);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.registry.governor.lock().rounds.remove(self.id);
        self.registry.forget_outbox(self.vm_token);
        self.registry.making.end(self.name);
    }
}

/// A VM that is about to be made. Dropped before that, nothing of it is left.
#[derive(Debug)]
pub struct NewVm<'a> {
    registry: &'a Registry,
    record: Record,
    tier: Option<NewTier>,
    source: Option<Source>,
    /// Overlays for its disks.
    disks: Option<Restored>,
    outbox: Option<Arc<Outbox>>,
}

impl NewVm<'_> {
    /// Has its disks get these overlays.
    pub fn with_disks(mut self, disks: Restored) -> Self {
        self.disks = Some(disks);
        self
    }

    /// That it could be kept in the place of this VM, when that has ended.
    ///
    /// # Errors
    /// What would be missing.
    pub fn check_instead(&self, of: VmId) -> Result<(), ApiError> {
        self.registry.admit_instead(of, &self.record)
    }

    /// Makes it, so that a program can attach to it. Nothing is left behind when that fails.
    ///
    /// # Errors
    /// A name that is taken, no room or an unfit file system for swap: each says what to do.
    pub fn make(mut self) -> Result<CreatedVm, ApiError> {
        let (registry, record) = (self.registry, self.record.clone());
        let (name, token) = (record.name.clone(), record.token);
        registry.wait_if_over(&name);
        registry.check_disks_free(&name, record.launch.as_ref(), None)?;
        let outbox = self.outbox.take();
        let reservation = registry.reserve(&name, &record, outbox.as_ref())?;
        if let Some(outbox) = &outbox {
            registry.outboxes.make(outbox).map_err(|e| internal("make the VM's outbox", in_full(e.as_ref())))?;
        }
        let vm = registry.make(record, self.source.take(), self.disks.take(), reservation.id)?;
        // The tier is kept before anybody can end the VM.
        if let Some(tier) = self.tier.take() {
            tier.keep(&remote::Dirs::of(&registry.config));
        }
        reservation.commit(vm);
        Ok(CreatedVm {
            name,
            token: token.to_hex(),
            attach_socket: registry.config.attach_socket.clone(),
            shim: registry.config.shim.clone(),
            outbox_token: outbox.map(|outbox| outbox.token.to_hex()),
        })
    }
}

impl Drop for NewVm<'_> {
    fn drop(&mut self) {
        if let Some(tier) = &self.tier {
            tier.give_up(&remote::Dirs::of(&self.registry.config));
        }
    }
}

impl Registry {
    /// Makes a VM that a program can attach to. Nothing is left behind when it fails.
    ///
    /// # Errors
    /// Bad sizes, a name that is taken, no room or an unfit file system for swap: each says what to do.
    pub fn create(&self, request: CreateVm) -> Result<CreatedVm, ApiError> {
        self.draining.check(&request.name)?;
        self.create_from(request, None)
    }

    /// As [`Registry::create`], of a VM that an operation makes. `remote`: a tier that there is already, and that may be another host's.
    ///
    /// # Errors
    /// As [`Registry::create`].
    pub fn create_new(
        &self,
        mut request: CreateVm,
        operation: Operation,
        remote: Option<Remote>,
    ) -> Result<CreatedVm, ApiError> {
        self.draining.check(&request.name)?;
        self.reap_name(&request.name);
        self.making.wait_until_removed(&request.name);
        self.check_free(&self.lock(), &request.name)?;
        // None is made for it.
        request.spec.remote = None;
        let mut new = self.prepare(request, None)?;
        new.record.operation = Some(operation);
        new.record.spec.remote = remote.as_ref().map(|remote| RemoteRequest { copies: remote.copies });
        new.record.remote = remote;
        new.make()
    }

    /// As [`Registry::create`]. With a source, the VM's memory is what that image holds, and QEMU is given the image's state
    /// before the guest runs: see `snapshots/restore.rs`. A clone has no disks to be put back.
    ///
    /// # Errors
    /// As [`Registry::create`].
    pub fn create_from(
        &self,
        request: CreateVm,
        source: Option<(Source, Option<Restored>)>,
    ) -> Result<CreatedVm, ApiError> {
        request.check().map_err(|message| ApiError::new(ErrorCode::BadRequest, message, None))?;
        // A VM whose program did not start, or has just ended, has its name until somebody looks.
        self.reap_name(&request.name);
        self.making.wait_until_removed(&request.name);
        self.check_free(&self.lock(), &request.name)?;
        self.check_not_moving(&request.name)?;
        if source.is_some() {
            self.check_not_moved(&request.name)?;
        }
        match source {
            None => self.prepare(request, None)?.make(),
            Some((source, None)) => self.prepare(request, Some(source))?.make(),
            Some((source, Some(disks))) => self.prepare(request, Some(source))?.with_disks(disks).make(),
        }
    }

    /// Looks for what can be wrong with a VM, but for its name and the room for it, and for a remote tier.
    ///
    /// # Errors
    /// Bad sizes; what this daemon does not have.
    pub fn prepare(&self, request: CreateVm, source: Option<Source>) -> Result<NewVm<'_>, ApiError> {
        request.check().map_err(|message| ApiError::new(ErrorCode::BadRequest, message, None))?;
        if request.spec.share_group.is_some() && !self.config.page_sharing {
            let hint = "leave --share-group out, or set page_sharing = true in pagoda.toml and restart pagodad";
            return Err(ApiError::new(ErrorCode::Unsupported, "this daemon shares no pages", Some(hint)));
        }
        let token = Token(random::bytes().map_err(|e| internal("make a token", e))?);
        let CreateVm { name, memory, kind, spec, launch, outbox } = request;
        let outbox = outbox.map(|bytes| self.outboxes.plan(&name, token, Bytes(bytes)));
        let outbox = outbox.transpose().map_err(|e| internal("make the VM's outbox", in_full(e.as_ref())))?;
        // Without the lock: etcd may be asked.
        let dirs = remote::Dirs::of(&self.config);
        let tier = spec.remote.map(|remote| remote::new_tier(&dirs, &name, &memory, remote)).transpose()?;
        let record = Record {
            launch: launch.map(Launch::bounded),
            remote: tier.as_ref().map(|tier| tier.remote.clone()),
            compressed: self.config.compressed.clone(),
            operation: source.as_ref().map(Source::operation),
            reads: source.as_ref().map(Source::id),
            lends: outbox.is_some(),
            ..Record::new(&name, token, kind, &memory, spec)
        };
        Ok(NewVm { registry: self, record, tier, source, disks: None, outbox })
    }

    fn check_free(&self, vms: &BTreeMap<String, Vm>, name: &str) -> Result<(), ApiError> {
        if vms.contains_key(name) {
            let hint = "choose another name, or see `pagoda vm show`";
            return Err(ApiError::new(ErrorCode::NameTaken, format!("a VM named {name} exists"), Some(hint)));
        }
        if self.making.has(name) {
            let hint = "choose another name, or wait a moment";
            return Err(ApiError::new(
                ErrorCode::NameTaken,
                format!("a VM named {name} is being made or removed"),
                Some(hint),
            ));
        }
        Ok(())
    }

    /// That no other host has a word to say about the VM of this name: one that was given away may run there.
    fn check_not_moving(&self, name: &str) -> Result<(), ApiError> {
        let problem = match self.moves.notes().read(name) {
            Ok(None | Some(Note::Owned(_))) => return Ok(()),
            Ok(Some(_)) => format!("a move of {name} between this host and another has not ended"),
            Err(error) => in_full(error.as_ref()),
        };
        Err(ApiError::new(ErrorCode::NameTaken, problem, Some("see `pagoda moves`")))
    }

    /// That a VM has not just gone to another host, where it runs.
    fn check_not_moved(&self, name: &str) -> Result<(), ApiError> {
        let Some(to) = self.moves.outgoing.just_moved(name) else { return Ok(()) };
        let hint = "it runs there; if you want a second one of an old state, give it another name, or wait a minute";
        Err(ApiError::new(ErrorCode::Refused, format!("{name} has just moved to {to}"), Some(hint)))
    }

    /// Takes the name, and what the VM needs of the policy.
    fn reserve<'a>(
        &'a self,
        name: &'a str,
        record: &Record,
        outbox: Option<&Arc<Outbox>>,
    ) -> Result<Reservation<'a>, ApiError> {
        let vms = self.lock();
        self.check_free(&vms, name)?;
        if vms.len() + self.making.count() >= VMS_MAX {
            return Err(ApiError::new(ErrorCode::NoRoom, format!("this daemon has {VMS_MAX} VMs already"), None));
        }
        if outbox.is_some() && self.outboxes.is_full() {
            return Err(ApiError::new(ErrorCode::NoRoom, "this daemon has as many outboxes as it can", None));
        }
        let id = self.admit(&vms, record, outbox)?;
        self.making.begin(name, id);
        Ok(Reservation { registry: self, name, id, vm_token: record.token })
    }

    fn make(&self, record: Record, source: Option<Source>, disks: Option<Restored>, id: VmId) -> Result<Vm, ApiError> {
        let reserve = if record.spec.reserve_swap { Reserve::Yes } else { Reserve::No };
        // A record that cannot be read is that of a VM nobody knows, which may run: nothing of it is written over.
        [self.records.path(&record.name), self.swap_path(&record.name)]
            .iter()
            .try_for_each(|path| check_absent(path))?;
        // Of a VM that is gone. Nobody may take them for this one's.
        let leftovers = ArrivalFiles::beside(&self.swap_path(&record.name)).remove();
        leftovers.map_err(|e| internal("remove what is left of a VM of that name", e))?;
        let forgotten = self.moves.check_forgotten(&record.name);
        forgotten.map_err(|e| internal("forget an earlier VM of the name", in_full(e.as_ref())))?;
        let moved = disks.as_ref().map(Restored::moved).transpose();
        let moved = moved.map_err(|e| internal("look at the VM's disks", in_full(e.as_ref())))?.unwrap_or_default();
        let record = Record { disks: moved, ..record };
        // The record comes before the swap file and the map: a daemon that finds one of these without it knows not whose it is.
        let (ram, monitor) = self.make_first(&record).inspect_err(|_| {
            let _ = std::fs::remove_file(self.monitor_path(&record.name));
        })?;
        let record = self.settle_restored(record, disks)?;
        let swap = SwapFile::create(&self.swap_path(&record.name), record.memory(), reserve).map_err(|e| {
            // Not the swap file: one that is there is not this VM's.
            let _ = self.records.remove(&record.name);
            let _ = std::fs::remove_file(self.monitor_path(&record.name));
            ApiError::new(ErrorCode::Unsupported, format!("make the VM's swap file: {e}"), None)
        })?;
        let given = source.map(|source| source.give(&self.image_map_path(&record.name))).transpose();
        let given = given.map_err(|e| internal("give the VM the map of its image", e));
        let given = given.inspect_err(|_| self.forget(&record))?;
        let (image_tier, reading) = given.map(|given| (given.tier, given.reading)).unzip();
        let group = self.config.page_sharing.then(|| self.new_group(&record)).transpose();
        let group = group.inspect_err(|_| self.forget(&record))?;
        let qmp = Monitor::new(&self.monitor_path(&record.name));
        Ok(Vm { ram, swap: Some(swap), monitor, image_tier, reading, ..Vm::new(record, id, qmp, group) })
    }

    /// From here on the record says what the disks are to be, so that they become that whatever fails.
    fn settle_restored(&self, record: Record, disks: Option<Restored>) -> Result<Record, ApiError> {
        let Some(mut disks) = disks.filter(|_| !record.disks.is_empty()) else { return Ok(record) };
        disks.keep();
        let settled = self.sync_records().and_then(|()| crate::disks::settle(record.launch.as_ref(), &record.disks));
        settled.map_err(|error| {
            self.forget(&record);
            internal("put the VM's disks back", in_full(error.as_ref()))
        })?;
        self.note_settled(record)
    }

    /// The disks have their names. If that cannot be noted there is no VM: at its next snapshot the record would be taken for one of
    /// disks that do not have them, and at its end nobody could tell which content is the newest.
    fn note_settled(&self, record: Record) -> Result<Record, ApiError> {
        let record = Record { disks: Vec::new(), ..record };
        self.records.write(&record).map_err(|error| {
            self.forget(&record);
            internal("note that the VM's disks are put back", in_full(error.as_ref()))
        })?;
        Ok(record)
    }

    fn make_first(&self, record: &Record) -> Result<(Vec<RamFile>, Option<OwnedFd>), ApiError> {
        let owner = rustix::process::geteuid().as_raw();
        let ram = record.regions.iter().map(|len| RamFile::create(&record.name, *len, owner)).collect::<Result<_, _>>();
        let ram = ram.map_err(|e| internal("make the VM's RAM", e))?;
        let monitor = match record.kind {
            VmKind::Qemu => Some(
                listen(&self.monitor_path(&record.name))
                    .map_err(|e| internal("make the monitor", in_full(e.as_ref())))?,
            ),
            VmKind::Plain => None,
        };
        self.records.write(record).map_err(|e| internal("write the VM's record", in_full(e.as_ref())))?;
        Ok((ram, monitor))
    }
}

/// That a file of the new VM's name is not there, as a fact.
fn check_absent(path: &Path) -> Result<(), ApiError> {
    let problem = match path.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => format!("look for {}: {error}", path.display()),
        Ok(_) => format!("{} exists, and this daemon knows no VM by it", path.display()),
    };
    let hint = "it may be a VM's that runs: choose another name, or move the file away if no VM has it";
    Err(ApiError::new(ErrorCode::NameTaken, problem, Some(hint)))
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use pagoda_api::types::VmSpec;

    use super::*;
    use crate::record::store::{self, RecordStore};
    use crate::record::{FileId, MovedDisk, TopFile};

    /// A disk that takes no second record: the VM is not made, and no record says that its disks are to be put in order.
    #[test]
    fn a_vm_whose_disks_are_put_back_has_a_record_that_says_so() {
        let dir = std::env::temp_dir().join(format!("pagodad-create-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("vms")).unwrap();
        let mut registry = crate::registry::tests::registry(&dir);
        static IS_FULL: AtomicBool = AtomicBool::new(false);
        let write = |path: &Path, content: &[u8]| match IS_FULL.load(Ordering::Relaxed) {
            true => Err(std::io::ErrorKind::StorageFull.into()),
            false => std::fs::write(path, content),
        };
        registry.records = RecordStore::with_disk(dir.join("vms"), Box::new(write));
        let id = FileId { dev: 1, ino: 2, born_ns: None };
        let top = TopFile { name: "top".into(), node: "node".into(), id, below: None };
        let record = Record {
            disks: vec![MovedDisk::new("/disk".into(), FileId::NONE, vec![top])],
            launch: Some(Launch::default()),
            ..Record::new("web1", Token([1; 16]), VmKind::Qemu, &[2 << 20], VmSpec::default())
        };
        let path = registry.records.path("web1");
        store::write(&path, &record).unwrap();
        assert!(registry.note_settled(record.clone()).unwrap().disks.is_empty());
        assert!(store::read(&path).unwrap().disks.is_empty());
        store::write(&path, &record).unwrap();
        IS_FULL.store(true, Ordering::Relaxed);
        let error = registry.note_settled(record).unwrap_err();
        assert!(error.message.contains("are put back"), "{error:?}");
        assert!(!path.exists() && registry.unsettled.all().is_empty(), "nothing is left to be put in order");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
