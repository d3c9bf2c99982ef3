//! The daemon is killed, the host stops, and the disk fails, between any two calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagoda_core::chance::Chance;
use pagoda_image::{Ledger, Stage, Store, Writer};

use crate::disk::{Failure, Mistake, Op, Recorder, Said, after_daemon, after_host, temp_dir};
use crate::vm::{BOOT, ID, Memory, NEXT_BOOT, begin, check_pages, new_memory, preserve, run};

/// One image from its beginning to its end, and all that was done for it.
struct Life {
    ops: Vec<Op>,
    expected: Memory,
}

impl Life {
    fn record(dir: &Path, seed: u64, mistake: Option<Mistake>) -> Life {
        let root = dir.join("recorded");
        let _ = std::fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        drop(store);
        let recorder = Recorder::new(&root).with_mistake(mistake);
        let store = Store::on(Arc::new(recorder.clone()), &root).unwrap();
        let mut chance = Chance::new(seed);
        let mut memory = new_memory(&mut chance);
        let expected = memory.clone();
        let mut writer = begin(&store).unwrap();
        recorder.note(Op::Said(Said::Begun));
        run(&mut writer, &mut memory, &mut chance, &mut |page, tag| recorder.note(Op::Guest { page, tag }));
        assert_eq!(writer.lost(), None);
        let ledger = writer.ledger().clone();
        drop(writer);
        ledger.note_pause(1234).unwrap();
        ledger.mark_filled().unwrap();
        recorder.note(Op::Said(Said::Filled));
        ledger.make_durable().unwrap();
        recorder.note(Op::Said(Said::Durable));
        if seed.is_multiple_of(2) {
            recorder.note(Op::Said(Said::Removing));
            store.remove(ID).unwrap();
            recorder.note(Op::Said(Said::Removed));
        }
        Life { ops: recorder.ops(), expected }
    }

    /// What the VM holds after these calls.
    fn memory(&self, ops: &[Op]) -> Memory {
        let mut memory = self.expected.clone();
        for op in ops {
            if let Op::Guest { page, tag } = op {
                memory[*page as usize] = *tag;
            }
        }
        memory
    }

    /// The next daemon finds a whole image or none, and brings it to its end.
    fn check_daemon(&self, len: usize, cut: Option<usize>, path: &Path) {
        let _ = std::fs::remove_dir_all(path);
        let ops = &self.ops[..len];
        after_daemon(ops, cut, path);
        let store = Store::open(path).unwrap();
        let listing = store.list().unwrap();
        assert_eq!(listing.unknown, [""; 0]);
        let removed = renamed_to(ops, &format!("{ID}.gone"));
        if !renamed_to(ops, &ID.to_string()) || removed {
            assert!(listing.images.is_empty(), "no image yet, or none any more");
            assert!(store.ledger(ID).is_err());
        } else {
            let [image] = &listing.images[..] else { panic!("one image: {listing:?}") };
            assert_eq!(image.damage, None);
            let stage = image.manifest.as_ref().unwrap().stage;
            assert!(!said(ops, Said::Filled) || matches!(stage, Stage::Filled | Stage::Durable));
            assert!(!said(ops, Said::Durable) || stage == Stage::Durable);
            let mut memory = self.memory(ops);
            check_pages(&store, &self.expected, Some(&memory));
            let ledger = store.ledger(ID).unwrap();
            if stage == Stage::Begun {
                let mut writer = Writer::resume(ledger.clone(), BOOT).unwrap();
                let mut chance = Chance::new(len as u64);
                run(&mut writer, &mut memory, &mut chance, &mut |_, _| ());
                assert_eq!(writer.lost(), None);
                ledger.mark_filled().unwrap();
            }
            if stage != Stage::Durable {
                ledger.make_durable().unwrap();
            }
            check_pages(&store, &self.expected, None);
            assert!(store.verify(ID).is_clean());
        }
        assert_eq!(store.clean().unwrap(), listing.leftovers.len());
        store.remove(ID).unwrap();
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "nothing is left over");
    }

    /// After the host's restart, an image that can be used has every page; and there is one if it was said to be durable.
    fn check_host(&self, len: usize, chance: &mut Chance, path: &Path) {
        let _ = std::fs::remove_dir_all(path);
        let ops = &self.ops[..len];
        after_host(ops, chance, path);
        let store = Store::open(path).unwrap();
        let listing = store.list().unwrap();
        let usable = listing.images.iter().any(|image| {
            image.damage.is_none() && image.manifest.as_ref().is_some_and(|made| made.check_usable(NEXT_BOOT).is_ok())
        });
        if usable {
            check_pages(&store, &self.expected, None);
            assert!(store.verify(ID).is_clean());
        } else {
            let resumed = store.ledger(ID).and_then(|ledger| Writer::resume(ledger, NEXT_BOOT).map(drop));
            assert!(resumed.is_err(), "a VM of before is gone");
        }
        if said(ops, Said::Durable) && !said(ops, Said::Removing) {
            assert!(usable, "it was said to be durable: {listing:?}");
        }
        if said(ops, Said::Removed) {
            assert!(listing.images.is_empty(), "it was removed");
        }
        store.clean().unwrap();
        store.remove(ID).unwrap();
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "nothing is left over");
    }
}

fn renamed_to(ops: &[Op], name: &str) -> bool {
    ops.iter().any(|op| matches!(op, Op::Rename { to, .. } if to == name))
}

fn said(ops: &[Op], what: Said) -> bool {
    ops.iter().any(|op| matches!(op, Op::Said(said) if *said == what))
}

