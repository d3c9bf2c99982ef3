//! Snapshots as files: what goes out comes in again, and what was changed on the way does not.

use std::io;
use std::path::{Path, PathBuf};

use pagoda_core::chance::Chance;
use pagoda_core::units::PAGE_SIZE;
use pagoda_image::export::{
    FileError, HEADER_SIZE, ImportError, Importing, Level, Piece, RECORD_HEADER_SIZE, Reader, export,
};
use pagoda_image::{Image, ImageId, Import, Manifest, Stage, Store};
use proptest::prelude::*;

use crate::disk::{Failure, Recorder, temp_dir};
use crate::vm::{BOOT, ID, Memory, NEXT_BOOT, PAGES, begin, check_pages, manifest, new_memory, preserve};

const GOLDEN: &[u8] = include_bytes!("golden/export-1/stored");
const GOLDEN_ZSTD: &[u8] = include_bytes!("golden/export-1/zstd");
/// What an import calls its image: as the first one, so that the same checks can look at it.
const NAME: (&str, &str) = ("test", "again");

/// A directory of images that goes with the test.
struct Dir(PathBuf, Store);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = temp_dir(name);
        let store = Store::open(&dir).unwrap();
        Dir(dir, store)
    }

    fn is_empty(&self) -> bool {
        std::fs::read_dir(&self.0).unwrap().next().is_none()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn fill(store: &Store, memory: &Memory) {
    let mut writer = begin(store).unwrap();
    let _ = preserve(&mut writer, memory, 0, 256);
    let _ = preserve(&mut writer, memory, 256, 256);
    writer.ledger().mark_filled().unwrap();
}

fn exported(image: &Image, level: Level) -> Vec<u8> {
    let mut file = Vec::new();
    let done = export(image, level, &mut |bytes| {
        file.extend(bytes);
        Ok(())
    });
    let done = done.unwrap();
    assert_eq!((done.bytes, done.blocks + done.zeros), (file.len() as u64, PAGES));
    file
}

fn import(store: &Store, file: &[u8]) -> Result<Manifest, ImportError> {
    Importing::open(file)?.make(store, ID, NAME).map(|made| made.manifest)
}

fn few() -> Memory {
    let mut memory = vec![0; PAGES as usize];
    for (page, tag) in [(0, 1), (3, 0x0403_0201), (4, 0x0403_0201), (511, u32::MAX)] {
        memory[page] = tag;
    }
    memory
}

fn small_file(level: Level) -> Vec<u8> {
    let from = Dir::new("export-small");
    fill(&from.1, &few());
    exported(&from.1.image(ID).unwrap(), level)
}

#[test]
fn what_goes_out_comes_in_again() {
    for (seed, level) in [Level::Stored, Level::Zstd(1), Level::Zstd(Level::MAX)].into_iter().enumerate() {
        let (from, to) = (Dir::new("export-from"), Dir::new("export-to"));
        let memory = if seed == 0 { vec![0; PAGES as usize] } else { new_memory(&mut Chance::new(seed as u64)) };
        fill(&from.1, &memory);
        let file = exported(&from.1.image(ID).unwrap(), level);
        let made = import(&to.1, &file).unwrap();
        check_pages(&to.1, &memory, None);
        let image = to.1.image(ID).unwrap();
        assert_eq!(*image.manifest(), made);
        assert_eq!((&*made.vm, &*made.name, made.stage), (NAME.0, NAME.1, Stage::Durable));
        assert_eq!((made.imported, &*made.boot_id), (Some(Import::Waiting), BOOT));
        assert!(image.check_usable(NEXT_BOOT).is_ok() && image.manifest().check_startable().is_err());
        to.1.ledger(ID).unwrap().accept().unwrap();
        assert!(to.1.image(ID).unwrap().manifest().check_startable().is_ok());
        assert!(to.1.verify(ID).is_clean());
        // The same bytes again, whatever it was imported from.
        let before = Manifest { vm: "test".into(), name: "again".into(), ..manifest(made.state) };
        let again = exported(&image, level);
        assert_eq!(Importing::open(&*again).unwrap().manifest().vm, before.vm);
        assert_eq!(again.len(), file.len() + 2, "the names are longer by two bytes");
    }
}

#[test]
fn golden_files_are_read_and_written() {
    for (level, golden) in [(Level::Stored, GOLDEN), (Level::Zstd(1), GOLDEN_ZSTD)] {
        let to = Dir::new("export-golden");
        import(&to.1, golden).unwrap();
        check_pages(&to.1, &few(), None);
        if level == Level::Stored {
            assert!(small_file(level) == golden, "this version writes what the first one wrote");
        }
    }
}

/// `UPDATE=1` writes them; a released format does not change.
#[test]
fn golden_files_are_there() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/image/golden/export-1");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("stored"), small_file(Level::Stored)).unwrap();
        std::fs::write(dir.join("zstd"), small_file(Level::Zstd(1))).unwrap();
    }
    assert!(dir.join("stored").is_file() && dir.join("zstd").is_file());
}

