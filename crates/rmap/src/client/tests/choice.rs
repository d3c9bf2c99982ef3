//! Which server is asked, in which order, and how much at a time.

use super::*;
use crate::client::exchange::{Exchange, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::SEALED_SIZE;

/// What was sent, without any server having heard of it.
fn under_way(pool: &mut Pool) -> Vec<Exchange> {
    let mut out = Vec::new();
    while pool.client.poll_transmit(pool.now, &mut out).is_some() {}
    let ids: Vec<_> = pool.client.pool.sessions.peers.iter().flat_map(|peer| peer.in_flight()).copied().collect();
    ids.into_iter().map(|id| *pool.client.pool.sessions.exchanges.get(id).unwrap()).collect()
}

/// Whoever shares a switch or a power supply is in one zone: it does not have both copies of anything.
#[test]
fn copies_are_in_different_zones() {
    let mut pool = Pool::of(5, 2, 64, 8 * 40, None);
    for (peer, zone) in pool.client.pool.sessions.peers.iter_mut().zip([1, 1, 1, 1, 2]) {
        peer.set_zone(zone);
    }
    (0..40).for_each(|slab| assert_eq!(pool.write(8 * slab, 1), Ok(())));
    assert!((0..40).all(|slab| pool.holders(SlabNo(slab)).contains(&4)), "the only server of its zone");
    let used = (0..4).filter(|server| (0..40).any(|slab| pool.holders(SlabNo(slab)).contains(server))).count();
    assert_eq!(used, 4, "two choices spread what is left to choose");
}

/// By its round trips; where it is away, the other.
#[test]
fn the_nearest_copy_is_read() {
    for near in 0..2 {
        let mut pool = Pool::new(2, 2, 8);
        assert_eq!(pool.write(0, 7), Ok(()));
        for (index, peer) in pool.client.pool.sessions.peers.iter_mut().enumerate() {
            let trip = Duration::from_micros(if index == near { 100 } else { 200 });
            peer.usually_takes(trip);
        }
        pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 1).unwrap();
        let asked: Vec<usize> = under_way(&mut pool).iter().map(|exchange| exchange.peer.0).collect();
        assert_eq!(asked, [near]);
    }
}

/// Long before its server counts as silent.
#[test]
fn a_read_that_takes_long_is_asked_of_another_copy() {
    let mut pool = Pool::new(2, 2, 8);
    assert_eq!(pool.write(0, 7), Ok(()));
    for peer in pool.client.pool.sessions.peers.iter_mut() {
        peer.usually_takes(Duration::from_micros(100));
    }
    pool.deaf = vec![0, 1];
    pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 1).unwrap();
    pool.step();
    let reads = |exchange: &Exchange| matches!(exchange.role, Role::Read { .. });
    let first = pool.client.pool.sessions.exchanges.find(reads).unwrap().peer;
    pool.deaf = vec![first.0];
    pool.pass(Duration::from_millis(3));
    let mut page = [0; PAGE_SIZE];
    assert!(matches!(pool.client.poll_event(&mut page), Some(Event::Read { token: 1, result: Ok(()) })));
    assert_eq!((page[0], pool.client.stats().hedged), (7, 1));
    assert!(pool.client.pool.sessions.peers[first].is_up(), "it is only late");
}

/// What somebody waits for goes first, however late it comes; then what somebody will want, what has to go, and copies.
#[test]
fn classes_go_in_order() {
    let mut pool = Pool::new(1, 1, 8);
    (0..4).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
    for (page, class) in (0..).zip(Class::ALL.into_iter().rev()) {
        pool.client.read(pool.now, pool.space, PageNo(page), class, page).unwrap();
    }
    let mut out = Vec::new();
    for expected in Class::ALL {
        let before = pool.client.pool.sessions.peers[PeerIndex(0)].in_flight().len();
        pool.client.poll_transmit(pool.now, &mut out).unwrap();
        assert_eq!(pool.client.pool.sessions.peers[PeerIndex(0)].in_flight().len(), before + 1);
        let id = *pool.client.pool.sessions.peers[PeerIndex(0)].in_flight().back().unwrap();
        assert_eq!(pool.client.pool.sessions.exchanges.get(id).unwrap().class, expected);
    }
}

