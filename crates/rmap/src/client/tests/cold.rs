//! Parity of what is cold in a space that is written.

use super::*;
use crate::client::exchange::{Exchange, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::SlabNo;

/// As long as nothing is written to it, a slab is not cold; and longer than all takes until its group has parity.
pub const AFTER: Duration = Duration::from_millis(200);
pub const LONG: Duration = Duration::from_millis(700);
/// Pages that are written: a group of four slabs, and two of another.
const PAGES: u64 = 48;
const SLAB: u64 = 8;

fn spec() -> SpaceSpec {
    SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] }
}

pub fn byte(page: u64) -> u8 {
    page as u8 + 1
}

pub fn written(servers: usize) -> Pool {
    let mut pool = Pool::new(servers, 2, 32);
    pool.client.set_parity_after(Some(AFTER));
    (0..PAGES).for_each(|page| assert_eq!(pool.write(page, byte(page)), Ok(())));
    pool
}

/// Both groups have parity.
pub fn cold(servers: usize) -> Pool {
    let mut pool = written(servers);
    pool.pass(LONG);
    assert_eq!(pool.client.parity(pool.space), ParityView { groups: 2, with_parity: 2, whole: 2, stuck: 0 });
    pool
}

fn lent(pool: &Pool) -> usize {
    pool.servers.iter().map(Server::held_slabs).sum()
}

pub fn assert_right(pool: &mut Pool, except: &[u64]) {
    for page in (0..64).filter(|page| !except.contains(page)) {
        let expected = if page < PAGES { byte(page) } else { 0 };
        assert_eq!(read(pool, page), Ok(expected), "page {page}");
    }
}

fn map(pool: &Pool) -> Vec<(SlabNo, MapEntry)> {
    let entries = pool.client.pool.map.spaces[pool.space.0].slabs.iter().map(|slab| slab.entry.clone());
    (0..).map(SlabNo).zip(entries).filter(|(_, entry)| entry.revision > 0).collect()
}

/// A server begins a new life, with nothing in it.
pub fn kill(pool: &mut Pool, node: usize, life: u64) {
    let keys = Keypair::from_private([node as u8 + 1; KEY_SIZE]);
    let admitted = vec![Keypair::from_private([50; KEY_SIZE]).public()];
    let config = ServerConfig {
        id: ServerId(node as u32),
        keys,
        pool: PoolKey::new([1; KEY_SIZE]),
        admitted,
        slabs: 32,
        slab_size: slab_size(),
        quota: u32::MAX,
        epoch: BootEpoch(life),
        medium: None,
    };
    pool.servers[node] = Server::new(config, Box::new(Counting(100 * life + node as u64))).unwrap();
}

/// Another owner, with the map as it is now, or as it is once the change that is under way has been made.
pub fn hand_over(pool: &mut Pool, with_pending: bool) {
    let mut map = map(pool);
    if with_pending {
        for (slab, state) in pool.client.pool.map.spaces[pool.space.0].slabs.iter().enumerate() {
            let Some(pending) = &state.pending else { continue };
            map.retain(|(number, _)| number.0 as usize != slab);
            map.push((SlabNo(slab as u32), pending.entry.clone()));
        }
    }
    let generation = Generation(pool.client.pool.map.spaces[pool.space.0].generation.0 + 1);
    pool.client.space_taken(pool.space.0);
    while pool.client.poll_event(&mut [0; PAGE_SIZE]).is_some() {}
    pool.space = pool.client.attach(&spec(), generation, &map).unwrap();
    pool.client.settle(pool.now);
}

/// A page that a server may have to be given up for.
pub fn read(pool: &mut Pool, page: u64) -> Result<u8, Failure> {
    pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, 2).unwrap();
    pool.run();
    let mut content = [0xee; PAGE_SIZE];
    for _ in 0..20 {
        match pool.client.poll_event(&mut content) {
            Some(Event::Read { token: 2, result }) => return result.map(|()| content[0]),
            Some(event) => panic!("{event:?} for a read"),
            None => pool.pass(SILENCE),
        }
    }
    panic!("page {page} is not read: {:?}", pool.client.reach().collect::<Vec<_>>());
}

/// Servers with a slab of the first group.
pub fn holders(pool: &Pool) -> Vec<usize> {
    let slabs = &pool.client.pool.map.spaces[pool.space.0].slabs;
    let copies = (0..4)
        .map(SlabNo)
        .flat_map(|slab| pool.client.pool.sessions.peers_of(&slabs[slab].entry).iter().collect::<Vec<_>>());
    copies.map(|peer| peer.0).collect()
}

