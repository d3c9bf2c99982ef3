//! VMs that run before all their pages have come from another host. Its source is played by threads of the test, which forget a page
//! when they hear that it is there for good, and fail if it is asked for after that.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::chance::Chance;
use pagoda_core::fault::{Located, Pages};
use pagoda_core::stats::Metric;
use pagoda_core::units::{ChunkIdx, PageCount, PageIdx};
use pagoda_pager::arriving::Arriving;
use pagoda_pager::handle::Command;
use pagoda_pager::tier::source::Arrivals;

use crate::fills::KINDS;
use crate::vcpu::{Memory, check, check_all, content_of, write};
use crate::vm::{CHUNKS, Engine, Kind, PAGES, PATIENCE, Vm};

/// Pages that vCPUs use; of the others some are given back.
const USED: u64 = 768;

fn single(page: u64) -> Pages {
    pages(page, 1)
}

fn pages(first: u64, len: u16) -> Pages {
    let first = PageIdx(first);
    Pages { chunk: first.chunk(), run: Run { start: first.index_in_chunk(), len } }
}

fn each(pages: Pages) -> impl Iterator<Item = u64> {
    let first = pages.first().0;
    first..first + u64::from(pages.run.len)
}

/// The pages of a map, one by one.
fn flat(map: &[(ChunkIdx, PageSet)]) -> BTreeSet<u64> {
    map.iter().flat_map(|(chunk, pages)| pages.iter().map(|index| chunk.page(index).0)).collect()
}

fn map_of(pages: &BTreeSet<u64>) -> Vec<(ChunkIdx, PageSet)> {
    let of = |chunk: ChunkIdx| {
        let within = pages.iter().filter(|page| PageIdx(**page).chunk() == chunk);
        (chunk, within.map(|page| PageIdx(*page).index_in_chunk()).collect())
    };
    (0..CHUNKS).map(ChunkIdx).map(of).filter(|(_, pages): &(_, PageSet)| !pages.is_empty()).collect()
}

/// The host that the VM moved from.
struct Source {
    memory: Memory,
    held: BTreeSet<u64>,
}

impl Source {
    fn forget(&mut self, pages: Pages) {
        each(pages).for_each(|page| {
            self.held.remove(&page);
        });
    }

    /// What the destination lacks, over a new link.
    fn resume(&mut self, missing: &[(ChunkIdx, PageSet)]) {
        let missing = flat(missing);
        assert!(missing.is_subset(&self.held), "the destination lacks what its source has forgotten");
        self.held = missing;
    }

    fn content(&self, pages: Pages) -> Vec<u8> {
        each(pages).flat_map(|page| content_of(self.memory[page as usize])).collect()
    }
}

/// Sends pages as they come in. Any of them may have been sent before.
fn send(source: &Mutex<Source>, arrivals: &Arrivals, pages: Pages, chance: &mut Chance) {
    let content = source.lock().unwrap().content(pages);
    let new = match content.iter().all(|byte| *byte == 0) && chance.per_mille(500) {
        true => arrivals.put_zeros(pages).unwrap(),
        false => arrivals.put(pages, &content).unwrap(),
    };
    let mut source = source.lock().unwrap();
    new.runs().for_each(|run| source.forget(Pages { chunk: pages.chunk, run }));
}

/// Brings pages until it is told to stop, or all are there: late, out of order, and some of them twice.
fn bring(source: &Mutex<Source>, arrivals: &Arrivals, seed: u64, is_over: &AtomicBool) {
    let mut chance = Chance::new(seed);
    let mut asked: Vec<Pages> = Vec::new();
    let may_end = |arrivals: &Arrivals| is_over.load(Ordering::SeqCst) || arrivals.is_whole();
    while !may_end(arrivals) {
        asked.extend(arrivals.take_demands());
        if chance.per_mille(20) {
            // The link is lost, and what was asked for with it.
            asked.clear();
            arrivals.forget_demands();
            for dropped in arrivals.take_dropped() {
                source.lock().unwrap().forget(dropped);
            }
        }
        for dropped in arrivals.take_dropped() {
            source.lock().unwrap().forget(dropped);
        }
        if !asked.is_empty() && chance.per_mille(700) {
            let demand = asked.swap_remove(chance.below(asked.len() as u64) as usize);
            let lost: BTreeSet<u64> = each(demand).filter(|page| !source.lock().unwrap().held.contains(page)).collect();
            assert!(lost.is_disjoint(&flat(&arrivals.missing())), "what is asked for was forgotten: {lost:?}");
            send(source, arrivals, demand, &mut chance);
        } else if chance.per_mille(300) {
            // Half the time what has not come, or it would take a loaded machine's patience until the last page is hit. Else whatever it
            // is: also what has come, what was never missing, and what is given back.
            let missing: Vec<u64> = flat(&arrivals.missing()).into_iter().collect();
            let first = match chance.per_mille(500) && !missing.is_empty() {
                true => missing[chance.below(missing.len() as u64) as usize],
                false => chance.below(PAGES),
            };
            let len = chance.within(1, 40).min(256 - first % 256) as u16;
            send(source, arrivals, pages(first, len), &mut chance);
        } else {
            (0..chance.below(100)).for_each(|_| std::thread::yield_now());
        }
    }
}

