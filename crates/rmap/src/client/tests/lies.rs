//! Servers that are admitted and say what is not so.

use super::super::exchange::{Exchange, Role};
use super::many::{SLAB, begin_reads, filled, take_over, take_over_as};
use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::repair::{Repair, Step};
use crate::units::{SEALED_SIZE, SlabNo, Version};

/// The request that a role stands for, taken from the client as if its answer had come.
pub fn take(pool: &mut Pool, is_it: impl Fn(Role) -> bool) -> Exchange {
    let exchange = pool.client.pool.sessions.exchanges.find(|e| is_it(e.role)).expect("it was asked");
    pool.client.pool.sessions.end_exchange(exchange.id);
    exchange
}

/// A server says that a page is trimmed, in a version between the one that it was asked for and the one that is being written.
#[test]
fn a_trim_that_nobody_made_is_not_believed() {
    let mut pool = filled(2, 1);
    pool.deaf = vec![0, 1];
    begin_reads(&mut pool, std::iter::once(0));
    pool.begin_write(0, 7);
    let exchange = take(&mut pool, |role| matches!(role, Role::Read { .. }));
    let made_up = Version::from_bits(exchange.version.bits() | 1);
    assert!(!made_up.has_content() && exchange.version < made_up);
    let now = pool.now;
    pool.client.answered(now, &exchange, Status::Ok, made_up, &[]);
    assert!(!pool.client.has_event(), "no zeros");
    pool.deaf = Vec::new();
    pool.pass(SILENCE);
    let mut content = [0; PAGE_SIZE];
    let mut read = Err(Failure::Lost);
    while let Some(event) = pool.client.poll_event(&mut content) {
        if let Event::Read { result, .. } = event {
            read = result.map(|()| content[0]);
        }
    }
    assert!(matches!(read, Ok(1 | 7)), "{read:?}");
}

/// A source has a page in a version that nobody wrote: no copy gets it, which would stand before what is written later.
#[test]
fn what_a_source_made_up_is_not_copied() {
    let mut pool = filled(3, 1);
    let replicas = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.replicas.clone();
    let source = pool.client.pool.sessions.peers.of(replicas[0].server).unwrap();
    let target = (0..3).find(|server| replicas.iter().all(|r| r.server.0 != *server)).unwrap();
    let target = PeerIndex(target as usize);
    let grant = pool.client.pool.map.spaces[SpaceIndex(0)].next_version(false).unwrap();
    let mut repair = Repair::new(target, grant, None);
    repair.step = Step::Copying;
    pool.client.redundancy.begins_repair(&mut pool.client.pool, SpaceIndex(0), SlabNo(0), repair);
    pool.client.redundancy.start_copy(
        &mut pool.client.pool,
        &mut pool.client.parity,
        (SpaceIndex(0), SlabNo(0), 0),
        Some(source),
        target,
    );
    let exchange = take(&mut pool, |role| matches!(role, Role::CopyRead { .. }));
    let made_up = Version::new(Generation(1), 1 << 20, true);
    let now = pool.now;
    pool.client.answered(now, &exchange, Status::Ok, made_up, &[]);
    let is_write = |role| matches!(role, Role::CopyWrite { .. });
    assert!(pool.client.pool.sessions.exchanges.find(|e| is_write(e.role)).is_none());
    assert!(
        pool.client.redundancy.copies.is_idle()
            && pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].failed.has(source)
    );
}

