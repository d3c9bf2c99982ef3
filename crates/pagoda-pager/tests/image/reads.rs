//! VMs that were made of an image, and read their pages there.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::chance::Chance;
use pagoda_core::stats::Metric;
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_image::{ENTRY_SIZE, Entry, Image, Stage, Store};
use pagoda_pager::handle::{Command, Notice};
use pagoda_pager::tier::image::{ImageTier, ImageTierError};

use crate::disk::{Reads, TestDisk, Verdict};
use crate::files::{ID, begin, begin_with, check_filled, prepare, store};
use crate::fills::{KINDS, full_memory};
use crate::vcpu::{self, Memory, check_all};
use crate::vm::{CHUNKS, Engine, Kind, PAGES, Vm};

const EIO: i32 = 5;

/// An image, and what it holds. Its files go with the VM that it was made of.
pub struct Source {
    vm: Vm,
    pub disk: TestDisk,
    store: Store,
    pub memory: Memory,
}

impl Source {
    /// Some pages are zero, some equal.
    pub fn new(name: &str, seed: u64) -> Source {
        Source::of(name, |vm| vm.run(&vec![0; PAGES as usize], seed, 3000).stop())
    }

    /// Every page holds something of its own.
    pub fn full(name: &str) -> Source {
        Source::of(name, full_memory)
    }

    fn of(name: &str, fill: impl FnOnce(&Vm) -> Memory) -> Source {
        let mut vm = Vm::new(&format!("source-{name}"), Kind::default());
        let disk = TestDisk::default();
        let store = store(&vm, &disk);
        let engine = vm.serve(None);
        let memory = fill(&vm);
        let ledger = begin(&engine, prepare(&engine, &store));
        assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
        check_filled(&store, &ledger, &memory);
        assert!(engine.detach().is_empty());
        Source { vm, disk, store, memory }
    }

    pub fn image(&self) -> Arc<Image> {
        Arc::new(self.store.image(ID).unwrap())
    }

    /// A VM of this image.
    pub fn make(&self, name: &str, kind: Kind) -> Vm {
        Vm::made_of(name, kind, Some(self.image()))
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.vm.dir.join(format!("images/{ID}/{name}"))
    }

    /// Where the page's block starts in `pages`.
    pub fn block_of(&self, page: u64) -> u64 {
        let map = std::fs::read(self.file("map")).unwrap();
        let bytes = &map[page as usize * ENTRY_SIZE..][..ENTRY_SIZE];
        match Entry::decode(u64::from_le_bytes(bytes.try_into().unwrap())) {
            Ok(Entry::Block { block, .. }) => block.offset().0,
            other => panic!("page {page}: {other:?}"),
        }
    }

    /// The image is as it was.
    pub fn check(&self) {
        assert!(self.store.verify(ID).is_clean());
    }
}

/// Changes some bytes of a file; what they were.
pub fn overwrite(path: &Path, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut before = vec![0; bytes.len()];
    file.read_exact_at(&mut before, offset).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    before
}

fn count(memory: &Memory) -> u64 {
    memory.iter().filter(|tag| **tag != 0).count() as u64
}

/// A vCPU that needs a page.
fn touch(vm: &Vm, page: u64, tag: u64) -> std::thread::JoinHandle<()> {
    let guest = vm.guest;
    std::thread::spawn(move || vcpu::check(guest, page, tag))
}

#[test]
fn a_vm_made_of_an_image_has_its_pages_over_restarts() {
    let source = Source::new("pages", 1);
    for (name, kind) in KINDS {
        let mut vm = source.make(&format!("reads-{name}"), kind);
        let mut engine = vm.serve(None);
        assert!(engine.pages_in("image") <= count(&source.memory));
        check_all(vm.guest, &source.memory);
        let mut memory = source.memory.clone();
        for seed in 0..4 {
            let running = vm.run(&memory, seed, 2000);
            // The daemon is replaced while vCPUs run; all they see of it is that a fault takes longer.
            let before = engine.pages_in("image");
            assert!(engine.detach().is_empty());
            engine = vm.serve(None);
            assert!(engine.pages_in("image") <= before, "{name}: a page came back to the image");
            memory = running.stop();
            check_all(vm.guest, &memory);
        }
        assert!(engine.detach().is_empty());
        source.check();
    }
}

