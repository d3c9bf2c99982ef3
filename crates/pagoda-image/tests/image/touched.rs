//! The record of what a VM needed first: whoever is killed leaves the old one, the new one or none, and an image that is whole.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;

use pagoda_core::chance::Chance;
use pagoda_core::units::{PageCount, PageIdx};
use pagoda_image::{Store, Touched, TouchedRun};

use crate::disk::{Failure, Op, Recorder, after_daemon, after_host, temp_dir};
use crate::vm::{ID, PAGES, begin, new_memory, run};

/// A durable image, on a disk that notes all that is done.
fn durable(name: &str) -> (PathBuf, Recorder, Store) {
    let dir = temp_dir(name);
    let disk = Recorder::new(&dir);
    let store = Store::on(Arc::new(disk.clone()), &dir).unwrap();
    let mut chance = Chance::new(3);
    let mut writer = begin(&store).unwrap();
    run(&mut writer, &mut new_memory(&mut chance), &mut chance, &mut |_, _| ());
    let ledger = writer.ledger().clone();
    ledger.mark_filled().unwrap();
    drop(writer);
    ledger.make_durable().unwrap();
    (dir, disk, store)
}

fn touched(first: u64) -> Touched {
    let runs = [(first, 3), (0, 1), (PAGES - 1, 1)];
    Touched::new(runs.map(|(first, count)| TouchedRun { first: PageIdx(first), count }).to_vec())
}

#[test]
fn a_record_is_part_of_what_an_image_takes_and_goes_with_it() {
    let (dir, _, store) = durable("touched");
    let image = store.image(ID).unwrap();
    let before = store.own_bytes(ID).unwrap();
    assert_eq!(image.touched(), Ok(None));
    for first in [4, 9] {
        image.keep_touched(&touched(first)).unwrap();
        assert_eq!(image.touched(), Ok(Some(touched(first))));
        assert_eq!(store.image(ID).unwrap().touched(), Ok(Some(touched(first))));
    }
    assert!(store.own_bytes(ID).unwrap() > before);
    assert!(store.verify(ID).is_clean());
    // What a daemon that was killed left of a new one, too.
    std::fs::write(dir.join(format!("{ID}/touched.new")), "half").unwrap();
    store.remove(ID).unwrap();
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn whoever_dies_while_a_record_is_written_harms_nothing() {
    let (dir, disk, store) = durable("touched-killed");
    let done = disk.ops().len();
    let image = store.image(ID).unwrap();
    image.keep_touched(&touched(4)).unwrap();
    let first = disk.ops().len();
    image.keep_touched(&touched(9)).unwrap();
    let ops = disk.ops();
    assert!(first > done + 2 && ops.len() > first + 2, "{ops:?}");
    let there = dir.join("there");
    let found = |ops: &[Op], write: &dyn Fn(&[Op])| {
        let _ = std::fs::remove_dir_all(&there);
        write(ops);
        let store = Store::open(&there).unwrap();
        assert!(store.verify(ID).is_clean());
        let found = store.image(ID).unwrap().touched();
        let left = store.image(ID).unwrap();
        left.keep_touched(&touched(12)).unwrap();
        assert_eq!(left.touched(), Ok(Some(touched(12))), "the next one is written");
        found
    };
    for end in done..=ops.len() {
        for cut in [0, 20, 60] {
            let found = found(&ops[..end], &|ops| after_daemon(ops, Some(cut), &there)).unwrap();
            let old = if end < first { None } else { Some(touched(4)) };
            let is_right =
                found == old || end == first && found.is_none() || end == ops.len() && found == Some(touched(9));
            assert!(is_right, "{end} of {}: {found:?}", ops.len());
        }
        for seed in 0..20 {
            let mut chance = Chance::new(seed);
            let chance = std::cell::RefCell::new(&mut chance);
            let found = found(&ops[..end], &|ops| after_host(ops, &mut chance.borrow_mut(), &there));
            // It is not synced, so a part of it may be there: its checksum tells.
            assert!(found.is_err() || [None, Some(touched(4)), Some(touched(9))].contains(&found.unwrap()));
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_full_disk_keeps_the_record_of_before() {
    let (dir, disk, store) = durable("touched-full");
    let image = store.image(ID).unwrap();
    image.keep_touched(&touched(4)).unwrap();
    for later in 0.. {
        let at = disk.calls() + later;
        let failing = disk.clone().with_failure(Failure { at, calls: 1, errno: 28, part: true });
        let written = image.keep_touched(&touched(9));
        if failing.calls() <= at {
            assert!(written.is_ok() && later > 2, "it was done without that call");
            break;
        }
        assert!(written.is_err(), "call {later}");
        assert_eq!(image.touched(), Ok(Some(touched(4))));
    }
    assert_eq!(image.touched(), Ok(Some(touched(9))));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_record_that_somebody_else_may_have_made_is_not_used() {
    let (dir, _, store) = durable("touched-others");
    let image = store.image(ID).unwrap();
    let (path, aside) = (dir.join(format!("{ID}/touched")), dir.join("aside"));
    image.keep_touched(&touched(4)).unwrap();
    std::fs::rename(&path, &aside).unwrap();
    symlink(&aside, &path).unwrap();
    assert!(image.touched().is_err(), "a link");
    std::fs::remove_file(&path).unwrap();
    std::fs::hard_link(&aside, &path).unwrap();
    assert!(image.touched().unwrap_err().contains("second name"));
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "x").unwrap();
    assert!(image.touched().unwrap_err().contains("no record"));
    std::fs::remove_file(&path).unwrap();
    let bytes = std::fs::read(&aside).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(image.touched(), Ok(Some(touched(4))));
    std::fs::write(&path, vec![0; 64 << 20]).unwrap();
    assert!(image.touched().is_err(), "it is not read to its end");
    image.keep_touched(&touched(9)).unwrap();
    assert_eq!((image.touched(), touched(9).pages()), (Ok(Some(touched(9))), PageCount(5)));
    std::fs::remove_dir_all(&dir).unwrap();
}
