//! VMs that get what the one before needed first before they ask for it.

use std::time::Instant;

use pagoda_core::chance::Chance;
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::PageIdx;
use pagoda_image::{Touched, TouchedRun};
use pagoda_pager::handle::Notice;

use crate::disk::Reads;
use crate::fills::KINDS;
use crate::reads::Source;
use crate::vcpu::{self, check_all};
use crate::vm::{Kind, PAGES, PATIENCE};

const KIND: Kind = Kind { limit: 900, compressed: 0, shares: false, prefetch: true };

fn record(runs: &[(u64, u32)]) -> Touched {
    Touched::new(runs.iter().map(|(first, count)| TouchedRun { first: PageIdx(*first), count: *count }).collect())
}

/// The record, once it is there and another one than before.
fn wait_record(source: &Source, before: Option<&Touched>) -> Touched {
    let start = Instant::now();
    loop {
        match source.image().touched() {
            Ok(Some(found)) if Some(&found) != before => return found,
            found => assert!(start.elapsed() < PATIENCE, "no record: {found:?}"),
        }
    }
}

fn waited(stats: &Stats) -> u64 {
    [Metric::FaultsSwapPage, Metric::FaultsSwapChunk, Metric::FaultsJoined].map(|metric| stats.get(metric)).iter().sum()
}

#[test]
fn what_one_vm_needed_first_the_next_one_has() {
    let source = Source::full("needed");
    let needed: Vec<u64> = (0..20).map(|nth| (nth * 397 + 13) % PAGES).collect();
    let use_all = |guest| needed.iter().for_each(|page| vcpu::check(guest, *page, source.memory[*page as usize]));
    // A guest that never runs tells nothing; one that runs tells it when it ends.
    for is_let_run in [false, true] {
        let mut vm = source.make("records", KIND);
        let mut kill = vm.killer();
        let engine = vm.serve(None);
        if is_let_run {
            vm.shared.mark_let_run();
        }
        use_all(vm.guest);
        let stats = engine.handle.fresh_status().stats;
        assert_eq!((waited(&stats), stats.get(Metric::PagesPrefetched)), (20, 0));
        kill();
        assert_eq!(engine.next_notice(), Some(Notice::Exited));
        drop(vm);
    }
    let found = wait_record(&source, None);
    assert_eq!(found, record(&needed.iter().map(|page| (*page, 1)).collect::<Vec<_>>()));
    let mut vm = source.make("replays", KIND);
    let engine = vm.serve(None);
    engine.wait_for("they are prefetched", |status| status.stats.get(Metric::PagesPrefetched) == 20);
    use_all(vm.guest);
    let stats = engine.handle.fresh_status().stats;
    assert_eq!((waited(&stats), stats.get(Metric::PrefetchedUsed)), (0, 20));
    check_all(vm.guest, &source.memory);
    assert!(engine.detach().is_empty());
    source.check();
}

#[test]
fn a_record_is_written_while_its_vm_runs_when_enough_is_known_and_anew_when_it_lacks_much() {
    let source = Source::full("anew");
    source.image().keep_touched(&record(&[(0, 8)])).unwrap();
    let mut vm = source.make("anew", KIND);
    let engine = vm.serve(None);
    vm.shared.mark_let_run();
    // More than a quarter of all.
    (300..600).for_each(|page| vcpu::check(vm.guest, page, source.memory[page as usize]));
    let found = wait_record(&source, Some(&record(&[(0, 8)])));
    assert!(found.pages().0 <= PAGES / 4 && found.pages().0 > 100, "{found:?}");
    assert!(found.runs().iter().any(|run| run.first.0 <= 300 && 300 < run.first.0 + u64::from(run.count)));
    assert!(engine.detach().is_empty());
}