#[test]
fn a_vm_that_may_have_all_its_pages_soon_needs_no_image() {
    let source = Source::new("all", 2);
    let mut vm = source.make("reads-all", Kind::default());
    let engine = vm.serve(None);
    engine.wait_for("all pages are there", |status| !status.armed && status.stats.get(Metric::Swapped) == 0);
    assert_eq!(engine.pages_in("image"), 0);
    // Nothing of the image is used any more.
    source.disk.set_reads(Reads::Fail(EIO));
    check_all(vm.guest, &source.memory);
    assert!(engine.detach().is_empty());
    let engine = vm.serve(None);
    check_all(vm.guest, &source.memory);
    assert!(engine.detach().is_empty());
}

#[test]
fn a_page_that_changed_does_not_come_back_from_the_image() {
    let source = Source::full("changed");
    let mut vm = source.make("reads-changed", Kind { limit: 400, ..Kind::default() });
    let engine = vm.serve(None);
    let memory: Memory = (0..PAGES).map(|page| 0x9000 + page).collect();
    (0..).zip(&memory).for_each(|(page, tag)| vcpu::write(vm.guest, page, *tag));
    engine.wait_swapped(PAGES - 400);
    let held = engine.pages_in("image");
    assert!(held <= 400, "{held} pages: those that went to swap are not the image's any more");
    assert!(engine.detach().is_empty());
    let engine = vm.serve(None);
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
    source.check();
}

#[test]
fn what_the_guest_gives_back_is_zero_for_the_next_daemon_too() {
    let source = Source::full("discard");
    let mut vm = source.make("reads-discard", Kind { limit: 400, ..Kind::default() });
    let engine = vm.serve(None);
    let mut memory = source.memory.clone();
    // Whole chunks and a part of one, some of it in DRAM.
    (0..300).for_each(|page| vcpu::check(vm.guest, page, memory[page as usize]));
    engine.discard(100, 600);
    memory[100..700].fill(0);
    engine.wait_for("they are gone", |status| status.stats.get(Metric::Swapped) <= PAGES - 600);
    assert!(engine.detach().is_empty());
    let engine = vm.serve(None);
    // What DRAM has may have no block any more.
    assert!((PAGES - 700..=PAGES - 600).contains(&engine.pages_in("image")));
    check_all(vm.guest, &memory);
    assert!(engine.detach().is_empty());
}

/// The VM stops at the page, and says which it is; all others are as they were. When the file is repaired, it goes on.
fn check_stall(source: &Source, mut vm: Vm, page: u64, expected: &str, repair: impl FnOnce()) {
    let engine = vm.serve(None);
    let waiting = touch(&vm, page, source.memory[page as usize]);
    let text = match engine.next_notice() {
        Some(Notice::Stalled(text)) => text,
        other => panic!("{other:?}"),
    };
    let place = format!("page {page} cannot be read from the snapshot vm/one ({ID}): ");
    assert!(text.starts_with(&place) && text.contains(expected), "{text}");
    for other in (0..PAGES).filter(|other| *other != page) {
        vcpu::check(vm.guest, other, source.memory[other as usize]);
    }
    let status = engine.handle.fresh_status();
    assert_eq!(status.stalled.as_ref(), Some(&text));
    assert!(!waiting.is_finished(), "a page that cannot be read was mapped");
    // It finds the same once more.
    engine.send(Command::Continue);
    assert_eq!(engine.next_notice(), Some(Notice::Stalled(text)));
    assert!(!waiting.is_finished());
    repair();
    go_on(&engine, waiting);
    check_all(vm.guest, &source.memory);
    check_only_stalls(engine);
    source.check();
}

/// The cause of a stall is gone, and the vCPU that waited goes on. What had begun before may still fail once.
fn go_on(engine: &Engine, waiting: std::thread::JoinHandle<()>) {
    engine.wait_for("the vCPU goes on", |status| {
        if status.stalled.is_some() {
            engine.send(Command::Continue);
        }
        waiting.is_finished()
    });
    waiting.join().unwrap();
}

