//! Slabs on their way back to servers, and servers that let nobody in.

use super::super::exchange::Role;
use super::super::returns::Return;
use super::lies::take;
use super::many::{SLAB, filled};
use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::{SlabNo, Version};

/// A server answers that it has no room for one more space, as often as it is told of this one.
fn refuse_fences(pool: &mut Pool, server: PeerIndex) {
    while pool.client.pool.sessions.exchanges.find(|e| e.role == Role::Fence && e.peer == server).is_some() {
        let exchange = take(pool, |role| role == Role::Fence);
        assert_eq!(exchange.peer, server);
        let now = pool.now;
        pool.client.answered(now, &exchange, Status::Full, Version::NEVER, &[]);
        pool.client.settle(now);
    }
}

/// A server that knows as many spaces as it can, each with something there, refuses one more: another server gets the slab.
#[test]
fn a_server_that_lets_nobody_in_is_passed_over() {
    let mut pool = Pool::new(2, 1, 4);
    pool.deaf = vec![0, 1];
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[1; PAGE_SIZE], 1).unwrap();
    let asked = pool.client.pool.sessions.exchanges.find(|e| e.role == Role::Fence).expect("a fence comes first").peer;
    pool.client.pool.sessions.release(SpaceIndex(0), SlabNo(1), asked, Version::from_bits(77));
    refuse_fences(&mut pool, asked);
    assert!(!pool.client.pool.map.spaces[SpaceIndex(0)].fenced_at.has(asked));
    assert!(pool.client.pool.sessions.returns[asked].len() == 0, "it has nothing of a space that it does not know");
    pool.deaf = Vec::new();
    pool.run();
    pool.expect_written(1);
    let entry = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.clone();
    assert_eq!(pool.client.pool.sessions.peers_of(&entry).iter().collect::<Vec<_>>(), [PeerIndex(1 - asked.0)]);
    assert_eq!(pool.read(0), Ok(1));
}

/// The same of a server that is to have a new copy: the slab looks for another one, and stays with the copy that it has.
#[test]
fn a_new_copy_goes_where_it_is_let_in() {
    let mut pool = filled(4, 1);
    let entry = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.clone();
    let holders: Vec<PeerIndex> = pool.client.pool.sessions.peers_of(&entry).iter().collect();
    let others: Vec<PeerIndex> = (0..4).map(PeerIndex).filter(|server| !holders.contains(server)).collect();
    // What is not known to be let in is asked for a fence first.
    others.iter().for_each(|other| pool.client.pool.map.spaces[SpaceIndex(0)].fenced_at.remove(*other));
    pool.deaf = others.iter().chain(&holders[..1]).map(|peer| peer.0).collect();
    pool.client.redundancy.copy_lost(
        &mut pool.client.pool,
        &mut pool.client.pages,
        &mut pool.client.parity,
        SpaceIndex(0),
        SlabNo(0),
        holders[0],
    );
    pool.client.settle(pool.now);
    for _ in 0..20 {
        pool.step();
    }
    let target =
        pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].repair.as_ref().expect("a copy is missing").peer;
    assert!(others.contains(&target));
    refuse_fences(&mut pool, target);
    pool.deaf = Vec::new();
    pool.pass(Duration::from_millis(100));
    pool.run();
    assert_eq!(pool.client.in_sync(pool.space), (1, 1));
    let entry = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.clone();
    assert!(!pool.client.pool.sessions.peers_of(&entry).has(target), "it lets nobody in");
    assert_eq!(pool.read(0), Ok(1));
}

/// Somebody else keeps a sealed space, and the client has not seen how it is now: its pending release waits for that,
/// and holds up those of others.
#[test]
fn pending_releases_of_a_space_that_changed_hands_hold_up_no_other() {
    let mut pool = filled(2, 2);
    let grant_at = |pool: &Pool, slab: SlabNo, server: usize| {
        let replicas = &pool.client.pool.map.spaces[SpaceIndex(0)].slabs[slab].entry.replicas;
        replicas.iter().find(|replica| replica.server == ServerId(server as u32)).expect("two copies").grant
    };
    let pending = grant_at(&pool, SlabNo(1), 0);
    let other = SpaceIndex(pool.client.pool.map.spaces.len());
    let spec = SpaceSpec { id: SpaceId(2), pages: 2 * SLAB, copies: 1, reserve: 0, key: [3; KEY_SIZE] };
    pool.today = Today { generation: Generation(1), sealed: true, map: Vec::new() };
    pool.client.attach_reader(&spec, &pool.today).unwrap();
    pool.no_control = true;
    pool.client.is_outdated(other);
    assert!(pool.client.pool.map.spaces[other].is_stale);
    let stale = Version::from_bits(99);
    pool.client.pool.sessions.release(other, SlabNo(0), PeerIndex(0), stale);
    pool.client.pool.sessions.release(SpaceIndex(0), SlabNo(1), PeerIndex(0), pending);
    assert_eq!(pool.servers[0].held_slabs(), 2);
    pool.client.settle(pool.now);
    while pool.step() {}
    assert_eq!(pool.servers[0].held_slabs(), 1, "the other space's is back");
    let left = &pool.client.pool.sessions.returns[PeerIndex(0)];
    assert_eq!((left.len(), left.next()), (1, Some(Return { space: other, slab: SlabNo(0), grant: stale })));
    // It is seen, and the server is told: it never had it, and that is an answer too.
    pool.no_control = false;
    pool.pass(Duration::from_millis(1500));
    assert!(!pool.client.pool.map.spaces[other].is_stale);
    assert!(!pool.client.pool.sessions.is_returning());
}
