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

fn manifest(id: ImageId, parent: Option<ImageId>, state: State) -> Manifest {
    Manifest {
        id,
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
        qemu: Qemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into(), cpu: None },
        state,
        pause_us: None,
        running: true,
        disks: Vec::new(),
        parent,
        inherited_pages: None,
        automatic: false,
        imported: None,
    }
}

/// Has an image prepared, all pages of the VM protected.
pub fn prepare(engine: &Engine, store: &Store) -> Part {
    prepare_on(engine, store, ID, None)
}

/// Prepares an image with a parent.
pub fn prepare_on(engine: &Engine, store: &Store, id: ImageId, parent: Option<ImageId>) -> Part {
    let (part, prepared) = store.create_on(parent, id, PageCount(PAGES)).unwrap();
    engine.send(Command::PrepareImage(prepared));
    engine.wait_for("the image is prepared", |status| match status.image.map(|image| (image.id, image.stage)) {
        Some((of, ImageStage::Preparing { sweeps })) => of == id && sweeps >= 2,
        _ => false,
    });
    part
}

/// All that the daemon does when the VM stands still, but for the question to the engine.
pub fn write(part: Part) -> Arc<Ledger> {
    write_on(part, ID, None)
}

fn write_on(part: Part, id: ImageId, parent: Option<ImageId>) -> Arc<Ledger> {
    let state = part.write_state(b"QEVM: the state of some device").unwrap();
    part.begin(manifest(id, parent, state)).unwrap()
}

/// Asks the engine to begin.
pub fn ask(engine: &Engine, max: Duration) -> Answer {
    let ticket = Ticket::new();
    engine.send(Command::BeginImage(Arc::clone(&ticket)));
    ticket.wait(max)
}

/// The image with a parent begins.
pub fn begin_on(engine: &Engine, part: Part, id: ImageId, parent: Option<ImageId>) -> Arc<Ledger> {
    let ledger = write_on(part, id, parent);
    assert_eq!(ask(engine, PATIENCE), Answer::Begun);
    ledger
}

/// Begins the image, and waits until the engine says that it exists.
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
    check_pages(store, ID, expected);
}

/// The same of any image that is filled.
pub fn check_pages(store: &Store, id: ImageId, expected: &Memory) {
    let image = store.image(id).unwrap();
    let mut content = [0; PAGE_SIZE as usize];
    for (page, tag) in (0..).map(PageIdx).zip(expected) {
        let found = image.read_page(page, &mut content).unwrap();
        assert_eq!(content, content_of(*tag), "page {page} is not as it was");
        assert_eq!(found == Content::Zero, *tag == 0, "page {page}");
    }
    assert!(store.verify(id).is_clean());
}

/// Every daemon that looks finds that the image is lost.
pub fn check_lost(store: &Store) {
    let listing = store.list().unwrap();
    let stages: Vec<_> = listing.images.iter().map(|image| image.manifest.as_ref().map(|made| made.stage)).collect();
    assert!(stages.is_empty() || stages == [Some(Stage::Lost)], "{stages:?}");
    assert!(store.image(ID).is_err());
}
