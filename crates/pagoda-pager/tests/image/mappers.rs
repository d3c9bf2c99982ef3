//! Another process maps the VM's memory while it is paged: both write to the same pages, and neither loses a write or reads an old one.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use pagoda_abi::attach::{LentMap, Maps, Packet};
use pagoda_core::chance::Chance;
use pagoda_core::stats::Metric;
use pagoda_core::units::{PAGE_SIZE, PageCount};
use pagoda_pager::handle::Command;
use pagoda_pager::mapper::NewMapper;
use pagoda_sys::guest::Guest;
use pagoda_sys::process;
use pagoda_sys::ram::RamFile;
use pagoda_sys::socket::{Connection, Listener, Received, SharedMap};
use pagoda_sys::uffd;

use crate::vm::{Engine, Kind, PAGES, PATIENCE, Vm};

/// Pages in DRAM, of 1024.
const LIMIT: u64 = 300;
/// A word of each page for each of the two processes.
const WORDS: [usize; 2] = [5, 400];
/// Pages that nobody writes: some of them are given back meanwhile.
const GIVEN_BACK: u64 = 64;

/// The mapper's side: a process whose end can be seen, a mapping, and a thread that does what the shim's does.
struct Mapper {
    process: Child,
    socket: PathBuf,
    slot: usize,
    guest: Guest,
    written: Written,
}

