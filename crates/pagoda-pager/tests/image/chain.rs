//! Images that refer to the one before them, of VMs that run.

use std::collections::BTreeMap;

use pagoda_core::chance::Chance;
use pagoda_core::units::{Bytes, PAGE_SIZE};
use pagoda_image::{ImageId, Store};
use pagoda_pager::handle::{Command, Notice};

use crate::disk::TestDisk;
use crate::files::{begin_on, check_pages, prepare_on, store};
use crate::fills::{KINDS, full_memory};
use crate::vcpu::{self, Memory, check_all};
use crate::vm::{Engine, Kind, PAGES, Vm};

const IMAGES: u128 = 4;

/// Takes an image on the newest one, if the engine knows it; the VM stands still.
fn take(engine: &Engine, store: &Store, id: ImageId) -> Option<ImageId> {
    let parent = engine.handle.fresh_status().whole_image.map(|(id, _)| id);
    let part = prepare_on(engine, store, id, parent);
    begin_on(engine, part, id, parent);
    parent
}

/// The engine says that it is filled.
fn wait_filled(engine: &Engine, store: &Store, id: ImageId) {
    assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(id)));
    let ledger = store.ledger(id).unwrap();
    ledger.mark_filled().unwrap();
    ledger.make_durable().unwrap();
}

/// Pages that the image has itself.
fn own_pages(store: &Store, id: ImageId) -> u64 {
    PAGES - store.ledger(id).unwrap().manifest().unwrap().inherited_pages.unwrap_or(0)
}

#[test]
fn each_image_of_a_chain_holds_what_the_vm_held() {
    for (name, kind) in KINDS {
        for seed in 0..3 {
            let mut vm = Vm::new(&format!("chain-{name}-{seed}"), kind);
            let store = store(&vm, &TestDisk::default());
            let engine = vm.serve(None);
            engine.send(Command::FollowImages(true));
            let mut memory = vm.run(&vec![0; PAGES as usize], seed, 1500).stop();
            let mut images: BTreeMap<ImageId, Memory> = BTreeMap::new();
            for nth in 1..=IMAGES {
                let id = ImageId(nth);
                let parent = take(&engine, &store, id);
                assert_eq!(parent, (nth > 1).then(|| ImageId(nth - 1)), "{name}");
                images.insert(id, memory.clone());
                // The VM runs while it is filled, and after that.
                memory = vm.run(&memory, seed ^ (nth as u64) << 8, 60).stop();
                wait_filled(&engine, &store, id);
                memory = vm.run(&memory, seed ^ (nth as u64) << 9, 60).stop();
                let mut chance = Chance::new(seed ^ (nth as u64) << 10);
                let (first, count) = (chance.below(PAGES - 40), chance.within(1, 40));
                engine.discard(first, count);
                memory[first as usize..(first + count) as usize].fill(0);
                images.iter().for_each(|(id, expected)| check_pages(&store, *id, expected));
                assert!(nth == 1 || own_pages(&store, id) < PAGES, "{name}: it refers to nothing");
            }
            check_all(vm.guest, &memory);
            // An image in the middle of the chain goes.
            store.detach(ImageId(3)).unwrap();
            store.remove(ImageId(2)).unwrap();
            images.remove(&ImageId(2));
            images.iter().for_each(|(id, expected)| check_pages(&store, *id, expected));
            assert!(engine.detach().is_empty());
        }
    }
}