/// While a space is taken over one copy has content in a later version than the other. It is not put in the place of what the other has
/// before it has been opened.
#[test]
fn a_seal_that_nobody_made_replaces_nothing() {
    let mut pool = filled(2, 1);
    // One copy lacks it.
    pool.deaf = vec![1];
    pool.begin_write(0, 7);
    take_over(&mut pool, SLAB);
    let of_the_old = pool.client.poll_event(&mut [0; PAGE_SIZE]);
    assert_eq!(of_the_old, Some(Event::Written { token: 1, result: Err(Failure::Fenced) }));
    pool.deaf = Vec::new();
    let copies = |role| matches!(role, Role::CopyRead { .. });
    pool.time_passes();
    while pool.client.pool.sessions.exchanges.find(|e| copies(e.role)).is_none() {
        assert!(pool.step(), "nothing is copied");
    }
    let exchange = take(&mut pool, copies);
    let now = pool.now;
    pool.client.answered(now, &exchange, Status::Ok, exchange.version, &[0x55; SEALED_SIZE]);
    pool.run();
    assert_eq!(pool.read(0), Ok(1), "what both had, and was acknowledged");
    assert!(pool.client.stats().transfers_refused > 0);
}

/// The owner trims a page and ends before one of the two copies has it: nobody was told that it is done, so the content may stay. From
/// then on it does, whoever comes next and whichever copy is asked.
#[test]
fn a_trim_that_was_not_finished_is_dropped_for_good() {
    for deaf in [0, 1] {
        let mut pool = filled(2, 1);
        pool.deaf = vec![deaf];
        pool.client.trim(pool.now, pool.space, PageNo(0), Class::Eviction, 1).unwrap();
        while pool.step() {}
        take_over(&mut pool, SLAB);
        assert_eq!(
            pool.client.poll_event(&mut [0; PAGE_SIZE]),
            Some(Event::Written { token: 1, result: Err(Failure::Fenced) })
        );
        pool.deaf = Vec::new();
        assert_eq!(pool.read(0), Ok(1));
        let versions = [0, 1].map(|node: usize| pool.servers[node].version_of(SpaceId(1), PageNo(0), Generation(2)));
        assert!(versions[0] == versions[1] && versions[0].has_content(), "{versions:?}");
        assert_eq!(versions[0].generation(), Generation(2), "it comes after the trim");
        assert_eq!((pool.client.in_sync(pool.space), pool.client.stats().bad_pages), ((1, 1), 0));
        take_over_as(&mut pool, SLAB, Generation(3));
        assert_eq!(pool.read(0), Ok(1));
    }
}

/// It was acknowledged when the map named one copy only. The other one comes into the map with it.
#[test]
fn a_trim_that_one_copy_was_enough_for_stays() {
    let mut pool = filled(2, 1);
    // A slab without any content would go back.
    assert_eq!(pool.write(1, 7), Ok(()));
    pool.deaf = vec![1];
    pool.pass(Duration::from_millis(1500));
    assert_eq!(pool.client.in_sync(pool.space), (0, 1));
    pool.trim(0);
    pool.deaf = Vec::new();
    pool.pass(Duration::from_secs(2));
    assert_eq!(pool.client.in_sync(pool.space), (1, 1));
    take_over(&mut pool, SLAB);
    assert_eq!((pool.read(0), pool.read(1)), (Ok(0), Ok(7)));
}

/// A copy lists a trim that nobody made, while a space is taken over.
#[test]
fn a_trim_that_nobody_made_ends_no_page() {
    for liar in [0, 1] {
        let mut pool = filled(2, 1);
        let written = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].version(0);
        let made_up = Version::from_bits(written.bits() | 1);
        pool.servers[liar].make_up_trim(SpaceId(1), PageNo(0), Generation(1), made_up);
        take_over(&mut pool, SLAB);
        assert_eq!(pool.read(0), Ok(1));
        let versions = [0, 1].map(|node: usize| pool.servers[node].version_of(SpaceId(1), PageNo(0), Generation(2)));
        assert!(versions.iter().all(|version| version.has_content()), "{versions:?}");
    }
}