impl Mapper {
    /// One that says what it maps to every daemon that connects. `welcomed`: whenever one has let it.
    fn new(vm: &Vm) -> (Mapper, Receiver<()>) {
        let process = Process::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let start = process::start_time(process.id()).unwrap();
        let slot = vm.shared.add_mapper(process.id(), start).unwrap();
        let guest = Guest::map(&RamFile::from_fd(vm.ram_file(), PAGES * PAGE_SIZE).unwrap());
        let socket = vm.dir.join("mapper");
        let listener = Listener::bind(&socket).unwrap();
        let uffd = uffd::create().unwrap();
        let shared = SharedMap::from_fd(vm.shared.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let (sender, welcomed) = channel();
        let ram = vm.ram_file();
        let pid = process.id();
        let pidfd = process::pidfd_open(pid).unwrap();
        let written: Written = Arc::new(std::array::from_fn(|_| (0..PAGES).map(|_| AtomicU64::new(0)).collect()));
        let seen = Arc::clone(&written);
        std::thread::spawn(move || {
            let mut guests = vec![guest];
            while let Ok(connection) = listener.accept() {
                // What its program has just mapped, and waits for leave to use. Nothing is ever unmapped.
                let fresh = Guest::map(&RamFile::from_fd(ram.try_clone().unwrap(), PAGES * PAGE_SIZE).unwrap());
                guests.push(fresh);
                answer(&connection, &guests, (&uffd, &pidfd, pid), &shared, &sender, &seen);
            }
        });
        (Mapper { process, socket, slot, guest, written }, welcomed)
    }

    /// What the daemon knows of it.
    fn known(&self, vm: &Vm) -> NewMapper {
        let has_maps = vm.shared.known_mappers().any(|(slot, .., has_maps)| slot == self.slot && has_maps);
        let pid = self.process.id();
        let (pidfd, socket) = (process::pidfd_open(pid).unwrap(), self.socket.clone());
        NewMapper { slot: self.slot, pid, pidfd, socket, has_maps }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn answer(
    connection: &Connection,
    guests: &[Guest],
    (uffd, pidfd, pid): (&OwnedFd, &OwnedFd, u32),
    shared: &SharedMap,
    welcomed: &Sender<()>,
    written: &Written,
) {
    let (guest, fresh) = (guests[0], guests[guests.len() - 1]);
    let mut maps = Maps::default();
    // In two parts, as a guest's memory is around the hole below its first MiB. The second part begins within a chunk.
    for (first, count) in [(0, 160), (160, PAGES - 160)] {
        let (offset, len) = (first * PAGE_SIZE, count * PAGE_SIZE);
        maps.push(LentMap { region: 0, offset, len, addr: guest.at(first) });
    }
    for guest in &guests[1..] {
        maps.push(LentMap { region: 0, offset: 0, len: PAGES * PAGE_SIZE, addr: guest.at(0) });
    }
    if connection.send(&Packet::Maps { pid, maps }, &[uffd.as_fd(), pidfd.as_fd()]).is_err() {
        return;
    }
    while let Ok(Received::Message { packet, .. }) = connection.recv() {
        let answer = match packet {
            Packet::Zap { seq, ranges } => {
                let zap = |guest: Guest, addr, len| guest.zap(addr, len).is_ok();
                for range in ranges.as_slice() {
                    assert!(guests.iter().any(|guest| zap(*guest, range.addr, range.len)), "{range:?}");
                }
                Packet::Zapped { seq, epoch: shared.advance(), errno: 0 }
            }
            Packet::Clock { seq } => Packet::Clocked { seq },
            Packet::Welcome { .. } => {
                // At once: whatever the daemon has still to do, pages that are out must not be zeros.
                let written = Arc::clone(written);
                std::thread::spawn(move || look_at_all(fresh, &written));
                let _ = welcomed.send(());
                continue;
            }
            other => panic!("{other:?}"),
        };
        if connection.send(&answer, &[]).is_err() {
            return;
        }
    }
}

/// Every page is as new as what was written when it is looked at.
fn look_at_all(guest: Guest, written: &Written) {
    for page in (0..PAGES - GIVEN_BACK).rev() {
        for (written, word) in written.iter().zip(WORDS) {
            let least = written[page as usize].load(Ordering::SeqCst);
            let seen = guest.load(page, word);
            if seen < least {
                eprintln!("a new mapping has {seen} in page {page}, and {least} was written");
                // In a thread that nobody joins.
                std::process::abort();
            }
        }
    }
}

/// What each process has written to each page last, and knows to be there.
type Written = Arc<[Vec<AtomicU64>; 2]>;

/// One of the two processes writes and reads anywhere, until it is told to stop. How often it did.
fn work(guest: Guest, side: usize, written: &Written, stop: &Arc<AtomicBool>, seed: u64) -> JoinHandle<u64> {
    let (written, stop) = (Arc::clone(written), Arc::clone(stop));
    std::thread::spawn(move || {
        let mut chance = Chance::new(seed ^ (side as u64) << 40);
        let (mut at, mut steps) = (0, 0);
        while !stop.load(Ordering::Relaxed) {
            at = if chance.per_mille(600) { (at + 1) % (PAGES - GIVEN_BACK) } else { chance.below(PAGES - GIVEN_BACK) };
            let index = at as usize;
            // What the other has written before this is to be seen.
            let least = written[1 - side][index].load(Ordering::SeqCst);
            let seen = guest.load(at, WORDS[1 - side]);
            assert!(seen >= least, "side {side} reads {seen} in page {at}, and {least} was written");
            let own = written[side][index].load(Ordering::SeqCst);
            assert_eq!(guest.load(at, WORDS[side]), own, "side {side}, page {at}: its own word");
            if chance.per_mille(400) {
                guest.store(at, WORDS[side], own + 1);
                written[side][index].store(own + 1, Ordering::SeqCst);
            }
            steps += 1;
        }
        steps
    })
}

/// Both processes at work.
struct Both {
    stop: [Arc<AtomicBool>; 2],
    threads: Vec<JoinHandle<u64>>,
    written: Written,
}

impl Both {
    fn start(vm: &Vm, mapper: &Mapper, seed: u64) -> Both {
        let written = Arc::clone(&mapper.written);
        let stop: [Arc<AtomicBool>; 2] = Default::default();
        let guests = [vm.guest, mapper.guest];
        let threads = (0..2).map(|side| work(guests[side], side, &written, &stop[side], seed)).collect();
        Both { stop, threads, written }
    }

    /// Stops the mapper's thread, and says how many steps it made.
    fn stop_mapper(&mut self) -> u64 {
        self.stop[1].store(true, Ordering::Relaxed);
        self.threads.pop().unwrap().join().unwrap()
    }

    /// Stops the VMM's thread, says how many steps it made, and compares every page with what was written.
    fn stop(mut self, vm: &Vm) -> u64 {
        self.stop[0].store(true, Ordering::Relaxed);
        let steps = self.threads.pop().unwrap().join().unwrap();
        for page in 0..PAGES - GIVEN_BACK {
            for (written, word) in self.written.iter().zip(WORDS) {
                let expected = written[page as usize].load(Ordering::SeqCst);
                assert_eq!(vm.guest.load(page, word), expected, "page {page}, word {word}, in the end");
            }
        }
        steps
    }
}

/// So many more pages have left DRAM.
fn wait_out(engine: &Engine, pages: u64) {
    let before = engine.handle.fresh_status().stats.get(Metric::PagesOut);
    engine.wait_for("pages leave", |status| status.stats.get(Metric::PagesOut) >= before + pages);
}

fn both_write(name: &str, kind: Kind, seed: u64) {
    let mut vm = Vm::new(&format!("mapped-{name}-{seed}"), kind);
    let (mut mapper, welcomed) = Mapper::new(&vm);
    vm.mappers = vec![mapper.known(&vm)];
    let mut engine = vm.serve(None);
    welcomed.recv_timeout(PATIENCE).unwrap();
    let mut both = Both::start(&vm, &mapper, seed);
    let mut chance = Chance::new(seed);
    for round in 0..4 {
        wait_out(&engine, 500);
        engine.discard(PAGES - GIVEN_BACK + chance.below(GIVEN_BACK - 8), 8);
        engine.send(Command::SetLimit(PageCount(LIMIT - 50 + chance.below(100))));
        if chance.per_mille(500) {
            // Everything comes back, and the kernel serves both; then it is paged again.
            engine.send(Command::SetLimit(PageCount(PAGES)));
            engine.wait_for("it is not paged", |status| !status.armed);
            engine.send(Command::SetLimit(PageCount(LIMIT)));
        }
        if round % 2 == 0 {
            // A daemon goes, and the next one meets the mapper again.
            assert!(engine.detach().is_empty());
            vm.mappers = vec![mapper.known(&vm)];
            assert!(vm.mappers[0].has_maps, "the next daemon would not wait for it");
            engine = vm.serve(None);
            welcomed.recv_timeout(PATIENCE).unwrap();
        }
    }
    wait_out(&engine, 500);
    let by_mapper = both.stop_mapper();
    mapper.kill();
    engine.wait_for("it is forgotten", |_| vm.shared.known_mappers().count() == 0);
    wait_out(&engine, 500);
    let by_vmm = both.stop(&vm);
    assert!(by_mapper > 0 && by_vmm > 0);
    assert!(engine.detach().is_empty());
}

#[test]
fn what_two_processes_write_is_there_for_both_while_pages_come_and_go() {
    let small = Kind { limit: LIMIT, ..Kind::default() };
    let kinds = [
        ("swap", small),
        ("compressed", Kind { compressed: 1 << 20, ..small }),
        ("shares", Kind { shares: true, ..small }),
    ];
    for (name, kind) in kinds {
        (0..2).for_each(|seed| both_write(name, kind, seed));
    }
}

/// A mapper that does not answer keeps pages in DRAM, and its end lets them go.
#[test]
fn nothing_leaves_that_a_silent_mapper_may_have_mapped() {
    let mut vm = Vm::new("mapped-silent", Kind { limit: PAGES, ..Kind::default() });
    let (mut mapper, welcomed) = Mapper::new(&vm);
    vm.mappers = vec![mapper.known(&vm)];
    let engine = vm.serve(None);
    welcomed.recv_timeout(PATIENCE).unwrap();
    (0..PAGES).for_each(|page| mapper.guest.store(page, 7, page + 1));
    // From now on nobody listens to a daemon that connects, nor does the connection answer.
    std::fs::remove_file(&mapper.socket).unwrap();
    let (ours, theirs) = Connection::pair().unwrap();
    drop(theirs);
    drop(ours);
    assert!(engine.detach().is_empty());
    vm.mappers = vec![mapper.known(&vm)];
    let refused = vm.serve(None);
    // The VM waits: the engine did not start.
    assert!(
        matches!(refused.next_notice(), Some(pagoda_pager::handle::Notice::Stalled(why)) if why.contains("maps its memory"))
    );
    mapper.kill();
    vm.mappers = vec![];
    vm.shared.remove_mapper(mapper.slot);
    let engine = vm.serve(None);
    engine.send(Command::SetLimit(PageCount(LIMIT)));
    engine.wait_swapped(PAGES - LIMIT);
    (0..PAGES).for_each(|page| assert_eq!(vm.guest.load(page, 7), page + 1));
    assert!(engine.detach().is_empty());
}
