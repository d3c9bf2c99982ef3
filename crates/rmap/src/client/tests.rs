//! A client among honest and dishonest servers, on a perfect network.

mod address;
mod busy;
mod catch_up;
mod choice;
mod cold;
mod confirm;
mod control;
mod damage;
mod dissolve;
mod fence;
mod follow;
mod keeper;
mod ledger;
mod leftovers;
mod lies;
mod load;
mod lossy;
mod many;
mod overflow_disk;
mod parting;
mod pool;
mod reserve;
mod returns;
mod scrub;
mod sealed;
mod silent;
mod stand_in;
mod unanswered;
mod vacate;

use std::collections::HashMap;
use std::time::Duration;

use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::peer::Peer;
use crate::control::{MapEntry, Today};
use crate::crypto::{KEY_SIZE, Keypair, PoolKey};
use crate::server::{Fault as ServerFault, Server, ServerConfig};
use crate::units::{BootEpoch, Generation, PAGE_SIZE, ServerId, SlabNo, SlabSize, SpaceId};
use crate::wire::message::{Pressure, Status};

use pool::{Counting, Pool, addr, slab_size};

#[test]
fn pages_are_written_read_and_trimmed() {
    let mut pool = Pool::new(2, 2, 4);
    assert_eq!(pool.read(5), Ok(0));
    assert_eq!(pool.write(5, 7), Ok(()));
    assert_eq!(pool.write(5, 8), Ok(()));
    assert_eq!([pool.read(5), pool.read(6)], [Ok(8), Ok(0)]);
    pool.trim(5);
    assert_eq!(pool.read(5), Ok(0));
    assert_eq!(pool.client.in_sync(pool.space), (1, 1));
    let refused = pool.client.read(pool.now, pool.space, PageNo(64), Class::Demand, 1);
    assert_eq!(refused, Err(Refused::BeyondEnd));
}

#[test]
fn a_full_pool_declines() {
    let mut pool = Pool::new(1, 1, 1);
    assert_eq!(pool.write(0, 1), Ok(()));
    assert_eq!(pool.write(8, 1), Err(Failure::Declined));
    assert_eq!(pool.read(8), Ok(0));
    assert_eq!(pool.read(0), Ok(1));
}

/// Nobody told the client: an idle server is heard of once a second.
#[test]
fn room_that_has_come_is_room() {
    let mut pool = Pool::new(2, 2, 1);
    pool.servers.iter_mut().for_each(|server| server.set_pressure(Pressure::Yellow));
    pool.pass(Duration::from_secs(3));
    assert_eq!(pool.write(0, 1), Err(Failure::Declined));
    pool.servers.iter_mut().for_each(|server| server.set_pressure(Pressure::None));
    assert_eq!(pool.write(0, 2), Ok(()));
    assert_eq!(pool.read(0), Ok(2));
}

#[test]
fn another_owner_ends_everything() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let replica = pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.clone();
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 1, reserve: 0, key: [2; KEY_SIZE] };
    let old = pool.space;
    pool.space = pool.client.attach(&spec, Generation(2), &[(SlabNo(0), replica)]).unwrap();
    assert_eq!(pool.read(0), Ok(1));
    assert_eq!(pool.write(0, 2), Ok(()));
    let new = std::mem::replace(&mut pool.space, old);
    assert_eq!(pool.write(0, 3), Err(Failure::Fenced));
    pool.space = new;
    assert_eq!(pool.read(0), Ok(2));
}

