//! Images that refer to one another: random chains against a naive reference, each image removed anywhere, killed and crashed
//! at every step, and chains that are none.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use pagoda_core::bits::Run;
use pagoda_core::chance::Chance;
use pagoda_core::fault::Pages;
use pagoda_core::units::{CHUNK_PAGES, CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageCount, PageIdx};
use pagoda_image::limits::CHAIN_MAX;
use pagoda_image::{
    ChunkContent, Content, Diff, Image, ImageError, ImageId, Ledger, Manifest, Stage, Store, Taken, Writer,
};

use crate::disk::{Failure, Op, Recorder, after_daemon, after_host, temp_dir};
use crate::vm::{BOOT, Memory, NEXT_BOOT, STATE, content_of, manifest};

const CHUNKS: u32 = 4;
const PAGES: u64 = CHUNKS as u64 * CHUNK_PAGES;
const PAGE: usize = PAGE_SIZE as usize;

/// A VM that runs, what its images have to hold, and what of it is known to be the newest image's.
struct Vm {
    memory: Memory,
    same: Vec<bool>,
    newest: Option<ImageId>,
    images: BTreeMap<ImageId, Memory>,
}

impl Vm {
    fn new(chance: &mut Chance) -> Vm {
        let memory = (0..PAGES).map(|_| if chance.per_mille(700) { 0 } else { chance.draw() as u32 }).collect();
        Vm { memory, same: vec![false; PAGES as usize], newest: None, images: BTreeMap::new() }
    }

    fn write(&mut self, page: u64, chance: &mut Chance) {
        self.memory[page as usize] = if chance.per_mille(200) { 0 } else { chance.draw() as u32 };
        self.same[page as usize] = false;
    }

    /// The guest writes here and there, or a stretch.
    fn run(&mut self, chance: &mut Chance) {
        let first = chance.below(PAGES);
        let len = *[0, 1, 5, 300].get(chance.below(4) as usize).unwrap();
        (first..(first + len).min(PAGES)).for_each(|page| self.write(page, chance));
        (0..chance.below(20)).for_each(|_| self.write(chance.below(PAGES), chance));
    }

    fn begin(&self, store: &Store, id: ImageId, parent: Option<ImageId>) -> Result<Writer, ImageError> {
        let (part, prepared) = store.create_on(parent, id, PageCount(PAGES))?;
        let state = part.write_state(STATE)?;
        let regions = vec![PAGES * PAGE_SIZE];
        part.begin(Manifest { id, parent, regions, name: format!("n{}", id.0), ..manifest(state) })?;
        prepared.commit()
    }

    /// Takes an image, to which the guest writes while it is filled.
    fn take(&mut self, store: &Store, id: ImageId, parent: Option<ImageId>, chance: &mut Chance) -> Arc<Ledger> {
        assert!(parent.is_none() || parent == self.newest);
        let mut writer = self.begin(store, id, parent).unwrap();
        let inherited = if parent.is_some() { self.same.clone() } else { vec![false; PAGES as usize] };
        self.images.insert(id, self.memory.clone());
        (self.same, self.newest) = (vec![true; PAGES as usize], Some(id));
        while writer.missing() > 0 {
            let first = PageIdx(chance.below(PAGES));
            let whole = chance.per_mille(300);
            let (start, len) = if whole { (0, 256) } else { (first.index_in_chunk(), chance.within(1, 9)) };
            let first = first.chunk().page(start).0;
            let len = len.min(256 - u64::from(start));
            take_over(&mut writer, &self.memory, &inherited, first, len);
            if chance.per_mille(300) {
                let page = first + chance.below(len);
                self.write(page, chance);
            }
        }
        let ledger = writer.ledger().clone();
        ledger.mark_filled().unwrap();
        ledger
    }
}

/// What is known to be the parent's is inherited, the rest is copied.
fn take_over(writer: &mut Writer, memory: &Memory, inherited: &[bool], first: u64, len: u64) {
    let mut at = first;
    while at < first + len {
        let is_inherited = inherited[at as usize];
        let end = (at..first + len).find(|page| inherited[*page as usize] != is_inherited).unwrap_or(first + len);
        let pages = Pages {
            chunk: PageIdx(at).chunk(),
            run: Run { start: PageIdx(at).index_in_chunk(), len: (end - at) as u16 },
        };
        let content = || (at..end).flat_map(|page| content_of(memory[page as usize])).collect::<Vec<u8>>();
        let taken = if is_inherited { writer.inherit(pages) } else { writer.preserve(pages, &content()) };
        assert_eq!(taken, Taken::Yes, "{:?}", writer.lost());
        at = end;
    }
}

