//! Readers of a space that nobody writes to any more.

use super::super::exchange::{Exchange, Role};
use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::control::Replica;
use crate::units::{SlabNo, Version};

/// Longer than any reader waits for somebody else.
const LONG: Duration = Duration::from_secs(30);

/// Three servers, a slab at two of them, and a reader. Also the servers that have the slab.
fn sealed() -> (Pool, Vec<usize>) {
    let mut pool = Pool::new(3, 2, 4);
    (0..8).for_each(|page| assert_eq!(pool.write(page, page as u8 + 1), Ok(())));
    let entry = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.clone();
    let holders = pool.client.pool.sessions.peers_of(&entry).iter().map(|peer| peer.0).collect();
    pool.today = Today { generation: Generation(2), sealed: true, map: vec![(SlabNo(0), entry)] };
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.space = pool.client.attach_reader(&spec, &pool.today).unwrap();
    (pool, holders)
}

fn assert_right(pool: &mut Pool) {
    (0..8).for_each(|page| assert_eq!(pool.read(page), Ok(page as u8 + 1), "page {page}"));
    assert_eq!(pool.read(9), Ok(0));
}

#[test]
fn what_is_sealed_is_read_and_not_written() {
    let (mut pool, _) = sealed();
    assert_right(&mut pool);
    let page = [1; PAGE_SIZE];
    let refused = pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &page, 1);
    assert_eq!(refused, Err(Refused::ReadOnly));
    assert_eq!(pool.client.trim(pool.now, pool.space, PageNo(0), Class::Eviction, 1), Err(Refused::ReadOnly));
    assert!(!pool.client.discard_slab(pool.now, pool.space, SlabNo(0)));
    pool.pass(LONG);
    assert_eq!((pool.keeps, pool.client.tenure(pool.space)), (0, Tenure::Reader), "all is well");
}

#[test]
fn a_reader_makes_the_copies_that_nobody_else_does() {
    let (mut pool, holders) = sealed();
    pool.deaf = vec![holders[0]];
    pool.pass(Duration::from_secs(2));
    assert_right(&mut pool);
    assert_eq!(pool.keeps, 0, "somebody else may be about to");
    pool.pass(LONG);
    assert_eq!((pool.keeps, pool.client.tenure(pool.space)), (1, Tenure::Keeper));
    assert_eq!(pool.client.in_sync(pool.space), (1, 1));
    pool.deaf.push(holders[1]);
    pool.pass(Duration::from_secs(2));
    assert_right(&mut pool);
}

/// The map changes under a reader: it begins anew with what there is, and as long as that goes on it keeps nothing.
#[test]
fn a_reader_follows_the_map() {
    let (mut pool, holders) = sealed();
    pool.deaf = vec![holders[0]];
    for _ in 0..30 {
        pool.today.map[0].1.revision += 1;
        pool.pass(Duration::from_secs(2));
        assert_right(&mut pool);
    }
    assert_eq!(pool.keeps, 0);
}

/// What is missing to a reader may be at a server that it has not heard of.
#[test]
fn who_does_not_know_all_servers_keeps_nothing() {
    let (mut pool, holders) = sealed();
    let gone = ServerId(holders[0] as u32);
    let elsewhere = Replica { server: ServerId(77), grant: Version::from_bits(1 << 40) };
    let entry = &mut pool.today.map[0].1;
    entry.revision += 1;
    entry.replicas.retain(|replica| replica.server != gone);
    entry.replicas.push(elsewhere);
    pool.deaf = vec![holders[0]];
    pool.pass(LONG * 2);
    assert_right(&mut pool);
    assert_eq!((pool.keeps, pool.client.tenure(pool.space)), (0, Tenure::Reader));
}

/// A space that is removed: the servers refuse, and the control plane knows nothing of it.
#[test]
fn what_is_gone_is_an_error() {
    let (mut pool, _) = sealed();
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    let (reader, map) = (pool.space, pool.today.map.clone());
    // Its last owner, who gives everything back.
    pool.space = pool.client.attach(&spec, Generation(3), &map).unwrap();
    assert_right(&mut pool);
    pool.today.sealed = false;
    pool.client.read(pool.now, reader, PageNo(0), Class::Demand, 2).unwrap();
    pool.pass(Duration::from_secs(1));
    let event = pool.client.poll_event(&mut [0; PAGE_SIZE]);
    assert_eq!(event, Some(Event::Read { token: 2, result: Err(Failure::Fenced) }));
    assert!(pool.client.is_taken(reader));
}

/// A copy is made anew where one was, and the reader's map is from before: it has nothing yet, and nothing is damaged.
#[test]
fn a_copy_that_is_being_made_is_not_a_bad_one() {
    for other_is_deaf in [false, true] {
        let (mut pool, holders) = sealed();
        assert_right(&mut pool);
        let grant = Version::new(Generation(2), 1, false);
        let server = &mut pool.servers[holders[0]];
        assert_eq!(server.lend(SpaceId(1), SlabNo(0), Generation(2), grant), Status::Ok);
        if other_is_deaf {
            pool.deaf = vec![holders[1]];
            pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 5).unwrap();
            pool.pass(Duration::from_secs(1));
            let mut page = [0; PAGE_SIZE];
            assert_eq!(pool.client.poll_event(&mut page), None, "the map may say where it is");
            pool.deaf.clear();
            pool.pass(Duration::from_secs(2));
            assert_eq!(pool.client.poll_event(&mut page), Some(Event::Read { token: 5, result: Ok(()) }));
            assert_eq!(page, [1; PAGE_SIZE]);
        }
        assert_right(&mut pool);
        assert_eq!(pool.client.stats().bad_pages, 0);
    }
}

