//! The owner of images, on a directory of its own.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use pagoda_api::types::{Launch, SnapshotStage, VmSpec};
use pagoda_core::bits::Run;
use pagoda_core::fault::Pages;
use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkIdx, PAGE_SIZE, PageCount};
use pagoda_image::{Qemu, RoomLimits, Taken};

use super::admission::NewImage;
use super::*;

const PAGES: u64 = 2 * CHUNK_PAGES;
const BOOT_BEFORE: &str = "0f4dcb4a-2e0c-4b62-a50f-0b6a0a2f5c11";
/// The page of a filled image that is not zero.
const TAG: u8 = 7;

/// A directory of images that goes when the test ends.
pub struct Bench {
    pub dir: PathBuf,
    pub images: Images,
    pub parts: Arc<Parts>,
}

impl Bench {
    pub fn new(name: &str) -> Bench {
        let dir = std::env::temp_dir().join(format!("pagodad-images-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Bench::with_limits(dir, RoomLimits { max: None, keep_free_percent: 0 })
    }

    fn with_limits(dir: PathBuf, limits: RoomLimits) -> Bench {
        let parts = Arc::new(Parts::default());
        let config = SnapshotsConfig { dir: dir.join("images"), limits, chain_max: 3, prefetch: true };
        Bench { images: Images::new(config, Arc::clone(&parts)), dir, parts }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

pub fn manifest(id: u128, vm: &str, name: &str) -> Manifest {
    let boot_id = crate::boot::id().unwrap().to_owned();
    Manifest {
        id: ImageId(id),
        vm: vm.into(),
        name: name.into(),
        taken_unix_ms: 1_795_881_600_000 + id as u64,
        boot_id,
        stage: Stage::Begun,
        why: None,
        regions: vec![PAGES * PAGE_SIZE],
        spec: VmSpec { dram: Some(64 << 20), ..VmSpec::default() },
        launch: Launch {
            program: "/usr/bin/qemu-system-x86_64".into(),
            words: ["-m", "2M"].map(String::from).to_vec(),
            cwd: "/".into(),
            uid: 1000,
            gid: 100,
            unstartable: Vec::new(),
        },
        qemu: Qemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into(), cpu: None },
        state: pagoda_image::State { bytes: 0, xxh3: 0 },
        pause_us: None,
        running: true,
        disks: Vec::new(),
        parent: None,
        inherited_pages: None,
        automatic: false,
        imported: None,
    }
}

/// An image of this manifest, as far as this stage.
pub fn make(store: &Store, manifest: Manifest, stage: Stage) {
    let (part, prepared) = store.create_on(manifest.parent, manifest.id, PageCount(PAGES)).unwrap();
    let state = part.write_state(b"QEVM: the state of some device").unwrap();
    let ledger = part.begin(Manifest { state, ..manifest }).unwrap();
    let mut writer = prepared.commit().unwrap();
    if stage == Stage::Begun {
        return;
    }
    if stage == Stage::Lost {
        assert!(ledger.lose("disk full"));
        return;
    }
    let run = |start, len| Run { start, len };
    if ledger.parent().is_some() {
        assert_eq!(writer.inherit(Pages { chunk: ChunkIdx(1), run: run(0, 256) }), Taken::Yes);
    }
    for chunk in [0, 1].map(ChunkIdx) {
        let first = Pages { chunk, run: run(0, 1) };
        assert_eq!(writer.preserve(first, &[TAG; PAGE_SIZE as usize]), Taken::Yes);
        assert_eq!(writer.preserve_zeros(Pages { chunk, run: run(1, 255) }), Taken::Yes);
    }
    ledger.mark_filled().unwrap();
    ledger.note_pause(12_345).unwrap();
    if stage == Stage::Durable {
        ledger.make_durable().unwrap();
    }
}

/// One of each kind.
fn make_all(bench: &Bench) {
    let store = bench.images.store().unwrap();
    make(store, manifest(1, "web1", "filled"), Stage::Filled);
    make(store, manifest(2, "db", "durable"), Stage::Durable);
    make(store, manifest(3, "web1", "begun"), Stage::Begun);
    make(store, manifest(4, "web1", "lost"), Stage::Lost);
    let of_before = |id, name| Manifest { boot_id: BOOT_BEFORE.into(), ..manifest(id, "web1", name) };
    make(store, of_before(5, "restarted"), Stage::Filled);
    make(store, of_before(6, "kept"), Stage::Durable);
    make(store, manifest(7, "web1", "torn"), Stage::Durable);
    std::fs::write(image_dir(bench, 7).join("manifest"), "torn").unwrap();
    make(store, manifest(8, "web1", "short"), Stage::Durable);
    std::fs::write(image_dir(bench, 8).join("map"), "").unwrap();
}

fn image_dir(bench: &Bench, id: u128) -> PathBuf {
    bench.dir.join("images").join(ImageId(id).to_string())
}

fn named(text: &str) -> SnapshotName {
    text.parse().unwrap()
}

fn code(error: ApiError) -> ErrorCode {
    error.code
}

#[test]
fn what_there_is_is_listed_with_what_it_is_worth() {
    let bench = Bench::new("list");
    assert_eq!(bench.images.list().unwrap(), SnapshotList::default());
    make_all(&bench);
    let list = bench.images.list().unwrap();
    let stages: Vec<_> = list.snapshots.iter().map(|of| (of.full_name().to_string(), of.stage)).collect();
    let expected = [
        ("db/durable", SnapshotStage::Durable),
        ("web1/filled", SnapshotStage::Filled),
        ("web1/begun", SnapshotStage::Begun),
        ("web1/lost", SnapshotStage::Lost),
        ("web1/restarted", SnapshotStage::Lost),
        ("web1/kept", SnapshotStage::Durable),
        ("web1/short", SnapshotStage::Durable),
    ];
    assert_eq!(stages, expected.map(|(name, stage)| (name.to_owned(), stage)));
    assert_eq!(list.unreadable.len(), 1);
    assert!(list.unreadable[0].damage.starts_with("manifest") && list.unreadable[0].own_bytes > 0);

    let counted = bench.images.counted().unwrap();
    let counts = [counted.begun, counted.filled, counted.durable, counted.lost, counted.damaged];
    assert_eq!(counts, [1, 1, 2, 2, 2]);
    let all: u64 = list.snapshots.iter().map(|of| of.own_bytes).sum();
    assert_eq!(counted.own_bytes, all + list.unreadable[0].own_bytes);

    let one = bench.images.get(&named("web1/filled")).unwrap();
    assert_eq!((one.memory_bytes, one.pause_us, one.uid, one.gid), (PAGES * PAGE_SIZE, Some(12_345), 1000, 100));
    assert_eq!((one.id.as_str(), one.qemu.version.as_str()), ("00000000000000000000000000000001", "10.0.2"));
    let why = |name: &str| bench.images.get(&named(name)).unwrap().why.unwrap();
    assert_eq!(why("web1/lost"), "disk full");
    assert!(why("web1/restarted").contains("host was restarted"));
    assert!(bench.images.get(&named("web1/short")).unwrap().damage.unwrap().starts_with("map"));
    for name in ["web1/durable", "db/filled", "web1/torn"] {
        assert_eq!(code(bench.images.get(&named(name)).unwrap_err()), ErrorCode::NoSuchSnapshot, "{name}");
    }
}

#[test]
fn only_what_is_whole_is_restored() {
    let bench = Bench::new("usable");
    make_all(&bench);
    let launch = bench.images.launch(&named("web1/kept")).unwrap();
    assert_eq!((launch.memory, launch.spec.dram), (vec![PAGES * PAGE_SIZE], Some(64 << 20)));
    assert_eq!((launch.launch.words.len(), launch.qemu.machine.as_str()), (2, "pc-q35-10.0"));
    let refused = |name: &str, expected: &str| {
        let error = bench.images.launch(&named(name)).unwrap_err();
        assert!(error.message.contains(expected), "{name}: {}", error.message);
        assert_eq!(error.code, ErrorCode::Refused);
    };
    refused("web1/begun", "not filled yet");
    refused("web1/lost", "disk full");
    refused("web1/restarted", "host was restarted");
    refused("web1/short", "it is damaged: map");
    let mut stuck = manifest(9, "web1", "stuck");
    stuck.launch.unstartable = vec!["-netdev fd=9".into()];
    make(bench.images.store().unwrap(), stuck, Stage::Filled);
    refused("web1/stuck", "-netdev fd=9");
}

#[test]
fn whoever_needs_an_image_is_asked_before_it_is_removed() {
    let bench = Bench::new("remove");
    make_all(&bench);
    let which = |name: &str| Which::Named(named(name));
    let error = bench.images.remove(&which("web1/begun"), |image| {
        assert_eq!(image.id, ImageId(3));
        Err(ApiError::new(ErrorCode::WrongState, "its VM needs it", None))
    });
    assert_eq!(code(error.unwrap_err()), ErrorCode::WrongState);
    assert!(image_dir(&bench, 3).is_dir());

    let before = bench.images.counted().unwrap();
    let mut asked = 0;
    let before_remove = |_: &Listed| {
        asked += 1;
        Ok(())
    };
    bench.images.remove(&which("web1/begun"), before_remove).unwrap();
    assert_eq!((asked, image_dir(&bench, 3).exists()), (1, false));
    let after = bench.images.counted().unwrap();
    assert!(after.begun == 0 && after.own_bytes < before.own_bytes);
    // What cannot be read has only its id.
    let unreadable = |image: &Listed| {
        assert!(image.manifest.is_none());
        Ok(())
    };
    bench.images.remove(&Which::Id(ImageId(7)), unreadable).unwrap();
    assert_eq!(bench.images.list().unwrap().unreadable, []);
    for which in [which("web1/begun"), Which::Id(ImageId(7))] {
        let error = bench.images.remove(&which, |_| panic!("there is nothing to let go of")).unwrap_err();
        assert_eq!(error.code, ErrorCode::NoSuchSnapshot);
    }
}

#[test]
fn what_a_vm_reads_is_kept_and_said() {
    let bench = Bench::new("readers");
    make_all(&bench);
    let images = &bench.images;
    for (name, expected) in [("web1/begun", "not filled yet"), ("web1/lost", "disk full"), ("web1/short", "damaged")] {
        let error = images.hold(&named(name), "web9").unwrap_err();
        assert!(error.code == ErrorCode::Refused && error.message.contains(expected), "{}", error.message);
        assert_eq!(images.get(&named(name)).unwrap().readers, [""; 0], "it was refused");
    }
    let (image, first) = images.hold(&named("web1/filled"), "web1").unwrap();
    let (_, second) = images.hold(&named("web1/filled"), "web2").unwrap();
    assert_eq!(image.manifest().id, ImageId(1));
    assert_eq!(images.get(&named("web1/filled")).unwrap().readers, ["web1", "web2"]);
    let of_list = images.list().unwrap().snapshots.into_iter().map(|of| of.readers.len());
    assert_eq!(of_list.sum::<usize>(), 2);
    for which in [Which::Named(named("web1/filled")), Which::Id(ImageId(1))] {
        let error = images.remove(&which, |_| panic!("nobody is asked to let go")).unwrap_err();
        assert_eq!(error.code, ErrorCode::Refused);
        let expected = "web1/filled is not removed: web1, web2 read their memory from it";
        assert_eq!(error.message, expected);
    }
    assert!(images.lose(ImageId(1), "x").unwrap_err().message.contains("kept for who reads it: web1, web2"));
    drop((first, second));
    // Nobody begins to read it while it is being removed.
    let before_remove = |_: &Listed| {
        let error = images.hold(&named("web1/filled"), "web3").unwrap_err();
        assert!(error.message.contains("being removed"), "{}", error.message);
        Ok(())
    };
    // Whatever cannot be read may refer to it.
    let error = images.remove(&Which::Named(named("web1/filled")), |_| Ok(())).unwrap_err();
    assert!(error.message.contains("other snapshots may need it"), "{}", error.message);
    images.remove(&Which::Id(ImageId(7)), |_| Ok(())).unwrap();
    images.remove(&Which::Named(named("web1/filled")), before_remove).unwrap();
    assert_eq!(code(images.hold(&named("web1/filled"), "web3").unwrap_err()), ErrorCode::NoSuchSnapshot);
}

#[test]
fn while_a_record_is_unknown_only_what_nobody_can_read_is_removed() {
    let bench = Bench::new("unknown");
    make_all(&bench);
    bench.images.readers().set_unknown(vec!["/v/web1.vm".into()]);
    let remove = |id: u128| bench.images.remove(&Which::Id(ImageId(id)), |_| Ok(()));
    // Filled, durable, durable before the host was restarted, and one of which nobody can tell.
    for id in [1, 2, 6, 7] {
        let error = remove(id).unwrap_err();
        assert!(error.message.contains("the record /v/web1.vm of a VM cannot be read"), "{id}: {}", error.message);
        assert!(image_dir(&bench, id).is_dir());
    }
    // What cannot be read may refer to others, too: here somebody has put it away.
    std::fs::remove_dir_all(image_dir(&bench, 7)).unwrap();
    // Not filled, lost, and lost with the host's life before.
    for id in [3, 4, 5] {
        remove(id).unwrap();
    }
}

#[test]
fn what_a_disk_did_not_take_is_tried_again() {
    let bench = Bench::new("again");
    let store = bench.images.store().unwrap();
    // It has all pages, and nobody could say so.
    make(store, manifest(1, "web1", "one"), Stage::Filled);
    make(store, manifest(2, "web1", "two"), Stage::Begun);
    let begun = store.ledger(ImageId(2)).unwrap().manifest().unwrap();
    let state = store.ledger(ImageId(1)).unwrap().manifest().unwrap().state;
    let text = Manifest { id: ImageId(1), name: "one".into(), state, ..begun }.to_text().unwrap();
    std::fs::write(image_dir(&bench, 1).join("manifest"), text).unwrap();
    for id in [1, 2, 9] {
        bench.images.mark_filled_later(ImageId(id));
    }
    bench.images.lose_unfilled(ImageId(1), "its VM ended");
    // One was set aside, and another is being made.
    let gone = bench.dir.join("images").join(format!("{}.gone", ImageId(5)));
    std::fs::create_dir(&gone).unwrap();
    drop(store.create(ImageId(6), PageCount(PAGES)).unwrap());

    let heard = Mutex::new(Vec::new());
    bench.images.try_again(&bench.images.listing().unwrap(), &|id| lock(&heard).push(id));
    assert_eq!(*lock(&heard), [ImageId(1)]);
    let stage = |name: &str| bench.images.get(&named(name)).unwrap().stage;
    assert_eq!((stage("web1/one"), stage("web1/two")), (SnapshotStage::Durable, SnapshotStage::Begun));
    assert!(!gone.exists() && bench.dir.join("images").join(format!("{}.part", ImageId(6))).exists());
    assert!(!bench.images.finishing.is_to_be_marked(ImageId(1)) && !bench.images.finishing.is_to_be_marked(ImageId(9)));
    assert!(bench.images.finishing.is_to_be_marked(ImageId(2)), "it lacks pages, whatever was said");
}

#[test]
fn snapshots_refer_to_one_another_until_one_is_removed() {
    let bench = Bench::new("chain");
    let (images, store) = (&bench.images, bench.images.ready().unwrap());
    let on = |id, name: &str, parent| Manifest { parent: Some(ImageId(parent)), ..manifest(id, "web1", name) };
    make(store, manifest(1, "web1", "one"), Stage::Filled);
    make(store, on(2, "two", 1), Stage::Filled);
    make(store, on(3, "three", 2), Stage::Filled);
    let of = |name: &str| images.get(&named(name)).unwrap();
    let three = of("web1/three");
    assert_eq!((three.parent, three.shared_bytes), (Some(ImageId(2).to_string()), CHUNK_PAGES * PAGE_SIZE));
    assert_eq!((of("web1/one").parent, of("web1/one").shared_bytes), (None, 0));
    assert_eq!(verified(images, "web1/three").damaged, 0);

    // A chain has an end, is of one VM, and of what is whole.
    let can_be = |id, vm: &str| images.hold_parent(ImageId(id), vm).is_some();
    assert_eq!([can_be(2, "web1"), can_be(3, "web1"), can_be(2, "db"), can_be(9, "web1")], [true, false, false, false]);
    make(store, on(4, "four", 2), Stage::Begun);
    assert!(!can_be(4, "web1"), "it is not filled");

    // Nothing that is needed is removed.
    let remove = |name: &str| images.remove(&Which::Named(named(name)), |_| Ok(()));
    let held = images.hold_parent(ImageId(2), "web1").unwrap();
    assert_eq!(code(remove("web1/two").unwrap_err()), ErrorCode::WrongState);
    drop(held);
    let error = remove("web1/two").unwrap_err();
    assert!(error.code == ErrorCode::Refused && error.message.contains(&ImageId(4).to_string()), "{}", error.message);
    remove("web1/four").unwrap();

    // What refers to it is made durable, what that refers to before it, and is independent then.
    remove("web1/two").unwrap();
    let three = of("web1/three");
    assert_eq!((three.stage, three.parent), (SnapshotStage::Durable, Some(ImageId(1).to_string())));
    assert_eq!(of("web1/one").stage, SnapshotStage::Durable);
    assert_eq!(verified(images, "web1/three").damaged, 0);
    remove("web1/one").unwrap();
    assert_eq!((of("web1/three").parent, of("web1/three").shared_bytes), (None, 0));
    let report = verified(images, "web1/three");
    assert_eq!((report.good_pages, report.zero_pages, report.damaged), (2, PAGES - 2, 0));
    images.launch(&named("web1/three")).unwrap();
}

#[test]
fn a_snapshot_is_worth_what_those_are_that_it_refers_to() {
    let bench = Bench::new("chain-lost");
    let store = bench.images.ready().unwrap();
    let of_before = |id, name| Manifest { boot_id: BOOT_BEFORE.into(), ..manifest(id, "web1", name) };
    make(store, of_before(1, "one"), Stage::Filled);
    make(store, Manifest { parent: Some(ImageId(1)), ..manifest(2, "web1", "two") }, Stage::Filled);
    let error = bench.images.launch(&named("web1/two")).unwrap_err();
    assert!(error.message.contains("the snapshot one that it refers to") && error.message.contains("restarted"));
    assert!(bench.images.hold_parent(ImageId(2), "web1").is_none());
    assert!(store.lose(ImageId(1), "gone"));
    let error = bench.images.launch(&named("web1/two")).unwrap_err();
    assert!(error.message.contains("it is damaged"), "{}", error.message);
}

/// As a client does it.
fn verified(images: &Images, name: &str) -> pagoda_api::VerifyReport {
    loop {
        let report = images.verify(&named(name)).unwrap();
        if report.is_done {
            return report;
        }
        assert!(report.checked_bytes <= report.memory_bytes);
    }
}

#[test]
fn a_verification_reads_all_and_names_what_is_damaged() {
    let bench = Bench::new("verify");
    make_all(&bench);
    let clean = verified(&bench.images, "web1/filled");
    assert_eq!((clean.good_pages, clean.zero_pages, clean.damaged), (2, PAGES - 2, 0));
    assert_eq!((clean.checked_bytes, clean.memory_bytes), (PAGES * PAGE_SIZE, PAGES * PAGE_SIZE));

    // The next one begins anew.
    let pages = image_dir(&bench, 1).join("pages");
    let mut content = std::fs::read(&pages).unwrap();
    content[4096 + 5] ^= 1;
    std::fs::write(&pages, content).unwrap();
    let damaged = verified(&bench.images, "web1/filled");
    assert_eq!((damaged.good_pages, damaged.damaged, damaged.damages.len()), (1, 1, 1));
    let damage = &damaged.damages[0];
    assert_eq!((damage.file.as_str(), damage.page, damage.offset_bytes), ("pages", Some(CHUNK_PAGES), 4096));

    for (name, expected) in
        [("web1/begun", "not filled yet"), ("web1/lost", "disk full"), ("web1/restarted", "restarted")]
    {
        let error = bench.images.verify(&named(name)).unwrap_err();
        assert!(error.code == ErrorCode::Refused && error.message.contains(expected), "{name}: {}", error.message);
    }
    assert_eq!(code(bench.images.verify(&named("a/b")).unwrap_err()), ErrorCode::NoSuchSnapshot);
}

#[test]
fn what_daemons_before_left_is_removed_once_and_before_anything_is_made() {
    let bench = Bench::new("clean");
    let store = bench.images.store().unwrap();
    make(store, manifest(1, "web1", "one"), Stage::Filled);
    drop(store.create(ImageId(2), PageCount(PAGES)).unwrap());
    bench.images.ready().unwrap();
    let names = || std::fs::read_dir(bench.dir.join("images")).unwrap().count();
    assert_eq!(names(), 1, "an image stays");
    // What is being made now is not left over.
    let _part = bench.images.ready().unwrap().create(ImageId(3), PageCount(PAGES)).unwrap();
    bench.images.ready().unwrap();
    assert_eq!(names(), 2);
}

#[test]
fn a_directory_that_cannot_be_used_is_said_and_tried_again() {
    let bench = Bench::new("unusable");
    std::fs::create_dir_all(bench.dir.join("images")).unwrap();
    let allow = |mode| {
        std::fs::set_permissions(bench.dir.join("images"), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    allow(0o777);
    let error = bench.images.list().unwrap_err();
    assert_eq!(error.code, ErrorCode::Unsupported);
    assert!(error.message.contains("others may write it") && error.hint.unwrap().contains("[snapshots]"));
    let problems = bench.parts.problems();
    assert!(problems.len() == 1 && problems[0].starts_with("snapshots: the directory "), "{problems:?}");
    assert_eq!(bench.images.counted(), None);
    allow(0o700);
    assert_eq!(bench.images.list().unwrap(), SnapshotList::default());
    assert_eq!(bench.parts.problems(), [""; 0]);
}

#[test]
fn images_that_are_still_filled_have_their_room() {
    let dir = std::env::temp_dir().join(format!("pagodad-images-{}-room", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    // For one image with all that may come, and not for two.
    let limits = RoomLimits { max: Some(Bytes::from_mib(400)), keep_free_percent: 0 };
    let bench = Bench::with_limits(dir, limits);
    let (one, two) = (named("web1/one"), named("db/two"));
    let new = |id, name| NewImage { id: ImageId(id), name, pages: PageCount(PAGES), filled: PageCount(PAGES) };
    let admit = |id, name| bench.images.admit(&new(id, name));

    let first = admit(1, &one).unwrap();
    let error = admit(2, &two).unwrap_err();
    assert_eq!(error.code, ErrorCode::NoRoom);
    assert!(error.message.contains("of the 400 MiB"), "{}", error.message);
    drop(first);
    admit(2, &two).unwrap().begun();
    assert!(admit(1, &one).is_ok(), "one that began and is gone needs nothing");

    let admitted = admit(1, &one).unwrap();
    make(bench.images.ready().unwrap(), manifest(1, "web1", "one"), Stage::Begun);
    admitted.begun();
    assert_eq!(code(admit(2, &two).unwrap_err()), ErrorCode::NoRoom);
    assert_eq!(code(admit(3, &one).unwrap_err()), ErrorCode::Refused, "its name is taken");
    assert!(bench.images.store().unwrap().lose(ImageId(1), "disk full"));
    assert!(admit(2, &two).is_ok(), "it grows no more");
}
