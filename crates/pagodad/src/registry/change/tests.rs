//! Changes while a disk is slow, full or waited for. No test waits for time: the disk says when it was asked, and answers when
//! it is told to.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use pagoda_abi::Token;
use pagoda_api::types::{ErrorCode, VmKind, VmPatch, VmSpec};
use pagoda_core::units::{Bytes, PageCount};

use super::*;
use crate::record::store::{self, RecordStore};
use crate::record::{Operation, OperationKind};
use crate::registry::operation::ImageThen;
use crate::registry::writing::WritingLock;

const MEMORY: u64 = 1 << 30;
const HALF: u64 = MEMORY / 2;
const QUARTER: u64 = MEMORY / 4;

/// A registry whose records are written when the test says so.
struct Bench {
    dir: PathBuf,
    registry: Arc<Registry>,
    /// Paths that are about to be written.
    asked: Receiver<PathBuf>,
    /// What becomes of each, in order.
    answers: Sender<std::io::Result<()>>,
}

impl Bench {
    fn new(name: &str) -> Bench {
        let dir = std::env::temp_dir().join(format!("pagodad-change-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        for sub in ["swap", "vms"] {
            std::fs::create_dir_all(dir.join(sub)).unwrap();
        }
        let mut registry = crate::registry::tests::registry(&dir);
        let ((ask, asked), (answers, answer)) = (channel(), channel::<std::io::Result<()>>());
        let answer = Mutex::new(answer);
        let disk = move |path: &Path, content: &[u8]| {
            ask.send(path.to_owned()).unwrap();
            answer.lock().unwrap().recv().unwrap()?;
            std::fs::write(path, content)
        };
        registry.records = RecordStore::with_disk(dir.join("vms"), Box::new(disk));
        Bench { dir, registry: Arc::new(registry), asked, answers }
    }

    /// A VM without a program, whose record is on the disk.
    fn vm(&self, name: &str, pid: (u32, u64)) -> VmId {
        let record = Record::new(name, Token([name.len() as u8; 16]), VmKind::Qemu, &[MEMORY], VmSpec::default());
        let record = Record { pid, ..record };
        store::write(&self.registry.records.path(name), &record).unwrap();
        self.registry.find_again(record);
        self.registry.id_of(name).unwrap()
    }

    fn on_disk(&self, name: &str) -> Option<Record> {
        let path = self.registry.records.path(name);
        path.exists().then(|| store::read(&path).unwrap())
    }

    fn record(&self, id: VmId) -> Option<Record> {
        self.registry.find_by_id(id, |vm| vm.record.clone())
    }

    /// What the policy promises and plans with.
    fn min(&self, id: VmId) -> PageCount {
        self.registry.governor.lock().rounds.policy.settings(id).unwrap().min
    }

    fn set_min(&self, name: &'static str, min: u64) -> std::thread::JoinHandle<Result<u64, ErrorCode>> {
        let registry = Arc::clone(&self.registry);
        std::thread::spawn(move || {
            let patched = registry.patch(name, &VmPatch { min: Some(min), ..VmPatch::default() });
            patched.map(|vm| vm.policy.min_bytes).map_err(|error| error.code)
        })
    }

    /// Until so many others have or want the VM's writing lock.
    fn until_wanted(&self, id: VmId, count: usize) {
        while self.registry.find_by_id(id, |vm| Arc::strong_count(&vm.writing)) != Some(1 + count) {
            std::thread::yield_now();
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn disk_full() -> std::io::Result<()> {
    Err(std::io::ErrorKind::StorageFull.into())
}

/// A process that has ended, as far as anybody knows: this one is 1 tick older than it is.
fn ended() -> (u32, u64) {
    let own = std::process::id();
    (own, pagoda_sys::process::start_time(own).unwrap() - 1)
}

#[test]
fn a_change_takes_effect_when_it_is_written_and_holds_nobody_up() {
    let bench = Bench::new("effect");
    let (id, other) = (bench.vm("web1", (0, 0)), bench.vm("other", (0, 0)));
    let patch = bench.set_min("web1", HALF);
    assert_eq!(bench.asked.recv().unwrap(), bench.registry.records.path("web1"));
    // The disk has not answered: the VM is what it was, and everybody else goes on.
    assert_eq!(bench.registry.get("web1").unwrap().policy.min_bytes, 0);
    assert_eq!((bench.min(id), bench.record(id)), (PageCount::ZERO, bench.on_disk("web1")));
    crate::policy::rounds::make(&bench.registry);
    assert_eq!(bench.registry.list().len(), 2);
    let patch_of_other = bench.set_min("other", QUARTER);
    assert_eq!(bench.asked.recv().unwrap(), bench.registry.records.path("other"));
    bench.answers.send(Ok(())).unwrap();
    bench.answers.send(Ok(())).unwrap();
    assert_eq!((patch.join().unwrap(), patch_of_other.join().unwrap()), (Ok(HALF), Ok(QUARTER)));
    assert_eq!((bench.min(id), bench.min(other)), (Bytes(HALF).pages_ceil(), Bytes(QUARTER).pages_ceil()));
    assert_eq!(bench.record(id), bench.on_disk("web1"));
    assert_eq!(bench.on_disk("web1").unwrap().spec.policy.min, HALF);
}

#[test]
fn what_cannot_be_written_changes_nothing() {
    let bench = Bench::new("full");
    let id = bench.vm("web1", (0, 0));
    let before = bench.on_disk("web1");
    let reserved = || bench.registry.governor.lock().rounds.policy.reserved();
    let reserved_before = reserved();
    let patch = bench.set_min("web1", HALF);
    bench.asked.recv().unwrap();
    bench.answers.send(disk_full()).unwrap();
    assert_eq!(patch.join().unwrap(), Err(ErrorCode::Internal));
    assert_eq!((bench.on_disk("web1"), bench.record(id)), (before.clone(), before));
    assert_eq!((bench.min(id), reserved()), (PageCount::ZERO, reserved_before));
    // The next one finds no trace of it.
    let patch = bench.set_min("web1", QUARTER);
    bench.asked.recv().unwrap();
    bench.answers.send(Ok(())).unwrap();
    assert_eq!(patch.join().unwrap(), Ok(QUARTER));
}

/// What is promised to a VM while its record is written is promised to nobody else, and what it had is still its.
#[test]
fn what_a_change_may_need_is_reserved_while_it_is_written() {
    let bench = Bench::new("reserved");
    bench.vm("web1", (0, 0));
    let admitted = |min: u64| {
        let request = pagoda_api::types::AdmitRequest { memory_bytes: 8 * MEMORY, dram: None, min };
        bench.registry.would_admit(&request).unwrap().missing
    };
    let free = {
        let request = pagoda_api::types::AdmitRequest { memory_bytes: MEMORY, dram: None, min: 0 };
        bench.registry.would_admit(&request).unwrap().memory_free_bytes
    };
    let needs_all = || admitted(free - HALF).contains("of memory are missing");
    assert!(!needs_all());
    let patch = bench.set_min("web1", MEMORY);
    bench.asked.recv().unwrap();
    assert!(needs_all(), "it may be granted");
    bench.answers.send(disk_full()).unwrap();
    patch.join().unwrap().unwrap_err();
    assert!(!needs_all(), "it was not");
    let grant = |min: u64| {
        let patch = bench.set_min("web1", min);
        bench.asked.recv().unwrap();
        patch
    };
    let patch = grant(MEMORY);
    bench.answers.send(Ok(())).unwrap();
    assert_eq!(patch.join().unwrap(), Ok(MEMORY));
    let patch = grant(0);
    assert!(needs_all(), "it may have to be kept");
    bench.answers.send(Ok(())).unwrap();
    assert_eq!(patch.join().unwrap(), Ok(0));
    assert!(!needs_all());
}

#[test]
fn changes_of_one_vm_follow_one_another() {
    let bench = Bench::new("both");
    let id = bench.vm("web1", (0, 0));
    let first = bench.set_min("web1", HALF);
    bench.asked.recv().unwrap();
    let registry = Arc::clone(&bench.registry);
    let pin = std::thread::spawn(move || registry.pin(id, "a device"));
    bench.until_wanted(id, 2);
    assert_eq!(bench.asked.try_recv().ok(), None, "the second waits");
    bench.answers.send(Ok(())).unwrap();
    assert_eq!(first.join().unwrap(), Ok(HALF));
    bench.asked.recv().unwrap();
    bench.answers.send(Ok(())).unwrap();
    pin.join().unwrap();
    let spec = bench.on_disk("web1").unwrap().spec;
    assert_eq!((spec.policy.min, spec.pinned.as_deref()), (HALF, Some("a device")));
    assert_eq!(bench.record(id), bench.on_disk("web1"));
    // Once it is pinned, nothing is written.
    bench.registry.pin(id, "another device");
    assert_eq!(bench.asked.try_recv().ok(), None);
}

/// Its pages stay in DRAM all the same.
#[test]
fn a_vm_is_pinned_also_if_that_cannot_be_written() {
    let bench = Bench::new("pin");
    let id = bench.vm("web1", (0, 0));
    let registry = Arc::clone(&bench.registry);
    bench.answers.send(disk_full()).unwrap();
    registry.pin(id, "a device");
    assert_eq!(bench.record(id).unwrap().spec.pinned.as_deref(), Some("a device"));
    // The next change writes it.
    bench.answers.send(Ok(())).unwrap();
    assert_eq!(bench.set_min("web1", HALF).join().unwrap(), Ok(HALF));
    assert_eq!(bench.on_disk("web1").unwrap().spec.pinned.as_deref(), Some("a device"));
}

/// Who hears that a VM is gone may make its files anew. Who asks for all VMs does not wait for one that goes.
#[test]
fn a_vm_is_gone_when_its_files_are() {
    let bench = Bench::new("gone");
    let removal = WritingLock::default();
    let held = removal.lock().unwrap();
    bench.registry.making.begin_removal("web1", VmId(9), &removal);
    assert!(bench.registry.list().is_empty());
    let registry = Arc::clone(&bench.registry);
    let asking = std::thread::spawn(move || registry.get("web1").map(|vm| vm.name).map_err(|error| error.code));
    // The lock is this test's, the removal's, and that of who waits for it.
    while Arc::strong_count(&removal) < 3 && !asking.is_finished() {
        std::thread::yield_now();
    }
    assert!(!asking.is_finished(), "it was said while files were there");
    bench.registry.making.end("web1");
    drop(held);
    assert_eq!(asking.join().unwrap(), Err(ErrorCode::NoSuchVm));
}

/// Page-out must not go on while the disk is slow.
#[test]
fn an_engine_is_pinned_before_the_disk_is_asked() {
    let bench = Bench::new("pinfirst");
    let id = bench.vm("web1", (0, 0));
    let (handle, inbox) = pagoda_pager::handle::channel_pair().unwrap();
    bench.registry.find_by_id(id, |vm| vm.handle = Some(Arc::new(handle)));
    let registry = Arc::clone(&bench.registry);
    let pin = std::thread::spawn(move || registry.pin(id, "a device"));
    bench.asked.recv().unwrap();
    assert!(matches!(inbox.next(), Some(pagoda_pager::handle::Command::Pin(reason)) if reason == "a device"));
    bench.answers.send(Ok(())).unwrap();
    pin.join().unwrap();
}

#[test]
fn a_vm_that_ends_while_its_record_is_written_leaves_none() {
    let bench = Bench::new("reaped");
    let id = bench.vm("web1", (0, 0));
    let patch = bench.set_min("web1", HALF);
    bench.asked.recv().unwrap();
    // Its process ends now.
    bench.registry.find_by_id(id, |vm| vm.record.pid = ended());
    bench.registry.reap();
    assert!(bench.registry.get("web1").is_ok() && bench.on_disk("web1").is_some(), "it is looked at again");
    bench.answers.send(Ok(())).unwrap();
    // What was planned was planned before: the record has no process.
    patch.join().unwrap().unwrap();
    bench.registry.find_by_id(id, |vm| vm.record.pid = ended());
    bench.registry.reap();
    assert!(bench.registry.get("web1").is_err() && bench.on_disk("web1").is_none());
    assert_eq!(bench.set_min("web1", HALF).join().unwrap(), Err(ErrorCode::NoSuchVm));
    assert_eq!(bench.asked.try_recv().ok(), None, "nothing is written for it any more");
}

/// As its engine says it, and at its user's request: both wait for the disk.
#[test]
fn an_end_waits_for_the_record_and_the_name_stays_taken() {
    for by_user in [false, true] {
        let bench = Bench::new(if by_user { "deleted" } else { "exited" });
        let id = bench.vm("web1", (0, 0));
        let patch = bench.set_min("web1", HALF);
        bench.asked.recv().unwrap();
        let registry = Arc::clone(&bench.registry);
        let end = std::thread::spawn(move || match by_user {
            true => registry.delete("web1").unwrap(),
            false => registry.exited(id),
        });
        bench.until_wanted(id, 2);
        let late = bench.set_min("web1", QUARTER);
        bench.until_wanted(id, 3);
        assert!(bench.registry.lock().contains_key("web1"), "a new VM would have files of the same names");
        bench.answers.send(Ok(())).unwrap();
        assert_eq!(patch.join().unwrap().err().filter(|code| *code != ErrorCode::NoSuchVm), None);
        // If the third came before the second, it was written before the end.
        bench.answers.send(Ok(())).unwrap();
        end.join().unwrap();
        assert_eq!(late.join().unwrap().err().filter(|code| *code != ErrorCode::NoSuchVm), None);
        assert!(bench.on_disk("web1").is_none() && bench.record(id).is_none());
    }
}

/// The record of a new VM is not that of the one before, whatever came too late for that.
#[test]
fn what_comes_too_late_leaves_the_next_vm_of_the_name_alone() {
    let bench = Bench::new("next");
    let first = bench.vm("web1", (0, 0));
    bench.registry.exited(first);
    let second = bench.vm("web1", (0, 0));
    bench.registry.exited(first);
    bench.registry.pin(first, "a device");
    bench.registry.note_balloon(first);
    assert!(bench.asked.try_recv().is_err());
    assert_eq!(bench.record(second), bench.on_disk("web1"));
    assert!(bench.on_disk("web1").is_some_and(|record| record.spec == VmSpec::default()));
}

#[test]
fn a_record_of_before_is_read_and_written_anew_at_the_next_change() {
    let bench = Bench::new("before");
    let text = include_str!("../../record/golden/1-least.vm");
    let (path, bad) = (bench.registry.records.path("web1"), bench.registry.records.path("bad"));
    std::fs::write(&path, text).unwrap();
    std::fs::write(&bad, text.replace("dram", "drma")).unwrap();
    bench.registry.load().unwrap();
    let names: Vec<String> = bench.registry.list().into_iter().map(|vm| vm.name).collect();
    assert_eq!(names, ["web1"]);
    assert_eq!(bench.registry.get("web1").unwrap().dram_limit_bytes, HALF);
    // What changes nothing writes nothing.
    bench.registry.patch("web1", &VmPatch { dram: Some(HALF), ..VmPatch::default() }).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    bench.answers.send(Ok(())).unwrap();
    assert_eq!(bench.set_min("web1", QUARTER).join().unwrap(), Ok(QUARTER));
    assert!(std::fs::read_to_string(&path).unwrap().starts_with("pagoda-vm 2\n"));
    let record = bench.on_disk("web1").unwrap();
    assert_eq!((record.spec.dram, record.spec.policy.min), (Some(HALF), QUARTER));
    assert_eq!(std::fs::read_to_string(&bad).unwrap(), text.replace("dram", "drma"), "it is left alone");
}

/// A round has the registry while it sets a balloon's target.
#[test]
fn a_round_does_not_wait_for_the_note_of_a_balloon() {
    let bench = Bench::new("balloon");
    let id = bench.vm("web1", (0, 0));
    let follow = || bench.registry.find_by_id(id, |vm| bench.registry.follow_plan(vm)).unwrap().unwrap();
    follow();
    bench.asked.recv().unwrap();
    follow();
    assert_eq!(bench.record(id).unwrap().spec.balloon_target, None, "nothing is asked of the guest yet");
    bench.answers.send(Ok(())).unwrap();
    while bench.registry.find_by_id(id, |vm| vm.record.spec.balloon_target).unwrap() != Some(MEMORY) {
        std::thread::yield_now();
    }
    assert_eq!(bench.record(id), bench.on_disk("web1"));
    assert_eq!(bench.asked.try_recv().ok(), None, "one thread is enough");
}

#[test]
fn during_an_operation_nothing_else_is_done_to_a_vm() {
    let bench = Bench::new("operation");
    let image = pagoda_image::ImageId(7);
    let operation = Operation { kind: OperationKind::Snapshot, image, resume: true };
    let id = bench.vm("web1", (0, 0));
    let begun = bench.registry.begin_operation(id, operation).map_err(|error| error.message);
    assert!(begun.is_err_and(|message| message.contains("not attached")));

    let record = Record { operation: Some(operation), image: Some(image), ..bench.record(id).unwrap() };
    bench.registry.find_by_id(id, |vm| vm.record = record);
    let refused = |answer: Result<(), pagoda_api::types::ApiError>| {
        let error = answer.expect_err("refused");
        assert_eq!(error.code, ErrorCode::WrongState);
        assert!(error.message.contains("a snapshot of web1 is under way"), "{}", error.message);
    };
    let target = VmPatch { balloon_target: Some(HALF), ..VmPatch::default() };
    refused(bench.registry.patch("web1", &target).map(drop));
    refused(bench.registry.patch("web1", &VmPatch { min: Some(HALF), ..VmPatch::default() }).map(drop));
    refused(bench.registry.cont("web1").map(drop));
    refused(bench.registry.begin_operation(id, operation));
    bench.registry.find_by_id(id, |vm| {
        crate::policy::block::follow(&bench.registry, vm, pagoda_core::policy::Run::Block);
        assert!(!vm.governed.block.is_under_way(), "it is left alone");
    });

    // It ends also on a disk that takes nothing, and so does the image.
    bench.answers.send(Err(std::io::ErrorKind::StorageFull.into())).unwrap();
    bench.registry.end_operation(id, ImageThen::Kept);
    assert_eq!(bench.record(id).map(|record| (record.operation, record.image)), Some((None, Some(image))));
    bench.answers.send(Ok(())).unwrap();
    bench.registry.forget_image(id, pagoda_image::ImageId(8));
    assert_eq!(bench.record(id).unwrap().image, Some(image), "another");
    bench.registry.forget_image(id, image);
    assert_eq!(bench.record(id).unwrap().image, None);
}

/// Of a daemon that starts: it knows who reads which image, and for how long.
#[test]
fn the_image_of_a_vm_is_kept_until_the_vm_and_its_files_are_gone() {
    let bench = Bench::new("reads");
    let image = pagoda_image::ImageId(7);
    let write = |name: &str, pid| {
        let record = Record::new(name, Token([name.len() as u8; 16]), VmKind::Qemu, &[MEMORY], VmSpec::default());
        let record = Record { pid, reads: Some(image), ..record };
        store::write(&bench.registry.records.path(name), &record).unwrap();
        std::fs::write(bench.registry.image_map_path(name), "map").unwrap();
    };
    write("web1", (0, 0));
    write("web22", ended());
    let left = bench.registry.records_dir().join("web3.image-new-0011");
    std::fs::write(&left, "of a VM that was never made").unwrap();
    bench.registry.load().unwrap();
    let readers = bench.registry.images.readers();
    assert_eq!(readers.of(image), ["web1"], "the other has ended");
    assert!(!left.exists() && !bench.registry.image_map_path("web22").exists());
    assert!(readers.begin_removal(image, true).is_err());
    // Its pages were not said to be elsewhere.
    bench.registry.let_images_go();
    assert_eq!(readers.of(image), ["web1"]);

    bench.registry.delete("web1").unwrap();
    assert!(!bench.registry.image_map_path("web1").exists() && bench.on_disk("web1").is_none());
    assert!(readers.of(image).is_empty() && readers.begin_removal(image, true).is_ok());
}

#[test]
fn a_record_that_cannot_be_read_may_be_that_of_a_reader() {
    let bench = Bench::new("unread");
    std::fs::write(bench.registry.records.path("web1"), "torn").unwrap();
    bench.registry.load().unwrap();
    let why = bench.registry.images.readers().begin_removal(pagoda_image::ImageId(7), true).unwrap_err();
    assert!(why.to_string().contains("web1.vm of a VM cannot be read"), "{why}");
}
