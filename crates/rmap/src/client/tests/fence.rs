//! Servers that do not know who asks them: they were away when a reader of a sealed space began.

use super::super::exchange::{Exchange, Role};
use super::many::filled;
use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::{SlabNo, Version};

/// More than can be under way.
const MANY_READS: usize = 300;

/// A server answers a request that is under way so.
fn answer(pool: &mut Pool, status: Status, is_it: impl Fn(&Exchange) -> bool) -> Exchange {
    let exchange = pool.client.pool.sessions.exchanges.find(|e| is_it(e)).expect("it was asked");
    pool.client.pool.sessions.end_exchange(exchange.id);
    let now = pool.now;
    pool.client.answered(now, &exchange, status, Version::NEVER, &[]);
    pool.client.settle(now);
    exchange
}

fn reads(exchange: &Exchange) -> bool {
    matches!(exchange.role, Role::Read { .. })
}

/// Until something is asked that fits.
fn until(pool: &mut Pool, is_it: impl Fn(&Exchange) -> bool) {
    for _ in 0..1000 {
        if pool.client.pool.sessions.exchanges.find(&is_it).is_some() {
            return;
        }
        if !pool.step() {
            pool.now = pool.now + Duration::from_millis(1);
            pool.time_passes();
        }
    }
    panic!("it is not asked");
}

fn begin_read(pool: &mut Pool, page: u64) {
    pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, 2).unwrap();
}

fn expect_read(pool: &mut Pool, byte: u8) {
    let mut content = [0; PAGE_SIZE];
    assert_eq!(pool.client.poll_event(&mut content), Some(Event::Read { token: 2, result: Ok(()) }));
    assert_eq!(content, [byte; PAGE_SIZE]);
}

fn assert_nothing_failed(pool: &Pool) {
    let slabs = &pool.client.pool.map.spaces[pool.space.0].slabs;
    assert!(slabs.iter().all(|slab| slab.failed.is_empty()) && pool.client.stats().slabs_lost == 0);
    assert!(pool.client.pool.map.spaces[pool.space.0].unknown_at.is_empty());
}

/// A page each in two slabs, written and sealed by somebody else, with so many copies.
fn sealed(servers: usize, copies: usize) -> Pool {
    let mut pool = Pool::new(servers, copies, 4);
    (0..16).for_each(|page| assert_eq!(pool.write(page, page as u8 + 1), Ok(())));
    read_by_another(&mut pool);
    pool
}

/// Who sealed the space sees to nothing any more, and another client reads it.
fn read_by_another(pool: &mut Pool) {
    let entries = pool.client.pool.map.spaces[SpaceIndex(0)].slabs.iter().map(|slab| slab.entry.clone());
    let map = (0..).map(SlabNo).zip(entries).filter(|(_, entry)| entry.revision > 0 || !entry.replicas.is_empty());
    pool.today = Today { generation: Generation(2), sealed: true, map: map.collect() };
    let copies = pool.client.pool.map.spaces[SpaceIndex(0)].copies;
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies, reserve: 0, key: [2; KEY_SIZE] };
    pool.client.space_taken(SpaceIndex(0));
    pool.space = pool.client.attach_reader(&spec, &pool.today).unwrap();
}

/// The only copy: it is not given up, and read.
#[test]
fn a_server_that_does_not_know_a_reader_is_told_and_asked_again() {
    let mut pool = sealed(1, 1);
    assert_eq!(pool.read(0), Ok(1));
    begin_read(&mut pool, 0);
    begin_read(&mut pool, 1);
    answer(&mut pool, Status::NotFenced, reads);
    assert!(pool.client.pool.sessions.exchanges.find(reads).is_none(), "nothing is asked before it knows");
    begin_read(&mut pool, 2);
    assert!(pool.client.pool.sessions.exchanges.find(reads).is_none());
    pool.run();
    [1, 2, 3].into_iter().for_each(|byte| expect_read(&mut pool, byte));
    assert_nothing_failed(&pool);
    assert_eq!((pool.client.stats().notified_again, pool.client.is_idle()), (1, true));
}