/// Every page by itself and by chunks, against what the image has to hold.
fn check(image: &Image, expected: &Memory) {
    let mut chunk_content = vec![0; CHUNK_SIZE as usize];
    let mut content = [0; PAGE];
    for chunk in (0..CHUNKS).map(ChunkIdx) {
        let ChunkContent { missing, zero } = image.read_chunk(chunk, &mut chunk_content).expect("a chunk");
        assert!(missing.is_empty());
        for index in 0..=u8::MAX {
            let page = chunk.page(index);
            let tag = expected[page.0 as usize];
            let found = image.read_page(page, &mut content).expect("a page");
            assert_eq!(content, content_of(tag), "page {page} of {}", image.manifest().id);
            assert_eq!(content, chunk_content[usize::from(index) * PAGE..][..PAGE], "page {page}");
            assert_eq!(found == Content::Zero, tag == 0);
            assert_eq!(zero.contains(index), tag == 0);
        }
    }
}

/// Each two images, by their maps.
fn check_diffs(store: &Store, images: &BTreeMap<ImageId, Memory>) {
    let newest: Vec<_> = images.iter().rev().take(2).collect();
    for ((a, first), (b, second)) in newest.iter().flat_map(|of| newest.iter().map(move |with| (*of, *with))) {
        let diff = Diff::between(&store.image(*a).unwrap(), &store.image(*b).unwrap()).unwrap();
        let count = |wanted: fn(u32, u32) -> bool| {
            first.iter().zip(second).filter(|(one, other)| one != other && wanted(**one, **other)).count() as u64
        };
        assert_eq!(diff.filled, count(|one, _| one == 0), "{a} {b}");
        assert_eq!(diff.cleared, count(|_, other| other == 0), "{a} {b}");
        assert_eq!((diff.differing(), diff.pages), (count(|_, _| true), PAGES), "{a} {b}");
    }
}

fn check_all(store: &Store, images: &BTreeMap<ImageId, Memory>) {
    for (id, expected) in images {
        check(&store.image(*id).unwrap_or_else(|error| panic!("{id}: {error}")), expected);
    }
    for listed in store.list().unwrap().images {
        assert_eq!(listed.damage, None);
        assert!(images.contains_key(&listed.id));
    }
}

/// As a daemon removes an image that others refer to.
fn remove(store: &Store, id: ImageId) {
    try_remove(store, id).unwrap();
}

fn try_remove(store: &Store, id: ImageId) -> Result<(), ImageError> {
    for child in store.children(id)? {
        store.detach(child)?;
    }
    store.remove(id)
}

