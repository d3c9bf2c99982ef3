//! Files that are cut, changed, oversized or somebody else's.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagoda_core::chance::Chance;
use pagoda_core::units::{Bytes, CHUNK_SIZE, ChunkIdx, PageIdx};
use pagoda_image::{Damage, ImageError, ImageFile, Manifest, Stage, Store, Writer};

use crate::disk::{Failure, Recorder, temp_dir};
use crate::vm::{BOOT, CHUNKS, ID, Memory, PAGES, begin, check_pages, content_of, new_memory, run};

/// A filled image, and what it has.
fn filled(name: &str) -> (PathBuf, Store, Memory) {
    let dir = temp_dir(name);
    let store = Store::open(&dir).unwrap();
    let mut chance = Chance::new(9);
    let mut memory = new_memory(&mut chance);
    let expected = memory.clone();
    let mut writer = begin(&store).unwrap();
    run(&mut writer, &mut memory, &mut chance, &mut |_, _| ());
    writer.ledger().mark_filled().unwrap();
    (dir, store, expected)
}

fn path(dir: &Path, file: ImageFile) -> PathBuf {
    dir.join(ID.to_string()).join(file.name())
}

fn open(dir: &Path, file: ImageFile) -> File {
    OpenOptions::new().read(true).write(true).open(path(dir, file)).unwrap()
}

fn damage(error: ImageError) -> Damage {
    match error {
        ImageError::Damaged(damage) => damage,
        other => panic!("no damage: {other}"),
    }
}