/// A VM that has arrived and lacks some pages.
struct Arrived {
    vm: Vm,
    engine: Engine,
    source: Arc<Mutex<Source>>,
}

/// `dram`: pages that come to DRAM at most before it runs. Of some pages that it lacks there is an outdated copy.
fn arrive(name: &str, kind: Kind, memory: &Memory, missing: &BTreeSet<u64>, dram: u64) -> Arrived {
    let mut vm = Vm::lacking(name, kind);
    let (ram, swap) = (vm.ram_handles(), vm.swap_handle());
    let arriving = Arriving::new(ram, swap, PageCount(dram)).unwrap();
    let engine = vm.serve(None);
    for page in 0..PAGES {
        match missing.contains(&page) {
            false => arriving.store(single(page), &content_of(memory[page as usize])).unwrap(),
            true if page % 3 == 0 => arriving.store(single(page), &content_of(0xdead + page)).unwrap(),
            true => {}
        }
    }
    let map = map_of(missing);
    engine.handle.arrived(arriving.finish_without(&map).unwrap()).unwrap();
    assert_eq!(vm.arrivals().missing(), map);
    let source = Arc::new(Mutex::new(Source { memory: memory.clone(), held: missing.clone() }));
    Arrived { vm, engine, source }
}

fn random_memory(chance: &mut Chance) -> Memory {
    (0..PAGES).map(|page| if chance.per_mille(200) { 0 } else { (page << 32) | chance.draw() >> 40 | 1 }).collect()
}

/// Runs of pages, about half of all.
fn random_half(chance: &mut Chance) -> BTreeSet<u64> {
    let mut half = BTreeSet::new();
    while half.len() < PAGES as usize / 2 {
        let (first, len) = (chance.below(PAGES), chance.within(1, 60));
        half.extend(first..(first + len).min(PAGES));
    }
    half
}

fn start(
    source: &Arc<Mutex<Source>>,
    arrivals: Arc<Arrivals>,
    seed: u64,
) -> (Arc<AtomicBool>, Vec<std::thread::JoinHandle<()>>) {
    let is_over = Arc::new(AtomicBool::new(false));
    let threads = (0..2).map(|nth| {
        let (source, arrivals, is_over) = (Arc::clone(source), Arc::clone(&arrivals), Arc::clone(&is_over));
        std::thread::spawn(move || bring(&source, &arrivals, seed * 2 + nth, &is_over))
    });
    let threads = threads.collect();
    (is_over, threads)
}