/// A copy lists a page as trimmed that the other one has. Also which of the holders it is.
fn with_made_up_trim(page: u64, which: usize) -> (Pool, usize, usize) {
    let (mut pool, holders) = sealed();
    let (liar, honest) = (holders[which], holders[1 - which]);
    let written = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].version(page as usize);
    let made_up = Version::from_bits(written.bits() | 1);
    pool.servers[liar].make_up_trim(SpaceId(1), PageNo(page), Generation(1), made_up);
    (pool, liar, honest)
}

/// Nobody can tell who is right, so it is an error, and the rest of the slab is not touched by it.
#[test]
fn a_made_up_trim_is_an_error_and_never_zeros() {
    for which in [0, 1] {
        let (mut pool, ..) = with_made_up_trim(0, which);
        for _ in 0..3 {
            assert_eq!(pool.read(0), Err(Failure::Corrupt));
            (1..8).for_each(|page| assert_eq!(pool.read(page), Ok(page as u8 + 1), "page {page}"));
        }
        assert!(!pool.client.page_run(pool.space, PageNo(0), 1).hole);
        let slab = &pool.client.pool.map.spaces[pool.space.0].slabs[SlabNo(0)];
        assert!(slab.failed.is_empty() && slab.behind.is_empty(), "the other copy is no worse for it");
        // The map changes, and all are asked again.
        pool.today.map[0].1.revision += 1;
        let space = pool.space.0;
        pool.client.pool.begin_watch(space);
        pool.pass(Duration::from_secs(1));
        assert_eq!(pool.read(0), Err(Failure::Corrupt));
        pool.pass(LONG);
        assert_eq!((pool.keeps, pool.read(0)), (0, Err(Failure::Corrupt)));
    }
}

/// A reader becomes the keeper: it writes the trim to no other copy, and when the one that lists it is gone, the page is there.
#[test]
fn a_keeper_copies_no_made_up_trim() {
    for which in [0, 1] {
        let (mut pool, liar, honest) = with_made_up_trim(0, which);
        // Somebody is wanted who moves its copy away.
        pool.servers[liar].set_pressure(Pressure::Red);
        pool.pass(LONG);
        assert_eq!((pool.keeps, pool.client.tenure(pool.space)), (1, Tenure::Keeper));
        assert_eq!(pool.read(0), Err(Failure::Corrupt));
        assert_eq!(pool.holders(SlabNo(0)), {
            let mut both = vec![liar, honest];
            both.sort_unstable();
            both
        });
        let generation = pool.client.pool.map.spaces[pool.space.0].generation;
        assert!(pool.servers[honest].version_of(SpaceId(1), PageNo(0), generation).has_content());
        pool.client.forget_content(pool.now, ServerId(liar as u32));
        pool.pass(Duration::from_secs(1));
        assert_eq!(pool.holders(SlabNo(0)).len(), 2, "there is a new copy");
        assert_right(&mut pool);
    }
}

/// A copy lists content that nobody wrote. Until that has shown, the other one is not asked, and it is not given up for it.
#[test]
fn who_lists_less_is_behind_and_not_given_up() {
    let (mut pool, holders) = sealed();
    let written = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].version(3);
    let made_up = Version::from_bits(written.bits() + 2);
    let late = pool.servers[holders[0]].write_late(SpaceId(1), PageNo(3), Generation(1), made_up);
    assert_eq!(late, Status::Ok);
    assert_eq!(pool.read(3), Err(Failure::Corrupt), "it has no seal");
    assert_eq!(pool.read(2), Ok(3));
    let slab = &pool.client.pool.map.spaces[pool.space.0].slabs[SlabNo(0)];
    assert!(slab.behind.has(PeerIndex(holders[1])) && !slab.failed.has(PeerIndex(holders[1])));
    // Who keeps the space opens what it copies, and so finds out.
    pool.pass(LONG);
    assert_eq!(pool.client.tenure(pool.space), Tenure::Keeper);
    assert!(pool.holders(SlabNo(0)).contains(&holders[1]));
    assert_right(&mut pool);
}

/// Lets time pass. What servers are asked of this kind is answered by those who lie: the space has a newer generation. How often.
fn pass_with_lies(pool: &mut Pool, time: Duration, lies: impl Fn(&Exchange) -> bool) -> usize {
    let (until, mut count) = (pool.now + time, 0);
    while pool.now < until {
        pool.now = pool.now + Duration::from_millis(1);
        pool.time_passes();
        loop {
            while let Some(exchange) = pool.client.pool.sessions.exchanges.find(&lies) {
                count += 1;
                pool.client.pool.sessions.end_exchange(exchange.id);
                let now = pool.now;
                pool.client.answered(now, &exchange, Status::StaleGeneration, Version::NEVER, &[]);
                pool.client.settle(now);
            }
            if !pool.step() {
                break;
            }
        }
    }
    count
}