/// Content of a file, piece by piece, or where it is wrong.
fn read(file: &[u8]) -> Result<(Manifest, Vec<u8>, usize), FileError> {
    let mut reader = Reader::open(file)?;
    let (manifest, mut content, mut pieces) = (reader.manifest().clone(), Vec::new(), 0);
    loop {
        pieces += 1;
        match reader.next_piece()? {
            Piece::End(_) => return Ok((manifest, content, pieces)),
            Piece::State(bytes) => content.extend_from_slice(bytes),
            Piece::Chunk { chunk, pages, content: bytes, .. } => {
                content.extend(chunk.0.to_le_bytes());
                content.extend(pages.words().iter().flat_map(|word| word.to_le_bytes()));
                content.extend_from_slice(bytes);
            }
            Piece::Zeros { first, count } => content.extend([first.0, count.0].iter().flat_map(|n| n.to_le_bytes())),
        }
    }
}

#[test]
fn each_byte_that_is_damaged_is_noticed() {
    let file = small_file(Level::Zstd(1));
    for at in 0..file.len() {
        for bit in [1, 0x80] {
            let mut damaged = file.clone();
            damaged[at] ^= bit;
            let Err(FileError::Bad(fault)) = read(&damaged) else { panic!("byte {at} of {}", file.len()) };
            assert!(fault.offset.0 <= file.len() as u64 && !fault.what.is_empty(), "{fault}");
        }
    }
}

#[test]
fn a_file_that_is_cut_or_goes_on_is_refused() {
    let file = small_file(Level::Stored);
    for len in 0..file.len() {
        let Err(FileError::Bad(fault)) = read(&file[..len]) else { panic!("cut at {len}") };
        assert_eq!(fault.offset.0, len as u64, "{fault}");
    }
    let more = [&file[..], b"x"].concat();
    assert!(read(&more).unwrap_err().to_string().contains("something follows the end"));
}

#[test]
fn nothing_is_left_of_what_is_refused() {
    let file = small_file(Level::Zstd(1));
    let to = Dir::new("export-refused");
    for len in (0..file.len()).step_by(37) {
        assert!(matches!(import(&to.1, &file[..len]), Err(ImportError::File(_))));
        assert!(to.is_empty(), "cut at {len}");
    }
    import(&to.1, &file).unwrap();
}

/// The disk fails at each of its calls: there is no image, or a whole one.
#[test]
fn a_disk_that_fails_leaves_a_whole_image_or_none() {
    let file = small_file(Level::Stored);
    for errno in [28, 5] {
        for at in 0.. {
            let dir = temp_dir("export-failing");
            let disk = Recorder::new(&dir).with_failure(Failure { at, calls: 1, errno, part: errno == 28 });
            let store = Store::on(std::sync::Arc::new(disk.clone()), &dir).unwrap();
            let made = import(&store, &file);
            let over = disk.calls() <= at;
            // Whoever looks next has a disk that works.
            let store = Store::open(&dir).unwrap();
            let listing = store.list().unwrap();
            assert_eq!(listing.images.len(), usize::from(made.is_ok()), "{errno} at {at}: {made:?}");
            if made.is_ok() {
                check_pages(&store, &few(), None);
            }
            let _ = std::fs::remove_dir_all(&dir);
            if over {
                break;
            }
        }
    }
}