fn check_only_stalls(engine: Engine) {
    let said = engine.detach();
    assert!(said.iter().all(|notice| matches!(notice, Notice::Stalled(_))), "{said:?}");
}

#[test]
fn a_damaged_block_stops_the_vm_and_no_wrong_byte_is_seen() {
    let source = Source::full("damaged");
    for (page, limit) in [(0, 400), (255, 400), (700, 600)] {
        let vm = source.make(&format!("reads-damaged-{page}"), Kind { limit, ..Kind::default() });
        let (pages, offset) = (source.file("pages"), source.block_of(page));
        let before = overwrite(&pages, offset + 4000, &[0xaa]);
        check_stall(&source, vm, page, "does not match its checksum", || {
            drop(overwrite(&pages, offset + 4000, &before))
        });
    }
}

#[test]
fn a_block_of_another_page_or_of_zeros_is_not_taken_for_the_page() {
    let source = Source::full("swapped");
    let (pages, offset) = (source.file("pages"), source.block_of(600));
    let other = source.block_of(601);
    let mut content = vec![0; PAGE_SIZE as usize];
    for is_zero in [true, false] {
        if !is_zero {
            OpenOptions::new().read(true).open(&pages).unwrap().read_exact_at(&mut content, other).unwrap();
        }
        let vm = source.make(&format!("reads-swapped-{is_zero}"), Kind { limit: 400, ..Kind::default() });
        let before = overwrite(&pages, offset, &content);
        check_stall(&source, vm, 600, "does not match its checksum", || drop(overwrite(&pages, offset, &before)));
    }
}

#[test]
fn an_entry_that_is_damaged_later_stops_the_vm() {
    let source = Source::full("entry");
    let map = source.file("map");
    for (bits, expected) in [(1_u64, "no block"), (0, "no block"), (u64::MAX, "does not know")] {
        let image = source.image();
        let mut vm = Vm::made_of(&format!("reads-entry-{bits}"), Kind { limit: 400, ..Kind::default() }, Some(image));
        // The tier is there before the damage.
        let engine = vm.serve(None);
        vcpu::check(vm.guest, 5, source.memory[5]);
        assert!(engine.detach().is_empty());
        let before = overwrite(&map, 600 * ENTRY_SIZE as u64, &bits.to_le_bytes());
        check_stall(&source, vm, 600, expected, || drop(overwrite(&map, 600 * ENTRY_SIZE as u64, &before)));
    }
}

#[test]
fn a_disk_that_fails_stops_the_vm_until_it_is_well_again() {
    let source = Source::full("fails");
    let mut vm = source.make("reads-fails", Kind { limit: 400, ..Kind::default() });
    let engine = vm.serve(None);
    source.disk.set_reads(Reads::Fail(EIO));
    // One of all pages is not in DRAM.
    let (guest, memory) = (vm.guest, source.memory.clone());
    let waiting = std::thread::spawn(move || check_all(guest, &memory));
    assert!(matches!(engine.next_notice(), Some(Notice::Stalled(text)) if text.contains("os error 5")));
    assert!(!waiting.is_finished());
    source.disk.set_reads(Reads::Go);
    go_on(&engine, waiting);
    check_all(vm.guest, &source.memory);
    check_only_stalls(engine);
}

