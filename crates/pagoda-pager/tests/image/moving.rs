//! A VM that moves: what was copied and what was written meanwhile are together what the next VM has.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::Pages;
use pagoda_core::stats::Metric;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageCount};
use pagoda_pager::arriving::Arriving;
use pagoda_pager::handle::{Command, Content, Copied, CopyOrder, Look, Way};

use crate::fills::KINDS;
use crate::vcpu::{check, check_all, write};
use crate::vm::{Engine, Kind, PAGES, PATIENCE, Vm};

/// Copies pages of one VM to where they go for another one.
struct Mover<'a> {
    engine: &'a Engine,
    to: &'a Arriving,
    sender: Sender<Copied>,
    copies: Receiver<Copied>,
}

impl<'a> Mover<'a> {
    fn new(engine: &'a Engine, to: &'a Arriving) -> Mover<'a> {
        engine.send(Command::Move(true));
        let (sender, copies) = channel();
        Mover { engine, to, sender, copies }
    }

    fn look(&self) -> Look {
        self.engine.handle.look_for_writes().unwrap()
    }

    /// Copies these pages, as one round does. Gives how many.
    fn copy(&self, written: &[(ChunkIdx, PageSet)]) -> u64 {
        let mut left: BTreeMap<ChunkIdx, PageSet> = written.iter().copied().collect();
        for (chunk, pages) in written {
            for run in pages.runs() {
                let pages = Pages { chunk: *chunk, run };
                self.engine.send(Command::CopyOut(CopyOrder {
                    pages,
                    to: self.sender.clone(),
                    is_urgent: false,
                    way: Way::Send,
                }));
            }
        }
        let count = written.iter().map(|(_, pages)| u64::from(pages.count())).sum();
        while left.values().any(|pages| !pages.is_empty()) {
            let Copied { pages, content } = self.copies.recv_timeout(PATIENCE).unwrap();
            let left = left.get_mut(&pages.chunk).unwrap();
            let set = PageSet::range(pages.run.start, pages.run.len);
            assert!(left.contains_all(set), "a page comes twice");
            *left -= set;
            match content {
                Content::Bytes(bytes) => self.to.store(pages, &bytes).unwrap(),
                Content::Zeros => self.to.zero(pages).unwrap(),
                Content::Failed(why) => panic!("{why}"),
                Content::HandedOver | Content::Placed => panic!("nothing is handed over"),
            }
        }
        count
    }
}

fn sum(written: &Look) -> u64 {
    written.written.iter().map(|(_, pages)| u64::from(pages.count())).sum()
}

#[test]
fn a_vm_has_all_its_pages_after_a_move() {
    for (name, kind) in KINDS {
        for (seed, dram) in [(1, PAGES), (2, 300), (3, 0)] {
            let mut vm = Vm::new(&format!("moves-{name}-{seed}"), kind);
            let engine = vm.serve(None);
            let memory = vm.run(&vec![0; PAGES as usize], seed, 1500).stop();
            let limit = if dram == PAGES { 0 } else { 320 };
            let mut next = Vm::arriving(&format!("moved-{name}-{seed}"), Kind { limit, ..Kind::default() });
            let (ram, swap) = (next.ram_handles(), next.swap_handle());
            let arriving = Arriving::new(ram, swap, PageCount(dram)).unwrap();
            let awaiting = next.serve(None);
            // Its VMM reaches pages before any has come, and while they come.
            next.guest.read_aside(5);
            let mover = Mover::new(&engine, &arriving);
            let running = vm.run(&memory, seed ^ 0x55, 3000);
            let first = mover.look();
            assert_eq!(sum(&first), PAGES, "the first look gives all");
            mover.copy(&first.written);
            if kind.limit > 0 {
                assert!(engine.handle.fresh_status().stats.get(Metric::Resident) <= kind.limit + 256);
            }
            for _ in 0..3 {
                let look = mover.look();
                mover.copy(&look.written);
            }
            next.guest.read_aside(700);
            let memory = running.stop();
            engine.send(Command::HurryMove(true));
            let last = mover.look();
            assert_eq!(last.oldest_io, u64::MAX);
            mover.copy(&last.written);
            assert_eq!(sum(&mover.look()), 0, "nobody writes any more");
            awaiting.handle.arrived(arriving.finish().unwrap()).unwrap();
            check_all(next.guest, &memory);
            let (in_dram, in_swap) = arriving.counts();
            drop(arriving);
            assert!(in_dram.0 <= dram && (in_swap.0 > 0) == (dram < 900), "{in_dram:?} {in_swap:?}");
            // The source goes on as if nothing had been.
            engine.send(Command::Move(false));
            check_all(vm.guest, &memory);
            assert!(engine.detach().is_empty());
            // Whoever comes next finds all of it, too.
            assert!(awaiting.detach().is_empty());
            let engine = next.serve(None);
            check_all(next.guest, &memory);
            assert!(engine.detach().is_empty());
        }
    }
}

