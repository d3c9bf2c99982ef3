//! The control plane is silent, or says what cannot be.

use super::*;
use crate::client::OPS_MAX;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::repair::{Repair, Step};
use crate::control::Replica;
use crate::units::{SlabNo, Version};

const MAP_PATIENCE: Duration = Duration::from_millis(400);

/// As long as servers may be silent.
const PATIENCE: Duration = Duration::from_secs(5);
/// What is asked of a control plane that is silent waits for so long, and a little.
const GRACE: Duration = Duration::from_millis(1010);

fn unanswered(writes: usize) -> Vec<Event> {
    vec![Event::Written { token: 1, result: Err(Failure::Silent) }; writes]
}

fn results(pool: &mut Pool) -> Vec<Event> {
    std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).collect()
}

fn declined(writes: usize) -> Vec<Event> {
    vec![Event::Written { token: 1, result: Err(Failure::Declined) }; writes]
}

/// Who has another place for its pages is told in time that nothing says where they are to go; slabs that somebody has are
/// written to as ever.
#[test]
fn what_a_silent_control_plane_holds_up_is_declined() {
    let mut pool = Pool::new(2, 2, 4);
    pool.client.pool.config.map_patience = Some(MAP_PATIENCE);
    assert_eq!([pool.write(0, 1), pool.write(8, 1)], [Ok(()); 2]);
    pool.no_control = true;
    pool.begin_write(16, 2);
    pool.pass(MAP_PATIENCE / 2);
    assert_eq!(results(&mut pool), []);
    assert!(pool.client.control_silent_for(pool.now).is_some_and(|silent| silent >= MAP_PATIENCE / 4));
    pool.pass(MAP_PATIENCE);
    assert_eq!(results(&mut pool), declined(1));
    // At once from now on: in the same slab, in one that nobody has asked for, in one that is being given back.
    assert!(pool.client.discard_slab(pool.now, pool.space, SlabNo(1)));
    [17, 24, 8].into_iter().for_each(|page| pool.begin_write(page, 2));
    pool.client.on_timeout(pool.now);
    assert_eq!((results(&mut pool), pool.client.stats().unmapped), (declined(3), 4));
    pool.begin_write(0, 3);
    pool.expect_written(1);
    pool.no_control = false;
    pool.pass(Duration::from_secs(2));
    assert_eq!(pool.client.control_silent_for(pool.now), None);
    // What was declined has never come to be.
    assert_eq!([pool.read(0), pool.read(8), pool.read(16), pool.read(17)], [Ok(3), Ok(0), Ok(0), Ok(0)]);
    assert_eq!([pool.write(17, 4), pool.write(24, 4), pool.write(8, 4)], [Ok(()); 3]);
    assert_eq!([pool.read(17), pool.read(24), pool.read(8)], [Ok(4); 3]);
}

/// Who has none waits as long as he waits for servers; for ever, if he says so.
#[test]
fn what_has_nowhere_else_to_go_waits() {
    for patience in [None, Some(PATIENCE)] {
        let mut pool = Pool::new(1, 1, 4);
        pool.client.pool.config.error_after = patience;
        assert_eq!(pool.write(8, 1), Ok(()));
        pool.no_control = true;
        pool.begin_write(0, 1);
        pool.pass(PATIENCE / 2);
        assert_eq!(results(&mut pool), []);
        pool.pass(PATIENCE);
        if patience.is_some() {
            assert_eq!(results(&mut pool), unanswered(1));
            // At once from now on in the same slab; soon in one that nobody has asked for, and in one that is being given back.
            assert!(pool.client.discard_slab(pool.now, pool.space, SlabNo(1)));
            [0, 1, 16, 9].into_iter().for_each(|page| pool.begin_write(page, 2));
            pool.client.on_timeout(pool.now);
            assert_eq!(results(&mut pool), unanswered(2));
            pool.pass(GRACE);
            assert_eq!((results(&mut pool), pool.client.stats().unmapped), (unanswered(2), 5));
            [16, 9].into_iter().for_each(|page| pool.begin_write(page, 2));
            pool.client.on_timeout(pool.now);
            assert_eq!(results(&mut pool), unanswered(2));
        } else {
            pool.pass(60 * PATIENCE);
            assert_eq!(results(&mut pool), []);
        }
        pool.no_control = false;
        pool.pass(Duration::from_secs(2));
        if patience.is_none() {
            pool.expect_written(1);
        }
        assert_eq!(pool.read(0), Ok(u8::from(patience.is_none())));
        assert_eq!([pool.write(0, 3), pool.write(16, 3), pool.write(9, 3)], [Ok(()); 3]);
        assert_eq!([pool.read(0), pool.read(16), pool.read(9)], [Ok(3); 3]);
        assert!(pool.client.is_idle());
    }
}

