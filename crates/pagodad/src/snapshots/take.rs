//! Takes a snapshot of a VM, which runs on.
//!
//! The order, and what a daemon leaves that dies at a step:
//!
//! | step | what is done | the image | the VM |
//! |---|---|---|---|
//! | 1 | all checks; nothing is changed | none | runs |
//! | 2 | the record says that a snapshot is being taken, and which | none | runs |
//! | 3 | empty files are made, also overlays of disks ([`crate::disks`]), and pages are protected while the VM runs | none | runs |
//! | 4 | QEMU saves the state of its devices, and stops by itself for that | none | the stream breaks, and QEMU lets it run |
//! | 5 | QEMU puts the overlays on its disks; state and manifest are written | none | the next daemon lets it run |
//! | 6 | the engine begins the image | whole from its rename on | the next daemon lets it run |
//! | 7 | QEMU lets the VM run | whole | runs |
//! | 8 | the record no longer says that a snapshot is being taken | whole | runs |
//!
//! After that the image is filled in the background ([`super::filling`]). What fails before the image has begun is undone here,
//! in the other order. What fails later leaves a whole image.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagoda_api::types::{
    AUTOSNAPSHOT_PREFIX, ApiError, CreateSnapshot, ErrorCode, Launch, Snapshot, SnapshotName, UNKNOWN_LAUNCH,
};
use pagoda_api::{in_full, time};
use pagoda_core::policy::VmId;
use pagoda_core::stats::Metric;
use pagoda_core::units::{Bytes, PageCount};
use pagoda_image::limits::STATE_BYTES_MAX;
use pagoda_image::{DiskFile, ImageId, Ledger, Manifest, Part, Qemu, Stage, Store};
use pagoda_pager::handle::{Command, Handle};
use pagoda_pager::image::{Answer, ImageStage, Ticket};

use super::disks;
use crate::disks::{Found, Taking as TakingDisks, find};
use crate::images::admission::NewImage;
use crate::images::{Held, as_refused, refused};
use crate::qmp::Monitor;
use crate::qmp::state::{self, Pause, RunState, SaveError, Saved, undo};
use crate::random;
use crate::record::{Operation, OperationKind, Record};
use crate::registry::Registry;
use crate::registry::operation::{ImageThen, Ready};

/// How long pages are protected while the VM runs. What is left is protected while it stands still.
const PREPARE_MAX: Duration = Duration::from_secs(2);
/// How long a clone's memory may take to become its own: some 1,000 chunks a second.
const OWN_MAX: Duration = Duration::from_secs(60);
/// All pages have been protected so often: the second time for what was written during the first.
const SWEEPS: u32 = 2;
/// The pause between two looks how far that is.
const LOOK: Duration = Duration::from_millis(10);
/// How long QEMU may take for its state. The guest runs for most of that, while memory of devices is sent.
const SAVE_MAX: Duration = Duration::from_secs(60);
/// How long the VM stands still for the engine to begin the image. Then the snapshot is given up.
const BEGIN_MAX: Duration = Duration::from_secs(2);

/// Takes a snapshot. What is returned exists; the VM runs if it ran before.
///
/// # Errors
/// [`ErrorCode::Refused`] and others of a request that is wrong: nothing was changed. [`ErrorCode::GivenUp`]: there is no
/// snapshot, and the VM is as it was.
pub fn take(registry: &Arc<Registry>, vm: &str, request: &CreateSnapshot) -> Result<Snapshot, ApiError> {
    request.check().map_err(|message| ApiError::new(ErrorCode::BadRequest, message, None))?;
    let name = request.name.clone().unwrap_or_else(|| time::compact(now_ms()));
    let taking = Taking::check(registry, SnapshotName::new(vm, name), request.disks).map_err(as_refused)?;
    taking.run()?;
    registry.images.get(&taking.name)
}

