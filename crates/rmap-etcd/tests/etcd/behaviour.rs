//! What every control plane does: the file of one machine and etcd are held to the same.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rmap::control::{Change, ControlPlane, ControlReply, ControlRequest, MapEntry, Replica, Today};
use rmap::units::{Generation, ServerId, SlabNo, SpaceId, Version};
use rmap_etcd::{Etcd, NewSpace};
use rmap_file::Registry;

use crate::rig::EtcdProcess;

/// More than etcd tells at a time.
const MANY_SLABS: u32 = 1100;
const CONTENDERS: usize = 4;
const OPERATIONS: usize = 400;

/// A control plane and ways to it.
trait Plane: Sync {
    type Way: ControlPlane + Send;
    fn way(&self) -> Self::Way;
    fn new_space(&self, name: &str) -> SpaceId;
}

struct File(PathBuf);

impl Plane for File {
    type Way = Registry;

    fn way(&self) -> Registry {
        Registry::open(&self.0.join("registry")).unwrap()
    }

    fn new_space(&self, name: &str) -> SpaceId {
        SpaceId(name.bytes().fold(1, |sum, byte| sum * 31 + u64::from(byte)))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Plane for EtcdProcess {
    type Way = Etcd;

    fn way(&self) -> Etcd {
        self.connect("host")
    }

    fn new_space(&self, name: &str) -> SpaceId {
        let new = NewSpace { name: name.to_owned(), pages: 1 << 20, copies: 2, reserve: 0 };
        self.connect("host").create_space(&new).unwrap().id
    }
}

/// A change that nobody else makes: the grants are made of the owner's generation.
fn change(space: SpaceId, generation: Generation, slab: u32, revision: u64) -> Change {
    let copy = |server| Replica { server: ServerId(server), grant: Version::new(generation, revision, false) };
    let entry = MapEntry { revision, ..MapEntry::of(vec![copy(1), copy(2)]) };
    Change { space, generation, slab: SlabNo(slab), entry }
}

fn is_done(request: &Change, reply: &ControlReply) -> bool {
    *reply == ControlReply::Done || *reply == ControlReply::Conflict(request.entry.clone())
}

fn owners_follow_each_other<P: Plane>(plane: &P) {
    let space = plane.new_space("owners");
    let (mut one, mut other) = (plane.way(), plane.way());
    let (first, map) = one.take_over(space).unwrap();
    assert_eq!((first, map), (Generation(1), vec![]));
    let made = change(space, first, 3, 1);
    assert_eq!(one.swap(&made).unwrap(), ControlReply::Done);
    let (second, map) = other.take_over(space).unwrap();
    assert_eq!((second, map), (Generation(2), vec![(SlabNo(3), made.entry.clone())]));
    // The first one's time is over, for old changes and new ones.
    assert_eq!(one.swap(&change(space, first, 3, 2)).unwrap(), ControlReply::Fenced);
    assert_eq!(one.swap(&change(space, first, 4, 1)).unwrap(), ControlReply::Fenced);
    assert_eq!(one.swap(&made).unwrap(), ControlReply::Fenced);
    // Nobody is ahead of the time either.
    assert_eq!(one.swap(&change(space, Generation(3), 3, 2)).unwrap(), ControlReply::Fenced);
    // Spaces have nothing to do with each other.
    let apart = plane.new_space("apart");
    assert_eq!(one.take_over(apart).unwrap(), (Generation(1), vec![]));
    assert_eq!(other.swap(&change(space, second, 3, 2)).unwrap(), ControlReply::Done);
}

fn entries_are_compared_and_swapped<P: Plane>(plane: &P) {
    let space = plane.new_space("entries");
    let (mut one, mut again) = (plane.way(), plane.way());
    let (generation, _) = one.take_over(space).unwrap();
    let made = change(space, generation, 0, 1);
    assert_eq!(one.swap(&made).unwrap(), ControlReply::Done);
    for way in [&mut one, &mut again] {
        let reply = way.swap(&made).unwrap();
        assert!(is_done(&made, &reply), "its own entry is recognized: {reply:?}");
    }
    let mut other = change(space, generation, 0, 1);
    other.entry.replicas.pop();
    assert_eq!(one.swap(&other).unwrap(), ControlReply::Conflict(made.entry.clone()));
    // Neither skips one nor goes back.
    assert_eq!(one.swap(&change(space, generation, 0, 3)).unwrap(), ControlReply::Conflict(made.entry.clone()));
    let lost = Change { entry: MapEntry { revision: 2, ..MapEntry::lost() }, ..change(space, generation, 0, 2) };
    assert_eq!(again.swap(&lost).unwrap(), ControlReply::Done);
    assert_eq!(one.swap(&made).unwrap(), ControlReply::Conflict(lost.entry.clone()));
    assert_eq!(one.take_over(space).unwrap().1, [(SlabNo(0), lost.entry)]);
}

/// A slab that its owner gives back is empty, for the next one too, until it has copies again. One that has none and does not say
/// why is no entry: somebody has made a mistake, and it would read as zeros.
fn what_was_given_back_is_said_to_be_empty<P: Plane>(plane: &P) {
    let space = plane.new_space("given-back");
    let mut way = plane.way();
    let (generation, _) = way.take_over(space).unwrap();
    assert_eq!(way.swap(&change(space, generation, 0, 1)).unwrap(), ControlReply::Done);
    let of = |entry: MapEntry| Change { entry: MapEntry { revision: 2, ..entry }, ..change(space, generation, 0, 2) };
    let copies = change(space, generation, 0, 2).entry;
    for unsound in [
        MapEntry::default(),
        MapEntry { lost: true, ..MapEntry::empty() },
        MapEntry { empty: true, ..copies.clone() },
        MapEntry { lost: true, ..copies },
    ] {
        assert!(way.swap(&of(unsound.clone())).is_err(), "{unsound:?}");
    }
    let empty = of(MapEntry::empty());
    assert_eq!(way.swap(&empty).unwrap(), ControlReply::Done);
    let reply = way.swap(&empty).unwrap();
    assert!(is_done(&empty, &reply), "its own entry is recognized: {reply:?}");
    let (generation, map) = plane.way().take_over(space).unwrap();
    assert_eq!(map, [(SlabNo(0), empty.entry)]);
    assert_eq!(way.swap(&change(space, generation, 0, 3)).unwrap(), ControlReply::Done);
    assert_eq!(plane.way().take_over(space).unwrap().1, [(SlabNo(0), change(space, generation, 0, 3).entry)]);
}

fn a_large_map_comes_back_whole<P: Plane>(plane: &P) {
    let space = plane.new_space("large");
    let mut way = plane.way();
    let (generation, _) = way.take_over(space).unwrap();
    let all: Vec<Change> = (0..MANY_SLABS).map(|slab| change(space, generation, slab * 7, 1)).collect();
    all.iter().for_each(|request| assert_eq!(way.swap(request).unwrap(), ControlReply::Done));
    let (_, map) = plane.way().take_over(space).unwrap();
    let expected: Vec<_> = all.into_iter().map(|request| (request.slab, request.entry)).collect();
    assert_eq!(map, expected);
}

/// Hosts that take a space from each other: each has a generation of its own, and only the last can change anything.
fn contenders_have_generations_of_their_own<P: Plane>(plane: &P) {
    let space = plane.new_space("contended");
    let mut won: Vec<Generation> = std::thread::scope(|scope| {
        let contender = || {
            let mut way = plane.way();
            // One that another came before is told so, and is not the owner.
            (0..10).filter_map(|_| Some(way.take_over(space).ok()?.0)).collect::<Vec<_>>()
        };
        let all: Vec<_> = (0..CONTENDERS).map(|_| scope.spawn(contender)).collect();
        all.into_iter().flat_map(|one| one.join().unwrap()).collect()
    });
    won.sort_unstable();
    let expected: Vec<Generation> = (1..=won.len() as u32).map(Generation).collect();
    assert_eq!(won, expected, "no generation twice, none left out");
    let mut way = plane.way();
    for generation in &won[..won.len() - 1] {
        assert_eq!(way.swap(&change(space, *generation, 0, 1)).unwrap(), ControlReply::Fenced);
    }
    assert_eq!(way.swap(&change(space, won[won.len() - 1], 0, 1)).unwrap(), ControlReply::Done);
}

/// Sealed once, sealed for good; all may look, and one keeps it.
fn what_is_sealed_has_one_keeper<P: Plane>(plane: &P) {
    let space = plane.new_space("sealed");
    let (mut one, mut other) = (plane.way(), plane.way());
    let look = ControlRequest::Look { space };
    let keep = |generation| ControlRequest::Keep { space, generation };
    let confirm = |generation| ControlRequest::Confirm { space, generation };
    let nobody = ControlRequest::Look { space: SpaceId(77) };
    assert_eq!(one.answer(&nobody).unwrap(), ControlReply::Gone);
    assert_eq!(one.answer(&ControlRequest::Keep { space: SpaceId(77), generation: Generation(1) }).unwrap(), {
        ControlReply::Gone
    });
    let (first, _) = one.take_over(space).unwrap();
    let made = change(space, first, 3, 1);
    assert_eq!(one.swap(&made).unwrap(), ControlReply::Done);
    assert_eq!(other.answer(&confirm(first)).unwrap(), ControlReply::Done);
    assert_eq!(other.answer(&confirm(Generation(2))).unwrap(), ControlReply::Fenced);
    let unknown = ControlRequest::Confirm { space: SpaceId(77), generation: first };
    assert_eq!(one.answer(&unknown).unwrap(), ControlReply::Fenced);
    let map = vec![(SlabNo(3), made.entry)];
    let today = |generation, sealed| Today { generation: Generation(generation), sealed, map: map.clone() };
    // Only what is sealed has readers.
    assert_eq!(other.answer(&look).unwrap(), ControlReply::Seen(today(1, false)));
    assert_eq!(other.answer(&keep(first)).unwrap(), ControlReply::Seen(today(1, false)));
    assert!(other.seal(space, Generation(2)).is_err());
    assert_eq!(one.seal(space, first).unwrap(), Generation(2));
    assert!(one.seal(space, first).is_err());
    // The owner that sealed it has had its time.
    assert_eq!(one.answer(&confirm(first)).unwrap(), ControlReply::Fenced);
    assert_eq!(one.swap(&change(space, first, 3, 2)).unwrap(), ControlReply::Fenced);
    assert_eq!(other.answer(&look).unwrap(), ControlReply::Seen(today(2, true)));
    assert_eq!(other.answer(&keep(Generation(2))).unwrap(), ControlReply::Kept(today(3, true)));
    assert_eq!(one.answer(&keep(Generation(2))).unwrap(), ControlReply::Seen(today(3, true)));
    let moved = change(space, Generation(3), 3, 2);
    assert_eq!(other.swap(&moved).unwrap(), ControlReply::Done);
    // To be removed it is taken over, and stays sealed.
    assert_eq!(one.take_over(space).unwrap().0, Generation(4));
    let map = vec![(SlabNo(3), moved.entry)];
    assert_eq!(
        other.answer(&look).unwrap(),
        ControlReply::Seen(Today { generation: Generation(4), sealed: true, map })
    );
}

/// Any order of operations does what a map in memory would do.
fn it_is_as_a_map_in_memory<P: Plane>(plane: &P) {
    let spaces = [plane.new_space("model-a"), plane.new_space("model-b")];
    let mut ways = [plane.way(), plane.way()];
    let mut model = BTreeMap::<SpaceId, (u32, BTreeMap<u32, MapEntry>)>::new();
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = |limit: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % limit
    };
    for _ in 0..OPERATIONS {
        let space = spaces[below(2) as usize];
        let way = &mut ways[below(2) as usize];
        let (owner, map) = model.entry(space).or_default();
        if below(20) == 0 || *owner == 0 {
            *owner += 1;
            let expected = map.iter().map(|(slab, entry)| (SlabNo(*slab), entry.clone())).collect();
            assert_eq!(way.take_over(space).unwrap(), (Generation(*owner), expected));
            continue;
        }
        let generation = Generation((*owner + 1 - below(3) as u32).max(1));
        let slab = below(4) as u32;
        let today = map.get(&slab).cloned().unwrap_or_default();
        let request = change(space, generation, slab, (today.revision + 2 - below(3)).max(1));
        let reply = way.swap(&request).unwrap();
        if generation.0 != *owner {
            assert_eq!(reply, ControlReply::Fenced);
        } else if request.entry == today {
            assert!(is_done(&request, &reply), "{reply:?}");
        } else if request.entry.revision == today.revision + 1 {
            assert_eq!(reply, ControlReply::Done);
            map.insert(slab, request.entry);
        } else {
            assert_eq!(reply, ControlReply::Conflict(today));
        }
    }
}

fn all_of_it<P: Plane>(plane: &P) {
    owners_follow_each_other(plane);
    entries_are_compared_and_swapped(plane);
    what_was_given_back_is_said_to_be_empty(plane);
    a_large_map_comes_back_whole(plane);
    contenders_have_generations_of_their_own(plane);
    what_is_sealed_has_one_keeper(plane);
    it_is_as_a_map_in_memory(plane);
}

#[test]
fn the_file_of_one_machine() {
    let dir = std::env::temp_dir().join(format!("rmap-behaviour-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    all_of_it(&File(dir));
}

#[test]
fn etcd() {
    all_of_it(&EtcdProcess::start());
}

/// Two tests may choose the same port: each has an etcd of its own all the same.
#[test]
fn an_etcd_at_anothers_port_is_not_up() {
    assert!(!EtcdProcess::start().has_double());
}