#[test]
fn a_killed_daemon_leaves_a_whole_image_or_none() {
    let dir = temp_dir("daemon");
    for seed in 0..4 {
        let life = Life::record(&dir, seed, None);
        let mut chance = Chance::new(seed ^ 0xd);
        for len in 0..=life.ops.len() {
            life.check_daemon(len, None, &dir.join("left"));
            if let Some(Op::Write { bytes, .. }) = life.ops[..len].last() {
                // The kernel stops a killed process's write between two of its pages; entries are 8 bytes.
                let unit = if bytes.len() >= 4096 { 4096 } else { 8 };
                let cut = chance.below(bytes.len() as u64 / unit + 1) * unit;
                life.check_daemon(len, Some(cut as usize), &dir.join("left"));
            }
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_host_that_stops_leaves_a_durable_image_or_none() {
    let dir = temp_dir("host");
    for seed in 0..6 {
        let life = Life::record(&dir, seed, None);
        let mut chance = Chance::new(seed ^ 0xb);
        let syncs_from = life.ops.iter().position(|op| matches!(op, Op::SyncFile { .. })).unwrap();
        for len in 0..=life.ops.len() {
            // What is told apart is near the calls that sync.
            let rounds = if len < syncs_from { 1 } else { 8 };
            (0..rounds).for_each(|_| life.check_host(len, &mut chance, &dir.join("left")));
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn mistakes_are_noticed() {
    let dir = temp_dir("mistakes");
    for mistake in [Mistake::EntryFirst, Mistake::NoFileSync, Mistake::NoDirSync] {
        let is_noticed = (0..4).any(|seed| {
            let life = Life::record(&dir, seed, Some(mistake));
            let mut chance = Chance::new(seed);
            let holds = catch_unwind(AssertUnwindSafe(|| {
                for len in 0..=life.ops.len() {
                    life.check_daemon(len, None, &dir.join("left"));
                    life.check_host(len, &mut chance, &dir.join("left"));
                }
            }));
            holds.is_err()
        });
        assert!(is_noticed, "{mistake:?}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Everything that an image and its VM go through with a disk that fails; the writer and the daemon's end, if it got so far.
fn live(root: &Path, seed: u64, recorder: &Recorder) -> (Memory, Option<(Writer, Arc<Ledger>)>) {
    let store = Store::on(Arc::new(recorder.clone()), root).unwrap();
    let mut chance = Chance::new(seed);
    let mut memory = new_memory(&mut chance);
    let expected = memory.clone();
    let Ok(mut writer) = begin(&store) else { return (expected, None) };
    run(&mut writer, &mut memory, &mut chance, &mut |_, _| ());
    let ledger = writer.ledger().clone();
    if writer.lost().is_none() {
        let _ = ledger.note_pause(1);
        let _ = ledger.mark_filled();
        let _ = ledger.make_durable();
    }
    (expected, Some((writer, ledger)))
}

fn fresh(dir: &Path) -> PathBuf {
    let root = dir.join("failing");
    let _ = std::fs::remove_dir_all(&root);
    drop(Store::open(&root).unwrap());
    root
}

#[test]
fn a_disk_that_fails_ends_the_image_and_nobody_takes_it_for_whole() {
    let dir = temp_dir("failing");
    let (enospc, eio) = (28, 5);
    let mut losses = 0;
    for seed in 0..3 {
        let root = fresh(&dir);
        let recorder = Recorder::new(&root);
        live(&root, seed, &recorder);
        let mut chance = Chance::new(seed);
        for at in 0..recorder.calls() {
            let calls = [1, 2, 3, 5, usize::MAX][chance.below(5) as usize];
            let errno = if chance.per_mille(500) { enospc } else { eio };
            let failure = Failure { at, calls, errno, part: chance.per_mille(500) };
            let root = fresh(&dir);
            let recorder = Recorder::new(&root).with_failure(failure);
            let (expected, ends) = live(&root, seed, &recorder);
            let store = Store::open(&root).unwrap();
            let Some((mut writer, ledger)) = ends else {
                assert!(store.list().unwrap().images.is_empty(), "{failure:?}: no image began");
                store.remove(ID).unwrap();
                assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0, "{failure:?}");
                continue;
            };
            match writer.lost().cloned() {
                None => {
                    // Nothing failed, or only what can be tried again.
                    check_pages(&store, &expected, None);
                    let again = store.ledger(ID).unwrap();
                    if again.manifest().unwrap().stage == Stage::Begun {
                        again.mark_filled().unwrap();
                    }
                    if again.manifest().unwrap().stage == Stage::Filled {
                        again.make_durable().unwrap();
                    }
                    assert!(store.verify(ID).is_clean(), "{failure:?}");
                }
                Some(loss) => {
                    losses += 1;
                    assert!(loss.is_noted || calls > 3, "{failure:?}: {loss:?}");
                    assert_eq!(writer.note_loss(), loss.is_noted || calls < usize::MAX, "{failure:?}");
                    assert_eq!(preserve(&mut writer, &vec![7; 512], 0, 256), pagoda_image::Taken::No);
                    assert!(ledger.mark_filled().is_err(), "{failure:?}");
                    if writer.lost().unwrap().is_noted {
                        let resumed = store.ledger(ID).and_then(|ledger| Writer::resume(ledger, BOOT).map(drop));
                        assert!(resumed.is_err(), "{failure:?}: the VM has changed what it lacks");
                    }
                    assert!(store.lose(ID, "for want of an engine"), "{failure:?}");
                    assert!(store.image(ID).is_err(), "{failure:?}");
                }
            }
            store.remove(ID).unwrap();
            assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0, "{failure:?}: nothing is left over");
        }
    }
    assert!(losses > 50, "{losses}");
    std::fs::remove_dir_all(&dir).unwrap();
}