/// The same by the VM's timetable; its name is what is returned.
///
/// # Errors
/// As [`take`].
pub fn take_automatic(registry: &Arc<Registry>, vm: &str, with_disks: bool) -> Result<String, ApiError> {
    let name = format!("{AUTOSNAPSHOT_PREFIX}{}", time::compact(now_ms()));
    let taking = Taking::check(registry, SnapshotName::new(vm, name), Some(with_disks))?;
    let taking = Taking { automatic: true, ..taking };
    taking.run()?;
    Ok(taking.name.name)
}

/// A snapshot that is being taken.
struct Taking<'a> {
    registry: &'a Arc<Registry>,
    store: &'a Arc<Store>,
    id: VmId,
    image: ImageId,
    name: SnapshotName,
    record: Record,
    launch: Launch,
    handle: Arc<Handle>,
    qmp: Arc<Monitor>,
    qemu: Qemu,
    is_running: bool,
    automatic: bool,
    /// The disks whose content it has; `None`: it is taken without.
    disks: Option<Vec<Found>>,
    overlays: RefCell<TakingDisks>,
}

impl<'a> Taking<'a> {
    /// Step 1, as far as it needs no room on the disk.
    fn check(
        registry: &'a Arc<Registry>,
        name: SnapshotName,
        with_disks: Option<bool>,
    ) -> Result<Taking<'a>, ApiError> {
        let refuse = |why: String, hint| refused(format!("no snapshot of {}: {why}", name.vm), hint);
        let Ready { id, record, handle, qmp } = registry.ready_for(&name.vm, OperationKind::Snapshot)?;
        let unstartable = |why: String| refuse(format!("nobody could start it again: {why}"), None);
        let launch = record.launch.clone().ok_or_else(|| unstartable(UNKNOWN_LAUNCH.to_owned()))?;
        if let Some(why) = launch.why_unstartable() {
            return Err(unstartable(why));
        }
        if let Some(reason) = handle.status().pinned.clone().or_else(|| record.spec.pinned.clone()) {
            return Err(refuse(format!("its memory is written by others, unseen: {reason}"), None));
        }
        state::check(&qmp).map_err(|why| refuse(why, None))?;
        let asked = |error: anyhow::Error| refuse(in_full(error.as_ref()), None);
        let qemu = state::machine(&qmp).map_err(asked)?;
        registry.programs.note(record.pid.0, &qemu.version);
        let overlays = RefCell::new(TakingDisks::none(&launch));
        let disks = match with_disks {
            Some(true) => Some(find(&qmp, &record, &launch).map_err(|error| {
                let hint = "--no-disks takes it without the content of disks; keep a copy of them yourself then";
                refuse(in_full(error.as_ref()), Some(hint))
            })?),
            said => {
                // It is asked again when the VM stands still; here it is found out whether there will be an answer.
                let writable = disks::writable(&qmp, &launch.cwd, &record.disks).map_err(asked)?;
                if let (None, Some(disk)) = (said, writable.first()) {
                    let hint = "--disks takes the content of disks too, each of which gets an overlay; --no-disks takes the \
                                snapshot without, which fits only disks that nobody has written since";
                    return Err(refuse(format!("it has writable disks, such as {}", disk.file), Some(hint)));
                }
                None
            }
        };
        let is_running = state::run_state(&qmp).map_err(asked)? == RunState::Running;
        let image = random::bytes().map_err(|error| refuse(format!("make its id: {error}"), None))?;
        let store = registry.images.ready()?;
        let image = ImageId(u128::from_le_bytes(image));
        let automatic = false;
        Ok(Taking {
            registry,
            store,
            id,
            image,
            name,
            record,
            launch,
            handle,
            qmp,
            qemu,
            is_running,
            automatic,
            disks,
            overlays,
        })
    }

    fn run(&self) -> Result<(), ApiError> {
        // It is not removed before this image is begun, and says itself that it refers to it.
        let parent = self.parent();
        let same = parent.as_ref().map_or(PageCount(0), |(_, same)| *same);
        let room = self.registry.images.admit(&NewImage {
            id: self.image,
            name: &self.name,
            pages: self.pages(),
            filled: self.filled().min(self.pages().saturating_sub(same)),
        })?;
        let parent = parent.as_ref().map(|(held, _)| held.id);
        let operation = Operation { kind: OperationKind::Snapshot, image: self.image, resume: self.is_running };
        self.registry.begin_operation(self.id, operation)?;
        let made = self.store.create_on(parent, self.image, self.pages());
        let (part, prepared) = made.map_err(|error| self.give_up(&format!("make its files: {}", in_full(&error))))?;
        self.handle.send(Command::FollowImages(self.registry.images.makes_chains()));
        self.handle.send(Command::PrepareImage(prepared));
        self.make_overlays()?;
        self.wait_until_prepared().map_err(|why| self.give_up(&why))?;
        let opened = self.overlays.borrow().open(&self.qmp);
        opened.map_err(|error| self.give_up(&in_full(error.as_ref())))?;
        self.check_unchanged().map_err(|why| self.give_up(&why))?;
        let Saved { state, pause } = self.save()?;
        if pause.was_running() != self.is_running {
            let running = pause.was_running();
            drop(pause);
            return Err(self.give_up_paused("it was paused or let run meanwhile", running));
        }
        match self.begin(part, &state) {
            Ok(ledger) => {
                room.begun();
                self.resume(pause, &ledger)
            }
            Err(why) => {
                let running = pause.was_running();
                drop(pause);
                Err(self.give_up_paused(&why, running))
            }
        }
    }

    /// The overlays of the disks, which the record names when this returns.
    fn make_overlays(&self) -> Result<(), ApiError> {
        let disks = self.disks.as_deref().unwrap_or_default();
        let made = TakingDisks::make(disks, &self.launch, self.image);
        let made = made.map_err(|error| {
            let hint = "--no-disks takes it without the content of disks";
            // The VM was not stopped, and nothing is left.
            let ApiError { message, .. } = self.give_up(&in_full(error.as_ref()));
            refused(message, Some(hint))
        })?;
        if made.is_empty() {
            return Ok(());
        }
        let Some(noted) = self.registry.set_disks(self.id, made.moved(&self.record.disks)) else {
            // No record has ever named them.
            made.remove_files();
            return Err(self.give_up("the VM has ended"));
        };
        self.overlays.replace(made);
        noted.map_err(|error| self.give_up(&format!("note the overlays: {}", in_full(error.as_ref()))))
    }

    /// The layers are written no more: that they are is noticed later.
    fn note_layers(&self) {
        let overlays = self.overlays.borrow();
        if overlays.is_empty() {
            return;
        }
        let noted = overlays.moved_for_good(&self.record.disks).and_then(|moved| {
            // If it has ended, its disks have their names.
            self.registry.set_disks(self.id, moved).unwrap_or(Ok(()))
        });
        if let Err(error) = noted {
            tracing::warn!(vm = %self.name.vm, "note the layers of its disks: {}", in_full(error.as_ref()));
        }
    }

    /// There is no snapshot. Overlays that QEMU may write to stay.
    fn undo_overlays(&self) {
        let overlays = self.overlays.borrow();
        if overlays.is_empty() || overlays.may_be_switched() {
            return;
        }
        overlays.close(&self.qmp);
        // If the VM has ended, they may have the disks' names by now.
        match self.registry.set_disks(self.id, self.record.disks.clone()) {
            Some(Ok(())) => overlays.remove_files(),
            Some(Err(error)) => {
                tracing::warn!(vm = %self.name.vm, "its overlays stay: write its record: {}", in_full(error.as_ref()));
            }
            None => {}
        }
    }

    /// The VM's newest image, and how much of it the VM still holds, if the engine knows that and a new one may refer to it.
    fn parent(&self) -> Option<(Held<'_>, PageCount)> {
        let (id, same) = self.handle.fresh_status().whole_image.filter(|_| self.registry.images.makes_chains())?;
        Some((self.registry.images.hold_parent(id, &self.name.vm)?, same))
    }

    fn pages(&self) -> PageCount {
        Bytes(self.record.memory()).pages_floor()
    }

    /// Pages that are somewhere; the others are zero.
    fn filled(&self) -> PageCount {
        let status = self.handle.fresh_status();
        if !status.armed {
            return Bytes(status.ram_bytes).pages_ceil();
        }
        let gauges = [Metric::Resident, Metric::Swapped, Metric::Shared, Metric::Borrowed];
        PageCount(gauges.iter().map(|gauge| status.stats.get(*gauge)).sum())
    }

    /// Step 3. If it takes too long, the rest is protected while the VM stands still. What is borrowed becomes the VM's own before
    /// that, however long it takes.
    fn wait_until_prepared(&self) -> Result<(), String> {
        let mut deadline = Instant::now() + PREPARE_MAX;
        let last = Instant::now() + OWN_MAX;
        loop {
            let status = self.handle.fresh_status();
            if status.stats.get(Metric::BorrowedChunks) > 0 && Instant::now() < last {
                deadline = Instant::now() + PREPARE_MAX;
                std::thread::sleep(LOOK);
                continue;
            }
            let stage = status.image.filter(|image| image.id == self.image).map(|image| image.stage);
            match stage {
                Some(ImageStage::Preparing { sweeps }) if status.armed && sweeps >= SWEEPS => return Ok(()),
                Some(ImageStage::Preparing { .. }) if status.armed && Instant::now() > deadline => return Ok(()),
                _ if Instant::now() > deadline => return Err("the engine did not begin to page the VM".to_owned()),
                _ => std::thread::sleep(LOOK),
            }
        }
    }

    /// The record says whether the guest is to run afterwards. Whoever has paused it or let it run meanwhile has the last word.
    fn check_unchanged(&self) -> Result<(), String> {
        let is_running = state::run_state(&self.qmp).map_err(|error| in_full(error.as_ref()))? == RunState::Running;
        if is_running != self.is_running {
            return Err("it was paused or let run meanwhile".to_owned());
        }
        if self.is_stalled() {
            return Err("it is stalled".to_owned());
        }
        Ok(())
    }

    /// Its pages cannot be read or written: it stays paused until its user lets it run (`pagoda vm cont`).
    fn is_stalled(&self) -> bool {
        self.registry.find_by_id(self.id, |vm| vm.stalled.is_some()).unwrap_or(false)
    }

    /// Step 4: has QEMU save the state of its devices.
    fn save(&self) -> Result<Saved<'_>, ApiError> {
        let Some(gate) = self.registry.gate_of(self.id) else {
            return Err(self.give_up("the VM has ended"));
        };
        let deadline = Instant::now() + SAVE_MAX;
        state::save(&self.qmp, &gate, STATE_BYTES_MAX, deadline).map_err(|SaveError { why, left }| {
            let why = format!("QEMU's state was not saved: {}", in_full(why.as_ref()));
            match left {
                None => self.give_up(&why),
                Some(left) => self.give_up_cut_off(&format!("{why}; {}", in_full(left.as_ref()))),
            }
        })
    }

    /// Steps 5 and 6. The VM stands still.
    fn begin(&self, part: Part, state: &[u8]) -> Result<Arc<Ledger>, String> {
        let in_words = |error: pagoda_image::ImageError| in_full(&error);
        // Before that QEMU has written out all that the guest was told is written.
        self.overlays.borrow_mut().switch(&self.qmp).map_err(|error| in_full(error.as_ref()))?;
        let of_disks = self.disks_then().map_err(|error| in_full(error.as_ref()))?;
        let state = part.write_state(state).map_err(in_words)?;
        let Record { regions, spec, .. } = &self.record;
        let manifest = Manifest {
            id: self.image,
            vm: self.name.vm.clone(),
            name: self.name.name.clone(),
            taken_unix_ms: now_ms(),
            boot_id: self.registry.images.boot_id().map_err(|error| error.message)?.to_owned(),
            stage: Stage::Begun,
            why: None,
            regions: regions.clone(),
            spec: spec.clone(),
            launch: self.launch.clone(),
            qemu: self.qemu.clone(),
            state,
            pause_us: None,
            running: self.is_running,
            disks: of_disks,
            parent: part.parent(),
            inherited_pages: None,
            automatic: self.automatic,
            imported: None,
        };
        let ledger = part.begin(manifest).map_err(in_words)?;
        let ticket = Ticket::new();
        self.handle.send(Command::BeginImage(Arc::clone(&ticket)));
        match ticket.wait(BEGIN_MAX) {
            Answer::Begun => Ok(ledger),
            Answer::Refused(why) => Err(why),
            Answer::TooLate => Err(format!("the engine did not begin it within {} s", BEGIN_MAX.as_secs())),
        }
    }

    /// What the manifest says of the disks.
    fn disks_then(&self) -> anyhow::Result<Vec<DiskFile>> {
        match self.disks {
            Some(_) => self.overlays.borrow().disks(),
            None => disks::writable(&self.qmp, &self.launch.cwd, &self.record.disks),
        }
    }

    /// Steps 7 and 8. The image exists.
    fn resume(&self, pause: Pause<'_>, ledger: &Ledger) -> Result<(), ApiError> {
        if let Err(why) = pause.check() {
            // Its memory may be newer than its state.
            let running = pause.was_running();
            drop(pause);
            let why = in_full(why.as_ref());
            self.handle.send(Command::RemoveImage(self.image));
            ledger.lose(&why);
            return Err(self.give_up_paused(&why, running));
        }
        if pause.was_running() && !self.is_stalled() {
            match state::resume(pause) {
                Ok(pause_us) => {
                    if let Some(Err(error)) = pause_us.map(|pause_us| ledger.note_pause(pause_us)) {
                        tracing::warn!(vm = %self.name.vm, "note how long it stood still: {}", in_full(&error));
                    }
                }
                Err(error) => {
                    // Whether it runs is not known. The image is whole.
                    tracing::warn!(vm = %self.name.vm, "let it run: {}", in_full(error.as_ref()));
                    self.registry.abandon_operation(self.id);
                    return Ok(());
                }
            }
        }
        self.note_layers();
        self.registry.end_operation(self.id, ImageThen::Kept);
        Ok(())
    }

    /// The VM was not stopped, or runs again.
    fn give_up(&self, why: &str) -> ApiError {
        // The overlays are undone as long as no other operation can begin.
        self.undo_overlays();
        self.remove_files();
        self.registry.end_operation(self.id, ImageThen::Gone);
        self.given_up(why, None)
    }

    /// The VM stands still since its state was saved.
    fn give_up_paused(&self, why: &str, running: bool) -> ApiError {
        let paused: &[RunState] = if running { &[RunState::PostMigrate] } else { &[] };
        let undone = match self.registry.gate_of(self.id) {
            Some(gate) => undo(&self.qmp, &gate, paused).map_err(|error| in_full(error.as_ref())),
            None => Ok(()),
        };
        match undone {
            Ok(()) => self.give_up(why),
            Err(left) => self.give_up_cut_off(&format!("{why}; {left}")),
        }
    }

    /// Something could not be undone, and is tried again until it succeeds.
    fn give_up_cut_off(&self, why: &str) -> ApiError {
        self.remove_files();
        self.registry.forget_image(self.id, self.image);
        self.registry.abandon_operation(self.id);
        self.given_up(why, Some("the daemon goes on trying to let the VM run: see its log"))
    }

    fn remove_files(&self) {
        self.handle.send(Command::CancelImage);
        if let Err(error) = self.store.remove(self.image) {
            tracing::warn!(vm = %self.name.vm, "remove a snapshot that was given up: {}", in_full(&error));
        }
    }

    fn given_up(&self, why: &str, hint: Option<&str>) -> ApiError {
        ApiError::new(ErrorCode::GivenUp, format!("no snapshot of {}: {why}", self.name.vm), hint)
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