#[test]
fn a_fault_overtakes_a_prefetch_that_is_under_way() {
    let source = Source::full("overtakes");
    // As many reads as there are threads that read.
    source.image().keep_touched(&record(&[(512, 512)])).unwrap();
    let hanging = (512..PAGES).map(|page| source.block_of(page)).min().unwrap();
    let mut vm = source.make("overtakes", Kind { limit: 0, ..KIND });
    source.disk.set_reads(Reads::HangFrom(hanging));
    let engine = vm.serve(None);
    // Others are served; these are in the same files.
    let others: Vec<u64> = (0..512).filter(|page| source.block_of(*page) < hanging).step_by(31).collect();
    assert!(others.len() > 10, "{others:?}");
    others.iter().for_each(|page| vcpu::check(vm.guest, *page, source.memory[*page as usize]));
    let (guest, tag) = (vm.guest, source.memory[700]);
    let waiting = std::thread::spawn(move || vcpu::check(guest, 700, tag));
    engine.wait_for("it joins", |status| status.stats.get(Metric::FaultsJoined) > 0);
    assert!(!waiting.is_finished());
    // A daemon that ends now leaves nothing that the next one would not find.
    assert!(engine.detach().is_empty());
    let engine = vm.serve(None);
    source.disk.set_reads(Reads::Go);
    waiting.join().unwrap();
    check_all(vm.guest, &source.memory);
    assert!(engine.detach().is_empty());
    source.check();
}

#[test]
fn prefetch_stays_below_the_limit_and_pushes_nothing_out() {
    let source = Source::full("below");
    source.image().keep_touched(&record(&[(0, PAGES as u32)])).unwrap();
    let mut vm = source.make("below", Kind { limit: 600, ..KIND });
    let engine = vm.serve(None);
    let status = engine.wait_for("some is prefetched", |status| {
        status.stats.get(Metric::PagesPrefetched) > 0 && status.stats.get(Metric::InFlight) == 0
    });
    assert_eq!(status.stats.get(Metric::PagesPrefetched), 256, "a second chunk would leave less than a quarter");
    assert_eq!(status.stats.get(Metric::EvictedChunks), 0);
    vcpu::check(vm.guest, 900, source.memory[900]);
    let stats = engine.handle.fresh_status().stats;
    assert_eq!((stats.get(Metric::EvictedChunks), stats.get(Metric::Resident)), (0, 257));
    check_all(vm.guest, &source.memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn a_damaged_record_is_not_used_and_made_anew() {
    let source = Source::full("no-record");
    source.image().keep_touched(&record(&[(0, 8)])).unwrap();
    let path = source.file("touched");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[41] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut vm = source.make("no-record", KIND);
    let mut kill = vm.killer();
    let engine = vm.serve(None);
    vm.shared.mark_let_run();
    vcpu::check(vm.guest, 77, source.memory[77]);
    assert_eq!(engine.handle.fresh_status().stats.get(Metric::PagesPrefetched), 0);
    kill();
    assert_eq!(engine.next_notice(), Some(Notice::Exited));
    assert_eq!(wait_record(&source, None), record(&[(77, 1)]));
}

/// vCPUs run while pages are prefetched, the daemon is replaced, and blocks of the image are damaged.
#[test]
fn a_vm_has_its_pages_whatever_is_prefetched() {
    let source = Source::new("whatever", 7);
    let mut chance = Chance::new(8);
    for (name, kind) in KINDS {
        for seed in 0..3 {
            let mut runs: Vec<(u64, u32)> =
                (0..60).map(|_| (chance.below(PAGES - 8), chance.within(1, 9) as u32)).collect();
            runs.push((chance.below(PAGES / 2), 500));
            source.image().keep_touched(&record(&runs)).unwrap();
            let mut vm = source.make(&format!("whatever-{name}-{seed}"), Kind { prefetch: true, ..kind });
            let engine = vm.serve(None);
            let running = vm.run(&source.memory, seed, 1500);
            if seed == 1 {
                assert!(engine.detach().is_empty());
                let engine = vm.serve(None);
                check_all(vm.guest, &running.stop());
                assert!(engine.detach().is_empty());
            } else {
                let memory = running.stop();
                check_all(vm.guest, &memory);
                assert!(engine.detach().is_empty());
            }
        }
    }
    source.check();
}

/// A block that nobody needs may be damaged.
#[test]
fn a_prefetch_that_cannot_be_read_stops_nobody() {
    let source = Source::full("unread");
    source.image().keep_touched(&record(&[(0, 256), (300, 4)])).unwrap();
    let (path, offset) = (source.file("pages"), source.block_of(100));
    crate::reads::overwrite(&path, offset, &[0xaa; 8]);
    let mut vm = source.make("unread", KIND);
    let engine = vm.serve(None);
    engine.wait_for("the others came", |status| status.stats.get(Metric::PagesPrefetched) == 4);
    [5, 301, 700].iter().for_each(|page| vcpu::check(vm.guest, *page, source.memory[*page as usize]));
    assert_eq!(engine.handle.fresh_status().stalled, None);
    assert!(engine.detach().is_empty());
}
