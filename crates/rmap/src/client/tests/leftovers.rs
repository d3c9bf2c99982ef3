//! What an owner left at servers when it ended.

use super::super::exchange::{Exchange, Role};
use super::lies::take;
use super::many::{SLAB, filled};
use super::*;
use crate::client::index::PeerIndex;
use crate::control::{Map, Replica};
use crate::server::SLABS_MAX;
use crate::units::{SlabNo, Version};
use crate::wire::message::{HELD_MAX, HELD_SIZE, Status};

fn held(pool: &Pool) -> Vec<usize> {
    pool.servers.iter().map(Server::held_slabs).collect()
}

/// What the map says of those slabs that it names.
fn map_of(pool: &Pool, named: impl Fn(SlabNo) -> bool) -> Map {
    let slabs = pool.client.pool.map.spaces[pool.space.0].slabs.enumerate().filter(|(slab, _)| named(*slab));
    slabs.map(|(slab, state)| (slab, state.entry.clone())).collect()
}

/// A pool of two servers in which a space of so many slabs has its second owner, who has looked at both.
fn taken_over(slabs: u64) -> Pool {
    let mut pool = filled(2, slabs);
    let map = map_of(&pool, |_| true);
    next_owner(&mut pool, &map);
    pool.run();
    pool
}

/// The next owner. The one before is not told.
fn next_owner(pool: &mut Pool, map: &Map) {
    let before = &pool.client.pool.map.spaces[pool.space.0];
    let spec = SpaceSpec { id: before.id, pages: before.pages, copies: before.copies, reserve: 0, key: [2; KEY_SIZE] };
    let generation = Generation(before.generation.0 + 1);
    pool.space = pool.client.attach(&spec, generation, map).unwrap();
    pool.client.settle(pool.now);
}

#[test]
fn what_no_map_names_goes_back() {
    let mut pool = filled(2, 4);
    let map = map_of(&pool, |slab| slab.0 != 1 && slab.0 != 3);
    next_owner(&mut pool, &map);
    assert!(!pool.client.has_found_leftovers(pool.space));
    pool.run();
    assert!(pool.client.has_found_leftovers(pool.space) && pool.client.is_settled());
    assert_eq!((held(&pool), pool.client.stats().leftovers), (vec![2; 2], 4));
    let pages: Vec<_> = (0..4).map(|slab| pool.read(slab * SLAB)).collect();
    assert_eq!(pages, [Ok(1), Ok(0), Ok(3), Ok(0)]);
    // It grants them anew, and that stays, also for the next one.
    assert_eq!(pool.write(SLAB, 7), Ok(()));
    let map = map_of(&pool, |_| true);
    next_owner(&mut pool, &map);
    pool.run();
    assert_eq!((held(&pool), pool.read(SLAB)), (vec![3; 2], Ok(7)));
}

/// More than a server tells at a time.
#[test]
fn all_of_it_goes_back() {
    let mut pool = filled(2, 2 * HELD_MAX as u64 + 3);
    next_owner(&mut pool, &Map::new());
    pool.run();
    assert_eq!((held(&pool), pool.client.has_found_leftovers(pool.space)), (vec![0; 2], true));
}

/// The other one gives back what it has at once.
#[test]
fn a_server_that_was_away_is_asked_when_it_answers() {
    let mut pool = filled(2, 3);
    pool.deaf = vec![1];
    pool.begin_write(0, 9);
    pool.pass(Duration::from_millis(100));
    assert!(pool.client.pool.sessions.peers[PeerIndex(1)].is_down());
    next_owner(&mut pool, &Map::new());
    pool.pass(Duration::from_millis(100));
    assert_eq!((held(&pool), pool.client.has_found_leftovers(pool.space)), (vec![0, 3], true));
    pool.deaf = Vec::new();
    pool.pass(Duration::from_millis(1500));
    assert_eq!(held(&pool), [0, 0]);
}

/// It falls silent when it was asked.
#[test]
fn a_question_that_is_not_answered_is_asked_again() {
    let mut pool = filled(2, 3);
    next_owner(&mut pool, &Map::new());
    let look = |e: &Exchange| e.role == Role::Held && e.peer == PeerIndex(1);
    while pool.client.pool.sessions.exchanges.find(look).is_none() {
        pool.single_step();
    }
    pool.deaf = vec![1];
    pool.pass(Duration::from_millis(100));
    assert!(
        pool.client.pool.sessions.peers[PeerIndex(1)].is_down()
            && pool.client.pool.sessions.exchanges.find(look).is_none()
    );
    pool.deaf = Vec::new();
    pool.pass(Duration::from_millis(1500));
    assert_eq!(held(&pool), [0, 0]);
}

