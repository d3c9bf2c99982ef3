use super::*;

/// A directory of this test's own, gone with it.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("rmap-registry-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn file(&self) -> PathBuf {
        self.0.join("registry")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SPACE: SpaceId = SpaceId(7);

fn request(generation: u32, slab: u32, revision: u64) -> Change {
    let replica = |server| Replica { server: ServerId(server), grant: Version::from_bits(revision * 10) };
    let entry = MapEntry { revision, ..MapEntry::of(vec![replica(1), replica(2)]) };
    Change { space: SPACE, generation: Generation(generation), slab: SlabNo(slab), entry }
}

#[test]
fn compares_and_swaps_and_remembers() {
    let dir = Dir::new("swap");
    let mut registry = Registry::open(&dir.file()).unwrap();
    assert_eq!(registry.take_over(SPACE).unwrap(), (Generation(1), vec![]));
    assert_eq!(registry.swap(&request(1, 3, 1)).unwrap(), ControlReply::Done);
    assert_eq!(registry.swap(&request(1, 3, 1)).unwrap(), ControlReply::Conflict(request(1, 3, 1).entry));
    assert_eq!(registry.swap(&request(2, 3, 2)).unwrap(), ControlReply::Fenced);
    // Another process, at the same time.
    let mut other = Registry::open(&dir.file()).unwrap();
    assert_eq!(other.take_over(SPACE).unwrap(), (Generation(2), vec![(SlabNo(3), request(1, 3, 1).entry)]));
    assert_eq!(registry.swap(&request(1, 3, 2)).unwrap(), ControlReply::Fenced);
}

/// Spaces come and go: the file keeps those that are, and a past owner of one that is gone changes nothing.
#[test]
fn what_is_forgotten_takes_no_room() {
    let dir = Dir::new("forgotten");
    let mut registry = Registry::open(&dir.file()).unwrap();
    registry.take_over(SPACE).unwrap();
    registry.swap(&request(1, 3, 1)).unwrap();
    let refused = registry.forget(SPACE, Generation(2));
    assert!(matches!(refused, Err(RegistryError::NotOwner { asked: 2, today: 1, .. })), "{refused:?}");
    registry.forget(SPACE, Generation(1)).unwrap();
    assert_eq!(registry.swap(&request(1, 3, 2)).unwrap(), ControlReply::Fenced);
    // Forgotten twice, and for a process that opens the file now.
    registry.forget(SPACE, Generation(1)).unwrap();
    let mut other = Registry::open(&dir.file()).unwrap();
    assert_eq!(other.look(SPACE).unwrap(), Today::default());
    assert_eq!(other.swap(&request(1, 3, 2)).unwrap(), ControlReply::Fenced);
    let mut longest = 0;
    for space in 100..200 + COMPACT_MIN / 2 {
        registry.take_over(SpaceId(space)).unwrap();
        registry.forget(SpaceId(space), Generation(1)).unwrap();
        longest = longest.max(std::fs::metadata(dir.file()).unwrap().len());
    }
    let record = (RECORD_HEADER + OWNER_SIZE) as u64;
    assert!(longest <= (COMPACT_MIN + 2 * COMPACT_FACTOR) * record, "{longest} bytes");
    assert_eq!(registry.spaces.len(), 0);
}

#[test]
fn a_record_that_was_cut_short_is_cut_off() {
    let dir = Dir::new("torn");
    let mut registry = Registry::open(&dir.file()).unwrap();
    registry.take_over(SPACE).unwrap();
    let whole = std::fs::read(dir.file()).unwrap();
    registry.swap(&request(1, 0, 1)).unwrap();
    let all = std::fs::read(dir.file()).unwrap();
    for length in whole.len()..all.len() {
        std::fs::write(dir.file(), &all[..length]).unwrap();
        let mut registry = Registry::open(&dir.file()).unwrap();
        assert_eq!(registry.swap(&request(1, 0, 1)).unwrap(), ControlReply::Done, "cut to {length}");
        assert_eq!(std::fs::read(dir.file()).unwrap(), all);
    }
}

#[test]
fn the_log_does_not_grow_for_ever() {
    let dir = Dir::new("compact");
    let mut registry = Registry::open(&dir.file()).unwrap();
    registry.take_over(SPACE).unwrap();
    let mut other = Registry::open(&dir.file()).unwrap();
    registry.records = COMPACT_MIN + COMPACT_FACTOR * 2;
    assert_eq!(registry.swap(&request(1, 0, 1)).unwrap(), ControlReply::Done);
    assert_eq!(registry.records, 2);
    // The other has the old file open.
    assert_eq!(other.swap(&request(1, 0, 2)).unwrap(), ControlReply::Done);
    assert_eq!(registry.take_over(SPACE).unwrap().1, [(SlabNo(0), request(1, 0, 2).entry)]);
}

#[test]
fn other_files_are_left_alone() {
    let dir = Dir::new("other");
    std::fs::write(dir.file(), b"something else").unwrap();
    assert!(matches!(Registry::open(&dir.file()), Err(RegistryError::NotOurs { .. })));
    assert_eq!(std::fs::read(dir.file()).unwrap(), b"something else");
}

