//! Servers that do not know the owner of what they are asked for.

use super::super::exchange::{Exchange, Role};
use super::lies::take;
use super::many::{SLAB, filled, take_over};
use super::*;
use crate::control::Replica;
use crate::units::Version;

/// A server answers a request that is under way so.
fn answer(pool: &mut Pool, status: Status, is_it: impl Fn(&Exchange) -> bool) -> Exchange {
    let exchange = pool.client.exchanges.find(|e| is_it(e)).expect("it was asked");
    pool.client.end_exchange(exchange.id);
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
        if pool.client.exchanges.find(&is_it).is_some() {
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
    let slabs = &pool.client.spaces[pool.space.0].slabs;
    assert!(slabs.iter().all(|slab| slab.failed.is_empty()) && pool.client.stats().slabs_lost == 0);
    assert!(pool.client.spaces[pool.space.0].unknown_at.is_empty());
}

/// The only copy: it is not given up, and read.
#[test]
fn a_server_that_does_not_know_its_owner_is_told_and_asked_again() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!([pool.write(0, 7), pool.write(1, 8)], [Ok(()); 2]);
    begin_read(&mut pool, 0);
    begin_read(&mut pool, 1);
    answer(&mut pool, Status::NotFenced, reads);
    assert!(pool.client.exchanges.find(reads).is_none(), "nothing is asked before it knows");
    begin_read(&mut pool, 0);
    assert!(pool.client.exchanges.find(reads).is_none());
    pool.run();
    [7, 8, 7].into_iter().for_each(|byte| expect_read(&mut pool, byte));
    assert_nothing_failed(&pool);
    assert_eq!((pool.client.stats().told_again, pool.client.is_idle()), (1, true));
}

/// It knows its owner whenever it is asked whether it does, and never else.
#[test]
fn a_server_that_never_knows_its_owner_is_given_up() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 7), Ok(()));
    begin_read(&mut pool, 0);
    let mut asked = 0;
    for _ in 0..100 {
        if pool.client.exchanges.find(reads).is_some() {
            answer(&mut pool, Status::NotFenced, reads);
            asked += 1;
        }
        pool.step();
    }
    assert_eq!(asked, 2);
    let event = pool.client.poll_event(&mut [0; PAGE_SIZE]);
    assert_eq!(event, Some(Event::Read { token: 2, result: Err(Failure::Lost) }));
}

/// Nor is what one waits for that has no room for its space: it has nothing of it.
#[test]
fn a_server_that_lets_nobody_in_has_no_copy() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 7), Ok(()));
    begin_read(&mut pool, 0);
    answer(&mut pool, Status::NotFenced, reads);
    answer(&mut pool, Status::Full, |e| e.role == Role::Fence);
    pool.run();
    let event = pool.client.poll_event(&mut [0; PAGE_SIZE]);
    assert_eq!(event, Some(Event::Read { token: 2, result: Err(Failure::Lost) }));
}

/// It falls silent before it has been told.
#[test]
fn a_server_that_is_away_is_told_when_it_is_back() {
    let mut pool = Pool::new(1, 1, 4);
    pool.client.config.lost_after = None;
    assert_eq!(pool.write(0, 7), Ok(()));
    begin_read(&mut pool, 0);
    pool.begin_write_late(1, 9);
    pool.deaf = vec![0];
    answer(&mut pool, Status::NotFenced, reads);
    pool.pass(3 * SILENCE);
    assert!(pool.client.peers[0].is_down() && !pool.client.has_event());
    pool.deaf.clear();
    pool.pass(Duration::from_secs(2));
    let events: Vec<Event> = std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).collect();
    assert!(events.contains(&Event::Read { token: 2, result: Ok(()) }), "{events:?}");
    assert!(events.contains(&Event::Written { token: 1, result: Ok(()) }), "{events:?}");
    assert_eq!(pool.read(1), Ok(9));
    assert_nothing_failed(&pool);
}