#[test]
fn a_disk_that_does_not_answer_holds_up_those_who_need_it_and_not_the_end_of_the_vm() {
    // The first chunk is zero, and so not in the image.
    let source = Source::of("hangs", |vm| {
        (256..PAGES).for_each(|page| vcpu::write(vm.guest, page, page));
        (0..PAGES).map(|page| if page < 256 { 0 } else { page }).collect()
    });
    let mut vm = source.make("reads-hangs", Kind::default());
    let mut kill = vm.killer();
    // The map is read for the VM to be made.
    source.disk.set_reads(Reads::HangAfter(CHUNKS as usize));
    let engine = vm.serve(None);
    // In more jobs than there are threads that read. They end when nobody has their memory's faults any more.
    let guest = vm.guest;
    let need = move |page: u64| std::thread::spawn(move || guest.load(page, 0));
    let waiting: Vec<_> = (4..16).map(|part| need(part * 64)).collect();
    let status = engine.wait_for("that is said", |status| status.waits.is_some());
    let said = status.waits.clone().unwrap();
    assert!(said.contains("snapshot vm/one") && said.contains("does not answer"), "{said}");
    assert_eq!(status.stalled, None, "nothing is lost");
    // Other pages are served, and the engine answers.
    (0..256).for_each(|page| vcpu::check(vm.guest, page, 0));
    vcpu::write(vm.guest, 5, 0x9005);
    vcpu::write(vm.guest, 6, 0x9006);
    engine.discard(6, 1);
    vcpu::check(vm.guest, 6, 0);
    // The next daemon needs nothing of that disk to take the VM.
    let start = Instant::now();
    assert!(engine.detach().is_empty());
    let engine = vm.serve(None);
    vcpu::check(vm.guest, 5, 0x9005);
    vcpu::check(vm.guest, 6, 0);
    kill();
    assert_eq!(engine.next_notice(), Some(Notice::Exited));
    assert!(start.elapsed() < Duration::from_secs(5), "the end of the VM waited for the disk");
    assert!(waiting.iter().all(|vcpu| !vcpu.is_finished()));
    source.disk.set_reads(Reads::Go);
}

#[test]
fn an_image_of_a_vm_that_reads_one_holds_what_the_vm_held() {
    let source = Source::new("twice", 3);
    for (name, kind) in KINDS {
        let mut vm = source.make(&format!("reads-fills-{name}"), kind);
        let store = store(&vm, &TestDisk::default());
        let engine = vm.serve(None);
        let memory = vm.run(&source.memory, 5, 800).stop();
        let part = prepare(&engine, &store);
        let ledger = begin(&engine, part);
        let running = vm.run(&memory, 6, 1500);
        assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)), "{name}");
        check_all(vm.guest, &running.stop());
        check_filled(&store, &ledger, &memory);
        assert!(engine.detach().is_empty());
    }
    source.check();
}

#[test]
fn an_image_of_a_vm_whose_own_image_is_damaged_is_lost_and_the_vm_goes_on() {
    let source = Source::full("lost");
    let mut vm = source.make("reads-lost", Kind { limit: 400, ..Kind::default() });
    let store = store(&vm, &TestDisk::default());
    let engine = vm.serve(None);
    overwrite(&source.file("pages"), source.block_of(1000), &[0xaa]);
    let part = prepare(&engine, &store);
    begin(&engine, part);
    assert!(matches!(engine.next_notice(), Some(Notice::ImageLost(ID, _))));
    (0..700).for_each(|page| vcpu::check(vm.guest, page, source.memory[page as usize]));
    assert_eq!(engine.handle.fresh_status().stalled, None);
    assert!(engine.detach().is_empty());
}

#[test]
fn an_image_gets_what_it_lacks_from_another_when_its_vm_ends() {
    let source = Source::full("ends");
    for hangs in [false, true] {
        let mut vm = source.make(&format!("reads-ends-{hangs}"), Kind { limit: 400, ..Kind::default() });
        let disk = TestDisk::default();
        let store = store(&vm, &disk);
        let mut kill = vm.killer();
        let engine = vm.serve(None);
        let part = prepare(&engine, &store);
        let other = source.disk.clone();
        let ledger = begin_with(&engine, part, &disk, move |call| {
            if call == 3 {
                kill();
                other.set_reads(if hangs { Reads::HangAfter(0) } else { Reads::Go });
            }
            Verdict::Go
        });
        if hangs {
            assert!(engine.notice_within(Duration::from_millis(300)).is_none(), "it needs pages of the other image");
            source.disk.set_reads(Reads::Go);
        }
        assert_eq!(engine.next_notice(), Some(Notice::ImageFilled(ID)));
        assert_eq!(engine.next_notice(), Some(Notice::Exited));
        check_filled(&store, &ledger, &source.memory);
    }
}