/// An owner that does not know yet that there is another is lent nothing that the other would have to look for.
#[test]
fn earlier_owners_are_lent_nothing_more() {
    let mut pool = Pool::new(3, 2, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let map = map_of(&pool, |slab| slab.0 == 0);
    let earlier = pool.space;
    next_owner(&mut pool, &map);
    pool.run();
    assert!(pool.client.has_found_leftovers(pool.space));
    let before = held(&pool);
    pool.client.write(pool.now, earlier, PageNo(2 * SLAB), Class::Eviction, &[9; PAGE_SIZE], 1).unwrap();
    pool.run();
    let event = pool.client.poll_event(&mut [0; PAGE_SIZE]);
    assert_eq!(event, Some(Event::Written { token: 1, result: Err(Failure::Fenced) }));
    assert_eq!((held(&pool), pool.read(0)), (before, Ok(1)));
}

/// A server says what it likes. What is in the map, or granted by this owner, stays; and it comes to an end.
#[test]
fn a_server_that_makes_leftovers_up_gets_nothing() {
    let entry = |slab: u64, grant: Version| [slab.to_le_bytes(), grant.bits().to_le_bytes()].concat();
    let mut pool = filled(2, 3);
    let map = map_of(&pool, |_| true);
    next_owner(&mut pool, &map);
    let own = Version::new(Generation(2), 5, false);
    let old = Version::new(Generation(1), 1 << 30, false);
    let [Replica { grant, .. }, _] = map[0].1.replicas[..] else { panic!("two copies") };
    let far = pool.client.pool.map.spaces[pool.space.0].layout.total() as u64;
    let (full_up, end) = (vec![entry(2, old); HELD_MAX].concat(), SLABS_MAX as u64);
    let (none, one): (Vec<u8>, Vec<u8>) = (Vec::new(), entry(2, old));
    pool.run();
    for (what, next, payload, expected) in [
        ("granted by this owner", 0, entry(1, own), 0),
        ("of the map", 0, entry(0, grant), 0),
        ("beyond the end", 0, [entry(far, old), entry(u64::MAX, old)].concat(), 0),
        ("half a slab", 0, one[..HELD_SIZE - 1].to_vec(), 0),
        ("more than there are places", HELD_MAX as u64 - 1, full_up, 0),
        ("places that there are not", end + 1, one.clone(), 0),
        ("nothing", 0, none, 0),
        ("one that there may be", 0, one, 1),
    ] {
        pool.client.pool.look_for_leftovers_again(pool.space.0, PeerIndex(0));
        pool.client.settle(pool.now);
        let look = |role| role == Role::Held;
        let mut exchange = take(&mut pool, look);
        while exchange.peer != PeerIndex(0) {
            exchange = take(&mut pool, look);
        }
        let before = pool.client.stats().leftovers;
        let answer = (Status::Ok, Version::from_bits(next));
        pool.client.pool.held_answered(pool.space.0, PeerIndex(0), exchange.version, answer, &payload);
        assert_eq!(pool.client.stats().leftovers - before, expected, "{what}");
        assert!(pool.client.pool.map.leftovers.len() == 0, "{what}: it is asked no more");
    }
    // Back to where it began.
    pool.client.pool.held_answered(
        pool.space.0,
        PeerIndex(0),
        Version::from_bits(9),
        (Status::Ok, Version::from_bits(9)),
        &[],
    );
    assert!(pool.client.pool.map.leftovers.len() == 0);
    assert!(pool.client.pool.sessions.exchanges.find(|e| e.role == Role::Held && e.peer == PeerIndex(0)).is_none());
    pool.run();
    assert_eq!(held(&pool), [3; 2], "it has no such grant to give up");
    assert_eq!((0..3).map(|slab| pool.read(slab * SLAB)).collect::<Vec<_>>(), [Ok(1), Ok(2), Ok(3)]);
}

/// A reader changes nothing; the keeper finds what the one before it left.
#[test]
fn only_who_keeps_a_sealed_space_looks() {
    let mut pool = filled(2, 3);
    let map = map_of(&pool, |slab| slab.0 != 1);
    let spec = SpaceSpec { id: SpaceId(1), pages: 3 * SLAB, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.today = Today { generation: Generation(2), sealed: true, map };
    pool.space = pool.client.attach_reader(&spec, &pool.today).unwrap();
    pool.run();
    assert_eq!((held(&pool), pool.client.has_found_leftovers(pool.space)), (vec![3; 2], true));
    let today = Today { generation: Generation(3), ..pool.today.clone() };
    pool.client.space_seen(pool.now, pool.space.0, today, Tenure::Keeper);
    pool.client.settle(pool.now);
    pool.run();
    assert_eq!((held(&pool), pool.read(0)), (vec![2; 2], Ok(1)));
}

/// As much as it can, again and again: it comes to the end of all slots that a server can have, and begins no second
/// time.
#[test]
fn a_server_that_makes_no_end_of_it_comes_to_one() {
    let mut pool = taken_over(1);
    pool.client.pool.look_for_leftovers_again(pool.space.0, PeerIndex(0));
    let old = Version::new(Generation(1), 1 << 30, false);
    let made_up = [0u64.to_le_bytes(), old.bits().to_le_bytes()].concat().repeat(HELD_MAX);
    let mut asked = 0;
    loop {
        pool.client.settle(pool.now);
        if pool.client.pool.sessions.exchanges.find(|e| e.role == Role::Held).is_none() {
            break;
        }
        let exchange = take(&mut pool, |role| role == Role::Held);
        assert_eq!(exchange.version.bits(), (asked * HELD_MAX) as u64);
        asked += 1;
        let next = Version::from_bits((asked * HELD_MAX) as u64);
        pool.client.pool.held_answered(pool.space.0, PeerIndex(0), exchange.version, (Status::Ok, next), &made_up);
        pool.client.pool.sessions.returns[PeerIndex(0)].forget(pool.space.0);
    }
    assert_eq!(asked, SLABS_MAX / HELD_MAX + 1);
    assert!(pool.client.has_found_leftovers(pool.space));
    assert_eq!(pool.read(0), Ok(1));
}

/// An owner before this one was lent something by a server that had just begun a new life, or had forgotten this one.
#[test]
fn a_server_that_knows_nothing_any_more_is_asked_again() {
    let mut pool = taken_over(2);
    let is_looked_at = |pool: &Pool| pool.client.pool.map.spaces[pool.space.0].looked_at.has(PeerIndex(0));
    assert!(is_looked_at(&pool));
    for (status, again) in [(Status::UnknownSlab, true), (Status::NotFenced, false)] {
        pool.client.pool.look_for_leftovers_again(pool.space.0, PeerIndex(0));
        pool.client.settle(pool.now);
        let exchange = take(&mut pool, |role| role == Role::Held);
        pool.client.pool.held_answered(pool.space.0, PeerIndex(0), exchange.version, (status, Version::NEVER), &[]);
        assert_eq!(pool.client.pool.map.spaces[pool.space.0].fenced_at.has(PeerIndex(0)), !again, "it is told once");
        pool.client.settle(pool.now);
        pool.run();
        assert!(is_looked_at(&pool) && pool.client.has_found_leftovers(pool.space));
    }
    pool.client.content_lost(PeerIndex(0));
    assert!(!is_looked_at(&pool));
    pool.client.pool.look_for_leftovers_at(PeerIndex(0));
    pool.client.settle(pool.now);
    pool.run();
    assert!(is_looked_at(&pool));
}

/// Whoever was lent something while the server had forgotten this owner: it is told when it is next asked for a slab.
#[test]
fn a_server_that_is_told_again_is_looked_at_again() {
    let mut pool = taken_over(2);
    let looks =
        |pool: &Pool| pool.client.pool.map.leftovers.count(|space, peer| (space, peer) == (pool.space.0, PeerIndex(0)));
    pool.client.pool.map.spaces[pool.space.0].fenced_at.remove(PeerIndex(0));
    pool.client.pool.fence(pool.space.0, PeerIndex(0));
    let fence = take(&mut pool, |role| role == Role::Fence);
    pool.client.answered(pool.now, &fence, Status::Ok, Version::NEVER, &[]);
    assert_eq!(looks(&pool), 1);
    assert!(!pool.client.has_found_leftovers(pool.space));
    pool.client.settle(pool.now);
    pool.run();
    assert!(pool.client.has_found_leftovers(pool.space));
}

/// It was told nothing by that newer owner, who would have told those that have the slabs.
#[test]
fn a_server_that_has_nothing_of_a_space_cannot_take_it_away() {
    for has_slab in [false, true] {
        let mut pool = filled(3, 1);
        let map = map_of(&pool, |_| true);
        next_owner(&mut pool, &map);
        let copies =
            pool.client.pool.sessions.peers_of(&pool.client.pool.map.spaces[pool.space.0].slabs[SlabNo(0)].entry);
        pool.client.settle(pool.now);
        let liar = (0..3).map(PeerIndex).find(|peer| copies.has(*peer) == has_slab).unwrap();
        let fence = pool.client.pool.sessions.exchanges.find(|e| e.role == Role::Fence && e.peer == liar).unwrap();
        pool.client.pool.sessions.end_exchange(fence.id);
        let now = pool.now;
        pool.client.answered(now, &fence, Status::StaleGeneration, Version::NEVER, &[]);
        assert_eq!(pool.client.is_taken(pool.space), has_slab);
        if !has_slab {
            pool.run();
            assert_eq!((pool.read(0), pool.client.has_found_leftovers(pool.space)), (Ok(1), true));
            assert_eq!(pool.client.disbelieved(pool.space), [pool.client.pool.sessions.peers[liar].info().id]);
            assert!(
                pool.client.pool.sessions.exchanges.find(|e| e.peer == liar).is_none(),
                "it is not asked over and over"
            );
        }
    }
}