fn stop((is_over, threads): (Arc<AtomicBool>, Vec<std::thread::JoinHandle<()>>)) {
    is_over.store(true, Ordering::SeqCst);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// vCPUs run while pages come, pages are given back, others leave DRAM, and daemons follow one another.
#[test]
fn every_page_is_right_whatever_happens_until_the_last_has_come() {
    for (name, kind) in KINDS {
        for seed in 0..6 {
            let mut chance = Chance::new(seed + 100);
            let (mut memory, missing) = (random_memory(&mut chance), random_half(&mut chance));
            let dram = if kind.limit > 0 { kind.limit - 100 } else { [PAGES, 300][seed as usize % 2] };
            let name = format!("tail-{name}-{seed}");
            let Arrived { mut vm, mut engine, source } = arrive(&name, kind, &memory, &missing, dram);
            let mut bringing = start(&source, vm.arrivals(), seed);
            let running = vm.run(&memory[..USED as usize].to_vec(), seed, 2500);
            for round in 0..12 {
                let (first, len) = (USED + chance.below(PAGES - USED - 20), chance.within(1, 20));
                engine.discard(first, len);
                (first..first + len).for_each(|page| memory[page as usize] = 0);
                (0..3).for_each(|_| {
                    let page = USED + chance.below(PAGES - USED);
                    check(vm.guest, page, memory[page as usize]);
                    memory[page as usize] = chance.draw() | 1;
                    write(vm.guest, page, memory[page as usize]);
                });
                if round % 4 == 3 {
                    assert!(engine.detach().is_empty());
                    // The same daemon goes on with it, or another one, which knows what the files say.
                    if chance.per_mille(600) {
                        stop(bringing);
                        vm.reopen_arrivals();
                        let arrivals = vm.arrivals();
                        source.lock().unwrap().resume(&arrivals.missing());
                        bringing = start(&source, arrivals, seed + 1000 * round);
                    }
                    engine = vm.serve(None);
                }
            }
            memory[..USED as usize].copy_from_slice(&running.stop());
            wait_whole(&vm.arrivals());
            stop(bringing);
            check_all(vm.guest, &memory);
            assert!(engine.detach().is_empty());
            vm.reopen_arrivals();
            let engine = vm.serve(None);
            check_all(vm.guest, &memory);
            assert_eq!(engine.handle.fresh_status().stalled, None);
            assert!(engine.detach().is_empty());
        }
    }
}

/// Waits until something is so, looking at each thing that a session would hear of.
fn wait_for<T>(arrivals: &Arrivals, mut look: impl FnMut() -> Option<T>) -> T {
    let (told, hears) = channel();
    let told = Mutex::new(told);
    arrivals.set_listener(Some(Box::new(move || told.lock().unwrap().send(()).unwrap_or(()))));
    loop {
        hears.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("it has not come: {arrivals:?}"));
        if let Some(found) = look() {
            arrivals.set_listener(None);
            return found;
        }
    }
}

fn wait_whole(arrivals: &Arrivals) {
    wait_for(arrivals, || arrivals.is_whole().then_some(()));
}

fn wait_demand(arrivals: &Arrivals) -> Vec<Pages> {
    wait_for(arrivals, || Some(arrivals.take_demands()).filter(|demands| !demands.is_empty()))
}

/// What the files of the source tier take of the disk.
fn disk_bytes(status: &pagoda_pager::handle::Status) -> u64 {
    status.tiers.iter().filter(|tier| tier.name == "source").map(|tier| tier.counts.disk_bytes).sum()
}

#[test]
fn a_thread_waits_for_its_page_and_for_no_other() {
    let memory: Memory = (1..=PAGES).collect();
    let missing = (100..600).collect();
    let Arrived { vm, engine, .. } = arrive("waits", Kind::default(), &memory, &missing, PAGES);
    let (arrivals, guest) = (vm.arrivals(), vm.guest);
    let waiting = std::thread::spawn(move || check(guest, 120, 121));
    assert_eq!(wait_demand(&arrivals), [single(120)]);
    // Pages that are here are served meanwhile, also of its chunk.
    check(guest, 3, 4);
    check(guest, 700, 701);
    let status = engine.wait_for("it is said", |status| status.waits.is_some());
    assert!(status.waits.as_ref().unwrap().starts_with("1 pages of the move's source for "), "{status:?}");
    assert_eq!(status.stalled, None);
    // Others come, and it waits on.
    arrivals.put(pages(121, 3), &[content_of(122), content_of(123), content_of(124)].concat()).unwrap();
    check(guest, 122, 123);
    assert!(!waiting.is_finished() && arrivals.take_demands().is_empty(), "it is asked for once");
    arrivals.forget_demands();
    assert_eq!(arrivals.take_demands(), [single(120)]);
    assert_eq!(arrivals.put(single(120), &content_of(121)).unwrap(), PageSet::single(120));
    waiting.join().unwrap();
    engine.wait_for("nobody waits", |status| status.waits.is_none());
    write(guest, 120, 99);
    assert!(arrivals.put(single(120), &content_of(121)).unwrap().is_empty(), "the second copy counts");
    check(guest, 120, 99);
    assert!(engine.detach().is_empty());
}

/// Also after the VM has written the page, and it has left DRAM.
#[test]
fn a_page_that_was_paged_out_does_not_come_back_from_the_source() {
    let kind = Kind { limit: 300, ..Kind::default() };
    let memory: Memory = (1..=PAGES).collect();
    let missing = (0..256).collect();
    let Arrived { vm, engine, .. } = arrive("paged-out", kind, &memory, &missing, 200);
    let arrivals = vm.arrivals();
    let content: Vec<u8> = (0..256).flat_map(|page| content_of(page + 1)).collect();
    assert!(arrivals.put(pages(0, 256), &content).unwrap().is_full());
    assert!(arrivals.is_whole());
    (0..256).for_each(|page| write(vm.guest, page, page + 5000));
    (256..PAGES).for_each(|page| check(vm.guest, page, page + 1));
    (0..256).for_each(|page| check(vm.guest, page, page + 5000));
    assert!(arrivals.put(pages(0, 256), &content).unwrap().is_empty());
    (256..PAGES).for_each(|page| check(vm.guest, page, page + 1));
    engine.wait_for("the tier has less", |status| {
        status.tiers.iter().any(|tier| tier.name == "source" && tier.counts.pages < 256)
    });
    (0..256).for_each(|page| check(vm.guest, page, page + 5000));
    assert!(engine.detach().is_empty());
}