/// A header that was made to fit: what it claims is refused before it is believed.
#[test]
fn sizes_that_lie_are_refused() {
    let file = small_file(Level::Stored);
    let with = |at: usize, value: &[u8], expected: &str| {
        let mut changed = file.clone();
        changed[at..at + value.len()].copy_from_slice(value);
        let sum = xxh3(&changed[..HEADER_SIZE - 8]);
        changed[HEADER_SIZE - 8..HEADER_SIZE].copy_from_slice(&sum.to_le_bytes());
        let said = read(&changed).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    };
    with(8, &[2], "version 2");
    with(12, &[4], "feature 2");
    with(16, &u32::MAX.to_le_bytes(), "a manifest of 4294967295 bytes");
    with(20, &u32::MAX.to_le_bytes(), "4294967295 MiB of memory");
    with(20, &3u32.to_le_bytes(), "the header has 3 chunks");
    with(24, &u64::MAX.to_le_bytes(), "a state of");
    with(32, &513u64.to_le_bytes(), "513 pages with content, of 512");
    with(32, &5u64.to_le_bytes(), "the header says that 5 pages have content");
    with(32, &3u64.to_le_bytes(), "the header says that 3 pages have content");
    with(40, &[1], "byte 40");
    let manifest_len = u32::from_le_bytes(file[16..20].try_into().unwrap()) as usize;
    let state_at = HEADER_SIZE + RECORD_HEADER_SIZE + manifest_len;
    let mut changed = file.clone();
    changed[state_at + 8..state_at + 12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(read(&changed).unwrap_err().to_string().contains("4294967295 bytes for QEMU's state"));
}

/// A frame of zstd that claims to be small and is not.
#[test]
fn a_bomb_gives_what_its_record_says_or_nothing() {
    let from = Dir::new("export-bomb");
    let mut memory = vec![0; PAGES as usize];
    memory[..256].fill(7);
    fill(&from.1, &memory);
    let file = exported(&from.1.image(ID).unwrap(), Level::Zstd(1));
    let at = file.len() - 2 * RECORD_HEADER_SIZE - 32 - RECORD_HEADER_SIZE;
    let start = (0..at).rev().find(|at| file[*at..].starts_with(&[3, 0, 0, 0, 0, 0, 0, 0])).unwrap();
    let mut changed = file.clone();
    // One page, of which there is a bit, a checksum and the frame of 256 pages.
    let sum = &file[start + RECORD_HEADER_SIZE + 32..][..4].to_vec();
    let frame_at = start + RECORD_HEADER_SIZE + 32 + 4 * 256;
    let len = u32::from_le_bytes(file[start + 8..start + 12].try_into().unwrap()) as usize;
    let frame = file[frame_at..start + RECORD_HEADER_SIZE + len].to_vec();
    let mut payload = vec![0; 32];
    payload[0] = 1;
    payload.extend(sum);
    payload.extend(&frame);
    let mut record = [3u32, 0, payload.len() as u32, 1].iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    let record_sum = xxh3(&[&record[..], &payload].concat());
    record.extend(record_sum.to_le_bytes());
    record.extend(&payload);
    changed.splice(start..start + RECORD_HEADER_SIZE + len, record);
    let said = read(&changed).unwrap_err().to_string();
    assert!(said.contains("chunk 0: its zstd frame of"), "{said}");
}

fn xxh3(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

#[test]
fn an_export_ends_with_its_receiver() {
    let from = Dir::new("export-gone");
    fill(&from.1, &new_memory(&mut Chance::new(3)));
    let image = from.1.image(ID).unwrap();
    for pieces in 0..4 {
        let mut left = pieces;
        let done = export(&image, Level::Zstd(1), &mut |_| match left {
            0 => Err(io::ErrorKind::BrokenPipe.into()),
            _ => {
                left -= 1;
                Ok(())
            }
        });
        assert!(done.unwrap_err().to_string().starts_with("the receiver of the file"));
    }
}

#[test]
fn a_damaged_image_is_not_exported() {
    let from = Dir::new("export-damaged");
    fill(&from.1, &few());
    let path = from.0.join(ID.to_string()).join("pages");
    let mut pages = std::fs::read(&path).unwrap();
    pages[PAGE_SIZE as usize + 9] ^= 1;
    std::fs::write(&path, pages).unwrap();
    let done = export(&from.1.image(ID).unwrap(), Level::Zstd(1), &mut |_| Ok(()));
    assert!(done.unwrap_err().to_string().contains("pages, page 3, offset 4096"));
}

#[test]
fn an_image_of_another_name_is_made() {
    let (to, file) = (Dir::new("export-two"), small_file(Level::Stored));
    for id in [ImageId(7), ImageId(8)] {
        Importing::open(&*file).unwrap().make(&to.1, id, NAME).unwrap();
    }
    let names: Vec<ImageId> = to.1.list().unwrap().images.iter().map(|listed| listed.id).collect();
    assert_eq!(names, [ImageId(7), ImageId(8)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Whatever is done to a file: it is refused, or it has the content that it had.
    #[test]
    fn nothing_else_comes_out(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..6),
        level in prop::sample::select(vec![Level::Stored, Level::Zstd(1)]),
    ) {
        let file = match level { Level::Stored => GOLDEN, Level::Zstd(_) => GOLDEN_ZSTD };
        let mut changed = file.to_vec();
        for (at, byte, kind) in changes {
            let at = at.index(changed.len());
            match kind {
                0 => changed[at] = byte,
                1 => changed.insert(at, byte),
                2 if changed.len() > 1 => drop(changed.remove(at)),
                _ => {
                    let from = usize::from(byte) * 16 % changed.len();
                    let piece = changed[from..(from + 24).min(changed.len())].to_vec();
                    changed.splice(at..at, piece);
                }
            }
        }
        if let Ok(found) = read(&changed) {
            prop_assert_eq!(found, read(file).unwrap());
        }
    }
}