/// A request that is under way when its server is due to be asked for a sign of life: nothing is due over and over.
#[test]
fn what_was_due_is_not_due_again_at_once() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.now = pool.now + Duration::from_millis(990);
    pool.deaf = vec![0];
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
    for _ in 0..20 {
        pool.run();
        pool.now = pool.now + Duration::from_millis(1);
        pool.client.on_timeout(pool.now);
        let mut out = Vec::new();
        while pool.client.poll_transmit(pool.now, &mut out).is_some() {}
        let due = pool.client.poll_timeout(pool.now);
        assert!(due.is_some_and(|due| due > pool.now), "{due:?} at {:?}", pool.now);
    }
    pool.deaf = Vec::new();
    pool.pass(Duration::from_millis(20));
    assert_eq!(pool.client.poll_event(&mut [0; PAGE_SIZE]), Some(Event::Written { token: 1, result: Ok(()) }));
}

/// Longer than a server that holds the only copy of something may stay away.
const FOR_GOOD: Duration = Duration::from_secs(40);
/// Longer than a server may be silent.
const SILENCE: Duration = Duration::from_millis(40);

/// One server dies a moment after the other has paused: the paused one is not given up for the dead one.
#[test]
fn a_server_that_may_be_dead_is_not_relied_on() {
    let mut pool = Pool::new(2, 2, 4);
    assert_eq!([pool.write(0, 1), pool.write(1, 1)], [Ok(()); 2]);
    for (page, deaf) in [(0, vec![1]), (1, vec![0, 1])] {
        pool.deaf = deaf;
        pool.begin_write(page, 2);
        pool.pass(Duration::from_millis(20));
    }
    pool.pass(SILENCE);
    pool.deaf = vec![0];
    pool.pass(FOR_GOOD);
    pool.expect_written(2);
    assert_eq!([pool.read(0), pool.read(1)], [Ok(2); 2]);
}

/// What a server said before it died may be read long after: a client that had to wait for a core finds it in its socket.
#[test]
fn a_late_reply_is_no_sign_of_life() {
    let mut pool = Pool::new(2, 2, 4);
    assert_eq!([pool.write(0, 1), pool.write(1, 1)], [Ok(()); 2]);
    pool.deaf = vec![1];
    pool.begin_write(0, 2);
    pool.pass(Duration::from_millis(20));
    pool.slow = Some(0);
    pool.begin_write(1, 2);
    pool.deaf = vec![0, 1];
    pool.pass(Duration::from_millis(18));
    assert!(
        pool.client.pool.sessions.peers[PeerIndex(1)].is_down()
            && !pool.client.pool.sessions.peers[PeerIndex(0)].is_down()
    );
    pool.deliver_late();
    pool.pass(SILENCE);
    pool.deaf = vec![0];
    pool.pass(FOR_GOOD);
    pool.expect_written(2);
    assert_eq!([pool.read(0), pool.read(1)], [Ok(2); 2]);
}

/// The other server lives, and what asks it whether it does gets lost: that is asked again, and soon.
#[test]
fn a_lost_ping_is_repeated() {
    for busy in [0, 30] {
        let mut pool = Pool::new(2, 2, 5);
        (0..=busy).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
        pool.deaf = vec![1];
        pool.begin_write(0, 2);
        pool.pass(Duration::from_millis(20));
        // What is under way is repeated, too. Its answers do not say which request they are the answers to.
        pool.deaf = vec![0, 1];
        (1..=busy).for_each(|page| pool.begin_write(page, 2));
        pool.pass(Duration::from_millis(18));
        assert!(
            pool.client.pool.sessions.peers[PeerIndex(1)].is_down()
                && !pool.client.pool.sessions.peers[PeerIndex(0)].is_down()
        );
        pool.deaf = vec![1];
        pool.pass(Duration::from_millis(9));
        let slabs = 1 + busy as usize / 8;
        assert_eq!(pool.client.in_sync(pool.space), (0, slabs));
        pool.pass(2 * SILENCE);
        pool.expect_written(1 + busy as usize);
    }
}