/// A server says in each reply how many writes it has room for. One is always sent: its answer may say more.
#[test]
fn writes_wait_for_credits() {
    for (credits, sent) in [(2, 2), (0, 1)] {
        let mut pool = Pool::new(1, 1, 8);
        assert_eq!(pool.write(0, 1), Ok(()));
        pool.client.pool.sessions.peers[PeerIndex(0)].set_write_credits(credits);
        for page in 1..6 {
            pool.client.write(pool.now, pool.space, PageNo(page), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
        }
        assert_eq!(under_way(&mut pool).len(), sent, "with {credits} credits");
        // Nobody has heard them: they are sent again.
        pool.pass(SILENCE);
        pool.expect_written(5);
    }
}

/// More answers at once than the network has room for would be lost together.
#[test]
fn reads_wait_for_the_window() {
    const WINDOW: usize = 16;
    let mut pool = Pool::of(2, 1, 64, 512, None);
    (0..100).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
    pool.client.pool.sessions.exchanges.window = WINDOW;
    for page in 0..100 {
        pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, page).unwrap();
    }
    assert_eq!(under_way(&mut pool).len(), WINDOW, "of two servers together");
    pool.pass(SILENCE);
    let read = std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE]));
    assert_eq!(read.filter(|event| matches!(event, Event::Read { result: Ok(()), .. })).count(), 100);
}

/// What a server does not answer is not asked all over again: one request, after longer and longer.
#[test]
fn one_request_is_repeated_at_a_time() {
    let mut pool = Pool::new(1, 1, 8);
    pool.client.pool.config.fail_after = Duration::from_secs(1);
    (0..20).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
    pool.deaf = vec![0];
    for page in 0..20 {
        pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, page).unwrap();
    }
    while pool.step() {}
    let before = pool.client.stats().resent_timeout;
    // 1 ms and a little, twice as long each time, and 8 ms at most: each would be repeated four times in 8 ms otherwise.
    for (after_ms, repeated) in [(8, 2..=4), (32, 5..=8)] {
        pool.pass(Duration::from_millis(after_ms));
        let resent = pool.client.stats().resent_timeout - before;
        assert!(repeated.contains(&resent), "{resent} in {after_ms} ms");
    }
}

/// A part of the link, as long as nobody waits for copies: demand must not feel them.
#[test]
fn copies_leave_room_on_the_link() {
    const LINK: u64 = 40_000_000;
    const SLABS: usize = 400;
    let mut pool = Pool::of(2, 1, 512, 8 * SLABS as u64, None);
    for page in 0..8 * SLABS as u64 {
        assert_eq!(pool.write(page, 1), Ok(()));
    }
    pool.client.pool.config.link_bytes_per_second = LINK;
    assert_eq!(pool.client.pool.rebuild_rate(&pool.client.parity), LINK / 100 * 30);
    // Pages go through the client.
    pool.client.pool.sessions.peers.iter_mut().for_each(Peer::distrust);
    pool.client.pool.map.spaces[SpaceIndex(0)].copies = 2;
    pool.client.pool.map.mark_all();
    pool.client.settle(pool.now);
    let (began, before) = (pool.now, pool.client.stats().pages_copied);
    pool.pass(Duration::from_millis(200));
    let copied = (pool.client.stats().pages_copied - before) * SEALED_SIZE as u64;
    let share = copied * 1_000_000_000 / pool.now.since(began).as_nanos() as u64;
    assert!(share > LINK / 100 * 25, "{share} bytes a second: it does not use its part");
    assert!(share < LINK / 100 * 35, "{share} bytes a second of {LINK}");
}

/// All clients of a server lose it at the same moment, and have the same servers left.
#[test]
fn copies_are_not_restored_by_all_at_once() {
    const SPREAD: Duration = Duration::from_millis(500);
    let began: Vec<Duration> = (0..8)
        .map(|client| {
            let mut pool = Pool::new(3, 2, 8);
            pool.client.pool.config.rebuild_spread = SPREAD;
            // No two draw the same.
            for _ in 0..client {
                pool.client.pool.entropy.next_u64();
            }
            assert_eq!(pool.write(0, 1), Ok(()));
            pool.deaf = vec![pool.holders(SlabNo(0))[0]];
            pool.begin_write(0, 2);
            while pool.client.in_sync(pool.space) != (0, 1) {
                pool.pass(Duration::from_millis(1));
            }
            pool.expect_written(1);
            let lost_at = pool.now;
            while pool.client.redundancy.repairs_running(&pool.client.pool) == 0 {
                pool.pass(Duration::from_millis(1));
                assert!(pool.now.since(lost_at) <= SPREAD);
            }
            let began = pool.now.since(lost_at);
            pool.pass(Duration::from_secs(1));
            assert_eq!(pool.client.in_sync(pool.space), (1, 1));
            began
        })
        .collect();
    let (first, last) = (began.iter().min().unwrap(), began.iter().max().unwrap());
    assert!(*last >= SPREAD / 2 && *first < SPREAD / 2, "{began:?}");
}