/// A pool with a page at both of its servers, of which one dies while nobody keeps the map.
fn without_a_copy() -> Pool {
    let mut pool = Pool::new(2, 2, 4);
    pool.client.pool.config.error_after = Some(PATIENCE);
    assert_eq!([pool.write(0, 1), pool.write(1, 1)], [Ok(()); 2]);
    (pool.no_control, pool.deaf) = (true, vec![1]);
    pool.begin_write(0, 2);
    pool.pass(PATIENCE / 2);
    assert_eq!(results(&mut pool), []);
    pool.pass(PATIENCE);
    assert_eq!(results(&mut pool), unanswered(1));
    pool
}

/// A write that only waits for a dead copy to leave the map fails for its caller, and is done when the map says so.
#[test]
fn a_write_that_waits_for_a_copy_to_leave_ends() {
    for with_word in [true, false] {
        let mut pool = without_a_copy();
        // Behind it, beside it, and what is read meanwhile.
        for page in [0, 1] {
            pool.begin_write(page, 3);
            pool.client.on_timeout(pool.now);
            assert_eq!(results(&mut pool), unanswered(1), "page {page}");
        }
        assert_eq!((pool.client.stats().unmapped, pool.client.in_sync(pool.space)), (3, (1, 1)));
        assert!(!pool.client.is_idle() && !pool.client.is_even(pool.space));
        if with_word {
            pool.no_control = false;
        } else {
            pool.deaf.clear();
        }
        pool.pass(Duration::from_secs(3));
        assert_eq!(results(&mut pool), []);
        assert!(pool.client.pages.ops.is_idle() && pool.client.pages.ops.has_no_writer());
        assert_eq!([pool.read(0), pool.read(1)], [Ok(2), Ok(1)]);
        pool.no_control = false;
        assert_eq!([pool.write(0, 4), pool.write(1, 5)], [Ok(()); 2]);
        assert_eq!([pool.read(0), pool.read(1)], [Ok(4), Ok(5)]);
    }
}

/// Nor does it take the place of one that could end: a guest may go on writing for as long as etcd is away.
#[test]
fn writes_that_wait_for_the_map_take_nobodys_slot() {
    let mut pool = Pool::of(3, 2, 400, 4096, None);
    pool.client.pool.config.error_after = Some(PATIENCE);
    (0..4096).step_by(8).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
    let (held, free): (Vec<u64>, Vec<u64>) =
        (0..4096).partition(|page| pool.holders(SlabNo(*page as u32 / 8)).contains(&2));
    (pool.no_control, pool.deaf) = (true, vec![2]);
    pool.begin_write(held[0], 2);
    pool.pass(2 * PATIENCE);
    assert_eq!(results(&mut pool), unanswered(1));
    // The copies of all slabs are to leave since then.
    // More than there are slots to wait in.
    assert!(held.len() > 2 * OPS_MAX);
    for page in &held {
        pool.begin_write(*page, 3);
        assert_eq!(results(&mut pool), unanswered(1), "page {page}");
    }
    for page in &free {
        pool.begin_write(*page, 4);
        pool.expect_written(1);
    }
    pool.no_control = false;
    pool.pass(Duration::from_secs(3));
    assert_eq!(results(&mut pool), []);
    assert!(pool.client.pages.ops.is_idle());
    assert_eq!((pool.write(held[1], 5), pool.read(held[1]), pool.read(free[0])), (Ok(()), Ok(5), Ok(4)));
}

