//! Images that are filled while the VM runs.

use std::sync::Arc;

use pagoda_core::stats::Metric;
use pagoda_pager::handle::{Command, Notice};

use crate::disk::{TestDisk, Verdict};
use crate::files::{ID, begin, begin_with, check_filled, check_lost, prepare, store};
use crate::vcpu::{self, Memory, check_all};
use crate::vm::{Kind, PAGES, Vm};

/// VMs whose pages are in DRAM, in swap, in compressed memory, shared, zero.
pub const KINDS: [(&str, Kind); 4] = [
    ("resident", Kind { limit: 0, compressed: 0, shares: false, prefetch: false }),
    ("swap", Kind { limit: 400, compressed: 0, shares: false, prefetch: false }),
    ("compressed", Kind { limit: 400, compressed: 128 << 10, shares: false, prefetch: false }),
    ("shared", Kind { limit: 400, compressed: 0, shares: true, prefetch: false }),
];

/// Memory in which every page holds something of its own.
pub fn full_memory(vm: &Vm) -> Memory {
    let memory: Memory = (0..PAGES).map(|page| 0x1000 + page).collect();
    (0..).zip(&memory).for_each(|(page, tag)| vcpu::write(vm.guest, page, *tag));
    memory
}

#[test]
fn an_image_holds_what_the_vm_held_when_it_began() {
    for (name, kind) in KINDS {
        for seed in 0..3 {
            let mut vm = Vm::new(&format!("fill-{name}-{seed}"), kind);
            let store = store(&vm, &TestDisk::default());
            let engine = vm.serve(None);
            let memory = vm.run(&vec![0; PAGES as usize], seed, 1500).stop();
            if kind.limit > 0 {
                engine.wait_for("pages are out", |status| {
                    let stats = &status.stats;
                    let out = stats.get(Metric::Swapped) > 0 && (!kind.shares || stats.get(Metric::Shared) > 0);
                    out && (kind.compressed == 0 || status.tiers[0].counts.pages > 0)
                });
            }
            // The VM runs while it is prepared.
            let running = vm.run(&memory, seed ^ 0x55, 1000);
            let part = prepare(&engine, &store);
            let expected = running.stop();
            let ledger = begin(&engine, part);
            let running = vm.run(&expected, seed ^ 0xaa, 1500);
            assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)), "{name}");
            let memory = running.stop();
            check_all(vm.guest, &memory);
            check_filled(&store, &ledger, &expected);
            // It has to do with the VM no more.
            engine.wait_for("the VM has no image", |status| status.image.is_none());
            if kind.limit == 0 {
                engine.wait_for("the VM is disarmed", |status| !status.armed);
            }
            assert!(engine.detach().is_empty());
        }
    }
}

#[test]
fn an_image_has_what_the_guest_gives_back() {
    for (name, kind) in KINDS {
        let mut vm = Vm::new(&format!("discard-{name}"), kind);
        let store = store(&vm, &TestDisk::default());
        let engine = vm.serve(None);
        let expected = full_memory(&vm);
        if kind.limit > 0 {
            engine.wait_swapped(PAGES - kind.limit);
        }
        let part = prepare(&engine, &store);
        let ledger = begin(&engine, part);
        // Most of it is in swap, and has to be read first.
        engine.discard(0, PAGES);
        check_all(vm.guest, &vec![0; PAGES as usize]);
        assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)), "{name}");
        check_filled(&store, &ledger, &expected);
        assert!(engine.detach().is_empty());
    }
}

#[test]
fn the_next_image_begins_when_one_is_filled() {
    let mut vm = Vm::new("again", Kind { limit: 400, ..Kind::default() });
    let store = store(&vm, &TestDisk::default());
    let engine = vm.serve(None);
    let mut memory = vec![0; PAGES as usize];
    for seed in 0..3 {
        memory = vm.run(&memory, seed, 1000).stop();
        let part = prepare(&engine, &store);
        let expected = memory.clone();
        let ledger = begin(&engine, part);
        let running = vm.run(&memory, seed ^ 0xaa, 1000);
        assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
        memory = running.stop();
        check_filled(&store, &ledger, &expected);
        store.remove(ID).unwrap();
    }
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn an_image_that_is_removed_leaves_no_page_frozen() {
    let mut vm = Vm::new("removed", Kind::default());
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    let part = prepare(&engine, &store);
    let handle = Arc::clone(&engine.handle);
    let ledger = begin_with(&engine, part, &disk, move |call| {
        if call == 4 {
            handle.send(Command::RemoveImage(ID));
        }
        Verdict::Go
    });
    engine.wait_for("the VM has no image", |status| status.image.is_none() && !status.armed);
    assert!(ledger.mark_filled().is_err(), "it lacks pages");
    check_lost(&store);
    store.remove(ID).unwrap();
    check_all(vm.guest, &vm.run(&memory, 1, 2000).stop());
    assert!(engine.detach().is_empty(), "who removes it needs not be told");
}