#[test]
fn what_is_cold_has_parity_instead_of_second_copies() {
    let mut pool = written(5);
    pool.pass(AFTER / 2);
    assert_eq!((lent(&pool), pool.client.stats().groups_made), (12, 0), "it is not cold yet");
    pool.pass(LONG);
    // Six slabs, two of parity, and the ledger at two servers.
    assert_eq!((lent(&pool), pool.client.stats().groups_made), (6 + 2 + 2, 2));
    assert!(pool.client.is_idle() && pool.client.is_even(pool.space));
    assert_right(&mut pool, &[]);
    assert_eq!(pool.client.stats().degraded, 0);
    // Time alone changes nothing about it.
    pool.pass(LONG);
    assert_eq!((lent(&pool), pool.client.stats().groups_made), (10, 2));
}

#[test]
fn nobody_gets_parity_who_did_not_ask() {
    let mut pool = written(5);
    pool.client.set_parity_after(None);
    pool.pass(LONG);
    assert_eq!(lent(&pool), 12);
    // Nor where there are too few servers.
    let mut pool = written(4);
    pool.pass(LONG);
    assert_eq!(pool.client.parity(pool.space).with_parity, 1, "two slabs and their parity need three");
    assert_right(&mut pool, &[]);
}

#[test]
fn a_write_waits_until_its_group_has_no_parity() {
    let mut pool = cold(5);
    assert_eq!(pool.write(3, 200), Ok(()));
    assert_eq!(pool.client.stats().groups_dissolved, 1);
    assert_eq!(pool.client.parity(pool.space).with_parity, 1);
    assert_eq!(lent(&pool), 8 + 2 + 1 + 2);
    assert_eq!(pool.client.in_sync(pool.space).0, pool.client.in_sync(pool.space).1);
    assert_eq!(read(&mut pool, 3), Ok(200));
    assert_right(&mut pool, &[3]);
    // One copy of each is enough again.
    for node in 0..5 {
        pool.deaf = vec![node];
        pool.pass(SILENCE);
        assert_eq!(read(&mut pool, 3), Ok(200));
        pool.deaf = Vec::new();
        pool.pass(SILENCE);
    }
    // And it gets parity again, with another page in it.
    pool.pass(LONG);
    pool.pass(LONG);
    assert_eq!(pool.client.parity(pool.space).whole, 2);
    for node in 0..5 {
        pool.deaf = vec![node];
        pool.pass(SILENCE);
        assert_eq!(read(&mut pool, 3), Ok(200));
        assert_right(&mut pool, &[3]);
        pool.deaf = Vec::new();
        pool.pass(SILENCE);
    }
    assert!(pool.client.stats().degraded > 0);
}

/// A trimmed page leaves parity of a lesser version than it had before.
#[test]
fn a_trim_is_a_write() {
    let mut pool = cold(5);
    pool.trim(3);
    assert_eq!(pool.client.stats().groups_dissolved, 1);
    pool.pass(LONG);
    pool.pass(LONG);
    assert_eq!(pool.client.parity(pool.space).whole, 2);
    let holders = holders(&pool);
    pool.deaf = vec![holders[1]];
    pool.pass(SILENCE);
    assert_eq!(read(&mut pool, 3), Ok(0));
    assert_right(&mut pool, &[3]);
    assert!(pool.client.stats().degraded > 0 && pool.client.stats().bad_pages == 0);
}

/// A slab of a group that nobody had is another page's in the stripe as soon as somebody writes to it.
#[test]
fn a_new_slab_of_a_group_waits_too() {
    let mut pool = cold(5);
    assert_eq!(pool.write(56, 201), Ok(()));
    assert_eq!(pool.client.stats().groups_dissolved, 1);
    assert_eq!(read(&mut pool, 56), Ok(201));
    assert_right(&mut pool, &[56]);
}

/// Writes to what is being made have it begin anew, and never wait.
#[test]
fn a_write_in_between_ends_the_making() {
    let mut pool = written(5);
    let mut ended = 0;
    for step in 0..60 {
        pool.pass(AFTER + Duration::from_millis(step % 40));
        let before = pool.client.stats().groups_dissolved;
        assert_eq!(pool.write(5, step as u8), Ok(()));
        ended += u64::from(pool.client.stats().groups_dissolved == before);
        assert_eq!(read(&mut pool, 5), Ok(step as u8));
    }
    assert!(ended > 0);
    assert_right(&mut pool, &[5]);
    pool.pass(LONG);
    for node in 0..5 {
        pool.deaf = vec![node];
        pool.pass(SILENCE);
        assert_eq!(read(&mut pool, 5), Ok(59));
        assert_right(&mut pool, &[5]);
        pool.deaf = Vec::new();
        pool.pass(SILENCE);
    }
    assert_eq!(pool.client.stats().bad_pages, 0);
}