/// A server that answers and has lost what it had is as good as dead.
#[test]
fn a_copy_that_is_lost_at_a_server_that_answers_is_not_waited_for() {
    for copies in [1, 2] {
        let mut pool = Pool::new(2, copies, 4);
        pool.client.pool.config.error_after = Some(PATIENCE);
        assert_eq!(pool.write(0, 1), Ok(()));
        let holder = pool.holders(SlabNo(0))[0];
        pool.no_control = true;
        pool.client.forget_content(pool.now, ServerId(holder as u32));
        pool.begin_write(0, 2);
        pool.client.read(pool.now, pool.space, PageNo(1), Class::Demand, 2).unwrap();
        pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
        pool.pass(2 * PATIENCE);
        let failed = results(&mut pool).iter().filter(|event| matches!(event, Event::Written { .. })).count();
        assert_eq!(failed, 1);
        pool.begin_write(0, 3);
        pool.begin_write(1, 3);
        pool.client.on_timeout(pool.now);
        assert_eq!(results(&mut pool), unanswered(2));
        pool.no_control = false;
        pool.pass(Duration::from_secs(3));
        assert_eq!(results(&mut pool), []);
        assert!(pool.client.pages.ops.is_idle() && pool.client.pages.ops.has_no_writer());
        let expected = if copies == 1 { Err(Failure::Lost) } else { Ok(2) };
        assert_eq!(pool.read(0), expected);
    }
}

/// What it cannot answer says nothing of the rest.
#[test]
fn one_question_without_an_answer_fails_its_slab_only() {
    let mut pool = Pool::new(2, 2, 4);
    pool.client.pool.config.error_after = Some(PATIENCE);
    pool.no_control_of = Some(SlabNo(1));
    pool.begin_write(8, 1);
    pool.pass(2 * PATIENCE);
    assert_eq!(results(&mut pool), unanswered(1));
    pool.begin_write(9, 1);
    pool.client.on_timeout(pool.now);
    assert_eq!(results(&mut pool), unanswered(1));
    for page in [0, 16] {
        pool.begin_write(page, 2);
        pool.pass(PATIENCE / 10);
        pool.expect_written(1);
    }
    pool.no_control_of = None;
    pool.pass(Duration::from_secs(2));
    pool.begin_write(9, 3);
    pool.pass(PATIENCE / 10);
    pool.expect_written(1);
}

/// Nor does a silence that has only begun end what waits for it.
#[test]
fn a_short_silence_beside_such_a_question_is_waited_for() {
    let mut pool = Pool::new(2, 2, 4);
    pool.client.pool.config.error_after = Some(PATIENCE);
    pool.no_control_of = Some(SlabNo(1));
    pool.begin_write(8, 1);
    pool.pass(PATIENCE / 2);
    assert_eq!(pool.write_in_time(0, 1), Ok(()));
    pool.pass(2 * PATIENCE);
    assert_eq!(results(&mut pool), unanswered(1));
    // A server and the keeper of the map fail together; another is elected.
    (pool.no_control, pool.deaf) = (true, vec![1]);
    pool.begin_write(0, 2);
    pool.begin_write(16, 2);
    pool.pass(PATIENCE / 2);
    assert_eq!(results(&mut pool), []);
    pool.no_control = false;
    pool.pass(Duration::from_secs(2));
    pool.expect_written(2);
}

/// What is tried to see whether the control plane is back takes slabs from servers, so it is little.
#[test]
fn few_slabs_are_asked_for_in_vain() {
    let mut pool = Pool::of(2, 1, 256, 4096, None);
    pool.client.pool.config.error_after = Some(PATIENCE);
    pool.no_control = true;
    pool.begin_write(0, 1);
    pool.pass(2 * PATIENCE);
    assert_eq!(results(&mut pool), unanswered(1));
    let held = |pool: &Pool| pool.servers.iter().map(Server::held_slabs).sum::<usize>();
    for _ in 0..3 {
        (8..4096).step_by(8).take(100).for_each(|page| pool.begin_write(page, 1));
        pool.client.on_timeout(pool.now);
        assert!(results(&mut pool).len() >= 90, "most end at once");
        pool.pass(GRACE);
        results(&mut pool);
    }
    assert!(held(&pool) <= 1 + 3 * 4, "{} slabs", held(&pool));
    pool.no_control = false;
    pool.pass(Duration::from_secs(2));
    (8..4096).step_by(8).take(100).for_each(|page| assert_eq!(pool.write(page, 2), Ok(()), "page {page}"));
}