#[test]
fn an_image_has_next_to_nothing_but_what_was_written() {
    let mut vm = Vm::new("chain-small", Kind::default());
    let store = store(&vm, &TestDisk::default());
    let engine = vm.serve(None);
    engine.send(Command::FollowImages(true));
    let mut memory = full_memory(&vm);
    take(&engine, &store, ImageId(1));
    wait_filled(&engine, &store, ImageId(1));
    assert_eq!(own_pages(&store, ImageId(1)), PAGES);
    // All of it is read, some pages are written, here and there and in a stretch.
    check_all(vm.guest, &memory);
    let written: Vec<u64> = (0..PAGES).step_by(41).chain(300..332).collect();
    for page in &written {
        memory[*page as usize] = 0x77_0000 + page;
        vcpu::write(vm.guest, *page, memory[*page as usize]);
    }
    check_all(vm.guest, &memory);
    assert_eq!(take(&engine, &store, ImageId(2)), Some(ImageId(1)));
    wait_filled(&engine, &store, ImageId(2));
    let unique: std::collections::BTreeSet<u64> = written.iter().copied().collect();
    // The stretch ends where a block of 16 pages does not.
    assert!((unique.len()..unique.len() + 12).contains(&(own_pages(&store, ImageId(2)) as usize)));
    check_pages(&store, ImageId(2), &memory);
    // Nothing was written since, so the image has no page of its own.
    assert_eq!(take(&engine, &store, ImageId(3)), Some(ImageId(2)));
    wait_filled(&engine, &store, ImageId(3));
    assert_eq!(own_pages(&store, ImageId(3)), 0);
    check_pages(&store, ImageId(3), &memory);
    assert!(store.own_bytes(ImageId(3)).unwrap() < Bytes(16 * PAGE_SIZE));
    // Nobody may refer to it any more: the VM is free.
    engine.send(Command::FollowImages(false));
    engine.wait_for("the VM is disarmed", |status| !status.armed && status.whole_image.is_none());
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn an_image_is_a_full_one_when_nobody_knows_what_has_changed() {
    let mut vm = Vm::new("chain-full", Kind { limit: 400, ..Kind::default() });
    let store = store(&vm, &TestDisk::default());
    let engine = vm.serve(None);
    engine.send(Command::FollowImages(true));
    let mut memory = full_memory(&vm);
    let run = |vm: &Vm, memory: &Memory, seed| vm.run(memory, seed, 200).stop();
    let is_whole =
        |engine: &Engine, id: u128| engine.handle.fresh_status().whole_image.map(|(id, _)| id) == Some(ImageId(id));
    take(&engine, &store, ImageId(1));
    let first = memory.clone();
    wait_filled(&engine, &store, ImageId(1));
    assert!(is_whole(&engine, 1));
    // A parent that is not the newest image of this engine is believed in nothing.
    let part = prepare_on(&engine, &store, ImageId(2), None);
    begin_on(&engine, part, ImageId(2), None);
    wait_filled(&engine, &store, ImageId(2));
    memory = run(&vm, &memory, 1);
    let part = prepare_on(&engine, &store, ImageId(3), Some(ImageId(1)));
    begin_on(&engine, part, ImageId(3), Some(ImageId(1)));
    wait_filled(&engine, &store, ImageId(3));
    assert_eq!(own_pages(&store, ImageId(3)), PAGES);
    check_pages(&store, ImageId(3), &memory);
    // The newest one is removed.
    engine.send(Command::RemoveImage(ImageId(3)));
    store.remove(ImageId(3)).unwrap();
    assert!(engine.handle.fresh_status().whole_image.is_none());
    take(&engine, &store, ImageId(4));
    let fourth = memory.clone();
    wait_filled(&engine, &store, ImageId(4));
    assert_eq!(own_pages(&store, ImageId(4)), PAGES);
    // Another daemon, while an image on a parent is filled: that one gets the rest from the VM, the next one is full.
    memory = run(&vm, &memory, 2);
    assert_eq!(take(&engine, &store, ImageId(5)), Some(ImageId(4)));
    let fifth = memory.clone();
    let said = engine.detach();
    let ledger = store.ledger(ImageId(5)).unwrap();
    let engine = vm.serve(Some(ledger));
    engine.send(Command::FollowImages(true));
    if said.is_empty() {
        memory = run(&vm, &memory, 3);
        assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ImageId(5))));
    }
    store.ledger(ImageId(5)).unwrap().mark_filled().unwrap();
    for (id, expected) in [(1, &first), (4, &fourth), (5, &fifth)] {
        check_pages(&store, ImageId(id), expected);
    }
    memory = run(&vm, &memory, 4);
    let parent = take(&engine, &store, ImageId(6));
    wait_filled_on(&engine, &store, ImageId(6));
    assert!(parent.is_none() || own_pages(&store, ImageId(6)) == PAGES);
    check_pages(&store, ImageId(6), &memory);
    // A VM that is pinned is written unseen.
    engine.send(Command::Pin("a device".into()));
    engine.wait_for("it is pinned", |status| status.pinned.is_some());
    assert!(engine.handle.fresh_status().whole_image.is_none_or(|(_, same)| same.0 == 0));
    drop(engine.detach());
}

/// As [`wait_filled`], of one whose parent need not be durable.
fn wait_filled_on(engine: &Engine, store: &Store, id: ImageId) {
    loop {
        match engine.next_notice() {
            Some(Notice::ImageFilled(of)) if of == id => break,
            Some(Notice::ImageFilled(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    store.ledger(id).unwrap().mark_filled().unwrap();
}

#[test]
fn a_vm_that_ends_gives_its_image_what_it_lacks() {
    let mut vm = Vm::new("chain-ends", Kind { limit: 400, ..Kind::default() });
    let store = store(&vm, &TestDisk::default());
    let engine = vm.serve(None);
    engine.send(Command::FollowImages(true));
    let mut memory = full_memory(&vm);
    take(&engine, &store, ImageId(1));
    wait_filled(&engine, &store, ImageId(1));
    memory = vm.run(&memory, 1, 100).stop();
    take(&engine, &store, ImageId(2));
    let expected = memory.clone();
    vm.killer()();
    assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ImageId(2))));
    store.ledger(ImageId(2)).unwrap().mark_filled().unwrap();
    check_pages(&store, ImageId(2), &expected);
    assert!(own_pages(&store, ImageId(2)) < PAGES);
}