/// A new owner hears one copy, which dies then, and not the other, which is only paused.
#[test]
fn a_slab_is_not_opened_by_a_server_that_may_be_dead() {
    let mut pool = Pool::new(2, 2, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.client.space_taken(SpaceIndex(0));
    let map = [(SlabNo(0), pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.clone())];
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.deaf = vec![1];
    pool.space = pool.client.attach(&spec, Generation(2), &map).unwrap();
    pool.pass(Duration::from_millis(5));
    pool.deaf = vec![0, 1];
    pool.pass(2 * SILENCE);
    pool.deaf = vec![0];
    pool.pass(FOR_GOOD);
    assert_eq!(pool.read(0), Ok(1));
    assert_eq!(pool.client.in_sync(pool.space), (0, 1));
}

/// Reads of what only a silent server has wait without a slot, so that those of other servers find one; and end when it
/// is back.
#[test]
fn a_silent_server_does_not_starve_the_others() {
    let mut pool = Pool::new(2, 1, 8);
    pool.client.pool.config.error_after = None;
    (0..64).for_each(|page| assert_eq!(pool.write(page, page as u8 + 1), Ok(())));
    let at = |pool: &Pool, page: u64, node| {
        pool.client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(page as u32 / 8)].entry)
            .has(node)
    };
    let (silent, other): (Vec<u64>, Vec<u64>) = (0..64).partition(|page| at(&pool, *page, PeerIndex(0)));
    assert!(!silent.is_empty() && !other.is_empty());
    pool.deaf = vec![0];
    let read =
        |pool: &mut Pool, page: u64, token| pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, token);
    // Half of them before the silence is noticed, more than there are slots after that.
    let asked: Vec<u64> = silent.iter().copied().cycle().take(3 * OPS_MAX).collect();
    for (at, page) in asked.iter().enumerate() {
        if at == OPS_MAX / 2 {
            pool.pass(2 * SILENCE);
        }
        read(&mut pool, *page, 100 + at as u64).unwrap();
    }
    for page in &other {
        assert_eq!(pool.read(*page), Ok(*page as u8 + 1));
    }
    pool.pass(FOR_GOOD);
    assert!(!pool.client.has_event() && !pool.client.is_idle());
    pool.deaf = Vec::new();
    pool.pass(Duration::from_secs(2));
    let mut seen = vec![false; asked.len()];
    let mut content = [0; PAGE_SIZE];
    while let Some(event) = pool.client.poll_event(&mut content) {
        let Event::Read { token, result: Ok(()) } = event else { panic!("{event:?}") };
        let at = token as usize - 100;
        assert_eq!(content[0], asked[at] as u8 + 1);
        assert!(!std::mem::replace(&mut seen[at], true), "twice");
        pool.run();
    }
    assert!(seen.iter().all(|seen| *seen), "{} of {} came", seen.iter().filter(|seen| **seen).count(), seen.len());
    assert!(pool.client.is_idle());
}

/// A space that another owner takes, or a server that comes back empty, ends the reads that wait.
#[test]
fn what_waits_for_a_silent_server_fails_when_it_is_lost() {
    for is_taken in [false, true] {
        let mut pool = Pool::new(1, 1, 4);
        pool.client.pool.config.error_after = None;
        assert_eq!(pool.write(0, 1), Ok(()));
        pool.deaf = vec![0];
        pool.client.read(pool.now, pool.space, PageNo(0), Class::Demand, 2).unwrap();
        pool.pass(FOR_GOOD);
        assert!(!pool.client.has_event());
        if is_taken {
            pool.client.space_taken(SpaceIndex(0));
        } else {
            pool.client.forget_content(pool.now, ServerId(0));
            pool.pass(SILENCE);
        }
        let result = Err(if is_taken { Failure::Fenced } else { Failure::Lost });
        assert_eq!(pool.client.poll_event(&mut [0; PAGE_SIZE]), Some(Event::Read { token: 2, result }));
    }
}