#[test]
fn what_is_gone_is_made_anew() {
    let mut pool = cold(6);
    for (life, node) in [(2, 0), (3, 1), (4, 2), (5, 3)] {
        kill(&mut pool, node, life);
        pool.pass(LONG);
        assert_right(&mut pool, &[]);
        pool.pass(LONG);
        assert_eq!(pool.client.parity(pool.space).whole, 2, "after {node}");
    }
    assert_eq!((pool.client.stats().slabs_lost, pool.client.stats().groups_dissolved), (0, 0));
}

/// Written to while a part of its group is gone.
#[test]
fn a_group_that_lacks_a_slab_is_dissolved() {
    for node in 0..5 {
        let mut pool = cold(5);
        kill(&mut pool, node, 2);
        pool.deaf = vec![node];
        pool.pass(SILENCE);
        pool.client.forget_content(pool.now, ServerId(node as u32));
        for page in [3, 20, 40] {
            pool.client.write(pool.now, pool.space, PageNo(page), Class::Eviction, &[99; PAGE_SIZE], 1).unwrap();
        }
        pool.pass(LONG);
        pool.expect_written(3);
        assert_eq!([read(&mut pool, 3), read(&mut pool, 20), read(&mut pool, 40)], [Ok(99); 3]);
        assert_right(&mut pool, &[3, 20, 40]);
        assert_eq!(pool.client.stats().groups_dissolved, 2, "{node}");
        assert_eq!(pool.client.stats().slabs_lost, 0);
    }
}

/// Two servers of a group: what they had is lost, and is an error. The rest can be written to.
#[test]
fn two_that_are_gone_are_lost() {
    let mut pool = cold(5);
    let holders = holders(&pool);
    kill(&mut pool, holders[0], 2);
    kill(&mut pool, holders[1], 2);
    pool.pass(LONG);
    assert_eq!([read(&mut pool, 0), read(&mut pool, SLAB)], [Err(Failure::Lost); 2]);
    assert_eq!([read(&mut pool, 2 * SLAB), read(&mut pool, 3 * SLAB)], [Ok(byte(16)), Ok(byte(24))]);
    assert_eq!(pool.write(0, 1), Err(Failure::Lost));
    assert_eq!(pool.write(2 * SLAB, 9), Ok(()));
    assert_eq!(read(&mut pool, 2 * SLAB), Ok(9));
    assert!(pool.client.stats().groups_dissolved > 0);
    pool.pass(LONG);
    hand_over(&mut pool, false);
    pool.run();
    assert_eq!(
        [read(&mut pool, 0), read(&mut pool, 2 * SLAB), read(&mut pool, 3 * SLAB)],
        [Err(Failure::Lost), Ok(9), Ok(byte(24))]
    );
}

/// All that happens from a write to the first group until there is parity again, in steps: so many datagrams and answers, then
/// `event`, at each of them.
fn at_each_step(event: impl Fn(&mut Pool, usize)) {
    for steps in (0..400).step_by(3) {
        let mut pool = cold(6);
        pool.client.write(pool.now, pool.space, PageNo(3), Class::Eviction, &[77; PAGE_SIZE], 1).unwrap();
        for step in 0..steps {
            // One thing at a time.
            if step % 8 == 0 {
                pool.now = pool.now + Duration::from_millis(2);
                pool.time_passes();
            }
            pool.single_step();
            if step % 5 == 0
                && let Some((id, request)) = pool.client.poll_control(pool.now)
            {
                let reply = pool.answer(&request);
                pool.client.on_control(pool.now, id, reply);
            }
        }
        event(&mut pool, steps);
        assert_eq!(pool.client.stats().bad_pages, 0, "after {steps} steps");
    }
}

#[test]
fn a_server_may_go_at_any_step() {
    at_each_step(|pool, steps| {
        kill(pool, steps % 6, 2);
        pool.pass(LONG);
        pool.expect_written(1);
        assert_eq!(read(pool, 3), Ok(77), "after {steps} steps");
        assert_right(pool, &[3]);
        assert_eq!(pool.write(4, 78), Ok(()), "after {steps} steps");
        assert_right(pool, &[3, 4]);
    });
}

