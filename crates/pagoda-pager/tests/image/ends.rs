//! VMs that end before their image is filled.

use pagoda_core::units::PAGE_SIZE;
use pagoda_pager::handle::Notice;
use rustix::fs::FallocateFlags;

use crate::disk::{TestDisk, Verdict};
use crate::files::{ID, begin_with, check_filled, check_lost, prepare, store};
use crate::fills::{KINDS, full_memory};
use crate::vcpu;
use crate::vm::{Kind, PAGES, Vm};

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

#[test]
fn an_image_gets_what_it_lacks_when_its_vm_ends() {
    for (name, kind) in KINDS {
        let mut vm = Vm::new(&format!("ends-{name}"), kind);
        let disk = TestDisk::default();
        let store = store(&vm, &disk);
        let mut kill = vm.killer();
        let engine = vm.serve(None);
        let expected = vm.run(&vec![0; PAGES as usize], 7, 2000).stop();
        let part = prepare(&engine, &store);
        let ledger = begin_with(&engine, part, &disk, move |call| {
            if call == 3 {
                kill();
            }
            Verdict::Go
        });
        assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)), "{name}");
        assert_eq!(engine.next_notice(), Some(Notice::Exited));
        assert_eq!(engine.next_notice(), None);
        check_filled(&store, &ledger, &expected);
    }
}

/// A fault is answered while its VMM dies: the page is in memory by the machine's account alone.
#[test]
fn a_page_that_does_not_come_to_a_dying_vm_is_taken_from_its_block() {
    const READ: u64 = 64;
    let mut vm = Vm::new("ends-late", Kind { limit: 400, ..Kind::default() });
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let mut kill = vm.killer();
    let engine = vm.serve(None);
    let memory = full_memory(&vm);
    engine.wait_swapped(PAGES - 400);
    (0..READ).zip(&memory).for_each(|(page, tag)| vcpu::check(vm.guest, page, *tag));
    let part = prepare(&engine, &store);
    let ram = vm.ram_file();
    let ledger = begin_with(&engine, part, &disk, move |call| {
        if call == 3 {
            rustix::fs::fallocate(&ram, PUNCH, 0, READ * PAGE_SIZE).unwrap();
            kill();
        }
        Verdict::Go
    });
    assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
    check_filled(&store, &ledger, &memory);
}

#[test]
fn an_image_is_lost_when_its_disk_fails_at_the_end_of_its_vm() {
    let mut vm = Vm::new("ends-failing", Kind { limit: 400, ..Kind::default() });
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let mut kill = vm.killer();
    let engine = vm.serve(None);
    full_memory(&vm);
    let part = prepare(&engine, &store);
    begin_with(&engine, part, &disk, move |call| {
        if call == 3 {
            kill();
        }
        if call >= 12 { Verdict::Fail(5) } else { Verdict::Go }
    });
    assert!(matches!(engine.next_notice(), Some(Notice::ImageLost(ID, _))));
    assert_eq!(engine.next_notice(), Some(Notice::Exited));
    disk.heal();
    // The engine could not note it, and told the daemon.
    assert!(store.lose(ID, "its disk failed"));
    check_lost(&store);
}

#[test]
fn an_image_of_a_halted_vm_is_lost_when_that_ends() {
    let mut vm = Vm::new("ends-halted", Kind { limit: 400, ..Kind::default() });
    let disk = TestDisk::default();
    let store = store(&vm, &disk);
    let mut kill = vm.killer();
    let engine = vm.serve(None);
    (0..PAGES).filter(|page| page / 256 != 3).for_each(|page| vcpu::write(vm.guest, page, page + 1));
    let part = prepare(&engine, &store);
    // A page of zeros that is none: the engine finds it out when somebody needs the page.
    let (meddle, fault) = (vm.meddle(), vm.faulter(900));
    begin_with(&engine, part, &disk, move |call| {
        if call == 3 {
            meddle.write_page(900, &[1; 4096]);
            fault();
        }
        Verdict::Go
    });
    assert!(matches!(engine.next_notice(), Some(Notice::Stalled(why)) if why.starts_with("halted, because")));
    kill();
    assert!(matches!(engine.next_notice(), Some(Notice::ImageLost(ID, why)) if why.contains("halted")));
    assert_eq!(engine.next_notice(), Some(Notice::Exited));
    check_lost(&store);
}