/// A server dies, and all its slabs change at once: as if one after the other, whatever is among them.
#[test]
fn changes_that_come_together_are_compared_one_by_one() {
    let dir = Dir::new("together");
    let mut registry = Registry::open(&dir.file()).unwrap();
    registry.take_over(SPACE).unwrap();
    let changes = [
        request(1, 3, 1),
        request(1, 4, 1),
        request(2, 5, 1),
        request(1, 3, 2),
        request(1, 3, 2),
        request(1, 4, 3),
        request(1, 6, 1),
    ];
    let conflict = |change: Change| ControlReply::Conflict(change.entry);
    let expected = [
        ControlReply::Done,
        ControlReply::Done,
        ControlReply::Fenced,
        ControlReply::Done,
        conflict(request(1, 3, 2)),
        conflict(request(1, 4, 1)),
        ControlReply::Done,
    ];
    assert_eq!(registry.swap_all(&changes).unwrap(), expected);
    let entry = |slab, revision| (SlabNo(slab), request(1, slab, revision).entry);
    let map = vec![entry(3, 2), entry(4, 1), entry(6, 1)];
    for look in [registry.look(SPACE), Registry::open(&dir.file()).unwrap().look(SPACE)] {
        assert_eq!(look.unwrap(), Today { generation: Generation(1), sealed: false, map: map.clone() });
    }
    // With others among them.
    let requests = [ControlRequest::Change(request(1, 3, 3)), ControlRequest::Look { space: SPACE }];
    let replies = registry.answer_all(&requests).unwrap();
    assert_eq!(replies[0], ControlReply::Done);
    assert!(matches!(&replies[1], ControlReply::Seen(today) if today.map[0] == entry(3, 3)));
    let confirm = |generation| ControlRequest::Confirm { space: SPACE, generation: Generation(generation) };
    let change = |slab, revision| ControlRequest::Change(request(1, slab, revision));
    let requests = [change(4, 2), change(6, 2), confirm(1), change(6, 3), change(6, 3), confirm(2)];
    let replies = registry.answer_all(&requests).unwrap();
    let done = ControlReply::Done;
    let again = conflict(request(1, 6, 3));
    assert_eq!(replies, [done.clone(), done.clone(), done.clone(), done, again, ControlReply::Fenced]);
}

/// As other processes left it.
#[test]
fn who_was_replaced_owns_nothing() {
    let dir = Dir::new("replaced");
    let mut registry = Registry::open(&dir.file()).unwrap();
    let owns = |registry: &mut Registry, generation| {
        registry.answer(&ControlRequest::Confirm { space: SPACE, generation: Generation(generation) }).unwrap()
    };
    assert_eq!(owns(&mut registry, 1), ControlReply::Fenced, "there is no such space");
    registry.take_over(SPACE).unwrap();
    assert_eq!(owns(&mut registry, 1), ControlReply::Done);
    Registry::open(&dir.file()).unwrap().take_over(SPACE).unwrap();
    assert_eq!([owns(&mut registry, 1), owns(&mut registry, 2)], [ControlReply::Fenced, ControlReply::Done]);
}

/// For every process, and after the log was written anew.
#[test]
fn what_is_sealed_stays_so() {
    let dir = Dir::new("sealed");
    let mut registry = Registry::open(&dir.file()).unwrap();
    registry.take_over(SPACE).unwrap();
    registry.swap(&request(1, 3, 1)).unwrap();
    let refused = registry.seal(SPACE, Generation(2));
    assert!(matches!(refused, Err(RegistryError::NotOwner { asked: 2, today: 1, .. })), "{refused:?}");
    assert_eq!(registry.seal(SPACE, Generation(1)).unwrap(), Generation(2));
    registry.locked(Registry::compact).unwrap();
    let map = vec![(SlabNo(3), request(1, 3, 1).entry)];
    let mut other = Registry::open(&dir.file()).unwrap();
    assert_eq!(other.look(SPACE).unwrap(), Today { generation: Generation(2), sealed: true, map });
}

/// A space without an owner so far is one, and not one that was forgotten.
#[test]
fn what_is_expected_is_there() {
    let dir = Dir::new("expected");
    let mut registry = Registry::open(&dir.file()).unwrap();
    let look = |registry: &mut Registry| registry.answer(&ControlRequest::Look { space: SPACE }).unwrap();
    assert_eq!(look(&mut registry), ControlReply::Gone);
    registry.expect(SPACE).unwrap();
    assert_eq!(look(&mut Registry::open(&dir.file()).unwrap()), ControlReply::Seen(Today::default()));
    let (generation, _) = Registry::open(&dir.file()).unwrap().take_over(SPACE).unwrap();
    assert_eq!(generation, Generation(1));
    registry.expect(SPACE).unwrap();
    assert_eq!(look(&mut registry), ControlReply::Seen(Today { generation, ..Today::default() }));
    registry.forget(SPACE, generation).unwrap();
    assert_eq!(look(&mut registry), ControlReply::Gone);
}