/// What it was asked for is had elsewhere, though it never answers.
#[test]
fn a_server_may_be_silent_from_any_step_on() {
    let copied = std::cell::Cell::new(0);
    at_each_step(|pool, steps| {
        let is_source = |exchange: &Exchange| matches!(exchange.role, Role::CopyRead { .. });
        let source = pool.client.pool.sessions.exchanges.find(is_source).map(|exchange| exchange.peer.0);
        copied.set(copied.get() + usize::from(source.is_some()));
        pool.deaf = vec![source.unwrap_or(steps % 6)];
        pool.pass(2 * LONG);
        pool.expect_written(1);
        assert_eq!(read(pool, 3), Ok(77), "after {steps} steps");
        assert_right(pool, &[3]);
        assert_eq!(pool.write(4, 78), Ok(()), "after {steps} steps");
        assert_right(pool, &[3, 4]);
    });
    assert!(copied.get() > 0, "nothing was copied");
}

/// A server begins a new life while the map is being asked to have the parity leave, and the client notices before the answer. What it
/// had has its other copy, and that counts as the only one: where a new one was made, the other may go.
#[test]
fn a_server_may_go_while_parity_leaves() {
    let partings = std::cell::Cell::new(0);
    at_each_step(|pool, steps| {
        if !pool.client.pool.map.is_parting(SpaceIndex(0), SlabNo(0)) {
            return;
        }
        partings.set(partings.get() + 1);
        let copies = |pool: &Pool| {
            pool.client
                .pool
                .sessions
                .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(1)].entry)
                .iter()
                .map(|peer| peer.0)
                .collect::<Vec<_>>()
        };
        let holders = copies(pool);
        kill(pool, holders[0], 2);
        let asked = pool.client.poll_control(pool.now);
        // Who is asked nothing is asked for a sign of life now and then. Then nothing more is heard before the answer.
        while pool.client.pool.sessions.peers[PeerIndex(holders[0])].epoch() == Some(BootEpoch(1)) {
            pool.now = pool.now + Duration::from_millis(1);
            pool.time_passes();
            for _ in 0..20 {
                if pool.client.pool.sessions.peers[PeerIndex(holders[0])].epoch() == Some(BootEpoch(1)) {
                    pool.single_step();
                }
            }
        }
        if let Some((id, request)) = asked {
            assert!(pool.client.pool.map.is_parting(SpaceIndex(0), SlabNo(0)), "it waits for the answer");
            let reply = pool.answer(&request);
            pool.client.on_control(pool.now, id, reply);
        }
        // A cold group would be looked at again.
        pool.client.set_parity_after(None);
        pool.pass(LONG);
        pool.expect_written(1);
        assert_eq!(copies(pool).len(), 2, "there is room");
        kill(pool, holders[1], 2);
        pool.pass(LONG);
        assert_eq!(read(pool, 3), Ok(77), "after {steps} steps");
        assert_right(pool, &[3]);
    });
    assert!(partings.get() > 0, "parity never left");
}

#[test]
fn an_owner_may_follow_at_any_step() {
    for with_pending in [false, true] {
        at_each_step(|pool, steps| {
            let is_reported = std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).next().is_some();
            hand_over(pool, with_pending);
            pool.run();
            let now = read(pool, 3);
            assert!(now == Ok(77) || !is_reported && now == Ok(byte(3)), "{now:?} after {steps} steps");
            assert_right(pool, &[3]);
            kill(pool, steps % 6, 2);
            pool.pass(LONG);
            assert_eq!(read(pool, 3), now, "after {steps} steps");
            assert_right(pool, &[3]);
            assert_eq!(pool.write(3, 79), Ok(()));
            assert_eq!(read(pool, 3), Ok(79), "after {steps} steps");
        });
    }
}

/// A group with parity in a pool that has no room for anything more.
pub fn cold_without_room() -> Pool {
    let mut pool = Pool::new(5, 2, 4);
    pool.client.set_parity_after(Some(AFTER));
    (0..32).for_each(|page| assert_eq!(pool.write(page, byte(page)), Ok(())));
    pool.pass(LONG);
    assert_eq!((pool.client.parity(pool.space).whole, lent(&pool)), (1, 4 + 1 + 2));
    // Somebody else takes all that is left.
    let other = SpaceSpec { id: SpaceId(2), pages: 512, copies: 1, ..spec() };
    let other = pool.client.attach(&other, Generation(1), &[]).unwrap();
    let own = std::mem::replace(&mut pool.space, other);
    (0..13).for_each(|slab| assert_eq!(pool.write(slab * SLAB, 1), Ok(())));
    assert_eq!(pool.write(13 * SLAB, 1), Err(Failure::Declined));
    pool.space = own;
    pool
}

