//! Slabs that have no content any more.

use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::{SlabNo, Version};

/// Longer than a slab stays where nothing is in it, and just shorter.
const WHILE: Duration = Duration::from_millis(1100);
const NOT_YET: Duration = Duration::from_millis(900);

/// Pages of a slab: what its first page is to the next slab's.
const SLAB: u64 = 8;

/// Slabs that servers have lent, each copy counted.
fn lent(pool: &Pool) -> usize {
    pool.servers.iter().map(Server::held_slabs).sum()
}

fn given_back(pool: &Pool) -> u64 {
    pool.client.stats().slabs_given_back
}

fn is_hole(pool: &Pool, slab: u64) -> bool {
    pool.client.page_run(pool.space, PageNo(slab * SLAB), SLAB) == PageRun { pages: SLAB, hole: true }
}

#[test]
fn a_slab_without_content_goes_back_and_comes_anew() {
    let mut pool = Pool::new(2, 2, 4);
    assert_eq!([pool.write(0, 1), pool.write(3, 1), pool.write(SLAB, 1)], [Ok(()); 3]);
    pool.trim(0);
    pool.pass(WHILE);
    assert_eq!((lent(&pool), given_back(&pool)), (4, 0), "one page has content");
    pool.trim(3);
    assert!(is_hole(&pool, 0));
    pool.pass(NOT_YET);
    assert_eq!(lent(&pool), 4);
    pool.pass(WHILE - NOT_YET);
    assert_eq!((lent(&pool), given_back(&pool), pool.client.stats().copies_left), (2, 1, 0));
    assert!(is_hole(&pool, 0) && !pool.client.is_giving_back() && pool.client.is_idle());
    assert_eq!([pool.read(0), pool.read(3), pool.read(SLAB)], [Ok(0), Ok(0), Ok(1)]);
    assert_eq!(pool.write(3, 2), Ok(()));
    assert_eq!((pool.read(0), pool.read(3), lent(&pool)), (Ok(0), Ok(2), 4));
}

/// Who trims and writes again at once pays nothing, and what was emptied again has its time from then on.
#[test]
fn a_slab_that_is_written_again_stays() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.trim(0);
    pool.pass(NOT_YET / 2);
    assert_eq!(pool.write(1, 1), Ok(()));
    pool.trim(1);
    pool.pass(NOT_YET);
    assert_eq!(lent(&pool), 1);
    pool.pass(WHILE - NOT_YET);
    assert_eq!(lent(&pool), 0);
    assert_eq!(pool.write(0, 2), Ok(()));
    pool.trim(0);
    assert_eq!(pool.write(0, 3), Ok(()));
    pool.pass(WHILE);
    assert_eq!((pool.read(0), lent(&pool), given_back(&pool)), (Ok(3), 1, 1));
    pool.client.pool.config.give_back_after = None;
    pool.trim(0);
    pool.pass(WHILE);
    assert_eq!(lent(&pool), 1, "only when it is asked to");
}

/// What the last owner left empty is given back by the next one.
#[test]
fn a_new_owner_counts_what_there_is() {
    let mut pool = Pool::new(2, 2, 8);
    for slab in 0..8 {
        assert_eq!(pool.write(slab * SLAB, 1), Ok(()));
    }
    (1..8).for_each(|slab| pool.trim(slab * SLAB));
    let map: Vec<(SlabNo, MapEntry)> = (0..)
        .map(SlabNo)
        .zip(pool.client.pool.map.spaces[SpaceIndex(0)].slabs.iter().map(|slab| slab.entry.clone()))
        .collect();
    pool.client.space_taken(SpaceIndex(0));
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.space = pool.client.attach(&spec, Generation(2), &map).unwrap();
    pool.run();
    assert_eq!(lent(&pool), 16);
    pool.pass(WHILE);
    assert_eq!((lent(&pool), given_back(&pool)), (2, 7));
    assert_eq!([pool.read(0), pool.read(SLAB)], [Ok(1), Ok(0)]);
}