/// All of it is in DRAM, and its cap is below its size: it is armed, and stays so.
#[test]
fn a_vm_with_a_cap_is_armed_once_its_pages_are_there() {
    let mut vm = Vm::new("little", Kind::default());
    let engine = vm.serve(None);
    (0..100).for_each(|page| write(vm.guest, page * 5, page + 1));
    let mut next = Vm::arriving("little-moved", Kind { limit: 320, ..Kind::default() });
    let (ram, swap) = (next.ram_handles(), next.swap_handle());
    let arriving = Arriving::new(ram, swap, PageCount(300)).unwrap();
    let awaiting = next.serve(None);
    assert!(!awaiting.handle.fresh_status().armed);
    let mover = Mover::new(&engine, &arriving);
    mover.copy(&mover.look().written);
    assert_eq!(arriving.counts().0, PageCount(100));
    // A hole that becomes a page of zeros on the way is no page of the VM's.
    next.guest.read_aside(3);
    awaiting.handle.arrived(arriving.finish().unwrap()).unwrap();
    let status = awaiting.handle.fresh_status();
    assert!(status.armed && status.stats.get(Metric::Resident) >= 100, "{status:?}");
    (0..100).for_each(|page| check(next.guest, page * 5, page + 1));
    assert!(engine.detach().is_empty() && awaiting.detach().is_empty());
}

#[test]
fn a_write_behind_a_look_is_in_the_next_one() {
    let mut vm = Vm::new("looks", Kind::default());
    let engine = vm.serve(None);
    assert!(engine.handle.look_for_writes().is_err(), "the VM does not move");
    (0..PAGES).for_each(|page| write(vm.guest, page, page + 1));
    engine.send(Command::Move(true));
    let look = || engine.handle.look_for_writes().unwrap();
    assert_eq!(sum(&look()), PAGES);
    assert_eq!(sum(&look()), 0);
    write(vm.guest, 300, 7);
    let second = look();
    let expected = vec![(ChunkIdx(1), PageSet::single(44))];
    assert_eq!(second.written, expected);
    assert_eq!(sum(&look()), 0);
    // What the guest gives back has changed too.
    engine.discard(10, 3);
    assert_eq!(look().written, vec![(ChunkIdx(0), PageSet::range(10, 3))]);
    // A move that is given up leaves nothing behind: the VM is unarmed again.
    engine.send(Command::Move(false));
    engine.wait_for("it is unarmed", |status| !status.armed);
    assert!(engine.handle.look_for_writes().is_err());
    assert!(engine.detach().is_empty());
}

