//! What becomes of an image that is prepared.

use std::sync::Arc;
use std::time::Duration;

use pagoda_pager::handle::{Command, Notice};
use pagoda_pager::image::{Answer, Ticket};
use pagoda_sys::uffd::{self, Uffd};

use crate::disk::{TestDisk, Verdict};
use crate::files::{ID, ask, begin, check_filled, prepare, store, write};
use crate::fills::full_memory;
use crate::vcpu::check_all;
use crate::vm::{Clock, Engine, Kind, PATIENCE, Vm};

fn refusal(engine: &Engine) -> String {
    match ask(engine, PATIENCE) {
        Answer::Refused(why) => why,
        other => panic!("{other:?}"),
    }
}

/// Waits until nothing of the VM is frozen or followed.
fn wait_free(engine: &Engine) {
    engine.wait_for("the VM is free", |status| status.image.is_none() && !status.armed);
}

#[test]
fn an_image_that_is_cancelled_or_asked_for_too_late_does_not_begin() {
    let mut vm = Vm::new("cancelled", Kind::default());
    let store = store(&vm, &TestDisk::default());
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    assert!(refusal(&engine).contains("no image is prepared"));

    let part = prepare(&engine, &store);
    engine.send(Command::CancelImage);
    wait_free(&engine);
    write(part);
    assert!(refusal(&engine).contains("no image is prepared"));
    store.remove(ID).unwrap();

    write(prepare(&engine, &store));
    let ticket = Ticket::new();
    assert_eq!(ticket.wait(Duration::ZERO), Answer::TooLate);
    engine.send(Command::BeginImage(Arc::clone(&ticket)));
    wait_free(&engine);
    let listing = store.list().unwrap();
    assert_eq!((listing.images.len(), listing.leftovers.len()), (0, 1), "its name is not that of an image");
    check_all(vm.guest, &vm.run(&memory, 1, 1000).stop());
    assert!(engine.detach().is_empty());
}

#[test]
fn direct_io_in_flight_refuses_an_image_and_one_that_has_ended_does_not() {
    for (clock, begins) in [(Clock::Keeps, false), (Clock::Ends, true)] {
        let mut vm = Vm::new(&format!("direct-io-{begins}"), Kind::default());
        let disk = TestDisk::default();
        let store = store(&vm, &disk);
        let engine = vm.serve_with(None, clock);
        let memory = full_memory(&vm);
        let part = prepare(&engine, &store);
        assert_eq!(vm.shared.start_io(0), Some(0));
        let ledger = write(part);
        disk.set_hook(|_| Verdict::Go);
        if begins {
            assert_eq!(ask(&engine, PATIENCE), Answer::Begun);
            assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
            check_filled(&store, &ledger, &memory);
        } else {
            assert!(refusal(&engine).contains("direct I/O"));
            vm.shared.finish_io(Some(0));
            wait_free(&engine);
            check_all(vm.guest, &vm.run(&memory, 1, 1000).stop());
            assert_eq!(disk.calls(), 0, "no page was preserved");
        }
        assert!(engine.detach().is_empty());
    }
}

#[test]
fn an_image_whose_files_fail_at_the_last_moment_does_not_begin_and_the_next_one_does() {
    let mut vm = Vm::new("rename", Kind::default());
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    write(prepare(&engine, &store));
    disk.set_hook(|_| Verdict::Fail(5));
    assert!(refusal(&engine).contains("error 5"));
    wait_free(&engine);
    let memory = vm.run(&memory, 1, 1000).stop();
    assert_eq!(disk.calls(), 1, "no page was preserved");
    disk.heal();
    store.remove(ID).unwrap();

    let part = prepare(&engine, &store);
    let ledger = begin(&engine, part);
    assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
    check_filled(&store, &ledger, &memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn a_vm_whose_writes_are_not_seen_has_no_image() {
    let mut vm = Vm::new("unseen", Kind::default());
    let store = store(&vm, &TestDisk::default());
    let engine = vm.serve(None);
    full_memory(&vm);
    let other = Uffd::from_fd(uffd::create().unwrap()).unwrap();
    other.enable().unwrap();
    other.register(vm.guest.at(0), vm.guest.len()).unwrap();
    let (part, prepared) = store.create(ID, pagoda_core::units::PageCount(crate::vm::PAGES)).unwrap();
    engine.send(Command::PrepareImage(prepared));
    write(part);
    assert!(refusal(&engine).contains("userfaultfd"));
    other.unregister(vm.guest.at(0), vm.guest.len()).unwrap();
    wait_free(&engine);
    store.remove(ID).unwrap();

    // Pinned in the middle of it.
    let part = prepare(&engine, &store);
    engine.send(Command::Pin("a device".into()));
    write(part);
    assert!(refusal(&engine).contains("pinned"));
    assert!(engine.detach().is_empty());
}