/// A copy in the making that has caught up is no reason to fail a write that all others have; dead, it is none to wait either.
#[test]
fn a_copy_in_the_making_holds_no_write_up() {
    for dies in [false, true] {
        let mut pool = Pool::new(3, 2, 8);
        pool.client.pool.config.error_after = Some(PATIENCE);
        (0..4).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
        let holders = pool.holders(SlabNo(0));
        let third = (0..3).find(|node| !holders.contains(node)).unwrap();
        // As when the map is to be rid of a copy while another is being made, and both of the others answer.
        let grant = pool.client.pool.map.spaces[SpaceIndex(0)].next_version(false).unwrap();
        assert_eq!(pool.servers[third].lend(SpaceId(1), SlabNo(0), Generation(1), grant), Status::Ok);
        let mut repair = Repair::new(PeerIndex(third), grant, None);
        repair.step = Step::Copying;
        repair.list = vec![Version::NEVER; 8].into();
        pool.client.redundancy.begins_repair(&mut pool.client.pool, SpaceIndex(0), SlabNo(0), repair);
        pool.no_control = true;
        let keep = [PeerIndex(holders[0])].into_iter().collect();
        let entry = pool.client.pool.entry_of(SpaceIndex(0), SlabNo(0), keep);
        pool.client.pool.map.propose(SpaceIndex(0), SlabNo(0), entry);
        pool.pass(2 * PATIENCE);
        pool.slow = Some(third);
        if dies {
            pool.deaf = vec![third];
        }
        pool.begin_write(0, 2);
        pool.pass(Duration::from_millis(5));
        assert_eq!(results(&mut pool), [], "{dies}");
        if dies {
            pool.pass(Duration::from_secs(1));
        } else {
            pool.deliver_late_from(third);
        }
        pool.expect_written(1);
        assert_eq!(pool.read(0), Ok(2));
    }
}

/// The next owner finds what some copy has of it, or what was before; the same each time.
#[test]
fn a_write_that_waited_in_vain_is_there_or_not() {
    let mut pool = without_a_copy();
    let entry = pool.client.pool.map.spaces[pool.space.0].slabs[SlabNo(0)].entry.clone();
    assert_eq!(entry.replicas.len(), 2);
    pool.deaf.clear();
    pool.no_control = false;
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.client.space_taken(SpaceIndex(0));
    pool.space = pool.client.attach(&spec, Generation(2), &[(SlabNo(0), entry)]).unwrap();
    pool.pass(Duration::from_secs(3));
    assert_eq!([pool.read(0), pool.read(0), pool.read(1)], [Ok(2), Ok(2), Ok(1)]);
}

/// Without copies a slab is empty only if that is said.
#[test]
fn what_cannot_be_is_no_zeros() {
    let copy = Replica { server: ServerId(0), grant: Version::new(Generation(1), 1, false) };
    let of = |lost, empty, replicas: &[Replica]| MapEntry { revision: 1, replicas: replicas.into(), lost, empty };
    for (entry, expected) in [
        (of(false, true, &[]), Ok(0)),
        (of(true, false, &[]), Err(Failure::Lost)),
        (of(false, false, &[]), Err(Failure::Lost)),
        (of(true, true, &[]), Err(Failure::Lost)),
        (of(true, false, &[copy]), Err(Failure::Lost)),
        (of(false, true, &[copy]), Err(Failure::Lost)),
    ] {
        let mut pool = Pool::new(1, 1, 4);
        let spec = SpaceSpec { id: SpaceId(2), pages: 8, copies: 1, reserve: 0, key: [2; KEY_SIZE] };
        pool.space = pool.client.attach(&spec, Generation(2), &[(SlabNo(0), entry.clone())]).unwrap();
        assert_eq!(pool.read(3), expected, "{entry:?}");
        assert_eq!(entry.is_sound(), entry.empty != entry.lost && entry.replicas.is_empty(), "{entry:?}");
    }
    assert!(of(false, false, &[copy]).is_sound());
}