#[test]
fn what_is_given_back_need_not_come() {
    let memory: Memory = (1..=PAGES).collect();
    let missing = (0..512).collect();
    let Arrived { vm, engine, .. } = arrive("given-back", Kind::default(), &memory, &missing, PAGES);
    let arrivals = vm.arrivals();
    arrivals.put(pages(0, 20), &(1..21).flat_map(content_of).collect::<Vec<u8>>()).unwrap();
    let heard = Arc::new(AtomicBool::new(false));
    let hears = Arc::clone(&heard);
    arrivals.set_listener(Some(Box::new(move || hears.store(true, Ordering::SeqCst))));
    heard.store(false, Ordering::SeqCst);
    engine.discard(10, 300);
    assert!(heard.load(Ordering::SeqCst));
    assert_eq!(arrivals.take_dropped(), [pages(20, 236), pages(256, 54)]);
    assert!(arrivals.take_dropped().is_empty());
    (10..310).for_each(|page| check(vm.guest, page, 0));
    assert!(arrivals.put(pages(100, 2), &[content_of(1), content_of(2)].concat()).unwrap().is_empty());
    check(vm.guest, 100, 0);
    (0..10).for_each(|page| check(vm.guest, page, page + 1));
    engine.discard(310, 202);
    assert!(arrivals.is_whole());
    assert!(engine.detach().is_empty());
}

/// What comes unasked for comes into DRAM, as far as there is room.
#[test]
fn what_comes_unasked_for_is_there_before_it_is_needed() {
    let memory: Memory = (1..=PAGES).collect();
    let missing: BTreeSet<u64> = (256..PAGES).collect();
    let kind = Kind { limit: 900, ..Kind::default() };
    let Arrived { vm, engine, .. } = arrive("unasked", kind, &memory, &missing, PAGES);
    let arrivals = vm.arrivals();
    for chunk in 1..4 {
        let content: Vec<u8> = (chunk * 256..(chunk + 1) * 256).flat_map(|page| content_of(page + 1)).collect();
        arrivals.put(pages(chunk * 256, 256), &content).unwrap();
    }
    let prefetched = |status: &pagoda_pager::handle::Status| status.stats.get(Metric::PagesPrefetched);
    let status = engine.wait_for("a chunk has come", |status| prefetched(status) >= 256);
    assert_eq!(status.stats.get(Metric::EvictedChunks), 0);
    (0..PAGES).for_each(|page| check(vm.guest, page, page + 1));
    // With a cap of all of it everything comes home, and the kernel serves it again. Nothing is left of the tier.
    engine.send(Command::SetLimit(PageCount(PAGES)));
    engine.wait_for("it is at home", |status| !status.armed);
    engine.wait_for("its files take no room", |status| disk_bytes(status) == 0);
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
}

