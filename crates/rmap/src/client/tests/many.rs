//! More slabs than requests can be under way, and servers that answer none of them.

use super::super::exchange::{EXCHANGES_MAX, Exchange, QUESTIONS_MAX, Role};
use super::lies::take;
use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::slab::Phase;
use crate::units::{SlabNo, Version};

pub const SLAB: u64 = 8;
/// Two copies of each are more than there can be requests.
const MANY: u64 = EXCHANGES_MAX as u64 / 2 + 100;
/// As many writes as can be begun.
const WRITES: u64 = 192;

/// What the first page of a slab is filled with.
fn byte_of(slab: u64) -> u8 {
    (slab % 250) as u8 + 1
}

/// A page in each of so many slabs.
pub fn filled(servers: usize, slabs: u64) -> Pool {
    let mut pool = Pool::of(servers, 2, slabs as usize, slabs * SLAB, None);
    for first in (0..slabs).step_by(100) {
        let end = slabs.min(first + 100);
        (first..end).for_each(|slab| pool.begin_write(slab * SLAB, byte_of(slab)));
        pool.run();
        pool.expect_written((end - first) as usize);
    }
    pool
}

/// What the next owner begins with.
fn map_of(pool: &Pool) -> Vec<(SlabNo, MapEntry)> {
    let slabs = pool.client.pool.map.spaces[pool.space.0].slabs.enumerate();
    slabs.map(|(slab, state)| (slab, state.entry.clone())).collect()
}

pub fn take_over(pool: &mut Pool, pages: u64) {
    take_over_as(pool, pages, Generation(2));
}

pub fn take_over_as(pool: &mut Pool, pages: u64, generation: Generation) {
    let map = map_of(pool);
    pool.client.space_taken(pool.space.0);
    let spec = SpaceSpec { id: SpaceId(1), pages, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.space = pool.client.attach(&spec, generation, &map).unwrap();
}

pub fn begin_reads(pool: &mut Pool, pages: impl Iterator<Item = u64>) {
    for page in pages {
        pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, page).unwrap();
    }
}

/// Results of so many reads, all of them good.
fn expect_read(pool: &mut Pool, reads: usize) {
    let mut content = [0; PAGE_SIZE];
    let mut got = 0;
    while let Some(event) = pool.client.poll_event(&mut content) {
        let Event::Read { token, result: Ok(()) } = event else { panic!("{event:?} for a read") };
        assert_eq!(content, [byte_of(token / SLAB); PAGE_SIZE]);
        got += 1;
    }
    assert_eq!(got, reads);
}

#[test]
fn a_new_owner_of_many_slabs_opens_all_of_them() {
    let mut pool = filled(2, MANY);
    take_over(&mut pool, MANY * SLAB);
    // Before any of them is open.
    begin_reads(&mut pool, (0..200).map(|slab| slab * SLAB));
    pool.run();
    expect_read(&mut pool, 200);
    for slab in (0..MANY).step_by(97).chain([MANY - 1]) {
        assert_eq!(pool.read(slab * SLAB), Ok(byte_of(slab)), "slab {slab}");
    }
    assert_eq!(pool.client.in_sync(pool.space), (MANY as usize, MANY as usize));
}

/// A server that held a copy of all of them is gone, and does not come back for what it is to be given back.
#[test]
fn pending_releases_of_a_dead_server_keep_no_write_from_its_slot() {
    let mut pool = filled(2, MANY);
    pool.deaf = vec![1];
    pool.pass(Duration::from_millis(1500));
    assert_eq!(pool.client.in_sync(pool.space), (0, MANY as usize));
    for page in 0..WRITES {
        pool.begin_write(page * SLAB + 1, 9);
    }
    pool.pass(Duration::from_millis(10));
    pool.expect_written(WRITES as usize);
    // It hears of it when it is back: it has nothing that is not in the map.
    pool.deaf = Vec::new();
    pool.pass(Duration::from_millis(1500));
    pool.run();
    let in_map =
        map_of(&pool).iter().flat_map(|(_, entry)| &entry.replicas).filter(|r| r.server == ServerId(1)).count();
    assert_eq!(pool.servers[1].held_slabs(), in_map);
}

/// With the control plane away, so that the copies stay in the map.
#[test]
fn a_silent_servers_replies_keep_no_slot_from_others() {
    let mut pool = filled(2, 80);
    pool.no_control = true;
    pool.deaf = vec![0];
    for first in [0, 40] {
        begin_reads(&mut pool, (first..first + 40).map(|slab| slab * SLAB));
        while pool.step() {}
        pool.pass(SILENCE + Duration::from_millis(20));
        expect_read(&mut pool, 40);
    }
}

