//! What only servers have that have been silent for too long: requests fail, and nothing is lost.

use super::cold::{assert_right, cold, hand_over, holders, kill, written};
use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ops::{READS_RESERVED, REPORTED_MAX};
use crate::units::SlabNo;

/// Servers have been silent for that long when requests fail.
const PATIENCE: Duration = Duration::from_secs(1);
const LONGER: Duration = Duration::from_secs(2);
/// Until a server that was silent is heard again.
const HELLO: Duration = Duration::from_secs(3);

fn pool(servers: usize, copies: usize) -> Pool {
    let mut pool = Pool::of(servers, copies, 64, 512, None);
    pool.client.pool.config.error_after = Some(PATIENCE);
    pool
}

fn all(pool: &Pool) -> Vec<usize> {
    (0..pool.servers.len()).collect()
}

fn events(pool: &mut Pool) -> Vec<Event> {
    std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).collect()
}

fn unanswered(token: Token) -> Event {
    Event::Written { token, result: Err(Failure::Silent) }
}

fn entries(pool: &Pool) -> Vec<MapEntry> {
    pool.client.pool.map.spaces[pool.space.0].slabs.iter().map(|slab| slab.entry.clone()).collect()
}

fn assert_idle(pool: &Pool) {
    assert!(pool.client.is_idle() && pool.client.pages.ops.has_no_writer());
}

/// The client's own network is away, as it seems: all servers are silent.
#[test]
fn a_network_that_was_away_loses_nothing() {
    for copies in [1, 2] {
        let mut pool = pool(3, copies);
        (0..64).for_each(|page| assert_eq!(pool.write(page, page as u8 + 1), Ok(())));
        let map = entries(&pool);
        pool.deaf = all(&pool);
        pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
        pool.pass(PATIENCE / 2);
        assert!(!pool.client.has_event());
        pool.pass(FOR_GOOD);
        assert_eq!(events(&mut pool), [Event::Read { token: 2, result: Err(Failure::Silent) }]);
        assert_eq!((pool.read(1), pool.write(1, 99)), (Err(Failure::Silent), Err(Failure::Silent)));
        assert_eq!(pool.read(100), Ok(0), "what nobody has is known");
        assert_eq!(entries(&pool), map);
        assert_idle(&pool);
        pool.deaf.clear();
        pool.pass(HELLO);
        (0..64).for_each(|page| assert_eq!(pool.read(page), Ok(page as u8 + 1)));
        assert_eq!(pool.write(1, 99), Ok(()));
        assert_eq!((pool.read(1), pool.client.stats().slabs_lost), (Ok(99), 0));
        assert_eq!(pool.client.in_sync(pool.space), (8, 8));
    }
}

/// A write that some server may have by now ends when all of them have it, and nothing is written to its page before.
#[test]
fn a_write_that_failed_is_done_before_the_next() {
    for (copies, sent) in [(1, true), (1, false), (2, true), (2, false)] {
        let mut pool = pool(2, copies);
        assert_eq!(pool.write(0, 1), Ok(()));
        // Each of the servers has it, and what they answer gets lost; or none has heard of it.
        pool.begin_write_late(0, 2);
        if sent {
            let mut out = Vec::new();
            while let Some(transmit) = pool.client.poll_transmit(pool.now, &mut out) {
                pool.deliver(addr(pool::CLIENT), transmit, &mut out);
            }
            for server in &mut pool.servers {
                while server.poll_transmit(&mut out).is_some() {}
            }
        }
        pool.deaf = all(&pool);
        // It waits for that one.
        pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[3; PAGE_SIZE], 3).unwrap();
        pool.pass(LONGER);
        assert_eq!(events(&mut pool), [unanswered(1), unanswered(3)]);
        assert_eq!(pool.write(0, 4), Err(Failure::Silent));
        assert!(!pool.client.is_idle() && !pool.client.is_even(pool.space));
        pool.deaf.clear();
        pool.begin_write(0, 5);
        assert_eq!(events(&mut pool), [unanswered(1)]);
        pool.pass(HELLO);
        assert_eq!(events(&mut pool), []);
        assert_eq!(pool.read(0), Ok(2));
        assert_idle(&pool);
        assert_eq!(pool.write(0, 6), Ok(()));
        assert_eq!(pool.read(0), Ok(6));
        assert_eq!(pool.client.stats().bad_pages, 0);
    }
}