/// What is gone of one copy only is an error then, as of every slab that found room for one.
#[test]
fn without_room_a_write_goes_on_with_one_copy() {
    let mut pool = cold_without_room();
    assert_eq!(pool.write(3, 200), Ok(()));
    assert_eq!((pool.client.parity(pool.space).with_parity, read(&mut pool, 3)), (0, Ok(200)));
    (0..32).filter(|page| *page != 3).for_each(|page| assert_eq!(read(&mut pool, page), Ok(byte(page))));
}

#[test]
fn a_space_with_parity_is_removed() {
    let mut pool = cold(5);
    hand_over(&mut pool, false);
    for _ in 0..100 {
        pool.pass(Duration::from_millis(5));
        if pool.client.give_back(pool.now, pool.space) == 0 {
            break;
        }
    }
    pool.pass(LONG);
    assert_eq!((lent(&pool), pool.client.give_back(pool.now, pool.space)), (0, 0));
}

/// A server that is silent may be dead: what it has is made anew at once, and its copies leave.
#[test]
fn what_a_silent_server_has_is_made_anew() {
    for node in 0..6 {
        let mut pool = cold(6);
        pool.deaf = vec![node];
        pool.pass(Duration::from_secs(3));
        let at_node =
            map(&pool).iter().flat_map(|(_, entry)| &entry.replicas).filter(|r| r.server.0 == node as u32).count();
        assert_eq!((at_node, pool.client.parity(pool.space).whole), (0, 2), "{node}: {:?}", map(&pool));
        assert_right(&mut pool, &[]);
    }
}

/// More reads are under way at a server that falls silent than can be put together at a time: none of them waits for it.
#[test]
fn reads_do_not_wait_for_a_silent_server() {
    let mut pool = cold(6);
    let node = holders(&pool)[0];
    pool.deaf = vec![node];
    for token in 0..100 {
        pool.client.read(pool.now, pool.space, PageNo(token % 8), Class::Demand, token).unwrap();
    }
    pool.pass(2 * SILENCE);
    let mut content = [0; PAGE_SIZE];
    for _ in 0..100 {
        let event = pool.client.poll_event(&mut content);
        let Some(Event::Read { token, result: Ok(()) }) = event else { panic!("{event:?}") };
        assert_eq!(content[0], byte(token % 8));
    }
    assert!(pool.client.stats().degraded > 32);
}

/// A write to the first group, which it dissolves.
pub fn write_and_dissolve(pool: &mut Pool) {
    pool.client.set_parity_after(None);
    pool.begin_write(9, 99);
    pool.pass(LONG);
    pool.expect_written(1);
    assert_eq!(pool.client.parity(pool.space).with_parity, 1);
}

/// The one copy of a slab is damaged: what it can be put together from makes it right before it is gone.
#[test]
fn a_damaged_member_is_mended_before_its_group_is_dissolved() {
    let mut pool = cold(7);
    pool.client.pool.config.scrub_pass = None;
    let node = pool.holders(SlabNo(0))[0];
    [Some(ServerFault::FlipsBits), None].into_iter().for_each(|fault| pool.servers[node].inject(fault));
    write_and_dissolve(&mut pool);
    pool.pass(LONG);
    assert_right(&mut pool, &[9]);
    assert_eq!(read(&mut pool, 9), Ok(99));
}

/// Others that a slab would be made anew from were damaged when its server was away. It has its copy, and nothing is tried over and over.
#[test]
fn a_slab_that_could_not_be_made_anew_keeps_no_write_waiting() {
    let mut pool = cold(7);
    pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].is_stuck = true;
    let versions = pool.client.pool.map.spaces[SpaceIndex(0)].sequence;
    write_and_dissolve(&mut pool);
    assert!(pool.client.pool.map.spaces[SpaceIndex(0)].sequence < versions + 20, "grants that nobody was asked for");
    pool.pass(LONG);
    assert_eq!(
        pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.replicas.len(),
        2,
        "as any other slab, then"
    );
    assert_right(&mut pool, &[9]);
}
