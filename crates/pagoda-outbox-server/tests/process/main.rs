//! `pagoda-outbox` as it runs, with its keeper and the processes that this one starts, and a ring that stops and goes on.

mod vm;

use virtiofsd::fuse::Opcode;

use self::vm::{Asked, Vm};

const SPACE: u64 = 64 << 10;
/// Of the write for which there is no room.
const WRITE_BYTES: u32 = 4 << 10;
const PATTERN: u8 = 0xa5;

fn mounted(name: &str) -> Vm {
    let mut vm = Vm::new(name, SPACE);
    vm.start(0);
    vm.mount();
    vm
}

/// Makes a file as large as the space, and writes more to it.
fn waits(vm: &mut Vm, name: &str) -> Asked {
    let file = vm.create(name);
    let fills = vm.write(file, 0, SPACE as u32);
    assert_eq!(vm.answer(fills).0, 0);
    let waits = vm.write(file, SPACE, WRITE_BYTES);
    vm.wait_waiting();
    waits
}

#[test]
fn a_stop_without_requests_ends_no_process() {
    let mut vm = mounted("idle");
    let worker = vm.worker();
    for round in 0..3 {
        let index = vm.stop();
        vm.start(index);
        let asked = vm.request(Opcode::Statfs, 1, &[], 0);
        assert_eq!((vm.answer(asked).0, index), (0, 1 + round));
    }
    assert_eq!(vm.worker(), worker);
}

/// A write waits for room when the guest is reset. Nothing of it comes into the memory that another kernel has then.
#[test]
fn nothing_is_written_for_a_ring_that_has_stopped() {
    let mut vm = mounted("reset");
    for life in 0..3 {
        waits(&mut vm, &format!("life{life}"));
        assert_eq!(vm.stop(), 4, "what was taken counts");
        vm.begin_anew(PATTERN);
        vm.start(0);
        // It gives up what the life before has opened, and so it ends its writes.
        vm.mount();
        assert_eq!(vm.figures().waiting, 0);
        for _ in 0..20 {
            let asked = vm.request(Opcode::Statfs, 1, &[], 0);
            assert_eq!(vm.answer(asked).0, 0);
        }
        let wrong = vm.before().iter().filter(|byte| **byte != PATTERN).count();
        assert_eq!(wrong, 0, "bytes of another kernel's memory are overwritten");
        let index = vm.stop();
        vm.begin_anew(0);
        vm.start(0);
        vm.mount();
        assert_eq!(index, 21);
    }
}

/// A write that waits goes on when the VM does, however often it is stopped, and also if the process is killed meanwhile. The guest
/// asks for nothing else.
#[test]
fn what_was_on_its_way_goes_on_by_itself() {
    let mut vm = mounted("paused");
    let asked = waits(&mut vm, "grows");
    for round in 0..5 {
        vm.wait_waiting();
        let index = vm.stop();
        assert_eq!(index, 4);
        if round % 2 == 0 {
            vm.kill_worker();
        }
        vm.start(index);
    }
    vm.wait_waiting();
    vm.set_space(1 << 20);
    let (error, answer) = vm.answer(asked);
    assert_eq!((error, &answer[..4]), (0, &WRITE_BYTES.to_le_bytes()[..]));
}

/// It is answered while the ring stands still, and nobody could tell the guest.
#[test]
fn an_answer_of_which_nobody_told_is_told_of() {
    let mut vm = mounted("told");
    for _ in 0..50 {
        let asked = vm.request(Opcode::Statfs, 1, &[], 0);
        let index = vm.stop();
        vm.start(index);
        assert_eq!(vm.answer(asked).0, 0);
    }
}
