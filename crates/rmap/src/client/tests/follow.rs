//! A space that one client writes and others read. Here both are the same client, which does not know it.

use super::*;
use crate::client::exchange::Answer;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::control::Replica;
use crate::units::{SlabNo, Version};

/// The index of the owner's space in the client.
const OWNER: SpaceIndex = SpaceIndex(0);

struct Followed {
    pool: Pool,
    owner: SpaceRef,
    reader: SpaceRef,
}

fn spec() -> SpaceSpec {
    SpaceSpec { id: SpaceId(1), pages: 64, copies: 2, reserve: 0, key: [2; KEY_SIZE] }
}

/// Three servers with room for four slabs each.
fn followed() -> Followed {
    let mut pool = Pool::new(3, 2, 4);
    let owner = pool.space;
    let reader = pool.client.attach_reader(&spec(), &Today::default()).unwrap();
    Followed { pool, owner, reader }
}

/// Four slabs that are one group with parity, as far as the map says; and the map before it was one.
fn of_a_group() -> (Followed, Today) {
    let mut all = followed();
    for page in [3, 11, 19, 27] {
        all.write(page, 1);
    }
    let whole = all.pool.today.clone();
    let parity = MapEntry { revision: 1, ..whole.map[3].1.clone() };
    all.pool.today.map.push((SlabNo(8), parity));
    (all, whole)
}

/// A copy that no server has: of an earlier life of its slab.
fn make_another(replica: &mut Replica) {
    replica.grant = Version::from_bits(replica.grant.bits() - 2);
}

impl Followed {
    /// The map is as the owner has it.
    fn show_map(&mut self) {
        let entries = self.pool.client.pool.map.spaces[OWNER].slabs.iter().map(|slab| slab.entry.clone());
        let map = (0..).map(SlabNo).zip(entries).filter(|(_, entry)| entry.revision > 0).collect();
        self.pool.today = Today { generation: Generation(1), sealed: false, map };
    }

    fn write(&mut self, page: u64, byte: u8) {
        self.pool.space = self.owner;
        assert_eq!(self.pool.write(page, byte), Ok(()));
        self.show_map();
    }

    fn read(&mut self, page: u64) -> Result<u8, Failure> {
        self.pool.space = self.reader;
        self.pool.read(page)
    }

    /// A read that may not end now.
    fn begin_read(&mut self, page: u64) {
        let Pool { client, now, .. } = &mut self.pool;
        client.read(*now, self.reader, PageNo(page), Class::Demand, 2).unwrap();
        self.pool.pass(Duration::from_millis(200));
    }

    /// Its result, if it has ended.
    fn result(&mut self) -> Option<Result<u8, Failure>> {
        let mut content = [0; PAGE_SIZE];
        self.pool.client.poll_event(&mut content).map(|event| match event {
            Event::Read { token: 2, result } => result.map(|()| content[0]),
            event => panic!("{event:?} for a read"),
        })
    }
}

#[test]
fn what_was_acknowledged_is_read() {
    let mut all = followed();
    assert_eq!(all.read(5), Ok(0), "there is no owner yet");
    for byte in 1..4 {
        // A new slab each time, and an old one again.
        let page = 8 * u64::from(byte);
        all.write(page, byte);
        all.write(0, byte);
        assert_eq!([all.read(page), all.read(0), all.read(page + 1)], [Ok(byte), Ok(byte), Ok(0)]);
    }
    all.pool.space = all.owner;
    all.pool.trim(0);
    all.show_map();
    assert_eq!(all.read(0), Ok(0));
    let refused = all.pool.client.write(all.pool.now, all.reader, PageNo(0), Class::Demand, &[1; PAGE_SIZE], 1);
    assert_eq!(refused, Err(Refused::ReadOnly));
    assert_eq!(all.pool.client.tenure(all.reader), Tenure::Follower);
}