/// It knows the reader whenever it is asked whether it does, and never else.
#[test]
fn a_server_that_never_knows_a_reader_is_not_relied_on() {
    let mut pool = sealed(1, 1);
    assert_eq!(pool.read(0), Ok(1));
    begin_read(&mut pool, 0);
    let mut asked = 0;
    for _ in 0..100 {
        if pool.client.pool.sessions.exchanges.find(reads).is_some() {
            answer(&mut pool, Status::NotFenced, reads);
            asked += 1;
        }
        pool.step();
    }
    assert_eq!(asked, 2);
    assert!(
        pool.client.pool.map.spaces[pool.space.0].slabs[SlabNo(0)].failed.has(PeerIndex(0)) && !pool.client.has_event()
    );
}

/// Nor is one that has no room for the space: it has nothing of it.
#[test]
fn a_server_that_lets_no_reader_in_has_no_copy() {
    let mut pool = sealed(1, 1);
    assert_eq!(pool.read(0), Ok(1));
    begin_read(&mut pool, 0);
    answer(&mut pool, Status::NotFenced, reads);
    answer(&mut pool, Status::Full, |e| e.role == Role::Fence);
    let slabs = &pool.client.pool.map.spaces[pool.space.0].slabs;
    assert!(
        slabs[SlabNo(0)].failed.has(PeerIndex(0))
            && slabs[SlabNo(1)].failed.has(PeerIndex(0))
            && !pool.client.has_event()
    );
}

/// It falls silent before it has been told, and more is read than can be under way. Whoever asks others has a slot all the same.
#[test]
fn a_server_that_is_away_is_told_when_it_is_back() {
    let mut pool = sealed(1, 1);
    pool.client.pool.config.error_after = None;
    assert_eq!(pool.read(0), Ok(1));
    begin_read(&mut pool, 0);
    pool.deaf = vec![0];
    answer(&mut pool, Status::NotFenced, reads);
    // While it is not known to be silent, and after that.
    (0..100).for_each(|_| begin_read(&mut pool, 0));
    pool.pass(3 * SILENCE);
    assert!(pool.client.pool.sessions.peers[PeerIndex(0)].is_down() && !pool.client.has_event());
    (0..MANY_READS - 101).for_each(|_| begin_read(&mut pool, 0));
    assert!(pool.client.pages.ops.has_room());
    pool.deaf.clear();
    // What has ended has its slot until it is told.
    let mut left = MANY_READS;
    for _ in 0..MANY_READS {
        pool.pass(Duration::from_millis(20));
        while pool.client.has_event() {
            expect_read(&mut pool, 1);
            left -= 1;
        }
    }
    assert_eq!(left, 0);
    assert_nothing_failed(&pool);
}

/// That it does not know the reader says nothing of its copy.
#[test]
fn a_copy_that_was_away_when_a_reader_began_is_read() {
    let mut pool = Pool::new(2, 2, 4);
    (0..8).for_each(|page| assert_eq!(pool.write(page, page as u8 + 1), Ok(())));
    pool.deaf = vec![0];
    read_by_another(&mut pool);
    pool.pass(2 * SILENCE);
    assert_eq!(pool.read(0), Ok(1));
    pool.deaf = Vec::new();
    pool.pass(Duration::from_secs(2));
    assert!(pool.client.pool.sessions.peers.iter().all(Peer::is_up));
    pool.deaf = vec![1];
    begin_read(&mut pool, 3);
    pool.pass(Duration::from_secs(1));
    expect_read(&mut pool, 4);
    assert_nothing_failed(&pool);
    assert!(pool.client.stats().notified_again > 0);
}