/// A VM at its full size brings home what has come, and stays armed for the rest.
#[test]
fn a_vm_with_all_its_dram_waits_for_the_last_page() {
    let memory: Memory = (1..=PAGES).collect();
    let missing: BTreeSet<u64> = (0..PAGES).collect();
    let Arrived { vm, engine, .. } = arrive("last", Kind::default(), &memory, &missing, PAGES);
    let arrivals = vm.arrivals();
    for page in (1..PAGES).rev() {
        arrivals.put(single(page), &content_of(page + 1)).unwrap();
    }
    let status = engine.wait_for("the others are in DRAM", |status| status.stats.get(Metric::Resident) == PAGES - 1);
    assert!(status.armed);
    let waiting = vm.guest.read_aside(0);
    assert_eq!(wait_demand(&arrivals), [single(0)]);
    arrivals.put(single(0), &content_of(1)).unwrap();
    drop(waiting);
    engine.wait_for("it is at home", |status| !status.armed);
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn a_vm_that_lacks_nothing_has_no_such_files() {
    let memory: Memory = (1..=PAGES).collect();
    let Arrived { mut vm, engine, .. } = arrive("complete", Kind::default(), &memory, &BTreeSet::new(), PAGES);
    engine.wait_for("its files take no room", |status| disk_bytes(status) == 0);
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
    vm.reopen_arrivals();
    let engine = vm.serve(None);
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn a_vm_without_that_tier_does_not_run_without_pages() {
    let mut vm = Vm::arriving("no-tier", Kind::default());
    let arriving = Arriving::new(vm.ram_handles(), vm.swap_handle(), PageCount(PAGES)).unwrap();
    let engine = vm.serve(None);
    arriving.store(single(3), &content_of(4)).unwrap();
    let found: Vec<Located> = arriving.finish_without(&[(ChunkIdx(1), PageSet::single(5))]).unwrap();
    let refused = engine.handle.arrived(found).unwrap_err();
    assert!(refused.contains("note which pages have not come"), "{refused}");
    assert!(engine.detach().is_empty());
}

/// What came before of a page that is missing counts no more, in DRAM or in swap, even if whoever stored it says where it is.
#[test]
fn what_is_missing_wins_over_what_came_before() {
    let mut vm = Vm::lacking("outdated", Kind { limit: 400, ..Kind::default() });
    let arriving = Arriving::new(vm.ram_handles(), vm.swap_handle(), PageCount(300)).unwrap();
    let engine = vm.serve(None);
    (0..PAGES).for_each(|page| arriving.store(single(page), &content_of(page + 1)).unwrap());
    let mut found = arriving.finish().unwrap();
    assert!(!found[0].ram.is_empty() && !found[3].swap.is_empty());
    found.iter_mut().for_each(|located| located.missing = PageSet::range(10, 20));
    engine.handle.arrived(found).unwrap();
    drop(arriving);
    let arrivals = vm.arrivals();
    assert_eq!(arrivals.missing_count(), PageCount(80));
    for chunk in 0..4 {
        let first = chunk * 256 + 10;
        let content: Vec<u8> = (first..first + 20).flat_map(|page| content_of(page + 9000)).collect();
        arrivals.put(pages(first, 20), &content).unwrap();
    }
    let is_new = |page: u64| (10..30).contains(&(page % 256));
    let check_them = |vm: &Vm| {
        (0..PAGES).for_each(|page| check(vm.guest, page, if is_new(page) { page + 9000 } else { page + 1 }));
    };
    check_them(&vm);
    assert!(engine.detach().is_empty());
    drop(arrivals);
    vm.reopen_arrivals();
    let engine = vm.serve(None);
    check_them(&vm);
    assert!(engine.detach().is_empty());
}

/// A daemon dies while it brings a page in, of which it had the content and no copy yet.
#[test]
fn what_was_half_brought_in_is_asked_for_again() {
    let memory: Memory = (1..=PAGES).collect();
    let missing = (100..140).collect();
    let Arrived { mut vm, engine, .. } = arrive("half", Kind::default(), &memory, &missing, PAGES);
    assert!(engine.detach().is_empty());
    // The page exists before its content does.
    vm.meddle().write_page(120, &[0x77; 4096]);
    vm.shared.intents[0].declare(0, PageSet::single(120).words());
    vm.reopen_arrivals();
    let engine = vm.serve(None);
    let (arrivals, guest) = (vm.arrivals(), vm.guest);
    assert_eq!(arrivals.missing_count(), PageCount(40));
    let waiting = std::thread::spawn(move || check(guest, 120, 121));
    assert_eq!(wait_demand(&arrivals), [single(120)]);
    let content: Vec<u8> = (100..140).flat_map(|page| content_of(page + 1)).collect();
    arrivals.put(pages(100, 40), &content).unwrap();
    waiting.join().unwrap();
    check_all(guest, &memory);
    assert!(engine.detach().is_empty());
}

/// DRAM has a page that has not come for good: it was handed over, and perhaps written since. It does not come back.
#[test]
fn a_page_that_is_in_dram_is_what_dram_says() {
    let memory: Memory = (1..=PAGES).collect();
    let missing = (100..140).collect();
    let Arrived { mut vm, engine, .. } = arrive("in-dram", Kind::default(), &memory, &missing, PAGES);
    assert!(engine.detach().is_empty());
    vm.meddle().write_page(120, &content_of(4711));
    vm.reopen_arrivals();
    let engine = vm.serve(None);
    check(vm.guest, 120, 4711);
    let arrivals = vm.arrivals();
    let content: Vec<u8> = (100..140).flat_map(|page| content_of(page + 1)).collect();
    arrivals.put(pages(100, 40), &content).unwrap();
    engine.wait_for("it is at home", |status| !status.armed);
    (0..PAGES).for_each(|page| check(vm.guest, page, if page == 120 { 4711 } else { page + 1 }));
    assert!(engine.detach().is_empty());
}