#[test]
fn cut_and_oversized_files_are_refused_by_name() {
    let (dir, store, expected) = filled("cut");
    for file in [ImageFile::Manifest, ImageFile::State, ImageFile::Map] {
        let opened = open(&dir, file);
        let whole = std::fs::read(path(&dir, file)).unwrap();
        let len = whole.len() as u64;
        for wrong in [0, 1, len / 2, len - 2, len + 8, 1 << 40] {
            opened.set_len(wrong).unwrap();
            let found = damage(store.image(ID).unwrap_err());
            assert_eq!(found.file, file, "{wrong}: {found}");
            assert_eq!(store.list().unwrap().images[0].damage.as_ref(), Some(&found));
            assert_eq!(store.verify(ID).damages, [found]);
            let resumed = store.ledger(ID).and_then(|ledger| Writer::resume(ledger, BOOT).map(drop));
            assert!(resumed.is_err());
        }
        opened.set_len(0).unwrap();
        opened.write_all_at(&whole, 0).unwrap();
    }
    check_pages(&store, &expected, None);
    let pages = open(&dir, ImageFile::Pages);
    let len = pages.metadata().unwrap().len();
    pages.set_len((1 << 40) + 1).unwrap();
    let found = damage(store.image(ID).unwrap_err());
    assert_eq!((found.file, found.offset), (ImageFile::Pages, Bytes(1 << 40)));
    // The last block is cut: a page of it, in the map.
    pages.set_len(len - 1).unwrap();
    let report = store.verify(ID);
    assert_eq!((report.damaged, report.damages[0].file, report.damages[0].page.is_some()), (1, ImageFile::Map, true));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn files_that_others_may_have_made_are_refused() {
    let (dir, store, expected) = filled("others");
    for file in ImageFile::ALL.into_iter().filter(|file| *file != ImageFile::Inherited) {
        let (here, aside) = (path(&dir, file), dir.join("aside"));
        let check = |what: &str| {
            assert!(store.image(ID).is_err(), "{file}: {what}");
            assert!(store.ledger(ID).is_err(), "{file}: {what}");
        };
        std::fs::rename(&here, &aside).unwrap();
        check("it is not there");
        symlink(&aside, &here).unwrap();
        check("a link");
        std::fs::remove_file(&here).unwrap();
        std::fs::create_dir(&here).unwrap();
        check("a directory");
        std::fs::remove_dir(&here).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &here, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        check("a pipe, which nobody waits for");
        std::fs::remove_file(&here).unwrap();
        std::fs::hard_link(&aside, &here).unwrap();
        check("a second name");
        std::fs::remove_file(&here).unwrap();
        std::fs::rename(&aside, &here).unwrap();
        for mode in [0o620, 0o602] {
            std::fs::set_permissions(&here, std::fs::Permissions::from_mode(mode)).unwrap();
            check("others may write it");
        }
        std::fs::set_permissions(&here, std::fs::Permissions::from_mode(0o600)).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&here, Some(12345), None).unwrap();
            check("another user's");
            std::os::unix::fs::chown(&here, Some(0), None).unwrap();
        }
    }
    check_pages(&store, &expected, None);
    std::fs::rename(dir.join(ID.to_string()), dir.join(format!("{:032x}", 5))).unwrap();
    let renamed = store.image(pagoda_image::ImageId(5)).unwrap_err().to_string();
    assert!(renamed.contains("it is of image"), "{renamed}");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn every_changed_byte_of_the_map_is_found_at_its_page() {
    let (dir, store, _) = filled("flips");
    let map = open(&dir, ImageFile::Map);
    let mut chance = Chance::new(11);
    for offset in 0..PAGES * 8 {
        let mut byte = [0];
        map.read_exact_at(&mut byte, offset).unwrap();
        map.write_all_at(&[byte[0] ^ 1 << chance.below(8)], offset).unwrap();
        let page = PageIdx(offset / 8);
        let mut content = [0; 4096];
        let image = store.image(ID).unwrap();
        // Two flips are no damage but another image: a zero page that is said to be missing, or the other way round.
        match image.read_page(page, &mut content) {
            Err(error) => assert_eq!(damage(error).page, Some(page), "offset {offset}"),
            Ok(found) => {
                assert_eq!(found, pagoda_image::Content::Missing, "offset {offset}");
                assert_eq!(store.verify(ID).missing, 1);
            }
        }
        map.write_all_at(&byte, offset).unwrap();
    }
    assert!(store.verify(ID).is_clean());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn changed_and_exchanged_blocks_are_found_at_their_pages() {
    let (dir, store, expected) = filled("blocks");
    let (map, pages) = (open(&dir, ImageFile::Map), open(&dir, ImageFile::Pages));
    let entry = |page: u64| {
        let mut entry = [0; 8];
        map.read_exact_at(&mut entry, page * 8).unwrap();
        u64::from_le_bytes(entry)
    };
    let blocks: Vec<u64> = (0..PAGES).filter(|page| expected[*page as usize] != 0).collect();
    let mut chance = Chance::new(12);
    for page in &blocks {
        let block = (entry(*page) as u32 >> 4) as u64;
        let offset = block * 4096 + chance.below(4096);
        let mut byte = [0];
        pages.read_exact_at(&mut byte, offset).unwrap();
        pages.write_all_at(&[byte[0] ^ 1 << chance.below(8)], offset).unwrap();
        let report = store.verify(ID);
        let what = "the content does not match its checksum";
        let expected = Damage::of_page(ImageFile::Pages, PageIdx(*page), Bytes(block * 4096), what);
        assert_eq!((report.damaged, report.damages), (1, vec![expected]));
        pages.write_all_at(&byte, offset).unwrap();
    }
    // Two entries change places: both are right, and neither is at its page.
    let (a, b) = (blocks[0], blocks[1]);
    let (first, second) = (entry(a), entry(b));
    map.write_all_at(&second.to_le_bytes(), a * 8).unwrap();
    map.write_all_at(&first.to_le_bytes(), b * 8).unwrap();
    let found: Vec<_> = store.verify(ID).damages.into_iter().filter_map(|damage| damage.page).collect();
    assert_eq!(found, [PageIdx(a), PageIdx(b)]);
    map.write_all_at(&first.to_le_bytes(), a * 8).unwrap();
    map.write_all_at(&second.to_le_bytes(), b * 8).unwrap();
    // All of a file is wrong: the first places are named, the others counted.
    let len = pages.metadata().unwrap().len();
    pages.set_len(0).unwrap();
    pages.set_len(len).unwrap();
    let report = store.verify(ID);
    assert_eq!((report.damaged, report.damages.len()), (blocks.len() as u64, pagoda_image::limits::DAMAGES_MAX));
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Maps of any content: a page that is handed out is right, or zeros that the map claims.
#[test]
fn any_map_is_read_right_or_refused() {
    let (dir, store, expected) = filled("fuzz");
    let map = open(&dir, ImageFile::Map);
    let whole = std::fs::read(path(&dir, ImageFile::Map)).unwrap();
    let mut chance = Chance::new(13);
    let mut content = vec![0; CHUNK_SIZE as usize];
    for round in 0..2000 {
        let mut bytes = whole.clone();
        for _ in 0..chance.within(1, 20) {
            let (to, from) = (chance.below(PAGES) as usize * 8, chance.below(PAGES) as usize * 8);
            let word = match chance.below(4) {
                0 => chance.draw(),
                1 => chance.draw() & !15 | chance.below(5),
                2 => chance.below(20),
                _ => u64::from_le_bytes(whole[from..from + 8].try_into().unwrap()),
            };
            bytes[to..to + 8].copy_from_slice(&word.to_le_bytes());
        }
        map.write_all_at(&bytes, 0).unwrap();
        let image = store.image(ID).unwrap();
        for chunk in (0..CHUNKS).map(ChunkIdx) {
            let Ok(found) = image.read_chunk(chunk, &mut content) else { continue };
            for index in (0..=u8::MAX).filter(|index| !found.zero.contains(*index) && !found.missing.contains(*index)) {
                let page = chunk.page(index);
                let read = &content[usize::from(index) * 4096..][..4096];
                assert!(read == content_of(expected[page.0 as usize]), "round {round}, page {page}");
            }
        }
        let report = store.verify(ID);
        assert_eq!(report.blocks + report.zeros + report.missing + report.damaged, PAGES, "round {round}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Sizes are compared with the files before anything is made of them.
#[test]
fn sizes_that_lie_are_refused() {
    let (dir, store, _) = filled("lies");
    let made = store.image(ID).unwrap().manifest().clone();
    let write =
        |manifest: Manifest| std::fs::write(path(&dir, ImageFile::Manifest), manifest.to_text().unwrap()).unwrap();
    write(Manifest { regions: vec![1 << 40], ..made.clone() });
    assert_eq!(damage(store.image(ID).unwrap_err()).file, ImageFile::Map);
    let mut long = made.clone();
    long.state.bytes = 256 << 20;
    write(long);
    assert_eq!(damage(store.image(ID).unwrap_err()).file, ImageFile::State);
    // A map of 2 GiB that takes no disk and a state of another length.
    write(Manifest { regions: vec![1 << 40], stage: Stage::Begun, ..made });
    open(&dir, ImageFile::Map).set_len(2 << 30).unwrap();
    let image = store.image(ID).unwrap();
    let last = PageIdx((1 << 28) - 1);
    assert_eq!(image.read_page(last, &mut [1; 4096]).unwrap(), pagoda_image::Content::Missing);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_disk_that_cannot_be_read_is_a_place_of_damage() {
    let (dir, _, _) = filled("unreadable");
    // Call 0 reads the state, and each chunk is read with one of the map and some of the blocks.
    for (at, file) in [(0, ImageFile::State), (1, ImageFile::Map)] {
        let failure = Failure { at, calls: 1, errno: 5, part: false };
        let store = Store::on(Arc::new(Recorder::new(&dir).with_failure(failure)), &dir).unwrap();
        let report = store.verify(ID);
        // The chunk was read again, page by page.
        assert_eq!((report.damaged, report.blocks + report.zeros), (u64::from(file == ImageFile::State), PAGES));
    }
    let failure = Failure { at: 0, calls: usize::MAX, errno: 5, part: false };
    let store = Store::on(Arc::new(Recorder::new(&dir).with_failure(failure)), &dir).unwrap();
    let report = store.verify(ID);
    assert_eq!(report.damaged, PAGES + 1);
    assert!(
        report.damages[0].to_string().starts_with("state, offset 0: Input/output error"),
        "{:?}",
        report.damages[0]
    );
    assert!(report.damages[2].to_string().starts_with("map, offset 8: "), "{:?}", report.damages[2]);
    std::fs::remove_dir_all(&dir).unwrap();
}