/// Servers go on keeping the room of a reservation.
#[test]
fn what_is_reserved_stays_reserved() {
    let mut pool = Pool::new(2, 2, 3);
    let spec = SpaceSpec { id: SpaceId(2), pages: 64, copies: 2, reserve: 2, key: [3; KEY_SIZE] };
    let other = std::mem::replace(&mut pool.space, SpaceRef(SpaceIndex(0)));
    pool.space = pool.client.attach(&spec, Generation(1), &[]).unwrap();
    pool.pass(Duration::from_millis(100));
    assert_eq!([pool.write(0, 1), pool.write(SLAB, 1)], [Ok(()); 2]);
    assert_eq!(pool.client.redundancy.room_kept(&pool.client.pool, pool.space.0, PeerIndex(0)), 0);
    [0, SLAB].into_iter().for_each(|page| pool.trim(page));
    pool.pass(WHILE);
    assert_eq!((lent(&pool), pool.client.redundancy.room_kept(&pool.client.pool, pool.space.0, PeerIndex(0))), (0, 2));
    let kept = std::mem::replace(&mut pool.space, other);
    let took: Vec<bool> = (0..3).map(|slab| pool.write(slab * SLAB, 1).is_ok()).collect();
    assert_eq!(took, [true, false, false]);
    pool.space = kept;
    assert_eq!([pool.write(0, 2), pool.write(SLAB, 2)], [Ok(()); 2]);
}

/// While the control plane is away a slab or two may be on their way, and writes to these wait; to all others they do not.
#[test]
fn little_waits_for_a_control_plane_that_is_away() {
    let mut pool = Pool::new(1, 1, 8);
    for slab in 0..2 {
        assert_eq!(pool.write(slab * SLAB, 1), Ok(()));
    }
    pool.trim(0);
    pool.no_control = true;
    pool.pass(WHILE);
    assert!(pool.client.is_giving_back() && is_hole(&pool, 0));
    pool.trim(SLAB);
    pool.pass(WHILE);
    assert_eq!(pool.write(SLAB, 2), Ok(()));
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[3; PAGE_SIZE], 1).unwrap();
    pool.pass(WHILE);
    assert!(!pool.client.has_event());
    assert_eq!(lent(&pool), 2);
    pool.no_control = false;
    pool.pass(WHILE);
    pool.expect_written(1);
    assert_eq!(([pool.read(0), pool.read(SLAB)], lent(&pool), given_back(&pool)), ([Ok(3), Ok(2)], 2, 1));
}

/// A server that is away would keep a slab that nobody knows of any more.
#[test]
fn a_server_that_is_away_is_waited_for() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!([pool.write(0, 1), pool.write(SLAB, 1)], [Ok(()); 2]);
    pool.trim(0);
    pool.deaf = vec![0];
    // It is missed by what asks something of it.
    pool.begin_write(SLAB, 2);
    pool.pass(4 * WHILE);
    assert_eq!(given_back(&pool), 0);
    pool.deaf = Vec::new();
    pool.pass(4 * WHILE);
    pool.expect_written(1);
    assert_eq!((lent(&pool), given_back(&pool)), (1, 1));
}

/// The life of a slab begins when the one before it ends: what waits for the map is of the new one.
#[test]
fn servers_are_told_where_a_life_begins() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    assert_eq!(pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].epoch, Version::NEVER);
    let late = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].versions[0];
    assert!(pool.client.discard_slab(pool.now, pool.space, SlabNo(0)));
    let epoch = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].epoch;
    pool.client.write(pool.now, pool.space, PageNo(1), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
    pool.run();
    pool.expect_written(1);
    let state = &pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)];
    assert!(late < epoch && epoch < state.versions[1] && state.versions[1] < state.entry.replicas[0].grant);
    assert_eq!(state.versions[0], Version::NEVER);
    assert_eq!(pool.servers[0].write_late(SpaceId(1), PageNo(0), Generation(1), late), Status::UnknownSlab);
    assert_eq!([pool.read(0), pool.read(1)], [Ok(0), Ok(2)]);
}