/// The copy that did not get a write answers this reader as fast as ever: the map, looked at again, does not name it.
#[test]
fn a_copy_that_left_the_map_is_not_read() {
    for (fault, expected) in [(None, Ok(2)), (Some(Fault::FollowsOldMaps), Ok(1))] {
        let mut all = followed();
        all.write(3, 1);
        assert_eq!(all.read(3), Ok(1));
        let left = all.pool.holders(SlabNo(0))[0];
        all.pool.deaf = vec![left];
        all.pool.space = all.owner;
        all.pool.begin_write(3, 2);
        all.pool.pass(Duration::from_millis(100));
        all.pool.expect_written(1);
        all.show_map();
        assert!(!all.pool.holders(SlabNo(0)).contains(&left));
        // The owner does not get to give the old copy back.
        all.pool.client.pool.map.spaces[OWNER].is_taken = true;
        all.pool.client.pool.sessions.returns.iter_mut().for_each(|returns| returns.forget(OWNER));
        all.pool.deaf = all.pool.holders(SlabNo(0));
        all.pool.pass(Duration::from_millis(100));
        all.pool.deaf.clear();
        if fault.is_none() {
            all.pool.pass(Duration::from_secs(5));
        } else {
            // Those that have the write are slower to come back.
            all.pool.deaf = (0..3).filter(|server| *server != left).collect();
            all.pool.pass(Duration::from_secs(5));
        }
        all.pool.client.pool.config.fault = fault;
        all.begin_read(3);
        assert_eq!(all.result(), Some(expected), "{fault:?}");
    }
}

/// A server that gave the slab back and has it again answers for the new grant only: what the old one had is not there.
#[test]
fn another_life_of_a_slab_is_not_read_as_the_one_of_the_map() {
    let mut all = followed();
    all.write(3, 1);
    let mut old = all.pool.today.clone();
    for replica in &mut old.map[0].1.replicas {
        make_another(replica);
    }
    let today = std::mem::replace(&mut all.pool.today, old);
    all.begin_read(3);
    assert_eq!(all.result(), None, "neither zeros nor an error");
    all.pool.today = today;
    all.pool.pass(Duration::from_secs(1));
    assert_eq!(all.result(), Some(Ok(1)));
}

#[test]
fn a_map_that_cannot_be_had_is_an_error_in_time() {
    let mut all = followed();
    all.write(3, 1);
    all.pool.no_control = true;
    all.begin_read(3);
    assert_eq!(all.result(), None);
    all.pool.pass(Duration::from_secs(31));
    assert_eq!(all.result(), Some(Err(Failure::Silent)));
    all.begin_read(3);
    assert_eq!(all.result(), Some(Err(Failure::Silent)), "at once, as long as that lasts");
    all.pool.no_control = false;
    all.pool.pass(Duration::from_secs(1));
    assert_eq!(all.read(3), Ok(1));
}

#[test]
fn copies_that_are_silent_or_lost_are_an_error_in_time() {
    let mut all = followed();
    all.write(3, 1);
    all.pool.deaf = vec![0, 1, 2];
    all.pool.pass(Duration::from_secs(1));
    all.begin_read(3);
    assert_eq!(all.result(), None);
    all.pool.pass(Duration::from_secs(31));
    assert_eq!(all.result(), Some(Err(Failure::Silent)));
    all.begin_read(3);
    assert_eq!(all.result(), Some(Err(Failure::Silent)), "at once, as long as that lasts");
    all.pool.deaf.clear();
    all.pool.pass(Duration::from_secs(5));
    assert_eq!(all.read(3), Ok(1));
    all.pool.today.map[0].1 = MapEntry { revision: 9, ..MapEntry::lost() };
    assert_eq!(all.read(3), Err(Failure::Lost));
}

#[test]
fn damage_at_one_copy_is_read_from_the_other() {
    let mut all = followed();
    all.write(3, 1);
    let holders = all.pool.holders(SlabNo(0));
    all.pool.servers[holders[0]].inject(Some(ServerFault::FlipsBits));
    for _ in 0..4 {
        assert_eq!(all.read(3), Ok(1));
    }
    all.pool.servers[holders[1]].inject(Some(ServerFault::FlipsBits));
    assert_eq!(all.read(3), Err(Failure::Corrupt));
    assert!(all.pool.client.stats().bad_pages > 0);
}

/// From the moment it is sealed, a space is read as by those who came later: without a look at the map.
#[test]
fn what_is_sealed_meanwhile_is_read_on() {
    let mut all = followed();
    all.write(3, 1);
    all.write(20, 2);
    assert_eq!(all.read(3), Ok(1));
    (all.pool.today.generation, all.pool.today.sealed) = (Generation(2), true);
    assert_eq!([all.read(3), all.read(20), all.read(4), all.read(40)], [Ok(1), Ok(2), Ok(0), Ok(0)]);
    assert_eq!(all.pool.client.tenure(all.reader), Tenure::Reader);
    all.pool.no_control = true;
    assert_eq!([all.read(3), all.read(20), all.read(41)], [Ok(1), Ok(2), Ok(0)]);
}