/// One server says so, and the map knows nothing of it: the other copy is asked, and that one's is not given up.
#[test]
fn who_says_that_a_generation_is_old_is_asked_no_more_for_a_while() {
    for (is_open, kind) in [(true, "read"), (false, "read"), (false, "versions"), (false, "fence")] {
        for which in [0, 1] {
            let (mut pool, holders) = sealed();
            if is_open {
                assert_right(&mut pool);
            }
            let is_it = |role: Role| match kind {
                "read" => matches!(role, Role::Read { .. }),
                "versions" => role == Role::Versions,
                _ => role == Role::Fence,
            };
            let (liar, space) = (PeerIndex(holders[which]), pool.space.0);
            let lies = |e: &Exchange| e.peer == liar && e.space == space && is_it(e.role);
            for round in 0..3 {
                (0..8).for_each(|page| {
                    pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, page).unwrap();
                });
                let count = pass_with_lies(&mut pool, Duration::from_secs(2), lies);
                assert!(count <= 8, "{kind}, round {round}: asked {count} times");
                let mut content = [0; PAGE_SIZE];
                let mut got = 0;
                while let Some(event) = pool.client.poll_event(&mut content) {
                    let Event::Read { token, result: Ok(()) } = event else {
                        panic!("{kind}, round {round}: {event:?}")
                    };
                    assert_eq!(content, [token as u8 + 1; PAGE_SIZE], "{kind}, round {round}");
                    got += 1;
                }
                assert_eq!(got, 8, "{kind}, round {round}");
            }
            assert!(pool.client.pool.map.spaces[space].slabs[SlabNo(0)].failed.is_empty());
            assert_eq!((pool.keeps, pool.client.tenure(pool.space)), (0, Tenure::Reader));
            pool.pass(Duration::from_secs(10));
            assert!(pool.client.pool.map.spaces[space].refusing.is_empty(), "it is asked again");
            assert_right(&mut pool);
        }
    }
}

/// As after the control plane was restored from a backup. The read is an error in the end, and nobody is asked over and over.
#[test]
fn a_read_that_all_refuse_ends() {
    for is_open in [true, false] {
        let (mut pool, holders) = sealed();
        if is_open {
            assert_right(&mut pool);
        }
        let space = pool.space.0;
        let lies = |e: &Exchange| e.space == space && holders.contains(&e.peer.0);
        pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
        let count = pass_with_lies(&mut pool, Duration::from_secs(45), lies);
        assert!(count <= 60, "asked {count} times");
        let event = pool.client.poll_event(&mut [0; PAGE_SIZE]);
        assert_eq!(event, Some(Event::Read { token: 2, result: Err(Failure::Corrupt) }));
        assert!(pool.client.pool.map.spaces[space].slabs[SlabNo(0)].failed.is_empty(), "they may have it");
        pool.pass(Duration::from_secs(10));
        assert_right(&mut pool);
    }
}

/// The map was asked before a server knew of a newer generation, and answers after that: it is asked again.
#[test]
fn an_answer_from_before_a_refusal_says_nothing_of_it() {
    let (mut pool, holders) = sealed();
    assert_right(&mut pool);
    let space = pool.space.0;
    (0..2).for_each(|page| pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, page).unwrap());
    let asked: Vec<Exchange> = std::iter::from_fn(|| {
        let exchange = pool.client.pool.sessions.exchanges.find(|e| matches!(e.role, Role::Read { .. }))?;
        pool.client.pool.sessions.end_exchange(exchange.id);
        Some(exchange)
    })
    .collect();
    assert_eq!(asked.len(), 2);
    let refused = |pool: &mut Pool, exchange: &Exchange| {
        let now = pool.now;
        pool.client.answered(now, exchange, Status::StaleGeneration, Version::NEVER, &[]);
        pool.client.settle(now);
    };
    refused(&mut pool, &asked[0]);
    pool.client.on_timeout(pool.now);
    let (id, request) = pool.client.poll_control(pool.now).expect("a look");
    let early = pool.answer(&request);
    // Somebody keeps the space now.
    refused(&mut pool, &asked[1]);
    pool.today.generation.0 += 1;
    pool.client.on_control(pool.now, id, early);
    assert!(pool.client.pool.map.spaces[space].refusing.is_empty());
    pool.pass(Duration::from_secs(1));
    assert_eq!(pool.client.pool.map.spaces[space].generation, pool.today.generation);
    for _ in 0..2 {
        let event = pool.client.poll_event(&mut [0; PAGE_SIZE]);
        assert!(matches!(event, Some(Event::Read { result: Ok(()), .. })), "{event:?}");
    }
    assert_eq!(
        pool.client.pool.sessions.peers_of(&pool.client.pool.map.spaces[space].slabs[SlabNo(0)].entry).len(),
        holders.len()
    );
    assert_right(&mut pool);
}