/// Whoever trims a page skips it where it is a hole already: a write that has failed, and may be done yet, is none.
#[test]
fn what_may_be_written_yet_is_no_hole() {
    let mut pool = pool(1, 1);
    assert_eq!(pool.write(0, 1), Ok(()));
    let run = |pool: &Pool, page| pool.client.page_run(pool.space, PageNo(page), 64);
    assert_eq!(run(&pool, 1), PageRun { pages: 7, hole: true });
    pool.deaf = all(&pool);
    [4, 6].into_iter().for_each(|page| pool.begin_write(page, 2));
    pool.pass(LONGER);
    assert_eq!(events(&mut pool), [unanswered(1); 2]);
    let runs = [1, 4, 5, 6, 7].map(|page| run(&pool, page));
    let (hole, content) = (|pages| PageRun { pages, hole: true }, PageRun { pages: 1, hole: false });
    assert_eq!(runs, [hole(3), content, hole(1), content, hole(1)]);
    pool.client.trim(pool.now, pool.space, PageNo(4), Class::Eviction, 3).unwrap();
    pool.run();
    assert_eq!(events(&mut pool), [unanswered(3)]);
    pool.deaf.clear();
    pool.pass(HELLO);
    assert_eq!(run(&pool, 4), PageRun { pages: 1, hole: false });
    pool.trim(4);
    assert_eq!((pool.read(4), pool.read(6), run(&pool, 4)), (Ok(0), Ok(2), hole(2)));
}

/// One of two servers comes back, and is enough.
#[test]
fn one_copy_that_is_back_is_enough() {
    let mut pool = pool(2, 2);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.deaf = all(&pool);
    pool.begin_write(0, 2);
    pool.pass(LONGER);
    assert_eq!(events(&mut pool), [unanswered(1)]);
    pool.deaf = vec![1];
    pool.pass(HELLO);
    assert_eq!((pool.read(0), pool.write(0, 3), pool.read(0)), (Ok(2), Ok(()), Ok(3)));
    assert_idle(&pool);
    pool.deaf.clear();
    pool.pass(HELLO);
    assert_eq!((pool.read(0), pool.client.in_sync(pool.space)), (Ok(3), (1, 1)));
}

/// A server that comes back empty has lost what it had. Whoever was told that his write failed is not told again.
#[test]
fn a_write_that_failed_ends_with_its_slab() {
    for is_taken in [false, true] {
        let mut pool = pool(1, 1);
        assert_eq!(pool.write(0, 1), Ok(()));
        pool.deaf = all(&pool);
        pool.begin_write(0, 2);
        pool.pass(LONGER);
        assert_eq!(events(&mut pool), [unanswered(1)]);
        let failure = if is_taken {
            pool.client.space_taken(SpaceIndex(0));
            Failure::Fenced
        } else {
            pool.client.forget_content(pool.now, ServerId(0));
            Failure::Lost
        };
        pool.run();
        assert_eq!(events(&mut pool), []);
        assert_eq!(pool.read(0), Err(failure));
        assert_idle(&pool);
    }
}

/// A server that has lost the slab of a write that failed is not asked for it over and over until the map says so, too.
#[test]
fn a_write_that_failed_is_not_sent_to_who_has_lost_it() {
    let mut pool = Pool::new(1, 1, 4);
    pool.client.pool.config.error_after = Some(PATIENCE);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.deaf = all(&pool);
    pool.begin_write(0, 2);
    pool.pass(LONGER);
    assert_eq!(events(&mut pool), [unanswered(1)]);
    (pool.no_control, pool.deaf) = (true, vec![]);
    kill(&mut pool, 0, 2);
    let before = pool.client.stats().sent;
    // Not until nobody has anything to say: that could be never.
    for _ in 0..HELLO.as_millis() {
        pool.now = pool.now + Duration::from_millis(1);
        pool.time_passes();
        pool.step();
    }
    let sent = pool.client.stats().sent - before;
    assert!(sent < 20, "{sent} requests");
    pool.no_control = false;
    pool.pass(HELLO);
    assert_eq!((events(&mut pool), pool.read(0)), (vec![], Err(Failure::Lost)));
    assert_idle(&pool);
}