/// Reads that begin together need one look at the map, or two: those that began while the first was under way share the next.
#[test]
fn reads_share_looks() {
    let mut all = followed();
    all.write(3, 1);
    assert_eq!(all.read(3), Ok(1));
    let asked = all.pool.client.pool.map.questions.last_id();
    for token in 0..64 {
        all.pool.client.read(all.pool.now, all.reader, PageNo(token % 8), Class::Demand, token).unwrap();
    }
    all.pool.run();
    let events = std::iter::from_fn(|| all.pool.client.poll_event(&mut [0; PAGE_SIZE])).count();
    assert_eq!((events, all.pool.client.pool.map.questions.last_id().0 - asked.0), (64, 1));
}

/// One copy says that there is nothing, and the other does not answer for the slab any more: that is an answer, whichever comes first.
#[test]
fn nothing_is_nothing_though_another_copy_is_gone() {
    let mut all = followed();
    all.write(3, 1);
    let mut today = all.pool.today.clone();
    for index in 0..2 {
        all.pool.today = today.clone();
        let replica = &mut all.pool.today.map[0].1.replicas[index];
        make_another(replica);
        // Another entry each time, so that nothing is remembered of the copies.
        all.pool.today.map[0].1.revision += 1 + index as u64;
        all.begin_read(5);
        assert_eq!(all.result(), Some(Ok(0)));
    }
    today.map[0].1.revision += 9;
    all.pool.today = today;
    assert_eq!([all.read(3), all.read(5)], [Ok(1), Ok(0)]);
}

/// Damage at one copy, and the other is only not there now: that is no reason to give up.
#[test]
fn damage_is_an_error_only_where_all_copies_are_damaged() {
    let mut all = followed();
    all.write(3, 1);
    let holders = all.pool.holders(SlabNo(0));
    all.pool.servers[holders[0]].inject(Some(ServerFault::FlipsBits));
    let today = all.pool.today.clone();
    let server = all.pool.client.pool.sessions.peers[PeerIndex(holders[1])].info().id;
    let replicas = &mut all.pool.today.map[0].1.replicas;
    let other = replicas.iter_mut().find(|replica| replica.server == server).unwrap();
    make_another(other);
    all.begin_read(3);
    assert_eq!(all.result(), None);
    all.pool.today = today;
    all.pool.pass(Duration::from_secs(1));
    assert_eq!(all.result(), Some(Ok(1)));
}

/// Reads of pages that only silent servers have take nobody's slot, and find the copies that count by now.
#[test]
fn reads_of_silent_servers_make_room() {
    let mut all = followed();
    all.write(3, 1);
    let holders = all.pool.holders(SlabNo(0));
    all.pool.deaf = vec![holders[0]];
    all.pool.pass(Duration::from_secs(1));
    let today = all.pool.today.clone();
    let silent = all.pool.client.pool.sessions.peers[PeerIndex(holders[0])].info().id;
    all.pool.today.map[0].1.replicas.retain(|replica| replica.server == silent);
    for _ in 0..3 {
        for _ in 0..100 {
            all.pool.client.read(all.pool.now, all.reader, PageNo(3), Class::Demand, 2).unwrap();
        }
        all.pool.pass(Duration::from_millis(50));
    }
    assert_eq!(all.result(), None);
    assert!(all.pool.client.pages.ops.has_room());
    all.pool.today = today;
    let mut read = 0;
    for _ in 0..20 {
        all.pool.pass(Duration::from_millis(100));
        while let Some(result) = all.result() {
            assert_eq!(result, Ok(1));
            read += 1;
        }
    }
    assert_eq!(read, 300);
}