/// A server in distress keeps its copy if the other one may be dead.
#[test]
fn a_server_in_distress_is_relieved_only_by_one_that_lives() {
    for dies in [false, true] {
        let mut pool = Pool::new(2, 2, 4);
        assert_eq!(pool.write(0, 1), Ok(()));
        pool.servers[0].set_pressure(crate::wire::message::Pressure::Red);
        pool.deaf = if dies { vec![1] } else { vec![] };
        pool.begin_write(0, 2);
        pool.pass(FOR_GOOD);
        pool.expect_written(1);
        assert_eq!(pool.client.in_sync(pool.space), (0, 1));
        assert_eq!(
            pool.client
                .pool
                .sessions
                .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry)
                .has(PeerIndex(0)),
            dies
        );
        assert_eq!(pool.read(0), Ok(2));
    }
}

/// A server that is to be emptied keeps its copy if the one that has the new copy may be dead.
#[test]
fn a_copy_does_not_move_to_a_server_that_may_be_dead() {
    let mut pool = Pool::new(2, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let old = usize::from(
        !pool
            .client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry)
            .has(PeerIndex(0)),
    );
    let new = 1 - old;
    pool.servers[old].set_pressure(crate::wire::message::Pressure::Orange);
    // The page goes through the client, which takes no answer of the new server.
    pool.client.pool.sessions.peers[PeerIndex(old)].distrust();
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
    while pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)]
        .repair
        .as_ref()
        .is_none_or(|repair| repair.mirror().is_none())
    {
        assert!(pool.step());
    }
    pool.expect_written(1);
    pool.slow = Some(new);
    pool.pass(Duration::from_millis(5));
    assert!(!pool.late.is_empty());
    pool.deaf = vec![new];
    pool.pass(Duration::from_millis(5));
    pool.deliver_late();
    assert_eq!(pool.client.stats().pages_copied, 1);
    pool.pass(FOR_GOOD);
    assert_eq!(pool.read(0), Ok(2));
}

/// A slab that is lost while it is being moved leaves nothing at the server that it was to go to, and no move undone.
#[test]
fn a_lost_slab_is_moved_no_more() {
    let mut pool = Pool::new(2, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let old = (0..2).find(|node| pool.servers[*node].free_slabs() < 4).unwrap();
    let new = 1 - old;
    pool.servers[old].set_pressure(crate::wire::message::Pressure::Orange);
    // The reply says so; what the new server answers once it has the slab comes too late.
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
    while pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)]
        .repair
        .as_ref()
        .is_none_or(|repair| repair.mirror().is_none())
    {
        assert!(pool.step());
    }
    pool.expect_written(1);
    pool.slow = Some(new);
    pool.deaf = vec![old];
    let server = ServerId(old as u32);
    pool.client.forget_content(pool.now, server);
    pool.pass(Duration::from_millis(5));
    pool.slow = None;
    pool.pass(FOR_GOOD);
    assert_eq!(pool.read(0), Err(Failure::Lost));
    assert!(pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].repair.is_none());
    assert_eq!(pool.servers[new].free_slabs(), 4);
}

/// A server that says nothing has not said no; one that stays away has.
#[test]
fn new_slabs_wait_for_a_silent_server() {
    for comes_back in [true, false] {
        let mut pool = Pool::new(1, 1, 8);
        assert_eq!(pool.write(0, 1), Ok(()));
        pool.deaf = vec![0];
        // The first slab's write has the server found silent, the other one comes when it is.
        pool.begin_write(0, 2);
        pool.pass(Duration::from_secs(1));
        pool.begin_write(8, 3);
        pool.pass(Duration::from_secs(20));
        assert!(!pool.client.has_event());
        if comes_back {
            pool.deaf = Vec::new();
            pool.pass(FOR_GOOD);
            pool.expect_written(2);
            assert_eq!([pool.read(0), pool.read(8)], [Ok(2), Ok(3)]);
        } else {
            pool.pass(Duration::from_secs(20));
            let events: Vec<Event> = std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).collect();
            assert!(events.contains(&Event::Written { token: 1, result: Err(Failure::Declined) }), "{events:?}");
        }
    }
}