/// Writes that nobody answers take no slot from those that servers answer.
#[test]
fn writes_that_failed_take_nobodys_slot() {
    let mut pool = pool(2, 1);
    (0..512).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
    let at = |pool: &Pool, page: u64, node| {
        pool.client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(page as u32 / 8)].entry)
            .has(node)
    };
    let (silent, other): (Vec<u64>, Vec<u64>) = (0..512).partition(|page| at(&pool, *page, PeerIndex(0)));
    let most = OPS_MAX - READS_RESERVED;
    assert!(silent.len() > most && other.len() > most);
    pool.deaf = vec![0];
    silent[..most].iter().for_each(|page| pool.begin_write(*page, 2));
    let write = |pool: &mut Pool| {
        pool.client.write(pool.now, pool.space, PageNo(other[0]), Class::Eviction, &[2; PAGE_SIZE], 2)
    };
    assert_eq!(write(&mut pool), Err(Refused::Busy));
    pool.pass(LONGER);
    assert_eq!(events(&mut pool), vec![unanswered(1); most]);
    // As many as ever, at the same time.
    pool.slow = Some(1);
    other[..most].iter().for_each(|page| pool.begin_write(*page, 3));
    pool.slow = None;
    pool.deaf.push(1);
    pool.pass(LONGER);
    // More than there are slots for: the rest waits in its own.
    assert_eq!(events(&mut pool), vec![unanswered(1); REPORTED_MAX - most]);
    // There is one for each of them when others need theirs no more.
    pool.late.clear();
    pool.deaf = vec![1];
    pool.pass(HELLO);
    assert_eq!(events(&mut pool), vec![unanswered(1); 2 * most - REPORTED_MAX]);
    pool.deaf.clear();
    pool.pass(HELLO);
    assert_eq!(events(&mut pool), []);
    assert_idle(&pool);
    for (pages, byte) in [(&silent[..most], 2), (&silent[most..], 1), (&other[..most], 3), (&other[most..], 1)] {
        pages.iter().for_each(|page| assert_eq!(pool.read(*page), Ok(byte), "page {page}"));
    }
}

/// Reads that have no slot among the operations fail, too.
#[test]
fn all_reads_that_wait_fail() {
    let mut pool = pool(1, 1);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.deaf = all(&pool);
    pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
    pool.pass(2 * SILENCE);
    let reads = 3 * OPS_MAX;
    for _ in 1..reads {
        pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
    }
    pool.pass(LONGER);
    let mut failed = 0;
    while pool.client.has_event() {
        let events = events(&mut pool);
        assert!(events.iter().all(|event| *event == Event::Read { token: 2, result: Err(Failure::Silent) }));
        failed += events.len();
    }
    assert_eq!(failed, reads);
    assert_idle(&pool);
}

/// Whoever takes a space over whose servers are silent does not wait for them either.
#[test]
fn what_is_taken_over_of_silent_servers_is_not_lost() {
    let mut pool = cold(5);
    pool.client.pool.config.error_after = Some(PATIENCE);
    pool.deaf = all(&pool);
    hand_over(&mut pool, false);
    pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
    pool.begin_write(40, 3);
    pool.pass(LONGER);
    let failed = events(&mut pool);
    assert!(failed.len() == 2 && failed.contains(&unanswered(1)), "{failed:?}");
    assert_eq!((pool.read(9), pool.write(9, 1)), (Err(Failure::Silent), Err(Failure::Silent)));
    pool.deaf.clear();
    pool.pass(HELLO);
    assert_right(&mut pool, &[]);
    assert_idle(&pool);
}

