//! The directory of images: what is in it, who may use it, what it takes.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use pagoda_core::chance::Chance;
use pagoda_core::units::{Bytes, PageCount};
use pagoda_image::limits::{LISTED_MAX, MANIFEST_MAX, SNAPSHOTS_PER_VM_MAX, WHY_MAX};
use pagoda_image::{ImageId, Listed, Listing, Manifest, Stage, State, Store, Taken, Writer};

use crate::disk::temp_dir;
use crate::vm::{BOOT, ID, NEXT_BOOT, PAGES, STATE, begin, check_pages, manifest, new_memory, preserve, run};

#[test]
fn files_are_for_their_owner_alone() {
    let dir = temp_dir("modes");
    let store = Store::open(&dir.join("images")).unwrap();
    drop(begin(&store).unwrap());
    let mode = |name: &str| std::fs::metadata(dir.join("images").join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode(""), mode(&ID.to_string())], [0o700, 0o700]);
    for name in ["manifest", "state", "map", "pages"] {
        assert_eq!(mode(&format!("{ID}/{name}")), 0o600, "{name}");
    }
    for wrong in [0o720, 0o702, 0o777] {
        std::fs::set_permissions(dir.join("images"), std::fs::Permissions::from_mode(wrong)).unwrap();
        assert!(Store::open(&dir.join("images")).unwrap_err().to_string().contains("others may write it"));
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn what_is_whole_and_what_is_left_over_is_told_apart() {
    let dir = temp_dir("listing");
    let store = Store::open(&dir).unwrap();
    drop(begin(&store).unwrap());
    let (part, gone) = (format!("{:032x}.part", 1), format!("{:032x}.gone", 2));
    drop(store.create(ImageId(1), PageCount(512)).unwrap());
    std::fs::create_dir(dir.join(&gone)).unwrap();
    std::fs::write(dir.join(&gone).join("pages"), "x").unwrap();
    for other in ["notes.txt", "xyz.part", "0.gone"] {
        std::fs::write(dir.join(other), "").unwrap();
    }
    symlink("/etc", dir.join(format!("{:032x}", 3))).unwrap();
    let mut listing = store.list().unwrap();
    listing.unknown.sort();
    listing.leftovers.sort();
    assert_eq!(listing.unknown, ["0.gone", "notes.txt", "xyz.part"]);
    assert_eq!(listing.leftovers, [&*part, &*gone]);
    let [linked, image] = &listing.images[..] else { panic!("{listing:?}") };
    assert!(linked.manifest.is_none() && linked.damage.is_some(), "a link is followed by nobody");
    assert_eq!((image.id, &image.damage), (ID, &None));
    assert!(store.create(ID, PageCount(512)).is_ok(), "names are random: an image and a part may meet");
    // What is being made is not touched while the daemon runs.
    assert_eq!(store.clean_gone(&store.list().unwrap()).unwrap(), 1);
    assert!(!dir.join(&gone).exists() && dir.join(&part).exists());
    assert_eq!(store.clean_gone(&listing).unwrap(), 1, "somebody else has removed it by now");
    assert_eq!(store.clean().unwrap(), 2);
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 5);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn what_somebody_put_into_a_leftover_stays_and_is_named() {
    let dir = temp_dir("strange");
    let store = Store::open(&dir).unwrap();
    drop(begin(&store).unwrap());
    std::fs::write(dir.join(ID.to_string()).join("notes"), "mine").unwrap();
    let error = store.remove(ID).unwrap_err().to_string();
    assert!(error.contains(&format!("{ID}.gone")), "{error}");
    assert!(store.list().unwrap().images.is_empty());
    assert_eq!(std::fs::read(dir.join(format!("{ID}.gone/notes"))).unwrap(), b"mine");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_directory_full_of_names_is_not_read_to_its_end() {
    let dir = temp_dir("many");
    let store = Store::open(&dir).unwrap();
    (0..LISTED_MAX + 10).for_each(|number| std::fs::write(dir.join(format!("x{number}")), "").unwrap());
    let listing = store.list().unwrap();
    assert!(listing.has_more && listing.unknown.len() == LISTED_MAX);
    assert!(listing.check_new("web1", "two").is_err());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_limits_of_images_hold() {
    let state = State { bytes: 4, xxh3: 0 };
    let listed = |number: u128, vm: &str, name: String| Listed {
        id: ImageId(number),
        manifest: Some(Manifest { vm: vm.into(), name, ..manifest(state) }),
        damage: None,
        own: Bytes(10),
    };
    let mut listing = Listing::default();
    assert_eq!(listing.check_new("web1", "one"), Ok(()));
    listing.images = (0..SNAPSHOTS_PER_VM_MAX as u128).map(|n| listed(n, "web1", format!("s{n}"))).collect();
    assert!(listing.check_new("web1", "s3").unwrap_err().contains("of the name s3"));
    assert!(listing.check_new("web1", "one").unwrap_err().contains("which is the most"));
    assert_eq!(listing.check_new("web2", "s3"), Ok(()));
    assert_eq!(listing.own(), Bytes(160));
    listing.images.extend((100..340).map(|n| listed(n, "db", format!("s{n}"))));
    assert!(listing.check_new("web2", "one").unwrap_err().contains("256 at most"));

    let dir = temp_dir("limits");
    let store = Store::open(&dir).unwrap();
    for pages in [1, 257, (1 << 28) + 256, u64::MAX / 4096] {
        assert!(store.create(ID, PageCount(pages)).is_err(), "{pages}");
    }
    let (part, prepared) = store.create(ID, PageCount(512)).unwrap();
    assert!(part.write_state(b"no state").is_err());
    let state = part.write_state(STATE).unwrap();
    let of_another = Manifest { regions: vec![4 << 20], ..manifest(state) };
    assert!(part.begin(of_another).unwrap_err().to_string().contains("1024 pages"));
    assert!(prepared.commit().is_err(), "there is no manifest");
    store.remove(ID).unwrap();
    // What leaves no room for a reason is refused at the beginning.
    let (part, _prepared) = store.create(ID, PageCount(512)).unwrap();
    let mut long = manifest(part.write_state(STATE).unwrap());
    long.launch.words = vec!["x".repeat(MANIFEST_MAX - (3 << 10))];
    assert!(long.to_text().is_ok());
    assert!(part.begin(long).is_err());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_verification_goes_on_as_long_as_somebody_wants_it() {
    let dir = temp_dir("verify-while");
    let store = Store::open(&dir).unwrap();
    let mut writer = begin(&store).unwrap();
    assert_eq!(preserve(&mut writer, &vec![7; PAGES as usize], 0, 256), Taken::Yes);
    let mut asked = Vec::new();
    let report = store.verify_while(ID, &mut |chunk| {
        asked.push(chunk.0);
        true
    });
    assert_eq!((report, asked), (Some(store.verify(ID)), vec![0, 1]));
    assert_eq!(store.verify_while(ID, &mut |chunk| chunk.0 == 0), None);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn own_bytes_are_those_on_the_disk() {
    let dir = temp_dir("space");
    let store = Store::open(&dir).unwrap();
    let mut writer = begin(&store).unwrap();
    let before = store.own_bytes(ID).unwrap();
    let memory = vec![7; PAGES as usize];
    assert_eq!(preserve(&mut writer, &memory, 0, 256), Taken::Yes);
    let after = store.own_bytes(ID).unwrap();
    assert!(after.0 - before.0 >= 256 * 4096, "{before} {after}");
    let image = dir.join(ID.to_string());
    let mut blocks = std::fs::metadata(&image).unwrap().blocks();
    blocks += ["manifest", "state", "map", "pages"]
        .map(|name| image.join(name).metadata().unwrap().blocks())
        .iter()
        .sum::<u64>();
    assert_eq!(after.0, blocks * 512);
    assert_eq!(store.list().unwrap().own(), after);
    let room = store.room(after).unwrap();
    assert!(room.free <= room.total && room.total.0 > 0 && room.taken == after);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn pages_that_an_image_has_stay_what_they_are_in_it() {
    let dir = temp_dir("twice");
    let store = Store::open(&dir).unwrap();
    let mut chance = Chance::new(3);
    let mut memory = new_memory(&mut chance);
    let expected = memory.clone();
    let mut writer = begin(&store).unwrap();
    run(&mut writer, &mut memory, &mut chance, &mut |_, _| ());
    let before = std::fs::metadata(dir.join(format!("{ID}/pages"))).unwrap().len();
    assert_eq!(
        before / 4096,
        expected.iter().filter(|tag| **tag != 0).count() as u64,
        "a block for each page that is not zero"
    );
    for chunk in [0, 256] {
        assert_eq!(preserve(&mut writer, &vec![9; PAGES as usize], chunk, 256), Taken::Yes);
        assert_eq!(preserve(&mut writer, &vec![0; PAGES as usize], chunk, 256), Taken::Yes);
    }
    check_pages(&store, &expected, None);
    assert_eq!(std::fs::metadata(dir.join(format!("{ID}/pages"))).unwrap().len(), before);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn stages_come_in_their_order() {
    let dir = temp_dir("stages");
    let store = Store::open(&dir).unwrap();
    let mut chance = Chance::new(4);
    let mut memory = new_memory(&mut chance);
    let mut writer = begin(&store).unwrap();
    let ledger = writer.ledger().clone();
    assert!(ledger.mark_filled().unwrap_err().to_string().starts_with("map, page 0, offset 0: the page is missing"));
    assert!(ledger.make_durable().is_err());
    run(&mut writer, &mut memory, &mut chance, &mut |_, _| ());
    ledger.note_pause(77).unwrap();
    ledger.mark_filled().unwrap();
    assert!(ledger.mark_filled().is_err());
    assert!(Writer::resume(store.ledger(ID).unwrap(), BOOT).is_err(), "it is filled");
    ledger.make_durable().unwrap();
    assert!(ledger.lose("late"), "nobody can lose it any more");
    let read = store.image(ID).unwrap().manifest().clone();
    assert_eq!((read.stage, read.pause_us, read.why), (Stage::Durable, Some(77), None));
    store.remove(ID).unwrap();

    let mut writer = begin(&store).unwrap();
    assert!(Writer::resume(store.ledger(ID).unwrap(), NEXT_BOOT).is_err(), "its VM is gone");
    writer.lose(&"ä".repeat(WHY_MAX));
    assert!(writer.lost().unwrap().is_noted);
    let listing = store.list().unwrap();
    let lost = listing.images[0].manifest.as_ref().unwrap();
    assert_eq!((lost.stage, lost.why.as_ref().unwrap().len()), (Stage::Lost, WHY_MAX));
    assert!(store.image(ID).unwrap_err().to_string().starts_with("the image is lost: ä"));
    assert!(writer.ledger().mark_filled().is_err());
    std::fs::remove_dir_all(&dir).unwrap();
}