/// A trim proves nothing: a version that a server makes up is not what others are measured by.
#[test]
fn a_made_up_trim_is_forgotten() {
    let mut all = followed();
    all.write(3, 1);
    let holders = all.pool.holders(SlabNo(0));
    all.pool.deaf = vec![holders[1]];
    all.pool.pass(Duration::from_secs(5));
    all.pool.slow = Some(holders[0]);
    all.pool.client.read(all.pool.now, all.reader, PageNo(3), Class::Demand, 2).unwrap();
    while all.pool.step() {}
    let client = &mut all.pool.client;
    let exchange = client.pool.sessions.exchanges.find(|e| e.op == crate::wire::message::Op::ReadGranted).unwrap();
    client.pool.sessions.end_exchange(exchange.id);
    let answer = Answer { status: Status::Ok, version: Version::from_bits(u64::MAX), payload: &[] };
    client.pages.follow_answered(&mut client.pool, &mut client.parity, &exchange, answer);
    assert_eq!(all.result(), Some(Ok(0)), "there is nobody else to ask");
    (all.pool.slow, all.pool.deaf) = (None, Vec::new());
    all.pool.pass(Duration::from_secs(1));
    assert_eq!(all.read(3), Ok(1));
}

/// Copies that are not there and servers that fall silent after that: nothing waits longer than it may.
#[test]
fn copies_that_are_gone_without_a_writer_are_an_error_in_time() {
    for falls_silent in [false, true] {
        let mut all = followed();
        all.write(3, 1);
        for replica in &mut all.pool.today.map[0].1.replicas {
            make_another(replica);
        }
        all.begin_read(3);
        if falls_silent {
            all.pool.deaf = vec![0, 1, 2];
        }
        all.pool.pass(Duration::from_secs(29));
        assert_eq!(all.result(), None);
        all.pool.pass(Duration::from_secs(5));
        let failure = if falls_silent { Failure::Silent } else { Failure::Lost };
        assert_eq!(all.result(), Some(Err(failure)));
    }
}

/// Of a group with parity one slab may have no copy: it is waited for. Two are lost.
#[test]
fn a_slab_that_parity_stands_for_is_waited_for() {
    let (mut all, whole) = of_a_group();
    all.pool.today.map[0].1 = MapEntry { revision: 8, ..MapEntry::lost() };
    all.begin_read(3);
    assert_eq!((all.result(), all.read(11)), (None, Ok(1)));
    all.pool.today.map[1].1 = MapEntry { revision: 8, ..MapEntry::lost() };
    all.pool.pass(Duration::from_secs(1));
    assert_eq!(all.result(), Some(Err(Failure::Lost)));
    all.pool.today.map.pop();
    all.pool.today.map[0].1 = MapEntry { revision: 9, ..whole.map[0].1.clone() };
    assert_eq!(all.read(3), Ok(1));
}

/// Reads that wait for a silent server go on, whatever becomes of the space.
#[test]
fn queued_reads_go_on_when_the_space_is_sealed_or_gone() {
    for is_removed in [false, true] {
        let mut all = followed();
        all.write(3, 1);
        all.pool.deaf = vec![0, 1, 2];
        all.pool.pass(Duration::from_secs(1));
        all.begin_read(3);
        assert!(all.result().is_none() && all.pool.client.queued() > 0);
        if is_removed {
            all.pool.client.space_gone(all.reader.0);
            assert_eq!(all.result(), Some(Err(Failure::Fenced)));
            continue;
        }
        (all.pool.today.generation, all.pool.today.sealed) = (Generation(2), true);
        all.pool.pass(Duration::from_secs(1));
        all.pool.deaf.clear();
        all.pool.pass(Duration::from_secs(5));
        assert_eq!(all.result(), Some(Ok(1)));
    }
}

/// A map that changes in several places is judged as a whole: of a group of which another slab was lost, and is there again.
#[test]
fn a_map_is_taken_as_a_whole() {
    let (mut all, whole) = of_a_group();
    make_another(&mut all.pool.today.map[0].1.replicas[0]);
    make_another(&mut all.pool.today.map[0].1.replicas[1]);
    all.pool.today.map[1].1 = MapEntry { revision: 8, ..MapEntry::lost() };
    all.begin_read(3);
    all.pool.today.map[0].1 = MapEntry { revision: 9, ..MapEntry::lost() };
    all.pool.today.map[1].1 = MapEntry { revision: 9, ..whole.map[1].1.clone() };
    // Whose look at the map it is does not matter.
    assert_eq!(all.read(19), Ok(1));
    all.pool.pass(Duration::from_secs(1));
    assert_eq!(all.result(), None, "it may come back");
    all.pool.today.map[0].1 = MapEntry { revision: 10, ..whole.map[0].1.clone() };
    all.pool.pass(Duration::from_secs(1));
    assert_eq!(all.result(), Some(Ok(1)));
}