/// Two servers of a group with parity are silent: what they have cannot be put together from the others, and these cannot be
/// written to, as long as they are.
#[test]
fn two_silent_servers_of_a_group() {
    let mut pool = cold(5);
    pool.client.pool.config.error_after = Some(PATIENCE);
    let holders = holders(&pool);
    pool.deaf = vec![holders[0], holders[1]];
    pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
    pool.begin_write(16, 9);
    pool.pass(LONGER);
    let failed = events(&mut pool);
    assert!(failed.len() == 2 && failed.contains(&unanswered(1)), "{failed:?}");
    // Something waits for these servers all the time: none of it says more.
    pool.client.read(pool.now, pool.space, PageNo(8), Class::Demand, 4).unwrap();
    pool.begin_write(16, 9);
    assert_eq!(events(&mut pool), [Event::Read { token: 4, result: Err(Failure::Silent) }, unanswered(1)]);
    pool.client.read(pool.now, pool.space, PageNo(16), Class::Demand, 4).unwrap();
    while pool.step() {}
    assert_eq!(events(&mut pool), [Event::Read { token: 4, result: Ok(()) }]);
    pool.deaf.clear();
    pool.pass(HELLO);
    assert_right(&mut pool, &[]);
    assert_eq!((pool.write(16, 9), pool.client.stats().slabs_lost), (Ok(()), 0));
    pool.pass(HELLO);
    assert_right(&mut pool, &[16]);
}

/// One is put together from the others, and made anew.
#[test]
fn one_silent_server_of_a_group() {
    let mut pool = cold(5);
    pool.client.pool.config.error_after = Some(PATIENCE);
    let deaf = holders(&pool)[0];
    pool.deaf = vec![deaf];
    pool.pass(FOR_GOOD);
    assert_right(&mut pool, &[]);
    pool.begin_write(0, 9);
    pool.pass(HELLO);
    pool.expect_written(1);
    assert_eq!(pool.read(0), Ok(9));
    assert_right(&mut pool, &[0]);
}

/// Of two copies one is not what it should be, as is found when the space is taken over, and the other one cannot be asked.
#[test]
fn a_silent_copy_beside_a_bad_one() {
    let mut pool = Pool::new(2, 2, 4);
    pool.client.pool.config.error_after = Some(PATIENCE);
    assert_eq!(pool.write(0, 1), Ok(()));
    // Nobody has changed the map when the next owner reads it.
    (pool.no_control, pool.deaf) = (true, vec![1]);
    kill(&mut pool, 0, 2);
    pool.pass(HELLO);
    hand_over(&mut pool, false);
    pool.no_control = false;
    pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
    pool.begin_write(1, 3);
    pool.pass(LONGER);
    let failed = events(&mut pool);
    assert!(failed.len() == 2 && failed.contains(&unanswered(1)), "{failed:?}");
    pool.deaf.clear();
    pool.pass(HELLO);
    assert_eq!((pool.read(0), pool.write(1, 3), pool.read(1)), (Ok(1), Ok(()), Ok(3)));
}

/// A group has parity, its slabs still have both copies, and one of the servers is silent when the next owner comes: he does not wait
/// for what it would say before he writes.
#[test]
fn a_copy_that_was_never_heard_holds_up_no_group() {
    let mut pool = written(5);
    while pool.client.groups_with_parity(pool.space) == 0 {
        pool.now = pool.now + Duration::from_micros(100);
        pool.time_passes();
        pool.step();
    }
    let copies = pool.client.pool.sessions.peers_of(&pool.client.pool.map.spaces[pool.space.0].slabs[SlabNo(0)].entry);
    assert_eq!(copies.len(), 2);
    pool.deaf = copies.iter().skip(1).map(|peer| peer.0).collect();
    hand_over(&mut pool, true);
    pool.begin_write(0, 9);
    pool.pass(FOR_GOOD);
    pool.expect_written(1);
    pool.pass(HELLO);
    assert_right(&mut pool, &[0]);
}