/// The kernel's number of this thread.
fn this_thread() -> u32 {
    let path = std::fs::read_link("/proc/thread-self").unwrap();
    path.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// Pages that are written one after the other.
const WRITES: std::ops::Range<u64> = 100..300;

/// How long this thread takes to write them, while that one is slowed.
fn write_all(vm: &Vm, engine: &Engine, slowed: u32, delay: Duration) -> Duration {
    engine.send(Command::SlowWriters { delay, threads: vec![slowed] });
    engine.handle.fresh_status();
    let began = Instant::now();
    WRITES.for_each(|page| write(vm.guest, page, page + 2));
    began.elapsed()
}

#[test]
fn only_first_writes_of_the_guests_processors_wait() {
    let mut vm = Vm::new("slowed", Kind::default());
    let engine = vm.serve(None);
    (0..PAGES).for_each(|page| write(vm.guest, page, page + 1));
    engine.send(Command::Move(true));
    let look = || engine.handle.look_for_writes().unwrap();
    let delay = Duration::from_micros(1600);
    let expected = delay * (WRITES.end - WRITES.start) as u32;
    let stats = || {
        let stats = engine.handle.fresh_status().stats;
        [Metric::SlowedWrites, Metric::SlowedUs, Metric::WriteDelay].map(|metric| stats.get(metric))
    };
    look();
    // Each waits once, until its answer: what is written a second time does not.
    assert!(write_all(&vm, &engine, this_thread(), delay) >= expected, "it does not wait");
    let [writes, us, now] = stats();
    assert_eq!((writes, now), (WRITES.end - WRITES.start, 1600));
    assert!(us >= expected.as_micros() as u64, "{us}");
    write_all(&vm, &engine, this_thread(), delay);
    assert_eq!(stats()[0], writes, "a second write waits");
    // Another thread is slowed than the one that writes.
    look();
    write_all(&vm, &engine, std::process::id() + 1_000_000, delay);
    assert_eq!(stats()[0], writes, "another thread waits");
    // Reads wait for nothing, and what is written is in the next look.
    let written: Vec<_> = look().written;
    let pages: u64 = written.iter().map(|(_, pages)| u64::from(pages.count())).sum();
    assert_eq!(pages, WRITES.end - WRITES.start);
    WRITES.for_each(|page| check(vm.guest, page, page + 2));
    assert_eq!(stats()[0], writes);
    engine.send(Command::Move(false));
    assert_eq!(stats()[2], 0, "it is slowed, and does not move");
    assert!(engine.detach().is_empty());
}

/// A thread waits in a fault that is to be answered later. Whatever comes meanwhile, it is answered.
#[test]
fn a_writer_that_waits_goes_on_when_slowing_ends() {
    let mut vm = Vm::new("slowed-ends", Kind::default());
    let mut engine = vm.serve(None);
    (0..PAGES).for_each(|page| write(vm.guest, page, page + 1));
    let ends: [(&str, Option<Command>); 4] = [
        ("the move ends", Some(Command::Move(false))),
        ("the VM stands still", Some(Command::HurryMove(true))),
        ("writers run again", Some(Command::SlowWriters { delay: Duration::ZERO, threads: vec![] })),
        ("the daemon ends", None),
    ];
    for (case, end) in ends {
        engine.send(Command::Move(true));
        engine.handle.look_for_writes().unwrap();
        let guest = vm.guest;
        let (sender, thread) = channel();
        let (go, may_go) = channel();
        let writer = std::thread::spawn(move || {
            sender.send(this_thread()).unwrap();
            may_go.recv().unwrap();
            (0..PAGES).for_each(|page| write(guest, page, page + 3));
        });
        let threads = vec![thread.recv().unwrap()];
        engine.send(Command::SlowWriters { delay: Duration::from_secs(9), threads });
        engine.handle.fresh_status();
        go.send(()).unwrap();
        engine.wait_for("it is slowed", |status| status.stats.get(Metric::SlowedWrites) > 3);
        assert!(!writer.is_finished(), "{case}: it is hardly slowed");
        match end {
            Some(end) => engine.send(end),
            None => {
                assert!(engine.detach().is_empty());
                engine = vm.serve(None);
            }
        }
        writer.join().unwrap();
        check_all(vm.guest, &(0..PAGES).map(|page| page + 3).collect());
        engine.send(Command::Move(false));
    }
    assert!(engine.detach().is_empty());
}

#[test]
fn what_cannot_be_read_is_said() {
    let mut vm = Vm::new("unreadable", Kind::default());
    let engine = vm.serve(None);
    write(vm.guest, 3, 3);
    engine.send(Command::Move(true));
    let _ = engine.handle.look_for_writes().unwrap();
    let (to, copies) = channel();
    let pages = Pages { chunk: ChunkIdx(0), run: Run { start: 0, len: 256 } };
    engine.send(Command::CopyOut(CopyOrder { pages, to, is_urgent: false, way: Way::Send }));
    // It is over before all has come: whoever waits hears it.
    let mut bytes = 0;
    while let Ok(Copied { content, .. }) = copies.recv_timeout(PATIENCE) {
        match content {
            Content::Bytes(content) => bytes += content.len() as u64,
            Content::Zeros => {}
            Content::Failed(why) => panic!("{why}"),
            Content::HandedOver | Content::Placed => panic!("nothing is handed over"),
        }
        if bytes > 0 {
            engine.send(Command::Move(false));
        }
    }
    assert!(bytes >= PAGE_SIZE);
    assert!(engine.detach().is_empty());
}
