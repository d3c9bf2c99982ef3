//! The daemon's part in an image: its files, the questions to the engine, and what the files hold in the end.

use std::sync::Arc;
use std::time::Duration;

use pagoda_api::types::{Launch, VmSpec};
use pagoda_core::units::{PAGE_SIZE, PageCount, PageIdx};
use pagoda_image::{Content, ImageId, Ledger, Manifest, Part, Qemu, Stage, State, Store};
use pagoda_pager::handle::Command;
use pagoda_pager::image::{Answer, ImageStage, Ticket};

use crate::disk::{TestDisk, Verdict};
use crate::vcpu::{Memory, content_of};
use crate::vm::{Engine, PAGES, PATIENCE, Vm};

pub const ID: ImageId = ImageId(0x1b);

pub fn store(vm: &Vm, disk: &TestDisk) -> Store {
    Store::on(Arc::new(disk.clone()), &vm.dir.join("images")).unwrap()
}

fn manifest(state: State) -> Manifest {
    Manifest {
        id: ID,
        vm: "vm".into(),
        name: "one".into(),
        taken_unix_ms: 1_795_881_600_000,
        boot_id: pagoda_sys::host::boot_id().unwrap(),
        stage: Stage::Begun,
        why: None,
        regions: vec![PAGES * PAGE_SIZE],
        spec: VmSpec::default(),
        launch: Launch {
            program: "qemu-system-x86_64".into(),
            words: ["-m", "4M"].map(String::from).to_vec(),
            cwd: "/".into(),
            uid: 1000,
            gid: 1000,
            unstartable: Vec::new(),
        },
        qemu: Qemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into() },
        state,
        pause_us: None,
        running: true,
        disks: Vec::new(),
        parent: None,
    }
}

/// Has an image prepared, all pages of the VM protected.
pub fn prepare(engine: &Engine, store: &Store) -> Part {
    let (part, prepared) = store.create(ID, PageCount(PAGES)).unwrap();
    engine.send(Command::PrepareImage(prepared));
    engine.wait_for("the image is prepared", |status| match status.image.map(|image| (image.id, image.stage)) {
        Some((ID, ImageStage::Preparing { sweeps })) => sweeps >= 2,
        _ => false,
    });
    part
}

/// All that the daemon does when the VM stands still, but for the question to the engine.
pub fn write(part: Part) -> Arc<Ledger> {
    let state = part.write_state(b"QEVM: the state of some device").unwrap();
    part.begin(manifest(state)).unwrap()
}

/// Asks the engine to begin.
pub fn ask(engine: &Engine, max: Duration) -> Answer {
    let ticket = Ticket::new();
    engine.send(Command::BeginImage(Arc::clone(&ticket)));
    ticket.wait(max)
}

/// The image begins.
pub fn begin(engine: &Engine, part: Part) -> Arc<Ledger> {
    let ledger = write(part);
    assert_eq!(ask(engine, PATIENCE), Answer::Begun);
    ledger
}

/// The image begins. The hook hears of the engine's calls, the first of which gives the image its name.
pub fn begin_with(
    engine: &Engine,
    part: Part,
    disk: &TestDisk,
    hook: impl FnMut(usize) -> Verdict + Send + 'static,
) -> Arc<Ledger> {
    let ledger = write(part);
    disk.set_hook(hook);
    assert_eq!(ask(engine, PATIENCE), Answer::Begun);
    ledger
}

/// The image has every page as it was when it began.
pub fn check_filled(store: &Store, ledger: &Ledger, expected: &Memory) {
    ledger.mark_filled().unwrap();
    let image = store.image(ID).unwrap();
    let mut content = [0; PAGE_SIZE as usize];
    for (page, tag) in (0..).map(PageIdx).zip(expected) {
        let found = image.read_page(page, &mut content).unwrap();
        assert_eq!(content, content_of(*tag), "page {page} is not as it was");
        assert_eq!(found == Content::Zero, *tag == 0, "page {page}");
    }
    assert!(store.verify(ID).is_clean());
}

/// Every daemon that looks finds that the image is lost.
pub fn check_lost(store: &Store) {
    let listing = store.list().unwrap();
    let stages: Vec<_> = listing.images.iter().map(|image| image.manifest.as_ref().map(|made| made.stage)).collect();
    assert!(stages.is_empty() || stages == [Some(Stage::Lost)], "{stages:?}");
    assert!(store.image(ID).is_err());
}