/// While a reader opens it.
#[test]
fn versions_are_listed_again_when_the_reader_is_known() {
    for times in 1..3 {
        let mut pool = sealed(2, 2);
        let lists = |e: &Exchange| e.role == Role::Versions && e.peer == PeerIndex(1);
        begin_read(&mut pool, 0);
        for _ in 0..times {
            until(&mut pool, lists);
            answer(&mut pool, Status::NotFenced, lists);
        }
        pool.run();
        expect_read(&mut pool, 1);
        let failed = pool.client.pool.map.spaces[pool.space.0].slabs.iter().any(|slab| slab.failed.has(PeerIndex(1)));
        assert_eq!(failed, times == 2, "{times}");
    }
}

/// Of a group with parity: one that is put together, and copies that are asked whether they are those of the map.
#[test]
fn what_is_put_together_is_asked_for_again() {
    let mut pool = cold::cold(6);
    let node = cold::holders(&pool)[0];
    read_by_another(&mut pool);
    pool.run();
    pool.deaf = vec![node];
    pool.pass(2 * SILENCE);
    pool.no_control = true;
    begin_read(&mut pool, 0);
    let strips = |e: &Exchange| matches!(e.role, Role::Strip { .. });
    until(&mut pool, strips);
    answer(&mut pool, Status::NotFenced, strips);
    pool.pass(SILENCE);
    expect_read(&mut pool, 1);
    assert!(pool.client.stats().notified_again == 1 && pool.client.stats().degraded > 0);
    assert_nothing_failed(&pool);
}

#[test]
fn a_copy_that_is_checked_is_asked_again() {
    let mut pool = cold::cold(6);
    read_by_another(&mut pool);
    let checks = |e: &Exchange| e.role == Role::Check;
    until(&mut pool, checks);
    let exchange = answer(&mut pool, Status::NotFenced, checks);
    assert!(pool.client.pool.sessions.exchanges.find(|e| checks(e) && e.peer == exchange.peer).is_none());
    pool.pass(SILENCE);
    let slab = pool.client.pool.map.slab_of(exchange.page).unwrap();
    assert!(pool.client.pool.map.spaces[pool.space.0].slabs[slab].checked.has(exchange.peer));
    cold::assert_right(&mut pool, &[]);
    assert_nothing_failed(&pool);
}

/// An owner tells each server before it counts on a copy there. One that does not know it then has forgotten more than that.
#[test]
fn an_owner_gives_such_a_copy_up() {
    let mut pool = filled(3, 1);
    let entry = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.clone();
    let one = pool.client.pool.sessions.peers_of(&entry).iter().next().unwrap();
    pool.begin_write_late(0, 7);
    answer(&mut pool, Status::NotFenced, |e| e.peer == one && matches!(e.role, Role::Write { .. }));
    assert!(pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].failed.has(one));
    pool.pass(Duration::from_secs(1));
    pool.expect_written(1);
    assert_eq!((pool.client.in_sync(pool.space), pool.client.stats().copies_left), ((1, 1), 1));
    assert_eq!((pool.read(0), pool.client.stats().notified_again), (Ok(7), 0));
}

/// A control plane that was restored from a backup gives a generation again. Without the owners' numbers the second one would be
/// told that its page is written, and read the first one's: both are the first write of the same generation.
#[test]
fn a_generation_that_is_given_twice_has_one_owner() {
    let mut pool = Pool::new(2, 2, 4);
    assert_eq!([pool.write(0, 1), pool.write(1, 2)], [Ok(()); 2]);
    let before = &pool.client.pool.map.spaces[pool.space.0];
    let spec = SpaceSpec { id: before.id, pages: before.pages, copies: before.copies, reserve: 0, key: [2; KEY_SIZE] };
    let map = vec![(SlabNo(0), before.slabs[SlabNo(0)].entry.clone())];
    let first = std::mem::replace(&mut pool.space, SpaceRef(SpaceIndex(1)));
    assert_eq!(pool.client.attach(&spec, Generation(1), &map).unwrap(), pool.space);
    pool.client.settle(pool.now);
    assert_eq!((pool.write(0, 7), pool.read(1)), (Err(Failure::Fenced), Err(Failure::Fenced)));
    pool.space = first;
    assert_eq!([pool.read(0), pool.read(1)], [Ok(1), Ok(2)]);
}