/// An owner that left writes unfinished in several slabs: together they need more copies than there is room for.
#[test]
fn slabs_take_turns_at_the_room_for_copies() {
    const UNFINISHED: u64 = copies::COPIES_MAX as u64 + 8;
    let mut pool = Pool::new(2, 2, 8);
    (0..UNFINISHED).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
    pool.deaf = vec![1];
    for page in 0..UNFINISHED {
        pool.client.write(pool.now, pool.space, PageNo(page), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
    }
    pool.run();
    pool.deaf = Vec::new();
    // What the last owner still has under way at the other server is not to stand in the way.
    pool.client.space_taken(SpaceIndex(0));
    while pool.client.poll_event(&mut [0; PAGE_SIZE]).is_some() {}
    let map: Vec<_> = (0..5)
        .map(|slab| (SlabNo(slab), pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(slab)].entry.clone()))
        .collect();
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.space = pool.client.attach(&spec, Generation(2), &map).unwrap();
    (0..UNFINISHED).for_each(|page| assert_eq!(pool.read(page), Ok(2), "page {page}"));
}

/// The server says that it wants to be rid of its slabs; its client moves them, and loses no page.
#[test]
fn a_server_under_pressure_is_drained() {
    let mut pool = Pool::new(3, 2, 4);
    for page in 0..16 {
        assert_eq!(pool.write(page, page as u8 + 1), Ok(()));
    }
    pool.trim(3);
    let victim = (0..3).find(|node| pool.servers[*node].free_slabs() < 4).unwrap();
    pool.servers[victim].set_pressure(crate::wire::message::Pressure::Orange);
    // What it says rides in replies.
    for page in 0..16 {
        let expected = if page == 3 { 0 } else { page as u8 + 1 };
        assert_eq!([pool.write(page + 16, 1), pool.write(page + 16, 2)], [Ok(()); 2]);
        assert_eq!(pool.read(page), Ok(expected));
    }
    assert!(pool.servers[victim].is_drained(), "{:?}", pool.servers[victim].spaces());
    let stats = *pool.client.stats();
    assert!(stats.slabs_transferred > 0 && stats.pages_copied == 0, "{stats:?}");
    assert_eq!(pool.client.in_sync(pool.space), (4, 4));
    for page in 0..16 {
        assert_eq!(pool.read(page), Ok(if page == 3 { 0 } else { page as u8 + 1 }));
    }
}

#[test]
fn a_server_is_drained_at_a_clients_request() {
    let mut pool = Pool::new(3, 2, 4);
    for page in 0..16 {
        assert_eq!(pool.write(page, page as u8 + 1), Ok(()));
    }
    let victim = (0..3).find(|node| pool.servers[*node].free_slabs() < 4).unwrap();
    let ask = |pool: &mut Pool, drain| {
        pool.client.ask_drain(ServerId(victim as u32), drain);
        pool.run();
        pool.client.ask_reports();
        pool.run();
        let views: Vec<ServerView> = pool.client.servers().collect();
        assert!(views.iter().all(|view| view.report.is_some()));
        (views[victim].drain, views[victim].report.unwrap())
    };
    let (answer, report) = ask(&mut pool, Drain::Begin);
    assert_eq!((answer, report.draining), (Some(Status::Denied), false));
    assert!(report.held > 0 && report.writes > 0, "{report:?}");
    pool.servers[victim].set_admins(vec![Keypair::from_private([50; KEY_SIZE]).public()]);
    let (answer, report) = ask(&mut pool, Drain::Begin);
    assert_eq!((answer, report.draining), (Some(Status::Ok), true));
    for page in 0..16 {
        assert_eq!([pool.write(page + 16, 1), pool.write(page + 16, 2)], [Ok(()); 2]);
        assert_eq!(pool.read(page), Ok(page as u8 + 1));
    }
    assert!(pool.servers[victim].is_drained(), "{:?}", pool.servers[victim].spaces());
    let (answer, report) = ask(&mut pool, Drain::CallOff);
    assert_eq!((answer, report.draining, report.held), (Some(Status::Ok), false, 0));
}

