//! Disks of images that fail while the VM runs.

use pagoda_image::ImageId;
use pagoda_pager::handle::{Command, Notice};
use pagoda_pager::image::ImageStage;

use crate::disk::{TestDisk, Verdict};
use crate::files::{ID, begin_with, check_lost, prepare, store};
use crate::fills::full_memory;
use crate::vcpu::check_all;
use crate::vm::{Engine, Kind, Vm};

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const EROFS: i32 = 30;

fn next_loss(engine: &Engine) -> String {
    match engine.next_notice() {
        Some(Notice::ImageLost(ID, why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_disk_that_fails_once_ends_the_image_and_the_vm_goes_on() {
    for (number, errno) in [(1, ENOSPC), (2, EIO), (3, ENOSPC), (6, EIO), (9, ENOSPC)] {
        for limit in [0, 400] {
            let mut vm = Vm::new(&format!("fails-{number}-{limit}"), Kind { limit, ..Kind::default() });
            let disk = TestDisk::default();
            let store = store(&vm, &disk);
            let engine = vm.serve(None);
            let memory = full_memory(&vm);
            let part = prepare(&engine, &store);
            begin_with(&engine, part, &disk, move |call| match call == number {
                true => Verdict::Fail(errno),
                false => Verdict::Go,
            });
            let memory = vm.run(&memory, number as u64, 1000).stop();
            assert!(next_loss(&engine).contains(&format!("os error {errno}")));
            engine.wait_for("the VM has no image", |status| status.image.is_none() && (limit > 0 || !status.armed));
            check_lost(&store);
            assert_eq!(vm.shared.lost_image(), None, "its files say so");
            check_all(vm.guest, &memory);
            assert!(engine.detach().is_empty());
        }
    }
}

/// A VM whose image's disk takes nothing any more, and which has changed pages since.
fn with_dead_disk(name: &str) -> (Vm, TestDisk, Engine, crate::vcpu::Memory) {
    let mut vm = Vm::new(name, Kind { limit: 400, ..Kind::default() });
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    let part = prepare(&engine, &store);
    begin_with(&engine, part, &disk, |call| if call >= 5 { Verdict::Fail(EROFS) } else { Verdict::Go });
    next_loss(&engine);
    let memory = vm.run(&memory, 1, 1000).stop();
    let status = engine.handle.fresh_status();
    assert_eq!(status.image.map(|image| image.stage), Some(ImageStage::Lost));
    assert_eq!(vm.shared.lost_image().map(ImageId), Some(ID));
    (vm, disk, engine, memory)
}

#[test]
fn a_loss_that_cannot_be_noted_is_noted_later() {
    let (vm, disk, engine, memory) = with_dead_disk("noted-later");
    let store = store(&vm, &disk);
    assert!(store.image(ID).is_ok(), "its files do not say so");
    disk.heal();
    engine.wait_for("the loss is noted", |status| status.image.is_none());
    assert_eq!(vm.shared.lost_image(), None);
    check_lost(&store);
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn the_next_daemon_knows_of_a_loss_that_could_not_be_noted() {
    for heals in [true, false] {
        let (mut vm, disk, engine, memory) = with_dead_disk(&format!("next-daemon-{heals}"));
        assert!(engine.detach().is_empty());
        let store = store(&vm, &disk);
        let ledger = store.ledger(ID).expect("its files say that it lacks pages");
        if heals {
            disk.heal();
        }
        let engine = vm.serve(Some(ledger));
        next_loss(&engine);
        let calls = disk.calls();
        let memory = vm.run(&memory, 2, 1000).stop();
        check_all(vm.guest, &memory);
        if heals {
            assert_eq!((disk.calls(), vm.shared.lost_image()), (calls, None), "nothing is frozen");
            check_lost(&store);
        } else {
            assert_eq!(vm.shared.lost_image().map(ImageId), Some(ID));
            // No other image begins before.
            disk.heal();
            engine.wait_for("the loss is noted", |status| status.image.is_none());
            check_lost(&store);
        }
        assert!(engine.detach().is_empty());
    }
}

#[test]
fn an_image_whose_vm_is_pinned_is_lost() {
    let mut vm = Vm::new("pinned", Kind { limit: 400, ..Kind::default() });
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    let part = prepare(&engine, &store);
    let handle = std::sync::Arc::clone(&engine.handle);
    begin_with(&engine, part, &disk, move |call| {
        if call == 3 {
            handle.send(Command::Pin("a device".into()));
        }
        Verdict::Go
    });
    assert!(next_loss(&engine).contains("unseen"));
    check_lost(&store);
    check_all(vm.guest, &vm.run(&memory, 1, 2000).stop());
    assert!(engine.detach().is_empty());
}