/// It hears of the new owner, and says nothing more.
#[test]
fn a_server_that_falls_silent_while_a_space_is_taken_over_does_not_keep_it_from_opening() {
    let mut pool = filled(2, MANY);
    take_over(&mut pool, MANY * SLAB);
    pool.step();
    pool.deaf = vec![0];
    pool.no_control = true;
    pool.pass(SILENCE);
    let asked = |e: &Exchange| e.peer == PeerIndex(0) && e.role.is_question();
    assert!(pool.client.pool.sessions.exchanges.find(asked).is_none(), "others need its slot");
    pool.no_control = false;
    pool.pass(Duration::from_millis(2000));
    begin_reads(&mut pool, (0..200).map(|slab| slab * SLAB));
    pool.pass(Duration::from_millis(20));
    expect_read(&mut pool, 200);
    assert_eq!(pool.client.in_sync(pool.space), (0, MANY as usize));
}

#[test]
fn a_grant_that_nobody_waits_for_any_more_is_given_back() {
    let mut pool = Pool::new(2, 1, 4);
    // Whichever of them is asked: it grants it, and its answer comes when another has.
    let before: Vec<usize> = pool.servers.iter().map(Server::held_slabs).collect();
    assert_eq!(before, [0, 0]);
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[1; PAGE_SIZE], 1).unwrap();
    let Phase::Granting(candidates) = &pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].phase else {
        panic!("it is not being asked for")
    };
    let asked = candidates.asked[0].peer.0;
    // The fence, and its answer.
    pool.step();
    pool.slow = Some(asked);
    pool.step();
    assert_eq!(pool.servers[asked].held_slabs(), 1);
    pool.deaf = vec![asked];
    pool.pass(SILENCE + Duration::from_millis(20));
    pool.expect_written(1);
    pool.deaf = Vec::new();
    pool.deliver_late();
    pool.pass(Duration::from_millis(1500));
    let held: usize = pool.servers.iter().map(Server::held_slabs).sum();
    assert_eq!((held, pool.servers[asked].held_slabs()), (1, 0));
}

/// A server forgets an owner that had nothing there, as many others came since.
#[test]
fn a_server_that_has_forgotten_its_owner_is_told_again() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.client.write(pool.now, pool.space, PageNo(SLAB), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
    let exchange = take(&mut pool, |role| role == Role::Grant);
    let now = pool.now;
    pool.client.answered(now, &exchange, Status::UnknownSlab, Version::NEVER, &[]);
    assert!(!pool.client.pool.map.spaces[SpaceIndex(0)].fenced_at.has(PeerIndex(0)));
    pool.client.settle(now);
    pool.run();
    pool.expect_written(1);
    assert_eq!(pool.read(SLAB), Ok(2));
}

/// A copy with a damaged page is not trusted any more, and its server is to know that it may lend the slab to others.
#[test]
fn a_copy_that_is_not_trusted_is_given_back() {
    let mut pool = filled(2, 1);
    pool.client.redundancy.copy_lost(
        &mut pool.client.pool,
        &mut pool.client.pages,
        &mut pool.client.parity,
        SpaceIndex(0),
        SlabNo(0),
        PeerIndex(1),
    );
    pool.client.settle(pool.now);
    pool.pass(Duration::from_millis(100));
    pool.run();
    assert_eq!(pool.client.in_sync(pool.space), (1, 1), "it has a new one");
    assert_eq!([pool.servers[0].held_slabs(), pool.servers[1].held_slabs()], [1, 1]);
}

#[test]
fn a_keeper_that_is_not_one_any_more_copies_again_later() {
    let mut pool = filled(2, 40);
    pool.client.pool.map.spaces[SpaceIndex(0)].tenure = Tenure::Keeper;
    for slab in 0..40 {
        pool.client.redundancy.start_copy(
            &mut pool.client.pool,
            &mut pool.client.parity,
            (SpaceIndex(0), SlabNo(slab), 0),
            Some(PeerIndex(0)),
            PeerIndex(1),
        );
    }
    assert!(!pool.client.redundancy.copies.has_room());
    for _ in 0..super::super::copies::COPIES_MAX {
        let exchange = take(&mut pool, |role| matches!(role, Role::CopyRead { .. }));
        let now = pool.now;
        pool.client.answered(now, &exchange, Status::StaleGeneration, Version::NEVER, &[]);
    }
    assert!(pool.client.redundancy.copies.is_idle());
}

/// One that is small next to what there is to ask.
#[test]
fn few_questions_at_a_time_are_enough() {
    for questions in [1, 2, 7, QUESTIONS_MAX] {
        let mut pool = filled(3, 50);
        pool.client.pool.sessions.exchanges = super::super::exchange::Exchanges::new(questions);
        take_over(&mut pool, 50 * SLAB);
        pool.pass(Duration::from_millis(100));
        begin_reads(&mut pool, (0..50).map(|slab| slab * SLAB));
        pool.pass(Duration::from_millis(100));
        expect_read(&mut pool, 50);
        assert_eq!(pool.client.in_sync(pool.space), (50, 50));
    }
}