/// One copy has the write: it is done when the other one has it, too.
#[test]
fn a_write_waits_for_who_is_told_again() {
    let mut pool = filled(2, 1);
    pool.slow = Some(1);
    pool.begin_write_late(0, 7);
    pool.begin_write_late(1, 8);
    let other = |e: &Exchange| e.peer == 1 && matches!(e.role, Role::Write { .. });
    answer(&mut pool, Status::NotFenced, other);
    // Nor is it asked for what begins now.
    pool.begin_write_late(2, 9);
    assert!(pool.client.exchanges.find(other).is_none());
    while pool.step() {}
    assert!(!pool.client.has_event(), "it is at one copy");
    pool.deliver_late();
    // Told, and asked again.
    pool.run();
    pool.expect_written(3);
    assert_eq!(pool.client.in_sync(pool.space), (1, 1));
    assert_nothing_failed(&pool);
    pool.deaf = vec![0];
    pool.pass(Duration::from_secs(2));
    assert_eq!([pool.read(0), pool.read(1), pool.read(2)], [Ok(7), Ok(8), Ok(9)]);
}

/// A reader of a sealed space that began when a server was away has not told it. That it does not know the reader says nothing of
/// its copy.
#[test]
fn a_copy_that_was_away_when_a_reader_began_is_read() {
    let mut pool = Pool::new(2, 2, 4);
    (0..8).for_each(|page| assert_eq!(pool.write(page, page as u8 + 1), Ok(())));
    let entry = pool.client.spaces[0].slabs[0].entry.clone();
    pool.today = Today { generation: Generation(2), sealed: true, map: vec![(SlabNo(0), entry)] };
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    // Who sealed it sees to nothing any more.
    pool.client.space_taken(0);
    pool.deaf = vec![0];
    pool.space = pool.client.attach_reader(&spec, &pool.today).unwrap();
    pool.pass(2 * SILENCE);
    assert_eq!(pool.read(0), Ok(1));
    pool.deaf = Vec::new();
    pool.pass(Duration::from_secs(2));
    assert!(pool.client.peers.iter().all(Peer::is_up));
    pool.deaf = vec![1];
    pool.client.read(pool.now, pool.space, PageNo(3), Class::Demand, 2).unwrap();
    pool.pass(Duration::from_secs(1));
    expect_read(&mut pool, 4);
    assert_nothing_failed(&pool);
    assert!(pool.client.stats().told_again > 0);
}

/// While a space is taken over.
#[test]
fn versions_are_listed_again_when_their_owner_is_known() {
    for times in 1..4 {
        let mut pool = filled(2, 1);
        take_over(&mut pool, SLAB);
        let lists = |e: &Exchange| e.role == Role::Versions && e.peer == 1;
        for _ in 0..times {
            if pool.client.spaces[pool.space.0].told_again.has(1) && times > 2 {
                break;
            }
            until(&mut pool, lists);
            answer(&mut pool, Status::NotFenced, lists);
        }
        pool.run();
        assert_eq!(pool.read(0), Ok(1));
        assert_eq!(pool.client.stats().copies_left, u64::from(times == 2), "{times}");
    }
}

/// A new copy is made, and one of the servers does not know its owner.
#[test]
fn a_copy_in_the_making_goes_on() {
    for reads_the_source in [true, false] {
        let mut pool = filled(3, 1);
        let replicas = pool.client.spaces[0].slabs[0].entry.replicas.clone();
        let gone = pool.client.place_of(replicas[0].server).unwrap();
        pool.deaf = vec![gone];
        // Pages go through the client.
        pool.client.peers.iter_mut().for_each(|peer| peer.made_up_versions = true);
        let is_it = |e: &Exchange| match e.role {
            Role::CopyRead { .. } => reads_the_source,
            Role::CopyWrite { .. } => !reads_the_source,
            _ => false,
        };
        pool.begin_write_late(0, 7);
        until(&mut pool, is_it);
        let exchange = answer(&mut pool, Status::NotFenced, is_it);
        assert!(pool.client.copies.is_idle(), "not before it is told");
        assert!(pool.client.spaces[0].unknown_at.has(exchange.peer));
        pool.pass(Duration::from_secs(1));
        pool.expect_written(1);
        let entry = &pool.client.spaces[0].slabs[0].entry;
        assert!(entry.replicas.len() == 2 && entry.replicas.contains(&replicas[1]));
        let there = |replica: &Replica| pool.client.place_of(replica.server).unwrap();
        assert!(entry.replicas.iter().map(there).any(|peer| peer == exchange.peer));
        assert_nothing_failed(&pool);
        assert_eq!(pool.read(0), Ok(7));
    }
}

