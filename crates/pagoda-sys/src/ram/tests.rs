use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags};

use super::*;
use crate::host::{FolioSize, ShmemHuge};
use crate::testing::{FolioSettings, Guest, PAGE, ram};
use crate::{Errno, PAGE_SIZE};

const CHUNK: u64 = pagoda_abi::CHUNK_SIZE as u64;
const CHUNK_PAGES: u64 = pagoda_abi::CHUNK_PAGES as u64;

fn runs(file: &RamFile) -> Vec<Range<u64>> {
    file.data_runs().collect::<Result<_, _>>().unwrap()
}

#[test]
fn a_new_file_is_private_sealed_and_empty() {
    let file = ram("new", 4 * CHUNK);
    let stat = rustix::fs::fstat(&file).unwrap();
    assert_eq!(stat.st_mode & 0o7777, 0o600);
    assert_eq!((stat.st_dev, stat.st_ino), file.inode());
    assert_eq!(rustix::fs::ftruncate(&file, CHUNK), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&file, 8 * CHUNK), Err(Errno::PERM));
    assert_eq!((file.len(), file.allocated()), (4 * CHUNK, Ok(0)));
    assert_eq!((file.next_data(0), runs(&file)), (Ok(None), vec![]));
}

#[test]
fn only_a_sealed_memfd_of_the_right_size_is_taken_over() {
    let file = ram("takeover", CHUNK);
    let again = RamFile::from_fd(file.as_fd().try_clone_to_owned().unwrap(), CHUNK).unwrap();
    assert_eq!(again.inode(), file.inode());
    let refused = |fd: OwnedFd, len, word: &str| {
        let error = RamFile::from_fd(fd, len).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(file.as_fd().try_clone_to_owned().unwrap(), 2 * CHUNK, "expected");
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, CHUNK).unwrap();
    refused(unsealed, CHUNK, "not sealed");
    let on_disk = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    refused(on_disk.into(), CHUNK, "not in memory");
}

#[test]
fn a_view_is_aligned_to_a_chunk_and_never_to_two() {
    for chunks in [1, 2, 3, 8] {
        let file = ram("placed", chunks * CHUNK);
        let view = file.map(LargeFolios::Advise).unwrap();
        assert_eq!(view.addr() as u64 % (2 * CHUNK), CHUNK, "{chunks} chunks");
        assert_eq!(view.len(), file.len());
    }
}