/// While a space is taken over one copy lists content in a later version than the other, and then has no such page: never written, with
/// nothing in it, or in the version before. It is given up, or it would be asked for ever.
#[test]
fn a_copy_that_does_not_have_what_it_lists_is_given_up() {
    for answer in ["never", "nothing", "old"] {
        let mut pool = filled(2, 1);
        let old = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].version(0);
        let mut sealed = [1; SEALED_SIZE];
        pool.client.pool.map.spaces[SpaceIndex(0)].key.seal(PageNo(0), old, &mut sealed);
        // One copy lacks it.
        pool.deaf = vec![1];
        pool.begin_write(0, 7);
        take_over(&mut pool, SLAB);
        while pool.client.poll_event(&mut [0; PAGE_SIZE]).is_some() {}
        pool.deaf = Vec::new();
        let copies = |role| matches!(role, Role::CopyRead { .. });
        pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
        let mut lies = 0;
        for _ in 0..200 {
            pool.time_passes();
            pool.step();
            pool.now = pool.now + Duration::from_micros(100);
            // The same answer for as long as it is asked.
            while let Some(exchange) =
                pool.client.pool.sessions.exchanges.find(|e| copies(e.role) && e.peer == PeerIndex(0))
            {
                lies += 1;
                assert!(lies < 10, "{answer}: it is asked over and over");
                pool.client.pool.sessions.end_exchange(exchange.id);
                let (version, payload): (_, &[u8]) = match answer {
                    "never" => (Version::NEVER, &[]),
                    "nothing" => (exchange.version, &[]),
                    _ => (old, &sealed),
                };
                let now = pool.now;
                pool.client.answered(now, &exchange, Status::Ok, version, payload);
                pool.client.settle(now);
            }
        }
        let mut content = [0; PAGE_SIZE];
        let event = pool.client.poll_event(&mut content);
        assert_eq!((event, content), (Some(Event::Read { token: 2, result: Ok(()) }), [1; PAGE_SIZE]), "{answer}");
        assert!(lies > 0, "{answer}");
    }
}

/// A write that is asked for before the slab is open comes after the content that is kept, though its version was taken before.
#[test]
fn what_is_written_while_a_slab_opens_comes_after_what_is_kept() {
    let mut pool = filled(2, 1);
    pool.deaf = vec![1];
    pool.client.trim(pool.now, pool.space, PageNo(0), Class::Eviction, 1).unwrap();
    while pool.step() {}
    take_over(&mut pool, SLAB);
    while pool.client.poll_event(&mut [0; PAGE_SIZE]).is_some() {}
    pool.begin_write_late(0, 9);
    pool.deaf = Vec::new();
    pool.run();
    pool.expect_written(1);
    assert_eq!(pool.read(0), Ok(9));
    take_over_as(&mut pool, SLAB, Generation(3));
    assert_eq!(pool.read(0), Ok(9));
}

/// The copy that the content came from falls silent when the other one has it: that one is asked again what it has, and believed.
#[test]
fn what_was_kept_is_no_version_that_nobody_made() {
    let mut pool = filled(2, 1);
    pool.deaf = vec![1];
    pool.client.trim(pool.now, pool.space, PageNo(0), Class::Eviction, 1).unwrap();
    while pool.step() {}
    take_over(&mut pool, SLAB);
    while pool.client.poll_event(&mut [0; PAGE_SIZE]).is_some() {}
    pool.deaf = Vec::new();
    let kept = Version::taken_over(Generation(2));
    pool.no_control = true;
    for _ in 0..1000 {
        pool.time_passes();
        pool.single_step();
        pool.now = pool.now + Duration::from_micros(100);
        if pool.client.pool.map.spaces[pool.space.0].fenced_at.has(PeerIndex(0))
            && pool.servers[0].version_of(SpaceId(1), PageNo(0), Generation(2)) == kept
        {
            break;
        }
    }
    assert_eq!(pool.servers[0].version_of(SpaceId(1), PageNo(0), Generation(2)), kept);
    (pool.deaf, pool.no_control) = (vec![1], false);
    pool.pass(Duration::from_secs(1));
    assert_eq!(pool.holders(SlabNo(0)), [0]);
    assert_eq!(pool.read(0), Ok(1));
}