/// Of a group with parity: one that is put together, and copies that are asked whether they are those of the map.
#[test]
fn what_is_put_together_is_asked_for_again() {
    let mut pool = cold::cold(6);
    let node = cold::holders(&pool)[0];
    pool.deaf = vec![node];
    pool.pass(2 * SILENCE);
    pool.no_control = true;
    begin_read(&mut pool, 0);
    let strips = |e: &Exchange| matches!(e.role, Role::Strip { .. });
    until(&mut pool, strips);
    answer(&mut pool, Status::NotFenced, strips);
    pool.pass(SILENCE);
    expect_read(&mut pool, 1);
    assert!(pool.client.stats().told_again == 1 && pool.client.stats().degraded > 0);
    assert_nothing_failed(&pool);
}

#[test]
fn a_copy_that_is_checked_is_asked_again() {
    let mut pool = cold::cold(6);
    cold::hand_over(&mut pool, false);
    let checks = |e: &Exchange| e.role == Role::Check;
    until(&mut pool, checks);
    let exchange = answer(&mut pool, Status::NotFenced, checks);
    assert!(pool.client.exchanges.find(|e| checks(e) && e.peer == exchange.peer).is_none());
    pool.pass(SILENCE);
    let slab = pool.client.slab_of(exchange.page).unwrap();
    assert!(pool.client.spaces[pool.space.0].slabs[slab].checked.has(exchange.peer));
    cold::assert_right(&mut pool, &[]);
    assert_nothing_failed(&pool);
    assert_eq!(pool.client.parity(pool.space).whole, 2);
}

/// What is looked at without anybody asking does not end a copy either.
#[test]
fn a_look_at_a_page_ends_no_copy() {
    let mut pool = filled(2, 1);
    pool.client.config.scrub_pass = Some(Duration::from_millis(100));
    until(&mut pool, |e| e.role == Role::Scrub);
    take(&mut pool, |role| role == Role::Scrub);
    until(&mut pool, |e| e.role == Role::Scrub);
    answer(&mut pool, Status::NotFenced, |e| e.role == Role::Scrub);
    pool.pass(Duration::from_secs(3));
    assert_eq!(pool.client.in_sync(pool.space), (1, 1));
    assert!(pool.client.stats().scrubbed > 0 && pool.client.stats().copies_left == 0);
    assert_nothing_failed(&pool);
}

/// The other copy's server is silent, and its copy may be the only one that there is.
#[test]
fn no_copy_leaves_for_the_sake_of_one_whose_server_does_not_know_its_owner() {
    let mut pool = filled(2, 1);
    begin_read(&mut pool, 0);
    let unknown = answer(&mut pool, Status::NotFenced, reads).peer;
    // It answers all but this.
    take(&mut pool, |role| role == Role::Fence);
    pool.deaf = vec![1 - unknown];
    pool.begin_write_late(1, 7);
    pool.pass(Duration::from_secs(3));
    assert!(pool.client.peers[1 - unknown].is_down() && pool.client.peers[unknown].is_up());
    assert_eq!((pool.client.in_sync(pool.space), pool.client.stats().copies_left), ((1, 1), 0));
    pool.client.spaces[0].fencing.remove(unknown);
    pool.client.mark_all();
    pool.pass(Duration::from_secs(3));
    assert_eq!((pool.client.in_sync(pool.space), pool.client.stats().copies_left), ((0, 1), 1));
    let events: Vec<Event> = std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).collect();
    assert!(events.contains(&Event::Read { token: 2, result: Ok(()) }), "{events:?}");
    assert!(events.contains(&Event::Written { token: 1, result: Ok(()) }), "{events:?}");
}