#[test]
fn zero_pages_are_told_from_others_by_every_byte() {
    let file = ram("zero", 4 * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    view.populate(0..4).unwrap();
    assert!(view.is_zero(0..4) && view.is_zero(2..2));
    for at in [0, 1, 63, 64, 2048, PAGE_SIZE - 1] {
        let mut content = [0; PAGE_SIZE];
        content[at] = 0x80;
        view.write_page(2, &content);
        assert!(!view.is_zero(2..3) && !view.is_zero(0..4), "byte {at}");
        assert!(view.is_zero(0..2) && view.is_zero(3..4));
        let mut back = [1; PAGE_SIZE];
        view.read_page(2, &mut back);
        assert_eq!(back, content);
    }
}

#[test]
#[should_panic(expected = "are not in RAM of 4 pages")]
fn a_page_outside_is_a_broken_page_table() {
    ram("outside", 4 * PAGE).map(LargeFolios::Never).unwrap().is_zero(4..5);
}

#[test]
fn runs_follow_writes_and_punches_and_a_zap_changes_nothing() {
    let file = ram("runs", 16 * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    view.populate(2..5).unwrap();
    view.populate(7..8).unwrap();
    assert_eq!(runs(&file), vec![2 * PAGE..5 * PAGE, 7 * PAGE..8 * PAGE]);
    assert_eq!(file.allocated(), Ok(4 * PAGE));
    view.write_page(3, &[5; PAGE_SIZE]);
    view.zap(0..16).unwrap();
    file.punch(2 * PAGE, PAGE).unwrap();
    file.punch(7 * PAGE, PAGE).unwrap();
    assert_eq!(runs(&file), vec![3 * PAGE..5 * PAGE]);
    assert_eq!(
        (file.next_data(0), file.next_data(4 * PAGE), file.next_data(5 * PAGE)),
        (Ok(Some(3 * PAGE)), Ok(Some(4 * PAGE)), Ok(None))
    );
    assert!(!view.is_zero(3..4));
}

/// What mincore says for every page.
fn resident(file: &RamFile, view: &RamView, from: u64, count: u64) -> Vec<u8> {
    let mut out = vec![0xff; count as usize];
    file.resident(view, from, &mut out).unwrap();
    out.iter().map(|byte| byte & 1).collect()
}

#[test]
fn residence_is_that_of_the_file_not_of_the_mapping() {
    let file = ram("mincore", 8 * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let guest = Guest::map(&file);
    guest.write(1, 1);
    rustix::io::pwrite(&file, &[1; PAGE_SIZE], 4 * PAGE).unwrap();
    view.write_page(6, &[1; PAGE_SIZE]);
    assert_eq!(resident(&file, &view, 0, 8), [0, 1, 0, 0, 1, 0, 1, 0]);
    assert_eq!(resident(&file, &view, 4, 3), [1, 0, 1]);
    view.zap(0..8).unwrap();
    file.punch(PAGE, PAGE).unwrap();
    assert_eq!(resident(&file, &view, 0, 8), [0, 0, 0, 0, 1, 0, 1, 0]);
    // To ask for residence has allocated no page.
    assert_eq!(file.allocated(), Ok(2 * PAGE));
}

#[test]
fn a_hole_filled_through_the_view_is_one_chunk_and_never_two() {
    let _settings = FolioSettings::set(ShmemHuge::Advise);
    let file = ram("folios", 8 * CHUNK);
    let view = file.map(LargeFolios::Advise).unwrap();
    let filled = if FolioSize::Chunk.on_advice() { CHUNK } else { PAGE };
    for chunk in [4, 1, 0, 7] {
        view.write_page(chunk * CHUNK_PAGES, &[1; PAGE_SIZE]);
        let run = runs(&file).into_iter().find(|run| run.contains(&(chunk * CHUNK))).unwrap();
        if chunk != 0 {
            assert_eq!(run, chunk * CHUNK..chunk * CHUNK + filled);
        }
    }
    assert_eq!(file.allocated(), Ok(4 * filled));
    let present = resident(&file, &view, 4 * CHUNK_PAGES, CHUNK_PAGES);
    assert_eq!(present.iter().map(|byte| u64::from(*byte)).sum::<u64>() * PAGE, filled);
    // Part of a folio can be punched: the rest stays, and mincore agrees.
    view.zap(0..8 * CHUNK_PAGES).unwrap();
    file.punch(4 * CHUNK, CHUNK / 2).unwrap();
    assert_eq!(
        file.next_data(4 * CHUNK).unwrap(),
        Some(if filled == CHUNK { 4 * CHUNK + CHUNK / 2 } else { 7 * CHUNK })
    );
    assert_eq!(resident(&file, &view, 4 * CHUNK_PAGES, CHUNK_PAGES / 2), vec![0; CHUNK_PAGES as usize / 2]);
    file.punch(0, 8 * CHUNK).unwrap();
    assert_eq!(file.allocated(), Ok(0));
}

#[test]
fn an_aligned_mapping_does_get_two_chunks_at_a_time() {
    // The counter-example, without which the test above could not fail.
    let _settings = FolioSettings::set(ShmemHuge::Advise);
    let file = ram("huge", 8 * CHUNK);
    let guest = Guest::map(&file);
    guest.advise(rustix::mm::Advice::LinuxHugepage);
    guest.write(4 * CHUNK_PAGES, 1);
    let filled = if FolioSize::Huge.on_advice() {
        2 * CHUNK
    } else if FolioSize::Chunk.on_advice() {
        CHUNK
    } else {
        PAGE
    };
    assert_eq!(runs(&file), vec![4 * CHUNK..4 * CHUNK + filled]);
}

#[test]
fn single_pages_where_large_folios_are_refused() {
    let _settings = FolioSettings::set(ShmemHuge::Advise);
    let file = ram("single", 4 * CHUNK);
    let view = file.map(LargeFolios::Never).unwrap();
    view.write_page(300, &[1; PAGE_SIZE]);
    assert_eq!(file.allocated(), Ok(PAGE));
}

#[test]
fn a_keepsake_keeps_the_content_and_shows_nothing() {
    let file = ram("kept", CHUNK);
    file.map(LargeFolios::Never).unwrap().write_page(3, &[7; PAGE_SIZE]);
    let kept = file.keepsake().unwrap();
    let inode = file.inode();
    drop(file);
    assert_eq!(rustix::io::pread(&kept, &mut [0; 8], 3 * PAGE), Err(Errno::BADF));
    assert_eq!(rustix::io::pwrite(&kept, &[0; 8], 3 * PAGE), Err(Errno::BADF));
    let again = RamFile::reopen(kept.as_fd(), CHUNK).unwrap();
    assert_eq!(again.inode(), inode);
    let mut page = [0; PAGE_SIZE];
    again.map(LargeFolios::Never).unwrap().read_page(3, &mut page);
    assert_eq!(page, [7; PAGE_SIZE]);
    let directory = rustix::fs::open("/", OFlags::PATH, Mode::empty()).unwrap();
    assert!(RamFile::reopen(directory.as_fd(), CHUNK).is_err());
}

#[test]
fn a_table_is_there_for_the_next_who_maps_it() {
    use std::sync::atomic::Ordering::SeqCst;
    let table = WordTable::map(ram("table", 4 * PAGE)).unwrap();
    assert_eq!(table.len(), 4 * PAGE_SIZE / 4);
    table[2 * PAGE_SIZE / 4 + 5].store(77, SeqCst);
    assert_eq!(runs(table.file()), std::slice::from_ref(&(2 * PAGE..3 * PAGE)));
    let again = WordTable::map(RamFile::reopen(table.file().keepsake().unwrap().as_fd(), 4 * PAGE).unwrap()).unwrap();
    drop(table);
    assert_eq!(again[2 * PAGE_SIZE / 4 + 5].load(SeqCst), 77);
}