/// Daemons are killed at some call of the disk of an image that is being filled, while the VM reads another.
#[test]
fn whoever_comes_after_a_killed_daemon_finds_every_page() {
    let source = Source::new("killed", 4);
    for (name, kind) in KINDS.into_iter().filter(|(_, kind)| !kind.shares) {
        for seed in 0..3 {
            let mut vm = source.make(&format!("reads-killed-{name}-{seed}"), kind);
            let disk = TestDisk::default();
            let store = store(&vm, &disk);
            let mut chance = Chance::new(seed);
            let mut engine = vm.serve(None);
            let memory = vm.run(&source.memory, seed, 300).stop();
            let part = prepare(&engine, &store);
            let mut ledger =
                begin_with(&engine, part, &disk, |call| if call == 2 { Verdict::Die } else { Verdict::Go });
            let running = vm.run(&memory, seed ^ 0xaa, 1500);
            let mut kills = 0;
            while engine.next_notice().is_none() {
                kills += 1;
                disk.heal();
                ledger = store.ledger(ID).unwrap();
                assert_eq!(ledger.manifest().unwrap().stage, Stage::Begun);
                if kills < 6 {
                    let last = 1 + chance.below(8) as usize;
                    disk.set_hook(move |call| if call == last { Verdict::GoAndDie } else { Verdict::Go });
                }
                engine = vm.serve(Some(ledger.clone()));
            }
            assert!(kills > 0, "{name}: nobody was killed");
            disk.heal();
            check_all(vm.guest, &running.stop());
            check_filled(&store, &ledger, &memory);
            assert!(engine.detach().is_empty());
        }
    }
    source.check();
}

#[test]
fn several_vms_read_one_image_at_a_time() {
    let source = Source::new("clones", 5);
    let image = source.image();
    let kind = Kind { limit: 400, ..Kind::default() };
    let mut vms: Vec<Vm> =
        (0..3).map(|clone| Vm::made_of(&format!("reads-clone-{clone}"), kind, Some(image.clone()))).collect();
    let engines: Vec<Engine> = vms.iter_mut().map(|vm| vm.serve(None)).collect();
    let running: Vec<_> = (0..).zip(&vms).map(|(seed, vm)| vm.run(&source.memory, seed, 4000)).collect();
    for (vm, running) in vms.iter().zip(running) {
        check_all(vm.guest, &running.stop());
    }
    for engine in engines {
        assert!(engine.detach().is_empty());
    }
    source.check();
}

#[test]
fn what_is_not_whole_or_not_the_vms_own_is_refused() {
    let source = Source::full("refused");
    let path = source.vm.dir.join("vm.image");
    // A map of bits of another image, of another length, and none.
    drop(ImageTier::create(source.image(), &path).unwrap());
    drop(ImageTier::open(source.image(), &path).unwrap());
    let is_map = |result: Result<ImageTier, ImageTierError>| matches!(result, Err(ImageTierError::Map { .. }));
    let before = overwrite(&path, 16, &[0]);
    assert!(is_map(ImageTier::open(source.image(), &path)), "it names another image");
    overwrite(&path, 16, &before);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 32]).unwrap();
    assert!(is_map(ImageTier::open(source.image(), &path)));
    std::fs::remove_file(&path).unwrap();
    assert!(is_map(ImageTier::open(source.image(), &path)));
    // A map of blocks with an entry that nobody writes, or that is missing.
    let map = source.file("map");
    let before = overwrite(&map, 1000 * ENTRY_SIZE as u64, &[0xff; 8]);
    let refused = ImageTier::create(source.image(), &path).unwrap_err();
    assert!(refused.to_string().contains("page 1000"), "{refused}");
    overwrite(&map, 1000 * ENTRY_SIZE as u64, &[0; 8]);
    let refused = ImageTier::create(source.image(), &path).unwrap_err();
    assert!(matches!(refused, ImageTierError::Missing { page: PageIdx(1000) }), "{refused}");
    assert!(!path.exists(), "nothing was made");
    overwrite(&map, 1000 * ENTRY_SIZE as u64, &before);
    drop(ImageTier::create(source.image(), &path).unwrap());
}
