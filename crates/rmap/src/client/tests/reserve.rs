//! Room that is kept for one space while another takes what it can get.

use super::super::exchange::Role;
use super::*;
use crate::units::Version;

/// Longer than it takes to notice what a server keeps, and to ask others.
const WHILE: Duration = Duration::from_secs(12);

/// Pages of a slab: what its first page is to the next slab's.
const SLAB: u64 = 8;

/// A pool in which another space of the same client is kept room for.
fn reserving(servers: usize, slabs: usize, reserve: usize) -> (Pool, SpaceRef) {
    let mut pool = Pool::new(servers, 2, slabs);
    let spec = SpaceSpec { id: SpaceId(2), pages: 64, copies: 2, reserve, key: [3; KEY_SIZE] };
    let space = pool.client.attach(&spec, Generation(1), &[]).unwrap();
    pool.pass(Duration::from_millis(100));
    (pool, space)
}

/// How many slabs of a space can be written.
fn fill(pool: &mut Pool, space: SpaceRef) -> usize {
    let other = std::mem::replace(&mut pool.space, space);
    let written = (0..8).take_while(|slab| pool.write(slab * SLAB, 1).is_ok()).count();
    pool.space = other;
    written
}

#[test]
fn what_is_reserved_stays_there_for_its_space() {
    let (mut pool, kept) = reserving(3, 4, 3);
    assert_eq!(pool.client.reserved(kept), Reserved { wanted: 6, kept: 6, is_settled: true });
    let other = pool.space;
    fill(&mut pool, other);
    assert_eq!(fill(&mut pool, kept), 3);
    assert_eq!(pool.client.in_sync(kept), (3, 3), "both copies have room");
}

/// The last room of a server whose memory is getting short is for those that it was promised to.
#[test]
fn promises_are_kept_when_memory_is_short() {
    let (mut pool, kept) = reserving(2, 4, 2);
    pool.servers.iter_mut().for_each(|server| server.set_pressure(crate::wire::message::Pressure::Yellow));
    pool.pass(WHILE);
    let other = pool.space;
    assert_eq!([fill(&mut pool, other), fill(&mut pool, kept)], [0, 2]);
}

#[test]
fn what_cannot_be_reserved_is_said() {
    let (mut pool, kept) = reserving(2, 3, 5);
    assert_eq!(pool.client.reserved(kept), Reserved { wanted: 10, kept: 6, is_settled: true });
    pool.deaf = vec![0];
    pool.pass(WHILE);
    assert_eq!(pool.client.reserved(kept).kept, 3, "a silent server keeps nothing that one could count on");
    let too_much = SpaceSpec { id: SpaceId(2), pages: 64, copies: 2, reserve: 9, key: [3; KEY_SIZE] };
    let error = ClientError::Reserve { slabs: 9, max: 8 };
    assert_eq!(pool.client.attach(&too_much, Generation(1), &[]), Err(error));
}

/// A server that wants to be rid of everything keeps nothing, and one that is silent does not count: others do.
#[test]
fn others_keep_what_a_server_does_not() {
    for drains in [true, false] {
        let (mut pool, kept) = reserving(3, 4, 2);
        assert_eq!(pool.client.reserved(kept).kept, 4);
        if drains {
            pool.servers[0].begin_drain();
        } else {
            pool.deaf = vec![0];
        }
        pool.pass(WHILE);
        assert_eq!(pool.client.reserved(kept), Reserved { wanted: 4, kept: 4, is_settled: true });
        let reserved = |server: &Server| server.spaces().iter().map(|space| space.reserved).sum::<u32>();
        assert_eq!([reserved(&pool.servers[1]), reserved(&pool.servers[2])], [2, 2]);
        pool.deaf.clear();
        pool.pass(WHILE);
        assert_eq!(pool.servers.iter().map(reserved).sum::<u32>(), 4, "no more than was asked for");
    }
}

/// The next owner takes over what the last one reserved, and who removes the space gives it back.
#[test]
fn a_reservation_is_the_spaces_and_ends_with_it() {
    let (mut pool, _) = reserving(2, 4, 3);
    let spec = SpaceSpec { id: SpaceId(2), pages: 64, copies: 2, reserve: 3, key: [3; KEY_SIZE] };
    let next = pool.client.attach(&spec, Generation(2), &[]).unwrap();
    pool.pass(Duration::from_secs(2));
    assert_eq!(pool.client.reserved(next).kept, 6);
    let other = pool.space;
    assert_eq!(fill(&mut pool, other), 1);
    assert_eq!(pool.client.give_back(pool.now, next), 0);
    pool.pass(Duration::from_secs(2));
    assert_eq!(pool.client.reserved(next), Reserved { wanted: 0, kept: 0, is_settled: true });
    assert_eq!(fill(&mut pool, other), 4);
}

/// It has no room for one more space: that does not change within a round trip.
#[test]
fn a_server_that_does_not_let_an_owner_in_is_asked_again_after_a_while() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let spec = SpaceSpec { id: SpaceId(2), pages: 64, copies: 1, reserve: 2, key: [3; KEY_SIZE] };
    let space = pool.client.attach(&spec, Generation(1), &[]).unwrap();
    let now = pool.now;
    pool.client.on_timeout(now);
    let fence = pool.client.pool.sessions.exchanges.find(|e| e.role == Role::Fence).expect("it reserves");
    pool.client.pool.sessions.end_exchange(fence.id);
    pool.client.answered(now, &fence, Status::Full, Version::NEVER, &[]);
    pool.client.on_timeout(now);
    assert!(pool.client.pool.sessions.exchanges.find(|e| e.role == Role::Fence).is_none());
    assert_eq!(pool.client.reserved(space), Reserved { wanted: 2, kept: 0, is_settled: true });
    pool.pass(WHILE);
    assert_eq!(pool.client.reserved(space), Reserved { wanted: 2, kept: 2, is_settled: true });
}