/// A disk that is removed takes nothing with it and leaves nothing behind; nobody reads zeros from it.
#[test]
fn slabs_are_given_back() {
    let mut pool = Pool::new(2, 2, 4);
    for page in [0, 9, 30] {
        assert_eq!(pool.write(page, 1), Ok(()));
    }
    while pool.client.give_back(pool.now, pool.space) > 0 {
        pool.run();
    }
    pool.run();
    assert!(pool.servers.iter().all(Server::is_drained));
    assert_eq!(pool.read(9), Err(Failure::Lost));
    assert_eq!(pool.write(9, 2), Err(Failure::Lost));
}

/// A slab that is not needed goes back to its servers, and comes anew with the next write. Not while something is under way.
#[test]
fn a_slab_is_discarded_and_comes_anew() {
    let mut pool = Pool::new(2, 2, 4);
    let (first, other) = (SlabNo(0), SlabNo(1));
    assert_eq!([pool.write(0, 1), pool.write(3, 1), pool.write(8, 1)], [Ok(()); 3]);
    assert!(!pool.client.discard_slab(pool.now, pool.space, SlabNo(2)), "nobody has it");
    assert!(!pool.client.discard_slab(pool.now, pool.space, SlabNo(99)), "there is none");
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[2; PAGE_SIZE], 1).unwrap();
    assert!(!pool.client.discard_slab(pool.now, pool.space, first), "it is written to");
    pool.run();
    pool.expect_written(1);
    assert!(pool.client.discard_slab(pool.now, pool.space, first));
    assert!(!pool.client.discard_slab(pool.now, pool.space, first), "it leaves already");
    // The control plane has not answered yet: what is written now comes into the next life, not into this one.
    pool.client.write(pool.now, pool.space, PageNo(3), Class::Eviction, &[7; PAGE_SIZE], 1).unwrap();
    assert_eq!(pool.client.pool.sessions.peers.iter().map(|peer| peer.waiting().0).sum::<usize>(), 0);
    pool.run();
    pool.expect_written(1);
    assert_eq!([pool.read(0), pool.read(3), pool.read(8)], [Ok(0), Ok(7), Ok(1)]);
    for slab in [first, other] {
        assert!(pool.client.discard_slab(pool.now, pool.space, slab));
        pool.run();
    }
    assert!(pool.servers.iter().all(Server::is_drained));
    assert_eq!(pool.client.in_sync(pool.space), (0, 0));
    assert!(pool.client.is_idle());
    // One of its servers dies with the answer of the control plane under way.
    assert_eq!(pool.write(0, 4), Ok(()));
    assert!(pool.client.discard_slab(pool.now, pool.space, first));
    pool.client.forget_content(pool.now, ServerId(0));
    pool.run();
    assert_eq!(pool.write(3, 5), Ok(()));
    assert_eq!([pool.read(3), pool.read(0)], [Ok(5), Ok(0)]);
}

#[test]
fn limits_are_said() {
    let mut pool = Pool::new(1, 1, 1);
    let spec = |pages, copies| SpaceSpec { id: SpaceId(9), pages, copies, reserve: 0, key: [2; KEY_SIZE] };
    let mut attach =
        |pages, copies, generation| pool.client.attach(&spec(pages, copies), Generation(generation), &[]).err();
    assert_eq!(attach(8, 3, 1), Some(ClientError::Copies { copies: 3 }));
    assert!(matches!(attach(0, 1, 1), Some(ClientError::Size { pages: 0, .. })));
    assert_eq!(attach(8, 1, 0), Some(ClientError::Generation { generation: 0 }));
    assert_eq!(attach(8, 1, 1), None);
}