#[test]
fn random_chains_hold_what_they_have_to_whatever_is_removed() {
    let dir = temp_dir("chains");
    for seed in 0..20 {
        let (mut chance, path) = (Chance::new(seed), dir.join(seed.to_string()));
        let store = Store::open(&path).unwrap();
        let mut vm = Vm::new(&mut chance);
        // Readers that opened an image a while ago, and have looked at some of it.
        let mut readers: Vec<(Image, Memory)> = Vec::new();
        for step in 0..14_u32 {
            match chance.below(3) {
                0 if !vm.images.is_empty() => {
                    let nth = chance.below(vm.images.len() as u64) as usize;
                    let id = *vm.images.keys().nth(nth).unwrap();
                    remove(&store, id);
                    vm.images.remove(&id);
                    vm.newest = vm.newest.filter(|newest| *newest != id);
                }
                _ => {
                    vm.run(&mut chance);
                    let parent = vm.newest.filter(|_| chance.per_mille(850));
                    let id = ImageId(u128::from(step) + 1);
                    vm.take(&store, id, parent, &mut chance).make_durable().unwrap();
                    let reader = store.image(id).unwrap();
                    let mut content = [0; PAGE];
                    (0..3).for_each(|_| {
                        reader.read_page(PageIdx(chance.below(PAGES)), &mut content).map(drop).unwrap();
                    });
                    readers.push((reader, vm.images[&id].clone()));
                }
            }
            check_all(&store, &vm.images);
            check_diffs(&store, &vm.images);
        }
        readers.iter().for_each(|(reader, expected)| check(reader, expected));
        vm.images.keys().for_each(|id| assert!(store.verify(*id).is_clean()));
        // From any end, nothing is left over.
        while let Some((id, _)) = vm.images.pop_first() {
            remove(&store, id);
            check_all(&store, &vm.images);
        }
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Three images, one of which is removed; all that was done, and where the removal begins.
fn record(dir: &Path, seed: u64, removed: u128) -> (Vec<Op>, usize, BTreeMap<ImageId, Memory>) {
    let (recorder, store, images) = record_three(dir, seed);
    let begins = recorder.ops().len();
    remove(&store, ImageId(removed));
    (recorder.ops(), begins, images)
}

/// Three images on a disk that keeps what is done to it.
fn record_three(dir: &Path, seed: u64) -> (Recorder, Store, BTreeMap<ImageId, Memory>) {
    let root = dir.join("recorded");
    let _ = std::fs::remove_dir_all(&root);
    drop(Store::open(&root).unwrap());
    let recorder = Recorder::new(&root);
    let store = Store::on(Arc::new(recorder.clone()), &root).unwrap();
    let mut chance = Chance::new(seed);
    let mut vm = Vm::new(&mut chance);
    vm.memory = (0..PAGES).map(|page| if page % 29 == 0 { page as u32 + 1 } else { 0 }).collect();
    for id in 1..=3 {
        (0..4).for_each(|_| vm.write(chance.below(PAGES), &mut chance));
        let parent = vm.newest;
        vm.take(&store, ImageId(id), parent, &mut chance).make_durable().unwrap();
    }
    (recorder, store, vm.images)
}

/// The last of these calls writes an entry or a mark.
fn is_word(ops: &[Op]) -> bool {
    matches!(ops.last(), Some(Op::Write { bytes, .. }) if bytes.len() <= 8)
}

/// Behind which calls something is stopped: all of them, and of the many that write one entry some.
fn steps(ops: &[Op], begins: usize) -> impl Iterator<Item = usize> {
    (begins..=ops.len()).filter(|len| !is_word(&ops[..*len]) || len % 16 == 0)
}

/// The images that are there are whole, and the removal can be done again.
fn check_left(path: &Path, images: &BTreeMap<ImageId, Memory>, removed: ImageId, is_removed: bool) {
    let store = Store::open(path).unwrap();
    let left: Vec<ImageId> = store.list().unwrap().images.iter().map(|listed| listed.id).collect();
    let is_there = left.contains(&removed);
    assert!(!is_removed || !is_there);
    let mut images = images.clone();
    if !is_there {
        images.remove(&removed);
    }
    check_all(&store, &images);
    store.clean().unwrap();
    remove(&store, removed);
    images.remove(&removed);
    check_all(&store, &images);
    images.keys().for_each(|id| assert!(store.verify(*id).is_clean()));
}

#[test]
fn a_daemon_that_is_killed_while_an_image_is_removed_leaves_the_others_whole() {
    let dir = temp_dir("chain-killed");
    for (seed, removed) in [(1, 2), (2, 1), (3, 3)] {
        let (ops, begins, images) = record(&dir, seed, removed);
        let gone = format!("{}.gone", ImageId(removed));
        for len in steps(&ops, begins) {
            let is_removed = ops[..len].iter().any(|op| matches!(op, Op::Rename { to, .. } if *to == gone));
            // An entry and a mark are written whole: their bytes are in one word of memory.
            let cuts = if is_word(&ops[..len]) { &[None][..] } else { &[None, Some(5)] };
            for cut in cuts {
                let left = dir.join("left");
                let _ = std::fs::remove_dir_all(&left);
                after_daemon(&ops[..len], *cut, &left);
                check_left(&left, &images, ImageId(removed), is_removed);
            }
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_host_that_stops_while_an_image_is_removed_leaves_the_others_whole() {
    let dir = temp_dir("chain-crash");
    for (seed, removed) in [(4, 2), (5, 1)] {
        let (ops, begins, images) = record(&dir, seed, removed);
        let mut chance = Chance::new(seed);
        for len in steps(&ops, begins) {
            for _ in 0..2 {
                let left = dir.join("left");
                let _ = std::fs::remove_dir_all(&left);
                after_host(&ops[..len], &mut chance, &left);
                check_left(&left, &images, ImageId(removed), false);
            }
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_host_that_stops_behind_a_removal_that_failed_and_was_done_again_leaves_the_others_whole() {
    let dir = temp_dir("chain-again");
    for (seed, removed) in [(6, 2), (7, 1), (8, 2)] {
        let mut chance = Chance::new(seed);
        let (recorder, store, _) = record_three(&dir, seed);
        let before = recorder.calls();
        remove(&store, ImageId(removed));
        let calls = recorder.calls() - before;
        for _ in 0..60 {
            let (recorder, store, mut images) = record_three(&dir, seed);
            assert_eq!(recorder.calls(), before);
            let at = before + chance.below(calls as u64) as usize;
            let failure = Failure { at, calls: 1, errno: 5, part: false };
            let recorder = recorder.with_failure(failure);
            // As a daemon does, or the next one.
            let _ = try_remove(&store, ImageId(removed));
            let _ = store.clean();
            remove(&store, ImageId(removed));
            images.remove(&ImageId(removed));
            for _ in 0..4 {
                let left = dir.join("left");
                let _ = std::fs::remove_dir_all(&left);
                after_host(&recorder.ops(), &mut chance, &left);
                let store = Store::open(&left).unwrap();
                check_all(&store, &images);
                images.keys().for_each(|id| assert!(store.verify(*id).is_clean(), "failed at call {at}"));
            }
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn an_image_that_is_being_filled_goes_on_with_its_parent() {
    let dir = temp_dir("chain-resumed");
    let store = Store::open(&dir).unwrap();
    let mut chance = Chance::new(3);
    let mut vm = Vm::new(&mut chance);
    vm.take(&store, ImageId(1), None, &mut chance);
    vm.memory = vm.images[&ImageId(1)].clone();
    vm.same.fill(true);
    (280..300).chain([800]).for_each(|page| vm.write(page, &mut chance));
    let inherited = vm.same.clone();
    let mut writer = vm.begin(&store, ImageId(2), Some(ImageId(1))).unwrap();
    let is_whole = |chunk: u64| (chunk * 256..(chunk + 1) * 256).all(|page| inherited[page as usize]);
    assert!((0..4).any(is_whole) && !(0..4).all(is_whole), "some chunks are wholly the parent's");
    for chunk in [0, 2] {
        take_over(&mut writer, &vm.memory, &inherited, chunk * 256, 256);
    }
    drop(writer);
    // The next daemon knows what it has, and copies the rest.
    let ledger = store.ledger(ImageId(2)).unwrap();
    assert_eq!(ledger.mark_filled().unwrap_err().to_string(), "map, page 256, offset 2048: the page is missing");
    let mut writer = Writer::resume(ledger.clone(), BOOT).unwrap();
    assert_eq!(writer.missing(), 512);
    assert!(Writer::resume(store.ledger(ImageId(2)).unwrap(), NEXT_BOOT).is_err());
    take_over(&mut writer, &vm.memory, &[false; PAGES as usize], 256, 256);
    take_over(&mut writer, &vm.memory, &[false; PAGES as usize], 768, 256);
    ledger.mark_filled().unwrap();
    vm.images.insert(ImageId(2), vm.memory.clone());
    check_all(&store, &vm.images);
    // What it refers to is not removed, and has to be durable first.
    assert!(ledger.make_durable().unwrap_err().to_string().contains("durable first"));
    assert!(store.remove(ImageId(1)).unwrap_err().to_string().contains("refers to it"));
    assert!(store.detach(ImageId(2)).unwrap_err().to_string().contains("durable"));
    store.ledger(ImageId(1)).unwrap().make_durable().unwrap();
    ledger.make_durable().unwrap();
    remove(&store, ImageId(1));
    vm.images.remove(&ImageId(1));
    check_all(&store, &vm.images);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A chain of three, durable.
fn three(name: &str) -> (std::path::PathBuf, Store, Vm) {
    let dir = temp_dir(name);
    let store = Store::open(&dir).unwrap();
    let mut chance = Chance::new(9);
    let mut vm = Vm::new(&mut chance);
    for id in 1..=3 {
        let parent = vm.newest;
        vm.take(&store, ImageId(id), parent, &mut chance).make_durable().unwrap();
        (0..30).for_each(|_| vm.write(chance.below(PAGES), &mut chance));
    }
    (dir, store, vm)
}

fn rewrite(dir: &Path, store: &Store, id: u128, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = store.ledger(ImageId(id)).unwrap().manifest().unwrap();
    change(&mut manifest);
    std::fs::write(dir.join(ImageId(id).to_string()).join("manifest"), manifest.to_text().unwrap()).unwrap();
}

#[test]
fn a_chain_whose_first_image_cannot_be_read_is_removed_from_its_end() {
    let (dir, store, _) = three("chain-unreadable");
    std::fs::write(dir.join(ImageId(1).to_string()).join("manifest"), "{}").unwrap();
    // The second one has pages there, which it cannot take over.
    let why = try_remove(&store, ImageId(1)).unwrap_err().to_string();
    assert!(why.contains("its parent"), "{why}");
    // It is no child of those that refer to it. The third one takes over what the second one has itself.
    remove(&store, ImageId(2));
    assert!(try_remove(&store, ImageId(1)).is_err());
    [3, 1].into_iter().for_each(|id| remove(&store, ImageId(id)));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn chains_that_are_none_are_refused_and_named() {
    let check = |name: &str, spoil: &dyn Fn(&Path, &Store), expected: &str| {
        let (dir, store, vm) = three(name);
        spoil(&dir, &store);
        let error = store.image(ImageId(3)).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!store.verify(ImageId(3)).is_clean());
        let listed = store.list().unwrap().images;
        assert!(listed.iter().any(|image| image.id == ImageId(3) && image.damage.is_some()));
        drop(vm);
        std::fs::remove_dir_all(&dir).unwrap();
    };
    let is_none = |dir: &Path, _: &Store| std::fs::remove_dir_all(dir.join(ImageId(1).to_string())).unwrap();
    check("missing", &is_none, &format!("its parent {}: directory of", ImageId(1)));
    check("cycle", &|dir, store| rewrite(dir, store, 2, |of| of.parent = Some(ImageId(3))), "refers to itself");
    check("other", &|dir, store| rewrite(dir, store, 1, |of| of.vm = "other".into()), "another VM");
    let lost = |of: &mut Manifest| (of.stage, of.why) = (Stage::Lost, Some("gone".into()));
    check("lost", &|dir, store| rewrite(dir, store, 1, lost), "the image is lost: gone");
    check("begun", &|dir, store| rewrite(dir, store, 2, |of| of.stage = Stage::Begun), "it is begun");
    let no_marks = |dir: &Path, _: &Store| {
        std::fs::remove_file(dir.join(ImageId(3).to_string()).join("inherited")).unwrap();
    };
    check("marks", &no_marks, "inherited, offset 0");
    let cut = |dir: &Path, _: &Store| {
        let path = dir.join(ImageId(2).to_string()).join("inherited");
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(8).unwrap();
    };
    check("cut marks", &cut, "the file has 8 bytes, and 16 are expected");
}

#[test]
fn a_chain_has_an_end() {
    let dir = temp_dir("chain-long");
    let store = Store::open(&dir).unwrap();
    let mut chance = Chance::new(1);
    let mut vm = Vm::new(&mut chance);
    for id in 1..=CHAIN_MAX as u128 + 1 {
        let parent = vm.newest;
        vm.take(&store, ImageId(id), parent, &mut chance);
    }
    assert_eq!(store.image(ImageId(CHAIN_MAX as u128)).unwrap().parents().count(), CHAIN_MAX - 1);
    let error = store.image(ImageId(CHAIN_MAX as u128 + 1)).unwrap_err().to_string();
    assert!(error.contains("more than 32 images"), "{error}");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn an_entry_or_a_mark_of_another_image_or_place_is_refused() {
    let (dir, store, vm) = three("chain-seals");
    let file = |id: u128, name: &str| dir.join(ImageId(id).to_string()).join(name);
    let bytes = |id: u128, name: &str| std::fs::read(file(id, name)).unwrap();
    // Whatever changes in the map or the marks is refused, or the page is what it was.
    for name in ["map", "inherited"] {
        let (right, other) = (bytes(3, name), bytes(2, name));
        let unit = if name == "map" { 8 } else { 4 };
        for at in (0..right.len()).step_by(unit) {
            let shifted =
                right[(at + unit) % right.len()..].iter().chain(&right).take(unit).copied().collect::<Vec<u8>>();
            for wrong in [&other[at..at + unit], &shifted, &[3, 0, 0, 0, 0, 0, 0, 0][..unit], &[0xff; 8][..unit]] {
                let mut changed = right.clone();
                changed[at..at + unit].copy_from_slice(wrong);
                if changed == right {
                    continue;
                }
                std::fs::write(file(3, name), &changed).unwrap();
                let page = if name == "map" { at as u64 / 8 } else { at as u64 / 4 * 256 };
                let mut content = [0; PAGE];
                let read = store.image(ImageId(3)).unwrap().read_page(PageIdx(page), &mut content);
                match read {
                    // Zeros have no checksum, as in every image; and a hole is no page.
                    Ok(Content::Zero | Content::Missing) => {}
                    Ok(Content::Block) => {
                        assert_eq!(content, content_of(vm.images[&ImageId(3)][page as usize]), "{name} {at}");
                    }
                    Err(error) => assert!(error.to_string().contains("page"), "{error}"),
                }
            }
        }
        std::fs::write(file(3, name), &right).unwrap();
    }
    check_all(&store, &vm.images);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn what_a_parent_lacks_by_damage_is_named_with_it_and_keeps_it_from_being_removed() {
    let (dir, store, vm) = three("chain-damage");
    let pages = dir.join(ImageId(1).to_string()).join("pages");
    let mut bytes = std::fs::read(&pages).unwrap();
    bytes.iter_mut().for_each(|byte| *byte ^= 1);
    std::fs::write(&pages, bytes).unwrap();
    let report = store.verify(ImageId(3));
    assert!(report.damaged > 0 && report.damages[0].what.contains(&format!("of its parent {}", ImageId(1))));
    let error = store.detach(ImageId(2)).unwrap_err().to_string();
    assert!(error.contains("checksum"), "{error}");
    assert!(store.remove(ImageId(1)).is_err());
    assert!(store.children(ImageId(1)).unwrap() == [ImageId(2)]);
    // One whose manifest cannot be read may refer to any other.
    std::fs::write(dir.join(ImageId(3).to_string()).join("manifest"), "x").unwrap();
    let error = store.remove(ImageId(2)).unwrap_err().to_string();
    assert!(error.contains(&ImageId(3).to_string()), "{error}");
    store.remove(ImageId(3)).unwrap();
    store.remove(ImageId(2)).unwrap();
    store.remove(ImageId(1)).unwrap();
    drop(vm);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_chunk_that_is_the_parents_takes_next_to_no_room() {
    let (dir, store, mut vm) = three("chain-room");
    let mut chance = Chance::new(7);
    vm.take(&store, ImageId(4), vm.newest, &mut chance);
    let before = store.own_bytes(ImageId(4)).unwrap();
    vm.newest = Some(ImageId(4));
    vm.same.fill(true);
    let copy = vm.images[&ImageId(4)].clone();
    vm.memory = copy.clone();
    let inherited = vec![true; PAGES as usize];
    let mut writer = vm.begin(&store, ImageId(5), vm.newest).unwrap();
    take_over(&mut writer, &vm.memory, &inherited, 0, 256);
    (1..4).for_each(|chunk| take_over(&mut writer, &vm.memory, &inherited, chunk * 256, 256));
    let ledger = writer.ledger().clone();
    ledger.mark_filled().unwrap();
    assert_eq!(ledger.manifest().unwrap().inherited_pages, Some(PAGES));
    assert_eq!(std::fs::metadata(dir.join(ImageId(5).to_string()).join("pages")).unwrap().len(), 0);
    assert!(store.own_bytes(ImageId(5)).unwrap() < before);
    check(&store.image(ImageId(5)).unwrap(), &copy);
    // One without a parent has none of it.
    let mut writer = vm.begin(&store, ImageId(6), None).unwrap();
    let pages = Pages { chunk: ChunkIdx(0), run: Run { start: 0, len: 256 } };
    assert_eq!(writer.inherit(pages), Taken::No);
    assert!(writer.lost().is_some_and(|loss| loss.is_noted));
    std::fs::remove_dir_all(&dir).unwrap();
}
