//! Daemons that are killed, and those that come after them.

use pagoda_core::chance::Chance;
use pagoda_image::Stage;
use pagoda_pager::handle::Notice;
use pagoda_pager::image::Answer;

use crate::disk::{TestDisk, Verdict};
use crate::files::{ID, ask, begin, begin_with, check_filled, check_lost, prepare, store, write};
use crate::fills::{KINDS, full_memory};
use crate::vcpu::check_all;
use crate::vm::{Kind, PAGES, PATIENCE, Vm};

/// Daemons that are killed at some call of the image's disk, one after the other, until one has filled the image. The VM runs
/// all the time.
fn survive(name: &str, kind: Kind, seed: u64) {
    let mut vm = Vm::new(&format!("killed-{name}-{seed}"), kind);
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let mut chance = Chance::new(seed);
    let mut engine = vm.serve(None);
    let memory = vm.run(&vec![0; PAGES as usize], seed, 1500).stop();
    let part = prepare(&engine, &store);
    let expected = memory.clone();
    let mut kills = 0;
    let mut killed_at = || {
        let last = 1 + chance.below(12) as usize;
        let verdict = if chance.per_mille(700) { Verdict::Die } else { Verdict::GoAndDie };
        move |call| if call == last { verdict } else { Verdict::Go }
    };
    let mut ledger = begin_with(&engine, part, &disk, killed_at());
    let running = vm.run(&memory, seed ^ 0xaa, 1500);
    loop {
        match engine.next_notice() {
            None => {}
            Some(Notice::ImageFilled(ID)) => break,
            other => panic!("{other:?}"),
        }
        kills += 1;
        disk.heal();
        ledger = store.ledger(ID).unwrap();
        assert_eq!(ledger.manifest().unwrap().stage, Stage::Begun);
        // The engines after that are not killed.
        if kills < 6 {
            disk.set_hook(killed_at());
        }
        engine = vm.serve(Some(ledger.clone()));
    }
    assert!(kills > 0, "{name}: nobody was killed");
    disk.heal();
    let memory = running.stop();
    check_all(vm.guest, &memory);
    check_filled(&store, &ledger, &expected);
    assert!(engine.detach().is_empty());
}

#[test]
fn whoever_comes_after_a_killed_daemon_goes_on_with_the_image() {
    for (name, kind) in KINDS.into_iter().filter(|(_, kind)| !kind.shares) {
        (0..4).for_each(|seed| survive(name, kind, seed));
    }
}

#[test]
fn a_daemon_that_is_killed_at_the_beginning_leaves_an_image_or_none() {
    for verdict in [Verdict::Die, Verdict::GoAndDie] {
        let mut vm = Vm::new(&format!("begin-{verdict:?}"), Kind { limit: 400, ..Kind::default() });
        let disk = TestDisk::default();
        let store = store(&vm, &disk);
        let engine = vm.serve(None);
        let memory = full_memory(&vm);
        let ledger = write(prepare(&engine, &store));
        drop(ledger);
        disk.set_hook(move |_| verdict);
        assert!(matches!(ask(&engine, PATIENCE), Answer::Refused(_)), "nobody is left to answer");
        assert_eq!(engine.next_notice(), None);
        disk.heal();
        let ledger = store.ledger(ID).ok();
        assert_eq!(ledger.is_some(), verdict == Verdict::GoAndDie, "the name is the image");
        let engine = vm.serve(ledger.clone());
        let memory_then = vm.run(&memory, 1, 1000).stop();
        check_all(vm.guest, &memory_then);
        if let Some(ledger) = ledger {
            assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
            check_filled(&store, &ledger, &memory);
        }
        assert!(engine.detach().is_empty());
    }
}

#[test]
fn an_image_that_cannot_be_gone_on_with_is_lost_before_the_vm_goes_on() {
    let mut vm = Vm::new("other-life", Kind { limit: 400, ..Kind::default() });
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    let part = prepare(&engine, &store);
    begin_with(&engine, part, &disk, |call| if call == 4 { Verdict::Die } else { Verdict::Go });
    assert_eq!(engine.next_notice(), None);
    disk.heal();
    // An entry that no daemon writes.
    let map = std::fs::OpenOptions::new().write(true).open(vm.dir.join(format!("images/{ID}/map"))).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&map, &[0xff; 8], 8 * 1000).unwrap();
    let engine = vm.serve(Some(store.ledger(ID).unwrap()));
    assert!(matches!(engine.next_notice(), Some(Notice::ImageLost(ID, why)) if why.contains("page 1000")));
    check_lost(&store);
    check_all(vm.guest, &vm.run(&memory, 1, 2000).stop());
    assert!(engine.detach().is_empty());
}

#[test]
fn an_image_that_is_filled_or_of_a_vm_that_has_ended_needs_no_engine() {
    let mut vm = Vm::new("filled", Kind::default());
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    let part = prepare(&engine, &store);
    let ledger = begin(&engine, part);
    assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
    check_filled(&store, &ledger, &memory);
    assert!(engine.detach().is_empty());
    let engine = vm.serve(Some(store.ledger(ID).unwrap()));
    assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
    assert!(engine.detach().is_empty());
    assert!(store.image(ID).is_ok());
    store.remove(ID).unwrap();

    // An image that is not filled, and a VM that never ran before.
    let mut new = Vm::new("new", Kind::default());
    let ledger = write(store.create(ID, pagoda_core::units::PageCount(PAGES)).unwrap().0);
    std::fs::rename(vm.dir.join(format!("images/{ID}.part")), vm.dir.join(format!("images/{ID}"))).unwrap();
    let engine = new.serve(Some(ledger));
    assert!(matches!(engine.next_notice(), Some(Notice::ImageLost(ID, why)) if why.contains("ended")));
    check_lost(&store);
    assert!(engine.detach().is_empty());
}
